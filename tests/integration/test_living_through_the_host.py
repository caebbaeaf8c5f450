"""A program that lives through the host, while that host comes and goes."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import tidings
from daemons import daemon_in
from terminal import Terminal
from tidings.client import message_json
from tidings.client.host_transport import HostAgent
from tidings.errors import AuthRevoked, DeniedError, HostUnreachable, OutcomeUnknown, TidingsError
from tidings.host.daemon import running_pid
from tidings.wire.message import new_id
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

PATIENCE = 20.0
MESSAGE = new_id()


def at_the_host(space: RealSpace, name: str) -> HostAgent:
    return tidings.connect(space.home.name, name=name, home=space.home.home, via="host")


async def test_what_is_settled_while_the_host_is_away_is_read_when_it_is_back_and_the_loop_goes_on(
    pair: RealSpace,
) -> None:
    heard: list[str] = []
    bob = at_the_host(pair, "bob")
    async with daemon_in(pair.home.home):
        await bob.open()
        async with at_the_host(pair, "ada") as ada:
            await ada.dm("bob", "first", timeout=PATIENCE)
        messages = aiter(bob.messages(manual_ack=True))
        async with asyncio.timeout(PATIENCE):
            first = await anext(messages)
        heard.append(first.text)
    await first.ack()  # nobody hears it now
    async with daemon_in(pair.home.home):

        async def is_read() -> bool:
            return (await bob.transport.unread())["direct"] == 0

        await eventually(is_read, within=PATIENCE, what="the host hears what was settled")
        async with at_the_host(pair, "ada") as ada:
            await ada.dm("bob", "second", timeout=PATIENCE)
        async with asyncio.timeout(PATIENCE):
            second = await anext(messages)
        await second.ack()
        heard.append(second.text)
        await eventually(is_read, within=PATIENCE, what="and the next")
        await bob.close()
    assert heard == ["first", "second"]


async def test_a_row_that_cannot_be_read_here_is_told_stays_unread_and_holds_nothing_up(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException] = []
    read = message_json.read_message

    def reading(row: dict[str, Any]) -> Any:
        if row["text"] == "strange":
            raise KeyError("ts")
        return read(row)

    monkeypatch.setattr("tidings.client.host_transport.read_message", reading)
    async with daemon_in(pair.home.home), at_the_host(pair, "bob") as bob, at_the_host(pair, "ada") as ada:
        bob.on("error", errors.append)
        for text in ("strange", "plain"):
            await ada.dm("bob", text, timeout=PATIENCE)
        message = await bob.next_message(PATIENCE)
        await message.ack()
        assert message.text == "plain"
        assert [isinstance(each, TidingsError) and "cannot read row" in str(each) for each in errors] == [True]
        assert (await bob.transport.unread())["direct"] == 1


async def test_a_program_lives_through_kill_9_of_its_host_and_hears_each_message_once(
    terminal: Terminal, pair: RealSpace
) -> None:
    heard: list[str] = []
    states: list[str] = []

    async def host_up() -> int:
        done = await asyncio.to_thread(terminal.run, "host", "up")
        assert done.returncode == 0, done
        pid = running_pid(pair.home.home)
        assert pid is not None
        return pid

    async def listen(bob: HostAgent) -> None:
        async for message in bob.messages():
            heard.append(message.text)  # noqa: PERF401  one by one

    pid = await host_up()
    async with at_the_host(pair, "bob") as bob, tidings.connect("main", name="ada", home=pair.home.home) as ada:
        bob.on("connection", states.append)
        listening = asyncio.create_task(listen(bob))
        try:
            for number in range(3):
                await ada.dm("bob", f"message {number}")
                await eventually(lambda n=number: len(heard) > n, within=PATIENCE, what="it comes")  # type: ignore[misc]
                os.kill(pid, signal.SIGKILL)
                await eventually(lambda: states[-1:] == ["reconnecting"], within=PATIENCE, what="the program is told")
                pid = await host_up()
                await eventually(lambda: states[-1:] == ["open"], within=PATIENCE, what="and told again")
            await ada.dm("bob", "the last")
            await eventually(lambda: "the last" in heard, within=PATIENCE, what="the last comes")
            await ada.dm("bob", "behind it")
            await eventually(lambda: "behind it" in heard, within=PATIENCE, what="asking for the next settles the last")
        finally:
            listening.cancel()
    assert heard == ["message 0", "message 1", "message 2", "the last", "behind it"]


async def test_a_channel_that_is_refused_leaves_no_session_at_the_host(space: RealSpace) -> None:
    await space.add("ada", read=["general"])
    async with daemon_in(space.home.home) as daemon:
        refused = tidings.connect("main", name="ada", home=space.home.home, via="host", channels=["secret"])
        with pytest.raises(DeniedError):
            await refused.open()
        assert daemon.app is not None
        assert len(daemon.app.sessions) == 0


async def test_a_revoked_agent_is_told_so_through_the_host_and_what_it_was_sent_stays_readable(
    pair: RealSpace,
) -> None:
    states: list[str] = []
    async with daemon_in(pair.home.home), at_the_host(pair, "bob") as bob, at_the_host(pair, "ada") as ada:
        bob.on("connection", states.append)
        await ada.dm("bob", "before", timeout=PATIENCE)
        assert (await bob.next_message(PATIENCE)).text == "before"
        async with pair.administer() as admin:
            await admin.revoke("bob")
        await eventually(lambda: states[-1:] == ["revoked"], within=PATIENCE, what="the program is told")
        for act in (lambda: bob.send("general", "still here"), bob.memberships, lambda: bob.history("general")):
            with pytest.raises(AuthRevoked):
                await act()
        assert [row["text"] for row in await bob.transport.inbox(kind="direct")] == ["before"]


async def test_a_host_that_stands_still_is_an_error_in_bounded_time_and_goes_on_afterwards(
    terminal: Terminal, pair: RealSpace
) -> None:
    assert (await asyncio.to_thread(terminal.run, "host", "up")).returncode == 0
    pid = running_pid(pair.home.home)
    assert pid is not None
    async with at_the_host(pair, "ada") as ada:
        ada.transport.host.patience = 0.5
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(OutcomeUnknown, match="send it again under the same id"):
                await ada.send("general", "hello", id=MESSAGE, timeout=0.1)
            with pytest.raises(HostUnreachable):
                await ada.transport.unread()
            with pytest.raises(HostUnreachable):
                await anext(aiter(ada.transport.follow(None)))
        finally:
            os.kill(pid, signal.SIGCONT)
        ada.transport.host.patience = PATIENCE
        await ada.send("general", "hello", id=MESSAGE, timeout=PATIENCE)  # taken before or now: it is one message

        async def is_in_the_log() -> bool:
            return bool((await ada.transport.outbox_row(MESSAGE))["stage"] == "confirmed")

        await eventually(is_in_the_log, within=PATIENCE, what="it leaves")
        assert [each.id for each in await ada.history("general")] == [MESSAGE]
