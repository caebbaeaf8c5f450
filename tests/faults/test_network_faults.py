"""The network between an endpoint and its broker: slow, torn, deaf and gone."""

import asyncio
import json
from pathlib import Path

import pytest

import tidings
from tidings.client import channels
from tidings.client.connect import connect_directly
from tidings.contract.agents import HealthRequest
from tidings.errors import OutcomeUnknown, UnreachableError
from tidings_testing.history import History
from tidings_testing.proxy import FaultProxy, fault_proxy
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str, proxy: FaultProxy, *channels: str, ping: float = 5.0) -> tidings.DirectAgent:
    return connect_directly(
        "main", name=name, channels=channels, home=space.home.home, url=proxy.url, ping_interval=ping
    )


@pytest.fixture
async def pair(space: RealSpace) -> RealSpace:
    await space.add("ada")
    await space.add("bob")
    return space


@pytest.mark.requirement("X8")
async def test_a_half_open_connection_is_noticed_within_three_intervals_and_nothing_is_lost(pair: RealSpace) -> None:
    """One interval of quiet, then two heartbeats without an answer, one right after the other."""
    async with fault_proxy(pair.info.port) as proxy, connect(pair, "bob", proxy, "general", ping=0.5) as bob:
        states: list[object] = []
        bob.on("connection", states.append)
        connection = bob.transport.connection.current
        flush, pings, waited = connection.flush, list[object](), list[float]()

        async def counted(timeout: float) -> None:
            pings.append(timeout)
            if proxy.black_hole:
                waited.append(timeout)
            await flush(timeout)

        connection.flush = counted  # type: ignore[method-assign, assignment]
        await eventually(lambda: pings)
        proxy.black_hole = True
        before = len(pings)
        history = History()
        async with tidings.connect("main", name="ada", home=pair.home.home) as ada:
            confirmed = history.sending("ada", "general")
            confirmed((await ada.send("general", "while you were deaf", id=confirmed.id)).seq)
            await eventually(lambda: "reconnecting" in states, within=20)
            assert len(pings) - before <= 2, "two are enough"
            assert 0.5 + sum(waited) <= 3 * 0.5, "an interval of quiet and the time given to each heartbeat"
            proxy.black_hole = False
            history.took("bob", await bob.next_message(15))
            history.owed("bob", "general")
            history.check()
        assert proxy.connections >= 2


async def test_a_broker_killed_under_load_loses_nothing_confirmed_and_clients_resume_soon(pair: RealSpace) -> None:
    """Sending goes on through kill -9: what was confirmed is received once, and nobody waits longer than 5 s."""
    async with (
        tidings.connect("main", name="ada", home=pair.home.home) as ada,
        tidings.connect("main", name="bob", channels=["general"], home=pair.home.home, inbox=5_000) as bob,
    ):
        confirmed: list[int] = []
        stop = asyncio.Event()

        async def talk() -> None:
            while not stop.is_set():
                try:
                    confirmed.append((await ada.send("general", "x", timeout=30)).seq)
                except (UnreachableError, OutcomeUnknown):
                    await asyncio.sleep(0.01)

        talking = [asyncio.create_task(talk()) for _ in range(16)]
        await eventually(lambda: len(confirmed) > 100)
        await pair.restart_broker(kill=True)
        answering = asyncio.get_running_loop().time()
        before = len(confirmed)

        def has_resumed() -> bool:
            for talker in talking:
                if talker.done():
                    talker.result()  # a refusal ends it: the test then shows which
            return len(confirmed) > before + 100 and bob.transport.state == "ready"

        await eventually(has_resumed, within=30, what=f"100 more than {before} are confirmed and bob is back")
        resumed = asyncio.get_running_loop().time() - answering
        stop.set()
        await asyncio.gather(*talking)
        await eventually(
            lambda: len(bob.transport.queue) >= len(set(confirmed)), within=20, what="all that was confirmed arrives"
        )
        received = [(await bob.next_message(1)).seq for _ in range(len(bob.transport.queue))]
        assert set(confirmed) <= set(received)
        assert len(received) == len(set(received))
        assert resumed < 5 + 5, "five seconds, and as much again for a machine under load"


async def test_a_steward_away_for_long_stops_nothing_live_and_every_join_completes_when_it_is_back(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "RETRY_PAUSE", 0.05)
    await space.add("ada", post=["team.>"], read=["team.>"])
    await space.add("bob", read=["team.>"])
    joined = ["team.a", "team.b", "team.c"]
    async with (
        fault_proxy(space.info.port) as proxy,
        connect(space, "bob", proxy, "team.a") as bob,
        tidings.connect("main", name="ada", home=space.home.home) as ada,
    ):
        await space.stop_steward()
        for channel in joined[1:]:
            assert (await bob.join(channel)).durable is False
        proxy.cut()
        await eventually(lambda: bob.transport.connection.rebuilds == 1 and bob.transport.state == "ready")
        for channel in joined:
            await ada.send(channel, f"live on {channel}")
        assert sorted([(await bob.next_message(10)).text for _ in joined]) == [f"live on {c}" for c in joined]
        await space.start_steward()
        await eventually(lambda: all(m.joined and m.contiguous for m in bob.transport._channels.memberships.values()))
        assert space.steward is not None
        table = space.steward.table
        assert all(bob.id in table.members_at(channel, table.head + 1) for channel in joined)
        await ada.send("team.b", "the end")
        assert (await bob.next_message(10)).text == "the end"
        assert len(bob.transport.queue) == 0


