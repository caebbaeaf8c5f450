"""`ctl.task`: what workers and askers may say of tasks.

A worker claims, beats, and says how it ended; an asker asks what became of its task. Whoever has nothing to do with a
task is told the same as if it did not exist. Claims and results may wait up to 20 seconds and are always answered.
"""

from __future__ import annotations

import base64
import binascii
import time
from dataclasses import dataclass
from typing import Any

from tidings.errors import BadSignature, ConflictError, DeniedError, MalformedMessage, UsageError
from tidings.model.task_rules import EndedTask, TaskState, is_overdue
from tidings.steward.context import SpaceContext
from tidings.steward.history import encoded
from tidings.steward.linked_people import LinkedPeople
from tidings.steward.requests import Answer, ControlRequest, handles
from tidings.steward.roster import RosterTable
from tidings.steward.tasks import TaskQueues
from tidings.wire import message as wire
from tidings.wire.message import is_message_id
from tidings.wire.names import check_role, check_role_address, role_parts
from tidings.wire.operations import TASK_WAIT
from tidings.wire.records import moment
from tidings.wire.signing import verifies
from tidings.wire.states import TaskCause, TaskStatus


@dataclass(frozen=True, slots=True)
class TaskHandlers:
    space: SpaceContext
    tasks: TaskQueues
    roster: RosterTable
    #: since when the steward listens
    started: float
    people: LinkedPeople

    @handles("task", "claim")
    async def claim(self, request: ControlRequest) -> Answer:
        role, seconds, session = check_role(request.text("role")), _wait(request), request.optional("session", str)
        access = self.space.access_of(request.sender)
        if role not in access.roles:
            raise DeniedError(
                f"{access.name} does not hold the role {role}, so it may not take its tasks; "
                f"its roles are {', '.join(access.roles) or 'none'}"
            )
        tasks = self.tasks
        async with tasks.parked(request.sender, seconds) as allowed:
            task = await tasks.handout.claim(request.sender, session, role, allowed)
        if task is None:
            return {"task": None}
        record = await tasks.intake.record_of(task)
        if record is None:
            raise ConflictError(f"task {task.seq} is gone; claim again")
        return {
            "task": encoded(record),
            "role": task.role,
            "attempt": task.attempt,
            "deadline": moment(task.deadline),
            "claimed_at": moment(task.claimed_at),
            "beat_every": self.space.intervals.task_silence / 6,
        }

    @handles("task", "beat")
    async def beat(self, request: ControlRequest) -> Answer:
        self.space.access_of(request.sender)
        task = await self.tasks.holds.beat(request.sender, task_seq(request), request.optional("session", str))
        return {"state": TaskStatus.HELD, "attempt": task.attempt, "deadline": moment(task.deadline)}

    @handles("task", "done")
    async def done(self, request: ControlRequest) -> Answer:
        """A signed result; repeating it gives the same answer."""
        self.space.access_of(request.sender)
        holds, seq, session = self.tasks.holds, task_seq(request), request.optional("session", str)
        try:
            payload = base64.b64decode(request.text("result"), validate=True)
        except (binascii.Error, ValueError) as error:
            raise UsageError("task done: `result` is base64") from error
        async with holds.lock:
            outcome = holds.done_before(request.sender, seq, session)
            if outcome is None:
                task = holds.held(request.sender, seq, session)
                self._check_result(task, request.sender, payload, request.text("sig"))
                if is_overdue(task, time.time()):
                    await holds.bury(task, TaskCause.DEADLINE, "its result came after its deadline")
                    raise ConflictError(f"this agent lost task {seq}: its deadline has passed")
                outcome = await holds.finish(task, payload, request.text("sig"))
        return {"state": TaskStatus.DONE, "record": outcome.record}

    def _check_result(self, task: TaskState, worker: str, payload: bytes, signature: str) -> None:
        if not verifies(signature, self.space.info.id, "result", worker, f"{task.asker}.{task.id}", payload):
            raise BadSignature(f"the result of task {task.seq} is not signed by its worker for its asker and task")
        message = wire.decode(payload)
        if message.sender.id != worker:
            raise MalformedMessage(f"the result of task {task.seq} claims to be from {message.sender.id}")

    @handles("task", "fail")
    async def fail(self, request: ControlRequest) -> Answer:
        self.space.access_of(request.sender)
        holds, seq, reason = self.tasks.holds, task_seq(request), request.text("reason")
        retry = request.optional("retry", bool)
        async with holds.lock:
            known = holds.book.open.get(seq) or holds.book.outcomes.get(seq)
            if known is not None and known.ended_by == request.op:
                outcome = known if isinstance(known, EndedTask) else None
            else:
                task = holds.held(request.sender, seq, request.optional("session", str))
                if request.optional("untouched", bool):
                    await holds.put_back(task, request.op)
                    outcome = None
                elif retry is False:
                    outcome = await holds.bury(task, TaskCause.FAILED, reason, op=request.op)
                else:
                    outcome = await holds.give_back(
                        task, reason, request.op, pause=self.space.intervals.task_backoff, cause=TaskCause.FAILED
                    )
        if outcome is not None:
            return {"state": outcome.state, "cause": outcome.cause}
        return {"state": TaskStatus.QUEUED}

    @handles("task", "check")
    async def check(self, request: ControlRequest) -> Answer:
        """How many agents hold a role, how many of them are here, and when one was last seen.

        `online` is None while the steward is too young to know: those who are here have not all beaten yet.
        """
        self.space.access_of(request.sender)
        role = check_role(request.text("role"))
        holders = [owner for owner in self.space.table.owners() if self.space.holds_role(owner, role)]
        rows = [row for owner in holders if (row := self.roster.row(owner)) is not None]
        online = sum(row.status != "offline" for row in rows)
        knows = online > 0 or time.time() - self.started > self.space.intervals.presence
        seen = max((row.last_seen for row in rows if row.last_seen is not None), default=None)
        return {"holders": len(rows), "online": online if knows else None, "last_seen": seen}

    @handles("task", "room")
    async def room(self, request: ControlRequest) -> Answer:
        """Make room for an asker whose share of a queue is full of what ended."""
        self.space.access_of(request.sender)
        role = check_role_address(request.text("role"))
        return {"made": await self.tasks.upkeep.make_room(request.sender, role)}

    @handles("task", "result")
    async def result(self, request: ControlRequest) -> Answer:
        """What became of a task, for whoever asked it, with its key of now or one before a rotation (`asker`)."""
        self.space.access_of(request.sender)
        message_id, seq, seconds = request.text("id"), request.optional("seq", int), _wait(request)
        if not is_message_id(message_id) or (seq is not None and seq < 1):
            raise UsageError("task result needs `id`, the id of a task of yours")
        tasks = self.tasks
        asker, found = await tasks.locate(request.sender, message_id, seq)
        until = time.monotonic() + seconds
        if not _is_final(found) and seconds:
            async with tasks.parked(request.sender, seconds) as allowed:
                until = min(until, time.monotonic() + allowed)
                while not _is_final(found) and (left := until - time.monotonic()) > 0:
                    # one the book has not is looked up again now and then: it may be gone
                    await tasks.holds.wait_for_change(
                        asker, message_id, left if not isinstance(found, str) else min(left, 2)
                    )
                    if tasks.holds.closed:
                        break
                    found = await tasks.find(asker, message_id, seq)
        return {**await self._told(found), "asker": asker}

    async def _told(self, found: TaskState | EndedTask | str) -> Answer:
        if isinstance(found, str):
            return {"state": found}
        facts: dict[str, Any] = {
            "seq": found.seq,
            "attempt": found.attempt,
            "reasons": list(found.reasons),
            "worker": found.worker,
            "worker_name": self._name_of(found.worker),
        }
        if space := role_parts(found.role)[1]:
            facts["space"] = space
        if isinstance(found, TaskState):
            return {**facts, "state": TaskStatus.CLAIMED if found.worker else TaskStatus.QUEUED}
        if found.state != TaskStatus.DONE:
            return {**facts, "state": found.state, "cause": found.cause}
        kept = await self.tasks.holds.records.result_of(found)
        if kept is None:
            return {**facts, "state": TaskStatus.GONE}
        payload, signature = kept
        return {**facts, "state": TaskStatus.DONE, "result": base64.b64encode(payload).decode(), "sig": signature}

    def _name_of(self, worker: str | None) -> str | None:
        other = self.people.find(worker) if worker is not None else None
        return other.row.name if other is not None else self.space.name_of(worker)


def _wait(request: ControlRequest) -> float:
    value = request.arguments.get("wait", 0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= TASK_WAIT:
        raise UsageError(f"{request.service} {request.do}: `wait` is 0 to {TASK_WAIT:.0f} seconds")
    return float(value)


def task_seq(request: ControlRequest) -> int:
    seq = request.optional("seq", int)
    if seq is None or seq < 1:
        raise UsageError(f"{request.service} {request.do} needs `seq`, the number of a task")
    return int(seq)


def _is_final(found: TaskState | EndedTask | str) -> bool:
    return isinstance(found, EndedTask) or found in (TaskStatus.GONE, TaskStatus.UNKNOWN)
