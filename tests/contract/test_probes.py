"""Probes that caught or missed real bugs in earlier meshes, as they read here; other tests carry the rest of X."""

import asyncio
import signal

import pytest

from foreign import connect
from tidings.contract.agents import HealthRequest
from tidings_testing.history import History
from tidings_testing.processes import child, steward_child
from tidings_testing.proxy import fault_proxy
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


@pytest.mark.requirement("X1")
async def test_a_steward_stopped_while_it_starts_leaves_no_lease_that_the_next_must_wait_out(pair: RealSpace) -> None:
    await pair.stop_steward()
    place = ("--home", pair.home.home, "--space", "main", "--lease-ttl", "60")
    async with pair.core() as core:
        before = (await core.info("LOG_main"))["state"]["last_seq"]

        async def has_written() -> bool:
            return bool((await core.info("LOG_main"))["state"]["last_seq"] > before)

        async with child("-m", "tidings.supervisor.children", "steward", *place) as doomed:
            await eventually(has_written, within=20, every=0, what="it takes its lease")
            doomed.signal(signal.SIGTERM)
            assert await doomed.ended() == 0
    async with steward_child(pair.home, ttl=60), pair.agent("ada") as ada:
        await ada.control.call(HealthRequest())


@pytest.mark.requirement("X6")
async def test_fifteen_hundred_messages_to_a_member_who_is_away_all_arrive_once(pair: RealSpace) -> None:
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
        for _ in range(6):
            await asyncio.gather(*(send() for _ in range(250)))
        proxy.refuse = False
        bob.transport.connection.reconnect()
        for _ in range(1_500):
            message = await bob.next_message(20)
            history.took("bob", message)
            await message.ack()
        assert len(bob.transport.queue) == 0
    history.owed("bob", "general")
    history.check()


@pytest.mark.requirement("X10")
async def test_a_name_given_again_means_the_living_one_in_mentions_and_mail(pair: RealSpace) -> None:
    async with connect(pair, "ada", "general") as ada:
        old = (await ada.transport.resolve("bob")).id
        async with pair.administer() as admin:
            await admin.revoke("bob")
        new = (await pair.add("bob")).row.id
        await eventually(lambda: [a.id for a in ada.transport.roster.agents() if a.name == "bob"] == [new])
        async with connect(pair, "bob", "general") as bob:
            receipt = await ada.dm("bob", "for whom?")
            assert receipt.to == new != old
            await ada.send("general", "hello", mentions=["bob"])
            received = [await bob.next_message(10) for _ in range(2)]
            assert sorted((m.kind, m.mentions_me) for m in received) == [("channel", True), ("direct", False)]
