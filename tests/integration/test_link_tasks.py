"""Tasks for roles of linked spaces: sealed, claimed by one, their results come back; whoever dies or is put back."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

import tidings
from carried_links import LinkedSpaces, linked_spaces, worker, worker_process
from coding_agents import coding_here, hosted
from linked_spaces import unlinked
from tidings.client.connect import connect_directly
from tidings.client.tasks import Job, TaskTicket
from tidings.contract.mail import DeadLettersRequest, DropLetterRequest, RetryLetterRequest
from tidings.errors import BadSignature, DeniedError, PeerUnheard, TaskDead, TooLarge, UnknownPeer
from tidings.links import running_link, task_sync
from tidings.steward import link_tasks
from tidings.wire.message import new_id
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_link, "EVERY", 0.1)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[LinkedSpaces]:
    async with linked_spaces(tmp_path, roster="on", tasks="on") as spaces:
        for name in ("rita", "rolf"):
            await spaces.acme.add(name, roles=["reviewer"])
        yield spaces


async def knows(agent: tidings.DirectAgent, *names: str) -> None:
    async def known() -> bool:
        return set(names) <= {each.name for each in await agent.who()}

    await eventually(known, within=20, what=", ".join(names))


async def claimed(worker: tidings.DirectAgent, role: str = "reviewer") -> Job:
    job = await worker.claim(role, 20)
    assert job is not None
    return job


async def queued(space: RealSpace) -> int:
    """How many tasks were ever queued in a space."""
    async with space.core() as js:
        return int((await js.info(space.subjects.task_stream))["state"]["last_seq"])


async def test_a_task_for_a_role_of_a_linked_space_is_done_there_and_its_result_comes_back(both: LinkedSpaces) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        connect(both.main, "ada") as ada,
        connect(both.acme, "rita") as rita,
    ):
        await knows(ada, "rita@acme", "rolf@acme")
        ticket = await ada.ask("reviewer@acme", "is this right?", data={"line": 7})
        job = await claimed(rita)
        assert (job.text, job.asker.name, job.asker.id, job.claims) == ("is this right?", "ada@main", ada.id, None)
        assert job.origin == both.main.info.id

        async def is_claimed() -> bool:
            found = await ticket.status()
            return (found.state, found.worker_name) == ("claimed", "rita@acme")

        await eventually(is_claimed, within=20, what="its asker sees who has it")
        await job.done("it is")
        found = await ticket.result(30)
        assert (found.state, found.text, found.worker_name) == ("done", "it is", "rita@acme")
        assert await queued(both.acme) == 1


async def test_the_largest_task_and_the_largest_result_pass(both: LinkedSpaces) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        connect(both.main, "ada") as ada,
        connect(both.acme, "rita") as rita,
    ):
        await knows(ada, "rita@acme")
        with pytest.raises(TooLarge) as caught:
            await ada.ask("reviewer@acme", "x" * 220_000)
        most = int(str(caught.value).split("at most ")[1].split()[0]) - 100
        ticket = await ada.ask("reviewer@acme", "x" * most)
        job = await claimed(rita)
        assert len(job.text) == most
        with pytest.raises(TooLarge):
            await job.done("y" * 90_000)
        await job.done("y" * 66_000)
        assert (await ticket.result(30)).text == "y" * 66_000


async def test_neither_space_can_read_a_task_or_its_result(both: LinkedSpaces) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        connect(both.main, "ada") as ada,
        connect(both.acme, "rita") as rita,
    ):
        await knows(ada, "rita@acme")
        ticket = await ada.ask("reviewer@acme", "the secret question", deadline=60)
        job = await claimed(rita)
        await job.done("the secret answer")
        await ticket.result(30)
        seen = b""
        for space in (both.main, both.acme):
            async with space.core() as js:
                for stream in (space.subjects.task_stream, space.subjects.audit_stream):
                    head = int((await js.info(stream))["state"]["last_seq"])
                    async for page in js.read(stream, f"{space.subjects.root}.>", 1, head):
                        seen += b"".join(each.payload for each in page)
        assert seen
        assert b"secret" not in seen


async def test_a_task_waits_for_a_space_that_is_away(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada, connect(both.acme, "rita") as rita:
        async with worker(both.main):
            await knows(ada, "rita@acme")
        tickets = [await ada.ask("reviewer@acme", f"number {n}") for n in range(20)]
        for _ in range(2):
            async with worker(both.acme):
                await asyncio.sleep(0)
        async with worker(both.main), worker(both.acme):
            for _ in tickets:
                job = await claimed(rita)
                await job.done(f"done: {job.text}")
            found = [await each.result(30) for each in tickets]
        assert [each.text for each in found] == [f"done: number {n}" for n in range(20)]
        assert await queued(both.acme) == 20


@pytest.mark.parametrize("place", ["link.task.admitted", "link.task.committed", "link.task.told"])
async def test_a_worker_that_is_killed_around_its_commit_queues_nothing_twice(both: LinkedSpaces, place: str) -> None:
    async with connect(both.main, "ada") as ada, connect(both.acme, "rita") as rita, worker(both.main):
        await knows(ada, "rita@acme")
        tickets = [await ada.ask("reviewer@acme", text) for text in ("one", "two")]
        async with worker_process(both.acme, TIDINGS_FAILPOINT=f"{place}:kill") as doomed:
            await asyncio.wait_for(doomed.child.wait(), 30)
        async with worker(both.acme):
            for wanted in ("one", "two"):
                job = await claimed(rita)
                assert job.text == wanted
                await job.done(wanted)
            assert [(await each.result(30)).text for each in tickets] == ["one", "two"]
            assert await rita.claim("reviewer", 1) is None
            assert await queued(both.acme) == 2


async def test_a_task_that_is_given_up_there_is_dead_here_with_the_reason(both: LinkedSpaces) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        connect(both.main, "ada") as ada,
        connect(both.acme, "rita") as rita,
    ):
        await knows(ada, "rita@acme")
        ticket = await ada.ask("reviewer@acme", "impossible")
        await (await claimed(rita)).fail("cannot be done", retry=False)
        with pytest.raises(TaskDead, match=r"failed.*acme: attempt 1: cannot be done; ask again"):
            await ticket.result(30)
        (letter,) = (await ada.call(DeadLettersRequest())).dead
        assert letter.role == "reviewer@acme"
        assert (await ada.transport.dead_letter(seq=letter.seq))[1] == "impossible"
        with pytest.raises(tidings.TidingsError, match="went over a link"):
            await ada.call(RetryLetterRequest(seq=letter.seq))
        await ada.call(DropLetterRequest(seq=letter.seq))


async def test_a_deadline_is_its_askers_and_holds_although_the_other_space_is_away(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada, connect(both.acme, "rita") as rita:
        async with worker(both.main):
            await knows(ada, "rita@acme")
        ticket = await ada.ask("reviewer@acme", "soon", deadline=1.0)
        with pytest.raises(TaskDead, match="deadline"):
            await ticket.result(30)
        async with worker(both.main), worker(both.acme):
            assert await rita.claim("reviewer", 1) is None


async def test_a_task_that_took_long_on_its_way_has_less_time_there(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada, connect(both.acme, "rita") as rita, worker(both.main):
        await knows(ada, "rita@acme")
        ticket = await ada.ask("reviewer@acme", "in a minute", deadline=60)
        await asyncio.sleep(1.5)
        async with worker(both.acme):
            job = await claimed(rita)
            async with both.main.core() as js:
                record = await js.at(both.main.subjects.task_stream, ticket.seq)
            assert record is not None
            assert job.deadline == pytest.approx(record.time_ns / 1e9 + 60, abs=1.0)


async def test_only_those_it_was_sealed_for_get_a_task_and_others_theirs_meanwhile(both: LinkedSpaces) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        connect(both.main, "ada") as ada,
        connect(both.acme, "bob") as bob,
        connect(both.acme, "rita") as rita,
    ):
        await knows(ada, "rita@acme")
        ticket = await ada.ask("reviewer@acme", "for rita or rolf")
        await both.acme.add("nora", roles=["reviewer"])
        async with connect(both.acme, "nora") as nora:
            assert await nora.claim("reviewer", 2) is None
            await bob.ask("reviewer", "for anybody")
            job = await claimed(nora)
            assert job.text == "for anybody"
            await job.done()
            assert await nora.claim("reviewer", 1) is None
        job = await claimed(rita)
        assert job.text == "for rita or rolf"
        await job.done("yes")
        assert (await ticket.result(30)).text == "yes"


async def test_a_task_that_nobody_can_open_any_more_is_told_to_its_asker(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada:
        async with worker(both.main):
            await knows(ada, "rita@acme", "rolf@acme")
        ticket = await ada.ask("reviewer@acme", "anybody?")
        async with both.acme.administer() as admin:
            await admin.revoke("rita")
            await admin.revoke("rolf")
        await both.acme.add("nora", roles=["reviewer"])
        async with worker(both.main), worker(both.acme), connect(both.acme, "nora") as nora:
            claiming = asyncio.create_task(nora.claim("reviewer", 20))
            with pytest.raises(TaskDead, match="nobody for whom it was sealed"):
                await ticket.result(30)
            claiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming


async def test_who_asks_a_role_that_cannot_be_asked_is_told_why(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada, worker(both.main):
        await knows(ada, "rita@acme")
        with pytest.raises(
            UnknownPeer, match="nobody that acme tells of holds the role tester; its agents hold reviewer"
        ):
            await ada.ask("tester@acme", "x")
        with pytest.raises(UnknownPeer, match="globex"):
            await ada.ask("reviewer@globex", "x")
        await both.agree(roster="on", tasks="off")

        async def refused() -> bool:
            try:
                await ada.ask("reviewer@acme", "x")
            except DeniedError as error:
                return "passes no tasks" in str(error)
            except (UnknownPeer, PeerUnheard):  # until the worker has the new credential, acme refuses the old one
                pass
            return False

        await eventually(refused, within=20, what="tasks are off")


async def test_tasks_are_off_unless_both_operators_say_so(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada, connect(both.acme, "rita") as rita, worker(both.main):
        await knows(ada, "rita@acme")
        ticket = await ada.ask("reviewer@acme", "not yet")
        await both.agree(roster="on", tasks="off")
        async with worker(both.acme):
            assert await rita.claim("reviewer", 2) is None
            assert await queued(both.acme) == 0
            assert (await ticket.status()).state == "queued"
            await both.agree(roster="on", tasks="on")
            job = await claimed(rita)
            await job.done("now")
            assert (await ticket.result(30)).text == "now"


async def test_one_asker_leaves_room_for_others_and_what_has_no_room_waits(
    both: LinkedSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_sync, "MOST_EACH", 2)
    monkeypatch.setattr(task_sync, "MOST_OPEN", 5)
    await both.main.add("eve")
    async with (
        connect(both.main, "ada") as ada,
        connect(both.main, "eve") as eve,
        connect(both.acme, "rita") as rita,
        worker(both.main),
        worker(both.acme),
    ):
        await knows(ada, "rita@acme")
        await knows(eve, "rita@acme")
        flood = [await eve.ask("reviewer@acme", f"flood {n}") for n in range(12)]

        async def lying() -> dict[str, int]:
            async with both.acme.core() as js:
                counts = await js.counts_of(both.acme.subjects.task_stream, f"{both.acme.subjects.root}.task.>")
            return {subject.rpartition(".")[2]: count for subject, count in counts.items()}

        async def full() -> bool:
            return await lying() == {eve.id: 2}

        await eventually(full, within=20, what="as many of one asker as may be here are")
        ticket = await ada.ask("reviewer@acme", "me too")

        async def beside() -> bool:
            return await lying() == {eve.id: 2, ada.id: 1}

        await eventually(beside, within=20, what="another asker's comes although nothing was done")
        for _ in range(13):
            job = await claimed(rita)
            await job.done(job.text)
        assert (await ticket.result(30)).text == "me too"
        results = [await each.result(30) for each in flood]
        assert [each.text for each in results] == [f"flood {n}" for n in range(12)]
        assert await queued(both.acme) == 13


async def test_a_steward_that_restarts_on_either_side_goes_on(both: LinkedSpaces) -> None:
    async with (
        connect(both.main, "ada") as ada,
        connect(both.acme, "rita") as rita,
        worker(both.main),
        worker(both.acme),
    ):
        await knows(ada, "rita@acme")
        ticket = await ada.ask("reviewer@acme", "hold on")
        job = await claimed(rita)
        for space in (both.main, both.acme):
            await space.stop_steward()
            await space.start_steward()
        await job.done("still here")
        assert (await ticket.result(40)).text == "still here"
        assert await queued(both.acme) == 1


async def test_when_the_link_is_removed_what_waits_is_told_to_its_asker(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada:
        async with worker(both.main):
            await knows(ada, "rita@acme")
        ticket: TaskTicket = await ada.ask("reviewer@acme", "never mind")
        await unlinked(both.main)
        with pytest.raises(TaskDead, match="there is no link with its space any more"):
            await ticket.result(30)


async def test_through_hosts_a_task_is_asked_while_the_space_is_away_and_done_by_a_program_there(
    both: LinkedSpaces,
) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        hosted(both.main.home.home),
        hosted(both.acme.home.home),
        tidings.connect("main", name="ada", home=both.main.home.home, via="host") as ada,
        tidings.connect("acme", name="rita", home=both.acme.home.home, via="host") as rita,
    ):
        await eventually(lambda: _known_at_host(ada), within=30, what="the host has seen who is there")
        both.main.broker.stop()
        ticket = await ada.ask("reviewer@acme", "asked offline", id=(chosen := new_id()))
        assert (ticket.id, (await ticket.status(0)).state) == (chosen, "stored")
        again = await ada.ask("reviewer@acme", "asked offline", id=chosen)
        assert again.id == chosen
        assert (await ada.transport.outbox_row(chosen))["to_name"] == "reviewer@acme"
        both.main.broker.start()
        job = await rita.claim("reviewer", 40)
        assert job is not None
        assert (job.text, job.asker.name) == ("asked offline", "ada@main")
        await job.done("done through the host")
        found = await ticket.result(40)
        assert (found.state, found.text, found.worker_name) == ("done", "done through the host", "rita@acme")
        assert await queued(both.acme) == 1


async def _known_at_host(agent: Any) -> bool:
    try:
        await agent.ask("nobody@acme", "x")
    except UnknownPeer as error:
        return "holds the role nobody" in str(error)
    except (DeniedError, PeerUnheard):
        return False
    return False


async def test_coding_agents_ask_and_work_over_a_link(both: LinkedSpaces) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        hosted(both.main.home.home),
        hosted(both.acme.home.home),
        coding_here(both.main, "ada") as (ada,),
        coding_here(both.acme, "rita") as (rita,),
    ):

        async def asked() -> bool:
            return not (await ada.raw("ask_role", role="reviewer@acme", text="from a model")).is_error

        await eventually(asked, within=30, every=0.3, what="the role can be asked")
        claimed = await rita("claim_task", role="reviewer", wait=15)
        assert "ada@main" in str(claimed["request"]), claimed
        assert "from a model" in str(claimed["request"]), claimed
        await rita("finish_task", id=claimed["id"], outcome="done", text="for a model")

        async def done() -> bool:
            return "for a model" in str(await ada("task_result", id=claimed["id"], wait=5))

        await eventually(done, within=30, every=0.3, what="its result comes back")
        assert (await ada("task_result", id=claimed["id"]))["worker"] == "rita@acme"


async def test_many_ended_tasks_of_an_asker_hide_none_that_waits(
    both: LinkedSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_tasks, "LOOKED_AT", 3)
    async with (
        worker(both.main),
        worker(both.acme),
        connect(both.main, "ada") as ada,
        connect(both.acme, "rita") as rita,
    ):
        await knows(ada, "rita@acme")
        for number in range(12):
            ticket = await ada.ask("reviewer@acme", f"number {number}")
            await (await claimed(rita)).done(str(number))
            assert (await ticket.result(30)).text == str(number)
        figures = await _steward(both.main).tasks._count(time.time())
        assert figures["queued"] == {}


async def test_what_no_agent_could_have_queued_keeps_no_task_of_a_role_back(both: LinkedSpaces) -> None:
    s = both.acme.subjects
    async with connect(both.acme, "bob") as bob, connect(both.acme, "rita") as rita, both.acme.core() as js:
        for who in ("x", "nobody", "U"):
            await js.publish(f"{s.root}.task.reviewer.{who}", b"junk", {})
        await bob.ask("reviewer", "still there?")
        job = await claimed(rita)
        assert job.text == "still there?"
        await job.done("yes")

        async def acknowledged() -> bool:
            place = await _steward(both.acme).tasks.intake.place("reviewer")
            return bool(place.acked == place.delivered == 4)

        await eventually(acknowledged, within=20, what="the queue has nothing left")


async def test_a_key_that_becomes_an_agent_of_both_spaces_stops_no_other_task(both: LinkedSpaces) -> None:
    await both.main.add("eve")
    async with (
        worker(both.main),
        worker(both.acme),
        connect(both.main, "ada") as ada,
        connect(both.main, "eve") as eve,
        connect(both.acme, "rita") as rita,
    ):
        await knows(ada, "rita@acme")
        await knows(eve, "rita@acme")
        lost = await eve.ask("reviewer@acme", "from both")
        job = await claimed(rita)
        assert job.text == "from both"
        handlers = _steward(both.acme).link_tasks
        handlers.space = cast("Any", _WithAgent(handlers.space, eve.id))
        await job.done("for whom?")
        ticket = await ada.ask("reviewer@acme", "after it")
        job = await claimed(rita)
        await job.done("done")
        assert (await ticket.result(30)).text == "done"
        with pytest.raises(TaskDead):
            await lost.result(90)


def _steward(space: RealSpace) -> Any:
    assert space.steward is not None
    return space.steward


class _WithAgent:
    """The space, where one more key is an agent's."""

    def __init__(self, space: Any, key: str) -> None:
        self._space, self._key = space, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    def access(self, owner: str | None) -> Any:
        return self._space.access(owner) if owner != self._key else object()


