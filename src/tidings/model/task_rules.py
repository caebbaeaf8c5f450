"""The rules of a task, without I/O: who holds it, until when, and what follows when it is not finished.

    waiting --give--> held --(done)--> ended
       ^               |---(silent, or failed with another try)--> waiting
       |               `---(failed for good, or past its deadline)--> dead --(retry)--> waiting
       `--------------------------------------------------------------------------------'

A task has at most one holder and a worker at most one task; what ended as done never changes. The broker only
keeps tasks: who holds one, how often it was tried and why it failed is known here and written down before it is
acted on. Times are seconds since 1970, given by the caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from tidings.errors import ConflictError, DeniedError
from tidings.util.backoff import Backoff
from tidings.wire.message import ExtensionPart, Message
from tidings.wire.seal import TASK_PART
from tidings.wire.states import TaskStatus

MAX_ATTEMPTS = 5
DEFAULT_DEADLINE = 3_600.0
LONGEST_DEADLINE = 30 * 86_400.0
LONGEST_BACKOFF = 300.0
OUTCOMES_KEPT = 20_000
REASON_CHARACTERS = 300


class TaskState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One open task as the steward knows it; also the form in which it is written down."""

    seq: int
    #: time of the record: together with the sequence it names one record, even if the stream was made anew
    time_ns: int
    role: str
    asker: str
    id: str
    #: where to acknowledge it; None for one that came back from the dead letters, whose record is acknowledged
    ack: str | None = None
    #: the moment the asker set, if it did
    due: float | None = None
    worker: str | None = None
    session: str | None = None
    attempt: int = 0
    claimed_at: float = 0.0
    deadline: float = 0.0
    beat_at: float = 0.0
    not_before: float = 0.0
    reasons: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    #: the request that ended the last hold, so that a repeated one gets the same answer
    ended_by: str = ""
    #: sequence of the dead letter it was revived from
    revived_from: int = 0
    #: attempts before it was revived: a revived task has all its tries again
    attempts_before: int = 0
    #: who can open it, if it is sealed: it is handed to nobody else
    readers: tuple[str, ...] = ()

    def fits(self, worker: str) -> bool:
        return not self.readers or worker in self.readers

    @property
    def tries(self) -> int:
        return self.attempt - self.attempts_before


class EndedTask(Struct, frozen=True, kw_only=True):
    """What became of a task. `record` is its sequence in AUD (done) or DEAD, `size` the bytes it takes there."""

    seq: int
    time_ns: int
    role: str
    asker: str
    id: str
    state: TaskStatus
    record: int
    worker: str | None = None
    attempt: int = 0
    cause: str | None = None
    reasons: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    ended_by: str = ""
    at: float = 0.0
    #: when the last worker got it, and in which of its sessions
    claimed_at: float = 0.0
    session: str | None = None
    size: int = 0


def give(task: TaskState, worker: str, session: str | None, now: float) -> TaskState:
    """Hand a waiting task to a worker."""
    assert task.worker is None, "a task has one holder"
    limit = now + DEFAULT_DEADLINE if task.due is None else task.due
    workers = task.workers if worker in task.workers else (*task.workers, worker)[-32:]
    return msgspec.structs.replace(
        task,
        worker=worker,
        session=session,
        attempt=task.attempt + 1,
        claimed_at=now,
        beat_at=now,
        deadline=limit,
        workers=workers,
        ended_by="",
    )


def take_back(task: TaskState, reason: str, now: float, *, pause: float = 0.0, op: str = "") -> TaskState | None:
    """End a hold that did not finish the task: it waits again, or None when it was tried often enough."""
    assert task.worker is not None, "only a held task is taken back"
    if task.tries >= MAX_ATTEMPTS:
        return None
    wait = Backoff(pause, LONGEST_BACKOFF, jitter=0).delay(task.tries, 0.5)
    return msgspec.structs.replace(
        with_reason(task, reason), worker=None, session=None, deadline=0.0, not_before=now + wait, ended_by=op
    )


def put_back(task: TaskState, op: str) -> TaskState:
    """End a hold in which nobody worked on the task: it waits as before, and no attempt was made."""
    assert task.worker is not None, "only a held task is put back"
    before = {"attempt": task.attempt - 1, "not_before": 0.0, "ended_by": op}
    return msgspec.structs.replace(task, worker=None, session=None, deadline=0.0, **before)


def with_reason(task: TaskState, reason: str) -> TaskState:
    told = (*task.reasons, f"attempt {task.attempt}: {reason}"[:REASON_CHARACTERS])
    return msgspec.structs.replace(task, reasons=told[-8:])


def is_silent(task: TaskState, now: float, silence: float) -> bool:
    return task.worker is not None and now - task.beat_at > silence


def is_overdue(task: TaskState, now: float) -> bool:
    """Past the hold's deadline, or past the asker's while nobody holds it."""
    limit = task.deadline if task.worker is not None else task.due
    return limit is not None and now > limit


def asked_deadline(message: Message, time_ns: int) -> float | None:
    """The moment the asker set in its signed message: seconds after it was stored at `time_ns`."""
    for part in message.parts:
        if isinstance(part, ExtensionPart) and part.kind == TASK_PART:
            seconds: Any = part.body.get("deadline_s")
            if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= LONGEST_DEADLINE:
                return time_ns / 1e9 + seconds
    return None


