"""The host over its socket: what it refuses to read, what it streams, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import tidings
from blocking_host import HostClient, Session
from daemons import Follower, ask, bearer, daemon_in, raw, session_of
from hosted import break_trigger, mend_trigger
from tidings.cli import doctor, running
from tidings.cli.context import Context
from tidings.cli.host import look
from tidings.cli.main import main
from tidings.client.host_http import socket_path
from tidings.contract.host import MarkReadRequest
from tidings.errors import (
    ConflictError,
    HostRuns,
    HostUnreachable,
    IdReused,
    NoSession,
    OutcomeUnknown,
    StoreError,
    StoreFull,
    StoreReadOnly,
    TidingsError,
    TooLarge,
    UnknownMessage,
    UsageError,
)
from tidings.host import http_api, mail_handlers, outbox_views, sessions
from tidings.host import inbox as inbox_views
from tidings.host.daemon import Daemon
from tidings.host.registry import Scope
from tidings.util.database import Database
from tidings.util.private_sockets import connect
from tidings.wire.message import new_id
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


async def refused(home: Path, status: int, code: str, *request: Any) -> str:
    found, said = await ask(raw, home, *request)
    assert (found, said["error"]["code"], said["error"]["retryable"]) == (status, code, False), (request[:2], said)
    return str(said["error"]["message"])


async def test_what_a_request_may_not_be_is_refused_with_a_sentence_and_nothing_happens(pair: RealSpace) -> None:
    home = pair.home.home
    async with daemon_in(home) as daemon:
        ada = await session_of(pair, "ada")
        token = ada.file.token
        good = json.dumps({"channel": "general", "text": "hello"}).encode()
        for path in ("/v1/host/health", "/v1/message/send", "/v1/nowhere"):
            said = await refused(home, 403, "denied", "POST", path, good, bearer(token, Origin="http://localhost"))
            assert "Origin" in said
            said = await refused(home, 400, "usage", "GET", f"{path}?token={token}")
            assert "Authorization header" in said
        for body, kind, words in (
            (good, "text/plain", "Content-Type"),
            (good, "", "Content-Type"),
            (b"{", "application/json", "strict JSON"),
            (b'{"channel": "general", "channel": "x", "text": "twice"}', "application/json", "strict JSON"),
            (b'{"channel": "general", "text": NaN}', "application/json", "strict JSON"),
            (b"[1]", "application/json", "must be a JSON object"),
            (b"\xff\xfe", "application/json", "strict JSON"),
            (b'{"channel": "general", "text": "x", "as": "bob"}', "application/json", "as"),
            (b'{"text": "to nobody"}', "application/json", "exactly one of"),
        ):
            headers = bearer(token) | {"Content-Type": kind}
            assert words in await refused(home, 400, "usage", "POST", "/v1/message/send", body, headers), body
        for body in (
            b'{"limit": -1}',
            b'{"after": "x"}',
            b'{"unread": "maybe"}',
            b'{"kind": "both"}',
            b'{"wait": NaN}',
        ):
            await refused(home, 400, "usage", "POST", "/v1/inbox/list", body, bearer(token))
        for body in (b'{"states": ["lost"]}', b'{"limit": 999999999999}'):
            await refused(home, 400, "usage", "POST", "/v1/outbox/list", body, bearer(token))
        said = await refused(home, 400, "usage", "POST", "/v1/inbox/list?limit=1", b"{}", bearer(token))
        assert "as a JSON object in the body" in said
        await refused(home, 400, "usage", "GET", "/v1/events", None, bearer(token, **{"Last-Event-ID": "first"}))
        for rows in ('{"rows": ["1"]}', '{"rows": [0]}', '{"rows": [99999999999999999999]}', '{"row": [1]}'):
            await refused(home, 400, "usage", "POST", "/v1/inbox/read", rows.encode(), bearer(token))
        await refused(home, 404, "usage", "GET", "/v1/nowhere", None, bearer(token))
        await refused(home, 405, "usage", "PUT", "/v1/message/send", good, bearer(token))
        unknown = json.dumps({"id": new_id()}).encode()
        await refused(home, 404, "unknown_message", "POST", "/v1/outbox/show", unknown, bearer(token))
        assert await daemon.host.outbox.read(outbox_views.counts) == {}


async def test_a_body_beyond_the_limit_is_refused_before_it_is_held(pair: RealSpace) -> None:
    home = pair.home.home
    async with daemon_in(home):
        ada = await session_of(pair, "ada")
        headers = bearer(ada.file.token)
        huge = b'{"rows": [' + b"1," * MarkReadRequest.operation.limit + b"1]}"
        said = await refused(home, 413, "too_large", "POST", "/v1/inbox/read", huge, headers)
        assert "more than 524,288 bytes; its largest field is `rows`" in said
        lying = headers | {"Content-Length": str(2**40)}
        assert "more than" in await refused(home, 413, "too_large", "POST", "/v1/inbox/read", b"{", lying)
        status = await ask(endless, home, ada.file.token)
        assert status.startswith(b"HTTP/1.1 413")
        with pytest.raises(TooLarge):
            await ask(ada.send, channel="general", text="x" * 3_000_000)
        with pytest.raises(TooLarge, match="limit is 262144"):
            await ask(ada.send, channel="general", text="x" * 262_144)
        assert (await ask(ada.me))["name"] == "ada", "and the next request is answered"


def endless(home: Path, token: str) -> bytes:
    """A body in pieces that says no length and never ends."""
    with connect(socket_path(home), 10) as connection:
        head = f"POST /v1/inbox/read HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(10_000):
                connection.sendall(b"1000\r\n" + b"[" * 4096 + b"\r\n")
        except OSError:
            pass
        return connection.recv(64)


async def test_a_message_of_256_kib_goes_through_whole_to_a_channel_and_sealed(pair: RealSpace) -> None:
    async with daemon_in(pair.home.home):
        ada, bob = await session_of(pair, "ada"), await session_of(pair, "bob", receive=True)
        await ask(bob.join, "general")
        posted, sealed = "ä\n" * 65_400, "z" * 190_000
        assert (await ask(ada.send, channel="general", text=posted, wait=20)).stage == "confirmed"
        assert (await ask(ada.send, agent="bob", text=sealed, data={"k": [1]}, wait=20)).stage == "confirmed"
        await eventually(lambda: counts(bob, 2), what="both arrived")
        found = {message["kind"]: message for message in await ask(bob.inbox)}
        assert found["channel"]["text"] == posted
        assert found["direct"]["text"] == sealed
        assert found["direct"]["parts"][1] == {"kind": "data", "data": {"k": [1]}}, "opened for whom it is sealed"
        follower = Follower(bob, 0)
        await eventually(lambda: len(follower.texts) == 2, what="both are streamed")
        assert set(follower.texts) == {posted, sealed}


async def counts(session: Session, number: int) -> bool:
    return len(await ask(session.inbox, limit=500)) >= number


async def test_an_agent_is_here_while_a_program_of_it_is_attached_and_not_because_its_host_receives(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LATELY", 1.0)
    monkeypatch.setattr(sessions, "LOOK_EVERY", 0.05)
    async with daemon_in(pair.home.home), tidings.connect("main", name="ada", home=pair.home.home) as ada:
        await ada.who()
        told = ["offline"]
        ada.on("presence", lambda agent: told.append(agent.status) if agent.name == "bob" else None)

        def changes() -> list[str]:
            return [after for before, after in pairwise(told) if after != before]

        async def is_seen(*statuses: str) -> None:
            await eventually(lambda: changes() == [*statuses], within=20, what=f"bob is {statuses}")
            del told[:-1]

        command = await session_of(pair, "bob", receive=True, program=sessions.COMMAND)
        await eventually(lambda: _receives(command), what="the host keeps bob's mail")
        await ada.dm("bob", "are you there?")
        assert len(await ask(command.inbox, wait=10)) == 1
        await ask(command.send, channel="general", text="a command of mine", wait=10)
        assert changes() == [], "neither the host nor a command is bob"
        program = await session_of(pair, "bob")
        await ask(program.me)
        await is_seen("idle", "offline")
        await ask(program.me)
        await is_seen("idle")
        await ask(program.end)
        await is_seen("offline")
        follower = Follower(command)
        await is_seen("idle")
        follower.leave()
        await ada.dm("bob", "one more")
        await is_seen("offline")


async def _receives(session: Session) -> bool:
    return bool((await ask(session.me))["health"]["receiving"])


async def test_a_stream_goes_on_across_reconnects_and_restarts_without_a_gap_or_a_second_copy(pair: RealSpace) -> None:
    home = pair.home.home
    sent: list[str] = []

    async def say(ada: Session, count: int) -> None:
        for _ in range(count):
            text = f"number {len(sent)}"
            await ask(ada.send, agent="bob", text=text, wait=10)
            sent.append(text)

    async with daemon_in(home):
        ada, bob = await session_of(pair, "ada"), await session_of(pair, "bob", receive=True)
        follower = Follower(bob, None, give_up=False)
        await eventually(lambda: follower.events, what="it follows from now on")
        assert (follower.events[0].kind, follower.events[0].row) == ("state", 0), "it knows where it began"
        await say(ada, 5)
        await eventually(lambda: len(follower.texts) == 5)
        short = Follower(bob, 0)
        await eventually(lambda: len(short.texts) == 5)
        short.leave()
        await say(ada, 3)
        await eventually(lambda: len(follower.texts) == 8)
    async with daemon_in(home):
        await say(ada, 4)
        await eventually(lambda: len(follower.texts) == 12, what="the stream found the host again")
    async with daemon_in(home):
        await say(ada, 2)
        await eventually(lambda: len(follower.texts) == 14)
        resumed = Follower(bob, short.rows[-1])
        await eventually(lambda: len(resumed.texts) >= 14 - len(short.texts))
        follower.leave()
        await say(ada, 1)
        await eventually(lambda: len(follower.texts) == 15)
    assert follower.texts == sent
    assert short.texts + resumed.texts[: 14 - len(short.texts)] == sent[:14]
    assert follower.rows == sorted(set(follower.rows))


async def test_mail_is_opened_for_a_stream_beside_the_loop(pair: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    mail = inbox_views.inbox_message

    def noted(*asked: Any) -> Any:
        opened.append(threading.get_ident())
        return mail(*asked)

    async with daemon_in(pair.home.home):
        ada, bob = await session_of(pair, "ada"), await session_of(pair, "bob", receive=True)
        await ask(ada.send, agent="bob", text="sealed", wait=10)
        assert await ask(bob.inbox, wait=10)
        monkeypatch.setattr(inbox_views, "inbox_message", noted)
        follower = Follower(bob, 0)
        await eventually(lambda: follower.texts == ["sealed"], what="it is streamed")
        follower.leave()
    assert opened
    assert threading.get_ident() not in opened


async def test_streams_that_begin_together_are_counted_before_there_is_room_for_all(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_handlers, "MOST_STREAMS_OF_ONE", 1)
    async with daemon_in(pair.home.home) as daemon:
        bob, begun, go_on = await session_of(pair, "bob", receive=True), list[str](), asyncio.Event()
        read = daemon.host.inbox.read

        async def slow(view: Callable[..., Any], *of: Any, **more: Any) -> Any:
            if view is inbox_views.last:
                begun.append(of[1])
                await go_on.wait()
            return await read(view, *of, **more)

        monkeypatch.setattr(daemon.host.inbox, "read", slow)
        followers = [Follower(bob) for _ in range(3)]
        await eventually(lambda: len(begun) == 3, what="all begin")
        go_on.set()
        await eventually(lambda: sum(each.error is not None for each in followers) == 2, what="two are refused")
        await eventually(lambda: sum(bool(each.events) for each in followers) == 1, what="one follows")


async def test_messages_that_come_while_a_stream_begins_are_streamed_once(pair: RealSpace) -> None:
    async with daemon_in(pair.home.home):
        ada, bob = await session_of(pair, "ada"), await session_of(pair, "bob", receive=True)
        await ask(ada.send, agent="bob", text="first", wait=10)
        await ask(bob.inbox, wait=10)
        sending = asyncio.gather(*(ask(ada.send, agent="bob", text=f"m{n}", wait=20) for n in range(40)))
        followers = []
        while not sending.done():
            followers.append(Follower(bob, 0))
            await asyncio.wait({sending}, timeout=0.05)
        await sending
        await eventually(lambda: all(len(each.texts) == 41 for each in followers), within=20)
        for each in followers:
            assert each.rows == sorted(set(each.rows))
        assert len(followers) > 1


async def test_a_reader_that_takes_nothing_is_cut_and_holds_nobody_up(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_handlers, "SLOWEST", 0.5)
    home = pair.home.home
    async with daemon_in(home) as daemon:
        ada, bob = await session_of(pair, "ada"), await session_of(pair, "bob", receive=True)
        with stuck_reader(home, bob.file.token) as stuck:
            quick = Follower(bob, 0)
            await eventually(lambda: daemon.app is not None and daemon.app.streams == 2, what="both follow")
            for number in range(12):
                await ask(ada.send, agent="bob", text=f"{number} " + "x" * 100_000, wait=10)
            await eventually(lambda: len(quick.texts) == 12, what="the other reader has everything")
            await eventually(lambda: daemon.app is not None and daemon.app.streams == 1, what="the stuck one is cut")
            got = await ask(drained, stuck)
        rows = [int(line[4:]) for line in got.split(b"\n") if line.startswith(b"id: ")]
        assert rows[-1] < quick.rows[-1], "it missed some"
        resumed = Follower(bob, 0)
        await eventually(lambda: resumed.rows == quick.rows, what="whoever comes back gets the rest")


@contextmanager
def stuck_reader(home: Path, token: str) -> Iterator[socket.socket]:
    with connect(socket_path(home), 10) as connection:
        connection.sendall(
            f"GET /v1/events HTTP/1.1\r\nHost: x\r\nLast-Event-ID: 0\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        yield connection


def drained(connection: socket.socket) -> bytes:
    got = b""
    try:
        while piece := connection.recv(1 << 20):
            got += piece
    except OSError:
        pass
    return got


async def test_an_idle_stream_says_that_it_lives_and_that_the_space_went_away(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_handlers, "KEEPALIVE", 0.1)
    async with daemon_in(pair.home.home):
        bob = await session_of(pair, "bob", receive=True)
        follower = Follower(bob, None)
        await eventually(lambda: [e.data["state"] for e in follower.events][-1:] == ["open"], what="it is connected")
        with stuck_reader(pair.home.home, bob.file.token) as connection:
            got = b""
            while b": ping" not in got:
                got += await ask(connection.recv, 4096)
        await pair.stop_steward()
        pair.broker.stop()
        await eventually(lambda: follower.events[-1].data["state"] != "open", what="it is told")
        assert all(event.kind == "state" for event in follower.events)


async def test_an_answer_that_was_lost_leads_to_the_same_message_not_to_another(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_in(pair.home.home):
        ada = await session_of(pair, "ada")
        answered, lost = HostClient._response, 0

        def losing(self: HostClient, connection: Any, operation: str) -> tuple[int, bytes]:
            nonlocal lost
            found = answered(self, connection, operation)
            if lost > 0:
                lost -= 1
                raise self._unknown(operation, TimeoutError())
            return found

        monkeypatch.setattr(HostClient, "_response", losing)
        lost = 1
        first = await ask(ada.send, channel="general", text="once")
        lost, chosen = 2, new_id()
        with pytest.raises(OutcomeUnknown, match=f"message {chosen} may be in the host's outbox"):
            await ask(ada.send, channel="general", text="twice asked", id=chosen)
        again = await ask(ada.send, channel="general", text="twice asked", id=chosen, wait=10)
        assert (again.id, again.stage) == (chosen, "confirmed")
        with pytest.raises(IdReused):
            await ask(ada.send, channel="general", text="something else", id=chosen)
        assert {row["id"] for row in await ask(ada.outbox)} == {first.id, chosen}
        said = [message["text"] for message in await ask(ada.history, "general")]
        assert said == ["twice asked", "once"]


async def test_what_is_dead_is_sent_again_and_what_waits_is_cancelled(pair: RealSpace) -> None:
    async with daemon_in(pair.home.home):
        ada = await session_of(pair, "ada")
        await ask(ada.client.pause, "main", "for a test")
        waits = await ask(ada.send, channel="general", text="never mind")
        assert "paused" in waits.warnings[0]
        assert (await ask(ada.cancel, waits.id))["state"] == "cancelled"
        with pytest.raises(ConflictError):
            await ask(ada.send, channel="general", text="other", id=waits.id)
        again = await ask(ada.requeue, waits.id)
        chain = [row["id"] for row in (await ask(ada.outbox_show, waits.id))["chain"]]
        assert chain == [waits.id, again["id"]]
        with pytest.raises(UsageError, match="no agent in a space 'lab'"):
            await ask(ada.client.resume_space, "lab")
        await ask(ada.client.resume_space, "main")
        await eventually(lambda: is_sent(ada, again["id"]), what="it left")
        assert [each["text"] for each in await ask(ada.history, "general")] == ["never mind"]


async def is_sent(session: Session, message_id: str) -> bool:
    return (await ask(session.outbox_show, message_id))["seq"] is not None


async def test_a_task_is_held_for_the_session_that_claimed_it_and_given_back_when_it_ends(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob", roles=["reviewer"])
    async with daemon_in(space.home.home) as daemon:
        ada, bob = await session_of(space, "ada"), await session_of(space, "bob")
        other = await session_of(space, "bob")
        asked = await ask(ada.send, role="reviewer", text="is it right?", wait=10)
        task = await ask(bob.claim, "reviewer", wait=10)
        assert task is not None
        assert (task["id"], task["text"], task["asker"]["name"]) == (asked.id, "is it right?", "ada")
        assert await ask(bob.claim, "reviewer") == task, "asked again it is the same one"
        assert await ask(other.claim, "reviewer") is None
        for refused in (other.finish, ada.finish):
            with pytest.raises(UnknownMessage, match="holds no task"):
                await ask(refused, asked.id, "mine now")
        await ask(bob.end)
        again = await ask(other.claim, "reviewer", wait=10)
        assert again is not None
        assert (again["id"], again["attempt"]) == (asked.id, 2)
        claims = daemon.app.claims if daemon.app else None
        assert claims is not None
        claims._heard[other.id] -= 1_000
        claims.sweep_once()
        third = await session_of(space, "bob")
        assert (await ask(third.claim, "reviewer", wait=10) or {})["id"] == asked.id, "its program was silent"
        await ask(third.finish, asked.id, "it is")
        result = await ask(ada.task, asked.id, wait=10)
        assert (result["state"], result["text"], result["worker"]) == ("done", "it is", "bob")


async def test_a_session_that_ends_while_it_waits_for_a_task_is_in_nobodys_way(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob", roles=["reviewer"])
    async with daemon_in(space.home.home) as daemon:
        ada, bob, other = [await session_of(space, name) for name in ("ada", "bob", "bob")]
        waiting = asyncio.create_task(ask(bob.claim, "reviewer", wait=50))
        desk = daemon.app
        assert desk is not None
        await eventually(lambda: desk.asking.total() == 1, what="it waits")
        await ask(bob.end)
        with pytest.raises(NoSession, match="has ended"):
            async with asyncio.timeout(5):
                await waiting
        claiming = asyncio.create_task(ask(other.claim, "reviewer", wait=20))
        await eventually(lambda: desk.asking.total() == 1, what="another waits")
        asked = await ask(ada.send, role="reviewer", text="is it right?", wait=10)
        async with asyncio.timeout(10):
            task = await claiming
        assert task is not None
        assert (task["id"], task["attempt"]) == (asked.id, 1)


def left_waiting(home: Path, session: Session, path: str, body: bytes) -> socket.socket:
    """A request as it is made, by a program that can be gone before it is answered."""
    connection = connect(socket_path(home), 10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.file.token}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


CLAIM = ("/v1/task/claim", b'{"role": "reviewer", "wait": 60}')


@pytest.mark.parametrize("next_worker", ["bob", "eve"])
async def test_a_program_that_is_killed_while_it_waits_for_a_task_is_in_nobodys_way(
    space: RealSpace, next_worker: str
) -> None:
    """Neither another program of its agent waits for it, nor does the steward hand it what another worker would do."""
    await space.add("ada")
    for name in ("bob", "eve"):
        await space.add(name, roles=["reviewer"])
    home = space.home.home
    async with daemon_in(home) as daemon:
        ada, bob, other = [await session_of(space, name) for name in ("ada", "bob", next_worker)]
        desk = daemon.app
        assert desk is not None
        claims = desk.claims
        waiting = await ask(left_waiting, home, bob, *CLAIM)
        await eventually(lambda: desk.asking.total() == 1, what="it waits")
        await eventually(lambda: daemon.host.health()[1].state == "open")
        waiting.close()
        await eventually(lambda: desk.asking.total() == 0, within=5, what="nobody waits")
        await eventually(lambda: all(each.done() for each in claims._withdrawing.values()), what="the steward knows")
        asked = await ask(ada.send, role="reviewer", text="is it right?", wait=10)
        async with asyncio.timeout(10):
            task = await ask(other.claim, "reviewer", wait=10)
        assert task is not None
        assert (task["id"], task["attempt"]) == (asked.id, 1)


async def test_a_task_that_came_for_a_program_that_was_gone_is_given_back(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await space.add("ada")
    await space.add("bob", roles=["reviewer"])
    home = space.home.home
    async with daemon_in(home) as daemon:
        ada, bob, other = [await session_of(space, name) for name in ("ada", "bob", "bob")]
        assert daemon.app is not None
        claims = daemon.app.claims
        claim, came, left = claims.claim, asyncio.Event(), asyncio.Event()

        async def too_late(*asked: Any, **more: Any) -> Any:
            job = await claim(*asked, **more)
            came.set()
            await asyncio.shield(left.wait())
            return job

        with monkeypatch.context() as patched:
            patched.setattr(claims, "claim", too_late)
            patched.setattr(http_api.SessionCaller, "_disconnected", lambda _: asyncio.Event().wait())
            asked = await ask(ada.send, role="reviewer", text="is it right?", wait=10)
            waiting = await ask(left_waiting, home, bob, *CLAIM)
            async with asyncio.timeout(10):
                await came.wait()
            waiting.close()
            left.set()
            await eventually(lambda: claims.held(bob_scope(daemon)) is None, within=5, what="nobody has it")
        async with asyncio.timeout(10):
            task = await ask(other.claim, "reviewer", wait=10)
        assert task is not None
        assert task["id"] == asked.id


def bob_scope(daemon: Daemon) -> Scope:
    (scope,) = [each for each in daemon.host.scopes() if each.name == "bob"]
    return scope


async def test_a_task_is_taken_over_whoever_waits_for_it(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob", roles=["reviewer"])
    async with daemon_in(space.home.home) as daemon:
        ada, bob, patient, heir = [await session_of(space, name) for name in ("ada", "bob", "bob", "bob")]
        desk = daemon.app
        assert desk is not None
        asked = await ask(ada.send, role="reviewer", text="is it right?", wait=10)
        assert await ask(bob.claim, "reviewer", wait=10)
        waiting = await ask(left_waiting, space.home.home, patient, *CLAIM)
        await eventually(lambda: desk.asking.total() == 1, what="another program waits for a task")
        task = await ask(heir.claim, "reviewer", take_over=True)
        assert task is not None
        await ask(heir.finish, asked.id, "it is")
        waiting.close()
        assert (await ask(ada.task, asked.id, wait=10))["text"] == "it is"


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/inbox/list", {"unread": True}), ("/v1/message/receipt", {"id": None, "stage": "read"})]
)
async def test_a_question_of_a_program_that_left_is_over(pair: RealSpace, path: str, fields: dict[str, Any]) -> None:
    async with daemon_in(pair.home.home) as daemon:
        ada = await session_of(pair, "ada", receive=True)
        desk = daemon.app
        assert desk is not None
        sent = await ask(ada.send, agent="bob", text="unread", wait=10)
        body = fields | {"wait": 60} | ({"id": sent.id} if "id" in fields else {})
        waiting = await ask(left_waiting, pair.home.home, ada, path, json.dumps(body).encode())
        await eventually(lambda: desk.asking.total() == 1, what="it waits")
        waiting.close()
        await eventually(lambda: desk.asking.total() == 0, within=5, what="nobody waits")


@pytest.mark.parametrize("settle", ["finish", "fail"])
async def test_a_task_that_was_being_settled_when_the_host_stopped_may_be_settled_or_not(
    space: RealSpace, settle: str
) -> None:
    """The steward heard it and its answer did not come: that nobody was reached would be a lie."""
    await space.add("ada")
    await space.add("bob", roles=["reviewer"])
    async with daemon_in(space.home.home) as daemon:
        ada, bob = await session_of(space, "ada"), await session_of(space, "bob")
        asked = await ask(ada.send, role="reviewer", text="is it right?", wait=10)
        task = await ask(bob.claim, "reviewer", wait=10)
        assert task is not None
        await space.stop_steward()
        settling = asyncio.create_task(ask(getattr(bob, settle), asked.id, "it is"))
        assert daemon.app is not None
        asking = daemon.app.asking
        await eventually(lambda: asking.total() == 1, what="the steward is being told")
        daemon.stopping.set()
        with pytest.raises(OutcomeUnknown, match=f"task {asked.id} may have ended.*claim a task of reviewer again"):
            await settling
    await space.start_steward()


@pytest.mark.parametrize(
    ("operation", "fields", "error"),
    [
        ("channel set", {"channel": "general", "description": "talk"}, OutcomeUnknown),
        ("channel list", {}, HostUnreachable),
    ],
)
async def test_a_forwarded_request_is_in_doubt_when_the_host_stops_only_if_it_changes_something(
    pair: RealSpace,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    fields: dict[str, Any],
    error: type[TidingsError],
) -> None:
    async with daemon_in(pair.home.home) as daemon:
        ada, reached = await session_of(pair, "ada"), asyncio.Event()
        await eventually(lambda: daemon.host.health()[0].state == "open")

        async def hang(*_: Any, **__: Any) -> Any:
            reached.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(daemon.host.endpoint(daemon.host.scopes()[0]), "call", hang)
        forwarding = asyncio.create_task(ask(ada.control, *operation.split(), **fields))
        async with asyncio.timeout(10):
            await reached.wait()
        daemon.stopping.set()
        with pytest.raises(error, match="retry"):
            await forwarding


async def test_a_request_that_was_cut_off_while_the_host_stopped_may_be_done_or_not(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.host.daemon.GRACE", 1)
    async with daemon_in(pair.home.home) as daemon:
        ada = await session_of(pair, "ada")
        await eventually(lambda: daemon.host.health()[0].state == "open")
        reached = asyncio.Event()

        async def hang(*_: Any, **__: Any) -> Any:
            reached.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(daemon.host.endpoint(daemon.host.scopes()[0]), "join", hang)
        joining = asyncio.create_task(ask(ada.join, "general"))
        async with asyncio.timeout(10):
            await reached.wait()
        daemon.stopping.set()
        with pytest.raises(OutcomeUnknown, match="it may have taken effect"):
            await joining


async def test_the_host_stops_in_bounded_time_whatever_its_clients_do(pair: RealSpace) -> None:
    home = pair.home.home
    async with daemon_in(home) as daemon:
        ada, bob = await session_of(pair, "ada"), await session_of(pair, "bob", receive=True)
        follower = Follower(bob, 0)
        waiting = asyncio.create_task(ask(bob.inbox, search="nothing like that", wait=50))
        with stuck_reader(home, bob.file.token), connect(socket_path(home), 10) as half:
            half.sendall(b"POST /v1/message/send HTTP/1.1\r\nContent-Length: 1000\r\n")
            for number in range(20):
                await ask(ada.send, agent="bob", text=f"{number}" * 50_000)
            await eventually(lambda: daemon.app is not None and daemon.app.streams >= 2)
            begun = time.monotonic()
            assert (await ask(ada.client.stop))["pid"] == os.getpid()
            await eventually(lambda: not socket_path(home).exists(), within=2, what="the socket is gone first")
            await eventually(lambda: daemon.host.database._closed, within=15, what="it is closed")
            assert time.monotonic() - begun < 12
        with pytest.raises(HostUnreachable):
            await waiting
        await eventually(lambda: isinstance(follower.error, HostUnreachable), what="the stream ended")


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_whoever_connects_in_the_moment_in_which_the_host_stops_is_not_left_waiting(
    pair: RealSpace, turns: int
) -> None:
    home = pair.home.home
    daemon = Daemon(home)
    running = asyncio.create_task(daemon.run())
    await daemon.ready.wait()
    await ask(HostClient(home).health)  # the server looks at its socket
    path, late = socket_path(home), list[socket.socket]()
    try:
        for _ in range(50):  # the kernel takes them; the loop accepts them in the turns in which the server closes
            late.append(connect(path, 5))
        for _ in range(turns):
            await asyncio.sleep(0)
        daemon.stopping.set()
        async with asyncio.timeout(20):
            await running
        for each in late:
            with suppress(ConnectionResetError):
                assert await ask(each.recv, 1) == b"", "it hears that nobody answers"
    finally:
        for each in late:
            each.close()


async def test_a_second_host_of_a_home_is_refused_and_a_stale_socket_is_not_in_the_way(pair: RealSpace) -> None:
    home = pair.home.home
    left = socket.socket(socket.AF_UNIX)
    socket_path(home).parent.mkdir(exist_ok=True, parents=True)
    left.bind(str(socket_path(home)))
    left.close()
    assert await ask(HostClient.find, home) is None
    async with daemon_in(home):
        with pytest.raises(HostRuns, match=rf"runs already \(pid {os.getpid()}\)") as caught:
            await Daemon(home).run()
        assert caught.value.exit_code == 6
        assert await ask(HostClient.find, home) is not None, "and the first one still answers"


async def test_a_long_home_is_no_obstacle(pair: RealSpace, tmp_path: Path) -> None:
    home = tmp_path / ("long" * 25) / ("path" * 25)
    async with daemon_in(home):
        assert (await ask(HostClient(home).health))["pid"] == os.getpid()


async def is_well(home: Path) -> bool:
    return not (await ask(look, home))["problems"]


@contextmanager
def no_room(database: Database) -> Iterator[None]:
    """Nothing large can be written: the file does not grow any more."""
    limit = 2**31 - 2
    database.write_blocking(lambda c: c.execute("PRAGMA max_page_count = 1").close(), 10)
    yield
    database.write_blocking(lambda c: c.execute(f"PRAGMA max_page_count = {limit}").close(), 10)


@contextmanager
def read_only(database: Database) -> Iterator[None]:
    """Nothing can be written, by this connection or by one that is opened after it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tidings.util.database.WRITER_MODE", "ro")
        database.write_blocking(lambda c: c.execute("PRAGMA query_only = ON").close(), 10)
        yield


