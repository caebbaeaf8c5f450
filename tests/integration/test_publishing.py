"""What was prepared is published later, again, by another process: stored once, and found if it was."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from duplicate_window import STREAM, forget_ids
from foreign import connect
from tidings.admin.agents import AgentFile
from tidings.admin.identity import local_identity
from tidings.client.publishing import Kind, Prepared, prepare_chat, prepare_direct, prepare_task, task_terms
from tidings.contract.mail import FindMessageAnswer, FindMessageRequest, MessageKind
from tidings.errors import BrokerUnreachable, DeniedError, IdBurned, OutcomeUnknown, UsageError
from tidings.nats.client import Connection
from tidings.nats.core import Msg
from tidings.nats.errors import ConnectionGone, NoResponders
from tidings.nats.jetstream_api import NO_END
from tidings.steward import trace
from tidings.wire import message as wire
from tidings.wire.message import Sender, new_id
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


@pytest.fixture
async def pair(space: RealSpace) -> RealSpace:
    await space.add("ada", roles=["writer"])
    await space.add("bob", roles=["reviewer"])
    return space


async def one_of_each(space: RealSpace, text: str = "hello", **fields: Any) -> dict[str, Prepared]:
    """Prepared without a connection, from ada's files alone."""
    ada, bob = await local_identity(space.home, "ada"), await local_identity(space.home, "bob")

    def said() -> wire.Message:
        return wire.compose(Sender(ada.id, "ada"), text=text, **fields)

    return {
        "chat": prepare_chat(ada, "general", said()),
        "dm": prepare_direct(ada, bob.id, said()),
        "task": prepare_task(ada, "reviewer", said()),
    }


async def another_millisecond() -> None:
    """What is composed next has another `ts`."""
    moment = time.time_ns() // 1_000_000
    await eventually(lambda: time.time_ns() // 1_000_000 > moment, every=0.001)


async def count(space: RealSpace, prepared: Prepared) -> int:
    async with space.core() as core:
        return (await core.counts_of(STREAM[prepared.kind], prepared.subject)).get(prepared.subject, 0)


@pytest.mark.parametrize("kind", ["chat", "dm", "task"])
async def test_what_was_prepared_offline_is_published_once_by_two_processes(pair: RealSpace, kind: str) -> None:
    prepared = (await one_of_each(pair))[kind]
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "ada", receive=False) as again:
        first, second = await ada.transport.publish(prepared), await again.transport.publish(prepared)
        assert (first.duplicate, second.duplicate) == (False, True)
        assert first.seq == second.seq
        assert await again.transport.publisher.is_stored(prepared, first.seq)
        assert not await again.transport.publisher.is_stored(prepared, first.seq + 1)
        assert first.incarnation == ada.transport.incarnation == again.transport.incarnation
    assert await count(pair, prepared) == 1


async def test_a_prepared_message_reaches_its_reader_verified_and_opened(pair: RealSpace) -> None:
    prepared = await one_of_each(pair, "for bob")
    assert b"for bob" in prepared["chat"].payload
    assert b"for bob" not in prepared["dm"].payload
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "bob", "general") as bob:
        for each in prepared.values():
            await ada.transport.publish(each)
        got = [await bob.next_message(10) for _ in range(2)]
        assert {(m.kind, m.text, m.sender.id) for m in got} == {
            ("channel", "for bob", ada.id),
            ("direct", "for bob", ada.id),
        }
        job = await asyncio.wait_for(anext(aiter(bob.work("reviewer"))), 10)
        assert (job.text, job.asker.id) == ("for bob", ada.id)
        await job.done()


async def test_only_the_sender_of_a_message_can_prepare_it(pair: RealSpace) -> None:
    ada, bob = await local_identity(pair.home, "ada"), await local_identity(pair.home, "bob")
    with pytest.raises(UsageError, match="bob cannot sign it"):
        prepare_chat(bob, "general", wire.compose(Sender(ada.id, "ada"), text="not mine"))


