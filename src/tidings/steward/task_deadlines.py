"""Tasks nobody took: each queued record with a deadline is found once, and buried when the deadline has passed.

The queue is read alongside its workers, a bounded piece per round, so a task expires although its role has no holder,
nobody claims and its asker is away; a steward that starts reads it again from the beginning. What a worker holds, or
held, is upkeep's business. Memory is bounded per asker: what is beyond it expires when its asker looks, or when it is
pulled.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from tidings.broker.jetstream import StoredRecord
from tidings.steward.task_rules import TASK_PART, Settled, TaskState, is_overdue
from tidings.wire.subjects import Task

if TYPE_CHECKING:
    from tidings.steward.tasks import TaskDesk

#: records looked at, and tasks buried, in one round
LOOKED_AT = 2_000
BURIED = 200
PAGE = 500
WATCHED, WATCHED_EACH = 100_000, 2_000
#: how often the broker is asked again for a task it delivered and nobody knows
ASKED_AGAIN = 8


class Due(NamedTuple):
    at: float
    seq: int
    time_ns: int
    asker: str
    asked_again: int = 0


class QueuedDeadlines:
    def __init__(self, desk: TaskDesk) -> None:
        self.desk = desk
        #: deadlines that are not remembered because their asker, or everybody, has too many
        self.unwatched = 0
        self._position = 1
        self._due: list[Due] = []
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
        stream = self.desk.subjects.task_stream
        state = (await self.desk.js.info(stream))["state"]
        head, start = int(state["last_seq"]), max(self._position, int(state["first_seq"]))
        if head < start:
            self._position = min(self._position, head + 1)  # a stream made anew begins again
            return
        looked = 0
        async for page in self.desk.js.read(stream, f"{self.desk.subjects.root}.task.>", start, head, page=PAGE):
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
        if not isinstance(self.desk.subjects.parse(record.subject), Task):
            return
        task, refused = self.desk.intake.read(record, None)
        if refused is None and task.due is not None:
            self._remember(Due(task.due, task.seq, task.time_ns, task.asker))

    def _remember(self, due: Due) -> None:
        if self._each[due.asker] >= WATCHED_EACH or len(self._due) >= WATCHED:
            self.unwatched += 1
            return
        self._each[due.asker] += 1
        heapq.heappush(self._due, due)

    # --- burying ---

    async def _expire(self, due: Due) -> None:
        desk = self.desk
        if due.seq in desk.book.open or desk.book.settled_as(due.seq, due.time_ns) is not None:
            return
        record = await desk.js.at(desk.subjects.task_stream, due.seq)
        if record is None or record.time_ns != due.time_ns:
            return
        task, _ = desk.intake.read(record, None)
        if await self.bury_unclaimed(task, record) == "unheard" and due.asked_again < ASKED_AGAIN:
            desk.handout.fetch_again(task.role)
            later = time.time() + desk.intervals.task_ack_wait
            self._remember(due._replace(at=later, asked_again=due.asked_again + 1))

    async def bury_unclaimed(self, task: TaskState, record: StoredRecord) -> TaskState | Settled | str:
        """Bury a queued task if its deadline has passed; the answer is what is known of it then.

        `unheard`: the broker delivered it to a steward that never heard of its end, so only the broker can say
        whether it was settled; it is asked to deliver it again.
        """
        desk = self.desk
        if not is_overdue(task, time.time()):
            return await self._whereabouts(task, record)
        async with desk.lock:
            found = await self._whereabouts(task, record)
            if found != "queued":
                return found
            if await desk.intake.was_pulled(task.role, record.seq):
                return "unheard"
            return await desk.settling.bury(task, "deadline", "nobody took it in time", record=record)

    async def _whereabouts(self, task: TaskState, record: StoredRecord) -> TaskState | Settled | str:
        """What the book says, else whether the broker takes it for settled; what was never pulled is queued."""
        known = self.desk.book.find(task.asker, task.id)
        if known is not None:
            return known
        if await self.desk.intake.was_pulled(task.role, record.seq):
            place = await self.desk.intake.place(task.role)
            return self.desk.book.find(task.asker, task.id) or ("gone" if record.seq <= place.settled else "queued")
        return "queued"