async def test_an_asker_that_gets_another_key_meanwhile_has_the_result_under_that(both: LinkedSpaces) -> None:
    async with worker(both.main), worker(both.acme), connect(both.acme, "rita") as rita:
        async with connect(both.main, "ada") as ada:
            await knows(ada, "rita@acme")
            before = ada.id
            ticket = await ada.ask("reviewer@acme", "before")
            job = await claimed(rita)
        async with both.main.administer() as admin:
            await admin.rotate("ada", drop_unread=True)
        async with connect(both.main, "ada") as ada:
            assert ada.id != before

            async def known() -> bool:
                return any(each.id == ada.id for each in await rita.who())

            await eventually(known, within=20, what="the new key is known there")
            await job.done("after")
            found = await ada.task(ticket.id, 30)
            assert (found.state, found.text) == ("done", "after")


async def test_a_task_of_an_asker_that_got_another_key_before_it_was_fetched_goes_on(both: LinkedSpaces) -> None:
    async with connect(both.acme, "rita") as rita:
        async with worker(both.main), connect(both.main, "ada") as ada:
            await knows(ada, "rita@acme")
            ticket = await ada.ask("reviewer@acme", "not fetched yet")
        async with both.main.administer() as admin:
            await admin.rotate("ada", drop_unread=True)
        async with worker(both.main), worker(both.acme):
            job = await claimed(rita)
            assert job.text == "not fetched yet"
            await job.done("done")
            async with connect(both.main, "ada") as ada:

                async def ended() -> bool:
                    try:
                        return (await ada.task(ticket.id)).state == "done"
                    except BadSignature as error:  # nobody had told rita of the new key
                        return "the key that this agent had when it asked" in str(error)

                await eventually(ended, within=30, what="it has its end")
