"""Tasks on the way over a link, and how far they are there, as JSON carries them; pure.

A task for `reviewer@acme` lies in the queue of its asker's space, signed for the role and the space it is for, and
sealed for those who hold that role (`task_seal.py`). The worker of acme fetches it, and tells how far it is for as long
as it has no end. What comes from another space may be anything: what cannot be read is `MalformedRecord`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from tidings.errors import InvalidName, MalformedMessage, MalformedRecord
from tidings.wire import message as wire_message
from tidings.wire.headers import Fields, values_of
from tidings.wire.ids import is_message_id
from tidings.wire.message import MAX_PAYLOAD, Message
from tidings.wire.names import check_agent_id, check_role, role_elsewhere
from tidings.wire.operations import MOST
from tidings.wire.signing import verifies
from tidings.wire.states import TaskStatus
from tidings.wire.task_seal import is_sealed_task, readers_of

#: tasks of one answer or request
TASKS_PER_PAGE: Final = 16
#: milliseconds for which a task was in its asker's space before: its deadline counts from when it was asked
AGE_HEADER: Final = "Td-Age"
#: a result is told in parts: a worker says no more at once to another space, and a result has at most so many
PART_BYTES, MOST_PARTS = 32 * 1024, 8
#: how far the space of the role may say that a task is
TOLD_STATES: Final = (TaskStatus.QUEUED, TaskStatus.CLAIMED, TaskStatus.DONE, TaskStatus.DEAD)
#: a deadline is at most 30 days
_Age = Annotated[int, msgspec.Meta(ge=0, le=31 * 86_400_000)]
_Seq = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
_Text = Annotated[str, msgspec.Meta(max_length=400)]


class LinkedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task as the space of its asker has it, at `seq` of its queue, for a role of the space that fetches it."""

    seq: _Seq
    sender: _Text
    role: _Text
    sig: _Text
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD)]
    #: milliseconds since it was stored, by the clock there
    age: _Age = 0

    def message(self, origin: str, here: str) -> Message:
        """Its message, signed in the space `origin` for this role of the space `here`, and sealed; MalformedRecord if
        it is not."""
        if not verifies(self.sig, origin, "task", self.sender, role_elsewhere(self.role, here), self.payload):
            raise MalformedRecord(f"task {self.seq} is not signed by {self.sender} for {self.role} of this space")
        try:
            found = wire_message.decode(self.payload)
            sealed = is_sealed_task(found) and bool(readers_of(found))
        except MalformedMessage as error:
            raise MalformedRecord(f"task {self.seq} is no message: {error}") from error
        if found.sender.id != self.sender or not sealed:
            raise MalformedRecord(f"task {self.seq} is not sealed, or says that it is by {found.sender.id}")
        return found


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    tasks: Annotated[tuple[LinkedTask, ...], msgspec.Meta(max_length=TASKS_PER_PAGE)]


class ToldTask(msgspec.Struct, frozen=True, kw_only=True):
    """How far a task is, as the space of its role tells the space of its asker."""

    sender: _Text
    id: _Text
    #: where it is in the queue of its asker's space
    seq: _Seq
    state: TaskStatus
    worker: _Text = ""
    attempt: _Count = 0
    #: of one that is dead
    cause: _Text = ""
    why: _Text = ""
    #: of one that is done: what its worker signed, or one part of it, of so many
    result: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES)] = b""
    part: Annotated[int, msgspec.Meta(ge=0, lt=MOST_PARTS)] = 0
    parts: Annotated[int, msgspec.Meta(ge=1, le=MOST_PARTS)] = 1
    sig: _Text = ""


_Told = Annotated[list[ToldTask], msgspec.Meta(max_length=TASKS_PER_PAGE)]


def read_tasks(said: Any) -> tuple[LinkedTask, ...]:
    """The tasks in an answer of another space."""
    try:
        page = msgspec.convert(said, TaskPage)
        for each in page.tasks:
            check_agent_id(each.sender)
            check_role(each.role)
    except (msgspec.ValidationError, InvalidName) as error:
        raise MalformedRecord(f"these are no tasks: {str(error)[:200]}") from error
    return page.tasks


def read_told_tasks(said: Any) -> list[ToldTask]:
    """How far another space says that tasks are; MalformedRecord if it cannot be read."""
    try:
        found: list[ToldTask] = msgspec.convert(said, _Told)
        for each in found:
            check_agent_id(each.sender)
            if each.worker:
                check_agent_id(each.worker)
    except (msgspec.ValidationError, InvalidName) as error:
        raise MalformedRecord(f"this does not say how far tasks are: {str(error)[:200]}") from error
    if any(each.state not in TOLD_STATES or not is_message_id(each.id) or each.part >= each.parts for each in found):
        raise MalformedRecord(f"a task of a link has an id, and is one of {', '.join(TOLD_STATES)}")
    return found


def read_age(fields: Fields) -> int:
    """Milliseconds that a task which came over a link was underway before it was stored here; 0 if it does not say."""
    said = values_of(fields, AGE_HEADER)
    return int(said[0]) if len(said) == 1 and said[0].isascii() and said[0].isdigit() and len(said[0]) < 13 else 0
