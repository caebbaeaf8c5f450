"""Tasks for roles of linked spaces, and of linked spaces for roles here.

    ours for them   `link tasks`: what waits here for roles of the asking space; `link progress`: how far that is there
    theirs for us   `admission tasks`: may our worker queue these here? It publishes them itself, as they were signed;
                    `admission progress`: how far they are, with the result once there is one

Nobody remembers a place in a queue: what has no end and of which the other space has not spoken lately is handed out
again, and that space knows what it has. So whoever dies or is put back, both agree again with the next question. A task
has its end in the space of its role, where it is claimed; that end is written here when it is told, and from then on
the task is like any other. Its deadline is its asker's, and ends it here whatever the other space does.
"""

from __future__ import annotations

import base64
import random
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import msgspec

from tidings.broker.jetstream import StoredRecord
from tidings.errors import ConflictError, DeniedError, MalformedMessage, UsageError
from tidings.nats.errors import NatsError
from tidings.steward.context import SpaceContext
from tidings.steward.fair_queue import ConcurrencyLimit
from tidings.steward.link_handlers import GrantedLink, LinkHandlers
from tidings.steward.link_records import links_in_force, links_on
from tidings.steward.linked_people import LinkedPeople
from tidings.steward.requests import Answer, ControlRequest, handles
from tidings.steward.task_rules import EndedTask, TaskState, is_overdue
from tidings.steward.tasks import TaskQueues
from tidings.wire import message as wire
from tidings.wire.envelope import Refused
from tidings.wire.ids import is_message_id
from tidings.wire.link_tasks import TASKS_PER_PAGE, LinkedTask, ToldTask, read_told_tasks
from tidings.wire.names import check_agent_id, check_role, role_parts
from tidings.wire.signing import verifies
from tidings.wire.states import TaskCause, TaskStatus
from tidings.wire.subjects import Task
from tidings.wire.task_seal import is_sealed_task

#: bytes of an answer with tasks or results; one may be larger
PAGE_BYTES = 256 * 1024
#: tasks of one asker for one role in an answer, so that others come too; and queues that are looked at for it
EACH, QUEUES = 4, 64
#: records of such a queue that are looked at: those that ended stay for a while
LOOKED_AT = 200
#: questions that are answered at the same time: of one link, and of all
OF_LINK, AT_ONCE = 1, 2
#: seconds after the last word of the other space on a task, after which it is handed out again
SILENCE = 60.0
#: results of which only a part came yet
MOST_PARTIAL = 64
#: characters of what another space says
WORDS = 200
UNLINKED = "there is no link with its space any more; whether anybody there worked on it is not known"


class _OfferedTask(msgspec.Struct, frozen=True):
    sender: str
    id: str
    role: str = ""


