"""The network between an endpoint and its broker: slow, torn, deaf and gone."""

import asyncio
import json

import pytest

import tidings
from tidings.errors import OutcomeUnknown, UnreachableError
from tidings.testing.history import History
from tidings.testing.proxy import FaultProxy, fault_proxy
from tidings.testing.real_space import RealSpace
from tidings.testing.waiting import eventually


def connect(space: RealSpace, name: str, proxy: FaultProxy, *channels: str, ping: float = 5.0) -> tidings.Endpoint:
    return tidings.connect(
        "main", name=name, channels=channels, home=space.home.home, url=proxy.url, ping_interval=ping
    )


@pytest.fixture
async def pair(space: RealSpace) -> RealSpace:
    await space.add("ada")
    await space.add("bob")
    return space


@pytest.mark.requirement("X8")
async def test_a_half_open_connection_is_noticed_within_three_intervals_and_nothing_is_lost(pair: RealSpace) -> None:
    async with fault_proxy(pair.info.port) as proxy, connect(pair, "bob", proxy, "general", ping=1.0) as bob:
        states: list[object] = []
        bob.on("connection", states.append)
        proxy.black_hole = True
        started = asyncio.get_running_loop().time()
        history = History()
        async with tidings.connect("main", name="ada", home=pair.home.home) as ada:
            confirmed = history.sending("ada", "general")
            confirmed((await ada.send("general", "while you were deaf", id=confirmed.id)).seq)
            # two missed heartbeats of one interval each, after at most one interval of quiet; the rest is slack
            await eventually(lambda: "reconnecting" in states, within=3 * 1.0 + 5)
            noticed = asyncio.get_running_loop().time() - started
            proxy.black_hole = False
            history.took("bob", await bob.next_message(15))
            history.owed("bob", "general")
            history.check()
        assert noticed > 0.5, "it was noticed by heartbeats, not by a reset"
        assert proxy.connections >= 2


async def test_a_reset_in_the_middle_of_sending_loses_nothing_and_stores_nothing_twice(pair: RealSpace) -> None:
    async with fault_proxy(pair.info.port) as proxy, connect(pair, "ada", proxy) as ada:
        history = History()

        async def send() -> None:
            confirmed = history.sending("ada", "general")
            confirmed((await ada.send("general", "x", id=confirmed.id, timeout=20)).seq)

        sending = [asyncio.create_task(send()) for _ in range(200)]
        for _ in range(3):
            await eventually(lambda: proxy.connections > 0 and ada.state == "ready")
            proxy.cut()
            await eventually(lambda: ada.state != "ready" or all(task.done() for task in sending))
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
        await asyncio.gather(*(ada.send("general", str(n)) for n in range(100)))
    async with fault_proxy(pair.info.port) as proxy, connect(pair, "bob", proxy) as bob:
        asked: list[str] = []
        ask = bob.link.connection.ask

        async def counted(subject: str, *args: object, **options: object) -> object:
            asked.append(subject)
            return await ask(subject, *args, **options)  # type: ignore[arg-type]

        bob.link.connection.ask = counted  # type: ignore[method-assign]
        proxy.delay = 0.267
        assert len(await bob.history("general", 100)) == 100
        assert len(asked) == 1


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
        await eventually(lambda: ada.state == "reconnecting")
        with pytest.raises((UnreachableError, OutcomeUnknown)):
            await ada.send("general", "hello", timeout=0.5)
        with pytest.raises(UnreachableError, match="reconnecting"):
            await ada.link.call("health", "ping")
        proxy.refuse = False
        ada.reconnect()
        await eventually(lambda: ada.state == "ready")
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
