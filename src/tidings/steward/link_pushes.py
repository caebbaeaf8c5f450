"""How far linked spaces have handled this log, for whoever looks: what each last said, and what waits for it.

What was shared and is not handled is looked for from where it said it is, once for each place: what is said in channels
that are not shared never counts as waiting. Nothing is decided by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidings.steward.context import SpaceContext
from tidings.steward.link_floors import LinkFloors
from tidings.steward.link_scope import LinkScope
from tidings.wire.rulings import Link

#: records of a filter that are read at a time for one that is shared; and in one go, the next one goes on from there
LOOKED_AT, MOST_LOOKED_AT = 50, 1_000


class _Waiting(NamedTuple):
    """`since`: when the first record from `needed` on was stored that is shared, in seconds; None: none is, up to
    `through`."""

    needed: int
    through: int
    since: float | None


@dataclass(slots=True)
class LinkPushes:
    space: SpaceContext
    floors: LinkFloors
    _found: dict[str, _Waiting] = field(default_factory=dict)

    async def of(self, link: str, seq: int, record: Link, head: int) -> dict[str, Any] | None:
        """Of one link, whose record is at `seq`; None if it shares nothing."""
        if record.state != "on" or not record.shares:
            self._found.pop(link, None)
            return None
        needed, asked_at = await self.floors.said(link, seq)
        since = await self._waiting_since(link, record, needed, head)
        behind = max(0, head - needed + 1) if since is not None else 0
        return {"handled": needed - 1, "asked_at": asked_at, "lag_records": behind, "waiting_since": since}

    async def _waiting_since(self, link: str, record: Link, needed: int, head: int) -> float | None:
        known = self._found.get(link)
        if known is not None and known.needed == needed:
            if known.since is not None or known.through >= head:
                return known.since
            start = known.through + 1
        else:
            start = needed
        since, reach = await self._first_shared(link, record, max(start, self.space.table.floor, 1), head)
        self._found[link] = _Waiting(needed, reach, since)
        return since

    async def _first_shared(self, link: str, record: Link, start: int, head: int) -> tuple[float | None, int]:
        """When the first was stored that is shared, and up to where it was looked for."""
        scope = LinkScope(self.space.subjects, self.space.info.id, self.space.table.rules, link, record)
        stream, times, reach = self.space.subjects.log_stream, list[int](), head
        for each in scope.filters():
            looked = 0
            async for records in self.space.js.read(stream, each, start, head, page=LOOKED_AT):
                found = next((one.time_ns for one in records if scope.shared(one) is not None), None)
                looked += len(records)
                if found is not None:
                    times.append(found)
                    break
                if looked >= MOST_LOOKED_AT:
                    reach = min(reach, records[-1].seq)
                    break
        return min(times) / 1e9 if times else None, reach
