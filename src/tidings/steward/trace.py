"""`ctl.trace`: the life of one message, and whether a message is stored although its acknowledgement was lost.

`get` is for whoever sent a message or was sent it: what is stored is searched for near the time in its id; what became
of it is the receipts of a direct message, or the fate of a task. `find` reads only the one subject that the caller
publishes such a message to: the caller is a token of it, so nobody is told of another's. It reads a bounded number of
records and says where to go on (`next`). A direct message or task that was removed is `gone` as long as its receipts or
its fate are remembered; a channel message that retention removed is not found. `which` asks the same of many ids at
once, and only which may be there. One search at a time, and few may wait for it: a search reads megabytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from msgspec import UNSET
from msgspec.structs import replace

from tidings.contract.core import Caller
from tidings.contract.mail import (
    FindMessageAnswer,
    FindMessageRequest,
    FindMessagesAnswer,
    FindMessagesRequest,
    MessageKind,
    TraceAnswer,
    TracedReceipt,
    TracedRecord,
    TraceRequest,
)
from tidings.model.task_rules import EndedTask, TaskState
from tidings.nats.jetstream import StoredRecord
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext
from tidings.steward.fair_queue import ConcurrencyLimit
from tidings.steward.receipts import ReceiptStore
from tidings.steward.tasks import TaskQueues
from tidings.steward.voids import Void, claimed_id, payload_id, void_of
from tidings.wire.message import check_message_id, id_time_ms
from tidings.wire.names import check_agent_id, check_channel, check_role_address, is_agent_id
from tidings.wire.records import moment, record_time, seconds_of
from tidings.wire.states import ReceiptStage, TaskCause, TaskStatus
from tidings.wire.subjects import Chat, Direct, Task

#: how far from the time in its id a message is looked for, and how many bytes are looked at
NEAR = timedelta(minutes=10)
MOST_LOOKED_AT = 8 * 1024 * 1024
#: searches that wait, of one agent and of all: each holds a place among the requests being worked on
MOST_EACH, MOST = 2, 16
#: what one search for a stored message reads
MOST_RECORDS, MOST_BYTES = 4_000, 4 * 1024 * 1024
PAGE = 1_000
#: seconds by which the clock of whoever made the id, or says when it tried first, may be ahead of the broker's
AHEAD = 2 * 3600.0


class TraceHandlers:
    def __init__(self, space: SpaceContext, receipts: ReceiptStore, tasks: TaskQueues) -> None:
        self.space = space
        self.receipts = receipts
        self.tasks = tasks
        refusal = "too many messages are being traced: ask again in a moment"
        self.searches = ConcurrencyLimit(1, MOST_EACH, refusal, MOST)

    @handler(TraceRequest)
    async def trace(self, caller: Caller, request: TraceRequest) -> TraceAnswer:
        """Where a message of the caller's own, sent or received, is stored, and what became of it."""
        self.space.access_of(caller.id)
        mid = check_message_id(request.id)
        await self.receipts.ready()
        receipts = [
            TracedReceipt(
                kind="dm" if life.channel is None else "chat",
                sender=key[0],
                to=life.channel or key[2],
                seq=life.seq,
                stage=life.stage,
                stages=dict(life.stages),
                why=life.why,
            )
            for key, life in self.receipts.lives.items()
            if key[1] == mid and caller.id in (key[0], key[2])
        ]
        found: dict[tuple[str, int], TracedRecord] = {}
        async with self.searches.turn(caller.id):
            for stream, record in await self._candidates(caller.id, mid, request.seq):
                row = self._row(stream, record, caller.id, mid)
                if row is not None:
                    found[stream, record.seq] = row
        stored = tuple(found.values())
        receipts += await self._tasks(caller.id, mid, next((row for row in stored if row.kind == "task"), None))
        ids = {each for row in stored for each in (row.sender, row.to)}
        ids |= {each for row in receipts for each in (row.sender, row.to, row.worker) if each}
        agents = filter(is_agent_id, ids)
        names = {each: name for each in agents if (name := self.space.name_of(each))}
        return TraceAnswer(mid, stored, tuple(receipts), names)

    async def _tasks(self, caller: str, mid: str, row: TracedRecord | None) -> list[TracedReceipt]:
        """What became of the task of this id that the caller asked; its record may be gone already."""
        keys = (caller, *self.space.predecessors(caller))
        if row is None and all(self.tasks.holds.book.find(each, mid) is None for each in keys):
            return []
        asker, found = await self.tasks.locate(caller, mid, row.seq if row else None)
        return [_task_receipt(found, asker, row)]

    async def _candidates(self, caller: str, mid: str, seq: int | None) -> list[tuple[str, StoredRecord]]:
        s = self.space.subjects
        at = await self.space.js.at(s.direct_stream, seq) if seq and seq > 0 else None
        found = [(s.direct_stream, at)] if at else []
        for stream, subject_filter in (
            (s.direct_stream, f"{s.root}.dm.*.*.{caller}"),
            (s.direct_stream, s.direct_inbox(caller)),
            (s.log_stream, f"{s.root}.chat.{caller}.>"),
            (s.log_stream, f"{s.root}.via.*.{caller}.>"),
            (s.task_stream, f"{s.root}.task.*.{caller}"),
            *((s.task_stream, f"{s.root}.task.*.{each}") for each in self.space.predecessors(caller)),
        ):
            found += [(stream, record) for record in await self._near(stream, subject_filter, mid)]
        return found

    async def _near(self, stream: str, subject_filter: str, mid: str) -> list[StoredRecord]:
        """Records stored near the time in an id. A hint, not a proof: what was sent much later is not found."""
        try:
            when = datetime.fromtimestamp((id_time_ms(mid) or 0) / 1000, UTC)
            start = await self.space.js.first_after(stream, subject_filter, when - NEAR)
        except (ValueError, OverflowError):
            return []
        end = await self.space.head(stream)
        latest = int((when + NEAR).timestamp()) * 1_000_000_000
        found: list[StoredRecord] = []
        looked = 0
        async for page in self.space.js.read(stream, subject_filter, start or end + 1, end):
            found += [record for record in page if mid.encode() in record.payload]
            looked += sum(len(record.payload) for record in page)
            if looked >= MOST_LOOKED_AT or page[-1].time_ns > latest:
                break
        return found

    def _row(self, stream: str, record: StoredRecord, caller: str, mid: str) -> TracedRecord | None:
        void = void_of(self.space.table, record)
        if void is not None:
            return self._void_row(stream, record, caller, mid, void)
        opened = self.space.received(record)
        if opened is None or opened.message.id != mid:
            return None
        is_own = caller == opened.sender or (opened.kind == "task" and opened.sender in self.space.predecessors(caller))
        if not is_own and not (opened.kind == "dm" and caller == opened.destination):
            return None
        row = _stored(stream, record, opened.kind, opened.sender, opened.destination)
        return replace(row, origin=opened.origin, link=opened.link) if opened.origin else row

    def _void_row(self, stream: str, record: StoredRecord, caller: str, mid: str, void: Void) -> TracedRecord | None:
        """A record of the caller's own that does not count, and why."""
        kind: MessageKind
        match self.space.subjects.parse(record.subject):
            case Chat(sender, channel):
                kind, to = "chat", channel
            case Direct(_, target, sender):
                kind, to = "dm", target
            case Task(role, sender):
                kind, to = "task", role
            case _:
                return None
        if sender != caller or claimed_id(record) != mid:
            return None
        return replace(_stored(stream, record, kind, caller, to), void=void.detail)

    # --- is it stored? ---

    @handler(FindMessageRequest)
    async def find(self, caller: Caller, request: FindMessageRequest) -> FindMessageAnswer:
        self.space.access_of(caller.id)
        mid, after = check_message_id(request.id), request.after
        stream, subject = self._place(caller, request)
        async with self.searches.turn(caller.id):
            if not after and (known := await self._remembered(caller, request, mid)):
                stored = await self.space.js.at(stream, known)
                here = stored is not None and stored.subject == subject and self._is(stored, mid)
                return FindMessageAnswer(known, "stored" if here else "gone", None)
            start = after + 1 if after else await self._first_since(stream, subject, _since(request, mid))
            found: list[int] = []

            def take(record: StoredRecord) -> bool:
                if mid.encode() in record.payload and self._is(record, mid):
                    found.append(record.seq)
                return bool(found)

            last = await self._search(stream, subject, start, take)
        return FindMessageAnswer(found[0] if found else None, "stored" if found else "unknown", last)

    @handler(FindMessagesRequest)
    async def which(self, caller: Caller, request: FindMessagesRequest) -> FindMessagesAnswer:
        """What is named may be there: readers may refuse it. What is not named, up to `next`, is not."""
        self.space.access_of(caller.id)
        ids, after = frozenset(map(check_message_id, request.ids)), request.after
        stream, subject = self._place(caller, request)
        async with self.searches.turn(caller.id):
            found = set() if after else {mid for mid in ids if await self._remembered(caller, request, mid)}
            start = after + 1 if after else await self._first_since(stream, subject, _since(request, min(ids)))

            def take(record: StoredRecord) -> bool:
                found.update(ids & {payload_id(record)})
                return False

            last = await self._search(stream, subject, start, take)
        return FindMessagesAnswer(tuple(sorted(found)), last)

    def _place(self, caller: Caller, request: FindMessageRequest | FindMessagesRequest) -> tuple[str, str]:
        """The stream and the subject of the caller's own messages of that kind to that destination."""
        s, to = self.space.subjects, request.to
        match request.kind:
            case "chat":
                return s.log_stream, s.chat(caller.id, check_channel(to))
            case "dm":
                return s.direct_stream, s.direct(check_agent_id(to), caller.id)
            case "task":
                return s.task_stream, s.task(check_role_address(to), caller.id)

    async def _remembered(
        self, caller: Caller, request: FindMessageRequest | FindMessagesRequest, mid: str
    ) -> int | None:
        """Where receipts or the fate of a task say that it was."""
        if request.kind == "dm":
            await self.receipts.ready()
            life = self.receipts.lives.get((caller.id, mid, request.to))
            return life.seq if life else None
        if request.kind == "task":
            task = self.tasks.holds.book.find(caller.id, mid)
            return task.seq if task is not None and task.role == request.to else None
        return None

    async def _first_since(self, stream: str, subject: str, since: float | None) -> int | None:
        if since is None:
            return 1
        return await self.space.js.first_after(stream, subject, datetime.fromtimestamp(max(0.0, since), UTC))

    async def _search(
        self, stream: str, subject: str, start: int | None, take: Callable[[StoredRecord], bool]
    ) -> int | None:
        """Give the records from `start` on to `take`, until it says that it needs no more. Answers the last one looked
        at if there may be more."""
        if start is None:
            return None
        end = await self.space.head(stream)
        records = size = 0
        async for page in self.space.js.read(stream, subject, start, end, page=PAGE, max_bytes=MOST_BYTES):
            for record in page:
                if take(record):
                    return record.seq
            records, size = records + len(page), size + sum(len(record.payload) for record in page)
            if records >= MOST_RECORDS or size >= MOST_BYTES:
                return page[-1].seq
        return None

    def _is(self, record: StoredRecord, mid: str) -> bool:
        """A record that readers refuse is not the message, whatever id it has."""
        opened = self.space.received(record)
        return opened is not None and opened.message.id == mid


