"""The queues of tasks: how they come from the broker, and how workers get them.

    broker -> TaskIntake.pull -> book -> TaskHandout -> the worker that waited longest

What a task is and how it ends is in `task_rules.py` and `task_holds.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidings.errors import LeaseLost, TidingsError
from tidings.model.task_rules import TaskState, give, is_overdue
from tidings.nats.acks import handed_out, parse_delivery
from tidings.nats.client import status_of
from tidings.nats.errors import NatsError
from tidings.nats.jetstream import StoredRecord
from tidings.steward.task_holds import ORPHANED, TaskHolds, either
from tidings.util import failpoints
from tidings.wire.states import TaskCause
from tidings.wire.subjects import Task

PULL_SECONDS = 3.0
MAX_PENDING = 1_000
#: records that came with a pull and were not handed out yet
FRESH = 64
#: tasks asked for in one pull
MOST_PULLED = 16
REFUSED_PAUSE = 0.1
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """How far the queue of a role is: everything up to `acked` is over, nothing above `delivered` was ever pulled."""

    acked: int = 0
    delivered: int = 0
    pending: int | None = None


class TaskIntake:
    """The queues as the broker keeps them: one durable pull consumer per role, pulled only by us.

    Taking in is where a record becomes a task: what does not verify is a dead letter at once and is never handed out. A
    redelivery by the broker is nothing but a fresh address to acknowledge at: what ended or is held is known in the
    book. The record that came with a pull is kept for the claim it was pulled for, so a claim reads nothing twice.
    """

    def __init__(self, holds: TaskHolds) -> None:
        self.holds = holds
        self.space = holds.space
        self.js = holds.space.js
        self.stream = holds.space.subjects.task_stream
        self._fresh: OrderedDict[int, StoredRecord] = OrderedDict()
        #: role -> the newest sequence that was ever pulled, as far as was asked: only we pull
        self._pulled: dict[str, int] = {}

    def subject_filter(self, role: str) -> str:
        return f"{self.space.subjects.root}.task.{role}.*"

    # --- the consumer ---

    async def make_consumer(self, role: str) -> None:
        name, subject_filter = f"task_{role}", self.subject_filter(role)
        config = {
            "name": name,
            "durable_name": name,
            "filter_subject": subject_filter,
            "ack_policy": "explicit",
            "ack_wait": int(self.space.intervals.task_ack_wait * 1e9),
            "max_ack_pending": MAX_PENDING,
            "max_deliver": -1,
            "deliver_policy": "all",
            "max_waiting": 32,
        }
        await self.js.api(
            f"CONSUMER.CREATE.{self.stream}.{name}.{subject_filter}", {"stream_name": self.stream, "config": config}
        )

    async def place(self, role: str) -> QueuePlace:
        """Where the queue of a role stands; nothing was pulled if nobody ever claimed."""
        info = await self.space.consumer(self.stream, f"task_{role}")
        if info is None:
            return QueuePlace()
        delivered = int(info["delivered"]["stream_seq"])
        self._pulled[role] = max(delivered, self._pulled.get(role, 0))
        return QueuePlace(int(info["ack_floor"]["stream_seq"]), delivered, int(info["num_pending"]))

    async def was_pulled(self, role: str, seq: int) -> bool:
        """Could this record have been handed out before? Costs a round trip once per role, not once per task."""
        if role not in self._pulled:
            self._pulled[role] = max((await self.place(role)).delivered, self._pulled.get(role, 0))
        return seq <= self._pulled[role]

    async def pull(self, role: str, batch: int, taken: Any) -> bool:
        """Ask for tasks and take in what comes, calling `taken` after each. False if the broker did not understand.

        A fresh inbox for each pull: what an older one still gets is nobody's.
        """
        connection = self.js.connection
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.task_{role}"
        body = json.dumps({"batch": batch, "expires": int(PULL_SECONDS * 1e9)}).encode()
        inbox = connection.new_inbox()
        try:
            subscription = await connection.subscribe(inbox)
            try:
                await connection.publish(subject, body, reply=inbox)
                count, over = 0, None
                while count < batch:
                    message = await subscription.next(PULL_SECONDS + 1)
                    if (came := parse_delivery(message.reply)) is not None:  # a message, whatever its headers say
                        count += 1
                        record = StoredRecord(came.seq, came.time_ns, message.subject, message.block, message.data)
                        await self.take_in(record, came.reply)
                        taken()
                    elif over is None and (over := status_of(message)) is not None:
                        batch = min(batch, handed_out(over, batch))
                return over is None or over.status == 408
            finally:
                await subscription.unsubscribe()
        except (TimeoutError, NatsError, OSError):
            return False

    # --- from a record to a task ---

    async def take_in(self, record: StoredRecord, ack: str) -> None:
        """A task the broker handed us: new, or one we know that it delivered again."""
        holds, role = self.holds, record.subject.split(".")[-2]
        self._pulled[role] = max(record.seq, self._pulled.get(role, 0))
        if not isinstance(self.space.subjects.parse(record.subject), Task):
            holds.counts["nobodys"] += 1  # no agent can publish so; nobody could be told of it, either
            await holds.say(ack, b"+ACK")
            return
        async with holds.lock:
            known = holds.book.open.get(record.seq)
            if known is not None and known.time_ns == record.time_ns:
                holds.book.put(msgspec.structs.replace(known, ack=ack))
                return
            if holds.book.outcome_of(record.seq, record.time_ns) is not None:
                await holds.say(ack, b"+ACK")
                return
            task, refused = holds.read(record, ack)
            if refused is not None:
                await holds.bury(task, TaskCause.MALFORMED, refused.detail, record=record)
                return
            if holds.book.find(task.asker, task.id) is not None:
                holds.counts["repeated"] += 1  # (sender, id) is one task, whatever record holds it
                await holds.say(ack, b"+ACK")
                return
            if holds.is_orphaned(task):
                await holds.bury(task, TaskCause.FAILED, ORPHANED, record=record)
                return
            holds.book.put(task)
            self._keep(record)

    def _keep(self, record: StoredRecord) -> None:
        self._fresh[record.seq] = record
        if len(self._fresh) > FRESH:
            self._fresh.popitem(last=False)

    async def record_of(self, task: TaskState) -> StoredRecord | None:
        """The record of an open task: from the pull that brought it, else read."""
        fresh = self._fresh.pop(task.seq, None)
        if fresh is not None and fresh.time_ns == task.time_ns and not task.revived_from:
            return fresh
        return await self.holds.records.task_record(task)


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
    #: a pull that is under way
    pull: asyncio.Task[None] | None = None
    has_consumer: bool = False


class TaskHandout:
    """Handing tasks out: workers wait here, first come first served, and each holds at most one task.

    A hold is written down before the worker hears of it. As many tasks are pulled as workers wait for one; what was
    pulled and not handed out, because its worker left, waits in the book for the next.
    """

    def __init__(self, holds: TaskHolds, intake: TaskIntake, fail: Callable[[BaseException], None]) -> None:
        """`fail`: hears that the lease is lost."""
        self.holds = holds
        self.intake = intake
        self.book = holds.book
        self._fail = fail
        holds.on_change = self.wake_all
        self.queues: dict[str, RoleQueue] = {}

    def close(self) -> None:
        """Wake everybody who waits."""
        for queue in self.queues.values():
            for waiter in queue.waiters:
                if not waiter.given.done():
                    waiter.given.set_result(None)
            for task in (queue.feeder, queue.pull):
                if task is not None:
                    task.cancel()

    async def claim(self, worker: str, session: str | None, role: str, seconds: float) -> TaskState | None:
        """The task this worker holds, or the next one of the role; None if none came in time."""
        until = time.monotonic() + seconds
        while (held := self.book.held_by(worker)) is not None:
            if session is None or held.session in (None, session):
                return held
            if time.time() - held.beat_at > self.holds.space.intervals.task_silence / 2:
                return await self._change_session(worker, held, session)
            if time.monotonic() >= until or self.holds.closed:
                return None  # another session of this agent works on it
            await asyncio.sleep(min(0.2, max(0.0, until - time.monotonic())))
        return await self._wait_for_task(worker, session, role, max(0.0, until - time.monotonic()))

    async def _change_session(self, worker: str, held: TaskState, session: str) -> TaskState:
        async with self.holds.lock:
            task = self.book.require(held.seq, worker)
            task = msgspec.structs.replace(task, session=session, beat_at=time.time())
            await self.holds.slots.write(task)
            self.book.put(task)
            return task

    async def _wait_for_task(self, worker: str, session: str | None, role: str, seconds: float) -> TaskState | None:
        queue = self.queues.setdefault(role, RoleQueue(role))
        for older in [each for each in queue.waiters if (each.worker, each.session) == (worker, session)]:
            queue.waiters.remove(older)
            if not older.given.done():
                older.given.set_result(None)  # its answer would go to somebody who asked again
        waiter = Waiter(worker, session, asyncio.get_running_loop().create_future())
        queue.waiters.append(waiter)
        self.wake(queue)
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

    def wake_all(self) -> None:
        for queue in self.queues.values():
            self.wake(queue)

    def wake(self, queue: RoleQueue) -> None:
        queue.wake.set()
        if (queue.feeder is None or queue.feeder.done()) and queue.waiters and not self.holds.closed:
            queue.feeder = asyncio.create_task(self._feed(queue))

    async def _feed(self, queue: RoleQueue) -> None:
        """Hand tasks to waiting workers while there are any."""
        while queue.waiters and not self.holds.closed:
            queue.wake.clear()
            try:
                await self._feed_once(queue)
            except LeaseLost as error:
                self._fail(error)
                return
            except TidingsError as error:
                log.warning("tasks of %s: %s", queue.role, error)
                await asyncio.sleep(0.2)

    async def _feed_once(self, queue: RoleQueue) -> None:
        idle = [each for each in queue.waiters if self.book.held_by(each.worker) is None]
        if not idle:
            await either(queue.wake.wait(), 0.5)
            return
        ready = self.book.ready(queue.role, time.time())
        fitting = ((waiter, task) for waiter in idle for task in ready if task.fits(waiter.worker))
        waiter, task = next(fitting, (idle[0], None))
        if task is None:
            await self._more(queue)
        elif is_overdue(task, time.time()):
            async with self.holds.lock:
                if self.book.open.get(task.seq) is task:
                    await self.holds.bury(task, TaskCause.DEADLINE, "nobody finished it in time")
        else:
            await self._give(queue, task, waiter)

    async def _give(self, queue: RoleQueue, task: TaskState, waiter: Waiter) -> None:
        holds = self.holds
        async with holds.lock:
            task = self.book.open.get(task.seq, task)
            gone = task.seq not in self.book.open
            if gone or waiter.given.done() or task.worker is not None or self.book.held_by(waiter.worker) is not None:
                return
            if not holds.space.holds_role(waiter.worker, queue.role):
                waiter.given.set_result(None)
                queue.waiters.remove(waiter)
                return
            held = give(task, waiter.worker, waiter.session, time.time())
            await holds.slots.write(held)
            failpoints.reach("tasks.after_hold")
            self.book.put(held)
            if waiter in queue.waiters:
                queue.waiters.remove(waiter)
            if not waiter.given.done():
                waiter.given.set_result(held)
            holds.changed(held)

    # --- more from the broker ---

    async def _more(self, queue: RoleQueue) -> None:
        """Wait for a task from the broker, for one whose pause ends, or to be woken."""
        self.fetch(queue)
        ends = self.book.next_pause_ends(queue.role, time.time())
        await either(queue.wake.wait(), 1.0 if ends is None else max(0.01, min(1.0, ends - time.time())))

    def fetch(self, queue: RoleQueue) -> None:
        """Pull for the workers that wait, one at least, unless a pull is under way."""
        if (queue.pull is None or queue.pull.done()) and not self.holds.closed:
            idle = sum(self.book.held_by(each.worker) is None for each in queue.waiters)
            queue.pull = asyncio.create_task(self._pull(queue, max(1, min(MOST_PULLED, idle))))

    def fetch_again(self, role: str) -> None:
        """Ask the broker for what it delivered before and never heard of."""
        self.fetch(self.queues.setdefault(role, RoleQueue(role)))

    async def _pull(self, queue: RoleQueue, batch: int) -> None:
        try:
            if not queue.has_consumer:
                await self.intake.make_consumer(queue.role)
                queue.has_consumer = True
            # not understood: the consumer was deleted, or the broker is starting
            if not await self.intake.pull(queue.role, batch, queue.wake.set):
                queue.has_consumer = False
                await asyncio.sleep(REFUSED_PAUSE)
        except LeaseLost as error:
            self._fail(error)
        except TidingsError as error:
            log.warning("a pull of %s ended: %s", queue.role, error)
            await asyncio.sleep(REFUSED_PAUSE)
        finally:
            queue.pull = None
            queue.wake.set()
