"""Retention: what may leave the log, decided here and executed by purge, never by a timer in the broker.

    floor = min(what age or size asks for, deliver floor, archive floor, floor of each live link)

A link holds the log for so long and so much only: whoever is away for longer finds a gap.

A part counts unless a `space` record switches it off; not starting it is not switching it off. Chat below the floor
goes; ruling records stay, except versions that a newer one at or below the floor has superseded. The floor is
written down before anything is removed, so a sequence missing above it is always a fault. AUD and DEAD are
`side_streams.py`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tidings.errors import ConflictError
from tidings.model.compaction import removable
from tidings.model.projection import Table
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.server.state import StateBucket
from tidings.server.streams import GateState
from tidings.steward.context import SpaceContext
from tidings.wire.rulings import Space
from tidings.wire.subjects import StateKey

STEP = 100_000
RECORD_OVERHEAD = 34
MEASURED_PER_ROUND = 64 * 1024 * 1024
LOG_FLOOR = StateKey.LOG_FLOOR
#: seconds, and the share of the budget, for which a linked space that does not ask holds the log beyond its limit
LINK_AGE, LINK_SHARE = 7 * 24 * 3600, 0.25
#: without a limit of its own a log is kept to this share of its budget, well below the gate
DEFAULT_SHARE = 0.6
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetentionFloors:
    """What each part says; None means the part does not count."""

    limit: int
    parts: dict[str, int | None] = field(default_factory=dict)

    @property
    def floor(self) -> int:
        return min([self.limit, *(seq for seq in self.parts.values() if seq is not None)])

    @property
    def held_by(self) -> str | None:
        """The part that keeps the log from shrinking, if one does."""
        waiting = {name: seq for name, seq in self.parts.items() if seq is not None and seq < self.limit}
        return min(waiting, key=lambda name: waiting[name]) if waiting else None


def counted_parts(space: Space, floors: dict[str, int]) -> dict[str, int | None]:
    """The floor of every part that counts: a part that never reported holds everything."""
    switches = {"deliver": space.parts.deliver, "archive": space.parts.archive}
    named: dict[str, int | None] = {
        name: floors.get(name, 0) if switch == "on" else None for name, switch in switches.items()
    }
    return named | {name: seq for name, seq in floors.items() if name.startswith("link.")}


@dataclass(eq=False)
class Retention:
    """Executes retention for one log. The caller holds the lease; a stale caller can only remove what may go."""

    js: JetStream
    table: Table
    state: StateBucket
    #: the first sequence that each link in force still needs, by `link.<link>`
    link_floors: Callable[[], Awaitable[dict[str, int]]] | None = None

    def __post_init__(self) -> None:
        self.link_age, self.link_share = LINK_AGE, LINK_SHARE
        s = self.table.subjects
        self.stream, self.filters = s.log_stream, (f"{s.root}.chat.>", f"{s.root}.via.>")
        self.last: RetentionFloors | None = None
        #: records it took out of the log
        self.removed = 0
        #: how far each ruling subject was cut already: the table remembers versions the log no longer has
        self._cut: dict[str, int] = {}

    async def run(self, gate: GateState, lease: int) -> int:
        """One round: compute the floor, write it down, remove what lies below. Answers how many records went."""
        self.last = await self._floors(gate)
        floor = await self._advance(self.last.floor, lease)
        removed = await self._remove_messages(floor) + await self._remove_superseded(floor)
        self.removed += removed
        return removed

    async def _floors(self, gate: GateState) -> RetentionFloors:
        space = self.table.space_at(max(self.table.head, self.table.floor))
        reported = {name: await self._part_floor(name) for name in ("deliver", "archive")}
        floors = {name: seq for name, seq in reported.items() if seq is not None}
        limit = await self._limit(space, gate)
        links = await self._bounded(await self.link_floors(), limit, space, gate) if self.link_floors else {}
        return RetentionFloors(limit, counted_parts(space, floors | links))

    async def _bounded(self, links: dict[str, int], limit: int, space: Space, gate: GateState) -> dict[str, int]:
        """What links hold, no older and no more than a link may."""
        if all(seq >= limit for seq in links.values()):
            return links
        keep = self._keep(space, gate) + int(gate.budget * self.link_share)
        most = max(await self._age_limit(self.link_age), await self._size_limit(keep, gate))
        return {name: max(seq, min(most, limit)) for name, seq in links.items()}

    async def _part_floor(self, part: str) -> int | None:
        entry = await self.state.get(archive_floor_key("log") if part == "archive" else f"floor.{part}")
        # what is owed to somebody whose mailbox is full is paid from the log, so delivery may need more than its floor
        return int(entry.value.get("needed", entry.value["seq"])) if entry else None

    async def _limit(self, space: Space, gate: GateState) -> int:
        by_age = await self._age_limit(space.keep_age) if space.keep_age is not None else 0
        return max(by_age, await self._size_limit(self._keep(space, gate), gate))

    @staticmethod
    def _keep(space: Space, gate: GateState) -> int:
        return space.keep_bytes if space.keep_bytes is not None else int(gate.budget * DEFAULT_SHARE)

    async def _age_limit(self, keep_age: int) -> int:
        head = await self._head()  # read first: what arrives while we look is younger than any limit
        cutoff = datetime.now(UTC) - timedelta(seconds=keep_age)
        return min(head + 1, await self._first_since(cutoff) or head + 1)

    async def _size_limit(self, keep: int, gate: GateState) -> int:
        """How far to cut to come below `keep`: after the oldest messages that hold the excess.

        Every message counts with its own size, and nothing is cut beyond what was measured; a round measures only so
        much, and the next one goes on.
        """
        excess, measured, limit = gate.used - keep, 0, 0
        head = await self._head()
        while excess > 0 and measured < MEASURED_PER_ROUND:
            oldest = await self._oldest_messages(limit or 1, head)
            if not oldest:
                break
            for record in oldest:
                size = stored_size(record)
                excess, measured, limit = excess - size, measured + size, record.seq + 1
                if excess <= 0:
                    break
        return limit

    async def _oldest_messages(self, start: int, head: int) -> list[StoredRecord]:
        """Messages of all kinds from `start` on, as far as the first page of each kind goes."""
        pages = [await anext(self.js.read(self.stream, each, start, head), []) for each in self.filters]
        complete = min((page[-1].seq for page in pages if page), default=0)
        return sorted((r for page in pages for r in page if r.seq <= complete), key=lambda record: record.seq)

    async def _head(self) -> int:
        return int((await self.js.info(self.stream))["state"]["last_seq"])

    async def _first_since(self, when: datetime) -> int | None:
        """The first message that was stored from then on."""
        first = [await self.js.first_after(self.stream, each, when) for each in self.filters]
        return min((seq for seq in first if seq is not None), default=None)

    async def _advance(self, floor: int, lease: int) -> int:
        """Write the floor down before acting on it. A floor never goes back, and a newer lease's word stands."""
        entry = await self.state.get(LOG_FLOOR)
        known: dict[str, Any] = entry.value if entry else {"seq": 0, "lease": 0}
        if known["lease"] > lease:
            raise ConflictError(f"the floor was written under lease {known['lease']}, ours is {lease}")
        if floor > known["seq"]:
            await self.state.put(LOG_FLOOR, {"seq": floor, "lease": lease}, entry.revision if entry else 0)
            self.table.floor = floor
        return max(floor, int(known["seq"]))

    async def _remove_messages(self, floor: int) -> int:
        """Purge in steps: publishers stall while a purge runs."""
        oldest = await self._first_since(datetime.fromtimestamp(0, UTC))
        if oldest is None or oldest >= floor:
            return 0
        removed = 0
        for below in [*range(oldest + STEP, floor, STEP), floor]:
            for each in self.filters:
                removed += await self.js.purge(self.stream, subject_filter=each, below=below)
        if removed:
            log.info("removed %d messages below %d", removed, floor)
        return removed

    async def _remove_superseded(self, floor: int) -> int:
        removed = 0
        for subject, below in removable(self.table, floor):
            if self._cut.get(subject, 0) < below:
                removed += await self.js.purge(self.stream, subject_filter=subject, below=below)
                self._cut[subject] = below
        return removed