async def test_a_process_respawned_under_its_name_takes_over_from_one_that_hangs(
    pair: RealSpace, tmp_path: Path
) -> None:
    """The old one neither said goodbye nor hears anything: the new one has the session and everything unsettled."""
    state = tmp_path / "bob.state"
    async with fault_proxy(pair.info.port) as proxy, tidings.connect("main", name="ada", home=pair.home.home) as ada:
        old = tidings.connect(
            "main", name="bob", channels=["general"], home=pair.home.home, url=proxy.url, state=state, ping_interval=0.5
        )
        async with old:
            await ada.send("general", "settled")
            await (await old.next_message(10)).ack()
            old.transport.read_state.save()
            superseded: list[object] = []
            old.on("superseded", superseded.append)
            proxy.black_hole = True
            await ada.send("general", "unheard")
            respawned = tidings.connect("main", name="bob", channels=["general"], home=pair.home.home, state=state)
            async with respawned as new:
                await ada.send("general", "news")
                assert [(await new.next_message(10)).text for _ in range(2)] == ["unheard", "news"]
                proxy.black_hole = False
                await eventually(lambda: superseded, within=20, what="the old one is told when it hears again")
                await ada.send("general", "to the new one")
                assert (await new.next_message(10)).text == "to the new one"


async def test_a_reset_in_the_middle_of_sending_loses_nothing_and_stores_nothing_twice(pair: RealSpace) -> None:
    async with fault_proxy(pair.info.port) as proxy, connect(pair, "ada", proxy) as ada:
        history = History()

        async def send() -> None:
            confirmed = history.sending("ada", "general")
            confirmed((await ada.send("general", "x", id=confirmed.id, timeout=20)).seq)

        sending = [asyncio.create_task(send()) for _ in range(200)]
        for _ in range(3):
            await eventually(lambda: proxy.connections > 0 and ada.transport.state == "ready")
            proxy.cut()
            await eventually(lambda: ada.transport.state != "ready" or all(task.done() for task in sending))
        await asyncio.gather(*sending)
        for message in reversed(await ada.history("general", 300)):
            history.took("whoever reads the log", message)
        history.owed("whoever reads the log", "general")
        history.check()
        assert len(history.of("read")) == 200


@pytest.mark.requirement("X8")
async def test_history_over_a_slow_link_costs_one_round_trip_a_page(pair: RealSpace) -> None:
    """534 ms there and back: what matters is how often we go, so that is what is counted."""
    async with tidings.connect("main", name="ada", home=pair.home.home) as ada:
        await asyncio.gather(*(ada.send("general", str(n)) for n in range(200)))
    async with fault_proxy(pair.info.port) as proxy, connect(pair, "bob", proxy) as bob:
        asked: list[str] = []
        ask = bob.transport.connection.current.request

        async def counted(subject: str, *args: object, **options: object) -> object:
            if ".ctl.history." in subject:
                asked.append(subject)
            return await ask(subject, *args, **options)  # type: ignore[arg-type]

        bob.transport.connection.current.request = counted  # type: ignore[method-assign, assignment]
        proxy.delay = 0.267
        async with asyncio.timeout(3):
            assert len(await bob.history("general", 200)) == 200
        assert len(asked) == 2


async def test_bytes_that_arrive_one_at_a_time_are_read_the_same(pair: RealSpace) -> None:
    async with fault_proxy(pair.info.port) as proxy, connect(pair, "bob", proxy, "general") as bob:
        proxy.split = True
        history = History()
        async with tidings.connect("main", name="ada", home=pair.home.home) as ada:
            for _ in range(5):
                confirmed = history.sending("ada", "general")
                confirmed((await ada.send("general", "x" * 500, id=confirmed.id)).seq)
        for _ in range(5):
            message = await bob.next_message(20)
            assert message.text == "x" * 500
            history.took("bob", message)
        history.owed("bob", "general")
        history.check()


async def test_while_the_broker_is_away_operations_say_so_and_work_again_afterwards(pair: RealSpace) -> None:
    async with fault_proxy(pair.info.port) as proxy, connect(pair, "ada", proxy) as ada:
        proxy.refuse = True
        proxy.cut()
        await eventually(lambda: ada.transport.state == "reconnecting")
        with pytest.raises((UnreachableError, OutcomeUnknown)):
            await ada.send("general", "hello", timeout=0.5)
        with pytest.raises(UnreachableError, match="reconnecting"):
            await ada.call(HealthRequest())
        proxy.refuse = False
        ada.transport.connection.reconnect()
        await eventually(lambda: ada.transport.state == "ready")
        assert (await ada.send("general", "hello")).seq > 0


async def test_a_revoked_agent_is_told_and_does_not_hammer_the_broker(pair: RealSpace) -> None:
    async with fault_proxy(pair.info.port) as proxy, connect(pair, "ada", proxy) as ada:
        creds = pair.home.agent_creds("ada").read_text()
        errors: list[BaseException] = []
        ada.on("error", errors.append)
        async with pair.administer() as admin:
            await admin.revoke("ada")
        pair.home.agent_creds("ada").write_text(creds)
        pair.home.agent_creds("ada").chmod(0o600)
        await eventually(lambda: any("revoked" in str(error) for error in errors), within=20)
        before = proxy.connections
        await asyncio.sleep(1)
        assert proxy.connections - before <= 2, json.dumps([str(error) for error in errors])
