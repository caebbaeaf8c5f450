"""Control requests: decoded strictly, held against the table of operations, worked on in their turn, answered always.

    message -> admitted -> request -> its sender's line (`fair_queue.py`) -> a task -> its handler -> answer

An unanswered request through a service import stays in the broker's memory, so whatever arrives with a reply gets
one: junk, unknown services, wrong senders, failures of ours. Which function handles which operation is what the parts
say (`handles`); this module knows none of them. After `check_arguments` a handler meets no value of a kind it did not
think of; which arguments are needed is the handler's to say.

One slow request delays nobody, and beats of presence wait in no line. A request that only waits for something gives
its place to one that works (`Dispatcher.idle`). A lost lease ends the steward.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from tidings.errors import (
    ConflictError,
    LeaseLost,
    MalformedMessage,
    OutcomeUnknown,
    TidingsError,
    TooLarge,
    UsageError,
)
from tidings.nats.aio import Connection
from tidings.nats.core import Msg
from tidings.nats.errors import NatsError
from tidings.server.lease import StewardLease
from tidings.steward.context import Lifecycle
from tidings.steward.fair_queue import BYTES, MOST_BYTES, MOST_REQUESTS, REQUESTS, Admission, FairQueue
from tidings.wire import strict_json
from tidings.wire.message import is_message_id
from tidings.wire.operations import COUNT, COUNTS, FIELD, FLAG, MOST, NUMBER, OPERATIONS, ROWS, TEXTS, Kind
from tidings.wire.records import parse_time
from tidings.wire.subjects import SERVICES, Control, Subjects

MAX_REQUEST = 128 * 1024
#: requests worked on at once, of one sender, and how many more of it may wait
IN_FLIGHT, IN_FLIGHT_EACH, WAITING_EACH = 64, 16, 1_000
MAX_ANSWER = 1_000_000
#: taken where they are read: they wait for nobody, and cost less than a task
AT_ONCE = frozenset({("presence", "beat")})
Answer = Mapping[str, Any]
#: a request that only waits gives its place among those worked on to another
Idle = Callable[[], AbstractAsyncContextManager[None]]

#: RFC 3339 in UTC, as docs/wire.md has it; Python reads many more
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """One control request. The sender is the broker's word, not the payload's."""

    service: str
    sender: str
    op: str
    do: str
    arguments: Mapping[str, Any]

    def text(self, name: str) -> str:
        value = self.arguments.get(name)
        if not isinstance(value, str) or not value:
            raise UsageError(f"{self.service} {self.do} needs `{name}`, a text")
        return value

    def optional(self, name: str, kind: type[Any]) -> Any:
        value = self.arguments.get(name)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise UsageError(f"{self.service} {self.do}: `{name}` must be a {kind.__name__}")
        return value

    def time_ns(self, name: str) -> int | None:
        """A moment among the arguments, in nanoseconds since 1970."""
        text = self.optional(name, str)
        try:
            if text is not None and not _MOMENT.fullmatch(text):
                raise ValueError(text)
            return None if text is None else parse_time(text)
        except ValueError as error:
            said = f"{self.service} {self.do}: `{name}` is a time such as 2025-11-15T12:00:00.000Z"
            raise UsageError(said) from error

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.arguments.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{self.service} {self.do}: `{name}` must be a list of texts")
        return tuple(value)

    def message_id(self) -> str:
        mid = self.text("id")
        if not is_message_id(mid):
            raise UsageError(f"{mid[:64]!r} is not a message id")
        return mid


Handler = Callable[[ControlRequest], Awaitable[Answer]]
T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Awaitable[Answer]])
#: (service, do) -> the function that handles it, of every module that was loaded
HANDLED: dict[tuple[str, str], str] = {}


def handles(service: str, do: str) -> Callable[[Method], Method]:
    """Mark a method as the handler of a declared operation: it takes a request and answers it."""
    if (service, do) not in OPERATIONS:
        raise LookupError(f"{service} {do} has a handler and is not declared in wire/operations.py")

    def mark(method: Method) -> Method:
        before = HANDLED.setdefault((service, do), method.__qualname__)
        if before != method.__qualname__:
            raise LookupError(f"{service} {do} has two handlers: {before} and {method.__qualname__}")
        vars(method)["operation"] = (service, do)
        return method

    return mark


def handlers_of(*parts: object) -> dict[tuple[str, str], Handler]:
    """The handlers these objects have. LookupError if an operation of the table has none."""
    found: dict[tuple[str, str], Handler] = {}
    for part in parts:
        for name, method in vars(type(part)).items():
            if (operation := getattr(method, "operation", None)) is not None:
                found[operation] = getattr(part, name)
    if missing := sorted(set(OPERATIONS) - set(found)):
        raise LookupError(f"declared in wire/operations.py and not handled: {', '.join(map(' '.join, missing))}")
    return found


def parse_request(subjects: Subjects, subject: str, payload: bytes) -> ControlRequest:
    parsed = subjects.parse(subject)
    if not isinstance(parsed, Control):
        raise UsageError(
            f"this is not a control subject: td.<space>.ctl.<service>.<sender>; the services are {', '.join(SERVICES)}"
        )
    if len(payload) > MAX_REQUEST:
        raise UsageError(f"a control request has at most {MAX_REQUEST} bytes, this one has {len(payload)}")
    try:
        body = strict_json.loads(payload)
    except MalformedMessage as error:
        raise UsageError(f"a control request is strict JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError("a control request is a JSON object")
    op, do = body.pop("op", None), body.pop("do", None)
    if not isinstance(op, str) or not 8 <= len(op) <= 64 or not isinstance(do, str):
        raise UsageError("a control request needs `op` (8 to 64 characters, yours to choose) and `do`")
    return ControlRequest(parsed.service, parsed.sender, op, do, {name: _whole(value) for name, value in body.items()})


def _whole(value: Any) -> Any:
    """`3.0` and `3e0` are the whole number 3, as JSON Schema and JavaScript have it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def answer(result: Mapping[str, Any]) -> bytes:
    return json.dumps({"ok": True, **result}, separators=(",", ":")).encode()