def archive_floor_key(what: str) -> str:
    """Where the archive says how far it has `log`, `dm`, `task` or `aud`: the first sequence it still needs."""
    return f"floor.archive.{what}"


async def archive_needs(space: SpaceContext, what: str) -> int | None:
    """The first sequence of a stream that the archive still needs; None if the space does without an archive."""
    if space.table.space_at(space.position).parts.archive != "on":
        return None
    entry = await space.state.get(archive_floor_key(what))
    return int(entry.value["seq"]) if entry else 0


def stored_size(record: StoredRecord) -> int:
    """What a record takes in the broker's file, as its own accounting has it."""
    return RECORD_OVERHEAD + len(record.subject) + len(record.own_block) + len(record.payload)


async def claim_floor(state: StateBucket, lease: int) -> int:
    """Put a new lease on the floor, so that the holder before can no longer move it by what it knew. Answers it."""
    while True:
        entry = await state.get(LOG_FLOOR)
        floor = int(entry.value["seq"]) if entry else 0
        try:
            await state.put(LOG_FLOOR, {"seq": floor, "lease": lease}, entry.revision if entry else 0)
        except ConflictError:
            continue  # the holder before was just moving it
        return floor


async def read_floor(state: StateBucket) -> int:
    """The floor of the log as last written down."""
    entry = await state.get(LOG_FLOOR)
    return int(entry.value["seq"]) if entry else 0
