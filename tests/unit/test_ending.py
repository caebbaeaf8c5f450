"""Loops end when they are told to, even in the turn in which what they waited for arrives."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError

from tidings.broker.ending import already_here, end_tasks, next_message


def subscription() -> Any:
    return Subscription(SimpleNamespace(is_closed=False))


def arrive(where: Any) -> None:
    where._pending_queue.put_nowait(Msg(_client=where._conn, subject="s", data=b"x"))


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_gets_through_and_takes_no_message_with_it(turns: int) -> None:
    waited_on = subscription()
    waiting = asyncio.create_task(next_message(waited_on, 5))
    await asyncio.sleep(0.01)
    arrive(waited_on)
    for _ in range(turns):
        await asyncio.sleep(0)
    told = waiting.cancel()
    got = [each.data for each in await asyncio.gather(waiting, return_exceptions=True) if isinstance(each, Msg)]
    assert waiting.cancelled() == told, "who was told before the end stops"
    assert got + [each.data for each in already_here(waited_on)] == [b"x"], "and the message is not lost"


async def test_a_connection_that_closes_ends_the_waiting() -> None:
    waited_on = subscription()
    waiting = asyncio.create_task(next_message(waited_on, 5))
    await asyncio.sleep(0.01)
    for call in waited_on._pending_next_msgs_calls.values():
        call.cancel()
    with pytest.raises(ConnectionClosedError):
        await waiting
    waited_on._conn.is_closed = True
    with pytest.raises(ConnectionClosedError):
        await next_message(waited_on, 5)


async def test_a_message_that_arrived_is_handed_over_and_none_is_a_timeout() -> None:
    waited_on = subscription()
    arrive(waited_on)
    assert (await next_message(waited_on, 5)).data == b"x"
    with pytest.raises(TimeoutError):
        await next_message(waited_on, 0.01)


async def test_a_task_that_swallowed_the_first_word_is_told_again() -> None:
    told = 0

    async def stubborn() -> None:
        nonlocal told
        while told < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told += 1

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks([task, None]), 10)
    assert (told, task.done()) == (2, True)


async def test_what_ended_tasks_ended_with_is_nobodys_surprise() -> None:
    async def fails() -> None:
        raise ValueError("over")

    async def fails_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("at the end")

    tasks = [asyncio.create_task(fails()), asyncio.create_task(fails_at_the_end())]
    await asyncio.sleep(0)
    await end_tasks(tasks)
    assert [str(task.exception()) for task in tasks] == ["over", "at the end"]
