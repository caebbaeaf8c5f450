"""One socket on an event loop: bytes in and out of a `Core`, and everybody who waits for something on it.

What is written in one turn of the loop leaves in one write. Whoever waits (for an answer, a pong, room to write, the
greeting) is woken when the socket goes, with the reason. It knows nothing of addresses, TLS or reconnecting: that is
`aio.Connection`, which makes one of these for each attempt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from tidings.nats.core import ANSWERS, Complaint, Core, Event, Info, Msg, Pong
from tidings.nats.errors import AuthRefused, ConnectionGone, ProtocolError, PublishDenied, ServerComplaint

#: bytes of one turn after which we do not wait for its end to write
WRITE_NOW = 1 << 16
#: bytes that may wait for the socket before publishing waits too
HIGH_WATER = 1 << 20


class HasHandler(Protocol):
    """A subscription, as far as a socket knows it."""

    @property
    def handler(self) -> Callable[[Msg], None]: ...


class AioSocket(asyncio.Protocol):
    """One socket of a connection. What it says after the connection has another one is not heard."""

    def __init__(
        self,
        core: Core,
        subscriptions: Mapping[int, HasHandler],
        *,
        report: Callable[[Exception], None],
        on_lost: Callable[[AioSocket], None],
    ) -> None:
        self.core = core
        self._subscriptions, self._report, self._on_lost = subscriptions, report, on_lost
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.greeting: asyncio.Future[dict[str, Any]] = self.loop.create_future()
        self.gone: asyncio.Future[None] = self.loop.create_future()
        self.pongs: deque[asyncio.Future[None]] = deque()
        self.room: deque[asyncio.Future[None]] = deque()
        self.error: Exception | None = None
        #: something is written at the end of this turn
        self.paused = self.due = False
        #: between INFO and the end of a TLS handshake nothing is heard: it would count as said inside
        self.deaf = False

    # --- what the loop says ---

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        """Hears everything that came whole, up to a greeting. What came after that waits for another call."""
        core, subscriptions = self.core, self._subscriptions
        core.feed(data)
        try:
            while self.error is None and not self.deaf and (event := core.next_event()) is not None:
                if type(event) is not Msg:
                    self._take(event)
                elif event.sid == ANSWERS:
                    waiter = core.answered(event)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(event)
                elif (subscription := subscriptions.get(event.sid)) is not None:
                    try:
                        subscription.handler(event)
                    except Exception as error:  # noqa: BLE001  # boundary: a handler's fault is not the connection's
                        self._report(error)
        except ProtocolError as error:
            self.abandon(error)
        self.flush()

    def _take(self, event: Event) -> None:
        if isinstance(event, Pong):
            if self.pongs:
                resolve(self.pongs.popleft(), None)
        elif isinstance(event, Complaint):
            self._complained(event)
        elif isinstance(event, Info) and not self.greeting.done():
            self.deaf = True
            self.greeting.set_result(event.fields)

    def _complained(self, complaint: Complaint) -> None:
        error: Exception = ServerComplaint(complaint.text)
        if complaint.kind == "auth":  # the server closes next
            self.error = error = AuthRefused(complaint.text)
        elif complaint.kind == "publish":
            for waiter in self.core.denied(complaint.subject):
                fail(waiter, PublishDenied(complaint.text))
        self._report(error)
        if self.error is not None and self.transport is not None:
            self.transport.close()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        for waiter in self.room:
            resolve(waiter, None)

    def connection_lost(self, error: Exception | None) -> None:
        self.error = self.error or ConnectionGone(f"the connection went: {error or 'closed by the server'}")
        self.wake_all()
        if not self.gone.done():
            self.gone.set_result(None)
        self._on_lost(self)

    # --- what the connection says ---

    def wake_all(self) -> None:
        assert self.error is not None
        for waiter in (*(each for _, each in self.core.waiting.values()), *self.pongs, *self.room, self.greeting):
            fail(waiter, self.error)
        if self.greeting.done() and not self.greeting.cancelled():
            self.greeting.exception()  # nobody may be waiting for it any more

    def abandon(self, error: Exception) -> None:
        """Give it up at once: nothing more is written, nothing more is read."""
        self.error = self.error or error
        if self.transport is not None:
            self.transport.abort()
        elif not self.gone.done():
            self.gone.set_result(None)

    def flush_soon(self) -> None:
        if self.core.out_size > WRITE_NOW:
            self.flush()
        elif not self.due:
            self.due = True
            self.loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self.due = False
        self.flush()

    def flush(self) -> None:
        if self.core.out_size and self.transport is not None and self.error is None:
            self.transport.write(self.core.take())

    def ping(self) -> asyncio.Future[None]:
        """A place in the queue of pongs; the server answers in order, so nobody ever leaves it."""
        waiter: asyncio.Future[None] = self.loop.create_future()
        waiter.add_done_callback(_seen)
        self.pongs.append(waiter)
        self.core.ping()
        self.flush()
        return waiter

    async def has_room(self) -> None:
        while self.paused and self.error is None:
            waiter: asyncio.Future[None] = self.loop.create_future()
            self.room.append(waiter)
            try:
                await waiter
            finally:
                with suppress(ValueError):
                    self.room.remove(waiter)


def resolve(waiter: asyncio.Future[Any] | None, result: Any) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(result)


def fail(waiter: asyncio.Future[Any], error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)


def _seen(waiter: asyncio.Future[None]) -> None:
    """A ping that nobody waits for any more may fail."""
    if not waiter.cancelled():
        waiter.exception()
