"""The asyncio driver: a connection, its subscriptions and its requests on an event loop.

Whoever waits is woken at once when the connection goes; cancelling a wait loses no message and nobody's place. What is
written in one turn of the loop leaves in one write. A handler of `listen` runs where the bytes are read: it must be
quick; what it raises is reported and stops nobody. A connection opened with `reconnect` looks for its servers until it
is closed, subscribes again, and then says so; it repeats nothing that was asked. Any other is closed when it goes.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypedDict, Unpack

from tidings.nats.address import Address, parse_addresses
from tidings.nats.aio_reach import greeted, reach
from tidings.nats.aio_socket import AioSocket, fail
from tidings.nats.core import ANSWERS, Auth, Core, Msg, anonymous, header_block
from tidings.nats.errors import (
    AuthRefused,
    ConnectionGone,
    NatsError,
    NoResponders,
    NotConnected,
    ServerComplaint,
    ServerFailed,
    SlowReader,
    all_failed,
    failure,
)
from tidings.util.backoff import Backoff

#: bytes that may wait for whoever reads a subscription
PENDING_BYTES = 64 << 20
#: the server sends nothing for a while: after so many unanswered pings it is given up
UNANSWERED_PINGS = 2
RECONNECT = Backoff(0.1, 1.0, jitter=0.5)
#: refusals of our credential in a row after which a connection that reconnects is closed for good
REFUSED_AT_MOST = 2
#: the same while other servers of its list are away, who might take it: some seconds
REFUSED_WHILE_AWAY = 20
CLOSE_WITHIN = 1.0

Handler = Callable[[Msg], None]
Callback = Callable[[Msg], Awaitable[None]]
OnError = Callable[[Exception], None]
OnChange = Callable[[], None]
Servers = str | Sequence[str] | Callable[[], str]


def ignore_error(_error: Exception) -> None:
    """Boundary: complaints nobody asked for; callers that care pass their own."""


def ignore_change() -> None:
    pass


class Callbacks(TypedDict, total=False):
    """Who hears of what happens to a connection; nobody by default."""

    on_error: OnError
    on_closed: OnChange
    on_disconnected: OnChange
    on_reconnected: OnChange


class Options(Callbacks, total=False):
    """`auth` is asked at every attempt, so a credential that was renewed on disk is the one that is used. `tls_first`
    begins with the handshake; without it a server that asks for TLS gets it after its greeting. A `tls://` server, or
    one with a context, is never spoken to in plain. `ping_interval`: seconds."""

    name: str
    auth: Callable[[], Auth]
    inbox: str
    reconnect: bool
    tls: ssl.SSLContext | None
    tls_first: bool
    ping_interval: float


class Subscription:
    """Messages that wait to be taken, unless it has a handler. Made by `Connection.subscribe` and `listen`."""

    def __init__(self, connection: Connection, sid: int, subject: str, queue: str, handler: Handler | None) -> None:
        self.connection = connection
        self.sid, self.subject, self.queue = sid, subject, queue
        self.handler: Handler = handler or self._keep
        self.limit = PENDING_BYTES
        self._kept: deque[Msg] = deque()
        self._bytes = 0
        self._wakes: deque[asyncio.Future[None]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._over = False

    def _keep(self, message: Msg) -> None:
        if self._bytes > self.limit:
            self.connection._report(SlowReader(f"nobody takes what comes on {self.subject}: it is dropped"))
            return
        self._kept.append(message)
        self._bytes += len(message.data) + len(message.block)
        _wake_one(self._wakes)

    def waiting(self) -> Iterator[Msg]:
        """What has arrived, without waiting for more."""
        while self._kept:
            message = self._kept.popleft()
            self._bytes -= len(message.data) + len(message.block)
            yield message

    async def next(self, timeout: float | None = None) -> Msg:
        """The next message. A cancellation takes none with it: what had arrived is still `waiting`."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            self.connection.check_open()
            if self._kept:
                return next(self.waiting())
            if self._over:
                raise ConnectionGone(f"{self.subject} was unsubscribed")
            await self._arrival(loop, deadline)

    async def _arrival(self, loop: asyncio.AbstractEventLoop, deadline: float | None) -> None:
        wake: asyncio.Future[None] = loop.create_future()
        self._wakes.append(wake)
        timer = None if deadline is None else loop.call_at(deadline, fail, wake, TimeoutError())
        try:
            await wake
        except asyncio.CancelledError:
            if self._kept:
                _wake_one(self._wakes)  # it may have been ours to take, in the same turn
            raise
        finally:
            if timer is not None:
                timer.cancel()
            with suppress(ValueError):
                self._wakes.remove(wake)

    async def _serve(self, callback: Callback) -> None:
        """One message after the other, until it is over."""
        while not self._over:
            try:
                message = await self.next()
            except ConnectionGone:
                if self._over or self.connection.is_closed:
                    return
                await self.connection._reopened()
                continue
            try:
                await callback(message)
            except Exception as error:  # noqa: BLE001  # boundary: what one message does must not keep the next from coming
                self.connection._report(error)

    async def unsubscribe(self) -> None:
        """Nothing more comes; what had arrived is still `waiting`. Of a closed connection it asks nothing."""
        self._end(ConnectionGone(f"{self.subject} was unsubscribed"))
        self.connection._forget(self)

    async def drain(self, timeout: float) -> None:
        """Unsubscribe, and hear what was on its way meanwhile: it is `waiting` when this returns."""
        try:
            self.connection._live().core.unsubscribe(self.sid)
            await self.connection.flush(timeout)
        finally:
            self._end(ConnectionGone(f"{self.subject} was unsubscribed"))
            self.connection._subscriptions.pop(self.sid, None)

    def _end(self, error: Exception) -> None:
        self._over = True
        self._wake_all(error)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def _wake_all(self, error: Exception) -> None:
        for wake in self._wakes:
            fail(wake, error)


