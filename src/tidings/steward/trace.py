"""`ctl.trace`: the life of one message, for whoever sent it or was sent it.

What is stored is searched for near the time in its id; what became of it is the receipts of a direct message, or the
fate of a task. One search at a time, and few may wait for it: a search reads megabytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tidings.broker.jetstream import StoredRecord
from tidings.errors import ConflictError
from tidings.steward.agent_handlers import Answer, Handler, access_of, name_of
from tidings.steward.receipt_services import message_id
from tidings.steward.receipts import RANK
from tidings.steward.requests import Request
from tidings.steward.task_rules import Settled, TaskState
from tidings.steward.unread import predecessors
from tidings.steward.voids import Void, claimed_id, void_of
from tidings.wire.envelope import Received, open_record
from tidings.wire.ids import id_time_ms
from tidings.wire.names import is_agent_id
from tidings.wire.subjects import Chat, Direct, Task

if TYPE_CHECKING:
    from tidings.steward.service import Steward

#: how far from the time in its id a message is looked for, and how many bytes are looked at
NEAR = timedelta(minutes=10)
MOST_LOOKED_AT = 8 * 1024 * 1024
#: searches that wait, of one agent and of all: each holds a place among the requests being worked on
MOST_EACH, MOST = 2, 16


class Traces:
    """Whose turn it is to search."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        if self._waiting[caller] >= MOST_EACH or self._waiting.total() >= MOST:
            raise ConflictError("too many messages are being traced: ask again in a moment")
        self._waiting[caller] += 1
        try:
            async with self._lock:
                yield
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]


async def trace(steward: Steward, request: Request) -> Answer:
    """Where a message of the caller's own, sent or received, is stored, and what became of it."""
    access_of(steward, request.sender)
    caller, mid = request.sender, message_id(request)
    await steward.receipts.ready()
    lives = [(k, life) for k, life in steward.receipts.lives.items() if k[1] == mid and caller in (k[0], k[2])]
    told: list[dict[str, Any]] = [
        {
            "kind": "dm" if life.channel is None else "chat",
            "sender": key[0],
            "to": life.channel or key[2],
            "seq": life.seq,
            "stage": life.stage,
            "stages": dict(life.stages),
            **({"why": life.why} if life.why else {}),
        }
        for key, life in lives
    ]
    stored: dict[tuple[str, int], dict[str, Any]] = {}
    async with steward.traces.turn(caller):
        for stream, record in await _candidates(steward, caller, mid, request.optional("seq", int)):
            line = _line(steward, record, caller, mid)
            if line is not None:
                stored[stream, record.seq] = {"stream": stream, **line}
    told += await _tasks(steward, caller, mid, [line for line in stored.values() if line["kind"] == "task"])
    ids = {line.get(key) for line in (*stored.values(), *told) for key in ("sender", "to", "worker")}
    names = {each: name for each in ids if each and is_agent_id(each) and (name := name_of(steward, each))}
    return {"id": mid, "stored": list(stored.values()), "receipts": told, "names": names}


