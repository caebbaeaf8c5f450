"""The host as a user meets it: a real process that is started, used while a space is away, restarted and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from blocking_host import HostClient, Session
from command_lines import parse
from daemons import Follower, ask, daemon_in, session_of
from terminal import Terminal
from tidings.cli import connection, systemd
from tidings.cli import inbox as inbox_cli
from tidings.client import host_http, host_transport
from tidings.client.host_http import socket_path
from tidings.client.host_session import VARIABLE, SessionFile, own_file
from tidings.host import inbox as inbox_store
from tidings.host import inbox as inbox_views
from tidings.host import mail_handlers
from tidings.host.daemon import PeerChecked, lock_path
from tidings.host.schema import SCHEMA
from tidings.util.database_snapshot import look
from tidings.util.private_files import lock_holder, private_dir
from tidings.wire.frames import Lost
from tidings.wire.message import new_id
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually
from tools.frames import stub_pipeline


async def run(terminal: Terminal, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(terminal.run, *words)


async def facts(terminal: Terminal, *words: str, code: int = 0) -> Any:
    """What a command says with --json."""
    done = await run(terminal, *words, "--json")
    assert done.returncode == code, done
    return json.loads(done.stdout)


async def mail(terminal: Terminal, *words: str) -> list[dict[str, Any]]:
    done = await run(terminal, "inbox", "--json", *words)
    assert done.returncode == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()]


async def started(terminal: Terminal) -> int:
    """A host in the background; its pid."""
    up = await run(terminal, "host", "up")
    assert (up.returncode, "go through it from now on" in up.stderr) == (0, True), up
    (pid,) = re.findall(r"\(pid (\d+)\)", up.stderr)
    return int(pid)


async def test_what_is_sent_while_a_space_is_away_is_stored_and_arrives_when_it_is_back(
    terminal: Terminal, space: RealSpace
) -> None:
    home = terminal.home.home
    await space.add("bob")
    await space.add("me")
    pid = await started(terminal)
    assert stat.S_IMODE(socket_path(home).stat().st_mode) == 0o600
    assert "no agent uses this host yet" in (await run(terminal, "host", "status")).stderr

    first = await run(terminal, "dm", "bob", "one", "--json")
    assert (json.loads(first.stdout)["stage"], "through the host" in first.stderr) == ("confirmed", True)
    assert stat.S_IMODE(own_file(home, "main", "me").stat().st_mode) == 0o600
    assert [(each["text"], each["read"]) for each in await mail(terminal, "--as", "bob")] == [("one", None)]
    await space.stop_steward()
    space.broker.stop()

    client = HostClient(home)
    await eventually(lambda: not is_connected(client), what="the host knows that the space is away")
    stored = await facts(terminal, "dm", "bob", "two")
    assert (stored["stage"], stored["seq"], "cannot be reached now" in stored["warnings"][0]) == ("stored", None, True)
    session = client.resume(SessionFile.read(own_file(home, "main", "me")))
    begun = time.monotonic()
    assert session.send(agent="bob", text="three").stage == "stored"
    assert time.monotonic() - begun < 0.5
    assert "leaves by itself" in (await run(terminal, "send", "general", "four")).stderr
    refused = await run(terminal, "dm", "nobody", "five")
    assert (refused.returncode, "no agent 'nobody'" in refused.stderr) == (2, True)
    assert len(await facts(terminal, "outbox", "list", "--state", "pending")) == 3
    direct = await run(terminal, "send", "general", "six", "--direct")
    assert (direct.returncode, "through the host" in direct.stderr) == (5, False)
    (seen,) = (await facts(terminal, "host", "status", code=3))["spaces"]
    assert seen["outbox"]["pending"] == 3
    assert all(agent["age"] > 0 and agent["state"] != "open" for agent in seen["agents"])
    assert "is not connected to main" in (await run(terminal, "host", "status")).stderr

    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: HostClient.find(home) is None)
    again = await started(terminal)
    assert again != pid, "what a killed host left behind is no obstacle"
    space.broker.start()
    await space.start_steward()
    await eventually(lambda: client.health()["outbox"].get("pending") is None, within=20, what="everything left")
    bobs = client.resume(SessionFile.read(own_file(home, "main", "bob")))
    await eventually(lambda: len(bobs.inbox()) == 3, within=20, what="everything arrived")
    assert [each["text"] for each in await mail(terminal, "--as", "bob")] == ["one", "two", "three"], "once, in order"
    assert (await run(terminal, "host", "status")).returncode == 0
    shown = await run(terminal, "status")
    assert "0 waiting, 4 sent" in shown.stdout
    assert "host\tok" in (await run(terminal, "doctor")).stdout

    down = await run(terminal, "host", "down")
    assert (down.returncode, socket_path(home).exists(), is_alive(again)) == (0, False, False), down
    assert "no host of" in (await run(terminal, "host", "down")).stderr
    gone = await run(terminal, "host", "status")
    assert (gone.returncode, "no host runs" in gone.stderr) == (5, True)


def is_connected(client: HostClient) -> bool:
    return any(each["state"] == "open" for each in client.status()["spaces"][0]["agents"])


def is_alive(pid: int) -> bool:
    """One that ended and was not collected yet has ended."""
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and ") Z" not in path.read_text()


async def test_mail_is_read_marked_followed_and_searched(terminal: Terminal, space: RealSpace) -> None:
    await space.add("bob", roles=["reviewer"])
    await space.add("me")
    async with daemon_in(terminal.home.home):
        assert await mail(terminal, "--as", "bob", "--wait", "0") == []
        following = terminal.start("inbox", "--follow", "--json", "--as", "bob")
        for text in ("a red apple", "a green pear"):
            assert (await facts(terminal, "dm", "bob", text))["stage"] == "confirmed"
        bobs = HostClient(terminal.home.home).resume(SessionFile.read(own_file(terminal.home.home, "main", "bob")))

        async def arrived() -> bool:
            return len(await ask(bobs.inbox)) == 2

        await eventually(arrived)
        red, green = await mail(terminal, "--as", "bob")
        assert f"{red['row']}* " in (await run(terminal, "inbox", "--as", "bob")).stdout
        assert [each["row"] for each in await mail(terminal, "--as", "bob", "--search", "pear")] == [green["row"]]
        assert await mail(terminal, "--as", "bob", "--from", "bob", "--wait", "0") == []
        assert len(await mail(terminal, "--as", "bob", "--from", "me")) == 2
        assert await facts(terminal, "inbox", "read", str(red["row"]), "--as", "bob") == {"read": 1}
        assert [each["text"] for each in await mail(terminal, "--unread", "--as", "bob")] == ["a green pear"]
        waited = await facts(terminal, "dm", "bob", "tell me", "--wait", "delivered")
        assert waited["stage"] in ("delivered", "read")
        assert await facts(terminal, "inbox", "read", "--all", "--as", "bob") == {"read": 2}
        assert (await run(terminal, "inbox", "read", "--as", "bob")).returncode == 2
        assert following.stdout is not None
        streamed = [json.loads(await ask(following.stdout.readline))["text"] for _ in range(3)]
        assert streamed == ["a red apple", "a green pear", "tell me"]
        following.send_signal(signal.SIGINT)
        assert "stopped" in (await ask(following.communicate, timeout=20))[1]


async def test_there_is_one_inbox_with_the_host_and_without(terminal: Terminal, space: RealSpace) -> None:
    for name in ("bob", "me"):
        await space.add(name)
    await run(terminal, "join", "general", "--as", "bob")
    await run(terminal, "dm", "bob", "to you")
    await run(terminal, "send", "general", "to all")
    direct = await mail(terminal, "--as", "bob", "--wait", "10", "-n", "2")
    assert sorted(each["text"] for each in direct) == ["to all", "to you"]
    assert await mail(terminal, "--as", "bob", "--wait", "0") == [], "what was shown is read"
    unmet = await run(terminal, "inbox", "--as", "bob", "--wait", "0.1")
    assert (unmet.returncode, unmet.stdout) == (1, ""), unmet
    async with daemon_in(terminal.home.home):
        unmet = await run(terminal, "inbox", "--as", "bob", "--unread", "--wait", "1")
        assert (unmet.returncode, unmet.stdout) == (1, ""), unmet
        kept = await mail(terminal, "--as", "bob")
        assert [(each["row"], each["id"]) for each in kept] == [(each["row"], each["id"]) for each in direct]
        assert all(each["read"] for each in kept)
        bobs = await session_of(space, "bob", receive=True)
        await run(terminal, "dm", "bob", "while it runs")
        (waiting,) = await ask(bobs.inbox, unread=True, wait=10)
        refused = await run(terminal, "inbox", "--direct", "--as", "bob", "--wait", "0")
        assert "nothing is received or marked as read here" in refused.stderr
        assert "while it runs" in refused.stdout
        assert len(await ask(bobs.inbox, unread=True)) == 1
    shown = await run(terminal, "inbox", "read", str(waiting["row"]), "--as", "bob", "--json")
    assert json.loads(shown.stdout) == {"read": 1}
    assert "is empty" in (await run(terminal, "inbox", "--as", "bob", "--wait", "0")).stderr
    async with daemon_in(terminal.home.home):
        assert await mail(terminal, "--as", "bob", "--unread", "--wait", "0") == []
        rows = [str(each["row"]) for each in await mail(terminal, "--as", "bob", "--wait", "0")]
        deleted = await run(terminal, "inbox", "delete", rows[0], "99", "--as", "bob")
        assert "1 message deleted; 1 of these rows is not in the inbox of bob" in deleted.stderr
        assert [str(each["row"]) for each in await mail(terminal, "--as", "bob", "--wait", "0")] == rows[1:]
        assert len(await ask(bobs.inbox)) == len(rows) - 1
    deleted = await run(terminal, "inbox", "delete", rows[1], "--as", "bob", "--json")
    assert json.loads(deleted.stdout) == {"deleted": 1}
    async with daemon_in(terminal.home.home):
        assert [str(each["row"]) for each in await mail(terminal, "--as", "bob", "--wait", "0")] == rows[2:]


async def test_what_a_killed_host_kept_is_shown_without_it_also_while_the_space_is_away(
    terminal: Terminal, space: RealSpace, tmp_path: Path
) -> None:
    for name in ("bob", "me"):
        await space.add(name)
    pid = await started(terminal)
    bobs = await session_of(space, "bob", receive=True)
    for text in ("one", "two", "three", "four"):
        await run(terminal, "dm", "bob", text)
    await eventually(lambda: _unread(bobs, 4))
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: lock_holder(lock_path(terminal.home.home)) is None)
    assert [each["text"] for each in await mail(terminal, "--as", "bob", "-n", "2")] == ["one", "two"]
    space.broker.stop()
    away = await run(terminal, "inbox", "--as", "bob", "--json")
    assert [json.loads(line)["text"] for line in away.stdout.splitlines()] == ["three", "four"], away
    assert (await run(terminal, "inbox", "--as", "bob")).returncode == 5, "nothing is left, and nobody can be asked"
    space.broker.start()
    await started(terminal)
    assert await mail(terminal, "--as", "bob", "--unread", "--wait", "0") == []
    assert len(await mail(terminal, "--as", "bob")) == 4
    assert (await run(terminal, "host", "down")).returncode == 0
    copy = tmp_path / "elsewhere" / "host.db"
    private_dir(copy.parent)
    shutil.copy(terminal.home.home / "host.db", copy)
    mine = (space.info.id, bobs.agent)
    kept = await ask(look, copy, SCHEMA, lambda c: inbox_store.listed(c, *mine))
    assert [row.text for row in kept] == ["one", "two", "three", "four"], (
        "after `host down` the file alone is all of it"
    )


async def _unread(session: Session, count: int) -> bool:
    return len(await ask(session.inbox, unread=True)) == count


async def test_what_will_not_come_is_told_in_the_inbox_its_stream_status_and_tail(
    terminal: Terminal, space: RealSpace
) -> None:
    await space.add("bob")
    await space.add("me")
    async with daemon_in(terminal.home.home), stub_pipeline(space) as pipeline:
        session = await session_of(space, "bob", receive=True)
        await run(terminal, "join", "general", "--as", "bob")
        tailing = terminal.start("tail", "general", "--as", "me")
        assert tailing.stderr is not None
        assert "watching" in await ask(tailing.stderr.readline)
        follower = Follower(session, 0)
        await pipeline.deliver(session.agent, lost=[Lost("general", 10, 20, 7, "cancelled by the operator")])
        (told,) = await eventually(lambda: [each for each in follower.events if each.kind == "notice"])
        assert told.data["notice"] == {
            "kind": "lost",
            "channel": "general",
            "first": 10,
            "last": 20,
            "count": 7,
            "cause": "cancelled by the operator",
        }
        (row,) = await mail(terminal, "--as", "bob", "--unread")
        assert (row["kind"], row["row"], row["notice"]["count"]) == ("notice", told.row, 7)
        said = (await run(terminal, "inbox", "--as", "bob")).stdout
        assert f"{told.row}* " in said
        assert "notice #general: 7 messages of general between 10 and 20 will not be delivered" in said
        assert await ask(session.unread) == {"direct": 0, "channel": 0, "notice": 1}
        status = await facts(terminal, "status")
        assert (status["host"]["notices"], "1 unread notices" in status["host"]["said"]) == (1, True)
        agents = (await facts(terminal, "host", "status"))["spaces"][0]["agents"]
        assert {agent["name"]: agent["notices"] for agent in agents} == {"bob": 1}
        assert await facts(terminal, "inbox", "read", "--all", "--as", "bob") == {"read": 1}
        assert (await facts(terminal, "status"))["host"]["notices"] == 0
        follower.leave()
        await space.restart_broker(kill=True)
        assert tailing.stdout is not None
        assert "notice #general: the connection was lost" in await ask(tailing.stdout.readline)
        tailing.send_signal(signal.SIGINT)
        await ask(tailing.communicate, timeout=20)


async def test_the_outbox_is_held_back_cancelled_and_sent_again_and_an_id_is_one_message(
    terminal: Terminal, space: RealSpace
) -> None:
    await space.add("me", roles=["reviewer"])
    await space.add("bob", roles=["reviewer"])
    terminal.watched = True
    async with daemon_in(terminal.home.home):
        assert (await facts(terminal, "send", "general", "hello"))["stage"] == "confirmed"
        held = await run(terminal, "outbox", "pause", "--reason", "for a test")
        assert (held.returncode, "is held back" in held.stderr) == (0, True)
        sent = await facts(terminal, "send", "general", "later")
        assert (sent["stage"], "paused here (for a test)" in sent["warnings"][0]) == ("stored", True)
        assert "PAUSED (for a test)" in (await run(terminal, "host", "status")).stdout
        behind = await facts(terminal, "send", "general", "later still")
        letter = await facts(terminal, "dm", "bob", "for you")
        shown = await run(terminal, "outbox", "show", behind["id"])
        assert "waits because\tmain is held back here (for a test): `tidings outbox resume`" in shown.stdout
        assert f"waits because\tmessage {sent['id']} to the same destination is before it" in shown.stdout
        assert "\nto\tbob\n" in (await run(terminal, "outbox", "show", letter["id"])).stdout
        assert "\tbob\tpending\t" in (await run(terminal, "outbox", "list")).stdout
        assert "is cancelled" in (await run(terminal, "outbox", "cancel", sent["id"])).stderr
        again = (await run(terminal, "outbox", "requeue", sent["id"])).stdout.strip()
        assert again in (await run(terminal, "outbox", "show", sent["id"])).stdout
        resumed = await run(terminal, "outbox", "resume")
        assert (resumed.returncode, "leaves again" in resumed.stderr) == (0, True), resumed

        async def left() -> bool:
            return bool((await facts(terminal, "outbox", "show", again))["stage"] == "confirmed")

        await eventually(left)
        unknown = await run(terminal, "outbox", "show", new_id())
        assert (unknown.returncode, "has no message" in unknown.stderr) == (2, True)
        denied = await run(terminal, "send", "secret", "x")
        assert (denied.returncode, "was not sent" in denied.stderr) == (4, True), denied

        chosen = new_id()
        for way in ((), (), ("--direct",)):
            assert (await facts(terminal, "send", "general", "once", "--id", chosen, *way))["id"] == chosen
        said = (await run(terminal, "history", "general", "--json")).stdout.splitlines()
        assert [json.loads(line)["text"] for line in said].count("once") == 1, "by whichever way, it is one message"
        assert (await run(terminal, "send", "general", "another", "--id", chosen)).returncode == 6

        deaf = await facts(terminal, "send", "general", "hello", "--mention", "bob")
        assert deaf["warnings"] == ["bob is not in general, so it does not get this"]
        waiting = await facts(terminal, "ask", "reviewer", "who looks?")
        for _ in range(2):
            looked = await run(terminal, "work", "--role", "reviewer", "--as", "bob")
            assert (looked.returncode, "(attempt 1)" in looked.stderr) == (0, True), looked
        done = await run(terminal, "work", "--role", "reviewer", "--exec", "echo I do", "--once", "--as", "bob")
        assert (done.returncode, (await run(terminal, "result", waiting["id"])).stdout) == (0, "I do\n")
        working = terminal.start("work", "--role", "reviewer", "--exec", "echo fine", "--once", "--as", "bob")
        asked = await run(terminal, "ask", "reviewer", "is it?", "--wait", "30")
        assert (asked.stdout.strip(), "through the host" in asked.stderr) == ("fine", True), asked
        await ask(working.communicate, timeout=20)
        for line in ("inbox --wait 0", "outbox list", "host status", f"outbox show {chosen}", "dm bob hello"):
            done = await run(terminal, *line.split())
            *_, hint = done.stderr.splitlines()
            parse(hint.removeprefix("next: "))


async def test_a_second_host_is_refused_with_one_sentence(terminal: Terminal) -> None:
    async with daemon_in(terminal.home.home):
        for more in ((), ("--foreground",)):
            second = await run(terminal, "host", "up", *more)
            assert (second.returncode, second.stderr.count("\n")) == (6, 1), second
            assert f"runs already (pid {os.getpid()})" in second.stderr
        assert await ask(HostClient.find, terminal.home.home) is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_a_host_and_leaves_nothing(terminal: Terminal, number: signal.Signals) -> None:
    child = terminal.start("host", "up", "--foreground", "--home", str(terminal.home.home))
    assert child.stderr is not None
    assert "runs (pid" in child.stderr.readline()
    begun = time.monotonic()
    child.send_signal(number)
    _, said = child.communicate(timeout=20)
    assert (child.returncode, "the host is down" in said) == (0, True), said
    assert time.monotonic() - begun < 10
    assert not socket_path(terminal.home.home).exists()


async def test_a_session_file_that_is_gone_or_of_another_agent_is_said_and_not_used(
    terminal: Terminal, pair: RealSpace, tmp_path: Path
) -> None:
    async with daemon_in(terminal.home.home):
        given = await session_of(pair, "ada")
        path = tmp_path / "given" / "session.json"
        given.save(path)
        terminal.env |= {VARIABLE: str(path), "TIDINGS_AS": "ada"}
        assert (await facts(terminal, "send", "general", "hello"))["stage"] == "confirmed"
        assert not own_file(terminal.home.home, "main", "ada").exists(), "the given one was used"
        other = await run(terminal, "send", "general", "hello", "--as", "bob")
        assert (other.returncode, "is of ada in main" in other.stderr) == (0, True)
        path.unlink()
        gone = await run(terminal, "send", "general", "hello")
        assert (gone.returncode, "which is not there" in gone.stderr) == (0, True)
        await ask(given.end)
        assert (await facts(terminal, "send", "general", "still"))["stage"] == "confirmed"


async def test_without_a_host_commands_go_direct_and_say_what_needs_one(terminal: Terminal, space: RealSpace) -> None:
    await space.add("me")
    sent = await run(terminal, "send", "general", "hello", "--json")
    assert (json.loads(sent.stdout)["stage"], "through the host" in sent.stderr) == ("confirmed", False)
    for words in (("outbox", "list"), ("outbox", "pause"), ("inbox", "read", "1"), ("inbox", "--from", "me")):
        done = await run(terminal, *words)
        assert (done.returncode, "tidings host up" in done.stderr) == (5, True), (words, done)
    assert (await run(terminal, "send", "general", "x", "--id", "mine")).returncode == 2


def test_a_unit_for_systemd_is_written_once_and_removed(terminal: Terminal, tmp_path: Path) -> None:
    config = tmp_path / "config % $dir"
    env = {"XDG_CONFIG_HOME": str(config), "PATH": "/nowhere"}
    first = terminal.run("host", "install", **env)
    assert (first.returncode, "was written" in first.stderr) == (0, True), first
    assert "systemd does not answer here" in first.stderr
    assert "enable-linger" in first.stderr
    (unit,) = (config / "systemd" / "user").glob("tidings-host-*.service")
    text = unit.read_text()
    assert "Restart=on-failure" in text
    assert f'--home" "{terminal.home.home}"' in text
    assert text.count(systemd._word(sys.executable)) == 1
    assert "is as it should be" in terminal.run("host", "install", **env).stderr
    unit.write_text("something else")
    assert "was written" in terminal.run("host", "install", **env).stderr
    assert "was removed" in terminal.run("host", "uninstall", **env).stderr
    assert not unit.exists()
    assert "there is no" in terminal.run("host", "uninstall", **env).stderr
    assert systemd._word('a %h $HOME "q" \\') == '"a %%h $$HOME \\"q\\" \\\\"'


async def test_a_channel_that_is_joined_from_a_terminal_is_received_by_the_host(
    terminal: Terminal, pair: RealSpace
) -> None:
    async with daemon_in(terminal.home.home):
        assert await mail(terminal, "--as", "bob", "--wait", "0") == []
        assert (await facts(terminal, "join", "general", "--as", "bob"))["state"] == "opened"
        assert (await facts(terminal, "send", "general", "hello", "--as", "ada"))["stage"] == "confirmed"
        found = await mail(terminal, "--as", "bob", "--channel", "general", "--wait", "10")
        assert [(each["channel"], each["text"]) for each in found] == [("general", "hello")]
        assert (await facts(terminal, "leave", "general", "--as", "bob"))["state"] == "left"


@pytest.mark.parametrize("spoke", [False, True])
async def test_what_is_posted_after_a_join_is_in_the_inbox_of_an_agent_that_never_looked_into_it(
    terminal: Terminal, pair: RealSpace, spoke: bool
) -> None:
    async with daemon_in(terminal.home.home) as daemon:
        if spoke:  # the host works for it already, without receiving
            assert (await facts(terminal, "send", "general", "hi", "--as", "bob"))["stage"] == "confirmed"
        assert (await facts(terminal, "join", "general", "--as", "bob"))["state"] == "opened"
        assert (await facts(terminal, "send", "general", "hello", "--as", "ada"))["stage"] == "confirmed"
        (bob,) = [scope for scope in daemon.host.scopes() if scope.name == "bob"]

        async def is_kept() -> bool:
            return await daemon.host.inbox.read(inbox_views.last, bob.space_id, bob.agent) > 0

        await eventually(is_kept, within=10, what="the host has it, although nobody looked")
        assert [each["text"] for each in await mail(terminal, "--as", "bob", "--wait", "0")] == ["hello"]


@contextmanager
def mute_host(home: Path) -> Iterator[None]:
    """Takes every connection and says nothing."""
    private_dir(socket_path(home).parent)
    with socketserver.UnixStreamServer(str(socket_path(home)), socketserver.BaseRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("leaves", [nullcontext, mute_host])
async def test_a_host_that_goes_away_before_it_has_a_session_is_done_without(
    terminal: Terminal, pair: RealSpace, monkeypatch: pytest.MonkeyPatch, leaves: Any
) -> None:
    await pair.add("me", roles=["reviewer"])

    # it answered a moment ago
    async def answered(home: Path) -> host_http.HostClient:
        return host_http.HostClient(home)

    monkeypatch.setattr(connection, "_host_if_any", answered)
    with leaves(terminal.home.home):
        for line in ("join general", "send general hello", "dm bob hello", "ask reviewer look", "leave general"):
            chosen = () if line.split()[0] in ("join", "leave") else ("--id", new_id())
            done = await run(terminal, *line.split(), *chosen, "--json")
            assert (done.returncode, "; going without it" in done.stderr) == (0, True), done
            assert not chosen or json.loads(done.stdout)["id"] == chosen[1]


async def test_what_is_followed_is_of_the_agent_that_is_meant_however_its_name_is_written(
    terminal: Terminal, pair: RealSpace
) -> None:
    await pair.add("me")
    home = terminal.home.home
    async with daemon_in(home):
        words = ("inbox", "--follow", "--json", "--as", "bob", "--from", "ADA", "--home", str(home))
        assert await mail(terminal, "--as", "bob", "--wait", "0") == []
        following = terminal.start(*words)

        async def is_followed() -> bool:
            return bool((await ask(HostClient(home).status))["streams"])

        try:
            await eventually(is_followed, within=20)
            for name in ("me", "ada"):
                assert (await facts(terminal, "dm", "bob", f"of {name}", "--as", name))["stage"] == "confirmed"
            assert following.stdout is not None
            async with asyncio.timeout(20):
                assert json.loads(await ask(following.stdout.readline))["text"] == "of ada"
        finally:
            following.kill()
            await ask(following.communicate)


async def test_inbox_and_outbox_are_as_long_as_was_asked_for_whatever_the_host_tells_at_a_time(
    terminal: Terminal, pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_in(terminal.home.home):
        assert await mail(terminal, "--as", "bob", "--wait", "0") == []
        ada, bob = await session_of(pair, "ada"), await session_of(pair, "bob")
        texts = [f"part {number}" for number in range(5)]
        for text in texts:
            await ask(ada.send, agent="bob", text=text, wait=10)

        async def arrived() -> bool:
            return len(await ask(bob.inbox)) == len(texts)

        async def shown(count: int, *words: str) -> list[str]:
            return [each["text"] for each in await mail(terminal, "--as", "bob", "-n", str(count), *words)]

        await eventually(arrived)
        for change in (None, (inbox_cli, "PAGE", 2), (mail_handlers, "PAGE_BYTES", 1)):
            if change is not None:
                monkeypatch.setattr(*change)
            assert (await shown(501), await shown(3)) == (texts, texts[-3:])
            assert (await shown(501, "--search", "part"), await shown(3, "--search", "part")) == (texts, texts[-3:])
        for change in (None, (host_transport, "PAGE", 2)):
            if change is not None:
                monkeypatch.setattr(*change)
            handed = await facts(terminal, "outbox", "list", "--as", "ada", "-n", "501")
            assert len({each["row"] for each in handed}) == len(texts)
            assert await facts(terminal, "outbox", "list", "--as", "ada", "-n", "3") == handed[:3]


#: what of systemctl is asked for, for one unit: keeps what it was told in `told`, and the process in `pid`
SYSTEMCTL = """#!{python}
import os, pathlib, shlex, signal, subprocess, sys, time
here, verb = pathlib.Path(__file__).parent, sys.argv[2]
with (here / "told").open("a") as told:
    print(*sys.argv[2:], file=told)
