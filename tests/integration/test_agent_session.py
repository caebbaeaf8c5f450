"""The session of an agent on a host: there before its space, and through everything that happens to it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tidings
from tidings.client.agent import Agent
from tidings.client.direct_transport import DirectAgent, DirectTransport
from tidings.contract.admin import RevokeRequest
from tidings.errors import AuthRevoked, Reconnecting
from tidings.host import agent_sessions
from tidings.host.agent_sessions import AgentSession, Hooks
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually


class Heard:
    """What the hooks were told."""

    def __init__(self) -> None:
        self.opened: list[DirectAgent] = []
        self.incarnations: list[tuple[str | None, str]] = []
        self.superseded = 0
        self.fail_next = False

    async def on_open(self, endpoint: DirectAgent) -> None:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("a bug of the host")
        self.opened.append(endpoint)

    async def on_incarnation(self, before: str | None, now: str) -> None:
        self.incarnations.append((before, now))

    async def on_superseded(self) -> None:
        self.superseded += 1

    @property
    def hooks(self) -> Hooks:
        return Hooks(on_open=self.on_open, on_incarnation=self.on_incarnation, on_superseded=self.on_superseded)


def endpoint_of(space: RealSpace, name: str) -> Callable[[], DirectAgent]:
    return lambda: tidings.connect(space.home.name, name=name, home=space.home.home, ping_interval=0.3)


@asynccontextmanager
async def session_of(space: RealSpace, name: str, heard: Heard | None = None) -> AsyncIterator[AgentSession]:
    session = AgentSession(space.home.name, name, endpoint_of(space, name), (heard or Heard()).hooks)
    session.start()
    try:
        yield session
    finally:
        async with asyncio.timeout(15):
            await session.stop()


def is_fresh(session: AgentSession) -> bool:
    age = session.health.age
    return age is not None and age < 1.0


async def test_a_session_that_starts_before_its_broker_works_when_that_comes(pair: RealSpace) -> None:
    await pair.stop_steward()
    pair.broker.stop()
    heard = Heard()
    async with session_of(pair, "ada", heard) as session:
        await eventually(lambda: session.error is not None)
        health = session.health
        assert (health.state, health.age) == ("waiting", None)
        assert "no broker answers" in str(health.error)
        with pytest.raises(Reconnecting, match="ada is not connected to main yet: no broker answers"):
            _ = session.endpoint
        assert not session.is_connected
        pair.broker.start()
        await pair.start_steward()
        session.wake()
        await eventually(lambda: session.state == "open")
        await eventually(lambda: heard.incarnations)
        assert heard.opened == [session.endpoint]
        assert (await session.endpoint.send("general", "here at last")).seq > 0
        assert heard.incarnations == [(None, session.endpoint.transport.incarnation)]
        assert session.health.error is None
        assert is_fresh(session)


async def test_a_broker_killed_and_restarted_is_told_as_another_incarnation(pair: RealSpace) -> None:
    heard = Heard()
    async with session_of(pair, "ada", heard) as session:
        await eventually(lambda: len(heard.incarnations) == 1)
        endpoint = session.endpoint
        pair.broker.kill()
        await eventually(lambda: session.state == "reconnecting")
        assert not session.is_connected
        await eventually(lambda: (session.health.age or 0) > 1, what="health ages while nobody answers")
        assert session.endpoint is endpoint, "there is an endpoint all the while"
        pair.broker.start()
        session.wake()
        await eventually(lambda: len(heard.incarnations) == 2, within=20)
        await eventually(lambda: session.state == "open" and is_fresh(session))
        (_, first), (before, now) = heard.incarnations
        assert before == first != now == endpoint.transport.incarnation
        assert heard.opened == [endpoint], "it reconnected by itself"
        endpoint.transport.connection.reconnect()
        await eventually(lambda: endpoint.transport.connection.rebuilds == 2 and session.state == "open")
        assert len(heard.incarnations) == 2, "the same process again is no news"


async def test_of_two_spaces_one_that_is_down_does_not_touch_the_other(pair: RealSpace, tmp_path: Path) -> None:
    async with real_space(tmp_path / "other", "other") as other:
        await other.add("ada")
        async with session_of(pair, "ada") as here, session_of(other, "ada") as there:
            await eventually(lambda: here.state == there.state == "open")
            other.broker.kill()
            await eventually(lambda: there.state == "reconnecting")
            await eventually(lambda: (there.health.age or 0) > 1)
            assert here.state == "open"
            await eventually(lambda: is_fresh(here))
            assert (await here.endpoint.send("general", "still here")).seq > 0
            other.broker.start()
            there.wake()
            await eventually(lambda: there.state == "open", within=20)


async def test_a_revoked_agent_is_said_and_comes_back_under_its_name_when_it_is_added_again(pair: RealSpace) -> None:
    heard = Heard()
    async with session_of(pair, "ada", heard) as session:
        await eventually(lambda: session.state == "open")
        before = session.endpoint.id
        async with pair.administer() as admin:
            await admin.revoke("ada")
        await eventually(lambda: session.state == "revoked", within=20)
        assert "revoked" in str(session.health.error)
        with pytest.raises(Reconnecting, match="revoked"):
            _ = session.endpoint
        await pair.add("ada")
        session.wake()
        await eventually(lambda: session.state == "open")
        assert session.endpoint.id != before
        assert len(heard.opened) == 2


async def test_a_revoked_agent_is_tried_slowly_and_a_wake_is_at_once(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair.administer() as admin:
        await admin.revoke("ada")
    pauses: list[float] = []
    real_pause = AgentSession._pause

    async def noted(self: AgentSession, seconds: float) -> None:
        pauses.append(seconds)
        await real_pause(self, seconds)

    monkeypatch.setattr(AgentSession, "_pause", noted)
    async with session_of(pair, "ada") as session:
        await eventually(lambda: session.state == "revoked")
        (pause,) = pauses
        assert 40 <= pause <= agent_sessions.REVOKED.bound
        session.wake()
        await eventually(lambda: len(pauses) == 2)


async def test_an_agent_whose_token_outlives_its_place_is_said_and_tried_slowly_too(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    real_pause = AgentSession._pause

    async def noted(self: AgentSession, seconds: float) -> None:
        pauses.append(seconds)
        await real_pause(self, seconds)

    monkeypatch.setattr(AgentSession, "_pause", noted)
    heard = Heard()
    async with session_of(pair, "ada", heard) as session:
        await eventually(lambda: session.state == "open")
        async with pair.administer() as admin:
            await admin.call(RevokeRequest(session.endpoint.id))
        session.renew()
        for times in (1, 2):
            await eventually(lambda times=times: len(pauses) == times)  # type: ignore[misc]
            assert pauses[-1] >= 40
            assert session.state == "revoked"
            assert "was revoked" in str(session.health.error)
            assert len(heard.opened) == 2 + times, "with another identity, should it have one, and then no more"
            session.wake()


async def test_a_newer_session_elsewhere_is_told_once_and_is_superseded_when_this_one_takes_back(
    pair: RealSpace,
) -> None:
    heard = Heard()
    async with session_of(pair, "bob", heard) as session:
        await eventually(lambda: session.state == "open")
        await session.endpoint.transport.receive()
        async with endpoint_of(pair, "bob")() as elsewhere, endpoint_of(pair, "ada")() as ada:
            await elsewhere.transport.receive()
            await eventually(lambda: session.state == "superseded")
            await eventually(lambda: heard.superseded == 1)
            assert (await session.endpoint.send("general", "it still sends")).seq > 0
            session.take_back()
            await eventually(lambda: len(heard.opened) == 2 and session.state == "open")
            await session.endpoint.transport.receive()
            await eventually(elsewhere.transport.session.superseded.is_set)
            await ada.dm("bob", "to the host again")
            assert (await session.endpoint.next_message(10)).text == "to the host again"
            assert heard.superseded == 1


@pytest.mark.parametrize("how", ["renewed", "refused"])
async def test_an_endpoint_that_is_being_replaced_is_not_said_to_be_open(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    closing, may_close, close = asyncio.Event(), asyncio.Event(), Agent.close

    async def slowly(endpoint: DirectAgent) -> None:
        closing.set()
        await may_close.wait()
        await close(endpoint)

    heard = Heard()
    async with session_of(pair, "ada", heard) as session:

        def state() -> str:
            return session.state

        await eventually(lambda: state() == "open" and heard.incarnations)
        monkeypatch.setattr(Agent, "close", slowly)
        if how == "renewed":
            session.renew()
            assert state() == "waiting", "at once: whoever asked for it gets the new one"
        else:
            session._heard(AuthRevoked("for a test"))
        async with asyncio.timeout(10):
            await closing.wait()
        assert state() == "waiting"
        may_close.set()
        await eventually(lambda: len(heard.opened) == 2 and state() == "open")


async def test_a_session_that_does_not_get_open_and_says_nothing_is_stuck_and_one_whose_space_is_away_is_not(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sessions, "STUCK_AFTER", 0.3)
    hangs = asyncio.Event()

    async def no_identity() -> None:
        await hangs.wait()

    session = AgentSession("main", "ada", lambda: Agent(DirectTransport(no_identity)))
    assert not session.health.stuck, "it may just be connecting"
    session.start()
    try:
        await eventually(lambda: session.health.stuck)
    finally:
        await session.stop()
    async with session_of(pair, "bob") as bob:
        await eventually(lambda: bob.state == "open")
        assert not bob.health.stuck
    await pair.stop_steward()
    pair.broker.stop()
    async with session_of(pair, "ada") as ada:
        await eventually(lambda: ada.error is not None)
        await asyncio.sleep(2 * agent_sessions.STUCK_AFTER)
        assert (ada.health.state, ada.health.stuck) == ("waiting", False)
    pair.broker.start()


async def test_a_hook_that_fails_does_not_end_the_session(pair: RealSpace, caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    heard.fail_next = True
    async with session_of(pair, "ada", heard) as session:
        await eventually(lambda: session.state == "open" and heard.opened)
        assert heard.opened == [session.endpoint]
    assert "a bug of the host" in caplog.text
    assert session.health.state == "stopped"


@pytest.mark.parametrize("connected", [True, False])
async def test_a_session_stops_in_bounded_time_whatever_the_broker_does(
    pair: RealSpace, connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sessions, "CLOSE_WITHIN", 1.0)
    pid: Any = pair.broker.pid
    session = AgentSession("main", "ada", endpoint_of(pair, "ada"))
    if connected:
        session.start()
        await eventually(lambda: session.state == "open")
    os.kill(pid, signal.SIGSTOP)
    try:
        session.start()
        async with asyncio.timeout(8):
            await session.stop()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert session.state == "stopped"