class LinkTasks:
    def __init__(self, space: SpaceContext, linked: LinkHandlers, people: LinkedPeople, tasks: TaskQueues) -> None:
        self.space, self.linked, self.people, self.tasks = space, linked, people, tasks
        self.stream = space.subjects.task_stream
        self.turns = ConcurrencyLimit(AT_ONCE, OF_LINK, "tasks of this link are being handed out already: wait for it")
        #: (asker, id) of tasks that are in another space -> when that spoke of them
        self._spoken: dict[tuple[str, str], float] = {}
        #: results that are told in parts: by asker, task and worker, those that came
        self._parts: OrderedDict[tuple[str, str, str], dict[int, bytes]] = OrderedDict()
        #: where the queues ended at the last look, and which spaces were linked
        self._looked: tuple[int, frozenset[str]] | None = None

    def _granted(self, request: ControlRequest) -> GrantedLink:
        granted = self.linked.granted(request.sender)
        if not granted.record.passes_tasks:
            raise DeniedError(f"link {granted.link} passes no tasks")
        return granted

    # --- ours for them ---

    @handles("link", "tasks")
    async def handed_out(self, request: ControlRequest) -> Answer:
        """Tasks for roles of the asking space, as many as it has `room` for, of each asker a few; of those in `without`
        none. What that space told of lately is left out."""
        room = min(TASKS_PER_PAGE, request.optional("room", int) or 0)
        without = frozenset(request.texts("without"))
        granted = self._granted(request)
        async with self.turns.turn(granted.link):
            found, more = await self._waiting(granted.record.origin, room, without)
            if self._granted(request).link != granted.link:
                raise ConflictError("the link changed while tasks were looked for: ask again")
        return {"tasks": [msgspec.to_builtins(each) for each in found], "more": more}

    async def _waiting(self, origin: str, room: int, without: frozenset[str]) -> tuple[list[LinkedTask], bool]:
        wanted = await self._queues() if room > 0 else []
        queues = [each for each in wanted if role_parts(each.role)[1] == origin and each.sender not in without]
        random.shuffle(queues)  # nobody's is always the last
        head = await self.space.head(self.stream)
        found: list[LinkedTask] = []
        size = 0
        for queue in queues[:QUEUES]:
            for task in await self._of_queue(queue, head):
                size += len(task.payload)
                if found and (size > PAGE_BYTES or len(found) == room):
                    return sorted(found, key=lambda each: each.seq), True
                found.append(task)
        return sorted(found, key=lambda each: each.seq), len(queues) > QUEUES

    async def _queues(self) -> list[Task]:
        """Which roles of other spaces were asked by whom."""
        s = self.space.subjects
        parsed = (s.parse(each) for each in await self.space.js.subjects_of(self.stream, f"{s.root}.task.>"))
        return [each for each in parsed if isinstance(each, Task) and role_parts(each.role)[1]]

    async def _of_queue(self, queue: Task, head: int) -> list[LinkedTask]:
        found: list[LinkedTask] = []
        subject = self.space.subjects.task(queue.role, queue.sender)
        looked = 0
        async for page in self.space.js.read(self.stream, subject, 1, head, page=LOOKED_AT):
            for record in page:
                looked += 1
                if (task := await self._open_task(record)) is not None:
                    found.append(task)
                if len(found) == EACH or looked >= LOOKED_AT:
                    return found
        return found

    async def _open_task(self, record: StoredRecord) -> LinkedTask | None:
        """A record that is a task without an end, of which the other space has not spoken lately."""
        holds = self.tasks.holds
        if holds.book.outcome_of(record.seq, record.time_ns) is not None:
            return None
        task, refused = holds.read(record, None)
        opened = self.space.open(record)
        if refused is None and not isinstance(opened, Refused) and not is_sealed_task(opened.message):
            refused = Refused("malformed", "a task for another space is sealed, and this one is not")
        if refused is not None or isinstance(opened, Refused):
            await self._bury(task, record, TaskCause.MALFORMED, refused.detail if refused else "it cannot be read")
            return None
        if self.space.active_access(task.asker) is None:
            await self._bury(task, record, TaskCause.FAILED, "its asker was revoked")
            return None
        spoken = self._spoken.get((task.asker, task.id), 0.0)
        if is_overdue(task, time.time()) or (spoken and time.monotonic() - spoken < SILENCE):
            return None
        age = max(0, time.time_ns() - record.time_ns) // 1_000_000
        role = role_parts(task.role)[0]
        return LinkedTask(
            seq=record.seq, sender=task.asker, role=role, sig=opened.signature, payload=record.payload, age=age
        )

    @handles("link", "progress")
    async def progress(self, request: ControlRequest) -> Answer:
        """How far tasks of ours are that the asking space has. It is believed about those for roles of its own, and of
        a result if an agent of it signed it."""
        granted, told = self._granted(request), read_told_tasks(request.arguments.get("tasks") or [])
        self._spoken = {key: at for key, at in self._spoken.items() if key in self.tasks.holds.abroad}
        refused, later = [], []
        for number, each in enumerate(told):
            verdict = await self._hear(granted, each)
            if verdict == "refused":
                refused.append(number)
            elif verdict == "later":
                later.append(number)
        return {"refused": refused, "later": later}

    async def _hear(self, granted: GrantedLink, told: ToldTask) -> str:
        holds = self.tasks.holds
        record = await self.space.js.at(self.stream, told.seq)
        parsed = self.space.subjects.parse(record.subject) if record is not None else None
        if record is None or not isinstance(parsed, Task):
            return "" if holds.book.find(told.sender, told.id) is not None else "refused"
        async with holds.lock:
            task, wrong = holds.read(record, None)
            ours = (task.asker, task.id) == (told.sender, told.id)
            if wrong is not None or not ours or role_parts(task.role)[1] != granted.record.origin:
                return "refused"
            if holds.book.outcome_of(record.seq, record.time_ns) is not None:
                return ""
            if told.worker and told.worker not in self.people.of_link(granted.link):
                return "later"  # an agent that its space has not stated yet
            whole = self._whole(told)
            return await self._write(granted, task, record, whole) if whole is not None else "later"

    def _whole(self, told: ToldTask) -> ToldTask | None:
        """With the whole result; None while parts of it are missing. What is not complete is told again."""
        if told.parts == 1:
            return told
        key = (told.sender, told.id, told.worker)
        found = self._parts.setdefault(key, {})
        found[told.part] = told.result
        self._parts.move_to_end(key)
        while len(self._parts) > MOST_PARTIAL:
            self._parts.popitem(last=False)
        if found.keys() != set(range(told.parts)):
            return None
        del self._parts[key]
        return msgspec.structs.replace(told, result=b"".join(found[number] for number in range(told.parts)))

    async def _write(self, granted: GrantedLink, task: TaskState, record: StoredRecord, told: ToldTask) -> str:
        holds, origin = self.tasks.holds, granted.record.origin
        known = msgspec.structs.replace(task, worker=told.worker or None, attempt=told.attempt)
        if told.state is TaskStatus.DONE:
            if not _is_result(told, origin):
                return "refused"
            held = msgspec.structs.replace(known, workers=(told.worker,), claimed_at=time.time())
            await holds.finish(held, told.result, told.sig)
        elif told.state is TaskStatus.DEAD:
            cause = TaskCause(told.cause) if told.cause in TaskCause.__members__.values() else TaskCause.FAILED
            name = granted.record.space or granted.link
            await holds.bury(known, cause, f"{name}: {_line(told.why)}", record=record)
        else:
            before = holds.abroad.get((task.asker, task.id))
            holds.abroad[task.asker, task.id] = known
            self._spoken[task.asker, task.id] = time.monotonic()
            if before is None or before.worker != known.worker:
                holds.changed(known)
        return ""

    # --- theirs for us ---

    @handles("admission", "tasks")
    async def offered(self, request: ControlRequest) -> Answer:
        """May these be queued here? For each: `take`, `have` if it is here or was, `wait` if its sender is not known
        yet, or why it never may. `agreed` is the link record that they are to name."""
        link = request.text("link")
        on = next((each for each in links_on(self.space) if each[0] == link), None)
        if on is None or not on[2].passes_tasks:
            raise DeniedError(f"link {link} is not on, or passes no tasks")
        theirs = self.people.of_link(link)
        verdicts = [await self._verdict(link, theirs, each) for each in _offered(request)]
        return {"agreed": on[1], "verdicts": verdicts}

    async def _verdict(self, link: str, theirs: frozenset[str], task: _OfferedTask) -> str:
        other = self.people.find(task.sender)
        if self.space.access(task.sender) is not None or (other is not None and other.link != link):
            return "no: its asker is an agent of another space than it came from"
        if await self.tasks.find(task.sender, task.id, None) != TaskStatus.UNKNOWN:
            return "have"
        if not any(self.space.holds_role(owner, task.role) for owner in self.space.table.owners()):
            return f"no: nobody in {self.space.info.name} holds the role {task.role}"
        return "take" if task.sender in theirs else f"wait: its space has not stated that {task.sender} is its agent"

    @handles("admission", "progress")
    async def progress_here(self, request: ControlRequest) -> Answer:
        """How far tasks of other spaces are here, in order; `unknown` if the queue does not have one any more."""
        found: list[dict[str, Any]] = []
        size = 0
        for each in _offered(request):
            if self.space.access(each.sender) is not None:
                raise DeniedError(f"{each.sender} is an agent of this space: its tasks are its own")
            row = await self._state_of(await self.tasks.find(each.sender, each.id, None))
            size += len(row.get("result", ""))
            if found and size > PAGE_BYTES:
                break
            found.append(row)
        return {"tasks": found}

    async def _state_of(self, found: TaskState | EndedTask | str) -> dict[str, Any]:
        if isinstance(found, str):
            return {"state": found}
        facts: dict[str, Any] = {"worker": found.worker or "", "attempt": found.attempt}
        if isinstance(found, TaskState):
            return {**facts, "state": TaskStatus.CLAIMED if found.worker else TaskStatus.QUEUED}
        if found.state is TaskStatus.DONE:
            kept = await self.tasks.holds.records.result_of(found)
            if kept is not None:
                return {**facts, "state": found.state, "result": base64.b64encode(kept[0]).decode(), "sig": kept[1]}
            return {**facts, "state": TaskStatus.GONE}
        why = found.reasons[-1] if found.reasons else ""
        return {**facts, "state": TaskStatus.DEAD, "cause": found.cause or "", "why": _line(why)}

    # --- by itself ---

    async def run(self) -> None:
        """Wake the workers of linked spaces for whose roles something was queued since the last look, and bury what is
        for a space that there is no link with any more."""
        if next(links_in_force(self.space), None) is None:
            return  # there never was a link
        head = await self.space.head(self.stream)
        linked = frozenset(record.origin for _, _, record in links_in_force(self.space) if record.state == "on")
        if (head, linked) == self._looked:
            return
        wanted = await self._queues()
        for queue in wanted:
            if role_parts(queue.role)[1] not in linked:
                await self._bury_all(queue, head)
        self._looked = head, linked
        origins = {role_parts(each.role)[1] for each in wanted}
        for _, _, record in links_on(self.space):
            if record.origin in origins and record.passes_tasks and record.peer:
                with suppress(NatsError, OSError):  # it is found by asking, too
                    await self.space.js.connection.publish(self.space.subjects.live_link(record.peer))

    async def _bury_all(self, queue: Task, head: int) -> None:
        holds, subject = self.tasks.holds, self.space.subjects.task(queue.role, queue.sender)
        async for page in self.space.js.read(self.stream, subject, 1, head):
            for record in page:
                task, _ = holds.read(record, None)
                await self._bury(task, record, TaskCause.FAILED, UNLINKED)

    async def _bury(self, task: TaskState, record: StoredRecord, cause: TaskCause, why: str) -> None:
        async with self.tasks.holds.lock:
            if self.tasks.holds.book.outcome_of(record.seq, record.time_ns) is None:
                await self.tasks.holds.bury(task, cause, why, record=record)


def _offered(request: ControlRequest) -> list[_OfferedTask]:
    try:
        found = msgspec.convert(request.arguments.get("tasks"), list[_OfferedTask])
    except msgspec.ValidationError as error:
        raise UsageError(f"{request.do}: `tasks` are rows of sender, id and role: {str(error)[:200]}") from error
    if len(found) > TASKS_PER_PAGE or not all(is_message_id(each.id) for each in found):
        raise UsageError(f"admission {request.do} takes up to {TASKS_PER_PAGE} tasks, each by its id")
    for each in found:
        check_agent_id(each.sender)
        if each.role:
            check_role(each.role)
    return found


def _is_result(told: ToldTask, origin: str) -> bool:
    """Did its worker sign this, in its own space, for this asker and task?"""
    destination = f"{told.sender}.{told.id}"
    if not verifies(told.sig, origin, "result", told.worker, destination, told.result):
        return False
    try:
        return wire.decode(told.result).sender.id == told.worker
    except MalformedMessage:
        return False


def _line(text: str) -> str:
    """What another space says, in a line for people."""
    return "".join(each if each.isprintable() else "?" for each in text)[:WORDS]
