"""Tasks: workers claim them and say how they ended; no agent has a right on a task's consumer.

    task_rules      what a task is, and what follows when it is not finished; pure
    task_holds      done, given back, or buried with a cause; holds, results and dead letters, written down
    task_queue      from the broker's queues to the worker that waits

This module puts them together, tends them (deadlines, silence, retention), and answers where a task is and how many
there are. A task held far beyond its
acknowledgement time is not run twice, and a hold survives the steward.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from tidings.model.task_rules import EndedTask, TaskState, is_overdue, is_silent
from tidings.nats.jetstream import StoredRecord
from tidings.steward.context import SpaceContext
from tidings.steward.dead_letters import DeadLetters
from tidings.steward.link_records import shown_role
from tidings.steward.requests import Idle
from tidings.steward.retention import archive_needs
from tidings.steward.store_watch import StoreWatch
from tidings.steward.task_holds import ORPHANED, TaskHolds
from tidings.steward.task_queue import TaskHandout, TaskIntake
from tidings.wire.names import role_parts
from tidings.wire.records import moment
from tidings.wire.seal import TASK_PART
from tidings.wire.states import TaskCause, TaskStatus
from tidings.wire.subjects import Task

#: requests that wait, of everybody and of one agent: an asker has one for each task it waits for
PARKED, PARKED_EACH = 4_096, 128
#: figures are this fresh; a role costs two round trips
FIGURES_AGE = 2.0
ROLES_COUNTED = 64
#: records looked at for deadlines, and tasks buried, in one round
LOOKED_AT = 2_000
BURIED = 200
PAGE = 500
WATCHED, WATCHED_EACH = 100_000, 2_000
#: how often the broker is asked again for a task it delivered and nobody knows
ASKED_AGAIN = 8
#: records of ended tasks above the broker's own floor that are counted in one round
ENDED_COUNTED = 1_000
#: made for an asker whose share of a queue is full of what ended; it may have 1,000
ROOM = 500


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


class QueuedDeadline(NamedTuple):
    at: float
    seq: int
    time_ns: int
    asker: str
    asked_again: int = 0


class QueuedDeadlines:
    """Tasks nobody took: each queued record with a deadline is found once, and buried when the deadline has passed.

    The queue is read alongside its workers, a bounded piece per round, so a task expires although its role has no
    holder, nobody claims and its asker is away; a steward that starts reads it again from the beginning. What a worker
    holds, or held, is `TaskUpkeep`'s business. Memory is bounded per asker: what is beyond it expires when its asker
    looks, or when it is pulled.
    """

    def __init__(self, holds: TaskHolds, intake: TaskIntake, handout: TaskHandout) -> None:
        self.holds = holds
        self.intake = intake
        self.handout = handout
        self.space = holds.space
        #: deadlines that are not remembered because their asker, or everybody, has too many
        self.unwatched = 0
        self._position = 1
        self._due: list[QueuedDeadline] = []
        self._each: Counter[str] = Counter()

    async def sweep(self) -> None:
        await self._look()
        now = time.time()
        for _ in range(BURIED):
            if not self._due or self._due[0].at >= now:
                return
            due = heapq.heappop(self._due)
            self._each[due.asker] -= 1
            if not self._each[due.asker]:
                del self._each[due.asker]
            await self._expire(due)

    # --- finding ---

    async def _look(self) -> None:
        """Read on from where the last round stopped."""
        stream = self.space.subjects.task_stream
        state = (await self.space.js.info(stream))["state"]
        head, start = int(state["last_seq"]), max(self._position, int(state["first_seq"]))
        if head < start:
            self._position = min(self._position, head + 1)  # a stream made anew begins again
            return
        looked = 0
        async for page in self.space.js.read(stream, f"{self.space.subjects.root}.task.>", start, head, page=PAGE):
            for record in page:
                self._note(record)
            self._position = page[-1].seq + 1
            looked += len(page)
            if looked >= LOOKED_AT:
                return
        self._position = head + 1

    def _note(self, record: StoredRecord) -> None:
        if TASK_PART.encode() not in record.payload and b"\\u" not in record.payload:
            return  # it cannot name a deadline; most do not, and reading one costs a signature
        if not isinstance(self.space.subjects.parse(record.subject), Task):
            return
        task, refused = self.holds.read(record, None)
        if refused is None and task.due is not None:
            self._remember(QueuedDeadline(task.due, task.seq, task.time_ns, task.asker))

    def _remember(self, due: QueuedDeadline) -> None:
        if self._each[due.asker] >= WATCHED_EACH or len(self._due) >= WATCHED:
            self.unwatched += 1
            return
        self._each[due.asker] += 1
        heapq.heappush(self._due, due)

    # --- burying ---

    async def _expire(self, due: QueuedDeadline) -> None:
        holds = self.holds
        if due.seq in holds.book.open or holds.book.outcome_of(due.seq, due.time_ns) is not None:
            return
        record = await self.space.js.at(self.space.subjects.task_stream, due.seq)
        if record is None or record.time_ns != due.time_ns:
            return
        task, _ = holds.read(record, None)
        if await self.bury_unclaimed(task, record) == "unheard" and due.asked_again < ASKED_AGAIN:
            self.handout.fetch_again(task.role)
            later = time.time() + self.space.intervals.task_ack_wait
            self._remember(due._replace(at=later, asked_again=due.asked_again + 1))

    async def bury_unclaimed(self, task: TaskState, record: StoredRecord) -> TaskState | EndedTask | str:
        """Bury a queued task if its deadline has passed; the answer is what is known of it then.

        `unheard`: the broker delivered it to a steward that never heard of its end, so only the broker can say
        whether it ended; it is asked to deliver it again.
        """
        holds = self.holds
        if not is_overdue(task, time.time()):
            return await self._whereabouts(task, record)
        async with holds.lock:
            found = await self._whereabouts(task, record)
            if found != TaskStatus.QUEUED:
                return found
            if await self.intake.was_pulled(task.role, record.seq):
                return "unheard"
            taken = holds.abroad.get((task.asker, task.id))
            reason = "nobody took it in time" if taken is None else "its space told of no end of it in time"
            return await holds.bury(task, TaskCause.DEADLINE, reason, record=record)

    async def _whereabouts(self, task: TaskState, record: StoredRecord) -> TaskState | EndedTask | str:
        """What the book says, else whether the broker takes it for ended; what was never pulled is queued."""
        known = self.holds.book.find(task.asker, task.id)
        if known is not None:
            return known
        if await self.intake.was_pulled(task.role, record.seq):
            place = await self.intake.place(task.role)
            return self.holds.book.find(task.asker, task.id) or (
                TaskStatus.GONE if record.seq <= place.acked else TaskStatus.QUEUED
            )
        return TaskStatus.QUEUED


class TaskUpkeep:
    """In-progress for what is held, silence and deadlines of workers, retention.

    A steward that slept forgives: the silence was its own. A record leaves the queue once its task ended, is archived
    (unless the archive is switched off) and older than a repeated publish; sooner if its asker met a full queue.
    """

    def __init__(self, holds: TaskHolds, intake: TaskIntake, handout: TaskHandout) -> None:
        self.holds = holds
        self.intake = intake
        self.handout = handout
        self.space = holds.space
        self.book = holds.book
        self._tended = time.time()
        self._progress_at = 0.0

    async def tend(self) -> None:
        """Say in-progress, notice workers that fell silent and deadlines that passed, finish unsure results."""
        now, intervals = time.time(), self.space.intervals
        if now - self._tended > max(2.0, intervals.task_silence / 2):
            self._forgive(now)  # we slept, not they
        self._tended = now
        if now - self._progress_at >= intervals.task_ack_wait / 3:
            self._progress_at = now
            for task in list(self.book.open.values()):
                if task.ack is not None:
                    await self.holds.say(task.ack, b"+WPI")
        for task in list(self.book.open.values()):
            await self._tend_one(task, now)
        async with self.holds.lock:
            await self.holds.slots.flush()

    def _forgive(self, now: float) -> None:
        for task in list(self.book.open.values()):
            if task.worker is not None:
                self.book.put(msgspec.structs.replace(task, beat_at=now))

    async def _tend_one(self, task: TaskState, now: float) -> None:
        holds = self.holds
        async with holds.lock:
            current = self.book.open.get(task.seq)
            if current is None:
                return
            if current.seq in holds.unsure:
                await holds.finish(current, *holds.unsure[current.seq])
            elif is_overdue(current, now):
                reason = f"not finished in time (held by {current.worker or 'nobody'})"
                await holds.bury(current, TaskCause.DEADLINE, reason)
            elif is_silent(current, now, self.space.intervals.task_silence):
                await holds.give_back(
                    current, f"{current.worker} fell silent", "", pause=0, cause=TaskCause.WORKER_LOST
                )
            elif current.worker is not None and not self.space.holds_role(current.worker, current.role):
                reason = f"{current.worker} may no longer take tasks of {current.role}"
                await holds.give_back(current, reason, "", pause=0, cause=TaskCause.WORKER_LOST)
            elif current.worker is None and holds.is_orphaned(current):
                await holds.bury(current, TaskCause.FAILED, ORPHANED)

    # --- retention ---

    async def retain(self) -> None:
        stream = self.space.subjects.task_stream
        if not (await self.space.js.info(stream))["state"]["messages"]:
            return
        archived = await archive_needs(self.space, "task")
        buried = self._buried()
        for role in sorted(self._roles() | set(buried)):
            subject_filter = self.intake.subject_filter(role)
            if role_parts(role)[1]:  # of another space: what waits in one asker's queue keeps nothing of others
                for subject in await self.space.js.subjects_of(stream, subject_filter):
                    await self._remove_ended(subject, await self._ended_below(subject, 1), archived)
                continue
            floor = (await self.intake.place(role)).acked + 1
            if buried.get(role, 0) >= floor:
                floor = await self._ended_below(subject_filter, floor)
            await self._remove_ended(subject_filter, floor, archived)

    async def make_room(self, asker: str, role: str) -> int:
        """An asker's share of a queue is full of what ended: the oldest goes now. Answers how much."""
        holds = self.holds
        stream, subject = self.space.subjects.task_stream, self.space.subjects.task(role, asker)
        head = await self.space.head(stream)
        over, archived = (await self.intake.place(role)).acked, await archive_needs(self.space, "task")
        through = head if archived is None else archived - 1
        below = 0
        for record in await anext(self.space.js.read(stream, subject, 1, through, page=ROOM), []):
            revived = record.seq in self.book.open
            if revived or (record.seq > over and self.book.outcome_of(record.seq, record.time_ns) is None):
                break
            below = record.seq + 1
        removed = await self.space.js.purge(stream, subject_filter=subject, below=below) if below else 0
        holds.counts["purged"] += removed
        return removed

    def _roles(self) -> set[str]:
        accesses = (self.space.access(owner) for owner in self.space.table.owners())
        granted = {role for access in accesses if access is not None for role in access.roles}
        return granted | set(self.handout.queues)

    def _buried(self) -> dict[str, int]:
        """The newest of each role whose end the broker does not know: dead letters, which may never have been pulled,
        and whatever ended in another space."""
        newest: dict[str, int] = {}
        for each in self.book.outcomes.values():
            if each.state != TaskStatus.DONE or role_parts(each.role)[1]:
                newest[each.role] = max(each.seq, newest.get(each.role, 0))
        return newest

    async def _remove_ended(self, subject_filter: str, floor: int, archived: int | None) -> None:
        """What lies below the floor, is archived and is not young."""
        stream = self.space.subjects.task_stream
        cutoff = datetime.now(UTC) - timedelta(seconds=self.space.intervals.task_keep)
        young = await self.space.js.first_after(stream, subject_filter, cutoff)
        below = min(each for each in (floor, archived, young) if each is not None)
        if below > 1:
            purged = await self.space.js.purge(stream, subject_filter=subject_filter, below=below)
            self.holds.counts["purged"] += purged

    async def _ended_below(self, subject_filter: str, floor: int) -> int:
        """The first sequence of a filter that is not known to have ended."""
        stream = self.space.subjects.task_stream
        head = await self.space.head(stream)
        async for page in self.space.js.read(stream, subject_filter, floor, head, page=ENDED_COUNTED):
            for record in page:
                if self.book.outcome_of(record.seq, record.time_ns) is None:
                    return floor
                floor = record.seq + 1
            break
        return floor