async def _tasks(steward: Steward, caller: str, mid: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of the task of this id that the caller asked; its record may be gone already."""
    keys = (caller, *predecessors(steward, caller))
    if not lines and all(steward.desk.book.find(each, mid) is None for each in keys):
        return []
    asker, found = await steward.desk.lookup.locate(caller, mid, lines[0]["seq"] if lines else None)
    return [_task_life(found, lines[0] if lines else {"sender": asker})]


def _task_life(found: TaskState | Settled | str, line: dict[str, Any]) -> dict[str, Any]:
    """The receipts of a task: claimed is delivered, done or failed is read."""
    if isinstance(found, str):
        return {
            "kind": "task",
            **{key: line[key] for key in ("sender", "to", "seq") if key in line},
            "stage": "confirmed",
            "stages": {"confirmed": _time(line["time_ns"] / 1e9)} if "time_ns" in line else {},
            "state": found,
        }
    stages = {"confirmed": _time(found.time_ns / 1e9)}
    if found.attempt and found.claimed_at:
        stages["delivered"] = _time(found.claimed_at)
    state, cause = "claimed" if found.worker else "queued", None
    if isinstance(found, Settled):
        stages[_last_stage(found)] = _time(found.at)
        state, cause = found.state, found.cause
    return {
        "kind": "task",
        "sender": found.asker,
        "to": found.role,
        "seq": found.seq,
        "stage": max(stages, key=lambda stage: RANK[stage]),
        "stages": stages,
        "state": state,
        "cause": cause,
        "worker": found.worker,
        "attempt": found.attempt,
        "reasons": list(found.reasons),
    }


def _last_stage(settled: Settled) -> str:
    if settled.state == "done" or settled.attempt:
        return "read"
    return "undeliverable" if settled.cause == "malformed" else "expired"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


async def _candidates(steward: Steward, caller: str, mid: str, seq: int | None) -> list[tuple[str, StoredRecord]]:
    s = steward.subjects
    at = await steward.js.at(s.direct_stream, seq) if seq and seq > 0 else None
    found = [(s.direct_stream, at)] if at else []
    for stream, subject_filter in (
        (s.direct_stream, f"{s.root}.dm.*.*.{caller}"),
        (s.direct_stream, s.direct_inbox(caller)),
        (s.log_stream, f"{s.root}.chat.{caller}.>"),
        (s.task_stream, f"{s.root}.task.*.{caller}"),
        *((s.task_stream, f"{s.root}.task.*.{each}") for each in predecessors(steward, caller)),
    ):
        found += [(stream, record) for record in await _near(steward, stream, subject_filter, mid)]
    return found


async def _near(steward: Steward, stream: str, subject_filter: str, mid: str) -> list[StoredRecord]:
    """Records stored near the time in an id. A hint, not a proof: what was sent much later is not found this way."""
    try:
        when = datetime.fromtimestamp((id_time_ms(mid) or 0) / 1000, UTC)
        start = await steward.js.first_after(stream, subject_filter, when - NEAR)
    except (ValueError, OverflowError):
        return []
    end = int((await steward.js.info(stream))["state"]["last_seq"])
    latest = int((when + NEAR).timestamp()) * 1_000_000_000
    found: list[StoredRecord] = []
    looked = 0
    async for page in steward.js.read(stream, subject_filter, start or end + 1, end):
        found += [record for record in page if mid.encode() in record.payload]
        looked += sum(len(record.payload) for record in page)
        if looked >= MOST_LOOKED_AT or page[-1].time_ns > latest:
            break
    return found


def _line(steward: Steward, record: StoredRecord, caller: str, mid: str) -> dict[str, Any] | None:
    void = void_of(steward.subjects, steward.info.id, steward.table, record)
    if void is not None:
        return _void_line(steward, record, caller, mid, void)
    opened = open_record(steward.subjects, steward.info.id, record.subject, record.own_fields() or (), record.payload)
    if not isinstance(opened, Received) or opened.message.id != mid:
        return None
    is_own = caller == opened.sender or (opened.kind == "task" and opened.sender in predecessors(steward, caller))
    if not is_own and not (opened.kind == "dm" and caller == opened.destination):
        return None
    return {
        "seq": record.seq,
        "time_ns": record.time_ns,
        "kind": opened.kind,
        "sender": opened.sender,
        "to": opened.destination,
    }


def _void_line(steward: Steward, record: StoredRecord, caller: str, mid: str, void: Void) -> dict[str, Any] | None:
    """A record of the caller's own that does not count, and why."""
    parsed = steward.subjects.parse(record.subject)
    if not isinstance(parsed, Chat | Direct | Task) or parsed.sender != caller or claimed_id(record) != mid:
        return None
    kind, to = {
        Chat: ("chat", getattr(parsed, "channel", "")),
        Direct: ("dm", getattr(parsed, "target", "")),
        Task: ("task", getattr(parsed, "role", "")),
    }[type(parsed)]
    return {
        "seq": record.seq,
        "time_ns": record.time_ns,
        "kind": kind,
        "sender": caller,
        "to": to,
        "void": void.detail,
    }


TRACE_HANDLERS: dict[tuple[str, str], Handler] = {("trace", "get"): trace}
