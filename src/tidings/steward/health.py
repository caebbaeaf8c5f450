"""The health of a space, as its steward sees it: facts, and the problems an operator must see to.

Answered by real round trips: the lease is read back from the leader of the log, and something is written and read back
(`WriteProbe`). Each fact is as fresh as the answer unless it says its age. Nothing is mended here. Every agent may ask:
SECURITY.md says who is named in it.

A stream that met a full disk answers no write until the broker is started again, and says nothing of it in its state.
Something is written to the state bucket and read back; into a log that does not grow the lease is written again. The
other streams are asked to remove what nobody could have written: one that keeps an error refuses even that, one that is
well costs less than a millisecond. What is found is a problem in `status`, and the supervisor is asked to start the
broker again once the disk has room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from tidings.admin import pushing, recall
from tidings.contract.agents import DescribeAnswer, DescribeRequest, HealthAnswer, HealthRequest
from tidings.contract.catalogue import OPERATIONS
from tidings.contract.core import Caller
from tidings.errors import LeaseLost, OutcomeUnknown, TidingsError
from tidings.nats.errors import NO_STREAM, ApiError
from tidings.rpc.dispatch import handler
from tidings.server.disk import DiskReserve
from tidings.server.lease import StewardLease
from tidings.steward.backstop import BackstopWatch
from tidings.steward.context import Lifecycle, SpaceContext
from tidings.steward.dead_letters import DeadLetters
from tidings.steward.gate import LogGate
from tidings.steward.invitations import InvitationHandlers
from tidings.steward.mail import Mail
from tidings.steward.marks import Marks
from tidings.steward.quotas import FloodWatch
from tidings.steward.receipts import ReceiptStore
from tidings.steward.retention import Retention
from tidings.steward.shares import Shares
from tidings.steward.side_streams import SideStreams
from tidings.steward.store_watch import StoreWatch
from tidings.steward.tasks import TaskQueues
from tidings.steward.voids import VoidWatch
from tidings.steward.writer import RulingWriter
from tidings.wire.message import new_id
from tidings.wire.records import moment

LOOK_EVERY, PATIENCE = 1.0, 1.5
#: one token behind the kind: every subject of ours has more, so nobody can write it and no consumer reads it
NOTHING = "probe"
UNWRITABLE = (
    "it met a full disk and is started again by `tidings up`, or its store cannot be written: `tidings logs broker`"
)
log = logging.getLogger(__name__)


@dataclass(eq=False)
class WriteProbe:
    space: SpaceContext
    writer: RulingWriter
    disk: DiskReserve
    life: Lifecycle
    #: hears that a write was not answered
    unwritten: Callable[[str], Awaitable[None]]

    def __post_init__(self) -> None:
        s = self.space.subjects
        self._kinds = {
            s.direct_stream: "dm",
            s.task_stream: "task",
            s.delivery_stream: "dlv",
            s.audit_stream: "aud",
            s.dead_stream: "dead",
        }
        self._looked = float("-inf")
        #: stream -> the error it keeps
        self._stuck: dict[str, str] = {}
        #: when something was written and read back for the last time, and what was wrong with it
        self._written: tuple[float, str | None] | None = None
        self._log_head = 0
        self._log_grew = time.monotonic()
        self._renewal: asyncio.Task[None] | None = None

    async def look(self, log_head: int) -> str | None:
        """What is wrong with writing now, for whoever asks how the space is; each part at most once a second."""
        problem = await self._write() or await self._write_log(log_head)
        if time.monotonic() - self._looked >= LOOK_EVERY:
            with suppress(OutcomeUnknown):  # a stream that is busy is not called stuck
                await self.run()
        return problem

    async def run(self) -> None:
        """Look for streams that keep a write error."""
        self._looked = time.monotonic()
        self._stuck = {s: why for s, kind in self._kinds.items() if (why := await self._error_of(s, kind))}
        if self._stuck and self.disk.look().can_start:
            await self.unwritten(", ".join(f"{stream}: {why}" for stream, why in self._stuck.items()))

    async def _error_of(self, stream: str, kind: str) -> str | None:
        nothing = {"filter": f"{self.space.subjects.root}.{kind}.{NOTHING}"}
        try:
            await self.space.js.api(f"STREAM.PURGE.{stream}", nothing, timeout=PATIENCE)
        except ApiError as error:
            if error.err_code == NO_STREAM:
                raise
            return error.description.rpartition(": ")[2] or "it does not say which"  # without paths of this machine
        return None

    async def _write(self) -> str | None:
        """Write something to the state bucket and read it back."""
        if self._written is not None and time.monotonic() - self._written[0] < LOOK_EVERY:
            return self._written[1]
        bucket, said = self.space.subjects.state_bucket, new_id().encode()
        problem = None
        try:
            await self.space.js.publish(f"$KV.{bucket}.probe", said, timeout=PATIENCE)
            stored = await self.space.js.last(f"KV_{bucket}", f"$KV.{bucket}.probe")
            if stored is None or stored.payload != said:
                problem = "the broker acknowledged a write and does not have it: `tidings logs broker`"
        except TidingsError as error:
            problem = f"the broker answers and stores nothing ({error}): {self._likely_cause()}"
        self._written = time.monotonic(), problem
        return problem

    async def _write_log(self, head: int) -> str | None:
        """A log that grows does store; into one that does not grow the lease is written again."""
        if head > self._log_head:
            self._log_head, self._log_grew = head, time.monotonic()
        if self._renewal is None and time.monotonic() - self._log_grew < self.space.intervals.log_write:
            return None
        self._renewal = self._renewal or self.life.spawn(self._renew())
        # never cancelled: a lease of unknown outcome would be a lost one
        done, _ = await asyncio.wait({self._renewal}, timeout=PATIENCE)
        if not done:
            await self.unwritten("the lease could not be written again")
            return f"the broker answers and the log stores nothing: {self._likely_cause()}"
        self._renewal, self._log_grew = None, time.monotonic()
        return None

    async def _renew(self) -> None:
        try:
            async with self.writer.lock:
                await self.writer.lease.renew()
        except LeaseLost as error:
            self.life.fail(error)
        except TidingsError as error:
            log.warning("the lease could not be written again: %s", error)

    def _likely_cause(self) -> str:
        room = self.disk.look()
        return str(room) if room.is_short else UNWRITABLE

    def problems(self) -> list[str]:
        return [
            f"{stream} keeps an error of its disk and stores nothing ({why}): `tidings up` starts the broker again "
            "once there is room"
            for stream, why in self._stuck.items()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """Every part that has something to say."""

    space: SpaceContext
    lease: StewardLease
    gate: LogGate
    probe: WriteProbe
    backstop: BackstopWatch
    marks: Marks
    store: StoreWatch
    retention: Retention
    sides: SideStreams
    shares: Shares
    floods: FloodWatch
    voids: VoidWatch
    invited: InvitationHandlers
    mail: Mail
    receipts: ReceiptStore
    letters: DeadLetters
    tasks: TaskQueues
    #: of requests
    counts: Mapping[str, int]
    #: since when the steward runs
    started: float

    @handler(HealthRequest)
    async def ping(self, _caller: Caller, _request: HealthRequest) -> HealthAnswer:
        return await self.facts()

    @handler(DescribeRequest)
    async def describe_operations(self, _caller: Caller, _request: DescribeRequest) -> DescribeAnswer:
        """Describes the operations that an agent may call, for authors of clients in other languages."""
        return DescribeAnswer(tuple(each.describe() for each in OPERATIONS.values() if each.caller == "agent"))

    async def facts(self) -> HealthAnswer:
        started = time.monotonic()
        holder = await self.lease.prove()
        rtt = time.monotonic() - started
        streams = await self._streams()
        log_head = streams[self.space.subjects.log_stream]["last_seq"]
        written = await self.probe.look(log_head)
        problems = [*([written] if written else []), *self._problems()]
        await self.backstop.look()
        return HealthAnswer(
            healthy=not problems,
            problems=tuple(problems),
            steward={"lease": holder.seq, "holder": str(holder), "pid": os.getpid(), "since": moment(self.started)},
            broker_rtt_ms=round(rtt * 1000, 3),
            log_head=log_head,
            floor=self.space.table.floor,
            backstop=self.backstop.health(log_head),
            floor_held_by=self._held_by(),
            epoch=self.marks.file.epoch,
            gate=self.gate.facts(),
            streams=streams,
            free_disk=shutil.disk_usage(self.space.home.root).free,
            agents=sum(self.space.active_access(owner) is not None for owner in self.space.table.owners()),
            void_records=sum(self.space.table.void.values()),
            void_messages=dict(self.voids.found),
            counts=dict(self.counts),
            mail={
                "removed": self.mail.removed,
                "invented": self.mail.invented,
                "receipts_unrecorded": self.receipts.unrecorded,
                "dead": self.letters.count,
                "beyond_share": self.shares.removed,
            },
            tasks={**await self.tasks.figures(), "invented": self.floods.invented_tasks},
            removed={"log": self.retention.removed, **self.sides.removed},
            withheld=tuple(self.floods.withheld()),
            doubts=tuple(sorted(self.marks.doubts.values())),
            regressions=tuple(msgspec.to_builtins(each) for each in self.marks.file.regressions),
            at=moment(time.time()),
        )

    async def _streams(self) -> dict[str, dict[str, int]]:
        """How full each stream is. The log's answer says how the gate is, too, and is kept for whoever asks next."""
        found = {}
        for stream in self.space.streams:
            info = await self.space.js.info(stream)
            state = info["state"]
            found[stream] = {
                "messages": state["messages"],
                "bytes": state["bytes"],
                "limit": info["config"]["max_bytes"],
                "last_seq": state["last_seq"],
                "consumers": state["consumer_count"],
            }
            if stream == self.space.subjects.log_stream:
                self.gate.learn(info)
        return found

    def _held_by(self) -> str | None:
        """The part retention waits for."""
        return self.retention.last.held_by if self.retention.last else None

    def _problems(self) -> list[str]:
        full = self.gate.problem(self._held_by())
        return [
            *([full + self.shares.whose_log()] if full else []),
            *self.probe.problems(),
            *self.sides.problems(),
            *self.shares.problems(),
            *self.floods.problems(),
            *self.invited.problems(),
            *self.marks.problems(),
            *recall.problems(self.space.home, self.space.info.id),
            *pushing.problems(self.space.home, self.space.info),
            *self.store.problems(),
        ]
