"""What becomes of a task: handed out, done, given back, or buried as a dead letter with its cause.

`TaskHolds` is what all that handles tasks shares: the book, the lock, what is written down, and who waits for a change.
The record that says what became of a task is written first, then the task is let go of; in between a crash leaves a
hold whose end is known, and the next steward acts on the record. Callers hold `lock`, except to beat. Where tasks come
from and who gets them is `task_queue.py`'s part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from tidings.errors import MalformedMessage, OutcomeUnknown, Superseded, TidingsError, UsageError
from tidings.model.task_rules import (
    EndedTask,
    TaskBook,
    TaskState,
    asked_deadline,
    put_back,
    take_back,
    with_reason,
)
from tidings.nats.errors import NatsError
from tidings.nats.jetstream import StoredRecord
from tidings.server.grants import MAX_MESSAGE
from tidings.steward.context import SpaceContext
from tidings.steward.dead_letters import BEYOND_BOUND, DeadLetters, bytes_of_tasks, excess
from tidings.steward.store_watch import StoreWatch
from tidings.steward.task_store import HoldSlots, TaskRecords
from tidings.util import failpoints
from tidings.wire.envelope import Refused
from tidings.wire.link_exchange import read_age
from tidings.wire.seal import readers_of
from tidings.wire.states import TaskCause, TaskStatus
from tidings.wire.subjects import Task

#: dead letters of one asker above so many bytes that are kept whole
MOST_DEAD_WHOLE, SMALL_DEAD = 100, 8 * 1024
#: dead letters of one asker: beyond that its oldest goes, so that it pushes out nobody else's
MOST_DEAD_EACH = 1_000
#: why a sealed task is buried that nobody can open
ORPHANED = "nobody for whom it was sealed holds its role any more: ask again"
log = logging.getLogger(__name__)


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
