"""Who may speak to the host, and as whom: a program sees its own agent and nobody else, through every surface."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocking_host import HostClient, Session
from daemons import Follower, ask, bearer, daemon_in, raw, session_of
from terminal import Terminal
from tidings.admin.identity import local_identity
from tidings.client import host_http
from tidings.client.host_http import socket_path
from tidings.client.host_session import SessionFile, prove
from tidings.contract.catalogue import SERVED
from tidings.errors import (
    ConfigError,
    DeniedError,
    HostUnreachable,
    NoSession,
    TidingsError,
    UnknownMessage,
    UsageError,
)
from tidings.host import inbox as inbox_views
from tidings.host.daemon import Daemon, HostServer, PeerChecked, is_ours
from tidings.host.http_api import EVENTS
from tidings.util.private_sockets import peer_uid
from tidings.wire.signing import KeyPair
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

MONTH = 31 * 86_400.0


def texts(messages: list[dict[str, Any]]) -> list[str]:
    return [message["text"] for message in messages]


async def lines(terminal: Terminal, *words: str) -> list[dict[str, Any]]:
    done = await asyncio.to_thread(terminal.run, *words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_every_message_is_seen_by_exactly_its_audience_through_http_events_and_the_command_line(
    terminal: Terminal, pair: RealSpace
) -> None:
    await pair.add("cal")
    async with daemon_in(pair.home.home):
        ada = await session_of(pair, "ada", receive=True)
        bob, bobs_other = [await session_of(pair, "bob", receive=True) for _ in range(2)]
        cal = await session_of(pair, "cal", receive=True)
        followers = {name: Follower(each, 0) for name, each in (("ada", ada), ("bob", bob), ("cal", cal))}
        await eventually(lambda: all(each.events for each in followers.values()), what="everybody follows")
        for session in (bob, cal):
            assert (await ask(session.join, "general"))["state"] in ("opened", "live")
        for to in ("bob", "cal", "ada"):
            assert (await ask(ada.send, agent=to, text=f"for {to} alone", wait=10)).stage == "confirmed"
        await ask(ada.send, channel="general", text="for everybody in general", wait=10)
        audience = {
            "ada": {"for ada alone"},
            "bob": {"for bob alone", "for everybody in general"},
            "cal": {"for cal alone", "for everybody in general"},
        }
        for name, session in (("ada", ada), ("bob", bob), ("bob", bobs_other), ("cal", cal)):
            await sees_exactly(session, followers[name], audience[name])
            shown = await lines(terminal, "inbox", "--as", name, "--json")
            assert {message["text"] for message in shown} == audience[name]
            assert texts(await ask(session.inbox, search="alone")) == [f"for {name} alone"]
        for follower in followers.values():
            assert len(follower.texts) == len(set(follower.texts))


async def sees_exactly(session: Session, follower: Follower, wanted: set[str]) -> None:
    async def has_all() -> bool:
        return wanted <= set(texts(await ask(session.inbox)))

    await eventually(has_all, what=f"the inbox of {session.name}")
    assert set(texts(await ask(session.inbox))) == wanted
    await eventually(lambda: wanted <= set(follower.texts), what=f"the events of {session.name}")
    assert set(follower.texts) == wanted


async def test_what_one_agent_handed_over_or_received_does_not_exist_for_another(pair: RealSpace) -> None:
    async with daemon_in(pair.home.home) as daemon:
        ada, bob = await session_of(pair, "ada"), await session_of(pair, "bob", receive=True)
        sent = await ask(ada.send, agent="bob", text="hello", wait=10)
        (got,) = await ask(bob.inbox, wait=10)
        for refused in (bob.outbox_show, bob.requeue, bob.cancel, bob.receipt):
            with pytest.raises(UnknownMessage):
                await ask(refused, sent.id)
        assert await ask(bob.outbox) == []
        assert [row["id"] for row in await ask(ada.outbox)] == [sent.id]
        assert await ask(ada.mark_read, [got["row"]]) == 0
        assert await ask(ada.thread, sent.id) == []
        assert await ask(ada.inbox) == []
        assert (await ask(bob.inbox))[0]["read"] is None, "nobody else can read it for bob"
        assert await ask(bob.mark_read, [got["row"]]) == 1
        seen = json.dumps([await ask(ada.client.health), await ask(ada.client.status)])
        assert "hello" not in seen, "the view of a user has no contents"
        assert sent.id not in seen
        assert daemon.host.scopes()[0].name == "ada"


async def test_no_route_of_an_agent_answers_without_a_token_or_with_one_that_is_not_good(pair: RealSpace) -> None:
    home = pair.home.home
    async with daemon_in(home) as daemon:
        ada = await session_of(pair, "ada", receive=True)
        ended = await session_of(pair, "ada")
        await ask(ended.end)
        old = await session_of(pair, "ada")
        good = {"Authorization": f"Bearer {ada.file.token}"}
        assert (await ask(raw, home, "POST", "/v1/inbox/list", None, good))[0] == 200
        tokens = {"none": "", "foreign": KeyPair.generate().id, "ended": ended.file.token, "half": ada.file.token[:-1]}
        asked = [("POST", path) for path, operation in SERVED.items() if operation.caller != "user"]
        assert len(asked) > 40
        for method, path in [*asked, ("GET", EVENTS)]:
            for name, token in tokens.items():
                headers = bearer(token) if token else {"Content-Type": "application/json"}
                status, said = await ask(raw, home, method, path, b"{}" if method == "POST" else None, headers)
                assert (status, said["error"]["code"]) == (401, "no_session"), (method, path, name)
        later = daemon.host.database.clock() + MONTH
        daemon.host.database.clock = lambda: later
        with pytest.raises(NoSession, match="not used for 30 days"):
            await ask(old.inbox)
        with pytest.raises(NoSession, match="does not know this token"):
            await ask(old.inbox)


async def test_a_session_needs_the_key_of_its_agent_and_a_fresh_challenge(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = pair.home.home
    ada, bob = [await local_identity(pair.home, name) for name in ("ada", "bob")]
    place, source = str(socket_path(home)), ["home", str(home), "main", "ada"]
    async with daemon_in(home) as daemon:
        client = HostClient(home)

        async def opened(**changed: Any) -> dict[str, Any]:
            nonce = changed.pop("nonce", None) or (await ask(client.call, "session challenge"))["nonce"]
            key, space_id = changed.pop("key", ada.key), changed.pop("space_id", ada.space_id)
            signature = prove(key, space_id, changed.pop("socket", place), nonce)
            body = {"source": source, "agent": ada.id, "nonce": nonce, "signature": signature, **changed}
            return await ask(client.call, "session open", body)

        mallory = KeyPair.generate()
        forged: list[dict[str, Any]] = [
            {"key": bob.key},
            {"key": bob.key, "agent": bob.id},
            {"key": mallory, "agent": mallory.id},
            {"space_id": mallory.id},
            {"socket": "/elsewhere/host.sock"},
            {"signature": ""},
            {"signature": "A" * 86},
            {"signature": "\u00e4\n=="},
        ]
        for change in forged:
            with pytest.raises(DeniedError, match="not signed with the key of ada"):
                await opened(**change)
        with pytest.raises(NoSession, match="challenge"):
            await opened(nonce="never given out")
        nonce = (await ask(client.call, "session challenge"))["nonce"]
        with pytest.raises(UsageError, match="no credential for agent nobody"):
            await opened(nonce=nonce, source=["home", str(home), "main", "nobody"])
        with pytest.raises(NoSession, match="challenge"):
            await opened(nonce=nonce)
        with pytest.raises(TidingsError):
            await opened(source=["bundle", str(pair.home.agent_creds("bob"))])
        with pytest.raises(UsageError):
            await opened(source=["home"])
        assert daemon.host.scopes() == [], "whoever proved nothing changed nothing"
        late = (await ask(client.call, "session challenge"))["nonce"]
        with monkeypatch.context() as later:
            later.setattr(daemon_challenges(daemon), "_clock", lambda: time.monotonic() + 31)
            with pytest.raises(NoSession, match="challenge"):
                await opened(nonce=late)
        assert (await opened())["name"] == "ada"


def daemon_challenges(daemon: Daemon) -> Any:
    assert daemon.app is not None
    return daemon.app.sessions.challenges


async def test_another_user_is_refused_before_a_request_is_read(pair: RealSpace) -> None:
    class SomebodyElses(PeerChecked):
        admits = staticmethod(lambda peer: peer is not None and peer_uid(peer) == os.geteuid() + 1)

    async with daemon_in(pair.home.home, SomebodyElses) as daemon:
        for path in SERVED:
            status, said = await ask(raw, pair.home.home, "POST", path)
            assert (status, said["error"]["code"]) == (403, "denied")
        with pytest.raises(DeniedError, match="belongs to another user"):
            await ask(HostClient(pair.home.home).stop)
        assert not daemon.stopping.is_set()


async def test_who_cannot_be_named_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a connection over TCP the kernel tells no user, even if it is ours."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert is_ours(ours)
        assert not is_ours(None)
        monkeypatch.setattr("tidings.host.daemon.peer_uid", lambda _: None)
        assert not is_ours(ours)
    monkeypatch.undo()
    asked: list[str] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        asked.append(scope["path"])

    stopping = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(HostServer(app, stopping).serve(sockets=[listener]))
        with socket.create_connection(listener.getsockname(), timeout=10) as tcp:
            assert peer_uid(tcp) != os.geteuid()
            tcp.sendall(b"POST /v1/host/health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await ask(tcp.recv, 4096)).startswith(b"HTTP/1.1 403 ")
        stopping.set()
        async with asyncio.timeout(10):
            await serving
    assert asked == []


async def test_a_client_says_nothing_to_a_socket_of_another_user(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_in(pair.home.home):
        monkeypatch.setattr("tidings.client.host_http.peer_uid", lambda _: os.geteuid() + 1)
        with pytest.raises(ConfigError, match="another user serves"):
            await host_http.HostClient(pair.home.home).health()


async def test_sessions_outlive_a_restart_and_their_files_are_private(pair: RealSpace, tmp_path: Path) -> None:
    path = tmp_path / "sessions" / "ada.json"
    async with daemon_in(pair.home.home) as daemon:
        kept, ended = await session_of(pair, "ada", receive=True), await session_of(pair, "ada")
        kept.save(path)
        await ask(ended.end)
        database = daemon.host.database.path
        mode = stat.S_IMODE(socket_path(pair.home.home).stat().st_mode)
        assert mode == 0o600
        assert stat.S_IMODE(socket_path(pair.home.home).parent.stat().st_mode) == 0o700
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    assert kept.file.token not in repr(kept.file)
    for file in database.parent.glob("host.db*"):
        assert kept.file.token.encode() not in file.read_bytes(), "only its hash is kept"
    with pytest.raises(HostUnreachable):
        await ask(kept.me)
    async with daemon_in(pair.home.home):
        again = Session.from_file(path)
        me = await ask(again.me)
        assert (me["session"], me["name"], me["receive"]) == (kept.id, "ada", True)
        await eventually(lambda: is_open(again), what="the host goes on for ada")
        with pytest.raises(NoSession):
            await ask(ended.me)
        await ask(again.end)
        with pytest.raises(NoSession):
            await ask(again.me)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        SessionFile.read(path)


async def is_open(session: Session) -> bool:
    return bool((await ask(session.me))["health"]["state"] == "open")


async def test_a_stream_ends_with_its_session_at_once(pair: RealSpace) -> None:
    async with daemon_in(pair.home.home) as daemon:
        bob, ada = await session_of(pair, "bob", receive=True), await session_of(pair, "ada")
        await eventually(lambda: is_open(bob))
        follower = Follower(bob, 0)
        await eventually(lambda: follower.events, what="it follows")
        await ask(bob.end)
        await eventually(lambda: daemon.app is not None and daemon.app.streams == 0, within=3, what="it is over")
        await eventually(lambda: follower.error is not None, what="its reader is told")
        await ask(ada.send, agent="bob", text="for the next session", wait=10)
        assert isinstance(follower.error, NoSession)
        assert follower.texts == []
        other = await session_of(pair, "bob", receive=True)
        assert texts(await ask(other.inbox, wait=10)) == ["for the next session"]


async def test_a_question_that_waits_ends_with_its_session_and_is_told_nothing_more(pair: RealSpace) -> None:
    async with daemon_in(pair.home.home) as daemon:
        bob, ada = await session_of(pair, "bob", receive=True), await session_of(pair, "ada")
        await eventually(lambda: is_open(bob))
        sent = await ask(bob.send, agent="ada", text="unread", wait=10)
        waiting = [
            asyncio.create_task(ask(bob.inbox, wait=30)),
            asyncio.create_task(ask(bob.receipt, sent.id, "read", wait=30)),
        ]
        desk = daemon.app
        assert desk is not None
        await eventually(lambda: desk.asking.total() == 2, what="both wait")
        await ask(bob.end)
        for each in waiting:
            with pytest.raises(NoSession, match="has ended: open another"):
                async with asyncio.timeout(5):
                    await each
        await ask(ada.send, agent="bob", text="for the next session", wait=10)


async def test_a_client_that_speaks_to_another_host_or_another_version_is_told_so(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_in(pair.home.home):
        ada = await session_of(pair, "ada")
        with pytest.raises(ConfigError, match="is of the host at"):
            ada.client.resume(replace(ada.file, socket=str(tmp_path / "other" / "host.sock")))
        client = await ask(HostClient.find, pair.home.home)
        assert client is not None
        assert client.mismatch is None
        client.version = "9.9"
        assert "the host runs Tidings 9.9 and this is" in str(client.mismatch)
        monkeypatch.setattr("tidings.contract.host.API", 2)
        with pytest.raises(ConfigError, match=r"API version 2, this is .* with API version 1"):
            await ask(HostClient.find, pair.home.home)
    assert HostClient.find(pair.home.home) is None


async def test_a_key_that_was_replaced_gets_a_session_of_its_own(terminal: Terminal, pair: RealSpace) -> None:
    """The commands keep a session of an agent; a name that came back with another key is another agent."""
    async with daemon_in(pair.home.home) as daemon:
        assert (await asyncio.to_thread(terminal.run, "send", "general", "one", "--as", "ada")).returncode == 0
        (old,) = daemon.host.scopes()
        async with pair.administer() as admin:
            await admin.rotate("ada")
        again = await asyncio.to_thread(terminal.run, "send", "general", "two", "--as", "ada")
        assert again.returncode == 0, again.stderr
        assert {scope.agent for scope in daemon.host.scopes()} > {old.agent}


async def test_a_rotation_is_refused_while_the_host_holds_something_unread_for_the_old_key(
    terminal: Terminal, pair: RealSpace
) -> None:
    async def run(*words: str) -> Any:
        return await asyncio.to_thread(terminal.run, *words)

    async with daemon_in(pair.home.home) as daemon:
        assert (await run("inbox", "--as", "bob")).returncode == 0
        assert (await run("dm", "bob", "are you there?", "--as", "ada")).returncode == 0

        async def is_held() -> bool:
            return sum((await daemon.host.inbox.read(inbox_views.unread_counts)).values()) == 1

        await eventually(is_held, what="the host has it")
        refused = await run("agent", "rotate", "bob")
        assert refused.returncode == 6
        assert "what lies unread in the inbox of the host: 1 message" in refused.stderr
        dropped = await run("agent", "rotate", "bob", "--drop-unread", "--json")
        assert dropped.returncode == 0, dropped.stderr
        assert "1 message in the inbox of the host" in json.loads(dropped.stdout)["dropped"]
