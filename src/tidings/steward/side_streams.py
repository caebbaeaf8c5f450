"""AUD and DEAD are kept bounded: receipts and results go by age once archived, dead letters by age and number.

What goes is counted, whose letters go is told, and a stream that is held full by the archive is said.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

from tidings.steward.context import SpaceContext
from tidings.steward.dead_letters import DeadLetters
from tidings.steward.retention import archive_needs
from tidings.steward.store_watch import StoreWatch
from tidings.steward.task_holds import TaskHolds

DAY = 24 * 3600
RECEIPTS_KEPT = 30 * DAY
DEAD_KEPT, MOST_DEAD = 90 * DAY, 10_000
#: a side stream this full loses its oldest quarter however young, because a full one takes nothing new
SIDE_FULL = 0.8
log = logging.getLogger(__name__)


class SideStreams:
    def __init__(self, space: SpaceContext, letters: DeadLetters, holds: TaskHolds, store: StoreWatch) -> None:
        self.space = space
        self.letters = letters
        self.book = holds.book
        self.store = store
        self.removed: dict[str, int] = {"receipts": 0, "dead": 0}
        #: streams that are nearly full and may not be cut
        self.held: dict[str, str] = {}

    async def run(self) -> None:
        space = self.space.table.space_at(self.space.position)
        keep = RECEIPTS_KEPT if space.keep_receipts is None else space.keep_receipts
        needed = await archive_needs(self.space, "aud")
        self.removed["receipts"] += await self._cut_receipts(datetime.now(UTC) - timedelta(seconds=keep), needed)
        self.removed["dead"] += await self._cut_letters()

    async def _cut_receipts(self, cutoff: datetime, needed: int | None) -> int:
        stream = self.space.subjects.audit_stream
        info = await self.space.js.info(stream)
        self.held.pop(stream, None)
        below = max(await self._older_than(stream, cutoff, info), _crowded(info))
        if needed is not None and below > needed:
            if info["state"]["bytes"] >= SIDE_FULL * info["config"]["max_bytes"]:
                self.held[stream] = "archive"
            below = needed
        return await self._purge(stream, below, info)

    async def _cut_letters(self) -> int:
        """Those that are too old go once a day, so that their owners hear of them together."""
        stream = self.space.subjects.dead_stream
        info = await self.space.js.info(stream)
        self.letters.limit = int(info["config"]["max_bytes"])
        midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        old = await self._older_than(stream, midnight - timedelta(seconds=DEAD_KEPT), info)
        below = max(old, _crowded(info, MOST_DEAD))
        gone: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for letter in self.letters.below(below):
            gone[letter.owner][letter.kind] += 1
        for dead in self.book.dead_below(below):
            gone[dead.asker]["task"] += 1
        why = f"after {DEAD_KEPT // DAY} days" if below == old else "because the space had more than it keeps"
        await self.store.note_letters_gone(gone, why)
        removed = await self._purge(stream, below, info)
        self.letters.forget_below(below)
        self.book.drop_below(below)
        return removed

    async def _purge(self, stream: str, below: int, info: dict[str, Any]) -> int:
        if below <= info["state"]["first_seq"]:
            return 0
        removed = await self.space.js.purge(stream, subject_filter=f"{self.space.subjects.root}.>", below=below)
        if removed:
            log.info("removed %d records of %s below %d", removed, stream, below)
        return removed

    async def _older_than(self, stream: str, cutoff: datetime, info: dict[str, Any]) -> int:
        if not info["state"]["messages"]:
            return 0
        first = await self.space.js.first_after(stream, f"{self.space.subjects.root}.>", cutoff)
        return int(info["state"]["last_seq"]) + 1 if first is None else first

    def problems(self) -> list[str]:
        return [
            f"{stream} is nearly full and waits for the {part}: `tidings space set {part}=off`, or start it"
            for stream, part in self.held.items()
        ]


def _crowded(info: dict[str, Any], most: int | None = None) -> int:
    """Below which sequence to cut a stream that holds too much, whatever its age; 0 if it does not."""
    state = info["state"]
    if not state["messages"]:
        return 0
    first, count = int(state["first_seq"]), int(state["messages"])
    span = int(state["last_seq"]) - first + 1
    if most is not None and count > most + most // 8:  # a few at a time would be told one by one
        return first + span * (count - most) // count
    if state["bytes"] >= SIDE_FULL * info["config"]["max_bytes"]:
        return first + max(1, span // 4)
    return 0
