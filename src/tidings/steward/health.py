"""The health of a space, as its steward sees it: facts, and the problems an operator must see to.

Answered by a real round trip: the lease is read back from the leader of the log. Each fact is as fresh as the answer
unless it says its age. Nothing is mended here. Every agent may ask.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.broker.streams import GateState, gate_of
from tidings.steward import gate
from tidings.steward.requests import Request
from tidings.steward.services import Answer, Handler, name_of

if TYPE_CHECKING:
    from tidings.steward.service import Steward


async def health_of(steward: Steward) -> dict[str, Any]:
    started = time.monotonic()
    holder = await steward.lease.prove()
    rtt = time.monotonic() - started
    streams = await _streams(steward)
    log_head = streams[steward.subjects.log_stream]["last_seq"]
    problems = problems_of(steward)
    await steward.roster.backstop.look()
    return {
        "healthy": not problems,
        "problems": problems,
        "steward": {"lease": holder.seq, "holder": str(holder), "pid": os.getpid(), "since": steward.started},
        "broker_rtt_ms": round(rtt * 1000, 3),
        "log_head": log_head,
        "floor": steward.table.floor,
        "backstop": steward.roster.backstop.health(log_head),
        "floor_held_by": _held_by(steward),
        "epoch": steward.marks.file.epoch,
        "gate": _gate_facts(steward.gate),
        "streams": streams,
        "free_disk": shutil.disk_usage(steward.home.root).free,
        "agents": sum(1 for owner in steward.table.owners() if steward.active_access(owner) is not None),
        "void_records": sum(steward.table.void.values()),
        "counts": steward.answering.counts,
        "mail": {
            "removed": steward.mail.removed,
            "invented": steward.mail.invented,
            "receipts_unrecorded": steward.receipts.unrecorded,
        },
        "tasks": {**await steward.desk.lookup.figures(), "invented": steward.floods.invented_tasks},
        "removed": {"log": steward.removed, **steward.sides.removed},
        "withheld": steward.floods.withheld(),
        "doubts": [{"agent": name_of(steward, owner), "seq": seq} for owner, seq in steward.doubts.items()],
        "regressions": [msgspec.to_builtins(each) for each in steward.marks.file.regressions],
        "at": time.time(),
    }


async def _streams(steward: Steward) -> dict[str, dict[str, int]]:
    """How full each stream is. The log's answer says how the gate is, too, and is kept for whoever asks next."""
    s = steward.subjects
    found = {}
    for stream in (s.log_stream, s.direct_stream, s.task_stream, s.delivery_stream, s.audit_stream, s.dead_stream):
        info = await steward.js.info(stream)
        found[stream] = _fill(info)
        if stream == s.log_stream:
            steward.gate = gate_of(s, info)
    return found


def _fill(info: Mapping[str, Any]) -> dict[str, int]:
    return {
        "messages": info["state"]["messages"],
        "bytes": info["state"]["bytes"],
        "limit": info["config"]["max_bytes"],
        "last_seq": info["state"]["last_seq"],
        "consumers": info["state"]["consumer_count"],
    }


def _gate_facts(state: GateState | None) -> dict[str, Any] | None:
    return {"open": state.open, "used": state.used, "budget": state.budget} if state else None


def _held_by(steward: Steward) -> str | None:
    """The part retention waits for."""
    return steward.retention.last.held_by if steward.retention.last else None


def problems_of(steward: Steward) -> list[str]:
    full = gate.problem_of(steward.gate, _held_by(steward)) if steward.gate is not None else None
    return [
        *([full] if full else []),
        *steward.sides.problems(),
        *steward.floods.problems(),
        *steward.marks.problems(),
    ]


async def ping(steward: Steward, request: Request) -> Answer:
    del request
    return await health_of(steward)


HEALTH_HANDLERS: dict[tuple[str, str], Handler] = {("health", "ping"): ping}
