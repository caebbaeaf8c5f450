"""How a hold ends: done, given back, or buried as a dead letter with its cause.

The record that says what became of a task is written first, then the task is let go of; in between a crash leaves a
hold whose end is known, and the next steward acts on the record. Callers hold the desk's lock, except to beat.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from tidings import failpoints
from tidings.broker.grants import MAX_MESSAGE
from tidings.broker.jetstream import StoredRecord
from tidings.errors import OutcomeUnknown, Superseded, TidingsError, UsageError
from tidings.steward.dead_room import BEYOND_BOUND, bytes_of_tasks, excess
from tidings.steward.task_rules import Cause, Settled, TaskState, put_back, take_back, with_reason

if TYPE_CHECKING:
    from tidings.steward.tasks import TaskDesk

#: dead letters of one asker above so many bytes that are kept whole
MOST_DEAD_WHOLE, SMALL_DEAD = 100, 8 * 1024
#: dead letters of one asker: beyond that its oldest goes, so that it pushes out nobody else's
MOST_DEAD_EACH = 1_000
log = logging.getLogger(__name__)


class TaskSettling:
    def __init__(self, desk: TaskDesk) -> None:
        self.desk = desk
        self.book = desk.book
        #: results whose write had no answer: written again until it has one
        self.unsure: dict[int, tuple[bytes, str]] = {}

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

    def done_before(self, worker: str, seq: int, session: str | None) -> Settled | None:
        """The result this very worker gave before; another session of it hears that it lost the task."""
        found = self.book.settled.get(seq)
        if found is None or seq in self.book.open or found.state != "done" or found.worker != worker:
            return None
        if session is not None and found.session not in (None, session):
            raise Superseded(f"this session lost task {seq}: another session of the same agent did it")
        return found

    async def finish(self, task: TaskState, payload: bytes, signature: str) -> Settled:
        """Write the result, then let go of the task. The caller checked the result."""
        try:
            settled = await self.desk.records.write_result(task, payload, signature)
        except OutcomeUnknown:
            self.unsure[task.seq] = (payload, signature)
            raise
        self.unsure.pop(task.seq, None)
        failpoints.reach("tasks.after_result")
        await self._let_go(task, settled)
        if task.revived_from:
            with suppress(TidingsError):  # a result outweighs the dead letter it came from
                await self.desk.records.forget_dead(task.seq)
        return settled

    async def give_back(self, task: TaskState, reason: str, op: str, *, pause: float, cause: Cause) -> Settled | None:
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
        await self.desk.slots.write(waiting)
        self.book.put(waiting)
        self.desk.changed(waiting)

    async def bury(
        self, task: TaskState, cause: Cause, reason: str, *, op: str = "", record: StoredRecord | None = None
    ) -> Settled:
        task = with_reason(task, reason)
        found = record or await self.desk.records.task_record(task)
        settled = await self.desk.records.write_dead(
            task, cause, found, op, most=self._room_for_dead(task.asker, found)
        )
        failpoints.reach("tasks.after_dead")
        self.unsure.pop(task.seq, None)
        await self._let_go(task, settled)
        if task.revived_from:
            with suppress(TidingsError):
                await self.desk.records.forget_dead(task.seq, keep=1)
        log.warning("task %d of %s is a dead letter (%s): %s", task.seq, task.role, cause, reason)
        with suppress(TidingsError):  # the next one tries again
            await self._make_room_for_dead(task.asker)
        return settled

    async def _make_room_for_dead(self, asker: str) -> None:
        dead = self.book.dead_of(asker)
        most = bytes_of_tasks(self.desk.steward.dead_mail.limit) - sum(e.size for e in self.book.revived_of(asker))
        gone = dead[: excess([each.size for each in dead], MOST_DEAD_EACH, max(0, most))]
        await self.desk.steward.store.note_letters_gone({asker: Counter(task=len(gone))}, BEYOND_BOUND)
        for each in gone:
            await self.desk.records.forget_dead(each.seq)
            self.book.drop(each.seq)

    def _room_for_dead(self, asker: str, record: StoredRecord | None) -> int:
        """How large a dead letter may be that is kept whole: one asker must not push out the letters of others."""
        if record is None or len(record.payload) <= SMALL_DEAD:
            return MAX_MESSAGE
        return MAX_MESSAGE if len(self.book.dead_of(asker)) < MOST_DEAD_WHOLE else SMALL_DEAD

    async def _let_go(self, task: TaskState, settled: Settled) -> None:
        self.book.settle(settled)
        self.desk.counts[settled.state] += 1
        await self.desk.intake.acknowledge(task)
        self.desk.changed(task)
        self.desk.slots.free(task.seq)

    async def revive(self, dead: Settled) -> None:
        """Queue a dead letter again, with all its tries; from its dead letter, since its record is acknowledged."""
        if await self.desk.records.dead_record(dead.record) is None:
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
        await self.desk.slots.write(task)
        self.book.put(task)
        self.desk.changed(task)
