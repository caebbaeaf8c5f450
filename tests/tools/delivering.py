"""A deliver job beside a test: real Spark, real broker, in a thread of this process.

    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()

`Mailbox` reads what an owner was handed, the way an endpoint would, and `owed` says from the log alone what it should
have been: `model.py` knows nothing of the pipeline.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidings.client.mailbox import pull
from tidings.delivery.job import DeliverJob
from tidings.delivery.stream_job import JobSettings
from tidings.nats.acks import ACK
from tidings.server.log import log_record
from tidings.wire.frames import Block, Frame, FrameRecord, Ref, decode_frame, open_block, open_ref
from tidings_testing.real_space import AgentClient, RealSpace
from tidings_testing.waiting import eventually
from tools import model

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def job_settings(space: RealSpace, root: Path) -> JobSettings:
    """Spark's workers encode everything, however little: tests have small batches, and the workers are the risk."""
    info = space.info
    return JobSettings(
        space=info.name,
        space_id=info.id,
        anchor_key=info.steward_key,
        url=info.url,
        creds=str(space.home.creds / "pipeline.creds"),
        checkpoint=str(root / "checkpoint"),
        lake=str(root / "lake"),
        small_records=0,
        pay_every=0.2,
        lease_ttl=1.0,
    )


class RunningJob:
    """A job in a thread. `failure` is what ended it."""

    def __init__(self, spark: SparkSession, space: RealSpace, settings: JobSettings) -> None:
        self.space = space
        self.ready = threading.Event()
        self.job = DeliverJob(spark, settings, on_ready=self.ready.set)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="deliver", daemon=True)

    def _run(self) -> None:
        try:
            self.job.run()
        except BaseException as error:
            self.failure = error

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        self.job.stop()
        await asyncio.to_thread(self._thread.join, 60)
        assert not self._thread.is_alive(), "the job did not stop"

    async def caught_up(self, within: float = 60.0, *, debts: bool = True) -> int:
        """Wait until everything in the log now is delivered, or a debt; with `debts` until those are paid too."""
        async with self.space.core() as js:
            last = int((await js.info(self.space.subjects.log_stream))["state"]["last_seq"])

        def done() -> bool:
            if self.failure is not None:
                raise self.failure
            if not self.ready.is_set():  # it looks at the mailboxes before its query runs
                return False
            deliverer = self.job.deliverer
            there = deliverer.floor >= last and not (debts and deliverer.debts.open)
            return bool(there and not self.job.busy)  # a batch moves the floor before it is counted

        await eventually(done, within=within, what=f"delivery reaches {last}: {self.job.tally}", every=0.05)
        return last


@asynccontextmanager
async def delivering(spark: SparkSession, space: RealSpace, root: Path, **changes: Any) -> AsyncIterator[RunningJob]:
    """Deliver for `space` while the block runs. Checkpoint and lake are below `root` and stay."""
    running = RunningJob(spark, space, replace(job_settings(space, root), **changes))
    running.start()
    try:
        yield running
    finally:
        await running.stop()
    if running.failure is not None:
        raise running.failure


@dataclass
class Mailbox:
    """What one owner was handed: every frame, every record once and in the order of its first coming."""

    frames: list[Frame] = field(default_factory=list)
    records: dict[int, FrameRecord] = field(default_factory=dict)
    repeats: int = 0

    #: channel and sequences of blocks that were named and are not stored any more
    gone: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    async def take(self, agent: AgentClient, data: bytes) -> None:
        frame = decode_frame(data)
        self.frames.append(frame)
        for block in frame.blocks:
            records = open_block(block) if isinstance(block, Block) else await fetch(agent, frame.epoch, block)
            if records is None:
                assert isinstance(block, Ref)
                self.gone.append((block.channel, block.seqs))
            for kept in records or ():
                if kept.seq in self.records:
                    self.repeats += 1
                self.records.setdefault(kept.seq, kept)

    @property
    def refs(self) -> list[Ref]:
        return [block for frame in self.frames for block in frame.blocks if isinstance(block, Ref)]

    def channel(self, name: str) -> list[int]:
        return [seq for seq, kept in self.records.items() if kept.tail.split(".", 2)[2] == name]

    def check_numbers(self) -> None:
        """Within a series every number follows the one before, or repeats it."""
        newest: dict[str, int] = {}
        for frame in self.frames:
            assert frame.number <= newest.get(frame.series, 0) + 1, f"{frame.series} skips to {frame.number}"
            newest[frame.series] = max(frame.number, newest.get(frame.series, 0))


async def fetch(agent: AgentClient, epoch: str, ref: Ref) -> tuple[FrameRecord, ...] | None:
    """A block by its name, as everybody may get it; None if it is gone."""
    answer = await agent.connection.request(agent.subjects.block_get(ref.name.hex()), timeout=5)
    if answer.status is not None:
        assert answer.status == 404, answer
        return None
    return open_ref(agent.space_id, epoch, ref, answer.data)


async def empty_mailbox(agent: AgentClient, into: Mailbox | None = None, *, frames: int = 10_000) -> Mailbox:
    """Pull and acknowledge what lies in the agent's mailbox now, at most so many frames."""
    mailbox = into or Mailbox()
    taken = 0

    async def take(message: Any, _delivery: Any) -> None:
        nonlocal taken
        taken += 1
        await mailbox.take(agent, message.data)
        await agent.connection.request(message.reply, ACK, timeout=5)

    while taken < frames:
        before = taken
        await pull(agent.connection, agent.subjects.delivery_stream, f"dlv_{agent.id}", 1, 0.3, take)
        if taken == before:
            break
    return mailbox


async def owed(space: RealSpace, head: int | None = None) -> dict[str, set[int]]:
    """Owner -> sequences it is owed and, at `head`, allowed: from the log alone, by the naive model."""
    async with space.core() as js:
        last = int((await js.info(space.subjects.log_stream))["state"]["last_seq"])
        stored = [r async for page in js.read(space.subjects.log_stream, ">", 1, last) for r in page]
    running = model.Running(space.info.name, space.info.id, space.info.steward_key)
    found: dict[str, set[int]] = {}
    rights: list[tuple[str, str, int]] = []
    for record in stored:
        _, _, kind, *rest = record.subject.split(".", 4)
        if kind != "chat":
            running.follow(log_record(record))
            continue
        sender, channel = rest
        if running.is_live(channel) and running.may_post(sender, channel):
            owners = {mention["id"] for mention in json.loads(record.payload).get("mentions", ())} - {sender}
        else:
            owners = running.owed(record.seq, sender, channel)
        rights += [(owner, channel, record.seq) for owner in owners]
    for owner, channel, seq in rights:
        if running.may_read(owner, channel):
            found.setdefault(owner, set()).add(seq)
    assert head is None or head >= last
    return found
