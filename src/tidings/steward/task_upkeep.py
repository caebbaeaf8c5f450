"""What the steward does with tasks by itself: deadlines, silence, in-progress, retention."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from tidings.model.task_rules import EndedTask, TaskState, is_overdue, is_silent
from tidings.nats.jetstream import StoredRecord
from tidings.steward.retention import archive_needs
from tidings.steward.task_holds import ORPHANED, TaskHolds
from tidings.steward.task_queue import TaskHandout, TaskIntake
from tidings.wire.names import role_parts
from tidings.wire.seal import TASK_PART
from tidings.wire.states import TaskCause, TaskStatus
from tidings.wire.subjects import Task

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
