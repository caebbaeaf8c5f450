"""Waiting for messages, and ending it.

Up to Python 3.11 `asyncio.wait_for` swallows a cancellation that comes in the same turn as its answer, and nats-py
waits with it: a loop around it that was told to stop would go on, and whoever waits for its end would wait for ever.
A cancellation in the turn after it would lose the message instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Any

from nats.errors import ConnectionClosedError

#: seconds after which a task that took no notice is told again
AGAIN = 0.5


async def next_message(subscription: Any, timeout: float) -> Any:
    """The next message of a subscription without a callback.

    A cancellation always gets through, and takes no message with it: what had arrived is still `already_here`.
    """
    if subscription._conn.is_closed:
        raise ConnectionClosedError
    if subscription._pending_queue.empty():
        await _arrival(subscription, timeout)
    return next(already_here(subscription))


async def _arrival(subscription: Any, timeout: float) -> None:
    waiting = asyncio.create_task(_until_filled(subscription._pending_queue))
    calls, name = subscription._pending_next_msgs_calls, f"tidings-{id(waiting)}"
    calls[name] = waiting  # nats-py cancels these when the connection closes
    try:
        async with asyncio.timeout(timeout):
            await waiting
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ConnectionClosedError from None
    finally:
        calls.pop(name, None)
        waiting.cancel()


async def _until_filled(queue: Any) -> None:
    """Return once something is there, and leave it there."""
    queue._queue.appendleft(await queue.get())


def already_here(subscription: Any) -> Iterator[Any]:
    """What has arrived, without waiting: `next_msg` costs a task and two turns of the loop for every message."""
    queue = subscription._pending_queue
    while not queue.empty():
        message = queue.get_nowait()
        subscription._pending_size -= len(message.data)
        queue.task_done()
        yield message


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
