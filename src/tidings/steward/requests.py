"""Control requests: decoded as the contract declares them, worked on in their turn, answered always.

    message -> admitted -> request -> its sender's line (`fair_queue.py`) -> a task -> its handler -> answer

An unanswered request through a service import stays in the broker's memory, so whatever arrives with a reply gets
one: junk, unknown services, wrong senders, failures of ours. Parts of the steward mark their handlers
(`rpc/dispatch.py`); this module knows none of them.

One slow request delays nobody, and beats of presence wait in no line. A request that only waits for something gives
its place to one that works (`Dispatcher.idle`). A lost lease ends the steward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from tidings.contract.catalogue import OPERATIONS
from tidings.contract.core import Answer, Caller, read_body
from tidings.errors import (
    ConflictError,
    LeaseLost,
    OutcomeUnknown,
    TidingsError,
    TooLarge,
    UsageError,
)
from tidings.nats.aio import Connection
from tidings.nats.core import Msg
from tidings.nats.errors import NatsError
from tidings.rpc.dispatch import encode_answer, encode_refusal, handlers_of
from tidings.server.lease import StewardLease
from tidings.steward.context import Lifecycle
from tidings.steward.fair_queue import BYTES, MOST_BYTES, MOST_REQUESTS, REQUESTS, Admission, FairQueue
from tidings.wire.subjects import SERVICES, Control, Subjects

#: requests worked on at once, of one sender, and how many more of it may wait
IN_FLIGHT, IN_FLIGHT_EACH, WAITING_EACH = 64, 16, 1_000
MAX_ANSWER = 1_000_000
#: taken where they are read: they wait for nobody, and cost less than a task
AT_ONCE = frozenset({"presence beat"})
#: a request that only waits gives its place among those worked on to another
Idle = Callable[[], AbstractAsyncContextManager[None]]

log = logging.getLogger(__name__)


Handler = Callable[[Caller, Any], Awaitable[Answer]]
T = TypeVar("T")


class ControlCall(NamedTuple):
    """A valid request: the operation it names, who sent it, and its fields."""

    name: str
    caller: Caller
    request: Any


def parse_request(subjects: Subjects, subject: str, payload: bytes) -> ControlCall:
    """Returns the request in a message. Raises UsageError, naming the field, if it is none that is declared."""
    parsed = subjects.parse(subject)
    if not isinstance(parsed, Control):
        raise UsageError(
            f"this is not a control subject: td.<space>.ctl.<service>.<sender>; the services are {', '.join(SERVICES)}"
        )
    body = read_body(parsed.service, payload)
    op, do = body.pop("op", None), body.pop("do", None)
    if not isinstance(op, str) or not 8 <= len(op) <= 64 or not isinstance(do, str):
        raise UsageError("a control request needs `op` (8 to 64 characters, yours to choose) and `do`")
    name = f"{parsed.service} {do}"
    if (operation := OPERATIONS.get(name)) is None:
        verbs = sorted(each.verb for each in OPERATIONS.values() if each.service == parsed.service)
        known = f"its verbs are {', '.join(verbs)}" if verbs else "it has no verbs yet"
        raise UsageError(f"the service {parsed.service} has no {do[:64]!r}: {known}")
    return ControlCall(name, Caller(parsed.sender, op), operation.decode(body))


def fitting(rows: list[T], size: Callable[[T], int], most: int) -> list[T]:
    """As many of these as fit into an answer of so many bytes, at least one."""
    total = 0
    for count, row in enumerate(rows):
        total += size(row)
        if total > most and count:
            return rows[:count]
    return rows


def refusal(error: BaseException) -> bytes:
    return encode_refusal(error, "steward")


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
        self.handlers: dict[str, Handler] = {}
        self.counts = {"requests": 0, "refused": 0, "failed": 0, "not_admitted": 0}
        self.admission = Admission()
        self.queue: FairQueue[tuple[PendingAnswer, ControlCall]] = FairQueue(IN_FLIGHT, IN_FLIGHT_EACH, WAITING_EACH)

    def serve(self, *parts: object) -> None:
        """Answer with the handlers these parts have. LookupError if the table declares an operation nobody handles."""
        self.handlers = handlers_of("steward", *parts)

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
            call = parse_request(self.subjects, message.subject, message.data)
            if call.name in AT_ONCE:
                await asked.reply(encode_answer(await self.handlers[call.name](call.caller, call.request)))
                return
            if not self.queue.offer(call.caller.id, (asked, call)):
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

    async def _work(self, asked: PendingAnswer, call: ControlCall) -> None:
        _asking.set(call.caller.id)
        try:
            reply = await self._answer_of(call)
        finally:
            self.queue.release(call.caller.id)
            self._begin_work()
        await asked.reply(reply)

    async def _answer_of(self, call: ControlCall) -> bytes:
        try:
            if not self.lease.is_fresh:
                await self.lease.prove()  # paused past a takeover, our table speaks of the past
            return encode_answer(await self.handlers[call.name](call.caller, call.request))
        except LeaseLost as error:
            self.life.fail(error)
            return refusal(OutcomeUnknown(f"this steward was replaced ({error}): ask again with the same op"))
        except TidingsError as error:
            self.counts["refused"] += 1
            return refusal(error)
        except Exception as error:  # boundary: every request is answered, our own bugs included
            self.counts["failed"] += 1
            log.exception("%s failed", call.name)
            return refusal(error)
