"""Tasks: workers claim them and say how they ended; no agent has a right on a task's consumer.

    task_rules      what a task is, and what follows when it is not finished; pure
    task_store      holds, results and dead letters, written down
    task_holds      done, given back, or buried with a cause
    task_queue      from the broker's queues to the worker that waits
    task_upkeep     deadlines, silence, retention

This module puts them together and answers where a task is and how many there are. A task held far beyond its
acknowledgement time is not run twice, and a hold survives the steward.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tidings.model.task_rules import EndedTask, TaskState
from tidings.nats.jetstream import StoredRecord
from tidings.steward.context import SpaceContext
from tidings.steward.dead_letters import DeadLetters
from tidings.steward.link_records import shown_role
from tidings.steward.requests import Idle
from tidings.steward.store_watch import StoreWatch
from tidings.steward.task_holds import TaskHolds
from tidings.steward.task_queue import TaskHandout, TaskIntake
from tidings.steward.task_upkeep import QueuedDeadlines, TaskUpkeep
from tidings.wire.names import role_parts
from tidings.wire.records import moment
from tidings.wire.states import TaskStatus
from tidings.wire.subjects import Task

#: requests that wait, of everybody and of one agent: an asker has one for each task it waits for
PARKED, PARKED_EACH = 4_096, 128
#: figures are this fresh; a role costs two round trips
FIGURES_AGE = 2.0
ROLES_COUNTED = 64


class TaskQueues:
    """The tasks of one space, under one lease."""

    def __init__(
        self,
        space: SpaceContext,
        lease_seq: int,
        letters: DeadLetters,
        store: StoreWatch,
        idle: Idle,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.space = space
        self._idle = idle
        self._parked: Counter[str] = Counter()
        self._figures: dict[str, Any] = {}
        self._counted = 0.0
        self.holds = TaskHolds(space, lease_seq, letters, store)
        self.intake = TaskIntake(self.holds)
        self.handout = TaskHandout(self.holds, self.intake, fail)
        self.deadlines = QueuedDeadlines(self.holds, self.intake, self.handout)
        self.upkeep = TaskUpkeep(self.holds, self.intake, self.handout)

    async def tend(self) -> None:
        await self.upkeep.tend()
        await self.deadlines.sweep()

    def close(self) -> None:
        """Wake everybody who waits: the steward stops."""
        self.holds.close()
        self.handout.close()

    @asynccontextmanager
    async def parked(self, sender: str, seconds: float) -> AsyncIterator[float]:
        """How long this request may wait: nothing if its sender, or everybody together, waits too often already."""
        allowed = self._parked[sender] < PARKED_EACH and self._parked.total() < PARKED and not self.holds.closed
        self._parked[sender] += 1
        try:
            async with self._idle():
                yield seconds if allowed else 0.0
        finally:
            self._parked[sender] -= 1
            if not self._parked[sender]:
                del self._parked[sender]

    # --- one task ---

    def has_ended(self, record: StoredRecord) -> bool:
        """Is the task of this record of the queue over?"""
        is_task = isinstance(self.space.subjects.parse(record.subject), Task)
        return is_task and self.holds.book.outcome_of(record.seq, record.time_ns) is not None

    async def locate(self, agent: str, message_id: str, seq: int | None) -> tuple[str, TaskState | EndedTask | str]:
        """Who asked a task, this agent or a key it had before a rotation, and where it is."""
        for asker in (agent, *self.space.predecessors(agent)):
            found = await self.find(asker, message_id, seq)
            if found != TaskStatus.UNKNOWN:
                return asker, found
        return agent, TaskStatus.UNKNOWN

    async def find(self, asker: str, message_id: str, seq: int | None) -> TaskState | EndedTask | str:
        """A task of this asker, wherever it is: `queued`, `gone` or `unknown` if the book does not have it."""
        found = self.holds.book.find(asker, message_id)
        if found is not None:
            return found
        record = await self._own_record(asker, message_id, seq)
        if record is None:
            return TaskStatus.UNKNOWN
        task, refused = self.holds.read(record, None)
        if refused is not None or task.id != message_id:
            return TaskStatus.UNKNOWN
        known = await self.deadlines.bury_unclaimed(task, record)
        if known == TaskStatus.QUEUED:
            return self.holds.abroad.get((asker, message_id), known)
        return TaskStatus.QUEUED if known == "unheard" else known

    async def _own_record(self, asker: str, message_id: str, seq: int | None) -> StoredRecord | None:
        holds = self.holds
        stream = self.space.subjects.task_stream
        if seq is not None:
            record = await self.space.js.at(stream, seq)
            address = self.space.subjects.parse(record.subject) if record else None
            return record if isinstance(address, Task) and address.sender == asker else None
        head = await self.space.head(stream)
        async for page in self.space.js.read(stream, f"{self.space.subjects.root}.task.*.{asker}", 1, head, page=100):
            for record in page:
                if message_id.encode() in record.payload and holds.read(record, None)[0].id == message_id:
                    return record
        return None

    # --- all of them ---

    async def figures(self) -> dict[str, Any]:
        """Queued per role, held, the age of the oldest, dead letters; at most `FIGURES_AGE` old."""
        now = time.time()
        if now - self._counted > FIGURES_AGE:
            self._figures, self._counted = await self._count(now), now
        return self._figures

    async def _count(self, now: float) -> dict[str, Any]:
        book = self.holds.book
        held = [task for task in book.open.values() if task.worker is not None]
        dead = [each for each in book.outcomes.values() if each.state == TaskStatus.DEAD and each.seq not in book.open]
        stored = await self._stored()
        queued: dict[str, int] = {}
        times = [task.time_ns for task in book.open.values()]
        waiting = Counter(task.role for task in book.open.values() if task.worker is None)
        for role, records in stored.most_common(ROLES_COUNTED):
            place = await self.intake.place(role)
            buried = sum(each.role == role and each.seq > place.delivered for each in dead)
            if role_parts(role)[1]:  # what goes to another space is pulled by nobody here
                buried = await self._ended_elsewhere(role)
            pending = records if place.pending is None else place.pending
            queued[role] = max(0, pending - buried) + waiting.pop(role, 0)
            oldest = await self._oldest(role, place.acked) if queued[role] else None
            times += [oldest] if oldest is not None else []
        queued |= waiting
        return {
            "queued": {shown_role(self.space, role): count for role, count in sorted(queued.items()) if count},
            "held": len(held),
            "oldest_s": round(max(0.0, now - min(times) / 1e9), 3) if times else None,
            "dead": len(dead),
            "done": self.holds.counts["done"],
            "unwatched_deadlines": self.deadlines.unwatched,
            "at": moment(now),
        }

    async def _stored(self) -> Counter[str]:
        """Records per role in the stream, ended ones that are not purged included."""
        body = {"subjects_filter": f"{self.space.subjects.root}.task.>"}
        state = (await self.space.js.api(f"STREAM.INFO.{self.space.subjects.task_stream}", body))["state"]
        found: Counter[str] = Counter()
        for subject, count in (state.get("subjects") or {}).items():
            address = self.space.subjects.parse(subject)
            if isinstance(address, Task):
                found[address.role] += int(count)
        return found

    async def _ended_elsewhere(self, role: str) -> int:
        """How many records of a role of another space are there whose tasks have ended."""
        s, book, count = self.space.subjects, self.holds.book, 0
        for subject in await self.space.js.subjects_of(s.task_stream, self.intake.subject_filter(role)):
            first = await self.space.js.following(s.task_stream, subject, 1)
            asker = subject.rpartition(".")[2]
            over = (each for each in book.outcomes.values() if (each.role, each.asker) == (role, asker))
            count += sum(first is not None and each.seq >= first.seq for each in over)
        return count

    async def _oldest(self, role: str, outcome: int) -> int | None:
        """Time of the oldest record of a role that has not ended, as far as the next few tell."""
        position = outcome + 1
        for _ in range(8):
            record = await self.space.js.following(
                self.space.subjects.task_stream, self.intake.subject_filter(role), position
            )
            if record is None:
                return None
            if self.holds.book.outcome_of(record.seq, record.time_ns) is None:
                return record.time_ns
            position = record.seq + 1
        return None
