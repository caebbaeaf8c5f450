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

import random
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import msgspec

from tidings.admin.link_registry import LinkLedger
from tidings.contract.core import Caller
from tidings.contract.links import (
    ImportProgressAnswer,
    ImportProgressRequest,
    ImportTasksRequest,
    ImportVerdictsAnswer,
    LinkProgressAnswer,
    LinkProgressRequest,
    LinkTasksAnswer,
    LinkTasksRequest,
    TaskOffer,
    TaskProgress,
)
from tidings.errors import ConflictError, DeniedError, MalformedMessage, OutcomeUnknown, UsageError
from tidings.model.task_rules import EndedTask, TaskState, is_overdue
from tidings.nats.errors import NatsError
from tidings.nats.jetstream import StoredRecord
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext
from tidings.steward.fair_queue import ConcurrencyLimit
from tidings.steward.link_handlers import GrantedLink, LinkHandlers
from tidings.steward.link_records import in_a_line, link_on, links_in_force, links_on
from tidings.steward.linked_people import LinkedPeople
from tidings.steward.tasks import TaskQueues
from tidings.wire import message as wire
from tidings.wire.link_exchange import LONGEST_AGE, TASKS_PER_PAGE, LinkedTask, ToldTask, check_told_tasks
from tidings.wire.message import is_message_id
from tidings.wire.names import check_agent_id, check_role, role_parts
from tidings.wire.records import values_of
from tidings.wire.seal import readers_of
from tidings.wire.signing import SIGNATURE_HEADER, verifies
from tidings.wire.states import TaskCause, TaskStatus
from tidings.wire.subjects import Task

#: bytes of an answer with tasks or results; one may be larger
PAGE_BYTES = 256 * 1024
#: tasks of one asker for one role in an answer, so that others come too; and queues that are looked at for it
EACH, QUEUES = 4, 64
#: records of such a queue that are read at once, and bytes of those without an end that are looked at
LOOKED_AT, QUEUE_BYTES = 100, 4 * 1024 * 1024
#: questions that are answered at the same time: of one link, and of all
OF_LINK, AT_ONCE = 1, 2
#: seconds after the last word of the other space on a task, after which it is handed out again
SILENCE = 60.0
#: results of which only a part came yet
MOST_PARTIAL = 64
UNLINKED = "there is no link with its space any more; whether anybody there worked on it is not known"


