"""Coding agents on a real space: `tidings mcp` as a process, asked by the SDK's own client, over the real host."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

import tidings
from coding_agents import PATIENCE, CodingAgent, coding, coding_with, command, environment, hosted, peer, piped
from terminal import Terminal
from tidings.admin.creation import create_space
from tidings.cli import mcp as serving
from tidings.client.host_http import HostClient
from tidings.host.daemon import Daemon
from tidings.mcp.ids import short
from tidings_testing.real_space import DEFAULT_BUDGET, RealSpace
from tidings_testing.waiting import eventually


@pytest.fixture
async def host(space: RealSpace) -> AsyncIterator[Daemon]:
    await space.add("ada")
    await space.add("bob", roles=["reviewer"])
    async with hosted(space.home.home) as daemon:
        yield daemon


async def test_two_coding_agents_talk_through_two_servers(space: RealSpace, host: Daemon) -> None:
    async with coding(space.home.home, "ada", "bob") as (ada, bob):
        await _channel(ada, bob)
        await _mail(ada, bob)
        await _quiet(space, ada, bob)
        await _task(ada, bob)
    assert await _sessions(host) == 0


async def _sessions(daemon: Daemon) -> int:
    """How many programs have a session."""
    return await daemon.host.database.read(lambda c: int(c.execute("SELECT count(*) FROM session").fetchone()[0]))


async def _channel(ada: CodingAgent, bob: CodingAgent) -> None:
    """What ada says in a channel reaches bob, who was told that it came."""
    assert (await bob("join", channel="general"))["facts"]["state"] in ("opened", "resumed")
    uris = ["tidings://inbox", "tidings://channel/general"]
    async with bob.client.listen(resource_subscriptions=uris) as changes:
        sent = await ada("send", channel="general", text="hello all", mentions=["bob"], wait=10)
        assert sent["stage"] == "confirmed"
        async with asyncio.timeout(PATIENCE):
            assert {(await anext(changes)).uri, (await anext(changes)).uri} == set(uris)  # type: ignore[union-attr]
    page = await bob.resource("tidings://channel/general")
    assert [each["text"] for each in page["messages"]] == ["hello all"]
    window = await bob("read_inbox")
    (message,) = window["messages"]
    assert (message["sender"]["name"], message["text"], message["mentions_me"]) == ("ada", "hello all", True)
    assert await bob("acknowledge_inbox", receipt=window["receipt"]) == {"acknowledged": 1}
    (listed,) = (await bob("channels"))["channels"]
    assert (listed["name"], listed["joined"]) == ("general", True)
    assert ((await bob("orient"))["joined"], (await ada("orient"))["not_joined"]) == (["general"], ["general"])
    assert any(step.startswith('join(channel="general")') for step in (await ada("orient"))["next"])


async def _quiet(space: RealSpace, ada: CodingAgent, bob: CodingAgent) -> None:
    """What bob's attention keeps quiet wakes nobody who waits; what comes for him alone does, and both are there."""
    async with tidings.connect(space.home.name, name="bob", home=space.home.home, via="host") as beside:
        await bob("set_attention", channels={"general": "muted"})

        async def heeded() -> bool:
            running = (await beside.attention()).running
            return bool(running and running.channels == {"general": "muted"})

        await eventually(heeded, what="the host heeds the new attention", within=20)
        waiting = asyncio.create_task(bob("read_inbox", wait=15))
        await asyncio.sleep(
            1
        )  # it passes two processes: who looks only now is shown what is there, and waits for nothing
        await ada("send", channel="general", text="quietly", wait=10)
        (quiet,) = await beside.transport.inbox(unread=True, wait=15)
        assert (quiet["text"], quiet["wakes"]) == ("quietly", False)
        await ada("direct_message", to="bob", text="for you", wait=10)
        window = await waiting
        assert [each["text"] for each in window["messages"]] == ["for you", "quietly"]
        await bob("acknowledge_inbox", receipt=window["receipt"])


