"""Operations on tasks: workers claim and finish them, askers read their state and result."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from tidings.contract.channels import RawRecord
from tidings.contract.core import Answer, Request, operation
from tidings.wire.states import TaskStatus

#: seconds for which a claim or a request for a result may wait
TASK_WAIT = 20.0

TaskSequence = Annotated[int, Meta(ge=1, le=2**53 - 1)]
Wait = Annotated[float, Meta(ge=0, le=TASK_WAIT)]


# --- working ---


class ClaimAnswer(Answer):
    """If no task came in time, `task` is null and the other fields are missing. `beat_every`: seconds between beats."""

    task: RawRecord | None
    role: str = ""
    attempt: int = 0
    deadline: str = ""
    claimed_at: str = ""
    beat_every: float = 0.0


@operation("task claim", waits=TASK_WAIT)
class ClaimRequest(Request[ClaimAnswer]):
    """Take a task of a role, or wait for one. A session that claims again gets the task it holds."""

    role: str
    wait: Wait = 0.0
    session: str | None = None


class TaskBeatAnswer(Answer):
    state: TaskStatus
    attempt: int
    deadline: str


@operation("task beat")
class TaskBeatRequest(Request[TaskBeatAnswer]):
    """Keep a claimed task until the next beat is due."""

    seq: TaskSequence
    session: str | None = None


class TaskDoneAnswer(Answer):
    """`record`: the sequence of the stored result."""

    state: TaskStatus
    record: int


@operation("task done")
class TaskDoneRequest(Request[TaskDoneAnswer]):
    """Finish a claimed task with a signed result. Repeating it returns the same answer."""

    seq: TaskSequence
    result: bytes
    sig: str
    session: str | None = None


class TaskFailAnswer(Answer):
    """`state` is `queued` or `dead`; `cause` is present if the task is a dead letter."""

    state: TaskStatus
    cause: str | None = None


@operation("task fail")
class TaskFailRequest(Request[TaskFailAnswer]):
    """Give a claimed task back. `retry` false makes it a dead letter; `untouched`: the attempt does not count."""

    seq: TaskSequence
    reason: Annotated[str, Meta(min_length=1)]
    session: str | None = None
    retry: bool = True
    untouched: bool = False


# --- asking ---


class RoleAnswer(Answer):
    """`online` is null while the steward has not run long enough to know."""

    holders: int
    online: int | None
    last_seen: str | None


@operation("task check", host=True, changes=False)
class RoleRequest(Request[RoleAnswer]):
    """Count the agents that hold a role, and those of them that are online."""

    role: str


class TaskRoomAnswer(Answer):
    """`made`: the number of ended tasks that were removed."""

    made: int


@operation("task room", host=True)
class TaskRoomRequest(Request[TaskRoomAnswer]):
    """Remove ended tasks of this agent from the full queue of a role."""

    role: str


class TaskResultAnswer(Answer):
    """`asker` is this agent's id when it asked. `space`: the id of the role's space if it is a linked one. The steward
    omits fields that it does not know."""

    state: TaskStatus
    asker: str
    seq: int = 0
    attempt: int | None = None
    reasons: tuple[str, ...] | None = None
    worker: str | UnsetType | None = UNSET
    worker_name: str | UnsetType | None = UNSET
    space: str = ""
    cause: str | None = None
    result: bytes | None = None
    sig: str = ""


@operation("task result", waits=TASK_WAIT, changes=False)
class TaskResultRequest(Request[TaskResultAnswer]):
    """Return the state and result of a task that this agent asked, or wait until it ends."""

    id: str
    seq: TaskSequence | None = None
    wait: Wait = 0.0
