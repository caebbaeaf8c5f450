"""Tasks end to end: one worker each, a result for whoever asked, dead letters, roles and figures."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidings
from reviewing import PACE, book_of, claimed, connect, one, reviewers, steward_of
from tidings.cli.running import task_words
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.contract.agents import HealthRequest
from tidings.contract.mail import DeadLetterRequest, DeadLettersRequest, DropLetterRequest, RetryLetterRequest
from tidings.contract.tasks import ClaimRequest, RoleAnswer, RoleRequest, TaskFailRequest
from tidings.errors import (
    DeniedError,
    QueueFull,
    TaskDead,
    UsageError,
)
from tidings.steward import task_holds, tasks
from tidings_testing.history import History
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with reviewers(tmp_path / "home") as running:
        yield running


@pytest.mark.requirement("T1")
async def test_one_of_two_workers_gets_each_task_once_and_the_asker_its_signed_result(space: RealSpace) -> None:
    done: list[tuple[str, str]] = []
    claimed: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    history = History()
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, connect(space, "cat") as cat:

        async def review(worker: tidings.DirectAgent) -> None:
            async for job in worker.work("reviewer"):
                done.append((worker.name, job.text))
                claimed[worker.name].append((job.seq, job.message.id))
                history.effect(job.message.id, worker.name)
                assert (job.asker.id, job.attempt) == (ada.id, 1)
                await job.done(f"{job.text} by {worker.name}")

        reviewing = [asyncio.create_task(review(bob)), asyncio.create_task(review(cat))]
        tickets = []
        for n in range(20):
            confirmed = history.sending("ada", "reviewer")
            tickets.append(await ada.ask("reviewer", f"task {n}", id=confirmed.id))
            confirmed(tickets[-1].seq)
        results = await asyncio.wait_for(asyncio.gather(*(t.result(20) for t in tickets)), 30)
        for task in reviewing:
            task.cancel()
        await asyncio.gather(*reviewing, return_exceptions=True)
    for held in claimed.values():
        assert held == sorted(held), "each got them in their order; which of two is quicker to begin nobody promises"
    for seq, mid in sorted(task for held in claimed.values() for task in held):
        history.read("reviewer", "ada", "reviewer", mid, seq)
    history.owed("reviewer", "reviewer")
    history.check()
    assert {name for name, _ in done} == {"bob", "cat"}, "both were given some"
    for n, result in enumerate(results):
        assert (result.state, result.text) == ("done", f"task {n} by {result.worker_name}")
        assert result.message is not None
        assert result.message.sender.id == result.worker
    assert all(ticket.warnings == () for ticket in tickets)


@pytest.mark.requirement("T9")
async def test_a_worker_holds_one_task_and_a_second_claim_answers_the_same_hold(space: RealSpace) -> None:
    """F24: nobody can hoard tasks."""
    async with connect(space, "ada") as ada, space.agent("bob") as bob:
        first, _second = await ada.ask("reviewer", "one"), await ada.ask("reviewer", "two")
        claim = await bob.control.call(ClaimRequest("reviewer", wait=2))
        again = await bob.control.call(ClaimRequest("reviewer", wait=2))
        assert claim == again
        assert claim.task is not None
        assert (claim.task.seq, claim.attempt) == (first.seq, 1)


@pytest.mark.requirement("T5")
async def test_who_does_not_hold_the_role_gets_no_task(space: RealSpace) -> None:
    async with space.agent("ada") as ada:
        with pytest.raises(DeniedError, match="does not hold the role reviewer"):
            await ada.control.call(ClaimRequest("reviewer", wait=1))
    async with connect(space, "ada") as ada:
        with pytest.raises(DeniedError):
            await anext(aiter(ada.work("reviewer")))


async def test_a_claim_that_finds_nothing_is_answered(space: RealSpace) -> None:
    async with space.agent("bob") as bob:
        assert (await bob.control.call(ClaimRequest("reviewer", wait=0.5))).task is None
        with pytest.raises(UsageError, match="`wait`: expected float <= 20"):
            await bob.control.call(ClaimRequest("reviewer", wait=60))


@pytest.mark.requirement("T6")
async def test_a_task_that_keeps_failing_becomes_a_dead_letter_that_says_why(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        ticket = await ada.ask("reviewer", "hard")
        attempts = []
        async with asyncio.timeout(20):
            async for job in bob.work("reviewer"):
                attempts.append(job.attempt)
                if await job.fail(f"no luck {job.attempt}") == "dead":
                    break
        result = await ticket.status(5)
        assert attempts == [1, 2, 3, 4, 5]
        assert (result.state, result.cause) == ("dead", "failed")
        assert result.reasons[-1] == "attempt 5: no luck 5"


async def test_large_dead_letters_of_one_asker_do_not_push_out_those_of_others(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_holds, "MOST_DEAD_WHOLE", 2)
    async with connect(space, "ada") as ada, space.agent("ada") as raw, space.agent("bob") as bob:
        for text in ("x" * 20_000, "x" * 20_000, "x" * 20_000, "small"):
            ticket = await ada.ask("reviewer", text)
            seq = await claimed(bob, 3)
            assert seq == ticket.seq
            await bob.control.call(TaskFailRequest(seq, reason="no", retry=False))
        dead = [each.seq for each in reversed((await raw.control.call(DeadLettersRequest())).dead)]
        kept = [(await raw.control.call(DeadLetterRequest(seq=seq))).record is not None for seq in dead]
        assert kept == [True, True, False, True]


async def test_of_an_asker_with_too_many_dead_letters_its_own_oldest_go(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_holds, "MOST_DEAD_EACH", 2)
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, space.agent("bob") as worker:
        asked = []
        for asker in (bob, ada, ada, ada):
            asked.append(await asker.ask("reviewer", "no"))
            seq = await claimed(worker, 3)
            await worker.control.call(TaskFailRequest(seq, reason="no", retry=False))
        kept = [each.seq for each in (await worker.control.call(DeadLettersRequest())).dead]
        assert sorted(kept) == sorted(ticket.seq for ticket in (asked[0], asked[2], asked[3]))
        assert (await asked[1].status(5)).state == "dropped"
        told = steward_of(space).store.told_to(ada.id)
        assert [(each.count, "1 of tasks" in each.text) for each in told] == [(1, True)]
        async with space.core() as js:
            left = await js.subjects_of(space.subjects.dead_stream, f"{space.subjects.root}.dead.task.*")
        assert sorted(left) == sorted(space.subjects.dead("task", str(seq)) for seq in kept)


async def test_in_a_small_space_whoever_keeps_failing_on_large_tasks_loses_its_own_letters_and_nobody_elses(
    tmp_path: Path,
) -> None:
    """Each letter is within what one asker may have; together they would fill the stream of all."""
    async with (
        reviewers(tmp_path / "small", budget=16 * 1024 * 1024) as space,
        connect(space, "ada") as ada,
        connect(space, "bob") as bob,
        space.agent("bob") as worker,
    ):
        first = await bob.ask("reviewer", "mine")
        asked = [first, *[await ada.ask("reviewer", f"{n} " + "x" * 60_000) for n in range(18)]]
        for ticket in asked:
            assert await claimed(worker, 3) == ticket.seq
            await worker.control.call(TaskFailRequest(ticket.seq, reason="no", retry=False))
        sides, limit = steward_of(space).sides, 1024 * 1024
        await sides.run()
        assert sides.removed["dead"] == 0, "the stream was never crowded"
        async with space.core() as js:
            assert (await js.info(space.subjects.dead_stream))["state"]["bytes"] < limit // 4
        kept = {each.seq for each in (await worker.control.call(DeadLettersRequest())).dead}
        assert {first.seq, asked[-1].seq} <= kept
        assert (await worker.control.call(DeadLetterRequest(seq=first.seq))).record is not None
        store = steward_of(space).store
        gone = sum(each.count or 0 for each in store.told_to(ada.id))
        assert (gone, store.told_to(bob.id)) == (len(asked) - len(kept), [])
        await space.stop_steward()
        await space.start_steward(PACE)
        sizes = {each.seq: each.size for each in book_of(space).dead_of(ada.id)}
        assert all(size > 60_000 for size in sizes.values()), "the next steward knows what they take"


async def test_a_job_that_is_left_is_tried_again_and_one_failed_for_good_is_not(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        ticket = await ada.ask("reviewer", "left")
        seen = []
        async with asyncio.timeout(15):
            async for job in bob.work("reviewer"):
                seen.append(job.attempt)
                if job.attempt == 2:
                    assert await job.fail("impossible", retry=False) == "dead"
                    break
        result = await ticket.status(5)
        assert (seen, result.cause) == ([1, 2], "failed")
        assert result.reasons == ("attempt 1: left unfinished", "attempt 2: impossible")


@pytest.mark.requirement("T7")
async def test_a_task_that_was_only_looked_at_has_all_its_attempts(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        ticket = await ada.ask("reviewer", "look at me")
        for _ in range(7):
            job = await bob.claim("reviewer", wait=10)
            assert job is not None
            assert (job.attempt, await job.put_back()) == (1, "queued")
        job = await bob.claim("reviewer", wait=10)
        assert job is not None
        await job.done("seen")
        found = await ticket.result(10)
        assert (found.attempt, found.reasons) == (1, ())


async def test_a_role_nobody_holds_is_told_to_the_asker(space: RealSpace) -> None:
    async with connect(space, "ada") as ada:
        ticket = await ada.ask("painter", "paint")
        assert ticket.warnings == ("nobody holds the role painter: the task waits until somebody does",)
        assert (await ticket.result(0)).state == "queued"
        await space.add("pat", roles=["painter"])
        async with connect(space, "pat") as pat:
            await (await one(pat, "painter")).done("painted")
        assert (await ticket.result(5)).text == "painted"


async def test_the_asker_is_told_when_nobody_who_holds_the_role_is_here(space: RealSpace) -> None:
    assert space.steward is not None
    async with connect(space, "ada") as ada, space.agent("ada") as raw:
        async with connect(space, "bob"):
            assert (await ada.ask("reviewer", "one")).warnings == ()
            found = await raw.control.call(RoleRequest("reviewer"))
            assert (found.holders, found.online) == (2, 1)
        space.steward.started -= 3_600  # old enough to know who is not here

        async def nobody_is_here() -> bool:
            return bool((await raw.control.call(RoleRequest("reviewer"))).online == 0)

        await eventually(nobody_is_here)
        (warning,) = (await ada.ask("reviewer", "two")).warnings
        assert warning.startswith("nobody who holds the role reviewer is here now (2 hold it; last seen 20")


async def test_a_steward_that_just_started_does_not_say_that_nobody_is_here(space: RealSpace) -> None:
    assert space.steward is not None
    space.steward.started = time.time()
    async with space.agent("ada") as raw:
        found = await raw.control.call(RoleRequest("reviewer"))
        assert found == RoleAnswer(holders=2, online=None, last_seen=None)


async def test_health_tells_what_is_queued_held_and_dead(space: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIGURES_AGE", -1.0)
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, space.agent("ada") as raw:

        async def figures() -> dict[str, Any]:
            return dict((await raw.control.call(HealthRequest())).tasks)

        empty = await figures()
        assert (empty["queued"], empty["held"], empty["oldest_s"], empty["dead"]) == ({}, 0, None, 0)
        tickets = [await ada.ask("reviewer", str(n)) for n in range(3)]
        await ada.ask("painter", "paint")
        expired = await ada.ask("painter", "too late", deadline=0.2)
        with pytest.raises(TaskDead):
            await expired.result(10)
        job = await one(bob)
        now = await figures()
        assert (now["queued"], now["held"], now["dead"]) == ({"painter": 1, "reviewer": 2}, 1, 1)
        assert now["oldest_s"] > 0
        await job.fail("no", retry=False)
        await (await one(bob)).done("yes")
        now = await figures()
        assert (now["queued"], now["held"], now["dead"], now["done"]) == ({"painter": 1, "reviewer": 1}, 0, 2, 1)
        assert task_words(now).startswith("2 queued (painter 1, reviewer 1), 0 held, the oldest ")
        assert (await tickets[2].status(0)).state == "queued"


async def test_the_life_of_a_task_is_traced_confirmed_delivered_read(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        ticket = await ada.ask("reviewer", "one", deadline=60)

        async def life() -> tuple[str, set[str], str]:
            (told,) = (await ada.trace(ticket.id)).receipts
            return told.stage, set(told.stages), str(told.state)

        assert await life() == ("confirmed", {"confirmed"}, "queued")
        job = await one(bob)
        assert await life() == ("delivered", {"confirmed", "delivered"}, "claimed")
        await job.done("yes")
        assert await life() == ("read", {"confirmed", "delivered", "read"}, "done")
        lost = await ada.ask("painter", "nobody", deadline=0.2)
        with pytest.raises(TaskDead):
            await lost.result(10)
        (told,) = (await ada.trace(lost.id)).receipts
        assert (told.stage, told.cause, told.to) == ("expired", "deadline", "painter")
        assert (await bob.trace(ticket.id)).receipts == (), "the asker's to know"


async def test_a_poison_task_is_a_dead_letter_and_its_neighbours_flow(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("ada") as raw, connect(space, "bob") as bob:
        await raw.connection.request(space.subjects.task("reviewer", raw.id), b"junk", timeout=5)
        ticket = await ada.ask("reviewer", "good")
        job = await one(bob)
        assert job.text == "good"
        await job.done("fine")
        assert (await ticket.result(5)).text == "fine"
        (dead,) = (await raw.control.call(DeadLettersRequest())).dead
        assert (dead.cause, dead.seq, dead.asker) == ("malformed", 1, raw.id)
        shown = await raw.control.call(DeadLetterRequest(seq=1))
        assert shown.record is not None
        assert shown.record.payload == b"junk"
        with pytest.raises(UsageError, match="malformed"):
            await raw.control.call(RetryLetterRequest(seq=1))


async def test_a_dead_letter_is_tried_again_or_dropped_and_stays_so_after_a_restart(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("ada") as raw, connect(space, "bob") as bob:
        first, second = await ada.ask("reviewer", "one"), await ada.ask("reviewer", "two")
        for _ in range(2):
            await (await one(bob)).fail("no", retry=False)
        listed = (await raw.control.call(DeadLettersRequest())).dead
        assert [each.seq for each in listed] == [second.seq, first.seq]
        assert (await raw.control.call(RetryLetterRequest(seq=first.seq))).state == "queued"
        assert (await raw.control.call(DropLetterRequest(seq=second.seq))).state == "dropped"
        await space.stop_steward()
        await space.start_steward(PACE)
        with pytest.raises(TaskDead, match="dropped"):
            await second.result(5)
        job = await one(bob)
        assert (job.seq, job.text, job.attempt) == (first.seq, "one", 2)
        await job.done("now")
        assert (await first.result(5)).text == "now"
        assert (await raw.control.call(DeadLettersRequest())).dead == ()


@pytest.mark.usefixtures("archive_exists")
async def test_settled_tasks_leave_the_queue_unless_the_archive_still_needs_them(space: RealSpace) -> None:
    async with space.administer() as admin:
        await admin.call(ChangeSpaceRequest(parts=PartsChange(archive="on")))
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, space.core() as js:
        await ada.ask("reviewer", "one")
        waiting = await ada.ask("painter", "waits")
        await (await one(bob)).done("yes")
        await steward_of(space).tasks.upkeep.retain()
        assert (await js.info("TASK_main"))["state"]["messages"] == 2, "the archive has not seen them"
        async with space.administer() as admin:
            await admin.call(ChangeSpaceRequest(parts=PartsChange(archive="off")))

        async def left() -> bool:
            return bool((await js.info("TASK_main"))["state"]["messages"] == 1)

        await eventually(left)
        assert await js.at("TASK_main", waiting.seq) is not None


async def test_a_hundred_waiting_claims_do_not_keep_the_steward_from_answering(space: RealSpace) -> None:
    async with space.agent("bob") as bob, space.agent("ada") as ada:
        bob.control.timeout = 20
        claims = [
            asyncio.create_task(bob.control.call(ClaimRequest("reviewer", wait=3, session=f"s{n}"))) for n in range(100)
        ]
        await asyncio.sleep(0.5)
        assert await asyncio.wait_for(ada.control.call(HealthRequest()), 2)
        assert all(answer.task is None for answer in await asyncio.gather(*claims))


async def bound_queue(space: RealSpace, tasks: int) -> None:
    """Let one asker have fewer tasks in a queue than the 1,000 of a real space."""
    async with space.core() as core:
        config = (await core.info(space.subjects.task_stream))["config"]
        await core.api(f"STREAM.UPDATE.{space.subjects.task_stream}", config | {"max_msgs_per_subject": tasks})


async def test_a_full_queue_is_said_by_name_and_what_is_settled_makes_room_at_once(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", intervals=replace(PACE, task_keep=600.0)) as space:
        await space.add("ada")
        await space.add("bob", roles=["reviewer"])
        await bound_queue(space, 4)
        async with connect(space, "ada") as ada, connect(space, "bob") as bob:
            tickets = [await ada.ask("reviewer", str(number)) for number in range(4)]
            with pytest.raises(QueueFull, match="the queue of reviewer is full from you"):
                await ada.ask("reviewer", "one too many")
            job = await one(bob)
            await job.done("first")
            more = await ada.ask("reviewer", "there is room again")
            with pytest.raises(QueueFull):
                await ada.ask("reviewer", "and now there is not")
            assert (await tickets[0].result(5)).text == "first", "what went early is still known"
            for text in ("1", "2", "3", "there is room again"):
                job = await one(bob)
                assert job.text == text
                await job.done(text)
            assert (await more.result(5)).text == "there is room again"
