"""Agents who talk while a deliver job runs, and what each of them was handed: the words of its tests."""

import asyncio
import base64
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from tidings.admin.agents import AgentFile
from tidings.contract.channels import ChangeChannelRequest, JoinRequest, LeaveRequest
from tidings.errors import ConflictError
from tidings.server.streams import gate_state
from tidings.wire.message import Mention, Message, Sender, compose
from tidings.wire.rulings import ChannelClass
from tidings_testing.real_space import AgentClient, RealSpace
from tools.delivering import Mailbox, empty_mailbox, owed

AGENTS = ("ada", "bob", "cal", "dan")
Crowd = dict[str, AgentClient]


@asynccontextmanager
async def gathered(space: RealSpace) -> AsyncIterator[Crowd]:
    """Four agents who may read and post everywhere."""
    for name in AGENTS:
        await space.add(name, read=[">"], post=[">"], manage=[">"])
    async with clients(space, AGENTS) as crowd:
        yield crowd


@asynccontextmanager
async def clients(space: RealSpace, names: Iterable[str]) -> AsyncIterator[Crowd]:
    """New connections: the old ones went with their broker, or with their access."""
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(space.agent(name)) for name in names}


async def say(agent: AgentClient, channel: str, text: str = "hello", mentions: tuple[str, ...] = ()) -> int:
    named = [Mention(each, "somebody") for each in mentions]
    message = compose(Sender(agent.id, agent.name), text=text, mentions=named)
    return int((await agent.post(channel, message.raw, Nats_Msg_Id=message.id))["seq"])


async def say_on(agent: AgentClient, channels: Iterable[str], text: str = "hello") -> list[int]:
    """One message on each channel, all at once."""
    return await asyncio.gather(*(say(agent, channel, text) for channel in channels))


def large(agent: AgentClient, size: int, seed: int) -> Message:
    """A message whose payload has exactly `size` bytes and cannot be made much smaller."""
    noise = base64.b64encode(random.Random(seed).randbytes(size)).decode()
    bare = len(compose(Sender(agent.id, agent.name), text="").raw)
    return compose(Sender(agent.id, agent.name), text=noise[: size - bare])


async def post_large(agent: AgentClient, channel: str, size: int, count: int) -> list[int]:
    seqs = []
    for n in range(count):
        message = large(agent, size, n)
        assert abs(len(message.raw) - size) < 64
        seqs.append(int((await agent.post(channel, message.raw, Nats_Msg_Id=message.id))["seq"]))
    return seqs


async def join(agent: AgentClient, pattern: str) -> None:
    await agent.control.call(JoinRequest(pattern))


async def leave(agent: AgentClient, pattern: str) -> None:
    await agent.control.call(LeaveRequest(pattern))


async def set_class(agent: AgentClient, channel: str, name: ChannelClass) -> None:
    await agent.control.call(ChangeChannelRequest(channel, cls=name))


async def narrow(space: RealSpace, name: str, *read: str) -> None:
    async with space.administer() as admin:
        await admin.set_access(name, AgentFile(name, read=read, post=(">",)))


async def retain_nothing(space: RealSpace) -> int:
    """Retention as if everything were too old. Answers the first sequence that it left."""
    steward = space.steward
    assert steward is not None
    async with space.core() as js:
        while True:
            with suppress(ConflictError):  # the steward did the same just now
                await steward.retention.run(await gate_state(js, space.subjects), steward.lease.seq)
                return steward.space.table.floor


async def revoke(space: RealSpace, name: str) -> None:
    async with space.administer() as admin:
        await admin.revoke(name)


async def read_all(crowd: Crowd, into: dict[str, Mailbox] | None = None) -> dict[str, Mailbox]:
    boxes = into or {name: Mailbox() for name in crowd}
    for name, agent in crowd.items():
        await empty_mailbox(agent, boxes[name])
        boxes[name].check_numbers()
    return boxes


def others(agent: AgentClient, box: Mailbox) -> set[int]:
    """What the box holds, leaving out what its owner said itself."""
    return {seq for seq, kept in box.records.items() if f".{agent.id}." not in f".{kept.tail}."}


async def check(space: RealSpace, crowd: Crowd, boxes: dict[str, Mailbox]) -> None:
    """Everybody has exactly what the log says, in the order of each channel."""
    truth = await owed(space)
    for name, agent in crowd.items():
        assert others(agent, boxes[name]) == truth.get(agent.id, set()), name
        check_order(boxes[name])


def check_order(box: Mailbox) -> None:
    for channel in {kept.tail.split(".", 2)[2] for kept in box.records.values()}:
        assert box.channel(channel) == sorted(box.channel(channel)), f"{channel} is out of order"
