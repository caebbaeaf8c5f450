"""What becomes of a task: handed out, done, given back, or buried as a dead letter with its cause.

`TaskHolds` is what all that handles tasks shares: the book, the lock, what is written down, and who waits for a change.
The record that says what became of a task is written first, then the task is let go of; in between a crash leaves a
hold whose end is known, and the next steward acts on the record. Callers hold `lock`, except to beat. Where tasks come
from and who gets them is `task_queue.py`'s part.

`HoldSlots` writes holds into the state bucket, `TaskRecords` results into AUD and dead letters into DEAD. The bucket
evicts its oldest keys when it is full, floors included, so its keys must not grow with the number of
tasks: a hold takes a numbered slot, and the slot is used again. Every write is a compare-and-set that names the lease,
so of two stewards one hands a task out. Results and dead letters keep the payload byte for byte as their own payload;
what the steward adds is one JSON header.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from tidings.errors import (
    ConflictError,
    LeaseLost,
    MalformedMessage,
    OutcomeUnknown,
    Superseded,
    TidingsError,
    UsageError,
)
from tidings.model.task_rules import (
    OUTCOMES_KEPT,
    EndedTask,
    TaskBook,
    TaskState,
    asked_deadline,
    put_back,
    take_back,
    with_reason,
)
from tidings.nats.errors import NatsError
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.server.grants import MAX_MESSAGE
from tidings.server.state import StateBucket
from tidings.steward.context import SpaceContext
from tidings.steward.dead_letters import BEYOND_BOUND, DeadLetters, bytes_of_tasks, excess
from tidings.steward.retention import RECORD_OVERHEAD, stored_size
from tidings.steward.store_watch import StoreWatch
from tidings.util import failpoints
from tidings.wire.envelope import Refused
from tidings.wire.link_exchange import read_age
from tidings.wire.records import values_of
from tidings.wire.seal import readers_of
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.states import TaskCause, TaskStatus
from tidings.wire.subjects import Subjects, Task

TASK_HEADER = "Td-Task"
MSG_ID = "Nats-Msg-Id"
ATTEMPTS = 4
#: room for names and lengths in a record's own accounting
MARGIN = 1_024
#: receipts lie between the results, several to each
OTHERS_IN_AUDIT = 10
#: dead letters of one asker above so many bytes that are kept whole
MOST_DEAD_WHOLE, SMALL_DEAD = 100, 8 * 1024
#: dead letters of one asker: beyond that its oldest goes, so that it pushes out nobody else's
MOST_DEAD_EACH = 1_000
#: why a sealed task is buried that nobody can open
ORPHANED = "nobody for whom it was sealed holds its role any more: ask again"
log = logging.getLogger(__name__)


@dataclass
class _Slot:
    key: str
    revision: int


class HoldSlots:
    """Open tasks, written down. One writer: the caller holds the lock."""

    def __init__(self, state: StateBucket, lease_seq: int) -> None:
        self.state = state
        self.lease_seq = lease_seq
        self._free: list[_Slot] = []
        self._used: dict[int, _Slot] = {}
        #: free ones that still hold what ended
        self._stale: dict[str, _Slot] = {}
        self._count = 0

    async def load(self) -> list[TaskState]:
        tasks = []
        for key, entry in (await self.state.under("task")).items():
            slot = _Slot(key, entry.revision)
            self._count = max(self._count, int(key.rpartition(".")[2]) + 1)
            held = entry.value.get("task")
            if held is None:
                self._free.append(slot)
                continue
            task = msgspec.convert(held, TaskState)
            self._used[task.seq] = slot
            tasks.append(task)
        return tasks

    async def write(self, task: TaskState) -> None:
        slot = self._used.get(task.seq)
        if slot is None:
            if not self._free:
                self._free.append(_Slot(f"task.{self._count}", 0))
                self._count += 1
            slot = self._used[task.seq] = self._free.pop()
        await self._put(slot, msgspec.to_builtins(task))

    def free(self, seq: int) -> None:
        """Forget a task. Its result or dead letter is what counts, so its slot is cleared later, or used again."""
        slot = self._used.pop(seq, None)
        if slot is not None:
            self._free.append(slot)
            self._stale[slot.key] = slot

    async def flush(self) -> None:
        """Clear the slots that were freed and not used again."""
        for slot in list(self._stale.values()):
            try:
                await self._put(slot, None)
            except LeaseLost:
                raise
            except TidingsError as error:
                self._stale[slot.key] = slot
                log.warning("slot %s keeps a task that ended for now: %s", slot.key, error)
                return

    async def _put(self, slot: _Slot, task: dict[str, Any] | None) -> None:
        value = {"lease": self.lease_seq, "task": task}
        self._stale.pop(slot.key, None)
        for _ in range(ATTEMPTS):
            try:
                slot.revision = await self.state.put(slot.key, value, slot.revision)
            except (OutcomeUnknown, ConflictError):
                entry = await self.state.get(slot.key)
                slot.revision = entry.revision if entry else 0
                if entry is not None and entry.value == json.loads(json.dumps(value)):
                    return
                if entry is not None and entry.value["lease"] > self.lease_seq:
                    raise LeaseLost(f"the steward under lease {entry.value['lease']} keeps the tasks now") from None
            else:
                return
        raise OutcomeUnknown(f"{slot.key} could not be written in {ATTEMPTS} attempts")


@dataclass(frozen=True, slots=True)
class TaskRecords:
    """Results and dead letters of one space."""

    js: JetStream
    subjects: Subjects

    async def write_result(self, task: TaskState, payload: bytes, signature: str) -> EndedTask:
        assert task.worker is not None
        facts = EndedTask(**_known(task), state=TaskStatus.DONE, record=0, worker=task.worker, at=time.time())
        headers = {
            SIGNATURE_HEADER: signature,
            TASK_HEADER: _header(facts),
            MSG_ID: f"result-{task.seq}-{task.time_ns}",
        }
        return await self._write(self.subjects.audit("result", task.asker), payload, headers, facts)

    async def write_dead(
        self, task: TaskState, cause: TaskCause, record: StoredRecord | None, op: str, *, most: int = MAX_MESSAGE
    ) -> EndedTask:
        """The record as it was, and why nobody finished it. One above `most` bytes keeps its digest only."""
        facts = EndedTask(
            **_known(task),
            state=TaskStatus.DEAD,
            record=0,
            worker=task.worker,
            cause=cause,
            ended_by=op,
            at=time.time(),
        )
        payload, block = (record.payload, record.own_block) if record else (b"", b"")
        more: dict[str, Any] = {"subject": self.subjects.task(task.role, task.asker)}
        size = len(payload) + len(block) * 4 // 3 + len(_header(facts)) + MARGIN
        if size > most:
            more["cut"] = hashlib.sha256(payload).hexdigest()
            payload, block = b"", b""
        more["headers"] = base64.b64encode(block).decode()
        headers = {TASK_HEADER: _header(facts, **more), MSG_ID: f"dead-{task.seq}-{task.time_ns}-{task.attempt}"}
        return await self._write(self._dead_subject(task.seq), payload, headers, facts)

    async def write_dropped(self, dead: EndedTask, by: str) -> EndedTask:
        """What remains of a dead letter somebody dropped: that there was one."""
        facts = msgspec.structs.replace(dead, state=TaskStatus.DROPPED, at=time.time())
        headers = {TASK_HEADER: _header(facts, by=by), MSG_ID: f"drop-{dead.record}"}
        dropped = await self._write(self._dead_subject(dead.seq), b"", headers, facts)
        await self.js.purge(self.subjects.dead_stream, subject_filter=self._dead_subject(dead.seq), keep=1)
        return dropped

    async def forget_dead(self, seq: int, *, through: int | None = None, keep: int | None = None) -> None:
        """Remove the dead letters of a task up to a record, or all but the newest `keep`."""
        below = None if through is None else through + 1
        await self.js.purge(self.subjects.dead_stream, subject_filter=self._dead_subject(seq), below=below, keep=keep)

    def _dead_subject(self, seq: int) -> str:
        return self.subjects.dead("task", str(seq))

    async def _write(self, subject: str, payload: bytes, headers: dict[str, str], facts: EndedTask) -> EndedTask:
        size = RECORD_OVERHEAD + len(subject) + len(payload) + sum(len(k) + len(v) for k, v in headers.items())
        for attempt in range(ATTEMPTS):
            try:
                seq = await self.js.publish(subject, payload, headers)
            except OutcomeUnknown:
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                return msgspec.structs.replace(facts, record=seq, size=size)
        raise AssertionError("unreachable")

    # --- reading ---

    async def outcomes(self) -> AsyncIterator[EndedTask]:
        """What became of the newest tasks, results first: a result outweighs a dead letter."""
        for stream, subject_filter, back in (
            (self.subjects.audit_stream, f"{self.subjects.root}.aud.result.*", OUTCOMES_KEPT * OTHERS_IN_AUDIT),
            (self.subjects.dead_stream, f"{self.subjects.root}.dead.task.*", OUTCOMES_KEPT),
        ):
            head = int((await self.js.info(stream))["state"]["last_seq"])
            async for page in self.js.read(stream, subject_filter, max(1, head - back), head):
                for record in page:
                    facts = _facts(record)
                    if facts is not None:
                        yield msgspec.structs.replace(facts[0], record=record.seq, size=stored_size(record))

    async def result_of(self, outcome: EndedTask) -> tuple[bytes, str] | None:
        """Payload and signature of a result."""
        record = await self.js.at(self.subjects.audit_stream, outcome.record)
        if record is None:
            return None
        signatures = values_of(record.own_fields() or (), SIGNATURE_HEADER)
        return record.payload, signatures[0] if signatures else ""

    async def dead_record(self, record_seq: int) -> StoredRecord | None:
        """The task's record as it was stored, from its dead letter; None if it was too large to keep, or is gone."""
        found = await self.js.at(self.subjects.dead_stream, record_seq)
        facts = _facts(found) if found else None
        if found is None or facts is None or "cut" in facts[1] or "headers" not in facts[1]:
            return None
        outcome, more = facts
        block = base64.b64decode(more["headers"])
        return StoredRecord(outcome.seq, outcome.time_ns, more["subject"], block, found.payload)

    async def task_record(self, task: TaskState) -> StoredRecord | None:
        """The record of an open task."""
        if task.revived_from:
            return await self.dead_record(task.revived_from)
        record = await self.js.at(self.subjects.task_stream, task.seq)
        return record if record is not None and record.time_ns == task.time_ns else None