@pytest.mark.parametrize(("failing", "error"), [(no_room, StoreFull), (read_only, StoreReadOnly)])
async def test_a_host_whose_disk_is_full_or_read_only_says_so_loses_nothing_and_goes_on_by_itself(
    pair: RealSpace, failing: Callable[[Database], AbstractContextManager[None]], error: type[StoreError]
) -> None:
    large = "x" * 100_000
    async with daemon_in(pair.home.home) as daemon:
        ada, bob = await session_of(pair, "ada"), await session_of(pair, "bob", receive=True)
        first = await ask(ada.send, agent="bob", text="before", wait=10)
        assert await ask(bob.inbox, wait=10)
        refused = new_id()
        with failing(daemon.host.database):
            for _ in range(2):
                with pytest.raises(error, match=r"host\.db.*ask again"):
                    await ask(ada.send, agent="bob", text=large, id=refused)
            async with tidings.connect("main", name="ada", home=pair.home.home, receive=False) as elsewhere:
                await elsewhere.dm("bob", f"from elsewhere {large}")
            assert [each["id"] for each in await ask(bob.inbox)] == [first.id], "what is kept can be read"
            assert [each["id"] for each in await ask(ada.outbox)] == [first.id], "what was refused is not there"
            assert (await ask(ada.client.health))["outbox"]
            (problem,) = (await ask(look, pair.home.home))["problems"]
            assert re.fullmatch(r"the host can store nothing: .*host\.db.* ask again.*", problem)
            assert (await ask(doctor._host, pair.home.home)).verdict == "problem"
        await eventually(lambda: is_well(pair.home.home), within=30, what="what waited to be kept was tried again")
        assert (await ask(ada.send, agent="bob", text="after", id=refused, wait=20)).stage == "confirmed"
        await eventually(lambda: counts(bob, 3), within=30, what="what came meanwhile is there too")
        kept = [each["text"].split(" x")[0] for each in await ask(bob.inbox)]
        assert sorted(kept) == ["after", "before", "from elsewhere"]