class Connection:
    """A connection to one of some servers. Open it with `connect`."""

    def __init__(self, servers: Servers, options: Options) -> None:
        self.name = options.get("name", "")
        self._servers = servers
        self._make_auth = options.get("auth", lambda: anonymous)
        self._inbox = options.get("inbox", "_INBOX")
        self._answers = f"{self._inbox}.{secrets.token_hex(8)}"
        self._reconnect = options.get("reconnect", False)
        self._tls, self._tls_first = options.get("tls"), options.get("tls_first", False)
        self._ping_interval = options.get("ping_interval", 10.0)
        self._on_error = options.get("on_error", ignore_error)
        self._on_closed = options.get("on_closed", ignore_change)
        self._on_disconnected = options.get("on_disconnected", ignore_change)
        self._on_reconnected = options.get("on_reconnected", ignore_change)
        self._socket: AioSocket | None = None
        #: the server of the list that it is on, or was on last
        self.address: Address | None = None
        self._clustered = False
        self._subscriptions: dict[int, Subscription] = {}
        self._sids = ANSWERS
        self._error: Exception | None = None
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._beats: list[asyncio.Future[None]] = []
        self._back = asyncio.Event()
        #: hear every complaint of the server while they want to know
        self.on_complaint: list[Callable[[str], None]] = []

    # --- what it is ---

    @property
    def is_closed(self) -> bool:
        """For good; while it reconnects it is not."""
        return self._closed

    @property
    def is_connected(self) -> bool:
        return not self._closed and self._socket is not None and self._socket.error is None

    @property
    def incarnation(self) -> str:
        """The id of the server process at the other end: another one may have lost what this one confirmed last."""
        return str(self._socket.core.info.get("server_id", "")) if self._socket is not None else ""

    @property
    def info(self) -> Mapping[str, Any]:
        """What the server last said of itself."""
        return self._socket.core.info if self._socket is not None else {}

    @property
    def is_clustered(self) -> bool:
        """Is the server one of several? Then a stream may have replicas, and some of them lag."""
        self._clustered = self._clustered or bool(self.info.get("cluster"))
        return self._clustered

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        """Those that were asked for. There is one more, on which answers come."""
        return tuple(self._subscriptions.values())

    def new_inbox(self) -> str:
        return f"{self._inbox}.{secrets.token_hex(11)}"

    def check_open(self) -> None:
        if self._socket is None or self._socket.error is not None or self._closed:
            raise ConnectionGone(str(self._why()))

    def _why(self) -> Exception:
        broken = self._socket.error if self._socket is not None else None
        return self._error or broken or ConnectionGone("the connection is closed")

    def _report(self, error: Exception) -> None:
        if isinstance(error, ServerComplaint):
            for hear in list(self.on_complaint):
                hear(str(error))
        self._on_error(error)

    # --- asking and telling ---

    def _live(self) -> AioSocket:
        socket = self._socket
        if socket is None or socket.error is not None or self._closed:
            raise NotConnected(str(self._why()))
        return socket

    async def _live_within(self, timeout: float) -> AioSocket:
        """The socket; of a connection that reconnects, the next one."""
        if self._reconnect:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._reopened()
        return self._live()

    async def _reopened(self) -> None:
        """Wait until it is connected again, or closed for good."""
        socket = self._socket
        if not self._closed and socket is not None and socket.error is not None:
            await asyncio.shield(socket.gone)  # a socket has its error some turns before `_lost` clears `_back`
        await self._back.wait()

    async def publish(
        self, subject: str, payload: bytes = b"", *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Write it; whether it arrived nobody says. It waits while the server does not read."""
        socket = self._live()
        if socket.paused:
            await socket.has_room()
            socket = self._live()
        block = header_block(headers.items()) if headers else b""
        socket.core.publish(subject, payload, reply=reply, block=block)
        socket.flush_soon()

    async def write_raw(self, data: bytes) -> None:
        """Bytes that are protocol already; nothing is checked."""
        socket = self._live()
        socket.core.write_raw(data)
        socket.flush()
        await socket.has_room()

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,
        only: str | None = None,
    ) -> Msg:
        """One answer. `PublishDenied`, `NoResponders` and `ConnectionGone` come at once; `TimeoutError` says nothing
        about what happened. A connection that reconnects meanwhile is waited for, unless `only` one run of the broker
        (its `incarnation`) may get it: `NotConnected` if that is gone."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        socket = self._live() if only is not None or self.is_connected else await self._live_within(timeout)
        if socket.paused or only is not None:
            socket = await self._writable(deadline, only)
        waiter: asyncio.Future[Msg] = loop.create_future()
        timer = loop.call_at(deadline, fail, waiter, TimeoutError())
        token = None
        try:
            core = socket.core
            token = core.request(subject, payload, header_block(headers.items()) if headers else b"", waiter)
            if len(core.waiting) == 1 and not socket.due:
                socket.flush()  # alone on the line: no need to wait for anybody's turn
            else:
                socket.flush_soon()
            message = await waiter
        finally:
            timer.cancel()
            if token is not None:
                socket.core.waiting.pop(token, None)
        if message.block and message.status == 503:
            raise NoResponders(f"nobody listens on {subject}")
        return message

    async def request_all(
        self, messages: Sequence[tuple[str, bytes, bytes]], *, timeout: float, only: str | None = None
    ) -> list[Msg | Exception]:
        """The answers to (subject, header block, payload) of many, as of `request`, or why there is none of each.

        All are written, in order, before the first answer is waited for: how many is for the caller to bound.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        socket = await self._writable(deadline, only)
        core, tokens, waiters = socket.core, list[bytes](), list[asyncio.Future[Msg]]()
        for subject, block, payload in messages:
            waiter: asyncio.Future[Msg] = loop.create_future()
            waiters.append(waiter)
            try:
                tokens.append(core.request(subject, payload, block, waiter))
            except NatsError as error:
                waiter.set_exception(error)
            socket.flush_soon()
        try:
            await asyncio.wait(waiters, timeout=deadline - loop.time())
        finally:
            for token in tokens:
                core.waiting.pop(token, None)
        return [_outcome(waiter) for waiter in waiters]

    async def _writable(self, deadline: float, only: str | None) -> AioSocket:
        """The socket, once it takes more; `NotConnected` if it goes to another run of the broker than `only`."""
        socket = self._live()
        if socket.paused:
            async with asyncio.timeout_at(deadline):
                await socket.has_room()
            socket = self._live()
        if only is not None and only != self.incarnation:
            raise NotConnected("another run of the broker answers now")
        return socket

    async def flush(self, timeout: float = 5.0) -> None:
        """A round trip: the server has read all that was written before."""
        waiter = self._live().ping()
        timer = asyncio.get_running_loop().call_later(timeout, fail, waiter, TimeoutError())
        try:
            await asyncio.shield(waiter)
        finally:
            timer.cancel()

    # --- hearing ---

    async def subscribe(self, subject: str, cb: Callback | None = None, *, queue: str = "") -> Subscription:
        """Messages are taken with `next`, or handed one after the other to `cb` in a task of the subscription."""
        subscription = self._add(subject, queue, None)
        if cb is not None:
            subscription._task = asyncio.create_task(subscription._serve(cb), name=f"subscription to {subject}")
        return subscription

    async def listen(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Messages are handed to `handler` where they are read."""
        return self._add(subject, queue, handler)

    def _add(self, subject: str, queue: str, handler: Handler | None) -> Subscription:
        socket = self._live()
        sid = self._sids + 1
        socket.core.subscribe(subject, sid, queue)
        self._sids = sid
        subscription = Subscription(self, sid, subject, queue, handler)
        self._subscriptions[sid] = subscription
        socket.flush_soon()
        return subscription

    def _forget(self, subscription: Subscription) -> None:
        if self._subscriptions.pop(subscription.sid, None) is not None and self.is_connected:
            socket = self._live()
            socket.core.unsubscribe(subscription.sid)
            socket.flush_soon()

    # --- life ---

    async def _open_any(self, timeout: float) -> None:
        """The first server that takes us, each within this time. One that refuses our credential is passed over too:
        it may be another one's by now, or behind."""
        failed: list[ServerFailed] = []
        servers = self._servers() if callable(self._servers) else self._servers
        async with aclosing(greeted(parse_addresses(servers), partial(self._reach, timeout), failed)) as found:
            async for address, socket in found:
                try:
                    async with asyncio.timeout(timeout):
                        await self._enter(socket)
                except (NatsError, OSError) as error:  # a TimeoutError is an OSError
                    failed.append(failure(address, error))
                else:
                    self.address = address
                    return
        raise all_failed(failed)

    async def _reach(self, timeout: float, address: Address) -> AioSocket:
        core = Core(name=self.name, inbox=self._answers, auth=self._make_auth())
        socket = AioSocket(core, self._subscriptions, report=self._report, on_lost=self._lost)
        tls_first = self._tls_first or address.tls_first
        context = self._tls or (address.context() if address.tls or tls_first else None)
        async with asyncio.timeout(timeout):
            await reach(address, socket, context, tls_first=tls_first)
        return socket

    async def _enter(self, socket: AioSocket) -> None:
        """Say who we are, and subscribe again."""
        try:
            if socket.error is not None:  # it went while another server was asked
                raise socket.error
            socket.deaf = False
            socket.core.hello()
            for subscription in self._subscriptions.values():
                socket.core.subscribe(subscription.subject, subscription.sid, subscription.queue)
            welcome = socket.ping()
            socket.data_received(b"")
            await welcome
            if socket.error is not None:  # it went again in the very turn in which it was welcome
                raise socket.error
        except BaseException:
            socket.abandon(ConnectionGone("it was not opened"))
            raise
        self._socket, self._beats = socket, []
        self._back.set()
        self._schedule_ping()

    def _schedule_ping(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        if self._ping_interval:
            self._beat = asyncio.get_running_loop().call_later(self._ping_interval, self._ping)

    def _ping(self) -> None:
        socket = self._socket
        if socket is None or socket.error is not None:
            return
        self._beats = [each for each in self._beats if not each.done()]
        if len(self._beats) >= UNANSWERED_PINGS:
            socket.abandon(ConnectionGone("the server went silent"))
            return
        self._beats.append(socket.ping())
        self._schedule_ping()

    def _lost(self, socket: AioSocket) -> None:
        if socket is not self._socket or self._closed:
            return
        self._back.clear()
        assert socket.error is not None
        for subscription in list(self._subscriptions.values()):
            subscription._wake_all(socket.error)
        self._on_disconnected()
        if self._reconnect and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._come_back(), name=f"reconnect of {self.name}")
        else:
            self._end(socket.error)

    async def _come_back(self) -> None:
        delays, refused = RECONNECT.delays(), 0
        while not self._closed:
            try:
                await self._open_any(timeout=2.0)
            except AuthRefused as error:
                refused += 1
                if refused >= (REFUSED_AT_MOST if error.by_all else REFUSED_WHILE_AWAY):
                    self._end(error)
                    return
            except (NatsError, OSError):
                pass  # the server is not back yet: that is what this loop waits for
            else:
                self._on_reconnected()
                return
            await asyncio.sleep(next(delays))

    def _end(self, error: Exception) -> None:
        """For good: whoever waits hears it."""
        if self._closed:
            return
        self._closed, self._error = True, error
        if self._beat is not None:
            self._beat.cancel()
        self._back.set()
        for subscription in list(self._subscriptions.values()):
            subscription._end(error)
        self._on_closed()

    def fail_pending(self, error: Exception) -> None:
        """Wake everybody who waits for an answer with this."""
        if self._socket is not None:
            for _, waiter in list(self._socket.core.waiting.values()):
                fail(waiter, error)

    def abort(self) -> None:
        """Cut the socket, as a network does: what was not written is lost."""
        if self._socket is not None:
            self._socket.abandon(ConnectionGone("the connection was cut"))

    async def close(self) -> None:
        """In bounded time, also towards a server that stopped reading. What was written before still goes."""
        socket = self._socket
        if not self._closed:
            if socket is not None:
                socket.flush()
                socket.error = socket.error or ConnectionGone("the connection was closed")
                socket.wake_all()
            self._end(ConnectionGone("the connection was closed"))
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if socket is None or socket.transport is None:
            return
        socket.transport.close()
        try:
            async with asyncio.timeout(CLOSE_WITHIN):
                await asyncio.shield(socket.gone)
        except TimeoutError:
            socket.transport.abort()
        except BaseException:
            socket.transport.abort()
            raise


def _outcome(waiter: asyncio.Future[Msg]) -> Msg | Exception:
    if not waiter.done():
        return TimeoutError()
    error = waiter.exception()
    assert error is None or isinstance(error, Exception)
    return error or waiter.result()


def _wake_one(wakes: deque[asyncio.Future[None]]) -> None:
    for wake in wakes:
        if not wake.done():
            wake.set_result(None)
            return


async def connect(servers: Servers, *, timeout: float = 5.0, **options: Unpack[Options]) -> Connection:
    """Open a connection to the first of these servers that takes us. A function is asked at every attempt.

    A refused credential is tried once more before `AuthRefused` is raised.
    """
    connection = Connection(servers, options)
    try:
        await connection._open_any(timeout)
    except AuthRefused:
        # nats-server, while it reloads its configuration, refuses every connection that has not sent CONNECT yet,
        # whatever its credential. A second attempt is not part of that reload.
        await connection._open_any(timeout)
    return connection
