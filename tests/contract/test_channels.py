"""What any endpoint must do in channels: joining, missing nothing, history, leaving (docs/conformance.md)."""

import asyncio
from typing import Any

import pytest

import tidings
from foreign import connect
from tidings.admin.agents import AgentFile
from tidings.contract.channels import ChangeChannelRequest, ChannelRequest, MembershipsRequest
from tidings.errors import DeniedError
from tidings_testing.history import History
from tidings_testing.proxy import fault_proxy
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


@pytest.mark.requirement("C11")
async def test_the_class_of_a_channel_is_the_same_to_everyone_from_one_sequence_on(pair: RealSpace) -> None:
    await pair.add("carol", manage=["general"])
    async with connect(pair, "ada") as ada, connect(pair, "carol") as carol:
        assert (await ada.join("general")).cls == "durable"
        changed = await carol.call(ChangeChannelRequest("general", cls="live"))
        info = await ada.call(ChannelRequest("general"))
        assert (info.cls, (await carol.join("general")).cls) == ("live", "live")
        assert pair.steward is not None
        assert pair.steward.table.class_at("general", changed.seq - 1) == "durable"
        assert pair.steward.table.class_at("general", changed.seq) == "live"


@pytest.mark.requirement("C12")
async def test_what_was_missed_while_away_from_the_broker_is_surfaced_once(pair: RealSpace) -> None:
    history = History()
    async with (
        fault_proxy(pair.info.port) as proxy,
        connect(pair, "bob", "general", url=proxy.url) as bob,
        connect(pair, "ada") as ada,
    ):

        async def send() -> None:
            confirmed = history.sending("ada", "general")
            confirmed((await ada.send("general", "x", id=confirmed.id)).seq)

        proxy.refuse = True
        proxy.cut()
        await eventually(lambda: bob.transport.state == "reconnecting")
        await asyncio.gather(*(send() for _ in range(50)))
        assert len(bob.transport.queue) == 0, "bob was away for all of them"
        proxy.refuse = False
        bob.transport.connection.reconnect()
        await eventually(lambda: len(bob.transport.queue) == 50)
        bob.transport.connection.reconnect()
        await eventually(lambda: bob.transport.connection.rebuilds == 2 and bob.transport.state == "ready")
        await send()
        for _ in range(51):
            history.took("bob", await bob.next_message(10))
        assert len(bob.transport.queue) == 0
    history.owed("bob", "general")
    history.check()


@pytest.mark.requirement("C12")
@pytest.mark.parametrize("first", ["live", "history"])
async def test_a_message_that_comes_live_and_from_history_is_surfaced_once_in_either_order(
    pair: RealSpace, first: str
) -> None:
    history = History()
    async with connect(pair, "bob", "general") as bob, connect(pair, "ada") as ada:
        channels = bob.transport._channels
        membership, after = channels.memberships["general"], bob.transport._log.since

        async def send() -> None:
            confirmed = history.sending("ada", "general")
            confirmed((await ada.send("general", "x", id=confirmed.id)).seq)

        async def crossed(channel: str, start: int, limit: int) -> Any:
            """What is sent while history is read arrives both ways; the live copies are held, or let through."""
            if not history.events:
                await asyncio.gather(*(send() for _ in range(5)))
                await eventually(lambda: membership.held is not None and len(membership.held) == 5)
                if first == "live":
                    channels.live.release(membership)
                    assert len(bob.transport.queue) == 5
            return await after(channel, start, limit)

        bob.transport._log.since = crossed  # type: ignore[method-assign]
        bob.transport.connection.reconnect()
        await eventually(lambda: membership.contiguous and bool(history.events), what="bob has caught up")
        await send()
        for _ in range(6):
            history.took("bob", await bob.next_message(10))
        assert len(bob.transport.queue) == 0
    history.owed("bob", "general")
    history.check()


@pytest.mark.requirement("C13")
async def test_a_join_outside_its_access_is_refused_by_the_broker_and_leaves_nothing(pair: RealSpace) -> None:
    async with connect(pair, "ada") as ada:
        errors: list[object] = []
        ada.on("error", errors.append)
        with pytest.raises(DeniedError):
            await ada.join("secret")
        assert (ada.transport.joined, errors) == ([], [])
        assert (await ada.call(MembershipsRequest())).memberships == ()


@pytest.mark.requirement("C13")
async def test_a_narrowing_drops_the_channel_closes_its_membership_and_keeps_the_rest(pair: RealSpace) -> None:
    await pair.add("cat", read=["general", "ops"])
    async with connect(pair, "cat", "general", "ops") as cat, connect(pair, "ada") as ada:
        async with pair.administer() as admin:
            await admin.set_access("cat", AgentFile("cat", read=("general",), post=("general",)))
        await eventually(lambda: cat.transport.joined == ["general"], within=15, what="the endpoint drops the channel")
        held = (await cat.call(MembershipsRequest())).memberships
        assert [each.pattern for each in held] == ["general"]
        with pytest.raises(DeniedError):
            await cat.history("ops")
        await ada.send("general", "still here")
        assert (await cat.next_message(10)).text == "still here"


@pytest.mark.requirement("C14")
async def test_history_is_bounded_by_access_and_leaving_is_a_hard_cut(pair: RealSpace) -> None:
    await pair.add("carol", read=["ops"], post=["ops"])
    async with connect(pair, "ada", "general") as ada, connect(pair, "carol") as carol:
        with pytest.raises(DeniedError):
            await carol.history("general")
        with pytest.raises(DeniedError):
            await ada.transport.recall("ops", 0)
        async with connect(pair, "bob") as bob:
            await bob.send("general", "before")
            await ada.leave("general")
            await bob.send("general", "after")
            assert (await ada.next_message(10)).text == "before", "what was owed before leaving still comes"
            await ada.join("general", backfill=0)
            await bob.send("general", "again")
            assert (await ada.next_message(10)).text == "again"
            await ada.leave("general")
        assert pair.steward is not None
        table = pair.steward.table
        assert ada.id not in table.members_at("general", table.head + 1)


@pytest.mark.requirement("C15")
async def test_two_agents_and_a_late_third_talk_in_all_three_ways(pair: RealSpace) -> None:
    for name in ("cat", "dan"):
        await pair.add(name, roles=["reviewer"])
    async with connect(pair, "ada", "general") as ada, connect(pair, "bob", "general") as bob:
        await ada.send("general", "to all")
        assert (await bob.next_message(10)).text == "to all"
        await bob.dm("ada", "to you")
        assert (await ada.next_message(10)).text == "to you"
        async with connect(pair, "cat") as cat, connect(pair, "dan") as dan:
            await cat.join("general", backfill=10)
            done: list[str] = []

            async def review(worker: tidings.DirectAgent) -> None:
                async for job in worker.work("reviewer"):
                    done.append(worker.name)
                    await job.done("fine")

            working = [asyncio.create_task(review(worker)) for worker in (cat, dan)]
            assert (await (await ada.ask("reviewer", "look")).result(10)).text == "fine"
            assert len(done) == 1, "exactly one of the two"
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            await ada.send("general", "live")
            heard = [await cat.next_message(10) for _ in range(2)]
            assert [(m.text, m.historical) for m in heard] == [("to all", True), ("live", False)]
            assert len(cat.transport.queue) == 0
