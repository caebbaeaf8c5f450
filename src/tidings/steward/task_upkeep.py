"""What the desk does by itself: in-progress for what it holds, silence and deadlines of workers, retention.

A steward that slept forgives: the silence was its own. A record leaves the queue once it is settled, archived (unless
the archive is switched off) and older than a repeated publish; sooner if its asker met a full queue.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from tidings.steward.retention import archive_needs
from tidings.steward.task_rules import TaskState, is_overdue, is_silent

if TYPE_CHECKING:
    from tidings.steward.tasks import TaskDesk

#: settled records above the broker's own floor that are counted in one round
LOOKED_AT = 1_000
#: made for an asker whose share of a queue is full of what is settled; it may have 1,000
ROOM = 500


class TaskUpkeep:
    def __init__(self, desk: TaskDesk) -> None:
        self.desk = desk
        self.book = desk.book
        self._tended = time.time()
        self._progress_at = 0.0

    async def tend(self) -> None:
        """Say in-progress, notice workers that fell silent and deadlines that passed, finish unsure results."""
        now, intervals = time.time(), self.desk.intervals
        if now - self._tended > max(2.0, intervals.task_silence / 2):
            self._forgive(now)  # we slept, not they
        self._tended = now
        if now - self._progress_at >= intervals.task_ack_wait / 3:
            self._progress_at = now
            for task in list(self.book.open.values()):
                if task.ack is not None:
                    await self.desk.intake.say(task.ack, b"+WPI")
        for task in list(self.book.open.values()):
            await self._tend_one(task, now)
        async with self.desk.lock:
            await self.desk.slots.flush()

    def _forgive(self, now: float) -> None:
        for task in list(self.book.open.values()):
            if task.worker is not None:
                self.book.put(msgspec.structs.replace(task, beat_at=now))

    async def _tend_one(self, task: TaskState, now: float) -> None:
        desk, settling = self.desk, self.desk.settling
        async with desk.lock:
            current = self.book.open.get(task.seq)
            if current is None:
                return
            if current.seq in settling.unsure:
                await settling.finish(current, *settling.unsure[current.seq])
            elif is_overdue(current, now):
                reason = f"not finished in time (held by {current.worker or 'nobody'})"
                await settling.bury(current, "deadline", reason)
            elif is_silent(current, now, desk.intervals.task_silence):
                await settling.give_back(current, f"{current.worker} fell silent", "", pause=0, cause="worker_lost")
            elif current.worker is not None and not desk.lookup.holds_role(current.worker, current.role):
                reason = f"{current.worker} may no longer take tasks of {current.role}"
                await settling.give_back(current, reason, "", pause=0, cause="worker_lost")

    # --- retention ---

    async def retain(self) -> None:
        desk = self.desk
        stream = desk.subjects.task_stream
        if not (await desk.js.info(stream))["state"]["messages"]:
            return
        archived = await archive_needs(self.desk.steward, "task")
        buried = self._buried()
        for role in sorted(self._roles() | set(buried)):
            subject_filter = desk.intake.subject_filter(role)
            floor = (await desk.intake.place(role)).settled + 1
            if buried.get(role, 0) >= floor:
                floor = await self._settled_below(role, floor)
            cutoff = datetime.now(UTC) - timedelta(seconds=desk.intervals.task_keep)
            young = await desk.js.first_after(stream, subject_filter, cutoff)
            below = min(each for each in (floor, archived, young) if each is not None)
            if below > 1:
                desk.counts["purged"] += await desk.js.purge(stream, subject_filter=subject_filter, below=below)

    async def make_room(self, asker: str, role: str) -> int:
        """An asker's share of a queue is full of what is settled: the oldest goes now. Answers how much."""
        desk = self.desk
        stream, subject = desk.subjects.task_stream, desk.subjects.task(role, asker)
        head = int((await desk.js.info(stream))["state"]["last_seq"])
        over, archived = (await desk.intake.place(role)).settled, await archive_needs(desk.steward, "task")
        through = head if archived is None else archived - 1
        below = 0
        for record in await anext(desk.js.read(stream, subject, 1, through, page=ROOM), []):
            revived = record.seq in self.book.open
            if revived or (record.seq > over and self.book.settled_as(record.seq, record.time_ns) is None):
                break
            below = record.seq + 1
        removed = await desk.js.purge(stream, subject_filter=subject, below=below) if below else 0
        desk.counts["purged"] += removed
        return removed

    def _roles(self) -> set[str]:
        steward = self.desk.steward
        accesses = (steward.table.access_at(owner, steward.position) for owner in steward.table.owners())
        granted = {role for access in accesses if access is not None for role in access.roles}
        return granted | set(self.desk.handout.queues)

    def _buried(self) -> dict[str, int]:
        """The newest dead letter of each role: it may never have been pulled, so the broker does not know its end."""
        newest: dict[str, int] = {}
        for each in self.book.settled.values():
            if each.state != "done":
                newest[each.role] = max(each.seq, newest.get(each.role, 0))
        return newest

    async def _settled_below(self, role: str, floor: int) -> int:
        """The first sequence of a role that is not known to be settled."""
        desk = self.desk
        stream, subject_filter = desk.subjects.task_stream, desk.intake.subject_filter(role)
        head = int((await desk.js.info(stream))["state"]["last_seq"])
        async for page in desk.js.read(stream, subject_filter, floor, head, page=LOOKED_AT):
            for record in page:
                if self.book.settled_as(record.seq, record.time_ns) is None:
                    return floor
                floor = record.seq + 1
            break
        return floor
