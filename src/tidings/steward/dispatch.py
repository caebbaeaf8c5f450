"""Every control request is answered: junk at once, work in its turn, our own bugs too.

    message -> admitted -> request -> its sender's line (`fair_queue.py`) -> a task -> its handler -> answer

One slow request delays nobody, and beats of presence wait in no line. A request that only waits for something gives
its place to one that works (`idle`). Which handler serves an operation is what the parts say (`handles`), held against
the table in `wire/operations.py`; this module knows none of them, and that a lost lease ends the steward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import NamedTuple

from tidings.errors import ConflictError, LeaseLost, OutcomeUnknown, TidingsError, TooLarge
from tidings.nats.aio import Connection
from tidings.nats.core import Msg
from tidings.nats.errors import NatsError
from tidings.server.lease import StewardLease
from tidings.steward.context import Lifecycle
from tidings.steward.fair_queue import BYTES, MOST_BYTES, MOST_REQUESTS, REQUESTS, Admission, FairQueue
from tidings.steward.requests import (
    ControlRequest,
    Handler,
    answer,
    check_arguments,
    handlers_of,
    parse_request,
    refusal,
)
from tidings.wire.subjects import Subjects

#: requests worked on at once, of one sender, and how many more of it may wait
IN_FLIGHT, IN_FLIGHT_EACH, WAITING_EACH = 64, 16, 1_000
MAX_ANSWER = 1_000_000
#: taken where they are read: they wait for nobody, and cost less than a task
AT_ONCE = frozenset({("presence", "beat")})
TOO_MANY = refusal(
    ConflictError(f"more than {REQUESTS:,} control requests or {BYTES / 1e6:.0f} MB a second: wait, then ask again")
)
FLOOD = f"more than {MOST_REQUESTS:,} control requests or {MOST_BYTES / 1e6:.0f} MB of them a second"
log = logging.getLogger(__name__)
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


class Dispatcher:
    """The requests of one space, under one steward."""

    def __init__(
        self, subjects: Subjects, lease: StewardLease, life: Lifecycle, bar: Callable[[str, str], None]
    ) -> None:
        """`bar`: hears whose credential must go, and why."""
        self.subjects = subjects
        self.lease = lease
        self.life = life
        self._bar = bar
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
            self._bar(sender, f"since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {FLOOD}")

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
