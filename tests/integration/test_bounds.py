"""What one agent can take from the others is bounded: buffers of the broker, mailboxes, connections."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import tidings
from tidings.broker.private_files import write_private
from tidings.errors import AuthRevoked
from tidings.space.agents import AgentFile, Ledger
from tidings.steward import watcher as watching
from tidings.steward.status import resident_bytes
from tidings.steward.watcher import Breach, Watcher
from tidings.testing.attacks import ATTACKS, Attacker
from tidings.testing.real_space import RealSpace
from tidings.testing.waiting import eventually

MB = 1_000_000


def connect(space: RealSpace, name: str, **options: object) -> tidings.Endpoint:
    return tidings.connect(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


async def attack(space: RealSpace, name: str, seconds: float, run: Callable[[Attacker], None]) -> Attacker:
    """Run an attack with the credential of an agent, in a thread, for at most so many seconds."""
    attacker = Attacker.of(space.info.url, space.info.name, space.home.agent_creds(name), seconds)
    try:
        await asyncio.to_thread(run, attacker)
    finally:
        attacker.close()
    return attacker


def memory(space: RealSpace) -> int:
    assert space.broker.pid is not None
    return resident_bytes(space.broker.pid) or 0


@asynccontextmanager
async def watched(space: RealSpace) -> AsyncIterator[list[dict[str, Any]]]:
    """A watcher as a supervisor has it; the administrator runs in this process. Yields what it says of itself."""
    notes: list[dict[str, Any]] = []

    async def cut(breach: Breach) -> None:
        async with space.administer() as admin:
            await (admin.bar if breach.void else admin.withhold)(breach.agent, breach.why)

    watcher = Watcher(space.home, cut=cut, note=notes.append)
    running = asyncio.create_task(watcher.keep())
    try:
        await eventually(lambda: bool(notes))
        yield notes
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await watcher.close()


def withheld(space: RealSpace, name: str) -> str:
    row = Ledger(space.home.issued).active(name)
    return row.withheld if row else ""


async def test_whoever_opens_connection_after_connection_is_cut_and_named_and_comes_back_by_its_owner(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MOST_RETURNS", 30)
    await space.add("mal")
    await space.add("vic")
    async with watched(space), space.agent("vic") as vic:
        running = asyncio.create_task(attack(space, "mal", 20.0, ATTACKS["connections"]))
        while not running.done():
            await vic.control.call("member", "list")
            await asyncio.wait({running}, timeout=0.05)
        attacker = await running
        assert attacker.refused >= 20, "it was let in until its time was over"
        await eventually(lambda: "its credential is void" in withheld(space, "mal"))
        assert "connections beyond the 32" in withheld(space, "mal")
        health = await vic.control.call("health", "ping")
        assert [each for each in health["withheld"] if each.startswith("mal may not post since")]
        with pytest.raises(AuthRevoked):
            async with space.agent("mal"):
                pass
        async with space.administer() as admin:
            await admin.set_access("mal", AgentFile("mal", read=("general",), post=("general",)))
        async with space.agent("mal") as mal:
            assert (await mal.post("general", b"{}"))["seq"]
        assert withheld(space, "mal") == ""


async def test_whoever_sends_more_than_its_rate_is_cut_in_the_act(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "BURST", 4 * MB)
    await space.add("mal")
    async with watched(space):
        running = asyncio.create_task(attack(space, "mal", 20.0, ATTACKS["control_large"]))
        assert (await running).refused >= 20
        await eventually(lambda: "MB a second" in withheld(space, "mal"))


async def test_a_watcher_that_cannot_watch_says_so_and_watches_again_when_it_can(space: RealSpace) -> None:
    async with watched(space) as notes:
        assert notes[-1]["running"]
        good = space.home.watcher_creds.read_text()
        await space.add("ada")
        write_private(space.home.watcher_creds, space.home.agent_creds("ada").read_text())
        await space.restart_broker()
        await eventually(lambda: not notes[-1]["running"] and bool(notes[-1]["why"]))
        write_private(space.home.watcher_creds, good)
        await eventually(lambda: bool(notes[-1]["running"]))


async def test_connections_that_do_not_read_cost_the_broker_little_and_are_cut(space: RealSpace) -> None:
    await space.add("mal")
    before, peak = memory(space), 0
    running = asyncio.create_task(attack(space, "mal", 2.0, ATTACKS["subscriptions"]))
    while not running.done():
        peak = max(peak, memory(space))
        await asyncio.wait({running}, timeout=0.02)
    assert (await running).connected >= 10
    assert peak - before < 250 * MB


async def test_a_mailbox_of_many_large_messages_is_read_without_being_cut(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada", receive=False) as ada:
        for number in range(20):
            await ada.dm("bob", f"{number} " + "x" * 190_000)
    async with connect(space, "bob") as bob:
        link = bob.link.connection
        async with asyncio.timeout(30):
            seen = [message.text.split()[0] async for message in _first(bob, 20)]
        assert seen == [str(number) for number in range(20)]
        assert bob.link.connection is link, "the broker cut a reader that reads"


async def _first(endpoint: tidings.Endpoint, count: int):  # type: ignore[no-untyped-def]
    numbers = itertools.count(1)
    async for message in endpoint.messages():
        yield message
        if next(numbers) >= count:
            return
