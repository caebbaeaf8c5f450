"""Tasks as an agent meets them: asking any one holder of a role, and working on what others ask.

    ticket = await ada.ask("reviewer", "is this right?")
    print((await ticket.result()).text)

    async for job in bob.work("reviewer"):
        await job.done("it is")

`Tasks` are those of a direct transport. A worker claims from and settles with the steward. While a job is in its hands
the transport beats for it; if the steward or the connection is away the job goes on, and settling is tried again until
its deadline. Both sides verify the other's signature themselves: the steward can lose a message, not invent one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import UNSET

from tidings.client.directory import TaskAddress, address_task, claim_of
from tidings.client.links import Judge
from tidings.client.publishing import prepare_task
from tidings.client.transport import Receipt
from tidings.contract.channels import RawRecord
from tidings.contract.core import Request
from tidings.contract.tasks import (
    ClaimAnswer,
    ClaimRequest,
    RoleRequest,
    TaskBeatRequest,
    TaskDoneRequest,
    TaskFailRequest,
    TaskResultAnswer,
    TaskResultRequest,
)
from tidings.errors import (
    BadSignature,
    ConflictError,
    DeniedError,
    OutcomeUnknown,
    TaskDead,
    TidingsError,
    TooLarge,
    UnreachableError,
    UsageError,
    WireError,
)
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks
from tidings.wire import message as wire
from tidings.wire import signing
from tidings.wire.envelope import Received, open_record
from tidings.wire.message import Draft, Message, Sender, check_said, new_id
from tidings.wire.records import Headers, seconds_of
from tidings.wire.seal import is_sealed_task, open_sealed, open_task, seal_message
from tidings.wire.states import TaskStatus
from tidings.wire.subjects import Task

if TYPE_CHECKING:
    from tidings.client.agent import Agent
    from tidings.client.direct_transport import DirectTransport
    from tidings.client.transport import Transport

T = TypeVar("T")
LONG_POLL = 20.0
PATIENCE = 10.0
RETRY = Backoff(0.1, 2.0)
#: a result travels in a control request; what is larger is an artifact
MAX_RESULT = 90_000
#: nothing more becomes of a task; `cancelled` in the outbox of a host it never leaves
FINAL = (TaskStatus.DONE, TaskStatus.DEAD, TaskStatus.DROPPED, TaskStatus.GONE, TaskStatus.UNKNOWN, "cancelled")


def _when(seen: str | None) -> str:
    if seen is None:
        return "none was ever seen"
    return f"last seen {datetime.fromisoformat(seen).isoformat(sep=' ', timespec='seconds')}"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What is known of a task: queued, claimed, done, dead, dropped; gone or unknown if nobody remembers it."""

    state: str
    message: Message | None = None
    worker: str | None = None
    worker_name: str | None = None
    cause: str | None = None
    attempt: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.message.text if self.message else ""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL


