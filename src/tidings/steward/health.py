"""The health of a space, as its steward sees it: facts, and the problems an operator must see to.

Answered by real round trips: the lease is read back from the leader of the log, and something is written and read back
(`write_probe.py`). Each fact is as fresh as the answer unless it says its age. Nothing is mended here. Every agent may
ask: SECURITY.md says who is named in it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tidings.admin import pushing, recall
from tidings.server.lease import StewardLease
from tidings.steward.backstop import BackstopWatch
from tidings.steward.context import SpaceContext
from tidings.steward.dead_letters import DeadLetters
from tidings.steward.gate import LogGate
from tidings.steward.invitations import InvitationHandlers
from tidings.steward.mail import Mail
from tidings.steward.marks import Marks
from tidings.steward.quotas import FloodWatch
from tidings.steward.receipts import ReceiptStore
from tidings.steward.requests import Answer, ControlRequest, handles
from tidings.steward.retention import Retention
from tidings.steward.shares import Shares
from tidings.steward.side_streams import SideStreams
from tidings.steward.store_watch import StoreWatch
from tidings.steward.tasks import TaskQueues
from tidings.steward.voids import VoidWatch
from tidings.steward.write_probe import WriteProbe
from tidings.wire.operations import describe
from tidings.wire.records import moment
from tidings.wire.subjects import AGENT_SERVICES


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

    @handles("health", "ping")
    async def ping(self, request: ControlRequest) -> Answer:
        del request
        return await self.facts()

    @handles("health", "describe")
    async def describe_operations(self, request: ControlRequest) -> Answer:
        """The table of operations, for whoever writes a client in another language: those it may ask for."""
        del request
        return {"operations": describe(AGENT_SERVICES)}

    async def facts(self) -> dict[str, Any]:
        started = time.monotonic()
        holder = await self.lease.prove()
        rtt = time.monotonic() - started
        streams = await self._streams()
        log_head = streams[self.space.subjects.log_stream]["last_seq"]
        written = await self.probe.look(log_head)
        problems = [*([written] if written else []), *self._problems()]
        await self.backstop.look()
        return {
            "healthy": not problems,
            "problems": problems,
            "steward": {"lease": holder.seq, "holder": str(holder), "pid": os.getpid(), "since": moment(self.started)},
            "broker_rtt_ms": round(rtt * 1000, 3),
            "log_head": log_head,
            "floor": self.space.table.floor,
            "backstop": self.backstop.health(log_head),
            "floor_held_by": self._held_by(),
            "epoch": self.marks.file.epoch,
            "gate": self.gate.facts(),
            "streams": streams,
            "free_disk": shutil.disk_usage(self.space.home.root).free,
            "agents": sum(self.space.active_access(owner) is not None for owner in self.space.table.owners()),
            "void_records": sum(self.space.table.void.values()),
            "void_messages": dict(self.voids.found),
            "counts": self.counts,
            "mail": {
                "removed": self.mail.removed,
                "invented": self.mail.invented,
                "receipts_unrecorded": self.receipts.unrecorded,
                "dead": self.letters.count,
                "beyond_share": self.shares.removed,
            },
            "tasks": {**await self.tasks.figures(), "invented": self.floods.invented_tasks},
            "removed": {"log": self.retention.removed, **self.sides.removed},
            "withheld": self.floods.withheld(),
            "doubts": sorted(self.marks.doubts.values()),
            "regressions": [msgspec.to_builtins(each) for each in self.marks.file.regressions],
            "at": moment(time.time()),
        }

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