def _ageless(problem: str) -> str:
    """Two looks at the same problem differ in how long it has been one."""
    return re.sub(r"for [\d.]+ s now", "for a while now", problem)


async def test_mail_that_cannot_be_kept_is_a_problem_wherever_health_is_asked_for_and_is_kept_when_it_can(
    pair: RealSpace,
) -> None:
    where = Context(home_dir=str(pair.home.home), space=pair.home.name)

    async def status() -> tuple[int, list[str]]:
        plain: dict[str, Any] = {"healthy": True, "problems": [], "exit_code": 0}
        facts = running._with_parts(plain, await ask(running._host, where), {"problems": []})
        return facts["exit_code"], facts["problems"]

    async with daemon_in(pair.home.home) as daemon:
        bob = await session_of(pair, "bob", receive=True)
        await eventually(lambda: daemon.host.health()[0].receiving)
        assert await status() == (0, [])
        await daemon.host.database.write(break_trigger)
        (problem,) = (await ask(look, pair.home.home))["problems"]
        assert re.fullmatch(
            r"the host can keep no mail: .*host\.db is damaged \(no such function: coalerce\).*", problem
        )
        async with tidings.connect("main", name="ada", home=pair.home.home, receive=False) as ada:
            await ada.dm("bob", "hello")
        await eventually(lambda: daemon.host.health()[0].unkept)
        problems = (await ask(look, pair.home.home))["problems"]
        assert re.fullmatch(r"mail of bob in main cannot be kept, for .* now: .*coalerce.*", problems[1])
        code, said = await status()
        assert (code, [_ageless(each) for each in said]) == (3, [_ageless(each) for each in problems])
        found = await ask(doctor._host, pair.home.home)
        assert (found.verdict, found.said) == ("problem", problems[0])
        unkept = (await ask(bob.me))["health"]["unkept"]
        assert "coalerce" in unkept["cause"]
        assert await ask(main, ["inbox", "--home", str(pair.home.home), "--as", "bob", "--wait", "0"]) == 3
        await daemon.host.database.write(mend_trigger)
        await eventually(lambda: counts(bob, 1), within=30)
        assert daemon.host.health()[0].unkept is None
        assert await status() == (0, [])
        assert (await ask(look, pair.home.home))["problems"] == []


