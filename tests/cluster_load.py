"""A space on three nodes under load: agents send and read through endpoints while something happens to the nodes, and
the history says whether what was acknowledged is in the log once, and every member read all of it once."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

from foreign import connect
from tidings.client.direct_transport import DirectAgent
from tidings.errors import TidingsError
from tidings.nats.errors import NatsError
from tidings.server.nats_server import Broker
from tidings.wire import message as wire
from tidings.wire.subjects import Chat
from tidings_testing.history import History
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually, insist

SENDERS = ("ada", "bob")
READERS = ("cy", "dan")
#: of the short form: messages confirmed before, between and after what happens
BETWEEN = 40


async def populate(space: RealSpace) -> None:
    for name in (*SENDERS, *READERS):
        await space.add(name, read=["general"], post=["general"])


class Load:
    """Agents that send and agents that read, through endpoints as everybody has them."""

    def __init__(self, space: RealSpace) -> None:
        assert space.cluster is not None
        self.space, self.cluster, self.history = space, space.cluster, History()
        self.acknowledged = 0
        self._stop = asyncio.Event()
        self._read: dict[str, int] = dict.fromkeys(READERS, 0)

    async def around(self, *strikes: Callable[["Load"], Awaitable[None]], between: int = BETWEEN) -> None:
        """Send and read; what happens, happens each time after some more were confirmed. Then judge."""
        async with AsyncExitStack() as stack:
            readers = [await stack.enter_async_context(connect(self.space, name, "general")) for name in READERS]
            senders = [await stack.enter_async_context(connect(self.space, name, receive=False)) for name in SENDERS]
            reading = [asyncio.create_task(self._take(each)) for each in readers]
            sending = [asyncio.create_task(self._send(each)) for each in senders]
            for strike in strikes:
                await self._more(between, sending)
                await strike(self)
            await self._more(between, sending)
            self._stop.set()
            await asyncio.gather(*sending)
            for each in senders:  # a live copy that went with a leader shows in the next one; the pipeline is not here
                await self.send_one(each)
            for reader in READERS:
                self.history.owed(reader, "general")
            with suppress(AssertionError):  # then the history says what is missing
                await eventually(lambda: self._all_read(reading), within=60)
            await self._judge()
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _more(self, count: int, sending: list[asyncio.Task[None]]) -> None:
        goal = self.acknowledged + count

        def enough() -> bool:
            for task in sending:
                if task.done():
                    task.result()
            return self.acknowledged >= goal

        await eventually(enough, within=60, what=f"{count} more are confirmed")

    async def _send(self, agent: DirectAgent) -> None:
        """One after the other; one that was not answered is sent again under its id."""
        while not self._stop.is_set():
            await self.send_one(agent)

    async def send_one(self, agent: DirectAgent) -> None:
        confirmed = self.history.sending(agent.name, "general")
        told = await insist(lambda: agent.send("general", "x", id=confirmed.id), within=60)
        confirmed(told.seq)
        self.acknowledged += 1

    async def _take(self, agent: DirectAgent) -> None:
        async for message in agent.messages():
            self.history.took(agent.name, message)
            self._read[agent.name] += 1

    def _all_read(self, reading: list[asyncio.Task[None]]) -> bool:
        for task in reading:
            if task.done():
                task.result()
        return min(self._read.values()) >= self.acknowledged

    async def _judge(self) -> None:
        """The log is a reader too: it has each once, where it said."""
        async with self.space.core() as core:
            end = int((await core.info("LOG_main"))["state"]["last_seq"])
            async for page in core.read("LOG_main", "td.main.>", 1, end):
                for record in page:
                    chat = self.space.subjects.parse(record.subject)
                    if isinstance(chat, Chat):
                        said = wire.decode(record.payload)
                        self.history.read("the log", said.sender.name, chat.channel, said.id, record.seq)
        self.history.owed("the log", "general")
        self.history.check()


async def up_again(node: Broker) -> None:
    node.spawn()
    await eventually(node.is_ready, within=30)


async def whole_again(space: RealSpace) -> None:
    """Every replica of every stream is there and current: what an administrator waits for between two restarts."""
    names = [f"{kind}_main" for kind in ("LOG", "DM", "DLV", "TASK", "AUD")] + ["KV_td_state_main"]

    async def is_whole() -> bool:
        try:
            async with space.core() as core:
                clusters = [(await core.info(name))["cluster"] for name in names]
        except (TidingsError, NatsError, OSError):
            return False
        return all(
            each.get("leader")
            and all(replica["current"] and not replica.get("offline") for replica in each["replicas"])
            for each in clusters
        )

    await eventually(is_whole, within=60, every=0.1, what="all replicas are current")


async def leader_of(space: RealSpace, stream: str) -> Broker:
    async def ask() -> str:
        async with space.core() as core:
            return str((await core.info(stream))["cluster"].get("leader", ""))

    assert space.cluster is not None
    return space.cluster.node(await eventually(ask, within=30))


async def rolling_restart(space: RealSpace) -> None:
    """Node by node, waiting in between until all replicas are current."""
    assert space.cluster is not None
    for node in space.cluster.nodes:
        node.stop()
        await up_again(node)
        await whole_again(space)
