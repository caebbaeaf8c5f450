"""A snapshot of the table for people and programs: plain values, ready for JSON.

It shows the state *after* the record at its sequence, that is, what the next message would meet. User credentials
(`jwt`) are left out; everything else in it is already known to whoever may read the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tidings.contract.admin import TableView
from tidings.model.membership import Interval
from tidings.wire.rulings import Access, Channel, Lease, Link, RulingRecord, Space


def view_of(
    *,
    seq: int,
    steward_key: str,
    space: Space,
    lease: Lease | None,
    intervals: Iterable[Interval],
    access: Mapping[str, Access | None],
    channels: Mapping[str, Channel | None],
    links: Mapping[str, Link | None],
) -> TableView:
    return TableView(
        seq=seq,
        steward_key=steward_key,
        space=_plain(space),
        lease=_plain(lease) if lease else None,
        members=_members(intervals, seq),
        access=_in_force(access),
        channels=_in_force(channels),
        links=_in_force(links),
    )


def _members(intervals: Iterable[Interval], seq: int) -> dict[str, dict[str, int]]:
    members: dict[str, dict[str, int]] = {}
    for interval in intervals:
        if interval.joined <= seq and (interval.left is None or seq < interval.left):
            members.setdefault(interval.owner, {}).setdefault(interval.pattern, interval.joined)
    return members


def _in_force(records: Mapping[str, RulingRecord | None]) -> dict[str, dict[str, Any]]:
    return {key: _plain(record) for key, record in sorted(records.items()) if record is not None}


def _plain(record: RulingRecord) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(record)
    fields.pop("jwt", None)
    return fields