@pytest.mark.parametrize("kind", ["chat", "dm", "task"])
async def test_an_id_burnt_by_another_is_stored_once_however_often_it_is_published(pair: RealSpace, kind: str) -> None:
    await pair.add("mal")
    prepared = (await one_of_each(pair))[kind]
    async with pair.agent("mal") as mal, connect(pair, "ada", receive=False) as ada:
        subject = {
            "chat": pair.subjects.chat(mal.id, "general"),
            "dm": pair.subjects.direct(mal.id, mal.id),
            "task": pair.subjects.task("reviewer", mal.id),
        }[kind]
        await mal.connection.request(subject, b"burnt", headers={"Nats-Msg-Id": prepared.id}, timeout=5)
        first = await ada.transport.publish(prepared)
        again = await ada.transport.publish(prepared)
        assert (first.seq, first.duplicate, again.duplicate) == (again.seq, False, True)
    assert await count(pair, prepared) == 1


@pytest.mark.parametrize("kind", ["chat", "dm", "task"])
async def test_what_was_stored_before_the_window_is_found_and_need_not_be_stored_twice(
    pair: RealSpace, kind: str
) -> None:
    prepared = (await one_of_each(pair))[kind]
    async with connect(pair, "ada", receive=False) as ada:
        assert await ada.transport.publisher.find(prepared) is None
        stored = await ada.transport.publish(prepared)
        assert await ada.transport.publisher.find(prepared) == stored.seq
        await forget_ids(pair)
        assert await ada.transport.publisher.find(prepared) == stored.seq, "before anybody publishes it again"
        assert not (await ada.transport.publish(prepared)).duplicate, "the broker would have stored it twice"
        assert await ada.transport.publisher.find(prepared) == stored.seq


@pytest.mark.parametrize("kind", ["chat", "dm", "task"])
async def test_another_agents_message_of_the_same_id_is_never_told(pair: RealSpace, kind: MessageKind) -> None:
    """mal knows everything of the message but may not be told that it is stored, nor where."""
    await pair.add("mal")
    prepared = (await one_of_each(pair))[kind]
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "mal", receive=False) as mal:
        stored = await ada.transport.publish(prepared)
        assert await ada.transport.publisher.find(prepared) == stored.seq
        assert await mal.transport.publisher.find(prepared) is None
        answer = await mal.call(FindMessageRequest(kind=kind, to=prepared.destination, id=prepared.id))
        assert answer == FindMessageAnswer(seq=None, state="unknown", next=None)
        assert not await mal.transport.publisher.is_stored(prepared, stored.seq)


async def test_a_message_read_and_removed_is_found_as_long_as_its_receipt_is_remembered(pair: RealSpace) -> None:
    prepared = (await one_of_each(pair))["dm"]
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "bob") as bob:
        stored = await ada.transport.publish(prepared)
        await (await bob.next_message(10)).ack()
        assert (await ada.receipt(prepared.id, "read")).stage == "read"
        async with pair.core() as core:
            await core.purge("DM_main", subject_filter=prepared.subject, below=NO_END)
        assert not await ada.transport.publisher.is_stored(prepared, stored.seq)
        assert await ada.transport.publisher.find(prepared) == stored.seq


async def test_a_task_done_and_removed_is_found_as_long_as_its_fate_is_remembered(pair: RealSpace) -> None:
    prepared = (await one_of_each(pair))["task"]
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "bob") as bob:
        stored = await ada.transport.publish(prepared)
        await (await asyncio.wait_for(anext(aiter(bob.work("reviewer"))), 10)).done("yes")
        async with pair.core() as core:
            await core.purge("TASK_main", subject_filter=prepared.subject, below=NO_END)
        assert await ada.transport.publisher.find(prepared) == stored.seq


@pytest.mark.parametrize("kind", ["chat", "dm", "task"])
async def test_which_of_many_are_stored_is_told_to_their_sender_and_nobody_else(
    pair: RealSpace, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MOST_RECORDS", 2)
    monkeypatch.setattr(trace, "PAGE", 2)
    await pair.add("mal")
    these = [(await one_of_each(pair))[kind] for _ in range(7)]
    (*stored, absent), to, since = these, these[0].destination, time.time() - 60
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "mal", receive=False) as mal:
        await ada.transport.connection.current.request(stored[0].subject, b"not a message \xff", timeout=5)
        for prepared in stored:
            await ada.transport.publish(prepared)
        ids = [each.id for each in these]
        assert await ada.transport.publisher.which(kind, to, ids, since=since) == set(ids) - {absent.id}
        assert await ada.transport.publisher.which(kind, to, ids[-2:], since=since) == {ids[-2]}
        assert await mal.transport.publisher.which(kind, to, ids, since=since) == set()
        for wrong, why in (([], "length >= 1"), (["x"], "'x' is not a message id"), (ids * 200, "length <= 1000")):
            with pytest.raises(UsageError, match=why):
                await ada.transport.publisher.which(kind, to, wrong, since=since)