def fitting(rows: list[T], size: Callable[[T], int], most: int) -> list[T]:
    """As many of these as fit into an answer of so many bytes, at least one."""
    total = 0
    for count, row in enumerate(rows):
        total += size(row)
        if total > most and count:
            return rows[:count]
    return rows


def refusal(error: BaseException) -> bytes:
    """A refusal names its class of error; what was not foreseen is said without details of ours."""
    if isinstance(error, TidingsError):
        code, message = error.code, str(error)
    else:
        code, message = "failed", f"the steward failed ({type(error).__name__}); its log says more"
    return json.dumps({"ok": False, "error": {"code": code, "message": message[:1000]}}).encode()


def check_arguments(request: ControlRequest) -> None:
    """Raise UsageError for a verb, an argument or a kind of value that the table does not know."""
    operation = OPERATIONS.get((request.service, request.do))
    if operation is None:
        raise UsageError(_no_such_verb(request))
    known = operation.arguments
    unknown = sorted(set(request.arguments) - set(known))
    if unknown:
        named = ", ".join(repr(name[:64]) for name in unknown[:8])
        takes = f"the arguments {', '.join(sorted(known))}" if known else "no arguments"
        raise UsageError(f"{request.service} {request.do} takes {takes}, not {named}")
    for name, value in request.arguments.items():
        kind = known[name]
        if value is not None and not _is(kind, value):
            raise UsageError(f"{request.service} {request.do}: `{name}` must be {kind.words}")


def _no_such_verb(request: ControlRequest) -> str:
    verbs = [do for service, do in OPERATIONS if service == request.service]
    known = f"its verbs are {', '.join(sorted(verbs))}" if verbs else "it has no verbs yet"
    return f"the service {request.service} has no {request.do[:64]!r}: {known}"


def _is(kind: Kind, value: Any) -> bool:
    if kind is FIELD:
        return True
    if isinstance(value, bool):
        return kind is FLAG
    if kind is COUNT and isinstance(value, float):
        return value.is_integer() and -MOST <= value <= MOST
    if not isinstance(value, kind.types):
        return False
    if kind in (COUNT, NUMBER):
        return bool(-MOST <= value <= MOST)
    if kind is COUNTS:
        return all(type(item) is int and -MOST <= item <= MOST for item in value)
    items: list[Any] = value if kind in (TEXTS, ROWS) else []
    return all(isinstance(item, str if kind is TEXTS else dict) for item in items)


TOO_MANY = refusal(
    ConflictError(f"more than {REQUESTS:,} control requests or {BYTES / 1e6:.0f} MB a second: wait, then ask again")
)
FLOOD = f"more than {MOST_REQUESTS:,} control requests or {MOST_BYTES / 1e6:.0f} MB of them a second"
#: whose request a task works on
_asking: ContextVar[str] = ContextVar("asking")


