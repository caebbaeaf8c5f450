"""Waiting that can be ended.

Up to Python 3.11 `asyncio.wait_for` swallows a cancellation that comes in the same turn as its answer, and nats-py
waits with it: a loop around it that was told to stop would go on, and whoever waits for its end would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

#: seconds after which a task that took no notice is told again
AGAIN = 0.5


async def next_message(subscription: Any, timeout: float) -> Any:
    """The next message of a subscription without a callback. A cancellation always gets through."""
    async with asyncio.timeout(timeout):
        return await subscription.next_msg(timeout=None)


async def end_tasks(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel and wait for the end, whatever they end with; a task that swallowed it is told again."""
    told = [task for task in tasks if task is not None]
    pending = {task for task in told if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN)
    await asyncio.gather(*told, return_exceptions=True)
