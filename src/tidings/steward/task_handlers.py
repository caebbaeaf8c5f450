"""`ctl.task`: what workers and askers may say of tasks.

A worker claims, beats, and says how it ended; an asker asks what became of its task. Whoever has nothing to do with a
task is told the same as if it did not exist. Claims and results may wait up to 20 seconds and are always answered.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tidings.contract.core import Caller
from tidings.contract.tasks import (
    ClaimAnswer,
    ClaimRequest,
    RoleAnswer,
    RoleRequest,
    TaskBeatAnswer,
    TaskBeatRequest,
    TaskDoneAnswer,
    TaskDoneRequest,
    TaskFailAnswer,
    TaskFailRequest,
    TaskResultAnswer,
    TaskResultRequest,
    TaskRoomAnswer,
    TaskRoomRequest,
)
from tidings.errors import BadSignature, ConflictError, DeniedError, MalformedMessage, UsageError
from tidings.model.task_rules import EndedTask, TaskState, is_overdue
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext
from tidings.steward.history import raw_record
from tidings.steward.linked_people import LinkedPeople
from tidings.steward.roster import RosterTable
from tidings.steward.tasks import TaskQueues
from tidings.wire import message as wire
from tidings.wire.message import is_message_id
from tidings.wire.names import check_role, check_role_address, role_parts
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

    @handler(ClaimRequest)
    async def claim(self, caller: Caller, request: ClaimRequest) -> ClaimAnswer:
        role = check_role(request.role)
        access = self.space.access_of(caller.id)
        if role not in access.roles:
            raise DeniedError(
                f"{access.name} does not hold the role {role}, so it may not take its tasks; "
                f"its roles are {', '.join(access.roles) or 'none'}"
            )
        tasks = self.tasks
        async with tasks.parked(caller.id, request.wait) as allowed:
            task = await tasks.handout.claim(caller.id, request.session, role, allowed)
        if task is None:
            return ClaimAnswer(None)
        record = await tasks.intake.record_of(task)
        if record is None:
            raise ConflictError(f"task {task.seq} is gone; claim again")
        return ClaimAnswer(
            task=raw_record(record),
            role=task.role,
            attempt=task.attempt,
            deadline=moment(task.deadline),
            claimed_at=moment(task.claimed_at),
            beat_every=self.space.intervals.task_silence / 6,
        )

    @handler(TaskBeatRequest)
    async def beat(self, caller: Caller, request: TaskBeatRequest) -> TaskBeatAnswer:
        self.space.access_of(caller.id)
        task = await self.tasks.holds.beat(caller.id, request.seq, request.session)
        return TaskBeatAnswer(TaskStatus.HELD, task.attempt, moment(task.deadline))

    @handler(TaskDoneRequest)
    async def done(self, caller: Caller, request: TaskDoneRequest) -> TaskDoneAnswer:
        self.space.access_of(caller.id)
        holds, seq, session = self.tasks.holds, request.seq, request.session
        async with holds.lock:
            outcome = holds.done_before(caller.id, seq, session)
            if outcome is None:
                task = holds.held(caller.id, seq, session)
                self._check_result(task, caller.id, request.result, request.sig)
                if is_overdue(task, time.time()):
                    await holds.bury(task, TaskCause.DEADLINE, "its result came after its deadline")
                    raise ConflictError(f"this agent lost task {seq}: its deadline has passed")
                outcome = await holds.finish(task, request.result, request.sig)
        return TaskDoneAnswer(TaskStatus.DONE, outcome.record)

    def _check_result(self, task: TaskState, worker: str, payload: bytes, signature: str) -> None:
        if not verifies(signature, self.space.info.id, "result", worker, f"{task.asker}.{task.id}", payload):
            raise BadSignature(f"the result of task {task.seq} is not signed by its worker for its asker and task")
        message = wire.decode(payload)
        if message.sender.id != worker:
            raise MalformedMessage(f"the result of task {task.seq} claims to be from {message.sender.id}")

    @handler(TaskFailRequest)
    async def fail(self, caller: Caller, request: TaskFailRequest) -> TaskFailAnswer:
        self.space.access_of(caller.id)
        holds, seq, reason, op = self.tasks.holds, request.seq, request.reason, caller.op
        async with holds.lock:
            known = holds.book.open.get(seq) or holds.book.outcomes.get(seq)
            if known is not None and known.ended_by == op:
                outcome = known if isinstance(known, EndedTask) else None
            else:
                task = holds.held(caller.id, seq, request.session)
                if request.untouched:
                    await holds.put_back(task, op)
                    outcome = None
                elif not request.retry:
                    outcome = await holds.bury(task, TaskCause.FAILED, reason, op=op)
                else:
                    outcome = await holds.give_back(
                        task, reason, op, pause=self.space.intervals.task_backoff, cause=TaskCause.FAILED
                    )
        if outcome is not None:
            return TaskFailAnswer(outcome.state, outcome.cause)
        return TaskFailAnswer(TaskStatus.QUEUED)

    @handler(RoleRequest)
    async def check(self, caller: Caller, request: RoleRequest) -> RoleAnswer:
        self.space.access_of(caller.id)
        role = check_role(request.role)
        holders = [owner for owner in self.space.table.owners() if self.space.holds_role(owner, role)]
        rows = [row for owner in holders if (row := self.roster.row(owner)) is not None]
        online = sum(row.status != "offline" for row in rows)
        knows = online > 0 or time.time() - self.started > self.space.intervals.presence
        seen = max((row.last_seen for row in rows if row.last_seen is not None), default=None)
        return RoleAnswer(len(rows), online if knows else None, seen)

    @handler(TaskRoomRequest)
    async def room(self, caller: Caller, request: TaskRoomRequest) -> TaskRoomAnswer:
        self.space.access_of(caller.id)
        role = check_role_address(request.role)
        return TaskRoomAnswer(await self.tasks.upkeep.make_room(caller.id, role))

    @handler(TaskResultRequest)
    async def result(self, caller: Caller, request: TaskResultRequest) -> TaskResultAnswer:
        """Answers the agent that asked the task, with its current key or one before a rotation (`asker`)."""
        self.space.access_of(caller.id)
        message_id, seq, seconds = request.id, request.seq, request.wait
        if not is_message_id(message_id):
            raise UsageError(f"task result: {message_id[:64]!r} is not a message id")
        tasks = self.tasks
        asker, found = await tasks.locate(caller.id, message_id, seq)
        until = time.monotonic() + seconds
        if not _is_final(found) and seconds:
            async with tasks.parked(caller.id, seconds) as allowed:
                until = min(until, time.monotonic() + allowed)
                while not _is_final(found) and (left := until - time.monotonic()) > 0:
                    # one the book has not is looked up again now and then: it may be gone
                    await tasks.holds.wait_for_change(
                        asker, message_id, left if not isinstance(found, str) else min(left, 2)
                    )
                    if tasks.holds.closed:
                        break
                    found = await tasks.find(asker, message_id, seq)
        return await self._describe(asker, found)

    async def _describe(self, asker: str, found: TaskState | EndedTask | str) -> TaskResultAnswer:
        if isinstance(found, str):
            return TaskResultAnswer(TaskStatus(found), asker)
        facts: dict[str, Any] = {
            "asker": asker,
            "seq": found.seq,
            "attempt": found.attempt,
            "reasons": found.reasons,
            "worker": found.worker,
            "worker_name": self._name_of(found.worker),
            "space": role_parts(found.role)[1],
        }
        if isinstance(found, TaskState):
            return TaskResultAnswer(TaskStatus.CLAIMED if found.worker else TaskStatus.QUEUED, **facts)
        if found.state != TaskStatus.DONE:
            return TaskResultAnswer(found.state, cause=found.cause, **facts)
        kept = await self.tasks.holds.records.result_of(found)
        if kept is None:
            return TaskResultAnswer(TaskStatus.GONE, **facts)
        payload, signature = kept
        return TaskResultAnswer(TaskStatus.DONE, result=payload, sig=signature, **facts)

    def _name_of(self, worker: str | None) -> str | None:
        other = self.people.find(worker) if worker is not None else None
        return other.row.name if other is not None else self.space.name_of(worker)


def _is_final(found: TaskState | EndedTask | str) -> bool:
    return isinstance(found, EndedTask) or found in (TaskStatus.GONE, TaskStatus.UNKNOWN)
