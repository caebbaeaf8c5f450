"""One agent interface, two transports: what a program may do, it may do the same way directly and through the host.

The agent in memory that tests of the MCP server stand on is held to the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any, Literal

import pytest

import tidings
from daemons import daemon_in
from fake_agent import FakeSpace
from tidings.client.agent import Agent
from tidings.client.message_json import message_json, read_message
from tidings.client.transport import Transport
from tidings.contract.channels import ChannelRequest
from tidings.contract.mail import DeadLettersRequest
from tidings.errors import DeniedError, InvalidName, TaskDead, UnknownPeer, UsageError
from tidings.wire.message import DataPart, new_id
from tidings.wire.roster import Attention
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

PATIENCE = 20.0
Way = Literal["direct", "host", "fake"]


@pytest.fixture(params=["direct", "host", "fake"])
def way(request: pytest.FixtureRequest) -> Way:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
async def space(way: Way, tmp_path: Path) -> AsyncIterator[RealSpace | FakeSpace]:
    """ada and bob may talk in general and team.>; bob reviews. Through the host there is one in this process."""
    people = {"ada": (), "bob": ("reviewer",)}
    if way == "fake":
        fake = FakeSpace()
        for name, roles in people.items():
            fake.add(name, read=("general", "team.>"), post=("general", "team.>"), roles=roles)
        yield fake
        return
    async with real_space(tmp_path / "home") as running, AsyncExitStack() as stack:
        for name, roles in people.items():
            await running.add(name, read=("general", "team.>"), post=("general", "team.>"), roles=roles)
        if way == "host":
            await stack.enter_async_context(daemon_in(running.home.home))
        yield running


def agent(space: RealSpace | FakeSpace, way: Way, name: str, **options: Any) -> Agent[Transport]:
    if isinstance(space, FakeSpace):
        return space.agent(name, **options)
    assert way != "fake"
    return tidings.connect(space.home.name, name=name, home=space.home.home, via=way, **options)


@pytest.mark.requirement("I1")
async def test_what_is_said_in_a_channel_comes_once_with_everything_it_says(space: RealSpace, way: Way) -> None:
    async with agent(space, way, "bob", channels=["general"]) as bob, agent(space, way, "ada") as ada:
        await bob.who()
        sent = await ada.send(
            "#general", "hello", data={"n": 1.5}, mentions=["bob"], priority="now", context="greeting", timeout=PATIENCE
        )
        assert (sent.stage, sent.warnings) == ("confirmed", ())
        came = await bob.next_message(PATIENCE)
        await came.ack()
        assert (came.id, came.text, came.channel, came.kind, came.seq) == (
            sent.id,
            "hello",
            "general",
            "channel",
            sent.seq,
        )
        assert (came.sender.id, came.sender.name, came.mentions_me, came.claims) == (ada.id, "ada", True, None)
        assert (came.message.priority, came.message.context) == ("now", "greeting")
        assert [each.name for each in came.mentions] == ["bob"]
        assert [each.id for each in came.mentions] == [bob.id]
        assert DataPart({"n": 1.5}) in came.parts
        answer = await bob.send("general", "hi", reply_to=came.id, timeout=PATIENCE)
        past = await ada.history("general", 10)
        assert [(each.id, each.text, each.historical) for each in past] == [
            (answer.id, "hi", True),
            (sent.id, "hello", True),
        ]
        assert past[0].message.reply_to == sent.id
        assert (past.more, past.gone, past.hidden) == (False, 0, False)
        assert [each.id for each in await ada.history("general", 1)] == [answer.id]
        assert [each.id for each in await ada.history("general", 5, before=answer.seq)] == [sent.id]


@pytest.mark.requirement("I2")
async def test_a_message_written_as_json_is_read_back_as_it_was(space: RealSpace, way: Way) -> None:
    async with agent(space, way, "bob", channels=["general"]) as bob, agent(space, way, "ada") as ada:
        await ada.send("general", "hello", data=[1, "two"], mentions=["bob"], context="c", timeout=PATIENCE)
        came = await bob.next_message(PATIENCE)
        await came.ack()
        again = read_message(message_json(came))
        for name in (
            "id",
            "kind",
            "channel",
            "sender",
            "seq",
            "text",
            "parts",
            "mentions",
            "claims",
            "mentions_me",
            "wakes",
        ):
            assert getattr(again, name) == getattr(came, name), name
        for name in ("id", "ts", "priority", "reply_to", "context", "mentions", "parts"):
            assert getattr(again.message, name) == getattr(came.message, name), name
        assert again.time_ns // 1_000_000 == came.time_ns // 1_000_000


@pytest.mark.requirement("I3")
async def test_a_direct_message_is_sealed_and_its_receipts_come(space: RealSpace, way: Way) -> None:
    async with agent(space, way, "bob") as bob, agent(space, way, "ada") as ada:
        sent = await ada.dm("bob", "for you alone", timeout=PATIENCE)
        assert (sent.stage, sent.to) == ("confirmed", bob.id)
        came = await bob.next_message(PATIENCE)
        assert (came.kind, came.text, came.sealed, came.channel) == ("direct", "for you alone", True, None)
        assert (await ada.receipt(sent, "delivered", timeout=PATIENCE)).stage == "delivered"
        await came.ack()
        assert (await ada.receipt(sent, "read", timeout=PATIENCE)).stage == "read"
        traced = await ada.trace(sent)
        assert [each.stage for each in traced.receipts] == ["read"]


@pytest.mark.requirement("I3")
async def test_a_receipt_is_not_waited_for_once_its_message_is_at_a_final_stage(
    space: RealSpace | FakeSpace, way: Way
) -> None:
    async with agent(space, way, "ada") as ada:
        sent = await ada.dm("bob", "nobody reads this", timeout=PATIENCE)
        if isinstance(space, FakeSpace):
            space.revoke("bob")
        else:
            async with space.administer() as admin:
                await admin.revoke("bob")
        async with asyncio.timeout(PATIENCE):
            assert (await ada.receipt(sent, "read", timeout=3_600)).stage == "undeliverable"


@pytest.mark.requirement("I4")
async def test_the_same_id_is_one_message(space: RealSpace, way: Way) -> None:
    mid = new_id()
    async with agent(space, way, "ada") as ada:
        first = await ada.send("general", "once", id=mid, timeout=PATIENCE)
        again = await ada.send("general", "once", id=mid, timeout=PATIENCE)
        assert (first.id, first.seq) == (again.id, again.seq) == (mid, first.seq)
        assert len(await ada.history("general")) == 1


@pytest.mark.requirement("I5")
async def test_channels_are_joined_listed_and_left(space: RealSpace, way: Way) -> None:
    async with agent(space, way, "ada") as ada:
        joined = await ada.join("team.>")
        assert (joined.channel, joined.state, joined.cls) == ("team.>", "opened", "durable")
        assert (await ada.join("#general")).channel == "general"
        assert await ada.memberships() == ["general", "team.>"]
        assert {each.channel: each.joined for each in await ada.channels()}["general"] is True
        assert (await ada.channel_info("general")).members == 1
        assert [each.name for each in await ada.members("team.x")] == ["ada"]
        left = await ada.leave("general")
        assert (left.state, left.still_covered_by) == ("left", ())
        assert (await ada.leave("general")).state == "absent"
        assert await ada.memberships() == ["team.>"]


@pytest.mark.requirement("I6")
async def test_who_is_here_and_what_one_may_do(space: RealSpace, way: Way) -> None:
    async with agent(space, way, "ada") as ada, agent(space, way, "bob"):
        found = await ada.who()
        assert found.fresh
        assert {(each.name, each.roles) for each in found} == {("ada", ()), ("bob", ("reviewer",))}
        access = await ada.access()
        assert (access["roles"], access["read"], access["post"]) == ([], ["general", "team.>"], ["general", "team.>"])
        kept = await ada.keep_attention("dnd", {"#general": "quiet"})
        assert kept.standing == Attention("dnd", {"general": "quiet"})
        assert (await ada.attention()).standing == kept.standing
        assert await ada.announce("working", "on the parser") in (True, False)
        assert (ada.name, ada.space, ada.via) == ("ada", "main", "direct" if way == "direct" else "host")


@pytest.mark.requirement("I7")
async def test_a_task_is_asked_claimed_and_done(space: RealSpace, way: Way) -> None:
    async with agent(space, way, "ada") as ada, agent(space, way, "bob") as bob:
        ticket = await ada.ask("reviewer", "is this right?", timeout=PATIENCE)
        assert (await ada.task(ticket.id)).state in ("queued", "claimed")
        job = await bob.claim("reviewer", PATIENCE)
        assert job is not None
        assert (job.text, job.role, job.attempt, job.asker.name, job.message.id) == (
            "is this right?",
            "reviewer",
            1,
            "ada",
            ticket.id,
        )
        await job.done("it is", data={"ok": True})
        with pytest.raises(UsageError, match="already been finished or given back"):
            await job.done("again")
        result = await ticket.result(PATIENCE)
        assert (result.state, result.text, result.worker, result.worker_name) == ("done", "it is", bob.id, "bob")
        assert await bob.claim("reviewer") is None


@pytest.mark.requirement("I7")
async def test_a_task_that_fails_for_good_is_a_dead_letter_with_its_reason(space: RealSpace, way: Way) -> None:
    async with agent(space, way, "ada") as ada, agent(space, way, "bob") as bob:
        ticket = await ada.ask("reviewer", "divide by zero", timeout=PATIENCE)
        async for job in bob.work("reviewer"):
            assert await job.fail("cannot", retry=False) == "dead"
            break
        with pytest.raises(TaskDead, match="cannot"):
            await ticket.result(PATIENCE)
        dead = await ada.call(DeadLettersRequest())
        assert [each.reasons[-1] for each in dead.dead] == ["attempt 1: cannot"]


@pytest.mark.requirement("I7")
async def test_a_job_left_unsettled_is_another_workers(space: RealSpace, way: Way) -> None:
    async with agent(space, way, "ada") as ada, agent(space, way, "bob") as bob:
        ticket = await ada.ask("reviewer", "look", timeout=PATIENCE)
        async with aclosing(bob.work("reviewer")) as jobs:  # type: ignore[type-var]
            assert (await anext(jobs)).attempt == 1
        job = await bob.claim("reviewer", PATIENCE)
        assert job is not None
        assert (job.message.id, job.attempt) == (ticket.id, 2)
        assert await job.put_back() == "queued"


@pytest.mark.requirement("I8")
async def test_a_handler_that_raises_gets_its_message_again(space: RealSpace, way: Way) -> None:
    tries: list[tuple[str, int]] = []
    errors: list[BaseException] = []
    over = asyncio.Event()

    async def callback(message: tidings.Incoming) -> None:
        tries.append((message.text, message.attempt))
        if len(tries) == 1:
            raise ValueError("not now")
        over.set()

    retry = tidings.Retry(attempts=3, first=0.05)
    async with agent(space, way, "bob", retry=retry) as bob, agent(space, way, "ada") as ada:
        bob.on("error", errors.append)
        handling = asyncio.create_task(bob.handle(callback))
        await ada.dm("bob", "try", timeout=PATIENCE)
        async with asyncio.timeout(PATIENCE):
            await over.wait()
        handling.cancel()
    assert tries == [("try", 1), ("try", 2)]
    assert [str(each) for each in errors] == ["not now"]


@pytest.mark.requirement("I9")
async def test_refusals_are_the_same_errors(space: RealSpace, way: Way) -> None:
    async with agent(space, way, "ada") as ada:
        await ada.who()
        with pytest.raises(UnknownPeer):
            await ada.send("general", "hello", mentions=["nobody"])
        with pytest.raises(UnknownPeer):
            await ada.dm("nobody", "hello")
        with pytest.raises(UsageError, match="nothing to say"):
            await ada.send("general", "  ")
        with pytest.raises(DeniedError):
            await ada.send("secret", "hello", timeout=PATIENCE)
        with pytest.raises(DeniedError):
            await ada.join("secret")
        with pytest.raises(InvalidName):
            await ada.call(ChannelRequest("not a channel"))


@pytest.mark.requirement("I10")
async def test_what_was_not_settled_comes_again(space: RealSpace, way: Way) -> None:
    async with agent(space, way, "ada") as ada:
        async with agent(space, way, "bob") as bob:
            await ada.dm("bob", "first", timeout=PATIENCE)
            assert (await bob.next_message(PATIENCE)).text == "first"

        async def again() -> str:
            async with agent(space, way, "bob") as bob:
                message = await bob.next_message(PATIENCE)
                await message.ack()
                return message.text

        assert await asyncio.wait_for(again(), 3 * PATIENCE) == "first"
        await ada.dm("bob", "second", timeout=PATIENCE)
        assert await eventually(again, within=3 * PATIENCE) == "second", "what was settled does not"
