"""What the steward knows of the backstop: whether somebody makes durable copies, and how far they are.

Learnt from the state bucket, looked at once a second at most. Whoever delivers beats there; it runs while its beat
changes, timed by this steward's own clock, so that clocks which differ do not matter and a beat that was already there
when we looked for the first time proves nothing. How late it is, is timed by the same clock. The steward never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidings.server.state import Entry, StateBucket
from tidings.wire.roster import Backstop
from tidings.wire.subjects import StateKey

BEAT_KEY, FLOOR_KEY, FIGURES_KEY = StateKey.DELIVER_BEAT, StateKey.DELIVER_FLOOR, StateKey.DELIVER_FIGURES
LOOK_EVERY = 1.0
#: twice the time to live of the deliver lease
SILENT_AFTER = 6.0
MOST_WAITING = 64


@dataclass(eq=False)
class BackstopWatch:
    state: StateBucket
    clock: Callable[[], float] = time.monotonic
    #: whether the supervisor is starting it
    is_starting: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._starting = False
        self._looked = float("-inf")
        self._looking = asyncio.Lock()
        self._revision: int | None = None
        self._released = False
        self._changed = float("-inf")
        self._floor: int | None = None
        self._figures: dict[str, Any] = {}
        #: (when a head was seen first, that head), oldest first, those that are not delivered yet
        self._waiting: list[tuple[float, int]] = []

    @property
    def running(self) -> bool:
        return not self._released and self.clock() - self._changed < SILENT_AFTER

    async def look(self) -> None:
        """Learn what is new, unless that was done within the last second. Who comes while it is learnt waits for it."""
        async with self._looking:
            if self.clock() - self._looked < LOOK_EVERY:
                return
            self._looked = self.clock()
            self._starting = self.is_starting()
            self._hear(await self.state.get(BEAT_KEY))
            self._floor = await self.delivered()
            figures = await self.state.get(FIGURES_KEY)
            self._figures = figures.value if figures else {}

    async def delivered(self) -> int | None:
        """Through which sequence of the log everything was delivered, asked for now; None if nothing ever was."""
        floor = await self.state.get(FLOOR_KEY)
        return int(floor.value["seq"]) if floor else None

    def _hear(self, beat: Entry | None) -> None:
        revision = beat.revision if beat else 0
        if self._revision is not None and revision != self._revision:
            self._changed = self.clock()
        self._revision = revision
        # a holder of the lease whose query does not run delivers nothing
        self._released = beat is None or "released" in beat.value or beat.value.get("query") is False

    def fact(self, head: int) -> Backstop:
        """For agents. `behind` is None while nothing was ever delivered."""
        running = self.running
        starting = self._starting and not running
        if self._floor is None:
            return Backstop(running=running, starting=starting)
        late = round(self._late(head, self._floor), 1)
        behind = max(0, head - self._floor)
        return Backstop(running=running, behind=behind, floor=self._floor, late_s=late, starting=starting)

    def _late(self, head: int, floor: int) -> float:
        """Seconds since we saw the oldest head that is not delivered yet."""
        self._waiting = [(seen, seq) for seen, seq in self._waiting if floor < seq <= head]
        if head > floor and (not self._waiting or self._waiting[-1][1] < head):
            self._waiting.append((self.clock(), head))
        if len(self._waiting) > MOST_WAITING:  # a backstop that stands still: how long is all that matters
            del self._waiting[1::2]
        return self.clock() - self._waiting[0][0] if self._waiting else 0.0

    def health(self, head: int) -> dict[str, Any]:
        known = self.fact(head)
        return {"running": known.running, "behind": known.behind, "debts": self._figures.get("debts")}