async def _mail(ada: CodingAgent, bob: CodingAgent) -> None:
    """A direct message waits until bob has acknowledged it; then ada can see that it was read."""
    waiting = asyncio.create_task(bob("read_inbox", wait=15))
    first = await ada("direct_message", to="bob", text="for you \x1b[2J only", data={"n": 1}, wait=10)
    lost, again = await waiting, await bob("read_inbox")
    assert [each["id"] for each in lost["messages"]] == [each["id"] for each in again["messages"]] == [first["id"]]
    (message,) = again["messages"]
    assert message["text"] == "for you \\u{1b}[2J only"
    assert {"kind": "data", "data": {"n": 1}} in message["parts"]
    reply = await bob("direct_message", to="ada", text="thanks", reply_to=first["id"])
    assert (await bob("read_inbox", acknowledge=again["receipt"]))["messages"] == []
    (heard,) = (await ada("read_inbox", wait=15))["messages"]
    assert (heard["id"], heard["reply_to"]) == (reply["id"], first["id"])

    async def read() -> bool:
        receipts = (await ada("trace", id=first["id"]))["facts"]["receipts"]
        return any(each["stage"] == "read" for each in receipts)

    await eventually(read, what="ada is told that bob has read it")
    repeated = await ada("direct_message", to="bob", text="for you \x1b[2J only", data={"n": 1}, id=first["id"])
    assert repeated["id"] == first["id"]
    other = await ada.raw("direct_message", to="bob", text="something else", id=first["id"])
    assert other.is_error
    assert "id_reused" in str(other.content)


async def _task(ada: CodingAgent, bob: CodingAgent) -> None:
    """What ada asks of a role bob does, and ada has the result."""
    asked = await ada("ask_role", role="reviewer", text="is it right?", wait=10)
    claimed = await bob("claim_task", role="reviewer", wait=10)
    assert (claimed["id"], claimed["request"]["text"]) == (asked["id"], "is it right?")
    assert (await ada("task_result", id=asked["id"]))["state"] == "claimed"
    assert (await bob("orient"))["held_tasks"] == [asked["id"]]
    await bob("finish_task", id=asked["id"], outcome="done", text="it is", data={"sure": True})
    done = await ada("task_result", id=asked["id"], wait=10)
    assert (done["state"], done["text"], done["worker"]) == ("done", "it is", "bob")
    assert {"kind": "data", "data": {"sure": True}} in done["parts"]
    (line,) = (await ada("outbox_status", id=asked["id"]))["messages"]
    assert line["state"] in ("confirmed", "done")


@pytest.mark.slow  # the same is shown through the command line in every run
async def test_what_is_sent_while_the_space_is_down_is_stored_and_arrives_when_it_returns(
    space: RealSpace, host: Daemon
) -> None:
    bob = await peer(space, "bob")
    async with coding(space.home.home, "ada") as (ada,):
        space.broker.stop()
        sent = await ada("direct_message", to="bob", text="while you were away")
        assert sent["stage"] == "stored"
        assert (await ada("outbox_status"))["waiting"] == 1
        assert (await ada.raw("history", channel="general")).is_error
        unknown = await ada.raw("direct_message", to="nobody", text="who?")
        assert "unknown_peer" in str(unknown.content)
        space.broker.start()
        (message,) = await asyncio.to_thread(bob.inbox, unread=True, wait=40)
        assert (short(message["id"]), message["text"]) == (sent["id"], "while you were away")