class LinkTasks:
    def __init__(self, space: SpaceContext, linked: LinkHandlers, people: LinkedPeople, tasks: TaskQueues) -> None:
        self.space, self.linked, self.people, self.tasks = space, linked, people, tasks
        self.stream = space.subjects.task_stream
        self.turns = ConcurrencyLimit(AT_ONCE, OF_LINK, "tasks of this link are being handed out already: wait for it")
        #: queue -> the sequence up to which all of it has ended
        self._ended_through: dict[Task, int] = {}
        #: where TASK ended when the queues were last listed, and how many records each had
        self._listed: tuple[int, dict[Task, int]] = (-1, {})
        #: (asker, id) of tasks that are in another space -> when that spoke of them
        self._spoken: dict[tuple[str, str], float] = {}
        #: link -> results that are told in parts, as they are named: those that came
        self._parts: dict[str, OrderedDict[tuple[str, ...], dict[int, bytes]]] = {}
        #: the queues at the last look, and which spaces were linked
        self._looked: tuple[dict[Task, int], frozenset[str]] | None = None

    def _granted(self, user: str) -> GrantedLink:
        granted = self.linked.granted(user)
        if not granted.record.passes_tasks:
            raise DeniedError(f"link {granted.link} passes no tasks")
        return granted

    # --- ours for them ---

    @handler(LinkTasksRequest)
    async def handed_out(self, caller: Caller, request: LinkTasksRequest) -> LinkTasksAnswer:
        """Tasks for roles of the asking space, as many as it has `room` for, of each asker a few; of askers in
        `without`, and for roles in `busy`, none. What that space told of lately is left out."""
        room = min(TASKS_PER_PAGE, request.room)
        without, busy = frozenset(request.without), frozenset(request.busy)
        granted = self._granted(caller.id)
        async with self.turns.turn(granted.link):
            origin, queues = granted.record.origin, await self._queues() if room > 0 else {}
            wanted = [each for each in queues if role_parts(each.role)[1] == origin and each.sender not in without]
            found, more = await self._waiting([each for each in wanted if role_parts(each.role)[0] not in busy], room)
            if self._granted(caller.id).link != granted.link:
                raise ConflictError("the link changed while tasks were looked for: ask again")
        return LinkTasksAnswer(tasks=tuple(found), more=more)

    async def _waiting(self, queues: list[Task], room: int) -> tuple[list[LinkedTask], bool]:
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

    async def _queues(self) -> dict[Task, int]:
        """Which roles of other spaces were asked by whom, and how many records lie there."""
        s, head = self.space.subjects, await self.space.head(self.stream)
        if self._listed[0] != head:
            counts = await self.space.js.counts_of(self.stream, f"{s.root}.task.>")
            parsed = ((s.parse(each), count) for each, count in counts.items())
            found = {each: n for each, n in parsed if isinstance(each, Task) and role_parts(each.role)[1]}
            self._listed = head, found
            self._ended_through = {each: seq for each, seq in self._ended_through.items() if each in found}
        return self._listed[1]

    async def _of_queue(self, queue: Task, head: int) -> list[LinkedTask]:
        """The first few of a queue that are to be handed out. What has ended is not read again."""
        found: list[LinkedTask] = []
        subject, over = self.space.subjects.task(queue.role, queue.sender), self._ended_through.get(queue, 0)
        all_ended, size = True, 0
        async for page in self.space.js.read(self.stream, subject, over + 1, head, page=LOOKED_AT):
            for record in page:
                if self._has_ended(record):
                    over = record.seq if all_ended else over
                    continue
                all_ended, size = False, size + len(record.payload)
                if (task := await self._handed(record)) is not None:
                    found.append(task)
                if len(found) == EACH or size > QUEUE_BYTES:
                    break
            self._ended_through[queue] = over
            if len(found) == EACH or size > QUEUE_BYTES:
                break
        return found

    def _has_ended(self, record: StoredRecord) -> bool:
        return self.tasks.holds.book.outcome_of(record.seq, record.time_ns) is not None

    async def _handed(self, record: StoredRecord) -> LinkedTask | None:
        """A task as it is handed out; None if the other space spoke of it lately, or it is buried here now."""
        task, refused = self.tasks.holds.read(record, None)
        readers = self._readers(record) if refused is None else None
        if refused is not None or readers is None:
            why = refused.detail if refused is not None else "a task for another space is sealed, and this one is not"
            await self._bury(task, record, TaskCause.MALFORMED, why)
            return None
        if self.space.active_access(task.asker) is None and not self.space.has_successor(task.asker):
            await self._bury(task, record, TaskCause.FAILED, "its asker has no access any more")
            return None
        spoken = self._spoken.get((task.asker, task.id), 0.0)
        if is_overdue(task, time.time()) or (spoken and time.monotonic() - spoken < SILENCE):
            return None
        return LinkedTask(
            seq=record.seq,
            sender=task.asker,
            role=role_parts(task.role)[0],
            sig=values_of(record.own_fields() or (), SIGNATURE_HEADER)[0],
            payload=record.payload,
            age=min(LONGEST_AGE, max(0, time.time_ns() - record.time_ns) // 1_000_000),
        )

    def _readers(self, record: StoredRecord) -> frozenset[str] | None:
        """Who can open a task; None if it is not sealed."""
        with suppress(MalformedMessage):
            return frozenset(readers_of(wire.decode(record.payload)))
        return None

    @handler(LinkProgressRequest)
    async def progress(self, caller: Caller, request: LinkProgressRequest) -> LinkProgressAnswer:
        """How far tasks of ours are that the asking space has. It is believed about those for roles of its own, and of
        a result if an agent of it signed it."""
        check_told_tasks(request.tasks)
        async with self.turns.turn(self._granted(caller.id).link):
            return await self._heard(self._granted(caller.id), request.tasks)

    async def _heard(self, granted: GrantedLink, told: Iterable[ToldTask]) -> LinkProgressAnswer:
        self._spoken = {key: at for key, at in self._spoken.items() if key in self.tasks.holds.abroad}
        refused, later = [], []
        for number, each in enumerate(told):
            verdict = await self._hear(granted, each)
            if verdict == "refused":
                refused.append(number)
            elif verdict == "later":
                later.append(number)
        return LinkProgressAnswer(refused=tuple(refused), later=tuple(later))

    async def _hear(self, granted: GrantedLink, told: ToldTask) -> str:
        holds = self.tasks.holds
        record = await self.space.js.at(self.stream, told.seq, patient=False)
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
            if told.worker and told.worker not in (self._readers(record) or ()):
                return "refused"
            if told.worker and self.people.find(told.worker) is None:
                return "later"  # an agent that its space has not stated yet
            whole = self._whole(granted.link, told)
            return await self._write(granted, task, record, whole) if whole is not None else "later"

    def _whole(self, link: str, told: ToldTask) -> ToldTask | None:
        """With the whole result; None while parts of it are missing. What is not complete is told again."""
        if told.parts == 1:
            return told
        key, kept = (told.sender, told.id, told.worker, told.sig, str(told.parts)), self._parts
        partial = kept.setdefault(link, OrderedDict())
        found = partial.setdefault(key, {})
        found[told.part] = told.result
        partial.move_to_end(key)
        while len(partial) > MOST_PARTIAL:
            partial.popitem(last=False)
        if found.keys() != set(range(told.parts)):
            return None
        del partial[key]
        return msgspec.structs.replace(told, result=b"".join(found[number] for number in range(told.parts)))

    async def _write(self, granted: GrantedLink, task: TaskState, record: StoredRecord, told: ToldTask) -> str:
        holds, origin = self.tasks.holds, granted.record.origin
        known = msgspec.structs.replace(task, worker=told.worker or None, attempt=told.attempt)
        if told.state is TaskStatus.DONE:
            if not _is_result(told, origin):
                return "refused"
            held = msgspec.structs.replace(known, workers=(told.worker,), claimed_at=time.time())
            try:
                await holds.finish(held, told.result, told.sig)
            except OutcomeUnknown:
                holds.unsure.pop(task.seq, None)  # it is told again, and written then
                raise
        elif told.state is TaskStatus.DEAD:
            cause = TaskCause(told.cause) if told.cause in TaskCause.__members__.values() else TaskCause.FAILED
            name = granted.record.space or granted.link
            await holds.bury(known, cause, f"{name}: {in_a_line(told.why)}", record=record)
        else:
            before = holds.abroad.get((task.asker, task.id))
            holds.abroad[task.asker, task.id] = known
            self._spoken[task.asker, task.id] = time.monotonic()
            if before is None or before.worker != known.worker:
                holds.changed(known)
        return ""

    # --- theirs for us ---

    @handler(ImportTasksRequest)
    async def offered(self, _caller: Caller, request: ImportTasksRequest) -> ImportVerdictsAnswer:
        """May these be queued here? For each: `take`, `have` if it is here or was, `wait` if its sender is not known
        yet, or why it never may. `agreed` is the link record that they are to name."""
        link = request.link
        on = link_on(self.space, link)
        if on is None or not on[1].passes_tasks:
            raise DeniedError(f"link {link} is not on, or passes no tasks")
        _check_offers(request.tasks)
        theirs = self.people.of_link(link)
        verdicts = [await self._verdict(link, theirs, each) for each in request.tasks]
        return ImportVerdictsAnswer(agreed=on[0], verdicts=tuple(verdicts))

    async def _verdict(self, link: str, theirs: frozenset[str], task: TaskOffer) -> str:
        other = self.people.find(task.sender)
        if self.space.access(task.sender) is not None or (other is not None and other.link != link):
            return "no: its asker is an agent of another space than it came from"
        if await self.tasks.find(task.sender, task.id, None) != TaskStatus.UNKNOWN:
            return "have"
        if not any(self.space.holds_role(each, task.role) for each in task.readers):
            return f"no: nobody for whom it was sealed holds the role {task.role} in {self.space.info.name}: ask again"
        return "take" if task.sender in theirs else f"wait: its space has not stated that {task.sender} is its agent"

    @handler(ImportProgressRequest)
    async def progress_here(self, _caller: Caller, request: ImportProgressRequest) -> ImportProgressAnswer:
        """How far tasks of other spaces are here, in order; `unknown` if the queue does not have one any more."""
        _check_offers(request.tasks)
        found: list[TaskProgress] = []
        size = 0
        for each in request.tasks:
            row = TaskProgress(state=TaskStatus.UNKNOWN)
            if self.space.access(each.sender) is None:  # a key that is an agent of ours now has tasks of its own
                row = await self._state_of(await self.tasks.find(each.sender, each.id, each.seq or None))
            size += len(row.result or b"") * 4 // 3  # as base64
            if found and size > PAGE_BYTES:
                break
            found.append(row)
        return ImportProgressAnswer(tasks=tuple(found))

    async def _state_of(self, found: TaskState | EndedTask | str) -> TaskProgress:
        if isinstance(found, str):
            return TaskProgress(state=TaskStatus(found))
        row = partial(TaskProgress, worker=found.worker or "", attempt=found.attempt)
        if isinstance(found, TaskState):
            return row(state=TaskStatus.CLAIMED if found.worker else TaskStatus.QUEUED)
        if found.state is TaskStatus.DONE:
            kept = await self.tasks.holds.records.result_of(found)
            if kept is not None:
                return row(state=found.state, result=kept[0], sig=kept[1])
            return row(state=TaskStatus.GONE)
        why = found.reasons[-1] if found.reasons else ""
        return row(state=TaskStatus.DEAD, cause=found.cause or "", why=in_a_line(why))

    # --- by itself ---

    async def run(self) -> None:
        """Wake the workers of linked spaces for whose roles something was queued since the last look, and bury what is
        for a space that there is no link with any more."""
        if next(links_in_force(self.space), None) is None:
            return  # there never was a link
        queues = await self._queues()
        linked = frozenset(record.origin for _, _, record in links_in_force(self.space) if record.state == "on")
        before, linked_before = self._looked or ({}, frozenset())
        grown = {each for each, count in queues.items() if count > before.get(each, 0)}
        for queue in queues if linked != linked_before else grown:
            if role_parts(queue.role)[1] not in linked | self._agreed_on_disk():
                await self._bury_all(queue)
        self._looked = queues, linked
        origins = {role_parts(each.role)[1] for each in grown}
        for _, _, record in links_on(self.space):
            if record.origin in origins and record.passes_tasks and record.peer:
                with suppress(NatsError, OSError):  # it is found by asking, too
                    await self.space.js.connection.publish(self.space.subjects.live_link(record.peer))

    def _agreed_on_disk(self) -> set[str]:
        """Spaces there is a link with, by what was agreed: a log that was put back does not know it for a moment."""
        rows = LinkLedger.below(self.space.home, self.space.info.id).rows()
        return {row.origin for row in rows if row.state in ("on", "setting")}

    async def _bury_all(self, queue: Task) -> None:
        subject, head = self.space.subjects.task(queue.role, queue.sender), await self.space.head(self.stream)
        async for page in self.space.js.read(self.stream, subject, 1, head):
            for record in page:
                if not self._has_ended(record):
                    await self._bury(self.tasks.holds.read(record, None)[0], record, TaskCause.FAILED, UNLINKED)

    async def _bury(self, task: TaskState, record: StoredRecord, cause: TaskCause, why: str) -> None:
        async with self.tasks.holds.lock:
            if self.tasks.holds.book.outcome_of(record.seq, record.time_ns) is None:
                await self.tasks.holds.bury(task, cause, why, record=record)


def _check_offers(offers: Iterable[TaskOffer]) -> None:
    for each in offers:
        if not is_message_id(each.id):
            raise UsageError(f"{each.id[:64]!r} is not a message id")
        check_agent_id(each.sender)
        if each.role:
            check_role(each.role)


def _is_result(told: ToldTask, origin: str) -> bool:
    """Did its worker sign this, in its own space, for this asker and task?"""
    destination = f"{told.sender}.{told.id}"
    if not verifies(told.sig, origin, "result", told.worker, destination, told.result):
        return False
    try:
        return wire.decode(told.result).sender.id == told.worker
    except MalformedMessage:
        return False
