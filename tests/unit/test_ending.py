"""Loops end when they are told to, even in the turn in which what they waited for arrives."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tidings.broker.ending import end_tasks, next_message


def subscription() -> Any:
    return Subscription(SimpleNamespace(is_closed=False))


def arrive(where: Any) -> None:
    where._pending_queue.put_nowait(Msg(_client=where._conn, subject="s", data=b"x"))


async def test_a_cancellation_gets_through_in_the_turn_in_which_a_message_arrives() -> None:
    waited_on = subscription()
    waiting = asyncio.create_task(next_message(waited_on, 5))
    await asyncio.sleep(0.01)
    arrive(waited_on)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


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