def _known(task: TaskState) -> dict[str, Any]:
    names = ("seq", "time_ns", "role", "asker", "id", "attempt", "reasons", "workers", "claimed_at", "session")
    return {name: getattr(task, name) for name in names}


def _header(facts: EndedTask, **more: Any) -> str:
    return json.dumps({**msgspec.to_builtins(facts), **more}, separators=(",", ":"))


def _facts(record: StoredRecord) -> tuple[EndedTask, dict[str, Any]] | None:
    values = values_of(record.own_fields() or (), TASK_HEADER)
    try:
        document = json.loads(values[-1])
        return msgspec.convert(document, EndedTask), document
    except (IndexError, ValueError, msgspec.ValidationError):
        return None  # not written by this code: it ends nothing


class TaskHolds:
    """The tasks of one space that have no end yet, under one lease."""

    def __init__(self, space: SpaceContext, lease_seq: int, letters: DeadLetters, store: StoreWatch) -> None:
        self.space = space
        self.letters = letters
        self.store = store
        self.book = TaskBook()
        self.records = TaskRecords(space.js, space.subjects)
        self.slots = HoldSlots(space.state, lease_seq)
        #: (asker, id) -> tasks of ours that another space has, as far as it told
        self.abroad: dict[tuple[str, str], TaskState] = {}
        #: hold it from the check to the write
        self.lock = asyncio.Lock()
        self.counts: Counter[str] = Counter()
        self.closed = False
        #: hears that a worker may be free now
        self.on_change: Callable[[], None] = lambda: None
        #: results whose write had no answer: written again until it has one
        self.unsure: dict[int, tuple[bytes, str]] = {}
        self._changes: defaultdict[tuple[str, str], set[asyncio.Event]] = defaultdict(set)

    async def load(self) -> None:
        """Take over what the steward before wrote down."""
        async for outcome in self.records.outcomes():
            before = self.book.outcome_of(outcome.seq, outcome.time_ns)
            if before is None or before.state != TaskStatus.DONE:
                self.book.end(outcome)
        for task in sorted(await self.slots.load(), key=lambda each: each.seq):
            await self._take_over(task)

    async def _take_over(self, task: TaskState) -> None:
        outcome = self.book.outcome_of(task.seq, task.time_ns)
        ended = outcome is not None and (outcome.state != TaskStatus.DEAD or outcome.record != task.revived_from)
        if ended or await self.records.task_record(task) is None:
            await self.acknowledge(task)
            self.slots.free(task.seq)
            return
        if task.worker is not None and self.book.held_by(task.worker) is not None:
            task = msgspec.structs.replace(task, worker=None, session=None)
        self.book.put(msgspec.structs.replace(task, beat_at=time.time()))

    def close(self) -> None:
        """Wake everybody who waits for a change: the steward stops."""
        self.closed = True
        for event in [event for events in self._changes.values() for event in events]:
            event.set()

    # --- how a hold ends ---

    def held(self, worker: str, seq: int, session: str | None) -> TaskState:
        """The task this worker holds in this session, or why it does not."""
        task = self.book.require(seq, worker)
        if session is not None and task.session not in (None, session):
            raise Superseded(f"this session lost task {seq}: another session of the same agent has it")
        return task

    async def beat(self, worker: str, seq: int, session: str | None) -> TaskState:
        task = msgspec.structs.replace(self.held(worker, seq, session), beat_at=time.time())
        self.book.put(task)
        return task

    def done_before(self, worker: str, seq: int, session: str | None) -> EndedTask | None:
        """The result this very worker gave before; another session of it hears that it lost the task."""
        found = self.book.outcomes.get(seq)
        if found is None or seq in self.book.open or found.state != TaskStatus.DONE or found.worker != worker:
            return None
        if session is not None and found.session not in (None, session):
            raise Superseded(f"this session lost task {seq}: another session of the same agent did it")
        return found

    async def finish(self, task: TaskState, payload: bytes, signature: str) -> EndedTask:
        """Write the result, then let go of the task. The caller checked the result."""
        try:
            outcome = await self.records.write_result(task, payload, signature)
        except OutcomeUnknown:
            self.unsure[task.seq] = (payload, signature)
            raise
        self.unsure.pop(task.seq, None)
        failpoints.reach("tasks.after_result")
        await self._let_go(task, outcome)
        if task.revived_from:
            with suppress(TidingsError):  # a result outweighs the dead letter it came from
                await self.records.forget_dead(task.seq, through=task.revived_from)
        return outcome

    async def give_back(
        self, task: TaskState, reason: str, op: str, *, pause: float, cause: TaskCause
    ) -> EndedTask | None:
        """End a hold without a result: the next worker's turn, or the dead letters."""
        waiting = take_back(task, reason, time.time(), pause=pause, op=op)
        if waiting is None:
            return await self.bury(task, cause, reason, op=op)
        await self._wait_again(waiting)
        return None

    async def put_back(self, task: TaskState, op: str) -> None:
        """Its holder only looked at it."""
        await self._wait_again(put_back(task, op))

    async def _wait_again(self, waiting: TaskState) -> None:
        await self.slots.write(waiting)
        self.book.put(waiting)
        self.changed(waiting)

    async def bury(
        self, task: TaskState, cause: TaskCause, reason: str, *, op: str = "", record: StoredRecord | None = None
    ) -> EndedTask:
        task = with_reason(task, reason)
        found = record or await self.records.task_record(task)
        outcome = await self.records.write_dead(task, cause, found, op, most=self._room_for_dead(task.asker, found))
        failpoints.reach("tasks.after_dead")
        self.unsure.pop(task.seq, None)
        await self._let_go(task, outcome)
        if task.revived_from:
            with suppress(TidingsError):
                await self.records.forget_dead(task.seq, keep=1)
        log.warning("task %d of %s is a dead letter (%s): %s", task.seq, task.role, cause, reason)
        with suppress(TidingsError):  # the next one tries again
            await self._make_room_for_dead(task.asker)
        return outcome

    async def _make_room_for_dead(self, asker: str) -> None:
        dead = self.book.dead_of(asker)
        most = bytes_of_tasks(self.letters.limit) - sum(e.size for e in self.book.revived_of(asker))
        gone = dead[: excess([each.size for each in dead], MOST_DEAD_EACH, max(0, most))]
        await self.store.note_letters_gone({asker: Counter(task=len(gone))}, BEYOND_BOUND)
        for each in gone:
            await self.records.forget_dead(each.seq, through=each.record)
            self.book.drop(each.seq)

    def _room_for_dead(self, asker: str, record: StoredRecord | None) -> int:
        """How large a dead letter may be that is kept whole: one asker must not push out the letters of others."""
        if record is None or len(record.payload) <= SMALL_DEAD:
            return MAX_MESSAGE
        return MAX_MESSAGE if len(self.book.dead_of(asker)) < MOST_DEAD_WHOLE else SMALL_DEAD

    async def _let_go(self, task: TaskState, outcome: EndedTask) -> None:
        self.abroad.pop((task.asker, task.id), None)
        self.book.end(outcome)
        self.counts[outcome.state] += 1
        await self.acknowledge(task)
        self.changed(task)
        self.slots.free(task.seq)

    async def revive(self, dead: EndedTask) -> None:
        """Queue a dead letter again, with all its tries; from its dead letter, since its record is acknowledged."""
        if await self.records.dead_record(dead.record) is None:
            raise UsageError(f"task {dead.seq} was too large to keep, or is gone: ask again")
        task = TaskState(
            seq=dead.seq,
            time_ns=dead.time_ns,
            role=dead.role,
            asker=dead.asker,
            id=dead.id,
            attempt=dead.attempt,
            attempts_before=dead.attempt,
            reasons=dead.reasons,
            workers=dead.workers,
            revived_from=dead.record,
        )
        await self.slots.write(task)
        self.book.put(task)
        self.changed(task)

    # --- records and the broker ---

    def read(self, record: StoredRecord, ack: str | None) -> tuple[TaskState, Refused | None]:
        address = self.space.subjects.parse(record.subject)
        assert isinstance(address, Task), "whoever takes records in looks at that"
        opened = self.space.open(record)
        place: dict[str, Any] = {
            "seq": record.seq,
            "time_ns": record.time_ns,
            "role": address.role,
            "asker": address.sender,
        }
        if isinstance(opened, Refused):
            return TaskState(**place, id="", ack=ack), opened
        if opened.admission is None:
            due = asked_deadline(opened.message, record.time_ns)
            return TaskState(**place, id=opened.message.id, ack=ack, due=due), None
        # Only of what came over a link, of which little lies here, it counts who can open it: an agent of this space
        # could otherwise fill a queue with what nobody takes.
        try:
            readers = readers_of(opened.message)
        except MalformedMessage as error:
            return TaskState(**place, id="", ack=ack), Refused("malformed", str(error))
        due = asked_deadline(opened.message, record.time_ns - read_age(opened.headers) * 1_000_000)
        return TaskState(**place, id=opened.message.id, ack=ack, due=due, readers=readers), None

    def is_orphaned(self, task: TaskState) -> bool:
        """Is it sealed, and has nobody its role any more of those who could open it?"""
        return bool(task.readers) and not any(self.space.holds_role(each, task.role) for each in task.readers)

    async def say(self, ack: str, word: bytes) -> None:
        """Fire and forget: what the broker does not hear it delivers again, and we know what became of it."""
        with suppress(NatsError, OSError):
            await self.space.js.connection.publish(ack, word)

    async def acknowledge(self, task: TaskState) -> None:
        if task.ack is not None:
            await self.say(task.ack, b"+ACK")

    # --- waiting for a change ---

    def changed(self, task: TaskState) -> None:
        """Tell whoever waits for this task, and the queues: a worker may be free now."""
        for event in self._changes.get((task.asker, task.id), ()):
            event.set()
        self.on_change()

    async def wait_for_change(self, asker: str, message_id: str, seconds: float) -> None:
        key, event = (asker, message_id), asyncio.Event()
        self._changes[key].add(event)
        try:
            await either(event.wait(), seconds)
        finally:
            self._changes[key].discard(event)
            if not self._changes[key]:
                del self._changes[key]


async def either(waiting: Any, seconds: float) -> None:
    """Until that or until the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await waiting