@pytest.mark.parametrize("how", ["closes everything", pytest.param("sends SIGTERM", marks=pytest.mark.slow)])
async def test_a_client_that_vanishes_in_a_call_frees_its_session_and_its_task(
    space: RealSpace, host: Daemon, how: str
) -> None:
    ada = await peer(space, "ada")
    asked = await asyncio.to_thread(ada.send, role="reviewer", text="look", wait=10)
    async with piped(command(space.home.home, "bob")) as bob:

        async def claimed() -> bool:
            found = await bob.call(2, "claim_task", role="reviewer", wait=5)
            return bool(found and found["id"] == short(asked.id))

        await eventually(claimed, what="bob has the task")
        bob.request(9, "tools/call", {"name": "read_inbox", "arguments": {"wait": 40}})
        await bob.call(10, "outbox_status")
        assert await _sessions(host) == 2
        if how == "closes everything":
            bob.vanish()
        else:
            bob.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(bob.process.wait(), 10) == 0
        assert bob.process.stderr is not None
        assert "Traceback" not in (await bob.process.stderr.read()).decode()
        assert await _sessions(host) == 1

    async def back() -> bool:
        return bool((await asyncio.to_thread(ada.task, asked.id))["state"] == "queued")

    await eventually(back, what="the task is given back")


async def test_a_server_goes_on_when_its_host_was_started_anew(space: RealSpace) -> None:
    await space.add("ada")
    async with AsyncExitStack() as stack:
        async with hosted(space.home.home):
            (ada,) = await stack.enter_async_context(coding(space.home.home, "ada"))
            assert (await ada("join", channel="general"))["channel"] == "general"
        async with hosted(space.home.home):
            await ada.connected()
            assert (await ada("send", channel="general", text="still here", wait=10))["stage"] == "confirmed"
            await stack.aclose()


async def test_a_server_borrows_the_session_of_a_file_and_leaves_it_open(
    space: RealSpace, host: Daemon, tmp_path: Path
) -> None:
    bob, file = await peer(space, "bob"), tmp_path / "bob.json"
    bob.save(file)
    borrowed = ["-m", "tidings.cli", "mcp", "--home", str(space.home.home), "--session-file", str(file)]
    async with coding_with(borrowed) as server:
        await server.connected()
        assert (await server("orient"))["name"] == "bob"
        await server("send", channel="general", text="through a session of another", wait=10)
        assert await _sessions(host) == 1
    assert (await asyncio.to_thread(bob.me))["name"] == "bob"
    (row,) = await asyncio.to_thread(bob.outbox)
    assert row["state"] in ("confirmed", "done")
    async with coding_with(borrowed) as server:
        await asyncio.to_thread(bob.end)
        said = await server.refused("read_inbox")
        assert "the session of this server has ended" in said
        assert "tell a person" in said


