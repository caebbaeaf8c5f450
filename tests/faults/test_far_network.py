"""A bad network between an agent and its space on another machine: slow, lossy, torn, deaf and gone, with TLS and
inside of a websocket."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tidings
from foreign import bundle_of
from hosting import Clock, adopt, has_texts, host_in, texts_of
from tidings.admin.agents import AgentFile
from tidings.client.connect import connect_directly
from tidings.contract.host import SendRequest
from tidings.errors import AuthRevoked, OutcomeUnknown, UnreachableError
from tidings.host import agent_sessions
from tidings.nats import jwt
from tidings.nats.address import moved
from tidings.util.backoff import Backoff
from tidings.wire.message import new_id
from tidings_testing.history import History
from tidings_testing.proxy import FaultProxy, fault_proxy
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

HERE = "127.0.0.2"


@dataclass
class Far:
    """Bob is on another machine, behind `network`; Ada is near."""

    space: RealSpace
    network: FaultProxy
    url: str

    def bob(self, *channels: str, ping: float = 5.0) -> tidings.DirectAgent:
        home = self.space.home.home
        return connect_directly("main", name="bob", channels=channels, home=home, url=self.url, ping_interval=ping)

    def ada(self) -> tidings.DirectAgent:
        return connect_directly("main", name="ada", home=self.space.home.home)

    def bundle(self, folder: Path) -> Path:
        return bundle_of(self.space, "bob", folder, self.url)

    def gone(self) -> None:
        self.network.refuse = True
        self.network.cut()

    def back(self) -> None:
        self.network.refuse = False


@pytest.fixture(params=["tls", pytest.param("wss", marks=pytest.mark.slow)])
async def far(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Far]:
    async with real_space(tmp_path / "home", listen=HERE, ws=HERE) as space:
        for name in ("ada", "bob"):
            await space.add(name)
        info = space.info
        before, port = (info.url, info.port) if request.param == "tls" else (info.ws_url_at(HERE), info.ws_port)
        async with fault_proxy(port, HERE) as network:
            yield Far(space, network, moved(before, [f"127.0.0.1:{network.port}"]))


async def sent(history: History, endpoint: tidings.DirectAgent, name: str, text: str = "x") -> None:
    confirmed = history.sending(name, "general")
    confirmed((await endpoint.send("general", text, id=confirmed.id, timeout=30)).seq)


async def test_300_ms_and_two_percent_loss_cost_time_and_nothing_else(far: Far) -> None:
    history = History()
    far.network.delay, far.network.loss = 0.15, 0.02
    async with far.bob("general") as bob, far.ada() as ada:
        for _ in range(150):
            await sent(history, ada, "ada")
        await asyncio.gather(*(sent(history, bob, "bob") for _ in range(20)))
        for _ in range(150):
            history.took("bob", await bob.next_message(30))
        history.owed("bob", "general")
        history.check()
        assert len(await bob.history("general", 200)) == 170
        assert far.network.lost >= 2
        assert bob.transport.connection.rebuilds == 0, "slow is not gone"


async def test_bytes_that_arrive_one_at_a_time_are_read_the_same(far: Far) -> None:
    history = History()
    async with far.bob("general") as bob, far.ada() as ada:
        far.network.split = True
        for number in range(5):
            await sent(history, ada, "ada", f"{number}" * 500)
        for number in range(5):
            message = await bob.next_message(20)
            assert message.text == f"{number}" * 500
            history.took("bob", message)
        history.owed("bob", "general")
        history.check()


async def test_a_half_open_connection_is_noticed_and_nothing_is_lost(far: Far) -> None:
    history = History()
    async with far.bob("general", ping=0.5) as bob, far.ada() as ada:
        far.network.black_hole = True
        await sent(history, ada, "ada")
        await eventually(lambda: bob.transport.state == "reconnecting", within=10)
        far.network.black_hole = False
        await sent(history, ada, "ada")
        for _ in range(2):
            history.took("bob", await bob.next_message(20))
        history.owed("bob", "general")
        history.check()
        assert far.network.connections >= 2


async def test_a_network_that_is_gone_for_a_while_delays_what_is_said_and_loses_nothing(far: Far) -> None:
    history = History()
    async with far.bob("general", ping=0.5) as bob, far.ada() as ada:
        far.network.refuse = True
        far.network.cut()
        await eventually(lambda: bob.transport.state == "reconnecting")
        with pytest.raises((UnreachableError, OutcomeUnknown)):
            await bob.send("general", "into the void", timeout=0.5)
        for _ in range(20):
            await sent(history, ada, "ada")
            await asyncio.sleep(0.1)
        waiting = asyncio.create_task(sent(history, bob, "bob"))
        assert bob.transport.state == "reconnecting"
        far.network.refuse = False
        await waiting
        for _ in range(20):
            history.took("bob", await bob.next_message(20))
        history.owed("bob", "general")
        history.check()
        assert len(bob.transport.queue) == 0


# --- an hour ---


def note(text: str, to: str) -> SendRequest:
    return SendRequest(id=new_id(), text=text, agent=to, channel=None)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_host_whose_network_was_gone_for_an_hour_delivers_and_receives_what_was_said_meanwhile(
    far: Far, tmp_path: Path
) -> None:
    clock = Clock()
    async with host_in(tmp_path / "near") as near, host_in(tmp_path / "far", clock=clock) as away:
        ada = await adopt(near, far.space, "ada", receive=True, knows=2)
        bob = await away.adopt(("bundle", str(far.bundle(tmp_path))), receive=True)
        await eventually(lambda: len(away.directories.of(bob.space_id).known) >= 2)
        await away.send(bob, note("before", "ada"))
        await has_texts(near, ada, ["before"])
        far.gone()
        for minutes in range(0, 60, 6):
            clock.ahead = minutes * 60
            await away.send(bob, note(f"minute {minutes}", "ada"))
            await near.send(ada, note(f"near {minutes}", "bob"))
        clock.ahead = 3_600
        said = [f"minute {minutes}" for minutes in range(0, 60, 6)]
        assert await texts_of(near, ada) == ["before"]
        far.back()
        await has_texts(near, ada, ["before", *said], within=60)
        await has_texts(away, bob, [f"near {minutes}" for minutes in range(0, 60, 6)], within=60)


async def access_of_bob(far: Far, lifetime: int) -> dict[str, Any]:
    """Give bob another credential, which ends after so many seconds (0: never). Answers what is in it."""
    async with far.space.administer() as admin:
        await admin.set_access("bob", AgentFile("bob", read=("general",), post=("general",)), lifetime=lifetime)
    token, _ = jwt.split_credentials(far.space.home.agent_creds("bob").read_text())
    return dict(jwt.decode(token))


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_credential_that_ended_while_the_network_was_gone_is_renewed_where_its_file_is(far: Far) -> None:
    ended = (await access_of_bob(far, lifetime=6))["exp"]

    async def renew() -> None:
        """As a supervisor does."""
        async with far.space.administer() as admin:
            while True:
                await eventually(lambda: admin.ledger.due(time.time()), within=60)
                assert await admin.renew() == ["bob"]

    async with far.bob("general", ping=0.5) as bob:
        far.gone()
        await eventually(lambda: bob.transport.state == "reconnecting")
        renewing = asyncio.create_task(renew())
        await eventually(lambda: time.time() > ended + 1, within=30)
        far.back()
        await bob.send("general", "back", timeout=30)
        assert not renewing.done()
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_credential_elsewhere_that_ended_while_the_network_was_gone_is_said_and_with_another_its_mail_leaves(
    far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sessions, "REVOKED", Backoff(0.5, 0.5))
    ended = (await access_of_bob(far, lifetime=8))["exp"]
    async with host_in(tmp_path / "near") as near, host_in(tmp_path / "far") as away:
        ada = await adopt(near, far.space, "ada", receive=True, knows=2)
        bob = await away.adopt(("bundle", str(far.bundle(tmp_path))), receive=True)
        await eventually(lambda: len(away.directories.of(bob.space_id).known) >= 2)
        far.gone()
        await away.send(bob, note("meanwhile", "ada"))
        await eventually(lambda: time.time() > ended + 1, within=30)
        far.back()

        async def told() -> str:
            try:
                await away.send(bob, note("later", "ada"))
            except AuthRevoked as error:
                return str(error)
            return ""

        words = await eventually(told, within=60, every=0.5)
        assert "expired" in words
        assert "exp" not in await access_of_bob(far, lifetime=0)
        far.bundle(tmp_path)  # brought there again

        async def arrived() -> bool:
            return "meanwhile" in await texts_of(near, ada)

        await eventually(arrived, within=60)