async def test_an_agent_that_cannot_get_open_because_its_inbox_is_damaged_is_a_problem(pair: RealSpace) -> None:
    async with daemon_in(pair.home.home) as daemon:
        await session_of(pair, "bob", receive=True)
        await eventually(lambda: daemon.host.health()[0].receiving)
        async with tidings.connect("main", name="ada", home=pair.home.home, receive=False) as ada:
            await ada.dm("bob", "hello")
        await eventually(lambda: _any_mail(daemon))
    (pair.home.home / "host.db").rename(pair.home.home / "newer")
    async with daemon_in(pair.home.home) as daemon:  # an inbox without what the agent remembers: it is to be told so
        await daemon.host.database.write(break_trigger)
        scope = await daemon.host.adopt(("home", str(pair.home.home), pair.home.name, "bob"), receive=True)
        await eventually(lambda: daemon.host.health()[0].unkept)
        health = daemon.host.health()[0]
        assert (health.scope, health.state) == (scope, "waiting")
        assert "coalerce" in str(health.reason)
        problems = (await ask(look, pair.home.home))["problems"]
        assert [each.split(":")[0].split(",")[0] for each in problems] == [
            "the host can keep no mail",
            "mail of bob in main cannot be kept",
            "bob is not connected to main (waiting",
        ]
        assert (await ask(doctor._host, pair.home.home)).verdict == "problem"


