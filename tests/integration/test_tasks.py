"""Tasks end to end: one worker each, results that prove themselves, and nothing run twice by our doing."""

import asyncio
import base64
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidings
from tidings.broker.jetstream import JetStream
from tidings.cli.running import task_words
from tidings.endpoint.tasks import Job
from tidings.errors import (
    BadSignature,
    ConflictError,
    DeniedError,
    OutcomeUnknown,
    QueueFull,
    Superseded,
    TaskDead,
    UnreachableError,
    UsageError,
)
from tidings.steward import task_lookup, task_services
from tidings.steward.history import encoded
from tidings.steward.service import Steward
from tidings.testing.history import History
from tidings.testing.processes import child, steward_child
from tidings.testing.real_space import TEST_PACE, AgentClient, RealSpace, real_space
from tidings.testing.waiting import eventually, insist
from tidings.wire import message as wire
from tidings.wire import signing
from tidings.wire.keys import KeyPair
from tidings.wire.message import Sender

WORKER = Path(__file__).parent / "task_child.py"

PACE = replace(TEST_PACE, task_silence=1.5, task_ack_wait=1.0, task_backoff=0.05, task_keep=0.0)


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    """A space with ada, who asks, and bob and cat, who review; holds are short."""
    async with real_space(tmp_path / "home", pace=PACE) as running:
        await running.add("ada")
        await running.add("bob", roles=["reviewer"])
        await running.add("cat", roles=["reviewer"])
        yield running


def connect(space: RealSpace, name: str) -> tidings.Endpoint:
    return tidings.connect(space.home.name, name=name, home=space.home.home)


def desk(space: RealSpace) -> Any:
    assert isinstance(space.steward, Steward)
    return space.steward.desk


async def one(endpoint: tidings.Endpoint, role: str = "reviewer") -> Job:
    """Claim one job, outside a loop."""
    return await asyncio.wait_for(anext(aiter(_kept(endpoint, role))), 15)


_LOOPS: list[AsyncIterator[Job]] = []


def _kept(endpoint: tidings.Endpoint, role: str) -> AsyncIterator[Job]:
    loop = endpoint.work(role)
    _LOOPS.append(loop)  # a loop that is forgotten gives its job back
    return loop


def signed_result(worker: AgentClient, asker: str, task_id: str, text: str = "yes") -> dict[str, Any]:
    payload = wire.compose(Sender(worker.id, worker.name), text=text, reply_to=task_id).raw
    sig = signing.sign(worker.key, worker.space_id, "result", f"{asker}.{task_id}", payload)
    return {"result": base64.b64encode(payload).decode(), "sig": sig}


async def results_in(js: JetStream) -> list[int]:
    head = (await js.info("AUD_main"))["state"]["last_seq"]
    return [r.seq async for page in js.read("AUD_main", "td.main.aud.result.*", 1, head) for r in page]


@pytest.mark.requirement("T1")
async def test_one_of_two_workers_gets_each_task_once_and_the_asker_its_signed_result(space: RealSpace) -> None:
    done: list[tuple[str, str]] = []
    history = History()
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, connect(space, "cat") as cat:

        async def review(worker: tidings.Endpoint) -> None:
            async for job in worker.work("reviewer"):
                done.append((worker.name, job.text))
                history.read("reviewer", "ada", "reviewer", job.message.id, job.seq)
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
        claim = await bob.control.call("task", "claim", role="reviewer", wait=2)
        again = await bob.control.call("task", "claim", role="reviewer", wait=2)
        assert claim == again
        assert (claim["task"]["seq"], claim["attempt"]) == (first.seq, 1)


@pytest.mark.requirement("T5")
async def test_who_does_not_hold_the_role_gets_no_task(space: RealSpace) -> None:
    async with space.agent("ada") as ada:
        with pytest.raises(DeniedError, match="does not hold the role reviewer"):
            await ada.control.call("task", "claim", role="reviewer", wait=1)
    async with connect(space, "ada") as ada:
        with pytest.raises(DeniedError):
            await anext(aiter(ada.work("reviewer")))


async def test_a_claim_that_finds_nothing_is_answered(space: RealSpace) -> None:
    async with space.agent("bob") as bob:
        assert (await bob.control.call("task", "claim", role="reviewer", wait=0.5))["task"] is None
        with pytest.raises(UsageError, match="0 to 20"):
            await bob.control.call("task", "claim", role="reviewer", wait=60)


