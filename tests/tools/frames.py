"""A stand-in for the pipeline: frames and floors as it writes them, without Spark.

    async with stub_pipeline(space) as pipeline:
        await pipeline.deliver(bob.id, [101, 103])
        await pipeline.floor(103)

It decides nothing: a test says who gets what. It beats, so that the steward says the backstop runs. Records are copied
from the log as they are stored; a test may spoil them. Numbers go on per owner and series unless a test says otherwise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import msgspec

from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.wire.frames import (
    Block,
    BlockSealer,
    FrameRecord,
    Lost,
    SealedBlock,
    encode_block,
    encode_frame,
    encode_seqs,
    frame_id,
    open_block,
)
from tidings.wire.links import HOPS_HEADER, ORIGIN_HEADER
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.subjects import Subjects
from tidings_testing.real_space import RealSpace

BEAT_EVERY = 0.05
#: what a frame keeps of a record's headers
KEPT = (SIGNATURE_HEADER, ORIGIN_HEADER, HOPS_HEADER)
#: what names the blocks of this pipeline
SECRET = bytes(range(32))


def kept(subjects: Subjects, record: StoredRecord) -> FrameRecord:
    """A record of the log as a frame carries it."""
    fields = tuple((name, value) for name, value in record.own_fields() or () if name in KEPT)
    return FrameRecord(record.seq, record.time_ns, subjects.tail(record.subject), fields, record.payload)


def blocks_of(records: Iterable[FrameRecord]) -> list[bytes]:
    """Blocks of one channel each, in the order the channels first occur in."""
    found = sorted(records, key=lambda each: (_channel(each), each.seq))
    groups = [list(group) for _, group in groupby(found, key=_channel)]
    return [encode_block(group) for group in sorted(groups, key=lambda group: group[0].seq)]


def _channel(record: FrameRecord) -> str:
    return record.tail.split(".", 3)[3] if record.tail.startswith("via.") else record.tail.split(".", 2)[2]


class StubPipeline:
    def __init__(self, space: RealSpace, js: JetStream) -> None:
        self.space, self.js = space, js
        self.subjects = space.subjects
        #: owner and series -> number and (first, last, count) of the frame before
        self.counters: dict[tuple[str, str], tuple[int, tuple[int, int, int] | None]] = {}

    async def records(self, seqs: Iterable[int]) -> list[FrameRecord]:
        found = [await self.js.at(self.subjects.log_stream, seq) for seq in seqs]
        return [kept(self.subjects, record) for record in found if record is not None]

    async def deliver(
        self,
        owner: str,
        seqs: Sequence[int] = (),
        *,
        records: Sequence[FrameRecord] = (),
        series: str = "first",
        number: int | None = None,
        lost: Iterable[Lost] = (),
        published: bool = True,
        by_reference: bool = False,
        stored: bool = True,
    ) -> int:
        """Publish one frame; answers its sequence in DLV. Not `published`: it counts, and never arrives.

        `by_reference`: its blocks lie in the store, all of them, or were never `stored` there.
        """
        held = sorted([*await self.records(seqs), *records], key=lambda each: each.seq)
        before, prev = self.counters.get((owner, series), (0, None))
        number = number or before + 1
        blocks = blocks_of(held)
        if by_reference:
            sealed = [self.seal(block) for block in blocks]
            if stored:
                for each in sealed:
                    await self.store(each)
            blocks = [each.ref for each in sealed]
        data = encode_frame(owner, self.space.info.epoch, series, number, blocks, prev=prev, lost=lost)
        summary = (held[0].seq, held[-1].seq, len(held)) if held else (0, 0, 0)
        self.counters[owner, series] = (max(number, before), summary)
        return await self.publish(owner, data) if published else 0

    def seal(self, block: bytes) -> SealedBlock:
        records = open_block(msgspec.msgpack.decode(block, type=Block))
        sealer = BlockSealer(SECRET, self.space.info.id, self.space.info.epoch)
        return sealer.seal(_channel(records[0]), block, encode_seqs([each.seq for each in records]))

    async def store(self, sealed: SealedBlock) -> None:
        await self.js.publish(self.subjects.block(sealed.name), sealed.data)

    async def publish(self, owner: str, data: bytes) -> int:
        return await self.js.publish(self.subjects.delivery(owner), data, {"Nats-Msg-Id": frame_id(data)})

    async def floor(self, seq: int) -> None:
        await self._put("floor.deliver", {"seq": seq, "needed": seq, "lease": 1, "epoch": "epoch"})

    async def level(self) -> int:
        """Say that everything up to the head of the log was delivered; answers the head."""
        head = int((await self.js.info(self.subjects.log_stream))["state"]["last_seq"])
        await self.floor(head)
        return head

    async def beat(self, number: int) -> None:
        await self._put("beat.deliver", {"lease": 1, "holder": "stub", "host": "here", "pid": 1, "beat": number})

    async def _put(self, key: str, value: dict[str, Any]) -> None:
        await self.js.publish(f"$KV.{self.subjects.state_bucket}.{key}", json.dumps(value).encode())

    async def waiting(self, owner: str) -> dict[str, int]:
        """Frames of an owner: not yet delivered, and delivered but not acknowledged."""
        info = await self.js.api(f"CONSUMER.INFO.{self.subjects.delivery_stream}.dlv_{owner}")
        return {key: int(info[key]) for key in ("num_pending", "num_ack_pending", "num_redelivered")}

    async def acknowledged(self, owner: str) -> bool:
        """Is the mailbox empty?"""
        found = await self.waiting(owner)
        return found["num_pending"] == found["num_ack_pending"] == 0


@asynccontextmanager
async def stub_pipeline(space: RealSpace, *, running: bool = True) -> AsyncIterator[StubPipeline]:
    async with space.core() as js:
        pipeline = StubPipeline(space, js)
        # a flag, not a cancellation: `wait_for` of Python 3.11 swallows one that comes with the answer
        over = asyncio.Event()
        beating = asyncio.create_task(_beat(pipeline, over)) if running else None
        try:
            yield pipeline
        finally:
            over.set()
            if beating is not None:
                await asyncio.gather(beating, return_exceptions=True)


async def _beat(pipeline: StubPipeline, over: asyncio.Event) -> None:
    number = 0
    while not over.is_set():
        number += 1
        await pipeline.beat(number)
        await asyncio.sleep(BEAT_EVERY)
