"""Reading mailboxes as an endpoint does: pulled with the agent's own credential, opened, acknowledged.

Blocks in a frame are opened, blocks that a frame names are fetched by their name and opened. Signatures are not
verified and nothing is surfaced: that is the same whatever a frame is made of. A block that is gone is an error here,
because a figure without it would be that of something else: an endpoint reads the log then (`BlockReader`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from tidings.client.frame_mailbox import AT_ONCE, PATIENCE
from tidings.client.mailbox import pull
from tidings.nats.acks import ACK
from tidings.nats.client import connect
from tidings.rpc.control import ControlClient
from tidings.wire.frames import Block, Frame, FrameRecord, Ref, decode_frame, open_block, open_ref
from tidings.wire.signing import KeyPair
from tidings_testing.real_space import AgentClient, RealSpace

#: frames a mailbox has under way (`max_ack_pending` of its consumer)
UNDER_WAY = 4
READERS_AT_ONCE = 4


async def fetch(agent: AgentClient, epoch: str, ref: Ref) -> tuple[FrameRecord, ...]:
    """The records of a block that a frame names."""
    name = ref.name.hex()
    answer = await agent.connection.request(agent.subjects.block_get(name), timeout=PATIENCE)
    if answer.status is not None:
        raise RuntimeError(f"block {name} is gone ({answer.status}): the figure would be that of the log")
    return open_ref(agent.space_id, epoch, ref, answer.data)


async def records_of(agent: AgentClient, frame: Frame) -> list[FrameRecord]:
    """Every record of a frame, those of named blocks fetched a few at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def fetched(ref: Ref) -> tuple[FrameRecord, ...]:
        async with room:
            return await fetch(agent, frame.epoch, ref)

    coming = [asyncio.create_task(fetched(block)) for block in frame.blocks if isinstance(block, Ref)]
    others = iter(await asyncio.gather(*coming))
    parts = (open_block(block) if isinstance(block, Block) else next(others) for block in frame.blocks)
    return [kept for part in parts for kept in part]


async def read_frames(agent: AgentClient, frames: int, within: float) -> int:
    """Read so many frames. Answers how many messages of others were in them."""
    taken = messages = 0
    own = f"chat.{agent.id}."

    async def take(message: Any, _delivery: Any) -> None:
        nonlocal taken, messages
        records = await records_of(agent, decode_frame(message.data))
        messages += sum(not kept.tail.startswith(own) for kept in records)
        taken += 1
        await agent.connection.request(message.reply, ACK, timeout=within)

    deadline = time.monotonic() + within
    while taken < frames:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{agent.name} read {taken} of {frames} frames in {within} s")
        wanted = min(UNDER_WAY, frames - taken)  # a pull for more than there is waits for it
        await pull(agent.connection, agent.subjects.delivery_stream, f"dlv_{agent.id}", wanted, 1.0, take)
    return messages


async def read_all(
    space: RealSpace, readers: Iterable[tuple[KeyPair, str]], held: dict[str, int], within: float = 300.0
) -> int:
    """Empty the mailboxes of these agents (key, credentials), a few at a time. `held`: frames in each, by agent id."""
    room = asyncio.Semaphore(READERS_AT_ONCE)

    async def read(key: KeyPair, creds: str) -> int:
        async with room:
            connection = await connect(space.info.url, creds, key.id, name=key.id[-8:], reconnect=False)
            try:
                control = ControlClient(connection, space.subjects, key.id)
                agent = AgentClient(key.id[-8:], key.id, key, connection, control, space.subjects, space.info.id)
                return await read_frames(agent, held[key.id], within)
            finally:
                await connection.close()

    return sum(await asyncio.gather(*(read(key, creds) for key, creds in readers if held.get(key.id))))