async def test_which_of_many_were_read_or_done_and_removed_is_told_too(pair: RealSpace) -> None:
    these = await one_of_each(pair)
    direct, task = these["dm"], these["task"]
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "bob") as bob:
        for prepared in (direct, task):
            await ada.transport.publish(prepared)
        await (await bob.next_message(10)).ack()
        assert (await ada.receipt(direct.id, "read")).stage == "read"
        await (await asyncio.wait_for(anext(aiter(bob.work("reviewer"))), 10)).done("yes")
        async with pair.core() as core:
            for prepared in (direct, task):
                await core.purge(STREAM[prepared.kind], subject_filter=prepared.subject, below=NO_END)
        for prepared in (direct, task):
            ids = [prepared.id, new_id()]
            found = await ada.transport.publisher.which(prepared.kind, prepared.destination, ids, since=time.time())
            assert found == {prepared.id}


async def test_an_id_made_days_ago_or_by_a_clock_that_was_ahead_is_found(pair: RealSpace) -> None:
    now = int(new_id().replace("-", "")[:12], 16)
    async with connect(pair, "ada", receive=False) as ada:
        for hours in (-72, 1, 30):
            made = f"{now + hours * 3_600_000:012x}"
            prepared = (await one_of_each(pair, id=f"{made[:8]}-{made[8:]}{new_id()[13:]}"))["chat"]
            stored = await ada.transport.publish(prepared)
            assert await ada.transport.publisher.find(prepared) == stored.seq, f"{hours} hours from now"