class Settler(Protocol):
    """What a job needs of the transport that claimed it."""

    async def finish(self, job: Job, text: str | None, data: Any) -> None: ...
    async def give_up(self, job: Job, reason: str, *, retry: bool, untouched: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class TaskTicket:
    """A task that was asked: its receipt, and the way to its result."""

    receipt: Receipt
    role: str
    _agent: Agent[Transport] = field(repr=False)

    @property
    def id(self) -> str:
        return self.receipt.id

    @property
    def seq(self) -> int:
        """Of its record in the queue; 0 while it waits in the outbox of the host."""
        return self.receipt.seq

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.receipt.warnings

    async def result(self, timeout: float | None = None) -> TaskResult:
        """Wait until the task is done; after `timeout` seconds the answer is how far it has come.

        Raises TaskDead, which names the cause, as soon as the task is a dead letter.
        """
        found = await self.status(timeout)
        if found.state in (TaskStatus.DEAD, TaskStatus.DROPPED):
            raise TaskDead(self._epitaph(found), found)
        return found

    async def status(self, timeout: float | None = 0.0) -> TaskResult:
        """How far it has come, now or once it is over; a dead letter is an answer like any other."""
        return await self._agent.task(self.id, timeout, seq=self.seq)

    def _epitaph(self, found: TaskResult) -> str:
        if found.state == TaskStatus.DROPPED:
            return f"task {self.id} for {self.role} was dropped from the dead letters: ask again if it still matters"
        why = found.reasons[-1] if found.reasons else "no reason was given"
        cure = "ask again" if "@" in self.role else f"`tidings dead retry {self.seq}` queues it again"
        return f"task {self.id} for {self.role} is a dead letter ({found.cause}): {why}; {cure}"


@dataclass(eq=False)
class Job:
    """A task in this worker's hands. Settle it with `done` or `fail`; until then the transport beats for it."""

    seq: int
    role: str
    attempt: int
    #: seconds since 1970 after which it is not ours any more
    deadline: float
    message: Message
    #: who asked: the verified id, under the name of its access record
    asker: Sender
    _tasks: Settler = field(repr=False)
    #: the id of the space it was asked in; empty: in this one
    origin: str = ""
    #: why it is not ours any more, if the steward said so
    lost: str | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    _beating: asyncio.Task[None] | None = field(default=None, repr=False)
    _on_end: Callable[[], object] | None = field(default=None, repr=False)

    @property
    def claims(self) -> str | None:
        """What it calls its asker, if that is another name than the access record's."""
        return None if self.origin else claim_of(self.asker, self.message)

    @property
    def text(self) -> str:
        return self.message.text

    @property
    def settled(self) -> bool:
        return self._ended.is_set()

    async def done(self, text: str | None = None, *, data: Any = None) -> None:
        """Finish it with a result, signed by this agent for its asker."""
        await self._tasks.finish(self, text, data)

    async def fail(self, reason: str, *, retry: bool = True) -> str:
        """Give it up: `queued` for another try, or `dead`."""
        return await self._tasks.give_up(self, reason, retry=retry)

    async def put_back(self) -> str:
        """Let somebody else have it, untouched: it is queued as before, and no attempt was made."""
        return await self._tasks.give_up(self, "put back", retry=True, untouched=True)


class Tasks:
    """The tasks of one direct transport, asked and held."""

    def __init__(self, transport: DirectTransport, sender: Callable[[], Sender]) -> None:
        self.transport = transport
        self.connection = transport.connection
        self.identity = transport.identity
        self.session = new_id()
        self._sender = sender
        self._open: dict[int, Job] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    # --- asking ---

    async def ask(self, role: str, composed: Message, timeout: float) -> Receipt:
        where = await self._address(role, timeout)
        prepared = prepare_task(self.identity, where.role, composed, where.readers)
        stored = await self.transport.publish(prepared, timeout=timeout)
        warnings = () if where.readers else await self._warnings(role)
        return Receipt(composed.id, stored.seq, warnings=warnings)

    async def _address(self, role: str, timeout: float) -> TaskAddress:
        """Of a role of another space, who holds it has to be known."""
        roster = self.transport.roster
        if "@" in role:
            await roster.wait_loaded(timeout)
        return address_task(roster.rows.values(), role, roster.unheard)

    async def _warnings(self, role: str) -> tuple[str, ...]:
        """Best effort: the task is queued whatever the steward says, or does not say."""
        try:
            found = await self.connection.call(RoleRequest(role))
        except TidingsError as error:
            return (f"the steward could not say who holds the role {role} ({error})",)
        if not found.holders:
            return (f"nobody holds the role {role}: the task waits until somebody does",)
        if found.online == 0:
            hold, seen = f"{found.holders} hold it", _when(found.last_seen)
            return (f"nobody who holds the role {role} is here now ({hold}; {seen}): the task waits",)
        return ()

    async def result(self, message_id: str, seq: int | None, wait: float) -> TaskResult:
        await self.connection.ready(wait + PATIENCE)
        request = TaskResultRequest(message_id, seq or None, wait)
        return self._opened(message_id, await self.connection.call(request, timeout=wait + PATIENCE))

    def _opened(self, message_id: str, answer: TaskResultAnswer) -> TaskResult:
        """The steward's answer; a result counts only if its worker signed it for this task of ours.

        `asker` is a key this agent had before a rotation, if that asked: the steward says which, and the id is in what
        was signed.
        """
        message = None
        if answer.state == TaskStatus.DONE:
            payload, worker = answer.result or b"", str(answer.worker)
            space = answer.space or self.identity.space_id
            destination = f"{answer.asker}.{message_id}"
            if not signing.verifies(answer.sig, space, "result", worker, destination, payload):
                raise BadSignature(f"the result of task {message_id} is not signed by {worker}")
            message = wire.decode(payload)
            if message.sender.id != worker:
                raise BadSignature(f"the result of task {message_id} is signed by another than it claims")
            if answer.space:  # it came over a link, where only we are to read it
                message = self._unsealed(message_id, worker, message, answer.asker)
        return TaskResult(
            answer.state,
            message,
            None if answer.worker is UNSET else answer.worker,
            None if answer.worker_name is UNSET else answer.worker_name,
            answer.cause,
            answer.attempt or 0,
            answer.reasons or (),
        )

    def _unsealed(self, task: str, worker: str, message: Message, asker: str) -> Message:
        try:
            return open_sealed(self.identity.key, worker, message)
        except BadSignature:
            if asker == self.identity.id:
                raise
            raise BadSignature(
                f"the result of task {task} is sealed for the key that this agent had when it asked: ask again"
            ) from None

    # --- working ---

    async def claim(self, role: str, wait: float, *, looping: bool) -> Job | None:
        """Returns one task of a role; None if none came within `wait` seconds. `looping`: for a loop, which waits until
        the connection is back, and until another loop has ended the task that this agent holds."""
        if looping:
            await self._or_closed(self.connection.ready(LONG_POLL))
        claimed = await self._ask_for_one(role, wait)
        if claimed is None:
            return None
        held = self._open.get(claimed[0].seq)
        if held is None:
            return await self._start(*claimed)
        if not looping:
            return held
        await self._or_closed(held._ended.wait())
        return None

    async def _leave(self, job: Job) -> None:
        """The loop's body is over: what it did not settle is another worker's."""
        if not job.settled:
            with suppress(ConflictError, UnreachableError, OutcomeUnknown):
                await self.give_up(job, "left unfinished", retry=True)

    async def _ask_for_one(self, role: str, wait: float) -> tuple[RawRecord, ClaimAnswer] | None:
        request = ClaimRequest(role, wait, self.session)
        answer = await self._or_closed(self.connection.call(request, timeout=wait + PATIENCE))
        return None if answer is None or answer.task is None else (answer.task, answer)

    async def _or_closed(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """Wait for an answer, or None as soon as the transport closes."""
        asked, closed = asyncio.ensure_future(waiting), asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({asked, closed}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            await end_tasks([closed, asked])

    async def _start(self, record: RawRecord, answer: ClaimAnswer) -> Job | None:
        try:
            opened, message = await self._open_task(record)
        except WireError as error:
            with suppress(TidingsError):
                await self.connection.call(TaskFailRequest(record.seq, str(error), retry=False))
            return None
        except TidingsError:
            return None  # whether its link let it in is not known now; whoever claims again gets the same task
        asker = await self._asker(opened, message)
        deadline = seconds_of(answer.deadline)
        job = Job(record.seq, answer.role, answer.attempt, deadline, message, asker, self, opened.origin)
        self._open[job.seq] = job
        job._beating = asyncio.create_task(self._beat(job, answer.beat_every))
        self._leave_with_its_program(job)
        return job

    def _leave_with_its_program(self, job: Job) -> None:
        """Whoever is cancelled in the body of its loop does not come back to it, and Python closes a loop that was
        left only once nothing refers to it: a traceback is enough to hold the job."""

        def ended(program: asyncio.Task[Any]) -> None:
            if program.cancelled() and not job.settled:
                leaving = asyncio.get_running_loop().create_task(self._leave(job))
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)

        program = asyncio.current_task()
        if program is not None:
            program.add_done_callback(ended)
            job._on_end = lambda: program.remove_done_callback(ended)

    async def _open_task(self, record: RawRecord) -> tuple[Received, Message]:
        """The record and what it says, opened if it is sealed; WireError says why it is no task for us."""
        own, subject = self.identity, record.subject
        fields = Headers.parse(record.headers).fields if record.headers else ()
        parsed = own.subjects.parse(subject)
        if not isinstance(parsed, Task):
            raise WireError("it is not a task")
        links, names = self.transport.links, self.transport.directory
        await links.learn_origin(parsed.sender, fields, names.is_of_this_space)
        judge = Judge(links, 0, int(seconds_of(record.time) * 1e9))
        opened = open_record(own.subjects, own.space_id, subject, fields, record.payload, judge)
        if not isinstance(opened, Received):
            raise WireError(f"{opened.reason}: {opened.detail}")
        is_sealed = is_sealed_task(opened.message)
        return opened, open_task(own.key, opened.sender, opened.message) if is_sealed else opened.message

    def sealed_text(self, record: RawRecord | None) -> str | None:
        """Returns the text of a dead task if it was sealed and its record was kept."""
        if record is None:
            return None
        with suppress(WireError):
            message = wire.decode(record.payload)
            if is_sealed_task(message):
                return open_task(self.identity.key, message.sender.id, message).text
        return None

    async def _asker(self, opened: Received, message: Message) -> Sender:
        names, came = self.transport.directory, opened.admission
        if came is not None:
            space = self.transport.links.space_name(came.link, came.origin, came.agreed)
            return names.foreign_sender(message.sender, space, came.origin)
        await names.learn([message])
        return names.sender(message.sender)

    async def _beat(self, job: Job, every: float) -> None:
        while not job.settled:
            await asyncio.sleep(every)
            try:
                await self.connection.call(TaskBeatRequest(job.seq, self.session), timeout=max(every, 1.0))
            except (ConflictError, DeniedError) as error:
                job.lost = str(error)
                self.transport.events.emit("error", error)
                return
            except TidingsError:
                continue  # away for a while: the job goes on

    async def finish(self, job: Job, text: str | None, data: Any) -> None:
        if text is None and data is None:
            text = ""
        check_said(text, more=True)
        composed = Draft(text, data, reply_to=job.message.id).compose(self._sender())
        if job.origin:  # only its asker is to read it, not whoever keeps it on the way
            composed = seal_message(self.identity.key, self._key_now(job.asker), composed)
        payload = composed.raw or wire.encode(composed)
        if len(payload) > MAX_RESULT:
            raise TooLarge(f"a result has at most {MAX_RESULT} bytes, this one has {len(payload)}: send a reference")
        destination = f"{job.asker.id}.{job.message.id}"
        signature = signing.sign(self.identity.key, self.identity.space_id, "result", destination, payload)
        await self._settle(job, TaskDoneRequest(job.seq, payload, signature, self.session))

    def _key_now(self, asker: Sender) -> str:
        """Of an asker of another space: it may have another key since it asked, and cannot open what is for the old."""
        rows = self.transport.roster.rows.values()
        return next((row.id for row in rows if row.name == asker.name and row.elsewhere), asker.id)

    async def give_up(self, job: Job, reason: str, *, retry: bool, untouched: bool = False) -> str:
        reason = reason or "no reason was given"
        request = TaskFailRequest(job.seq, reason, self.session, retry=retry, untouched=untouched)
        return str((await self._settle(job, request)).state)

    async def _settle(self, job: Job, request: Request[T]) -> T:
        """Tell the steward, again and again while it is away, until the deadline: the same request each time."""
        if job.settled:
            raise UsageError(f"task {job.seq} has already been finished or given back")
        op, delays = new_id(), RETRY.delays()
        while True:
            try:
                answer = await self.connection.call(request, op=op)
            except (UnreachableError, OutcomeUnknown):
                if self._closed.is_set() or time.time() > job.deadline:
                    self._end(job)
                    raise
                await asyncio.sleep(next(delays))
            except (ConflictError, DeniedError) as error:
                job.lost = str(error)
                self._end(job)
                raise
            else:
                self._end(job)
                return answer

    def _end(self, job: Job) -> None:
        job._ended.set()
        self._open.pop(job.seq, None)
        if job._on_end is not None:
            job._on_end()
        if job._beating is not None:
            job._beating.cancel()

    async def close(self) -> None:
        """Give back what is still held, in bounded time; what cannot be said now the steward notices by silence."""
        self._closed.set()
        for job in list(self._open.values()):
            with suppress(TidingsError, TimeoutError):
                async with asyncio.timeout(2):
                    await self.give_up(job, "left unfinished", retry=True)
            self._end(job)
        await end_tasks(self._leaving)
