"""Programs that mean no good, or merely hang: what they name, hold or leave half done harms nobody else of the host."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidings
from blocking_host import HostClient, Session
from daemons import Follower, ask, bearer, daemon_in, raw, session_of
from tidings.admin import agents as agent_files
from tidings.admin.identity import Identity, local_identity
from tidings.client.host_http import socket_path
from tidings.client.host_session import is_proven, prove
from tidings.errors import ConfigError, DeniedError, HostBusy, HostUnreachable, NoSession, TidingsError, UsageError
from tidings.host import http_api, mail_handlers, operator_handlers, sessions
from tidings.util.private_files import locked
from tidings.util.private_sockets import connect
from tidings.wire.signing import KeyPair
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def bundle_of(identity: Identity, path: Path, **changed: Any) -> Path:
    """A bundle as `tidings agent export` writes it, but for what was changed."""
    fields = {
        "tidings": 1,
        "space": identity.subjects.space,
        "space_id": identity.space_id,
        "steward_key": identity.steward_key,
        "url": identity.url,
        "agent": {"name": identity.name, "id": identity.id},
        "creds": identity.credentials(),
    }
    path.write_text(json.dumps(fields | changed))
    path.chmod(0o600)
    return path


def opened(home: Path, identity: Identity, source: list[str], space_id: str | None = None) -> Session:
    """A session asked for by hand: whatever the source, it is proven with this key."""
    return HostClient(home).session(
        replace(identity, space_id=space_id) if space_id else identity, source=source, receive=True
    )


# --- what a program names ---


async def test_a_pipe_in_the_place_of_an_identity_does_not_stop_the_host(pair: RealSpace, tmp_path: Path) -> None:
    home, pipe = pair.home.home, tmp_path / "bundle"
    os.mkfifo(pipe, 0o600)
    elsewhere = tmp_path / "elsewhere" / "spaces" / "main"
    (elsewhere / "creds" / "agents").mkdir(parents=True)
    (elsewhere / "creds" / "agents" / "ada.creds").touch(0o600)
    os.mkfifo(elsewhere / "space.toml", 0o600)
    ada = await local_identity(pair.home, "ada")
    async with daemon_in(home):
        for source in (["bundle", str(pipe)], ["home", str(tmp_path / "elsewhere"), "main", "ada"]):
            let_go = threading.Timer(6, lambda named=source: _write_to(named))
            let_go.start()
            begun = time.monotonic()
            with pytest.raises(ConfigError, match="not a plain file"):
                await ask(opened, home, ada, source)
            let_go.cancel()
            assert time.monotonic() - begun < 5, "the host stood still"


def _write_to(source: list[str]) -> None:
    """End the wait of a host that opened it: the test fails by then."""
    path = source[1] if source[0] == "bundle" else f"{source[1]}/spaces/main/space.toml"
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize("space_id", ["../../../../outside", "a/b", "", 7])
async def test_a_bundle_does_not_choose_where_the_host_writes(
    pair: RealSpace, tmp_path: Path, space_id: str | int
) -> None:
    home, ada = pair.home.home, await local_identity(pair.home, "ada")
    path = bundle_of(ada, tmp_path / "bundle", space_id=space_id)
    async with daemon_in(home) as daemon:
        nonce = (await ask(HostClient(home).call, "session challenge"))["nonce"]
        signature = prove(ada.key, str(space_id), str(socket_path(home)), nonce)
        body = {"source": ["bundle", str(path)], "nonce": nonce, "signature": signature}
        with pytest.raises(UsageError, match="space id"):
            await ask(HostClient(home).call, "session open", body)
        assert daemon.host.scopes() == []


@pytest.mark.parametrize("name", ["../ada", "../../ada", "a/b", ".", ""])
async def test_an_agent_is_a_name_and_never_a_path(pair: RealSpace, name: str) -> None:
    home, ada = pair.home.home, await local_identity(pair.home, "ada")
    pair.home.agent_creds("ada").with_name("..").resolve().joinpath("ada.creds").write_text(ada.credentials())
    async with daemon_in(home):
        with pytest.raises(UsageError, match="agent name"):
            await ask(opened, home, ada, ["home", str(home), "main", name])


async def test_a_bundle_with_a_steward_of_its_own_does_not_tell_others_who_is_in_their_space(
    pair: RealSpace, tmp_path: Path
) -> None:
    home, ada = pair.home.home, await local_identity(pair.home, "ada")
    forged = bundle_of(ada, tmp_path / "bundle", steward_key=KeyPair.generate().id)
    async with daemon_in(home) as daemon:
        await session_of(pair, "bob")
        for _ in range(2):
            with pytest.raises(DeniedError, match="another steward"):
                await ask(opened, home, ada, ["bundle", str(forged)])
        assert [scope.name for scope in daemon.host.scopes()] == ["bob"]
        honest = bundle_of(ada, tmp_path / "honest")
        await ask(opened, home, ada, ["bundle", str(honest)])
        with pytest.raises(DeniedError, match="another steward"):
            await ask(opened, home, ada, ["bundle", str(forged)])


async def test_a_bundle_that_is_exchanged_while_the_host_is_down_does_not_change_whom_it_trusts(
    pair: RealSpace, tmp_path: Path
) -> None:
    home, ada = pair.home.home, await local_identity(pair.home, "ada")
    async with daemon_in(home):
        await ask(opened, home, ada, ["bundle", str(bundle_of(ada, tmp_path / "bundle"))])
    forged = bundle_of(ada, tmp_path / "bundle", steward_key=KeyPair.generate().id)
    async with daemon_in(home) as daemon:
        with pytest.raises(DeniedError, match="another steward"):
            await ask(opened, home, ada, ["bundle", str(forged)])
        await session_of(pair, "bob")
        await eventually(lambda: {each.scope.name for each in daemon.host.health() if each.state == "open"} == {"bob"})


async def test_an_identity_that_is_exchanged_after_its_proof_is_not_adopted(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, path = pair.home.home, tmp_path / "bundle"
    ada, bob = [await local_identity(pair.home, name) for name in ("ada", "bob")]

    def exchanged(*facts: Any) -> bool:
        bundle_of(bob, path)
        return is_proven(*facts)

    monkeypatch.setattr(operator_handlers, "is_proven", exchanged)
    async with daemon_in(home) as daemon:
        with suppress(TidingsError):
            await ask(opened, home, ada, ["bundle", str(bundle_of(ada, path))])
        assert bob.id not in {scope.agent for scope in daemon.host.scopes()}, "nobody has proven to be bob"


async def test_the_host_answers_while_somebody_administers_the_space(pair: RealSpace) -> None:
    home, ada = pair.home.home, await local_identity(pair.home, "ada")
    ledger = agent_files.Ledger(pair.home.issued)
    row = ledger.newest("ada")
    assert row is not None
    async with daemon_in(home):
        ledger.put(row, state="changing")
        try:
            with ExitStack() as held:
                held.enter_context(locked(pair.home.admin_lock, "a long operation"))
                opening = asyncio.create_task(ask(opened, home, ada, ["home", str(home), "main", "ada"]))
                for _ in range(20):
                    begun = time.monotonic()
                    await asyncio.sleep(0.02)
                    assert time.monotonic() - begun < 2, "the loop of the host stood still"
                assert not opening.done()
                ledger.put(row, state="active")
            await opening
        finally:
            ledger.put(row)


# --- what a program holds ---


async def test_half_a_request_holds_a_connection_for_a_while_only(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.host.daemon.REQUEST_WITHIN", 0.5, raising=False)
    monkeypatch.setattr("tidings.host.daemon.MOST_CONNECTIONS", 8)
    home = pair.home.home
    halves = (
        b"",
        b"POST /v1/host/health HTTP/1.1\r\nHost",
        b"POST /v1/session/challenge HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
        b"POST /v1/host/health HTTP/1.1\r\nHost: x\r\n\r\nPOST /v1",
    )
    async with daemon_in(home):
        with ExitStack() as held:
            for number in range(24):
                one = held.enter_context(connect(socket_path(home), 10))
                one.sendall(halves[number % len(halves)])
            await eventually(lambda: ask(_answers, home), within=8, what="others are answered")
        token = (await session_of(pair, "ada", receive=True)).file.token
        status, found = await ask(raw, home, "POST", "/v1/inbox/list", b'{"wait": 2}', bearer(token))
        assert (status, found["messages"]) == (200, []), "who asked whole is answered however long that takes"


def _answers(home: Path) -> bool:
    try:
        return raw(home, "POST", "/v1/host/health")[0] == 200
    except (OSError, ValueError):
        return False


async def test_no_agent_holds_all_connections_or_all_streams(pair: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidings.host.daemon.MOST_CONNECTIONS", 24)
    monkeypatch.setattr(http_api, "MOST_AT_ONCE", 6, raising=False)
    monkeypatch.setattr(mail_handlers, "MOST_STREAMS", 8)
    monkeypatch.setattr(mail_handlers, "MOST_STREAMS_OF_ONE", 3, raising=False)
    home = pair.home.home
    async with daemon_in(home):
        ada, bob = await session_of(pair, "ada", receive=True), await session_of(pair, "bob", receive=True)
        with ExitStack() as held:
            for asked, body in [("POST /v1/inbox/list", '{"wait": 60}')] * 24 + [("GET /v1/events", "")] * 10:
                one = held.enter_context(connect(socket_path(home), 0.2))
                head = f"{asked} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ada.file.token}\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                one.sendall(f"{head}Connection: close\r\n\r\n{body}".encode())
                with suppress(TimeoutError):  # who is refused is so at once
                    await ask(one.recv, 100)
            await eventually(lambda: ask(_answers, home), within=8, what="others are answered")
            assert (await ask(bob.me))["name"] == "bob"
            follower = Follower(bob)
            await eventually(lambda: follower.events, what="another agent's stream begins")
            follower.leave()
            with pytest.raises(HostBusy, match="requests of ada"):
                await ask(ada.me)


async def test_so_many_programs_follow_an_inbox_and_so_many_all_of_them_and_one_that_ends_makes_room(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_handlers, "MOST_STREAMS", 3)
    monkeypatch.setattr(mail_handlers, "MOST_STREAMS_OF_ONE", 2)
    async with daemon_in(pair.home.home) as daemon:
        ada, bob = await session_of(pair, "ada", receive=True), await session_of(pair, "bob", receive=True)
        ends = await session_of(pair, "ada", receive=True)
        desk = daemon.app
        assert desk is not None
        following = [Follower(each) for each in (ada, ends)]
        await eventually(lambda: all(each.events for each in following), what="two follow")
        third = Follower(ada)
        await eventually(lambda: third.error, what="a third is refused")
        assert isinstance(third.error, HostBusy)
        assert "2 programs follow the inbox of ada" in str(third.error)
        bobs = Follower(bob)
        await eventually(lambda: bobs.events, what="another agent is not in their way")
        refused = Follower(bob)
        await eventually(lambda: refused.error, what="the host has as many as it takes")
        assert "3 programs follow an inbox at this host" in str(refused.error)
        await ask(ends.end)
        await eventually(lambda: desk.streams == 2, what="one ended")
        again = Follower(ada)
        await eventually(lambda: again.events, what="there is room")


async def test_an_agent_whose_programs_leave_most_sessions_behind_loses_its_own(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 4)
    async with daemon_in(pair.home.home) as daemon:
        bob = await session_of(pair, "bob")
        oldest, *others = [await session_of(pair, "ada") for _ in range(3)]
        assert daemon.app is not None
        known = daemon.app.sessions._known
        for hours, (digest, each) in enumerate(reversed(known.items()), 2):
            known[digest] = replace(each, used_at=each.used_at - hours * sessions.NOTED_MS)
        others.append(await session_of(pair, "ada"))
        for left in (bob, *others):
            assert (await ask(left.me))["session"] == left.id
        with pytest.raises(NoSession):
            await ask(oldest.me)


async def test_a_program_that_asks_for_challenges_and_answers_none_keeps_nobody_from_a_session(pair: RealSpace) -> None:
    home = pair.home.home
    async with daemon_in(home):
        ada = await local_identity(pair.home, "ada")
        asking = asyncio.create_task(ask(_ask_for_challenges, home, 3_000))
        opening = 0
        while not asking.done():
            session = await ask(opened, home, ada, ["home", str(home), "main", "ada"])
            await ask(session.end)
            opening += 1
        assert await asking == {200}
        assert opening > 1, "while they were asked for"
        assert (await ask((await session_of(pair, "bob")).me))["name"] == "bob"


def _ask_for_challenges(home: Path, count: int) -> set[int]:
    """So many, over one connection; the answers' codes."""
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = connect(socket_path(home), 10)
    codes = set()
    with closing(connection):
        for _ in range(count):
            connection.request("POST", "/v1/session/challenge", b"{}", {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            codes.add(response.status)
    return codes


async def test_sessions_of_programs_that_were_killed_make_room_for_new_ones(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    async with daemon_in(pair.home.home) as daemon:
        first, second = await session_of(pair, "ada"), await session_of(pair, "bob")
        third = await session_of(pair, "ada")
        with pytest.raises(tidings.TidingsError, match="3 sessions"):
            await session_of(pair, "bob")
        assert daemon.app is not None
        known = daemon.app.sessions._known
        for digest, each in list(known.items()):
            if each.id == first.id:
                known[digest] = replace(each, used_at=each.used_at - 2 * sessions.NOTED_MS)
        await session_of(pair, "bob")
        for other in (second, third):
            await ask(other.me)
        with pytest.raises(tidings.TidingsError, match="does not know this token"):
            await ask(first.me)


@pytest.mark.parametrize("fields", ['"limit": ' + "9" * 5_000, '"after": -1', '"limit": 1e3', '"limit": 501'])
async def test_a_number_that_is_none_is_a_mistake_of_who_asks(pair: RealSpace, fields: str) -> None:
    async with daemon_in(pair.home.home):
        token, body = (await session_of(pair, "ada")).file.token, f"{{{fields}}}".encode()
        status, said = await ask(raw, pair.home.home, "POST", "/v1/inbox/list", body, bearer(token))
        assert (status, said["error"]["code"]) == (400, UsageError.code)


@pytest.mark.parametrize("words", ["a " * 3_000, '"' * 3_000, "( " * 2_000, "a* OR NEAR " * 500])
async def test_no_search_is_too_long_to_be_answered(pair: RealSpace, words: str) -> None:
    async with daemon_in(pair.home.home):
        ada = await session_of(pair, "ada", receive=True)
        assert await ask(ada.inbox, search=words) == []


# --- the end of a host ---


async def test_what_was_stored_when_the_host_stops_is_said_to_be_stored(pair: RealSpace) -> None:
    """An answer that it was not taken would send the program directly, and the host once more a day later."""
    home = pair.home.home
    async with daemon_in(home) as daemon:
        ada = await session_of(pair, "ada")
        await ask(ada.client.pause, "main", "held")
        sending = asyncio.create_task(ask(ada.send, channel="general", text="once", wait=30))
        await eventually(lambda: ask(ada.outbox), what="it is stored")
        daemon.stopping.set()
        sent = await sending
        assert (sent.stage, sent.state) == ("stored", "pending")
    with pytest.raises(HostUnreachable):
        await ask(ada.send, channel="general", text="not taken")


# --- another session of the agent ---


async def test_mail_is_received_again_when_a_program_asks_for_it(pair: RealSpace) -> None:
    home = pair.home.home
    async with daemon_in(home) as daemon:
        bob, ada = await session_of(pair, "bob", receive=True), await session_of(pair, "ada")

        def health() -> dict[str, Any]:
            return dict(bob.me()["health"])

        async def receiving() -> bool:
            return bool((await ask(health))["receiving"])

        async def take_over_and_leave() -> None:
            await eventually(receiving)
            async with tidings.connect("main", name="bob", home=home) as elsewhere:
                await elsewhere.transport.receive()
                await eventually(lambda: daemon.host.health()[0].superseded)
                assert "`tidings inbox`" in (await ask(health))["reason"]

        await take_over_and_leave()
        await ask(ada.send, agent="bob", text="first", wait=10)
        await ask(bob.receive)
        assert [each["text"] for each in await ask(bob.inbox, wait=10)] == ["first"]
        await take_over_and_leave()
        await ask(ada.send, agent="bob", text="second", wait=10)
        await session_of(pair, "bob", receive=True)
        after = (await ask(bob.inbox))[-1]["row"]
        assert [each["text"] for each in await ask(bob.inbox, after=after, wait=10)] == ["second"]
