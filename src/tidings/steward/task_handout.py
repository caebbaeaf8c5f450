"""Handing tasks out: workers wait here, first come first served, and each holds at most one task.

A hold is written down before the worker hears of it. As many tasks are pulled as workers wait for one; what was
pulled and not handed out, because its worker left, waits in the book for the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tidings import failpoints
from tidings.errors import LeaseLost, TidingsError
from tidings.steward.task_rules import TaskState, give, is_overdue

if TYPE_CHECKING:
    from tidings.steward.tasks import TaskDesk

#: tasks asked for in one pull
MOST_PULLED = 16
REFUSED_PAUSE = 0.1
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
    #: a pull that is under way
    pull: asyncio.Task[None] | None = None
    has_consumer: bool = False


class TaskHandout:
    def __init__(self, desk: TaskDesk) -> None:
        self.desk = desk
        self.book = desk.book
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
            if time.time() - held.beat_at > self.desk.intervals.task_silence / 2:
                return await self._change_session(worker, held, session)
            if time.monotonic() >= until or self.desk.closed:
                return None  # another session of this agent works on it
            await asyncio.sleep(min(0.2, max(0.0, until - time.monotonic())))
        return await self._wait_for_task(worker, session, role, max(0.0, until - time.monotonic()))

    async def _change_session(self, worker: str, held: TaskState, session: str) -> TaskState:
        async with self.desk.lock:
            task = self.book.require(held.seq, worker)
            task = msgspec.structs.replace(task, session=session, beat_at=time.time())
            await self.desk.slots.write(task)
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
        if (queue.feeder is None or queue.feeder.done()) and queue.waiters and not self.desk.closed:
            queue.feeder = asyncio.create_task(self._feed(queue))

    async def _feed(self, queue: RoleQueue) -> None:
        """Hand tasks to waiting workers while there are any."""
        while queue.waiters and not self.desk.closed:
            queue.wake.clear()
            try:
                await self._feed_once(queue)
            except LeaseLost as error:
                self.desk.steward.fail(error)
                return
            except TidingsError as error:
                log.warning("tasks of %s: %s", queue.role, error)
                await asyncio.sleep(0.2)

    async def _feed_once(self, queue: RoleQueue) -> None:
        waiter = next((each for each in queue.waiters if self.book.held_by(each.worker) is None), None)
        if waiter is None:
            await either(queue.wake.wait(), 0.5)
            return
        task = self.book.next_for(queue.role, time.time())
        if task is None:
            await self._more(queue)
        elif is_overdue(task, time.time()):
            async with self.desk.lock:
                if self.book.open.get(task.seq) is task:
                    await self.desk.settling.bury(task, "deadline", "nobody finished it in time")
        else:
            await self._give(queue, task, waiter)

    async def _give(self, queue: RoleQueue, task: TaskState, waiter: Waiter) -> None:
        desk = self.desk
        async with desk.lock:
            task = self.book.open.get(task.seq, task)
            gone = task.seq not in self.book.open
            if gone or waiter.given.done() or task.worker is not None or self.book.held_by(waiter.worker) is not None:
                return
            if not desk.lookup.holds_role(waiter.worker, queue.role):
                waiter.given.set_result(None)
                queue.waiters.remove(waiter)
                return
            held = give(task, waiter.worker, waiter.session, time.time())
            await desk.slots.write(held)
            failpoints.reach("tasks.after_hold")
            self.book.put(held)
            if waiter in queue.waiters:
                queue.waiters.remove(waiter)
            if not waiter.given.done():
                waiter.given.set_result(held)
            desk.changed(held)

    # --- more from the broker ---

    async def _more(self, queue: RoleQueue) -> None:
        """Wait for a task from the broker, for one whose pause ends, or to be woken."""
        self.fetch(queue)
        ends = self.book.next_pause_ends(queue.role)
        await either(queue.wake.wait(), 1.0 if ends is None else max(0.01, min(1.0, ends - time.time())))

    def fetch(self, queue: RoleQueue) -> None:
        """Pull for the workers that wait, one at least, unless a pull is under way."""
        if (queue.pull is None or queue.pull.done()) and not self.desk.closed:
            idle = sum(self.book.held_by(each.worker) is None for each in queue.waiters)
            queue.pull = asyncio.create_task(self._pull(queue, max(1, min(MOST_PULLED, idle))))

    def fetch_again(self, role: str) -> None:
        """Ask the broker for what it delivered before and never heard of."""
        self.fetch(self.queues.setdefault(role, RoleQueue(role)))

    async def _pull(self, queue: RoleQueue, batch: int) -> None:
        try:
            if not queue.has_consumer:
                await self.desk.intake.make_consumer(queue.role)
                queue.has_consumer = True
            # not understood: the consumer was deleted, or the broker is starting
            if not await self.desk.intake.pull(queue.role, batch, queue.wake.set):
                queue.has_consumer = False
                await asyncio.sleep(REFUSED_PAUSE)
        except LeaseLost as error:
            self.desk.steward.fail(error)
        except TidingsError as error:
            log.warning("a pull of %s ended: %s", queue.role, error)
            await asyncio.sleep(REFUSED_PAUSE)
        finally:
            queue.pull = None
            queue.wake.set()


async def either(waiting: Any, seconds: float) -> None:
    """Until that or until the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await waiting