def _stored(stream: str, record: StoredRecord, kind: MessageKind, sender: str, to: str) -> TracedRecord:
    when = record_time(record.time_ns)
    return TracedRecord(stream=stream, seq=record.seq, time=when, kind=kind, sender=sender, to=to)


def _task_receipt(found: TaskState | EndedTask | str, asker: str, row: TracedRecord | None) -> TracedReceipt:
    """The receipts of a task: claimed is delivered, done or failed is read."""
    if isinstance(found, str):
        return TracedReceipt(
            kind="task",
            sender=row.sender if row else asker,
            to=row.to if row else UNSET,
            seq=row.seq if row else UNSET,
            stage=ReceiptStage.CONFIRMED,
            stages={ReceiptStage.CONFIRMED: moment(seconds_of(row.time))} if row else {},
            state=found,
        )
    stages = {ReceiptStage.CONFIRMED: moment(found.time_ns / 1e9)}
    if found.attempt and found.claimed_at:
        stages[ReceiptStage.DELIVERED] = moment(found.claimed_at)
    state: str = TaskStatus.CLAIMED if found.worker else TaskStatus.QUEUED
    cause = None
    if isinstance(found, EndedTask):
        stages[_last_stage(found)] = moment(found.at)
        state, cause = found.state, found.cause
    return TracedReceipt(
        kind="task",
        sender=found.asker,
        to=found.role,
        seq=found.seq,
        stage=max(stages, key=lambda stage: stage.rank),
        stages=stages,
        state=state,
        cause=cause,
        worker=found.worker,
        attempt=found.attempt,
        reasons=tuple(found.reasons),
    )


def _last_stage(outcome: EndedTask) -> ReceiptStage:
    if outcome.state == TaskStatus.DONE or outcome.attempt:
        return ReceiptStage.READ
    return ReceiptStage.UNDELIVERABLE if outcome.cause == TaskCause.MALFORMED else ReceiptStage.EXPIRED


def _since(request: FindMessageRequest | FindMessagesRequest, mid: str) -> float | None:
    """Seconds since 1970 from which channel messages are looked at; a mailbox or queue is small enough for all of it.

    A clock that was ahead made an id of the future: nothing is stored later than now.
    """
    if request.kind != "chat":
        return None
    first = request.since.timestamp() if request.since else (id_time_ms(mid) or 0) / 1000
    return min(first, time.time()) - AHEAD
