"""Pages and records of a link as JSON carries them on the control plane; pure.

Times are texts, because nanoseconds are above what every language reads exactly, and payloads are base64. What comes
from another space may be anything: what is no page is `MalformedRecord`. Whether a record in it may be believed is not
asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from tidings.errors import MalformedRecord
from tidings.wire.links import LinkedRecord, LinkGap, LinkPage, Token
from tidings.wire.operations import MOST
from tidings.wire.times import parse_time, record_time

#: characters of a name, an id, a signature or a time in a page: all that are true are shorter, and what is stored has
#: a bound that way
LONGEST: Final = 256
#: what a signed number of 64 bits counts in nanoseconds, as ledgers keep it
_LAST_NS: Final = 2**63 - 1
_Text = Annotated[str, msgspec.Meta(max_length=LONGEST)]


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    time: _Text
    origin: _Text
    channel: _Text
    sender: _Text
    sig: _Text
    payload: bytes
    hops: int
    mark: _Text


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    records: tuple[_Row, ...]
    through: Token
    head: int
    floor: int
    gap: LinkGap | None
    granted: int = 0


def record_row(record: LinkedRecord) -> dict[str, Any]:
    row = _Row(
        seq=record.seq,
        time=record_time(record.time_ns),
        origin=record.origin,
        channel=record.channel,
        sender=record.sender,
        sig=record.signature,
        payload=record.payload,
        hops=record.hops,
        mark=record.mark,
    )
    return msgspec.to_builtins(row)  # type: ignore[no-any-return]


def page_fields(page: LinkPage) -> dict[str, Any]:
    return {
        "records": [record_row(each) for each in page.records],
        "through": msgspec.to_builtins(page.through),
        "head": page.head,
        "floor": page.floor,
        "gap": msgspec.to_builtins(page.gap) if page.gap else None,
        "granted": page.granted,
    }


def read_page(said: Any) -> LinkPage:
    """The page in an answer."""
    try:
        found = msgspec.convert(said, _Page)
    except msgspec.ValidationError as error:
        raise MalformedRecord(f"this is no page of a link: {str(error)[:300]}") from error
    _check_texts(found.through.space, found.through.epoch, found.through.mark, found.gap.epoch if found.gap else "")
    numbers = [found.head, found.floor, found.through.seq, found.granted]
    numbers += [found.gap.oldest, found.gap.head, found.gap.agreed] if found.gap else []
    _check_counts(numbers)
    records = tuple(map(_record, found.records))
    return LinkPage(
        records=records,
        through=found.through,
        head=found.head,
        floor=found.floor,
        gap=found.gap,
        granted=found.granted,
    )


def read_records(said: Any) -> tuple[LinkedRecord, ...]:
    """The records in an answer."""
    try:
        return tuple(map(_record, msgspec.convert(said, tuple[_Row, ...])))
    except msgspec.ValidationError as error:
        raise MalformedRecord(f"these are no records of a link: {str(error)[:300]}") from error


def _record(row: _Row) -> LinkedRecord:
    _check_counts([row.seq, row.hops])
    try:
        time_ns = parse_time(row.time)
    except (ValueError, OverflowError) as error:
        raise MalformedRecord(f"record {row.seq} of a link has no time") from error
    if not 0 <= time_ns <= _LAST_NS:
        raise MalformedRecord(f"record {row.seq} of a link was said at {row.time}, when there were no links")
    return LinkedRecord(
        seq=row.seq,
        time_ns=time_ns,
        origin=row.origin,
        channel=row.channel,
        sender=row.sender,
        signature=row.sig,
        payload=row.payload,
        hops=row.hops,
        mark=row.mark,
    )


def _check_counts(numbers: Sequence[int]) -> None:
    if any(not 0 <= each <= MOST for each in numbers):
        raise MalformedRecord("a page of a link names a sequence that no log has")


def _check_texts(*texts: str) -> None:
    if any(len(each) > LONGEST for each in texts):
        raise MalformedRecord(f"a page of a link has a name of more than {LONGEST} characters")
