"""Whose control request is worked on: how many an agent may make, how many at once, and who is next. Pure, no tasks.

`Admission` is asked for every request before it is parsed, so it is cheap: a flood must cost the steward less than it
costs the flooder. An agent above the first bound is answered with a refusal that was written once; one above the second
is not answered any more and loses its credential. `FairQueue` keeps a line for each sender: a bounded number is worked
on at once, of one sender only so many, and free places go round the senders that wait. `ConcurrencyLimit` is for what
is costly whoever asks.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from tidings.errors import ConflictError

#: requests and bytes each second, and how far an agent may be ahead of that
REQUESTS, REQUESTS_AHEAD = 1_000, 1_000
BYTES, BYTES_AHEAD = 4_000_000, 8_000_000
#: Nobody sends so many who waits for answers. Time is measured where they are read, so a steward that reads slowly sees
#: a flood as fewer a second than it is: these are not far above the first.
MOST_REQUESTS, MOST_REQUESTS_AHEAD = 1_500, 2_000
MOST_BYTES, MOST_BYTES_AHEAD = 8_000_000, 16_000_000
Admitted = Literal["yes", "later", "never"]
#: senders remembered before those are forgotten who were silent for so many seconds
REMEMBERED, SILENT = 10_000, 60

T = TypeVar("T")


@dataclass(slots=True)
class _Level:
    at: float
    requests: float = 0.0
    size: float = 0.0
    all_requests: float = 0.0
    all_size: float = 0.0


class Admission:
    def __init__(self) -> None:
        self._levels: dict[str, _Level] = {}
        self._forget_at = REMEMBERED

    def judge(self, sender: str, size: int, now: float) -> Admitted:
        """May this request, of so many bytes, be worked on?"""
        level = self._levels.get(sender)
        if level is None:
            self._forget(now)
            level = self._levels[sender] = _Level(now)
        past = max(0.0, now - level.at)
        level.at = now
        level.all_requests = max(0.0, level.all_requests - past * MOST_REQUESTS) + 1
        level.all_size = max(0.0, level.all_size - past * MOST_BYTES) + size
        level.requests = max(0.0, level.requests - past * REQUESTS)
        level.size = max(0.0, level.size - past * BYTES)
        if level.all_requests > MOST_REQUESTS_AHEAD or level.all_size > MOST_BYTES_AHEAD:
            return "never"
        if level.requests + 1 > REQUESTS_AHEAD or level.size + size > BYTES_AHEAD:
            return "later"
        level.requests += 1
        level.size += size
        return "yes"

    def _forget(self, now: float) -> None:
        if len(self._levels) >= self._forget_at:
            self._levels = {sender: level for sender, level in self._levels.items() if now - level.at < SILENT}
            # where more than that are awake, looking through all for each that is new would cost their square
            self._forget_at = max(REMEMBERED, 2 * len(self._levels))


class FairQueue(Generic[T]):
    def __init__(self, most: int, each: int, waiting: int) -> None:
        self.most = most
        self.each = each
        self.waiting = waiting
        self.running: Counter[str] = Counter()
        #: senders in the order in which they are looked at next
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()

    def offer(self, sender: str, work: T) -> bool:
        """Put it at the end of its sender's line; False if that is full."""
        line = self._lines.setdefault(sender, deque())
        if len(line) >= self.waiting:
            return False
        line.append(work)
        return True

    def take(self) -> T | None:
        """The next one to begin, or None if nothing waits that may. It counts until it is released."""
        if self.running.total() >= self.most:
            return None
        for sender, line in self._lines.items():
            if self.running[sender] < self.each:
                work = line.popleft()
                self.running[sender] += 1
                self._lines.move_to_end(sender)
                if not line:
                    del self._lines[sender]
                return work
        return None

    def release(self, sender: str) -> None:
        self.running[sender] -= 1
        if not self.running[sender]:
            del self.running[sender]

    def reclaim(self, sender: str) -> None:
        """Go on after a pause. Nobody waits for that: what is left of such a request is little."""
        self.running[sender] += 1


class ConcurrencyLimit:
    """At most `at_once` at a time; of one caller at most `each`, and of all `total`, under way or waiting."""

    def __init__(self, at_once: int, each: int, refusal: str, total: int | None = None) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._each, self._total, self._refusal = each, total, refusal
        self._under_way: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for a place. ConflictError if the caller, or everybody together, has too many already."""
        is_full = self._total is not None and self._under_way.total() >= self._total
        if is_full or self._under_way[caller] >= self._each:
            raise ConflictError(self._refusal)
        self._under_way[caller] += 1
        try:
            async with self._free:
                yield
        finally:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]