class PendingAnswer(NamedTuple):
    """A request, and the connection on which it was heard: there it is answered."""

    connection: Connection
    message: Msg

    async def reply(self, payload: bytes) -> None:
        if not self.message.reply:
            return
        if len(payload) > MAX_ANSWER:  # the broker would close the connection over it
            payload = refusal(TooLarge(f"the answer has {len(payload)} bytes, more than a message holds: ask for less"))
        with suppress(NatsError, OSError):  # the broker is gone, and whoever asked hears of that
            await self.connection.publish(self.message.reply, payload)


@dataclass(eq=False)
class Dispatcher:
    """The requests of one space, under one steward."""

    subjects: Subjects
    lease: StewardLease
    life: Lifecycle
    #: hears whose credential must go, and why
    bar: Callable[[str, str], None]

    def __post_init__(self) -> None:
        self.handlers: dict[tuple[str, str], Handler] = {}
        self.counts = {"requests": 0, "refused": 0, "failed": 0, "not_admitted": 0}
        self.admission = Admission()
        self.queue: FairQueue[tuple[PendingAnswer, ControlRequest, Handler]] = FairQueue(
            IN_FLIGHT, IN_FLIGHT_EACH, WAITING_EACH
        )

    def serve(self, *parts: object) -> None:
        """Answer with the handlers these parts have. LookupError if the table declares an operation nobody handles."""
        self.handlers = handlers_of(*parts)

    def hear(self, connection: Connection, message: Msg) -> None:
        """A request of an agent, where it is read: what is too much ends here."""
        asked = PendingAnswer(connection, message)
        sender = message.subject.rpartition(".")[2]
        admitted = self.admission.judge(sender, len(message.data), time.monotonic())
        if admitted == "yes":
            self.life.spawn(self._take(asked))
            return
        self.counts["not_admitted"] += 1
        if admitted == "later":
            self.life.spawn(asked.reply(TOO_MANY))
        else:
            self.bar(sender, f"since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {FLOOD}")

    async def take(self, connection: Connection, message: Msg) -> None:
        """A request of an administrator, on whichever connection it is heard."""
        await self._take(PendingAnswer(connection, message))

    async def _take(self, asked: PendingAnswer) -> None:
        """Junk is answered and beats are taken here; work gets a task."""
        message = asked.message
        self.counts["requests"] += 1
        try:
            request = parse_request(self.subjects, message.subject, message.data)
            check_arguments(request)
            handler = self.handlers[request.service, request.do]
            if (request.service, request.do) in AT_ONCE:
                await asked.reply(answer(await handler(request)))
                return
            if not self.queue.offer(request.sender, (asked, request, handler)):
                raise ConflictError(
                    f"{self.queue.waiting:,} requests of yours wait already: wait for their answers, then ask again"
                )
        except TidingsError as error:
            self.counts["refused"] += 1
            await asked.reply(refusal(error))
            return
        self._begin_work()

    def _begin_work(self) -> None:
        while (work := self.queue.take()) is not None:
            self.life.spawn(self._work(*work))

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """A request that only waits gives its slot to one that works."""
        sender = _asking.get()
        self.queue.release(sender)
        self._begin_work()
        try:
            yield
        finally:
            self.queue.reclaim(sender)

    async def _work(self, asked: PendingAnswer, request: ControlRequest, handler: Handler) -> None:
        _asking.set(request.sender)
        try:
            reply = await self._answer_of(request, handler)
        finally:
            self.queue.release(request.sender)
            self._begin_work()
        await asked.reply(reply)

    async def _answer_of(self, request: ControlRequest, handler: Handler) -> bytes:
        try:
            if not self.lease.is_fresh:
                await self.lease.prove()  # paused past a takeover, our table speaks of the past
            return answer(await handler(request))
        except LeaseLost as error:
            self.life.fail(error)
            return refusal(OutcomeUnknown(f"this steward was replaced ({error}): ask again with the same op"))
        except TidingsError as error:
            self.counts["refused"] += 1
            return refusal(error)
        except Exception as error:  # boundary: every request is answered, our own bugs included
            self.counts["failed"] += 1
            log.exception("%s %s failed", request.service, request.do)
            return refusal(error)
