"""Tasks end when they are told to."""

import asyncio

from tidings.util.task_ends import end_tasks


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
