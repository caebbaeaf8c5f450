"""The task desk: workers claim from it and settle with it; no agent has a right on a task's consumer.

    intake      records of the broker's queues become tasks, or dead letters
    handout     a waiting worker gets the next task; the hold is written down first
    settling    done, given back, or buried with a cause
    deadlines   what nobody took in time is buried too
    lookup      who may take it, where it is, how much there is
    upkeep      in-progress, silence, retention

This module holds what they share: the book, the lock, who waits, and what the steward before wrote down. A task held
far beyond its acknowledgement time is not run twice, and a hold survives the steward.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from tidings.steward.task_deadlines import QueuedDeadlines
from tidings.steward.task_handout import TaskHandout, either
from tidings.steward.task_intake import TaskIntake
from tidings.steward.task_lookup import TaskLookup
from tidings.steward.task_rules import TaskBook, TaskState
from tidings.steward.task_settling import TaskSettling
from tidings.steward.task_store import HoldSlots, TaskRecords
from tidings.steward.task_upkeep import TaskUpkeep

if TYPE_CHECKING:
    from tidings.steward.service import Steward

#: requests that wait, of everybody and of one agent: an asker has one for each task it waits for
PARKED, PARKED_EACH = 4_096, 128


class TaskDesk:
    """The tasks of one space, under one lease."""

    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        self.js = steward.js
        self.subjects = steward.subjects
        self.intervals = steward.intervals
        self.book = TaskBook()
        self.records = TaskRecords(steward.js, steward.subjects)
        self.slots = HoldSlots(steward.state, steward.lease.seq)
        #: hold it from the check to the write
        self.lock = asyncio.Lock()
        self.counts: Counter[str] = Counter()
        self.closed = False
        self._changes: defaultdict[tuple[str, str], set[asyncio.Event]] = defaultdict(set)
        self._parked: Counter[str] = Counter()
        self.intake = TaskIntake(self)
        self.handout = TaskHandout(self)
        self.settling = TaskSettling(self)
        self.deadlines = QueuedDeadlines(self)
        self.lookup = TaskLookup(self)
        self.upkeep = TaskUpkeep(self)

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
            await self.intake.acknowledge(task)
            self.slots.free(task.seq)
            return
        if task.worker is not None and self.book.held_by(task.worker) is not None:
            task = msgspec.structs.replace(task, worker=None, session=None)
        self.book.put(msgspec.structs.replace(task, beat_at=time.time()))

    async def tend(self) -> None:
        await self.upkeep.tend()
        await self.deadlines.sweep()

    async def retain(self) -> None:
        await self.upkeep.retain()

    def close(self) -> None:
        """Wake everybody who waits: the steward stops."""
        self.closed = True
        self.handout.close()
        for event in [event for events in self._changes.values() for event in events]:
            event.set()

    # --- waiting ---

    @asynccontextmanager
    async def parked(self, sender: str, seconds: float) -> AsyncIterator[float]:
        """How long this request may wait: nothing if its sender, or everybody together, waits too often already."""
        allowed = self._parked[sender] < PARKED_EACH and self._parked.total() < PARKED and not self.closed
        self._parked[sender] += 1
        try:
            async with self.steward.answering.idle():
                yield seconds if allowed else 0.0
        finally:
            self._parked[sender] -= 1
            if not self._parked[sender]:
                del self._parked[sender]

    def changed(self, task: TaskState) -> None:
        """Tell whoever waits for this task, and the queues: a worker may be free now."""
        for event in self._changes.get((task.asker, task.id), ()):
            event.set()
        self.handout.wake_all()

    async def wait_for_change(self, asker: str, message_id: str, seconds: float) -> None:
        key, event = (asker, message_id), asyncio.Event()
        self._changes[key].add(event)
        try:
            await either(event.wait(), seconds)
        finally:
            self._changes[key].discard(event)
            if not self._changes[key]:
                del self._changes[key]
