"""What one agent can take from the others is bounded: buffers of the broker, mailboxes, connections."""

import asyncio
import itertools
from collections.abc import Callable

import tidings
from tidings.steward.status import resident_bytes
from tidings.testing.attacks import ATTACKS, Attacker
from tidings.testing.real_space import RealSpace

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
        for number in range(28):
            await ada.dm("bob", f"{number} " + "x" * 190_000)
    async with connect(space, "bob") as bob:
        link = bob.link.connection
        async with asyncio.timeout(30):
            seen = [message.text.split()[0] async for message in _first(bob, 28)]
        assert seen == [str(number) for number in range(28)]
        assert bob.link.connection is link, "the broker cut a reader that reads"


async def _first(endpoint: tidings.Endpoint, count: int):  # type: ignore[no-untyped-def]
    numbers = itertools.count(1)
    async for message in endpoint.messages():
        yield message
        if next(numbers) >= count:
            return
