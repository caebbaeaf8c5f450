"""Who holds a task holds it alone: through long work, death, second sessions and restarts, nothing is run twice."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import tidings
from reviewing import PACE, book_of, claimed, connect, one, results_in, reviewers, signed_result
from tidings.contract.tasks import ClaimRequest, TaskBeatRequest, TaskDoneAnswer, TaskDoneRequest
from tidings.errors import (
    ConflictError,
    OutcomeUnknown,
    Superseded,
    UnreachableError,
)
from tidings.wire import message as wire
from tidings.wire import signing
from tidings.wire.message import Sender
from tidings_testing.processes import child, steward_child
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually, insist

WORKER = Path(__file__).parent / "task_child.py"


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with reviewers(tmp_path / "home") as running:
        yield running


@pytest.mark.requirement("T3")
@pytest.mark.requirement("X7")
async def test_a_task_held_three_times_its_acknowledgement_time_is_not_run_twice(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, space.agent("cat") as cat:
        ticket = await ada.ask("reviewer", "slow")
        job = await one(bob)
        cat.control.timeout = 10
        assert (await cat.control.call(ClaimRequest("reviewer", wait=3.5))).task is None
        await job.done("at last")
        result = await ticket.result(5)
        assert (result.text, result.attempt) == ("at last", 1)


@pytest.mark.requirement("T4")
async def test_a_worker_that_dies_loses_its_task_to_another(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("bob") as bob, connect(space, "cat") as cat:
        ticket = await ada.ask("reviewer", "one")
        seq = await claimed(bob)
        job = await one(cat)  # bob never beats
        assert (job.seq, job.attempt) == (seq, 2)
        with pytest.raises(ConflictError, match=f"given to {cat.id}"):
            await bob.control.call(TaskDoneRequest(seq, **signed_result(bob, ada.id, ticket.id)))
        await job.done("mine")
        with pytest.raises(ConflictError, match="it is done by"):
            await bob.control.call(TaskDoneRequest(seq, **signed_result(bob, ada.id, ticket.id)))
        result = await ticket.result(5)
        assert (result.text, result.worker, result.attempt) == ("mine", cat.id, 2)


async def test_a_worker_killed_with_9_loses_its_task_and_the_effect_happens_once(
    space: RealSpace, tmp_path: Path
) -> None:
    effects = tmp_path / "effects"
    async with connect(space, "ada") as ada:
        ticket = await ada.ask("reviewer", "write once")
        async with child(WORKER, str(space.home.home), "bob", "reviewer", str(effects), "hang") as victim:
            assert await victim.line() == {"text": "write once", "attempt": 1}
            victim.signal(signal.SIGKILL)
            await victim.ended()
        async with child(WORKER, str(space.home.home), "cat", "reviewer", str(effects), "work") as second:
            assert await second.line() == {"text": "write once", "attempt": 2}
            result = await ticket.result(15)
        assert (result.worker_name, result.attempt, effects.read_text()) == ("cat", 2, "write once\n")
        assert [r for r in result.reasons if "fell silent" in r], "the history says who died"
    async with space.core() as js:
        assert len(await results_in(js)) == 1


async def test_a_job_that_was_lost_is_told_to_its_program_while_it_works(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        errors: list[BaseException] = []
        bob.on("error", errors.append)
        await ada.ask("reviewer", "one", deadline=0.8)
        job = await one(bob)
        await eventually(lambda: job.lost)
        assert isinstance(errors[0], ConflictError)
        assert "deadline" in str(errors[0])


async def test_a_second_session_of_a_worker_waits_for_the_first_and_never_runs_its_task(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as older, connect(space, "bob") as newer:
        first, second = await ada.ask("reviewer", "one"), await ada.ask("reviewer", "two")
        job = await one(older)
        waiting = asyncio.create_task(one(newer))
        await asyncio.sleep(PACE.task_silence * 1.2)
        assert not waiting.done(), "the older session beats, so it keeps its task, and an agent holds one"
        await job.done("by the older")
        other = await waiting
        assert (job.message.id, other.message.id) == (first.id, second.id)
        await other.done("by the newer")
        assert [(await t.result(5)).text for t in (first, second)] == ["by the older", "by the newer"]


async def test_a_session_that_fell_silent_is_superseded_and_its_result_is_not_taken(space: RealSpace) -> None:
    """The older session hangs: its beats stop. The newer one of the same agent gets the task; one result counts."""
    async with connect(space, "ada") as ada, connect(space, "bob") as older, connect(space, "bob") as newer:
        errors: list[BaseException] = []
        older.on("error", errors.append)
        ticket = await ada.ask("reviewer", "one")
        job = await one(older)
        assert job._beating is not None
        job._beating.cancel()
        taken = await one(newer)
        assert (taken.seq, taken.attempt) == (job.seq, 1), "taken over before it counts as lost"
        with pytest.raises(Superseded, match="another session of the same agent has it"):
            await older.call(TaskBeatRequest(job.seq, session=older.transport.tasks.session))
        with pytest.raises(Superseded):
            await job.fail("I am late", retry=False)
        assert job.lost is not None
        await taken.done("by the newer")
        late = result_of(older, ada.id, ticket.id)
        with pytest.raises(Superseded, match="did it"):
            await older.call(TaskDoneRequest(job.seq, session=older.transport.tasks.session, **late))
        assert (await ticket.result(5)).text == "by the newer"
    async with space.core() as js:
        assert len(await results_in(js)) == 1


def result_of(worker: tidings.DirectAgent, asker: str, task_id: str) -> dict[str, Any]:
    own = worker.transport.identity
    payload = wire.compose(Sender(own.id, own.name), text="late", reply_to=task_id).raw
    sig = signing.sign(own.key, own.space_id, "result", f"{asker}.{task_id}", payload)
    return {"result": payload, "sig": sig}


async def test_a_hold_survives_a_restart_of_the_steward(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, space.agent("cat") as cat:
        ticket = await ada.ask("reviewer", "one")
        job = await one(bob)
        await space.stop_steward()
        await asyncio.sleep(1.2)  # past the acknowledgement time: the broker would deliver it again
        await space.start_steward(PACE)
        assert (await cat.control.call(ClaimRequest("reviewer", wait=2.5))).task is None
        await job.done("still mine")
        result = await ticket.result(5)
        assert (result.text, result.attempt) == ("still mine", 1)


async def test_holds_survive_a_steward_killed_with_9_and_beats_resume_with_the_next(space: RealSpace) -> None:
    await space.stop_steward()
    async with contextlib.AsyncExitStack() as stack:
        doomed = await stack.enter_async_context(steward_child(space.home))
        ada = await stack.enter_async_context(connect(space, "ada"))
        bob = await stack.enter_async_context(connect(space, "bob"))
        ticket = await ada.ask("reviewer", "long")
        job = await one(bob)
        doomed.signal(signal.SIGKILL)
        await doomed.ended()
        await space.start_steward(PACE, after=doomed.holder)
        held = book_of(space).open[ticket.seq]
        assert (held.worker, held.session, held.attempt) == (bob.id, bob.transport.tasks.session, 1)
        # the next steward is quicker to call a worker silent; bob still beats at the pace of the one that died
        told = await insist(lambda: bob.call(TaskBeatRequest(job.seq, session=bob.transport.tasks.session)))
        assert told.state == "held"
        await job.done("through it all")
        result = await ticket.result(5)
        assert (result.text, result.attempt) == ("through it all", 1)


@pytest.mark.parametrize("failpoint", ["tasks.after_hold", "tasks.after_result"])
async def test_a_steward_killed_while_a_task_is_given_or_settled_leaves_one_result(
    space: RealSpace, failpoint: str
) -> None:
    async with connect(space, "ada") as ada, space.agent("bob") as bob, space.core() as js:
        ticket = await ada.ask("reviewer", "one")
        await space.stop_steward()
        bob.control.timeout = 3

        async def run() -> TaskDoneAnswer:
            seq = await claimed(bob)
            return await bob.control.call(TaskDoneRequest(seq, **signed_result(bob, ada.id, ticket.id)))

        async with steward_child(space.home, failpoint=f"{failpoint}:kill") as doomed:
            with pytest.raises((OutcomeUnknown, UnreachableError)):
                await run()
            assert await doomed.ended() == -signal.SIGKILL
        async with steward_child(space.home, after=doomed.holder):
            done = signed_result(bob, ada.id, ticket.id)
            if failpoint == "tasks.after_hold":
                await insist(run)
            told = await insist(lambda: bob.control.call(TaskDoneRequest(ticket.seq, **done)))
            assert told.state == "done"
            result = await ticket.result(10)
        assert (result.text, result.attempt) == ("yes", 1)
        assert len(await results_in(js)) == 1


async def test_a_broker_killed_with_9_does_not_give_a_held_task_twice(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, connect(space, "cat") as cat:
        ticket = await ada.ask("reviewer", "one")
        job = await one(bob)
        waiting = asyncio.create_task(one(cat))
        await space.restart_broker(kill=True)
        await asyncio.sleep(2)
        assert not waiting.done()
        await job.done("survived")
        result = await ticket.result(15)
        assert (result.text, result.attempt) == ("survived", 1)
        later = await ada.ask("reviewer", "two", timeout=10)
        assert (await waiting).message.id == later.id


async def test_a_program_cancelled_in_the_body_of_its_loop_gives_its_job_back_at_once(space: RealSpace) -> None:
    """Whatever still refers to the loop, as a traceback does: here it is kept on purpose."""
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, connect(space, "cat") as cat:
        loop, in_hand = bob.work("reviewer"), asyncio.Event()

        async def program() -> None:
            async for _job in loop:
                in_hand.set()
                await asyncio.Event().wait()

        running = asyncio.create_task(program())
        ticket = await ada.ask("reviewer", "look")
        await asyncio.wait_for(in_hand.wait(), 10)
        (job,) = bob.transport.tasks._open.values()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await eventually(lambda: job.settled and not bob.transport.tasks._open)
        assert job._beating is not None
        await eventually(job._beating.done)
        again = await one(cat)
        assert (again.message.id, again.attempt) == (ticket.id, 2)
        await again.done("by another")
        assert (await ticket.result(5)).worker_name == "cat"