async def test_half_a_character_and_bytes_that_are_no_text_are_answered_and_end_nothing(
    space: RealSpace, host: Daemon
) -> None:
    async with piped(command(space.home.home, "ada")) as ada:
        assert ada.process.stdin is not None
        ada.process.stdin.write(b"\xff\xfe is no JSON\n")
        half = await ada.call(2, "direct_message", to="ada", text="cut \ud83d", wait=15)
        assert half["stage"] == "confirmed"
        line = json.dumps({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": DIRECT}).encode()
        ada.process.stdin.write(line.replace(b"BYTES", b"\xff\xfe") + b"\n")

        async def both() -> list[str]:
            found = [each["text"] for each in (await ada.call(4, "read_inbox"))["messages"]]
            return found if len(found) == 2 else []

        assert await eventually(both, what="both came", within=20) == ["cut \ufffd", "no \ufffd\ufffd text"]


DIRECT = {"name": "direct_message", "arguments": {"to": "ada", "text": "no BYTES text"}}


async def test_an_agent_that_is_revoked_is_told_so_by_every_tool_that_needs_its_space(
    space: RealSpace, host: Daemon
) -> None:
    async with coding(space.home.home, "bob") as (bob,):
        await bob("direct_message", to="bob", text="from before", wait=15)
        assert [each["text"] for each in (await bob("read_inbox", wait=15))["messages"]] == ["from before"]
        async with space.administer() as admin:
            await admin.revoke("bob")

        async def told() -> bool:
            return "revoked" in await bob.refused("history", channel="general")

        await eventually(told, what="the host knows of it", within=20)
        for tool, arguments in (
            ("history", {"channel": "general"}),
            ("claim_task", {"role": "reviewer"}),
            ("direct_message", {"to": "ada", "text": "x"}),
        ):
            said = await bob.refused(tool, **arguments)
            assert said.startswith(f"{tool} failed (revoked)")
            assert "tell a person" in said
        (note,) = (await bob("orient"))["notes"]
        assert "revoked" in note
        assert [each["text"] for each in (await bob("read_inbox"))["messages"]] == ["from before"]


@asynccontextmanager
async def stopping_the_host(home: Path) -> AsyncIterator[None]:
    """Whoever started it, and if it is still being started."""
    try:
        yield
    finally:
        await eventually(lambda: not _starting(home), within=80, what="nobody starts a host")
        down = ["-m", "tidings.cli", "host", "down", "--home", str(home)]
        stopping = await asyncio.create_subprocess_exec(sys.executable, *down, env=environment())
        assert await asyncio.wait_for(stopping.wait(), 30) == 0


def _starting(home: Path) -> list[int]:
    """Processes of `tidings host up` that wait for the host they began."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if {b"host", b"up", str(home).encode()} <= {*words} and b"--foreground" not in words:
                found.append(int(path.parent.name))
    return found


async def test_a_host_that_is_busy_is_waited_for_and_no_other_is_started(
    space: RealSpace, host: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy, find = [True, True], HostClient.find

    async def find_at_last(home: Path) -> HostClient | None:
        return None if busy and busy.pop() else await find(home)

    monkeypatch.setattr(HostClient, "find", find_at_last)
    monkeypatch.setattr(serving, "_start_host", lambda home: pytest.fail(f"another host is started in {home}"))
    found = await serving.running_host(space.home.home)
    found.close()
    assert (found.pid, busy) == (os.getpid(), [])
    assert f"the host (pid {os.getpid()}) does not answer yet" in capsys.readouterr().err


async def test_a_server_without_a_host_starts_one_and_says_only_protocol_on_its_output(space: RealSpace) -> None:
    await space.add("ada")
    async with stopping_the_host(space.home.home), piped(command(space.home.home, "ada")) as ada:
        assert (await ada.call(2, "orient"))["name"] == "ada"
        assert ada.process.stdin is not None
        ada.process.stdin.close()
        assert await asyncio.wait_for(ada.process.wait(), 20) == 0
        assert ada.process.stdout is not None
        assert await ada.process.stdout.read() == b""
        assert ada.process.stderr is not None
        assert "no host runs, starting one" in (await ada.process.stderr.read()).decode()
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in ada.lines)


async def test_a_session_file_of_another_agent_is_refused(
    terminal: Terminal, space: RealSpace, host: Daemon, tmp_path: Path
) -> None:
    file = tmp_path / "bob.json"
    (await peer(space, "bob")).save(file)
    ran = await asyncio.to_thread(terminal.run, "mcp", "--agent", "ada", "--session-file", str(file))
    assert ran.returncode != 0
    assert "is of bob, not of ada" in ran.stderr


async def test_a_host_that_cannot_be_started_is_told_at_once_and_named(terminal: Terminal, space: RealSpace) -> None:
    await space.add("ada")
    (space.home.home / "host.db").write_bytes(b"this is no database" * 1000)
    server = terminal.start("mcp", "--agent", "ada")
    said = await asyncio.to_thread(server.communicate, timeout=50)
    assert server.returncode != 0
    assert said[0] == ""
    assert "could not be started: `tidings host up` says why" in said[1]
    assert "Traceback" not in said[1]


def test_an_agent_that_is_not_there_is_refused_before_a_host_is_started(terminal: Terminal) -> None:
    create_space(terminal.home, port=None, open_space=False, budget=DEFAULT_BUDGET)
    ran = terminal.run("mcp", "--agent", "nobody")
    assert ran.returncode != 0
    assert "nobody" in ran.stderr
    assert "starting" not in ran.stderr
    assert ran.stdout == ""
