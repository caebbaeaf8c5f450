"""The task desk: workers claim from it and settle with it; no agent has a right on a task's consumer.

One durable pull consumer per role keeps the queue. The desk pulls a task only when a worker waits for one, writes the
hold down before it hands the task out, and keeps telling the broker that the task is in progress while its worker
beats, so a task held far beyond its acknowledgement time is not run twice. A redelivery by the broker is nothing but
a fresh address to acknowledge at: what was settled or is held is known here, and survives a restart.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from nats.errors import Error as NatsError

from tidings import failpoints
from tidings.broker.jetstream import NO_CONSUMER, ApiError, StoredRecord
from tidings.errors import ConflictError, LeaseLost, OutcomeUnknown, TidingsError, UsageError
from tidings.steward.retention import archive_needs
from tidings.steward.task_rules import (
    Cause,
    Settled,
    TaskBook,
    TaskState,
    asked_deadline,
    give,
    is_overdue,
    is_silent,
    take_back,
    with_reason,
)
from tidings.steward.task_store import HoldSlots, TaskRecords
from tidings.wire.envelope import Refused, open_record
from tidings.wire.subjects import Task

if TYPE_CHECKING:
    from tidings.steward.service import Steward

PULL_SECONDS = 3.0
MAX_PENDING = 1_000
PARKED, PARKED_EACH = 4_096, 16
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Waiter:
    """A worker whose claim waits for a task."""

    worker: str
    session: str | None
    given: asyncio.Future[TaskState | None]


@dataclass(eq=False)
class RoleQueue:
    role: str
    waiters: deque[Waiter] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    feeder: asyncio.Task[None] | None = None
    #: a pull that is under way, or done and not looked at
    pull: asyncio.Task[str | None] | None = None
    has_consumer: bool = False


class TaskDesk:
    """The tasks of one space, under one lease."""

    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        self.js = steward.js
        self.subjects = steward.subjects
        self.pace = steward.pace
        self.book = TaskBook()
        self.records = TaskRecords(steward.js, steward.subjects)
        self.slots = HoldSlots(steward.state, steward.lease.seq)
        #: hold it from the check to the write
        self.lock = asyncio.Lock()
        self.counts: Counter[str] = Counter()
        self._queues: dict[str, RoleQueue] = {}
        self._changes: dict[tuple[str, str], asyncio.Event] = {}
        #: results whose write had no answer: written again until it has one
        self._unsure: dict[int, tuple[bytes, str]] = {}
        self._parked: Counter[str] = Counter()
        self._closed = False
        self._tended = time.time()
        self._progress_at = 0.0

    async def load(self) -> None:
        """Take over what the steward before wrote down."""
        async for settled in self.records.settled():
            before = self.book.settled_as(settled.seq, settled.time_ns)
            if before is None or before.state != "done":
                self.book.settle(settled)
        for task in sorted(await self.slots.load(), key=lambda each: each.seq):
            await self._take_over(task)

    async def _take_over(self, task: TaskState) -> None:
        settled = self.book.settled_as(task.seq, task.time_ns)
        ended = settled is not None and (settled.state != "dead" or settled.record != task.revived_from)
        if ended or await self.records.task_record(task) is None:
            await self._acknowledge(task)
            await self.slots.free(task.seq)
            return
        if task.worker is not None and self.book.held_by(task.worker) is not None:
            task = msgspec.structs.replace(task, worker=None, session=None)
        self.book.put(msgspec.structs.replace(task, beat_at=time.time()))

    def close(self) -> None:
        """Wake everybody who waits: the steward stops."""
        self._closed = True
        for queue in self._queues.values():
            for waiter in queue.waiters:
                if not waiter.given.done():
                    waiter.given.set_result(None)
            for task in (queue.feeder, queue.pull):
                if task is not None:
                    task.cancel()
        for event in self._changes.values():
            event.set()

    @asynccontextmanager
    async def parked(self, sender: str, seconds: float) -> AsyncIterator[float]:
        """How long this request may wait: nothing if its sender, or everybody together, waits too often already."""
        allowed = self._parked[sender] < PARKED_EACH and self._parked.total() < PARKED and not self._closed
        self._parked[sender] += 1
        try:
            async with self.steward.idle():
                yield seconds if allowed else 0.0
        finally:
            self._parked[sender] -= 1
            if not self._parked[sender]:
                del self._parked[sender]

    # --- claiming ---

    async def claim(self, worker: str, session: str | None, role: str, seconds: float) -> TaskState | None:
        """The task this worker holds, or the next one of the role; None if none came in time."""
        until = time.monotonic() + seconds
        while (held := self.book.held_by(worker)) is not None:
            if session is None or held.session in (None, session):
                return held
            if time.time() - held.beat_at > self.pace.task_silence / 2:
                return await self._change_session(worker, held, session)
            if time.monotonic() >= until or self._closed:
                return None  # another session of this agent works on it
            await asyncio.sleep(min(0.2, max(0.0, until - time.monotonic())))
        return await self._wait_for_task(worker, session, role, max(0.0, until - time.monotonic()))

    async def _change_session(self, worker: str, held: TaskState, session: str) -> TaskState:
        async with self.lock:
            task = self.book.require(held.seq, worker)
            task = msgspec.structs.replace(task, session=session, beat_at=time.time())
            await self.slots.write(task)
            self.book.put(task)
            return task

    async def _wait_for_task(self, worker: str, session: str | None, role: str, seconds: float) -> TaskState | None:
        queue = self._queues.setdefault(role, RoleQueue(role))
        for older in [each for each in queue.waiters if (each.worker, each.session) == (worker, session)]:
            queue.waiters.remove(older)
            if not older.given.done():
                older.given.set_result(None)  # its answer would go to somebody who asked again
        waiter = Waiter(worker, session, asyncio.get_running_loop().create_future())
        queue.waiters.append(waiter)
        self._wake(queue)
        try:
            # even a claim that does not wait gets what is there: the broker needs a moment to answer
            await asyncio.wait({waiter.given}, timeout=max(seconds, 0.25))
        finally:
            if waiter in queue.waiters:
                queue.waiters.remove(waiter)
        if waiter.given.done():
            return waiter.given.result()
        waiter.given.cancel()
        held = self.book.held_by(worker)
        return held if held is not None and held.session == session else None

    def _wake(self, queue: RoleQueue) -> None:
        queue.wake.set()
        if (queue.feeder is None or queue.feeder.done()) and queue.waiters and not self._closed:
            queue.feeder = asyncio.create_task(self._feed(queue))

    async def _feed(self, queue: RoleQueue) -> None:
        """Hand tasks to waiting workers, first come first served, while there are any."""
        while queue.waiters and not self._closed:
            queue.wake.clear()
            try:
                await self._feed_once(queue)
            except LeaseLost as error:
                self.steward._fail(error)
                return
            except TidingsError as error:
                log.warning("tasks of %s: %s", queue.role, error)
                await asyncio.sleep(0.2)

    async def _feed_once(self, queue: RoleQueue) -> None:
        waiter = next((each for each in queue.waiters if self.book.held_by(each.worker) is None), None)
        if waiter is None:
            await _either(queue.wake.wait(), 0.5)
            return
        task = self.book.next_for(queue.role, time.time())
        if task is None:
            await self._more(queue)
        elif is_overdue(task, time.time()):
            async with self.lock:
                if self.book.open.get(task.seq) is task:
                    await self._bury(task, "deadline", "nobody finished it in time")
        else:
            await self._give(queue, task, waiter)

    async def _give(self, queue: RoleQueue, task: TaskState, waiter: Waiter) -> None:
        async with self.lock:
            task = self.book.open.get(task.seq, task)
            if waiter.given.done() or task.worker is not None or self.book.held_by(waiter.worker) is not None:
                return
            if not self.holds_role(waiter.worker, queue.role):
                waiter.given.set_result(None)
                queue.waiters.remove(waiter)
                return
            held = give(task, waiter.worker, waiter.session, time.time())
            await self.slots.write(held)
            failpoints.reach("tasks.after_hold")
            self.book.put(held)
            if waiter in queue.waiters:
                queue.waiters.remove(waiter)
            if not waiter.given.done():
                waiter.given.set_result(held)
            self._changed(held)

    # --- the queue in the broker ---

    async def _more(self, queue: RoleQueue) -> None:
        """Wait for a task from the broker, for one whose pause ends, or to be woken."""
        if queue.pull is None:
            if not queue.has_consumer:
                await self._make_consumer(queue.role)
                queue.has_consumer = True
            queue.pull = asyncio.create_task(self._pull(queue))
        ends = self.book.next_pause_ends(queue.role)
        woken = asyncio.create_task(queue.wake.wait())
        try:
            await asyncio.wait(
                {queue.pull, woken},
                timeout=None if ends is None else max(0.01, ends - time.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            woken.cancel()
        await self._take_pulled(queue)

    async def _take_pulled(self, queue: RoleQueue) -> None:
        if queue.pull is not None and queue.pull.done():
            pull, queue.pull = queue.pull, None
            ack = pull.result()
            if ack is not None:
                await self._take_in(ack)

    async def _make_consumer(self, role: str) -> None:
        name, subject_filter = f"task_{role}", f"{self.subjects.root}.task.{role}.*"
        stream = self.subjects.task_stream
        config = {
            "name": name,
            "durable_name": name,
            "filter_subject": subject_filter,
            "ack_policy": "explicit",
            "ack_wait": int(self.pace.task_ack_wait * 1e9),
            "max_ack_pending": MAX_PENDING,
            "max_deliver": -1,
            "deliver_policy": "all",
            "max_waiting": 32,
        }
        await self.js.api(
            f"CONSUMER.CREATE.{stream}.{name}.{subject_filter}", {"stream_name": stream, "config": config}
        )

    async def _pull(self, queue: RoleQueue) -> str | None:
        """Ask for one task; the answer is where to acknowledge it. A fresh inbox for each pull."""
        connection = self.js.connection
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.subjects.task_stream}.task_{queue.role}"
        body = json.dumps({"batch": 1, "expires": int(PULL_SECONDS * 1e9)}).encode()
        inbox = connection.new_inbox()
        try:
            subscription = await connection.subscribe(inbox)
            try:
                await connection.publish(subject, body, reply=inbox)
                message = await subscription.next_msg(timeout=PULL_SECONDS + 1)
            finally:
                if not connection.is_closed:
                    await subscription.unsubscribe()
        except (TimeoutError, NatsError, OSError):
            await asyncio.sleep(0.1)
            return None
        if message.reply.startswith("$JS.ACK."):  # whatever its headers say
            return str(message.reply)
        if (message.headers or {}).get("Status") != "408":
            queue.has_consumer = False  # it was deleted, or the broker is starting
            await asyncio.sleep(0.1)
        return None

    async def _take_in(self, ack: str) -> None:
        """A task the broker handed us: new, or one we know that it delivered again."""
        seq, time_ns = _place_of(ack)
        async with self.lock:
            known = self.book.open.get(seq)
            if known is not None and known.time_ns == time_ns:
                self.book.put(msgspec.structs.replace(known, ack=ack))
                return
            record = None
            if self.book.settled_as(seq, time_ns) is None:
                record = await self.js.at(self.subjects.task_stream, seq)
            if record is None or record.time_ns != time_ns:
                await self._say(ack, b"+ACK")
                return
            task, refused = self._read(record, ack)
            if refused is not None:
                await self._bury(task, "malformed", refused.detail, record=record)
                return
            if self.book.find(task.asker, task.id) is not None:
                self.counts["repeated"] += 1  # (sender, id) is one task, whatever record holds it
                await self._say(ack, b"+ACK")
                return
            self.book.put(task)

    def _read(self, record: StoredRecord, ack: str | None) -> tuple[TaskState, Refused | None]:
        address = self.subjects.parse(record.subject)
        assert isinstance(address, Task)
        fields = record.own_fields()
        opened: Any = Refused("header", "its headers cannot be read")
        if fields is not None:
            opened = open_record(self.subjects, self.steward.info.id, record.subject, fields, record.payload)
        place: dict[str, Any] = {
            "seq": record.seq,
            "time_ns": record.time_ns,
            "role": address.role,
            "asker": address.sender,
        }
        if isinstance(opened, Refused):
            return TaskState(**place, id="", ack=ack), opened
        due = asked_deadline(opened.message, record.time_ns)
        return TaskState(**place, id=opened.message.id, ack=ack, due=due), None

    async def _say(self, ack: str, word: bytes) -> None:
        """Fire and forget: what the broker does not hear it delivers again, and we know what became of it."""
        with suppress(NatsError, OSError):
            await self.js.connection.publish(ack, word)

    async def _acknowledge(self, task: TaskState) -> None:
        if task.ack is not None:
            await self._say(task.ack, b"+ACK")

    # --- settling ---

    async def beat(self, worker: str, seq: int, session: str | None) -> TaskState:
        task = self.book.require(seq, worker)
        if session is not None and task.session not in (None, session):
            raise ConflictError(f"this session lost task {seq}: another session of the same agent has it")
        task = msgspec.structs.replace(task, beat_at=time.time())
        self.book.put(task)
        return task

    def done_before(self, worker: str, seq: int) -> Settled | None:
        found = self.book.settled.get(seq)
        is_same = found is not None and seq not in self.book.open and found.state == "done" and found.worker == worker
        return found if is_same else None

    async def finish(self, task: TaskState, payload: bytes, signature: str) -> Settled:
        """Write the result, then let go of the task. The caller holds the lock and checked the result."""
        try:
            settled = await self.records.write_result(task, payload, signature)
        except OutcomeUnknown:
            self._unsure[task.seq] = (payload, signature)
            raise
        self._unsure.pop(task.seq, None)
        failpoints.reach("tasks.after_result")
        await self._let_go(task, settled)
        if task.revived_from:
            with suppress(TidingsError):  # a result outweighs the dead letter it came from
                await self.records.forget_dead(task.seq)
        return settled

    async def give_back(self, task: TaskState, reason: str, op: str, *, pause: float, cause: Cause) -> Settled | None:
        """End a hold without a result: the next worker's turn, or the dead letters. The caller holds the lock."""
        waiting = take_back(task, reason, time.time(), pause=pause, op=op)
        if waiting is None:
            return await self._bury(task, cause, reason, op=op)
        await self.slots.write(waiting)
        self.book.put(waiting)
        self._changed(waiting)
        return None

    async def _bury(
        self, task: TaskState, cause: Cause, reason: str, *, op: str = "", record: StoredRecord | None = None
    ) -> Settled:
        task = with_reason(task, reason)
        found = record or await self.records.task_record(task)
        settled = await self.records.write_dead(task, cause, found, op)
        failpoints.reach("tasks.after_dead")
        await self._let_go(task, settled)
        if task.revived_from:
            with suppress(TidingsError):
                await self.records.forget_dead(task.seq, keep=1)
        log.warning("task %d of %s is a dead letter (%s): %s", task.seq, task.role, cause, reason)
        return settled

    bury = _bury

    async def _let_go(self, task: TaskState, settled: Settled) -> None:
        self.book.settle(settled)
        self.counts[settled.state] += 1
        await self._acknowledge(task)
        self._changed(task)
        await self.slots.free(task.seq)

    def _changed(self, task: TaskState) -> None:
        event = self._changes.pop((task.asker, task.id), None)
        if event is not None:
            event.set()
        for queue in self._queues.values():
            self._wake(queue)

    async def wait_for_change(self, asker: str, message_id: str, seconds: float) -> None:
        event = self._changes.setdefault((asker, message_id), asyncio.Event())
        await _either(event.wait(), seconds)

    # --- dead letters ---

    async def revive(self, dead: Settled) -> None:
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
        self._changed(task)

    # --- looking ---

    def holds_role(self, owner: str, role: str) -> bool:
        access = self.steward.table.access_at(owner, self.steward.position)
        return access is not None and not access.revoked and role in access.roles

    def holders(self, role: str) -> list[str]:
        return [owner for owner in self.steward.table.owners() if self.holds_role(owner, role)]

    async def find(self, asker: str, message_id: str, seq: int | None) -> TaskState | Settled | str:
        """A task of this asker, wherever it is: `queued`, `gone` or `unknown` if the book does not have it."""
        found = self.book.find(asker, message_id)
        if found is not None:
            return found
        record = await self._own_record(asker, message_id, seq)
        if record is None:
            return "unknown"
        task, refused = self._read(record, None)
        if refused is not None or task.id != message_id:
            return "unknown"
        if record.seq <= await self._ack_floor(task.role):
            return "gone"
        if is_overdue(task, time.time()):
            async with self.lock:
                known = self.book.find(asker, message_id)
                return known or await self._bury(task, "deadline", "nobody took it in time", record=record)
        return "queued"

    async def _own_record(self, asker: str, message_id: str, seq: int | None) -> StoredRecord | None:
        stream = self.subjects.task_stream
        if seq is not None:
            record = await self.js.at(stream, seq)
            address = self.subjects.parse(record.subject) if record else None
            return record if isinstance(address, Task) and address.sender == asker else None
        head = int((await self.js.info(stream))["state"]["last_seq"])
        async for page in self.js.read(stream, f"{self.subjects.root}.task.*.{asker}", 1, head, page=100):
            for record in page:
                if message_id.encode() in record.payload and self._read(record, None)[0].id == message_id:
                    return record
        return None

    async def _ack_floor(self, role: str) -> int:
        """Everything of the role up to here was settled; 0 if nobody ever claimed."""
        try:
            info = await self.js.api(f"CONSUMER.INFO.{self.subjects.task_stream}.task_{role}")
        except ApiError as error:
            if error.err_code == NO_CONSUMER:
                return 0
            raise
        return int(info["ack_floor"]["stream_seq"])

    # --- what it does by itself ---

    async def tend(self) -> None:
        """Say in-progress, notice workers that fell silent and deadlines that passed, finish unsure results."""
        now = time.time()
        if now - self._tended > max(2.0, self.pace.task_silence / 2):
            self._forgive(now)  # we slept, not they
        self._tended = now
        if now - self._progress_at >= self.pace.task_ack_wait / 3:
            self._progress_at = now
            for task in list(self.book.open.values()):
                if task.ack is not None:
                    await self._say(task.ack, b"+WPI")
        for queue in self._queues.values():
            if queue.feeder is None or queue.feeder.done():
                await self._take_pulled(queue)
        for task in list(self.book.open.values()):
            await self._tend_one(task, now)

    def _forgive(self, now: float) -> None:
        for task in list(self.book.open.values()):
            if task.worker is not None:
                self.book.put(msgspec.structs.replace(task, beat_at=now))

    async def _tend_one(self, task: TaskState, now: float) -> None:
        async with self.lock:
            current = self.book.open.get(task.seq)
            if current is None:
                return
            if current.seq in self._unsure:
                await self.finish(current, *self._unsure[current.seq])
            elif is_overdue(current, now):
                await self._bury(current, "deadline", f"not finished in time (held by {current.worker or 'nobody'})")
            elif is_silent(current, now, self.pace.task_silence):
                reason = f"{current.worker} fell silent"
                await self.give_back(current, reason, "", pause=0, cause="worker_lost")
            elif current.worker is not None and not self.holds_role(current.worker, current.role):
                reason = f"{current.worker} may no longer take tasks of {current.role}"
                await self.give_back(current, reason, "", pause=0, cause="worker_lost")

    async def retain(self) -> None:
        """Purge what is settled, archived (unless the archive is switched off) and older than a repeated publish."""
        stream = self.subjects.task_stream
        if not (await self.js.info(stream))["state"]["messages"]:
            return
        archived = await archive_needs(self.steward, "task")
        accesses = (self.steward.table.access_at(o, self.steward.position) for o in self.steward.table.owners())
        roles = {role for access in accesses if access is not None for role in access.roles} | set(self._queues)
        for role in sorted(roles):
            subject_filter = f"{self.subjects.root}.task.{role}.*"
            floor = await self._ack_floor(role) + 1
            cutoff = datetime.now(UTC) - timedelta(seconds=self.pace.task_keep)
            young = await self.js.first_after(stream, subject_filter, cutoff)
            below = min(each for each in (floor, archived, young) if each is not None)
            if below > 1:
                self.counts["purged"] += await self.js.purge(stream, subject_filter=subject_filter, below=below)


async def _either(waiting: Any, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await waiting


def _place_of(ack: str) -> tuple[int, int]:
    """Sequence and time of the record an acknowledgement address speaks of, in both of its forms."""
    tokens = ack.split(".")
    start = 5 if len(tokens) == 9 else 7
    return int(tokens[start]), int(tokens[start + 2])
