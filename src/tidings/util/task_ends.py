"""Ending tasks: a cancellation may be swallowed, or come twice.

Up to Python 3.11 `asyncio.wait_for` swallows a cancellation that comes in the same turn as its answer: a loop around it
that was told to stop would go on, and whoever waits for its end would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

#: seconds after which a task that took no notice is told again
AGAIN = 0.5


async def undisturbed(work: Coroutine[Any, Any, None]) -> None:
    """What a task still has to do once it was told to end, also if it is told again meanwhile. Its time is bounded."""
    task = asyncio.create_task(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    await task


async def end_tasks(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel and wait for the end, whatever they end with; a task that swallowed it is told again."""
    told = [task for task in tasks if task is not None]
    pending = {task for task in told if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN)
    await asyncio.gather(*told, return_exceptions=True)