def runs():
    stat = here / "pid"
    stat = stat.exists() and pathlib.Path("/proc", stat.read_text(), "stat")
    return bool(stat) and stat.exists() and ") Z" not in stat.read_text()
if verb == "is-system-running":
    print("running")
elif verb == "is-active":
    print("active" if runs() else "inactive")
elif verb == "start" and not runs():
    (unit,) = pathlib.Path(os.environ["XDG_CONFIG_HOME"]).glob("systemd/user/*.service")
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    child = subprocess.Popen(shlex.split(line.removeprefix("ExecStart=")), start_new_session=True, **quiet)
    (here / "pid").write_text(str(child.pid))
elif verb == "stop" and runs():
    os.kill(int((here / "pid").read_text()), signal.SIGTERM)
    while runs():
        time.sleep(0.02)
"""


def test_a_host_that_systemd_keeps_is_started_and_stopped_by_systemd(terminal: Terminal, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "systemctl"
    fake.parent.mkdir()
    fake.write_text(SYSTEMCTL.replace("{python}", sys.executable))
    fake.chmod(0o700)
    there = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "PATH": str(fake.parent)}
    gone = there | {"PATH": "/nowhere"}

    def told() -> list[str]:
        lines = (fake.parent / "told").read_text().splitlines()
        return [line.split()[0] for line in lines if not line.startswith("is-")]

    before = terminal.run("host", "up", **there)
    assert (before.returncode, (fake.parent / "told").exists()) == (0, False), "there is no unit yet"
    assert terminal.run("host", "down", **there).returncode == 0
    assert terminal.run("host", "install", **gone).returncode == 0

    up = terminal.run("host", "up", **there)
    (unit,) = (tmp_path / "config" / "systemd" / "user").glob("*.service")
    assert (up.returncode, f"by systemd ({unit.name}); " in up.stderr, told()) == (0, True, ["start"]), up
    assert f"(pid {(fake.parent / 'pid').read_text()})" in up.stderr
    assert terminal.run("host", "up", **there).returncode == 6
    down = terminal.run("host", "down", **there)
    assert (down.returncode, f"stopping {unit.name}" in down.stderr, told()) == (0, True, ["start", "stop"]), down
    assert "the host is down" in down.stderr
    assert "no host of" in terminal.run("host", "down", **there).stderr

    assert terminal.run("host", "up", **gone).returncode == 0, "where systemd does not answer it is started without"
    assert "systemd" not in terminal.run("host", "down", **there).stderr, "and stopped so: the unit is not active"
    assert told() == ["start", "stop"]


async def test_a_command_opens_one_connection_to_the_host_whatever_it_asks(terminal: Terminal, pair: RealSpace) -> None:
    await pair.add("me", roles=["reviewer"])
    made: list[int] = []

    class Counted(PeerChecked):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            made.append(1)
            super().connection_made(transport)

    async with daemon_in(terminal.home.home, protocol=Counted):
        for line in ("send general first", "send general hello", "dm bob hello", "who", "history general", "inbox"):
            made.clear()
            done = await run(terminal, *line.split(), "--json")
            assert (done.returncode, "through the host" in done.stderr, len(made)) == (0, True, 1), done