async def test_a_forged_result_is_refused_and_the_true_one_taken(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("bob") as bob, space.agent("cat") as cat:
        ticket = await ada.ask("reviewer", "one")
        seq = (await bob.control.call("task", "claim", role="reviewer", wait=2))["task"]["seq"]
        for forged in (
            signed_result(cat, ada.id, ticket.id),
            signed_result(bob, ada.id, "01890a5d-ac96-774b-bcce-b302099a8057"),
            signed_result(bob, cat.id, ticket.id),
        ):
            with pytest.raises(BadSignature):
                await bob.control.call("task", "done", seq=seq, **forged)
        good = signed_result(bob, ada.id, ticket.id)
        told = await bob.control.call("task", "done", seq=seq, **good)
        assert await bob.control.call("task", "done", seq=seq, **good) == told, "the same answer again"
        assert (await ticket.result(5)).text == "yes"


@pytest.mark.requirement("T2")
async def test_a_steward_that_lies_about_a_result_is_found_out_by_the_asker(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("bob") as bob:
        ticket = await ada.ask("reviewer", "one")
        lie = signed_result(bob, ada.id, ticket.id)
        answer = {"state": "done", "worker": bob.id, **lie}
        assert ada._tasks._opened(ticket.id, answer).text == "yes"
        other = wire.compose(Sender(bob.id, "bob"), text="no").raw
        with pytest.raises(BadSignature):
            ada._tasks._opened(ticket.id, answer | {"result": base64.b64encode(other).decode()})


@pytest.mark.requirement("T3")
@pytest.mark.requirement("X7")
async def test_a_task_held_three_times_its_acknowledgement_time_is_not_run_twice(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, space.agent("cat") as cat:
        ticket = await ada.ask("reviewer", "slow")
        job = await one(bob)
        cat.control.timeout = 10
        assert (await cat.control.call("task", "claim", role="reviewer", wait=3.5))["task"] is None
        await job.done("at last")
        result = await ticket.result(5)
        assert (result.text, result.attempt) == ("at last", 1)


@pytest.mark.requirement("T4")
async def test_a_worker_that_dies_loses_its_task_to_another(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("bob") as bob, connect(space, "cat") as cat:
        ticket = await ada.ask("reviewer", "one")
        seq = (await bob.control.call("task", "claim", role="reviewer", wait=2))["task"]["seq"]
        job = await one(cat)  # bob never beats
        assert (job.seq, job.attempt) == (seq, 2)
        with pytest.raises(ConflictError, match=f"given to {cat.id}"):
            await bob.control.call("task", "done", seq=seq, **signed_result(bob, ada.id, ticket.id))
        await job.done("mine")
        with pytest.raises(ConflictError, match="it is done by"):
            await bob.control.call("task", "done", seq=seq, **signed_result(bob, ada.id, ticket.id))
        result = await ticket.result(5)
        assert (result.text, result.worker, result.attempt) == ("mine", cat.id, 2)


async def test_a_hold_survives_a_restart_of_the_steward(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, space.agent("cat") as cat:
        ticket = await ada.ask("reviewer", "one")
        job = await one(bob)
        await space.stop_steward()
        await asyncio.sleep(1.2)  # past the acknowledgement time: the broker would deliver it again
        await space.start_steward(PACE)
        assert (await cat.control.call("task", "claim", role="reviewer", wait=2.5))["task"] is None
        await job.done("still mine")
        result = await ticket.result(5)
        assert (result.text, result.attempt) == ("still mine", 1)


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


@pytest.mark.parametrize("failpoint", ["tasks.after_hold", "tasks.after_result"])
async def test_a_steward_killed_while_a_task_is_given_or_settled_leaves_one_result(
    space: RealSpace, failpoint: str
) -> None:
    async with connect(space, "ada") as ada, space.agent("bob") as bob, space.core() as js:
        ticket = await ada.ask("reviewer", "one")
        await space.stop_steward()
        bob.control.timeout = 3

        async def run() -> dict[str, Any]:
            seq = (await bob.control.call("task", "claim", role="reviewer", wait=2))["task"]["seq"]
            return await bob.control.call("task", "done", seq=seq, **signed_result(bob, ada.id, ticket.id))

        async with steward_child(space.home, failpoint=f"{failpoint}:kill") as doomed:
            with pytest.raises((OutcomeUnknown, UnreachableError)):
                await run()
            assert await doomed.ended() == -signal.SIGKILL
        async with steward_child(space.home, after=doomed.holder):
            done = signed_result(bob, ada.id, ticket.id)
            if failpoint == "tasks.after_hold":
                await insist(run)
            told = await insist(lambda: bob.control.call("task", "done", seq=ticket.seq, **done))
            assert told["state"] == "done"
            result = await ticket.result(10)
        assert (result.text, result.attempt) == ("yes", 1)
        assert len(await results_in(js)) == 1


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
                await bob.link.call("task", "beat", seq=job.seq)


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
        await eventually(lambda: ticket.seq in desk(space).book.settled)
        settled = desk(space).book.settled[ticket.seq]
        assert (settled.cause, settled.attempt) == ("deadline", 0)
        assert later.seq not in desk(space).book.settled
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
        await admin.ask("space_set", parts={"archive": "off"})
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
        assert (await bob.control.call("task", "claim", role="reviewer", wait=0.1))["task"] is None
        ticket = await ada.ask("reviewer", "pulled", deadline=2.0)
        # the pull of bob's claim is still under way and takes it in; bob has gone
        await eventually(lambda: ticket.seq in desk(space).book.open)
        await space.stop_steward()
        await space.start_steward(PACE)
        assert ticket.seq not in desk(space).book.open
        with pytest.raises(TaskDead, match="deadline"):
            await ticket.result(15)


@pytest.mark.requirement("T7")
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
            found = await raw.control.call("task", "check", role="reviewer")
            assert (found["holders"], found["online"]) == (2, 1)
        space.steward.started -= 3_600  # old enough to know who is not here

        async def nobody_is_here() -> bool:
            return bool((await raw.control.call("task", "check", role="reviewer"))["online"] == 0)

        await eventually(nobody_is_here)
        (warning,) = (await ada.ask("reviewer", "two")).warnings
        assert warning.startswith("nobody who holds the role reviewer is here now (2 hold it; last seen 20")


async def test_a_steward_that_just_started_does_not_say_that_nobody_is_here(space: RealSpace) -> None:
    assert space.steward is not None
    space.steward.started = time.time()
    async with space.agent("ada") as raw:
        found = await raw.control.call("task", "check", role="reviewer")
        assert found == {"ok": True, "holders": 2, "online": None, "last_seen": None}


# --- who works twice, and who does not ---


def forged(kind: str, mal: AgentClient, other: str) -> tuple[bytes, dict[str, str]]:
    """A record on the attacker's own task subject that no worker may be handed."""
    good = wire.compose(Sender(mal.id, mal.name), text="do it").raw
    foreign = wire.compose(Sender(other, "ada"), text="do it for ada").raw
    big = json.dumps({"x": "y" * 262_200}).encode()

    def sig(payload: bytes, of: str = "task", role: str = "reviewer") -> dict[str, str]:
        return {"Td-Sig": signing.sign(mal.key, mal.space_id, of, role, payload)}

    stranger = signing.sign(KeyPair.generate(), mal.space_id, "task", "reviewer", good)
    return {
        "missing signature": (good, {}),
        "signature of another key": (good, {"Td-Sig": stranger}),
        "signature for another role": (good, sig(good, role="painter")),
        "signature of another kind": (good, sig(good, of="chat")),
        "foreign sender": (foreign, sig(foreign)),
        "header of the broker's": (good, sig(good) | {"Nats-Sequence": "7"}),
        "oversize": (big, sig(big)),
    }[kind]


FORGERIES = (
    "missing signature",
    "signature of another key",
    "signature for another role",
    "signature of another kind",
    "foreign sender",
    "header of the broker's",
    "oversize",
)


async def test_what_does_not_verify_is_never_handed_to_a_worker_and_becomes_a_dead_letter(space: RealSpace) -> None:
    async with space.agent("cat") as mal, connect(space, "ada") as ada, connect(space, "bob") as bob:
        for kind in FORGERIES:
            payload, headers = forged(kind, mal, ada.id)
            said = await mal.connection.request(space.subjects.task("reviewer", mal.id), payload, headers=headers)
            assert b'"seq"' in said.data, f"{kind}: {said.data!r}"
        ticket = await ada.ask("reviewer", "the real one")
        job = await one(bob)
        assert job.message.id == ticket.id, "the first thing a program sees is the real one"
        await job.done("yes")
        dead = (await mal.control.call("dead", "list"))["dead"]
        assert [(each["cause"], each["attempts"]) for each in dead] == [("malformed", 0)] * len(FORGERIES)


async def test_a_worker_verifies_for_itself_what_a_steward_hands_out(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        bad, good = await ada.ask("reviewer", "altered"), await ada.ask("reviewer", "good")
        true = encoded

        def altered(record: Any) -> dict[str, Any]:
            line = true(record)
            if line["seq"] == bad.seq:
                line["payload"] = base64.b64encode(record.payload.replace(b"altered", b"alterea")).decode()
            return line

        monkeypatch.setattr(task_services, "encoded", altered)
        job = await one(bob)
        assert job.message.id == good.id
        await job.done("yes")
        found = await bad.status(5)
        assert (found.state, found.cause) == ("dead", "failed")
        assert "signature" in found.reasons[-1]


async def test_a_worker_cannot_make_a_task_unfit_to_be_tried_again(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("ada") as raw, space.agent("bob") as bob:
        ticket = await ada.ask("reviewer", "fine")
        await bob.control.call("task", "claim", role="reviewer", wait=2)
        told = await bob.control.call("task", "fail", seq=ticket.seq, reason="spite", retry=False, cause="malformed")
        assert (told["state"], told["cause"]) == ("dead", "failed")
        assert (await raw.control.call("dead", "retry", seq=ticket.seq))["state"] == "queued"


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
            await older.link.call("task", "beat", seq=job.seq, session=older._tasks.session)
        with pytest.raises(Superseded):
            await job.fail("I am late", retry=False)
        assert job.lost is not None
        await taken.done("by the newer")
        with pytest.raises(Superseded, match="did it"):
            await older.link.call(
                "task", "done", seq=job.seq, session=older._tasks.session, **result_of(older, ada.id, ticket.id)
            )
        assert (await ticket.result(5)).text == "by the newer"
    async with space.core() as js:
        assert len(await results_in(js)) == 1


def result_of(worker: tidings.Endpoint, asker: str, task_id: str) -> dict[str, Any]:
    own = worker.identity
    payload = wire.compose(Sender(own.id, own.name), text="late", reply_to=task_id).raw
    sig = signing.sign(own.key, own.space_id, "result", f"{asker}.{task_id}", payload)
    return {"result": base64.b64encode(payload).decode(), "sig": sig}


async def test_a_job_that_was_lost_is_told_to_its_program_while_it_works(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        errors: list[BaseException] = []
        bob.on("error", errors.append)
        await ada.ask("reviewer", "one", deadline=0.8)
        job = await one(bob)
        await eventually(lambda: job.lost)
        assert isinstance(errors[0], ConflictError)
        assert "deadline" in str(errors[0])


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
        held = desk(space).book.open[ticket.seq]
        assert (held.worker, held.session, held.attempt) == (bob.id, bob._tasks.session, 1)
        # the next steward is quicker to call a worker silent; bob still beats at the pace of the one that died
        told = await insist(lambda: bob.link.call("task", "beat", seq=job.seq, session=bob._tasks.session))
        assert told["state"] == "held"
        await job.done("through it all")
        result = await ticket.result(5)
        assert (result.text, result.attempt) == ("through it all", 1)


# --- figures ---


async def test_health_tells_what_is_queued_held_and_dead(space: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_lookup, "FIGURES_AGE", -1.0)
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, space.agent("ada") as raw:

        async def figures() -> dict[str, Any]:
            return dict((await raw.control.call("health", "ping"))["tasks"])

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
            (told,) = (await ada.trace(ticket.id))["receipts"]
            return told["stage"], set(told["stages"]), told["state"]

        assert await life() == ("confirmed", {"confirmed"}, "queued")
        job = await one(bob)
        assert await life() == ("delivered", {"confirmed", "delivered"}, "claimed")
        await job.done("yes")
        assert await life() == ("read", {"confirmed", "delivered", "read"}, "done")
        lost = await ada.ask("painter", "nobody", deadline=0.2)
        with pytest.raises(TaskDead):
            await lost.result(10)
        (told,) = (await ada.trace(lost.id))["receipts"]
        assert (told["stage"], told["cause"], told["to"]) == ("expired", "deadline", "painter")
        assert (await bob.trace(ticket.id))["receipts"] == [], "the asker's to know"


async def test_strangers_neither_settle_nor_see_nor_wait_for_a_task(space: RealSpace) -> None:
    """F24: only its holder settles a task."""
    await space.add("mal", roles=["painter"])
    async with connect(space, "ada") as ada, space.agent("bob") as bob, space.agent("mal") as mal:
        ticket = await ada.ask("reviewer", "secret")
        seq = (await bob.control.call("task", "claim", role="reviewer", wait=2))["task"]["seq"]
        for do, arguments in (
            ("beat", {}),
            ("done", signed_result(mal, ada.id, ticket.id)),
            ("fail", {"reason": "spite", "retry": False}),
        ):
            with pytest.raises(DeniedError, match="holds no task"):
                await mal.control.call("task", do, seq=seq, **arguments)
        assert (await mal.control.call("task", "result", id=ticket.id, seq=seq))["state"] == "unknown"
        assert (await mal.control.call("task", "result", id=ticket.id))["state"] == "unknown"
        await bob.control.call("task", "fail", seq=seq, reason="no", retry=False)
        assert (await mal.control.call("dead", "list"))["dead"] == []
        for do in ("show", "retry", "drop"):
            with pytest.raises(UsageError, match="no dead letter"):
                await mal.control.call("dead", do, seq=seq)


async def test_a_poison_task_is_a_dead_letter_and_its_neighbours_flow(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("ada") as raw, connect(space, "bob") as bob:
        await raw.connection.request(space.subjects.task("reviewer", raw.id), b"junk", timeout=5)
        ticket = await ada.ask("reviewer", "good")
        job = await one(bob)
        assert job.text == "good"
        await job.done("fine")
        assert (await ticket.result(5)).text == "fine"
        (dead,) = (await raw.control.call("dead", "list"))["dead"]
        assert (dead["cause"], dead["seq"], dead["asker"]) == ("malformed", 1, raw.id)
        shown = await raw.control.call("dead", "show", seq=1)
        assert base64.b64decode(shown["record"]["payload"]) == b"junk"
        with pytest.raises(UsageError, match="malformed"):
            await raw.control.call("dead", "retry", seq=1)


async def test_a_dead_letter_is_tried_again_or_dropped_and_stays_so_after_a_restart(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("ada") as raw, connect(space, "bob") as bob:
        first, second = await ada.ask("reviewer", "one"), await ada.ask("reviewer", "two")
        for _ in range(2):
            await (await one(bob)).fail("no", retry=False)
        listed = (await raw.control.call("dead", "list"))["dead"]
        assert [each["seq"] for each in listed] == [second.seq, first.seq]
        assert (await raw.control.call("dead", "retry", seq=first.seq))["state"] == "queued"
        assert (await raw.control.call("dead", "drop", seq=second.seq))["state"] == "dropped"
        await space.stop_steward()
        await space.start_steward(PACE)
        with pytest.raises(TaskDead, match="dropped"):
            await second.result(5)
        job = await one(bob)
        assert (job.seq, job.text, job.attempt) == (first.seq, "one", 2)
        await job.done("now")
        assert (await first.result(5)).text == "now"
        assert (await raw.control.call("dead", "list"))["dead"] == []


async def test_settled_tasks_leave_the_queue_unless_the_archive_still_needs_them(space: RealSpace) -> None:
    async with space.administer() as admin:
        await admin.ask("space_set", parts={"archive": "on"})
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, space.core() as js:
        await ada.ask("reviewer", "one")
        waiting = await ada.ask("painter", "waits")
        await (await one(bob)).done("yes")
        await desk(space).retain()
        assert (await js.info("TASK_main"))["state"]["messages"] == 2, "the archive has not seen them"
        async with space.administer() as admin:
            await admin.ask("space_set", parts={"archive": "off"})

        async def left() -> bool:
            return bool((await js.info("TASK_main"))["state"]["messages"] == 1)

        await eventually(left)
        assert await js.at("TASK_main", waiting.seq) is not None


async def test_a_hundred_waiting_claims_do_not_keep_the_steward_from_answering(space: RealSpace) -> None:
    async with space.agent("bob") as bob, space.agent("ada") as ada:
        bob.control.timeout = 20
        claims = [
            asyncio.create_task(bob.control.call("task", "claim", role="reviewer", wait=3, session=f"s{n}"))
            for n in range(100)
        ]
        await asyncio.sleep(0.5)
        assert (await asyncio.wait_for(ada.control.call("health", "ping"), 2))["ok"]
        assert all(answer["task"] is None for answer in await asyncio.gather(*claims))


async def bound_queue(space: RealSpace, tasks: int) -> None:
    """Let one asker have fewer tasks in a queue than the 1,000 of a real space."""
    async with space.core() as core:
        config = (await core.info(space.subjects.task_stream))["config"]
        await core.api(f"STREAM.UPDATE.{space.subjects.task_stream}", config | {"max_msgs_per_subject": tasks})


async def test_a_full_queue_is_said_by_name_and_what_is_settled_makes_room_at_once(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", pace=replace(PACE, task_keep=600.0)) as space:
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
        (job,) = bob._tasks._open.values()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await eventually(lambda: job.settled and not bob._tasks._open)
        assert job._beating is not None
        await eventually(job._beating.done)
        again = await one(cat)
        assert (again.message.id, again.attempt) == (ticket.id, 2)
        await again.done("by another")
        assert (await ticket.result(5)).worker_name == "cat"