async def _any_mail(daemon: Daemon) -> bool:
    return bool(await daemon.host.inbox.read(inbox_views.unread_counts))


async def test_an_agent_whose_mail_another_program_receives_is_named_with_the_reason(pair: RealSpace) -> None:
    async with daemon_in(pair.home.home) as daemon:
        await session_of(pair, "bob", receive=True)
        await eventually(lambda: daemon.host.health()[0].receiving)
        facts, said = await ask(look, pair.home.home), await ask(doctor._host, pair.home.home)
        assert (facts["problems"], facts["notes"], said.verdict) == ([], [], "ok")
        async with tidings.connect("main", name="bob", home=pair.home.home) as elsewhere:
            await elsewhere.transport.receive()
            await eventually(lambda: daemon.host.health()[0].superseded)
            facts, said = await ask(look, pair.home.home), await ask(doctor._host, pair.home.home)
            (note,) = facts["notes"]
            assert "bob of main: another session of bob receives" in note
            assert (facts["problems"], said.verdict, note in said.said) == ([], "note", True)


async def test_whoever_ends_a_session_is_told_that_it_is_not_written_yet(pair: RealSpace) -> None:
    async with daemon_in(pair.home.home) as daemon:
        ada = await session_of(pair, "ada")
        with read_only(daemon.host.database):
            assert not await ask(ada.end)
            with pytest.raises(NoSession):
                await ask(ada.me)
    async with daemon_in(pair.home.home):
        with pytest.raises(NoSession):
            await ask(ada.me)


