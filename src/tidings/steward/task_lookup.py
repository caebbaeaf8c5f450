"""Looking: who holds a role and is here, where a task is, and the figures people ask for.

Nothing here changes a task, except that looking at one whose deadline has passed buries it.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tidings.broker.jetstream import StoredRecord
from tidings.steward.task_rules import Settled, TaskState
from tidings.steward.unread import predecessors
from tidings.wire.subjects import Task

if TYPE_CHECKING:
    from tidings.steward.tasks import TaskDesk

#: figures are this fresh; a role costs two round trips
FIGURES_AGE = 2.0
ROLES_COUNTED = 64


class TaskLookup:
    def __init__(self, desk: TaskDesk) -> None:
        self.desk = desk
        self._figures: dict[str, Any] = {}

    # --- roles ---

    def holds_role(self, owner: str, role: str) -> bool:
        access = self.desk.steward.active_access(owner)
        return access is not None and role in access.roles

    def holders(self, role: str) -> list[str]:
        return [owner for owner in self.desk.steward.table.owners() if self.holds_role(owner, role)]

    def presence(self, role: str) -> dict[str, Any]:
        """How many hold a role, how many of them are here, and when one was last seen.

        `online` is None while the steward is too young to know: those who are here have not all beaten yet.
        """
        steward = self.desk.steward
        rows = [row for owner in self.holders(role) if (row := steward.roster.table.row(owner)) is not None]
        online = sum(row.status != "offline" for row in rows)
        knows = online > 0 or time.time() - steward.started > steward.intervals.presence
        seen = max((row.last_seen for row in rows if row.last_seen is not None), default=None)
        return {"holders": len(rows), "online": online if knows else None, "last_seen": seen}

    # --- one task ---

    async def locate(self, agent: str, message_id: str, seq: int | None) -> tuple[str, TaskState | Settled | str]:
        """Who asked a task, this agent or a key it had before a rotation, and where it is."""
        for asker in (agent, *predecessors(self.desk.steward, agent)):
            found = await self.find(asker, message_id, seq)
            if found != "unknown":
                return asker, found
        return agent, "unknown"

    async def find(self, asker: str, message_id: str, seq: int | None) -> TaskState | Settled | str:
        """A task of this asker, wherever it is: `queued`, `gone` or `unknown` if the book does not have it."""
        found = self.desk.book.find(asker, message_id)
        if found is not None:
            return found
        record = await self._own_record(asker, message_id, seq)
        if record is None:
            return "unknown"
        task, refused = self.desk.intake.read(record, None)
        if refused is not None or task.id != message_id:
            return "unknown"
        known = await self.desk.deadlines.bury_unclaimed(task, record)
        return "queued" if known == "unheard" else known

    async def _own_record(self, asker: str, message_id: str, seq: int | None) -> StoredRecord | None:
        desk = self.desk
        stream = desk.subjects.task_stream
        if seq is not None:
            record = await desk.js.at(stream, seq)
            address = desk.subjects.parse(record.subject) if record else None
            return record if isinstance(address, Task) and address.sender == asker else None
        head = int((await desk.js.info(stream))["state"]["last_seq"])
        async for page in desk.js.read(stream, f"{desk.subjects.root}.task.*.{asker}", 1, head, page=100):
            for record in page:
                if message_id.encode() in record.payload and desk.intake.read(record, None)[0].id == message_id:
                    return record
        return None

    # --- all of them ---

    async def figures(self) -> dict[str, Any]:
        """Queued per role, held, the age of the oldest, dead letters; at most `FIGURES_AGE` old."""
        now = time.time()
        if now - self._figures.get("at", 0.0) > FIGURES_AGE:
            self._figures = await self._count(now)
        return self._figures

    async def _count(self, now: float) -> dict[str, Any]:
        book = self.desk.book
        held = [task for task in book.open.values() if task.worker is not None]
        dead = [each for each in book.settled.values() if each.state == "dead" and each.seq not in book.open]
        stored = await self._stored()
        queued: dict[str, int] = {}
        times = [task.time_ns for task in book.open.values()]
        waiting = Counter(task.role for task in book.open.values() if task.worker is None)
        for role, records in stored.most_common(ROLES_COUNTED):
            place = await self.desk.intake.place(role)
            buried = sum(each.role == role and each.seq > place.delivered for each in dead)
            pending = records if place.pending is None else place.pending
            queued[role] = max(0, pending - buried) + waiting.pop(role, 0)
            oldest = await self._oldest(role, place.settled) if queued[role] else None
            times += [oldest] if oldest is not None else []
        queued |= waiting
        return {
            "queued": {role: count for role, count in sorted(queued.items()) if count},
            "held": len(held),
            "oldest_s": round(max(0.0, now - min(times) / 1e9), 3) if times else None,
            "dead": len(dead),
            "done": self.desk.counts["done"],
            "unwatched_deadlines": self.desk.deadlines.unwatched,
            "at": now,
        }

    async def _stored(self) -> Counter[str]:
        """Records per role in the stream, settled ones that are not purged included."""
        desk = self.desk
        body = {"subjects_filter": f"{desk.subjects.root}.task.>"}
        state = (await desk.js.api(f"STREAM.INFO.{desk.subjects.task_stream}", body))["state"]
        found: Counter[str] = Counter()
        for subject, count in (state.get("subjects") or {}).items():
            address = desk.subjects.parse(subject)
            if isinstance(address, Task):
                found[address.role] += int(count)
        return found

    async def _oldest(self, role: str, settled: int) -> int | None:
        """Time of the oldest record of a role that nobody settled, as far as the next few tell."""
        desk, position = self.desk, settled + 1
        for _ in range(8):
            record = await desk.js.following(desk.subjects.task_stream, desk.intake.subject_filter(role), position)
            if record is None:
                return None
            if desk.book.settled_as(record.seq, record.time_ns) is None:
                return record.time_ns
            position = record.seq + 1
        return None
