"""A deadline ends a task wherever it is: held, queued, or with a steward that died."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tidings
from reviewing import PACE, book_of, connect, one, reviewers
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.contract.tasks import ClaimRequest, TaskBeatRequest
from tidings.errors import (
    ConflictError,
    TaskDead,
)
from tidings.nats.jetstream import JetStream
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with reviewers(tmp_path / "home") as running:
        yield running


async def test_a_deadline_ends_a_hold_however_the_worker_beats(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        held = await ada.ask("reviewer", "held", deadline=1.0)
        job = await one(bob)
        with pytest.raises(TaskDead, match=r"dead letter \(deadline\)") as told:
            await held.result(6)
        assert isinstance(told.value.result, tidings.TaskResult)
        assert (told.value.result.cause, told.value.result.attempt) == ("deadline", 1)
        with pytest.raises(ConflictError, match="deadline"):
            await job.done("too late")
        for _ in range(3):
            with pytest.raises(ConflictError, match="deadline"):
                await bob.call(TaskBeatRequest(job.seq))


async def test_a_task_nobody_took_in_time_fails_its_asker_at_once_and_names_the_deadline(space: RealSpace) -> None:
    async with connect(space, "ada") as ada:
        ticket = await ada.ask("nobody", "waiting", deadline=0.5)
        with pytest.raises(TaskDead, match=r"for nobody is a dead letter \(deadline\): .*nobody took it in time"):
            await ticket.result(10)


async def test_a_task_expires_in_the_queue_although_nobody_looks_and_the_steward_was_away(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.core() as js:
        ticket = await ada.ask("nobody", "waiting", deadline=1.0)
        later = await ada.ask("nobody", "much later", deadline=3_600)
        await space.stop_steward()
        await asyncio.sleep(max(0.0, 1.05 - (time.time() - (await record_time(js, ticket.seq)))))
        await space.start_steward(PACE)
        await eventually(lambda: ticket.seq in book_of(space).outcomes)
        settled = book_of(space).outcomes[ticket.seq]
        assert (settled.cause, settled.attempt) == ("deadline", 0)
        assert later.seq not in book_of(space).outcomes
        await space.stop_steward()
        await space.start_steward(PACE)
        assert (await ticket.status(0)).cause == "deadline", "it is still known"
        assert (await later.status(0)).state == "queued"


async def record_time(js: JetStream, seq: int) -> float:
    record = await js.at("TASK_main", seq)
    assert record is not None
    return record.time_ns / 1e9


async def test_what_expired_unclaimed_leaves_the_queue_and_is_not_given_to_a_later_worker(space: RealSpace) -> None:
    async with space.administer() as admin:
        await admin.call(ChangeSpaceRequest(parts=PartsChange(archive="off")))
    async with connect(space, "ada") as ada, space.core() as js:
        gone = await ada.ask("painter", "gone", deadline=0.3)
        good = await ada.ask("painter", "good")
        with pytest.raises(TaskDead):
            await gone.result(10)

        async def left() -> bool:
            return await js.at("TASK_main", gone.seq) is None

        await eventually(left, what="nobody ever pulled it, and still it is purged")
        await space.add("pat", roles=["painter"])
        async with connect(space, "pat") as pat:
            job = await one(pat, "painter")
            assert job.message.id == good.id
            await job.done("painted")


async def test_a_deadline_that_passes_after_a_steward_died_with_the_task_in_hand_is_noticed(space: RealSpace) -> None:
    """Pulled by a steward that then went, given to nobody: only the broker knows that it was never settled."""
    async with connect(space, "ada") as ada, space.agent("bob") as bob:
        assert (await bob.control.call(ClaimRequest("reviewer", wait=0.1))).task is None
        ticket = await ada.ask("reviewer", "pulled", deadline=2.0)
        # the pull of bob's claim is still under way and takes it in; bob has gone
        await eventually(lambda: ticket.seq in book_of(space).open)
        await space.stop_steward()
        await space.start_steward(PACE)
        assert ticket.seq not in book_of(space).open
        with pytest.raises(TaskDead, match="deadline"):
            await ticket.result(15)