class TaskBook:
    """Every open task that was seen, and what became of the newest others."""

    def __init__(self) -> None:
        self.open: dict[int, TaskState] = {}
        self.outcomes: OrderedDict[int, EndedTask] = OrderedDict()
        self._held: dict[str, int] = {}
        self._by_id: dict[tuple[str, str], int] = {}

    # --- reading ---

    def held_by(self, worker: str) -> TaskState | None:
        seq = self._held.get(worker)
        return self.open[seq] if seq is not None else None

    def ready(self, role: str, now: float) -> list[TaskState]:
        """The waiting tasks that are not in a pause, oldest first: whom they fit gets one."""
        return sorted((task for task in self._waiting(role) if task.not_before <= now), key=lambda task: task.seq)

    def next_pause_ends(self, role: str, now: float) -> float | None:
        return min((task.not_before for task in self._waiting(role) if task.not_before > now), default=None)

    def _waiting(self, role: str) -> Iterator[TaskState]:
        return (task for task in self.open.values() if task.role == role and task.worker is None)

    def find(self, asker: str, message_id: str) -> TaskState | EndedTask | None:
        seq = self._by_id.get((asker, message_id))
        if seq is None:
            return None
        return self.open.get(seq) or self.outcomes.get(seq)

    def dead_of(self, asker: str) -> list[EndedTask]:
        """The dead letters of an asker that are not tried again now, oldest first."""
        mine = (each for each in self.outcomes.values() if each.asker == asker and each.state == TaskStatus.DEAD)
        return [each for each in mine if each.seq not in self.open]

    def revived_of(self, asker: str) -> list[EndedTask]:
        """Its dead letters that are tried again now: they are kept until that has an end."""
        mine = (each for each in self.outcomes.values() if each.asker == asker and each.state == TaskStatus.DEAD)
        return [each for each in mine if each.seq in self.open]

    def outcome_of(self, seq: int, time_ns: int) -> EndedTask | None:
        """What became of exactly this record."""
        found = self.outcomes.get(seq)
        return found if found is not None and found.time_ns == time_ns and seq not in self.open else None

    def require(self, seq: int, worker: str) -> TaskState:
        """The task a worker holds, or why it does not hold it. Strangers learn nothing."""
        task = self.open.get(seq)
        if task is not None and task.worker == worker:
            return task
        known = task or self.outcomes.get(seq)
        if known is None or worker not in known.workers:
            raise DeniedError(f"this agent holds no task {seq}: tasks are claimed first")
        if isinstance(known, EndedTask):
            by = f" by {known.worker}" if known.state == TaskStatus.DONE else f" ({known.cause})"
            raise ConflictError(f"this agent lost task {seq}: it is {known.state}{by}")
        if known.worker is None:
            raise ConflictError(f"this agent lost task {seq}: it waits for the next worker ({_last(known.reasons)})")
        raise ConflictError(f"this agent lost task {seq}: it was given to {known.worker} ({_last(known.reasons)})")

    # --- changing ---

    def put(self, task: TaskState) -> None:
        before = self.open.get(task.seq)
        if before is not None and before.worker is not None:
            self._held.pop(before.worker, None)
        if task.worker is not None:
            assert task.worker not in self._held, "a worker holds one task"
            self._held[task.worker] = task.seq
        self.open[task.seq] = task
        self._by_id[task.asker, task.id] = task.seq

    def end(self, outcome: EndedTask) -> None:
        """Final for what was done; a dead letter may be revived by putting the task again."""
        before = self.outcomes.get(outcome.seq)
        assert before is None or before.time_ns != outcome.time_ns or before.state != TaskStatus.DONE, "done is final"
        task = self.open.pop(outcome.seq, None)
        if task is not None and task.worker is not None:
            self._held.pop(task.worker, None)
        self.outcomes[outcome.seq] = outcome
        self.outcomes.move_to_end(outcome.seq)
        self._by_id[outcome.asker, outcome.id] = outcome.seq
        while len(self.outcomes) > OUTCOMES_KEPT:
            _, old = self.outcomes.popitem(last=False)
            if self._by_id.get((old.asker, old.id)) == old.seq:
                del self._by_id[old.asker, old.id]

    def drop(self, seq: int) -> None:
        """A dead letter is no longer kept; that there was one is, so that its task is not handed out again."""
        self.outcomes[seq] = msgspec.structs.replace(self.outcomes[seq], state=TaskStatus.DROPPED)

    def dead_below(self, record: int) -> list[EndedTask]:
        """The dead letters that lie below a sequence of their stream and are not tried again now."""
        dead = (each for each in self.outcomes.values() if each.state == TaskStatus.DEAD and each.record < record)
        return [each for each in dead if each.seq not in self.open]

    def drop_below(self, record: int) -> None:
        """Drop the dead letters that lay below a sequence of their stream."""
        for each in self.dead_below(record):
            self.drop(each.seq)


def _last(reasons: tuple[str, ...]) -> str:
    return reasons[-1] if reasons else "no reason was given"
