"""How far each linked space has handled the log: what retention keeps for it, and what waits for it.

It is said by the other space with every page, kept in memory, and written to the state bucket now and then. A link that
never asked holds the log from its record on. Whoever stays away holds it for a while only: retention bounds that by age
and by bytes, and the other space finds a gap then. What is written of a link that ended counts no more.

`LinkPushes` is for whoever looks, and decides nothing: what was shared and is not handled is looked for from where the
other space said it is, once for each place. What is said in channels that are not shared never counts as waiting.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from tidings.contract.links import PeerProgress
from tidings.errors import ConflictError
from tidings.steward.context import SpaceContext
from tidings.steward.link_records import links_in_force, links_on
from tidings.steward.link_scope import LinkScope
from tidings.wire.rulings import Link

#: records of a filter that are read at a time for one that is shared; and in one go, the next one goes on from there
LOOKED_AT, MOST_LOOKED_AT = 50, 1_000


def link_floor_key(link: str) -> str:
    return f"floor.link.{link}"


@dataclass(slots=True)
class LinkFloors:
    space: SpaceContext
    #: link -> first sequence that it still needs, as it last said
    _said: dict[str, int] = field(default_factory=dict)
    #: link -> when it said so, in seconds
    _at: dict[str, float] = field(default_factory=dict)
    #: what is written
    _written: dict[str, int] = field(default_factory=dict)
    #: links that ended -> the record that says so; nothing is left to write of them
    _ended: dict[str, int] = field(default_factory=dict)

    def note(self, link: str, needed: int) -> None:
        """A page was asked for. Whoever began anew needs more than it did."""
        self._said[link] = needed
        self._at[link] = time.time()

    async def said(self, link: str, since: int) -> tuple[int, float | None]:
        """The first sequence that it still needs, and when it said so to this steward. `since`: its record's."""
        return await self._floor(link, since), self._at.get(link)

    async def floors(self) -> dict[str, int]:
        """Of every link that shares something now, by the name that retention has for it."""
        return {
            f"link.{link}": await self._floor(link, seq) for link, seq, record in links_on(self.space) if record.shares
        }

    async def _floor(self, link: str, since: int) -> int:
        if link not in self._said:
            entry = await self.space.state.get(link_floor_key(link))
            known = int(entry.value["seq"]) if entry is not None and not entry.value.get("ended") else since
            self._said[link] = self._said.get(link, known)
        return self._said[link]

    async def run(self) -> None:
        """Write down what changed, and that links ended."""
        on = {link for link, _, record in links_on(self.space) if record.shares}
        for link, seq in list(self._said.items()):
            if link in on and self._written.get(link) != seq:
                await self._put(link, {"seq": seq})
                self._written[link] = seq
        for link, seq, _ in list(links_in_force(self.space)):
            if link in on:
                self._ended.pop(link, None)
            elif self._ended.get(link) != seq:
                await self._end(link)
                self._ended[link] = seq

    async def _end(self, link: str) -> None:
        self._said.pop(link, None)
        self._written.pop(link, None)
        entry = await self.space.state.get(link_floor_key(link))
        if entry is not None and not entry.value.get("ended"):
            await self._put(link, {"seq": 0, "ended": True})

    async def _put(self, link: str, value: dict[str, object]) -> None:
        key = link_floor_key(link)
        while True:
            entry = await self.space.state.get(key)
            try:
                await self.space.state.put(key, value, entry.revision if entry else 0)
            except ConflictError:
                continue  # a steward before us wrote its last word
            return


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

    async def of(self, link: str, seq: int, record: Link, head: int) -> PeerProgress | None:
        """Of one link, whose record is at `seq`; None if it shares nothing."""
        if record.state != "on" or not record.shares:
            self._found.pop(link, None)
            return None
        needed, asked_at = await self.floors.said(link, seq)
        since = await self._waiting_since(link, record, needed, head)
        behind = max(0, head - needed + 1) if since is not None else 0
        return PeerProgress(handled=needed - 1, asked_at=asked_at, lag_records=behind, waiting_since=since)

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