async def test_the_end_of_a_session_is_written_as_soon_as_it_can_be(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "SWEEP", 0.05)
    async with daemon_in(pair.home.home) as daemon:
        ada, database = await session_of(pair, "ada"), daemon.host.database
        with read_only(database):
            assert not await ask(ada.end)
        await eventually(lambda: database.read_blocking(counted_sessions) == 0, what="it is written")
        assert await ask((await session_of(pair, "ada")).end)


def counted_sessions(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM session").fetchone()[0])


LOGGING = """
import logging, sys
from pathlib import Path
from tidings.host import daemon
daemon.LOG_FILE_BYTES, daemon.LOG_FILES = 2_000, 2
daemon.log_to(Path(sys.argv[1]))
for number in range(500):
    logging.getLogger("tidings.host").info("line %d", number)
"""


def test_the_log_of_a_host_rotates_and_never_grows_beyond_its_files(tmp_path: Path) -> None:
    """In a process of its own: it takes all logging over."""
    subprocess.run([sys.executable, "-c", LOGGING, str(tmp_path / "host.log")], check=True, timeout=60)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["host.log", "host.log.1", "host.log.2"]
    assert all(0 < file.stat().st_size <= 2_000 for file in files)
    kept = [line.rpartition(" ")[2] for file in reversed(files) for line in file.read_text().splitlines()]
    assert kept == [str(number) for number in range(500 - len(kept), 500)], "the newest, whole and in order"


async def test_what_could_not_be_opened_is_shown_to_its_recipient_alone_with_the_reason(pair: RealSpace) -> None:
    async with pair.agent("ada") as raw_ada, pair.agent("bob") as reader:
        garbage = b"{\x1b[31mnot a message"
        await raw_ada.connection.request(pair.subjects.direct(reader.id, raw_ada.id), garbage, timeout=5)
    async with daemon_in(pair.home.home):
        ada, bob = await session_of(pair, "ada"), await session_of(pair, "bob", receive=True)
        (found,) = await eventually(lambda: asyncio.to_thread(bob.quarantine), what="it was put aside")
        assert (found["bytes"], found["begins"]) == (len(garbage), garbage.decode())
        assert "refused" in found["reason"]
        assert await ask(bob.quarantine, found["row"]) == []
        assert await ask(ada.quarantine) == []
        assert await ask(bob.inbox) == []


async def test_operations_that_the_host_does_not_know_and_their_fields_are_refused(pair: RealSpace) -> None:
    async with daemon_in(pair.home.home):
        ada = await session_of(pair, "ada")
        token = bearer(ada.file.token)
        asked = [
            (404, "session/take", b"{}", "the host has no operation '/v1/session/take'"),
            (404, "access/get", b"{}", "the host has no operation '/v1/access/get'"),
            (404, "admin/revoke", b"{}", "the host has no operation '/v1/admin/revoke'"),
            (400, "agent/list", b'{"colour": "red"}', "unknown field 'colour'; it has no fields"),
            (400, "channel/info", b'{"chanel": "general"}', "unknown field 'chanel'; it has channel"),
            (400, "channel/info", b'{"op": 7}', "`op`: expected str"),
            (400, "channel/join", b'{"op": "op-12345", "channel": "general"}', "unknown field 'op'"),
            (400, "channel/join", b'{"chanel": "general"}', "unknown field 'chanel'; it has channel"),
            (400, "message/send", b'{"chanel": "general"}', "unknown field 'chanel'; it has channel, agent"),
        ]
        for wanted, path, body, words in asked:
            status, answer = await ask(raw, pair.home.home, "POST", f"/v1/{path}", body, token)
            assert (status, words in answer["error"]["message"]) == (wanted, True), answer
        status, answer = await ask(raw, pair.home.home, "POST", "/v1/member/list", b"{}", token)
        assert (status, answer["memberships"]) == (200, [])