async def test_a_search_reads_a_bounded_number_of_records_and_goes_on_where_it_was(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MOST_RECORDS", 10)
    monkeypatch.setattr(trace, "PAGE", 10)
    prepared = (await one_of_each(pair))["chat"]
    async with connect(pair, "ada", receive=False) as ada:
        await asyncio.gather(*(ada.send("general", f"before {n}") for n in range(35)))
        stored = await ada.transport.publish(prepared)
        first = await ada.call(FindMessageRequest(kind="chat", to="general", id=prepared.id))
        assert (first.seq, first.state) == (None, "unknown")
        assert first.next is not None
        assert first.next < stored.seq
        assert await ada.transport.publisher.find(prepared) == stored.seq
        other = replace(prepared, id=new_id())
        assert await ada.transport.publisher.find(other) is None


async def test_another_message_of_ones_own_under_the_id_is_said_and_not_taken_for_it(pair: RealSpace) -> None:
    mid = new_id()
    async with connect(pair, "ada", receive=False) as ada:
        for kind in STREAM:
            await ada.transport.publish((await one_of_each(pair, "first", id=mid))[kind])
            other = (await one_of_each(pair, "second", id=mid))[kind]
            with pytest.raises(IdBurned, match="choose a new one"):
                await ada.transport.publisher.find(other)
            with pytest.raises(IdBurned, match="choose a new one"):
                await ada.transport.publish(other)


async def test_the_same_words_sent_again_under_their_id_are_stored_once(pair: RealSpace) -> None:
    """Composed anew they have another time, and sealed anew other bytes."""
    mid = new_id()
    async with connect(pair, "ada", receive=False) as ada:
        for send in (
            lambda: ada.send("general", "once", id=mid),
            lambda: ada.dm("bob", "once", id=mid),
            lambda: ada.ask("reviewer", "once", id=mid),
        ):
            first = await send()
            await another_millisecond()
            assert (await send()).seq == first.seq


async def test_a_publish_that_is_denied_says_why_and_a_prepared_message_uses_wider_access(pair: RealSpace) -> None:
    ada = await local_identity(pair.home, "ada")
    prepared = prepare_chat(ada, "ops", wire.compose(Sender(ada.id, "ada"), text="hello"))
    async with connect(pair, "ada", receive=False) as endpoint:
        with pytest.raises(DeniedError, match=r"may not post to ops.*it may post to general"):
            await endpoint.transport.publish(prepared)
        async with pair.administer() as admin:
            await admin.set_access("ada", AgentFile("ada", read=("general",), post=("general", "ops")))
        assert (await endpoint.transport.publish(prepared)).seq > 0


async def test_the_incarnation_is_another_after_a_restart_and_none_in_between(pair: RealSpace) -> None:
    async with connect(pair, "ada", receive=False) as ada:
        before = ada.transport.incarnation
        assert before
        pair.broker.kill()
        await eventually(lambda: ada.transport.state == "reconnecting")
        assert ada.transport.incarnation is None
        pair.broker.start()
        await eventually(lambda: ada.transport.incarnation is not None, within=20)
        assert ada.transport.incarnation != before


def without_a_leader(monkeypatch: pytest.MonkeyPatch, *answers: Exception, ends: bool = False) -> None:
    """A stream whose replicas choose a leader answers so, one after the other; the last for ever, unless it `ends`."""
    real, left = Connection.request, list(answers)

    async def request(self: Connection, subject: str, *payload: bytes, **options: Any) -> Msg:
        if ".chat." in subject and left:
            raise left.pop(0) if ends or len(left) > 1 else left[0]
        if ".ctl.health." in subject and left:
            body = {"ok": False, "error": {"code": "broker_unreachable", "message": "no stream takes it now"}}
            return (await real(self, subject, *payload, **options))._replace(data=json.dumps(body).encode())
        return await real(self, subject, *payload, **options)

    monkeypatch.setattr(Connection, "request", request)


async def test_a_message_that_finds_no_leader_waits_for_one_and_is_stored_once(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = (await one_of_each(pair))["chat"]
    async with connect(pair, "ada", receive=False) as ada:
        without_a_leader(monkeypatch, *(NoResponders("none") for _ in range(3)), ends=True)
        assert not (await ada.transport.publish(prepared)).duplicate
    assert await count(pair, prepared) == 1


async def test_a_message_that_finds_no_leader_in_time_says_so_and_is_unknown_only_if_it_was_sent_before(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = (await one_of_each(pair))["chat"]
    async with connect(pair, "ada", receive=False) as ada:
        without_a_leader(monkeypatch, NoResponders("none"))
        with pytest.raises(BrokerUnreachable, match="nobody takes this message: no stream takes it now"):
            await ada.transport.publish(prepared, timeout=0.5)
        monkeypatch.undo()
        without_a_leader(monkeypatch, ConnectionGone("it went"), NoResponders("none"))
        with pytest.raises(OutcomeUnknown, match="no confirmation of message"):
            await ada.transport.publish(prepared, timeout=0.5)
    assert await count(pair, prepared) == 0


async def test_a_message_that_may_be_stored_is_unknown_and_not_unreachable_while_the_connection_does_not_come_back(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stored, its answer was lost: a program that hears "unreachable" would store it under another id."""
    prepared = (await one_of_each(pair))["chat"]
    real = Connection.request

    async def answer_lost(self: Connection, subject: str, *payload: bytes, **options: Any) -> Msg:
        answer = await real(self, subject, *payload, **options)
        if ".chat." not in subject:
            return answer
        pair.broker.kill()
        raise ConnectionGone("it went")

    async with connect(pair, "ada", receive=False) as ada:
        monkeypatch.setattr(Connection, "request", answer_lost)
        with pytest.raises(OutcomeUnknown, match=f"{prepared.id}: send it again under the same id"):
            await ada.transport.publish(prepared, timeout=1)
        monkeypatch.undo()
        pair.broker.start()
        assert (await ada.transport.publish(prepared, timeout=20)).duplicate
    assert await count(pair, prepared) == 1


def test_the_terms_of_a_task_are_a_part_of_its_message() -> None:
    (part,) = task_terms(60)
    assert part.body["deadline_s"] == 60
    assert task_terms(None) == ()
    with pytest.raises(UsageError, match="30 days"):
        task_terms(0)
