"""The health of a space, as its steward sees it: facts, and the problems an operator must see to.

Answered by real round trips: the lease is read back from the leader of the log, and something is written and read back;
streams the steward does not write to are asked whether they could (`stuck_streams.py`).
Each fact is as fresh as the answer unless it says its age. Nothing is mended here. Every agent may ask:
SECURITY.md says who is named in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.broker.streams import gate_of
from tidings.errors import LeaseLost, TidingsError
from tidings.space import recall
from tidings.steward import gate
from tidings.steward.agent_handlers import Answer, Handler
from tidings.steward.requests import Request
from tidings.wire.ids import new_id
from tidings.wire.operations import describe
from tidings.wire.subjects import AGENT_SERVICES

if TYPE_CHECKING:
    from tidings.steward.service import Steward

WRITE_EVERY, WRITE_PATIENCE = 1.0, 1.5
log = logging.getLogger(__name__)


async def health_of(steward: Steward) -> dict[str, Any]:
    started = time.monotonic()
    holder = await steward.lease.prove()
    rtt = time.monotonic() - started
    streams = await _streams(steward)
    log_head = streams[steward.subjects.log_stream]["last_seq"]
    written = await _write(steward) or await steward.log_write.look(log_head)
    await steward.stuck.look()
    problems = [*([written] if written else []), *problems_of(steward)]
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
        "gate": _gate_facts(steward),
        "streams": streams,
        "free_disk": shutil.disk_usage(steward.home.root).free,
        "agents": sum(1 for owner in steward.table.owners() if steward.active_access(owner) is not None),
        "void_records": sum(steward.table.void.values()),
        "void_messages": dict(steward.voids.found),
        "counts": steward.answering.counts,
        "mail": {
            "removed": steward.mail.removed,
            "invented": steward.mail.invented,
            "receipts_unrecorded": steward.receipts.unrecorded,
            "dead": steward.dead_mail.count,
            "beyond_share": steward.shares.removed,
        },
        "tasks": {**await steward.desk.lookup.figures(), "invented": steward.floods.invented_tasks},
        "removed": {"log": steward.removed, **steward.sides.removed},
        "withheld": steward.floods.withheld(),
        "doubts": sorted(steward.doubts.values()),
        "regressions": [msgspec.to_builtins(each) for each in steward.marks.file.regressions],
        "at": time.time(),
    }


async def _write(steward: Steward) -> str | None:
    """Write something and read it back; what is wrong if that does not work. Looked at once a second at most."""
    known = steward.last_written
    if known is not None and time.monotonic() - known[0] < WRITE_EVERY:
        return known[1]
    subject, said = f"$KV.{steward.subjects.state_bucket}.probe", new_id().encode()
    problem = None
    try:
        await steward.js.publish(subject, said, timeout=WRITE_PATIENCE)
        stored = await steward.js.last(f"KV_{steward.subjects.state_bucket}", subject)
        if stored is None or stored.payload != said:
            problem = "the broker acknowledged a write and does not have it: `tidings logs broker`"
    except TidingsError as error:
        problem = f"the broker answers and stores nothing ({error}): {likely_cause(steward)}"
    steward.last_written = time.monotonic(), problem
    return problem


class LogWrite:
    """Does the log store? One that grows does; into one that does not grow the lease is written again."""

    def __init__(self, steward: Steward) -> None:
        self._steward = steward
        self._head = 0
        self._grew = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    async def look(self, head: int) -> str | None:
        if head > self._head:
            self._head, self._grew = head, time.monotonic()
        if self._task is None and time.monotonic() - self._grew < self._steward.intervals.log_write:
            return None
        self._task = self._task or self._steward.spawn(self._renew())
        # never cancelled: a lease of unknown outcome would be a lost one
        done, _ = await asyncio.wait({self._task}, timeout=WRITE_PATIENCE)
        if not done:
            await self._steward.unwritten("the lease could not be written again")
            return f"the broker answers and the log stores nothing: {likely_cause(self._steward)}"
        self._task, self._grew = None, time.monotonic()
        return None

    async def _renew(self) -> None:
        try:
            async with self._steward.writer.lock:
                await self._steward.lease.renew()
        except LeaseLost as error:
            self._steward.fail(error)
        except TidingsError as error:
            log.warning("the lease could not be written again: %s", error)


def likely_cause(steward: Steward) -> str:
    room = steward.disk.look()
    if room.is_short:
        return str(room)
    return (
        "it met a full disk and is started again by `tidings up`, or its store cannot be written: `tidings logs broker`"
    )


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


def _gate_facts(steward: Steward) -> dict[str, Any] | None:
    state, room = steward.gate, steward.disk.look()
    if state is None:
        return None
    closed_by = None if state.open else "disk" if not room.is_ample else "budget"
    return {"open": state.open, "used": state.used, "budget": state.budget, "closed_by": closed_by}


def _held_by(steward: Steward) -> str | None:
    """The part retention waits for."""
    return steward.retention.last.held_by if steward.retention.last else None


def problems_of(steward: Steward) -> list[str]:
    full = gate.problem_of(steward.gate, _held_by(steward), steward.disk.look()) if steward.gate is not None else None
    return [
        *([full + steward.shares.whose_log()] if full else []),
        *steward.stuck.problems(),
        *steward.sides.problems(),
        *steward.shares.problems(),
        *steward.floods.problems(),
        *steward.marks.problems(),
        *recall.problems(steward.home, steward.info.id),
        *steward.store.problems(),
    ]


async def ping(steward: Steward, request: Request) -> Answer:
    del request
    return await health_of(steward)


async def describe_operations(steward: Steward, request: Request) -> Answer:
    """The table of operations, for whoever writes a client in another language: those it may ask for."""
    del steward, request
    return {"operations": describe(AGENT_SERVICES)}


HEALTH_HANDLERS: dict[tuple[str, str], Handler] = {
    ("health", "ping"): ping,
    ("health", "describe"): describe_operations,
}
