"""A direction of a link as a task of an event loop, with the clock it waits by."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from tidings.links.replicator import Direction


class LoopClock:
    """Waits in an event loop. One for each direction: a wake is for it alone."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()

    def now(self) -> float:
        return time.time()

    def tick(self) -> float:
        return time.monotonic()

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()


class RunningDirection:
    """Runs until it is stopped."""

    def __init__(self, direction: Direction) -> None:
        self.direction = direction
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self.direction.run(), name=f"link {self.direction.definition.link}")

    async def stop(self, deadline: float) -> bool:
        """Let it finish what it is at, for at most `deadline` seconds; then it is broken off. The ledger holds
        either way: the page it was at is handled whole or not at all. False if it was broken off."""
        task, self._task = self._task, None
        if task is None:
            return True
        self.direction.end()
        done, _ = await asyncio.wait([task], timeout=deadline)
        if not done:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        return bool(done)
