"""A NATS connection that tells the truth about headers, and how we open one.

nats-py keeps one value per header name and takes any `Status:` header for a word of the server. Senders can set
both, so this client parses the raw block itself: status only from the protocol's first line, fields in wire order.
Nor may a subject be trusted to be text: one that is not UTF-8, or holds a vertical tab, ends nats-py's read loop and
leaves a connection that looks open and hears nothing, so both are read here as what they are.
It adds no retry policy; who holds a connection decides what to do when it is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

from nats.aio.client import Client, RawCredentials
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import Error as NatsError
from nats.protocol import parser

from tidings.broker.private_files import check_private
from tidings.errors import AuthRevoked, BrokerUnreachable, DeniedError, WireError
from tidings.wire.headers import Headers

_VIOLATION = re.compile(r'permissions violation for publish to "([^"]+)"')
#: what the broker says of a subscription beyond what a connection may have; it is not there, and all others are
TOO_MANY_SUBSCRIPTIONS = "maximum subscriptions exceeded"
_PLAIN_BLOCK = b"NATS/1.0\r\n"
_MSG = rb"MSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)\r\n"
_HMSG = rb"HMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)[ \t]+(\d+)\r\n"
_PLAIN_FRONT, _FRONT = re.compile(_MSG), re.compile(_HMSG)
ErrorCallback = Callable[[Exception], Awaitable[None]]
Callback = Callable[[], Awaitable[None]]


class HeaderDict(dict[str, str]):
    """What nats-py expects (a dict), with the block as it came in `.raw`.

    It holds only what the server itself says: `Status` and `Description`, from the protocol's first line. A sender's
    fields are for `split_block`; parsing them here would be done twice, and a block may not parse at all.
    """

    raw: bytes


class _Parser(parser.Parser):
    """nats-py's parser, with the server's idea of what separates words.

    Its expressions take a vertical tab or form feed, which the server allows inside a subject, for a separator: the
    rest of the subject then counts as the subscription a message is for. Same code, other expressions.
    """

    parse: Any = FunctionType(
        parser.Parser.parse.__code__,
        vars(parser)
        | {
            "MSG_RE": re.compile(rb"\A" + _MSG),
            "HMSG_RE": re.compile(rb"\A" + _HMSG),
        },
        argdefs=parser.Parser.parse.__defaults__,
    )


class Connection(Client):
    """nats-py's client with our reading of headers and subjects."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Parser(self)
        #: subject in lower case -> answers awaited for it; nats-py lower-cases the subject of a violation
        self._asked: dict[str, set[asyncio.Future[Any]]] = {}
        self._tokens = itertools.count(1)
        #: subscriptions whose messages are handed over where they are read, without a queue and a task in between
        self._direct: dict[int, Callable[[Any], None]] = {}
        self._write_due = False
        #: hear permission violations, and of subscriptions that are too many, while they want to know
        self.on_violation: list[Callable[[str], None]] = []
        #: id of the broker process at the other end: another one may have lost what this one confirmed last
        self.incarnation = ""

    async def ask(
        self, subject: str, payload: bytes, *, headers: dict[str, str] | None = None, timeout: float = 5.0
    ) -> Any:
        """A request that learns of a refusal by the broker, or of a lost connection, at once and not by timeout."""
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        assert self._resp_sub_prefix is not None
        token = f"{next(self._tokens):x}"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._resp_map[token] = future
        waiting = self._asked.setdefault(subject.lower(), set())
        waiting.add(future)
        # A timer and a future cost a third of `asyncio.timeout`, and this is on the way of every message.
        timer = loop.call_later(timeout, _expire, future)
        try:
            self._write(loop, subject, bytes(self._resp_sub_prefix) + token.encode(), headers, payload)
            message = await future
        finally:
            timer.cancel()
            self._resp_map.pop(token, None)
            waiting.discard(future)
            if not waiting:
                self._asked.pop(subject.lower(), None)
        if message.headers is not None and message.headers.get("Status") == "503":
            raise NoRespondersError
        return message

    def _write(
        self,
        loop: asyncio.AbstractEventLoop,
        subject: str,
        reply: bytes,
        headers: dict[str, str] | None,
        payload: bytes,
    ) -> None:
        """nats-py's publish without its second look at subjects and headers that we built ourselves."""
        if not self.is_connected:
            raise ConnectionClosedError
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]) if headers else ""
        block = f"NATS/1.0\r\n{lines}\r\n".encode()
        size = len(block)
        command = b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
            subject.encode(),
            reply,
            size,
            size + len(payload),
            block,
            payload,
        )
        if len(self._resp_map) == 1 and not self._pending and self._transport is not None:
            self._transport.write(command)  # alone on the line: no need to wait for anybody's turn
            return
        if not self._write_due:
            self._write_due = True
            loop.call_soon(self._write_out)
        self._pending.append(command)
        self._pending_data_size += len(command)

    def _write_out(self) -> None:
        """Everything that was asked in this turn of the loop, in one write."""
        self._write_due = False
        if self._pending and self._transport is not None and self.is_connected:
            self._transport.writelines(self._pending[:])
            self._pending = []
            self._pending_data_size = 0

    async def listen(self, subject: str, handler: Callable[[Any], None]) -> Any:
        """Subscribe with a handler that is called where the message is read. It must be quick and must not raise."""
        sid = self._sid + 1  # what `subscribe` will take, before anything can arrive
        self._direct[sid] = handler
        subscription = await self.subscribe(subject)
        assert subscription._id == sid, "the handler was registered for another subscription"
        return subscription

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._direct.pop(sid, None)

    async def _init_request_sub(self) -> None:
        sid = self._sid + 1
        self._direct[sid] = self._on_answer
        await super()._init_request_sub()
        assert sid in self._subs, "answers were registered for another subscription"

    def _on_answer(self, message: Any) -> None:
        future = self._resp_map.get(message.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(message)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler = self._direct.get(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        elif sid in self._subs:
            handler(self._build_message(sid, subject, reply, data, _read_block(headers)))

    def read_directly(self) -> None:
        """Hand whole messages to direct handlers in the very turn of the loop that read them.

        nats-py reads in a task of its own, which is woken a turn later. It still gets everything else, and everything
        once something else came: bytes are taken here only while it has none and waits for more.
        """
        reader = getattr(self._transport, "_io_reader", None)
        if not isinstance(reader, asyncio.StreamReader):
            return
        stream: Any = reader
        feed = stream.feed_data

        def feed_rest(data: bytes) -> None:
            idle = stream._waiter is not None and not stream._buffer
            if idle and not self._ps.buf and self._ps.state == parser.AWAITING_CONTROL_LINE:
                data = data[self._hand_over(data) :]
            if data:
                feed(data)

        stream.feed_data = feed_rest

    def _hand_over(self, data: bytes) -> int:
        """Give whole messages at the front of `data` to their direct handlers; answers how many bytes those were."""
        position, size = 0, len(data)
        while position < size:
            found = _FRONT.match(data, position) or _PLAIN_FRONT.match(data, position)
            if found is None:
                break
            subject, number, _, reply, *sizes = found.groups()
            sid, start = int(number), found.end()
            end = start + int(sizes[-1])
            handler = self._direct.get(sid)
            if handler is None or sid not in self._subs or end + 2 > size:
                break
            body = start + int(sizes[0]) if len(sizes) == 2 else start
            headers = _read_block(data[start:body])
            position = end + 2
            handler(self._build_message(sid, subject, reply or b"", data[body:end], headers))
        return position

    def refuse(self, complaint: str) -> bool:
        """Fail the requests a permission violation speaks of. Answers whether there were any."""
        if any(each in complaint.lower() for each in ("permissions violation", TOO_MANY_SUBSCRIPTIONS)):
            for hear in self.on_violation:
                hear(complaint)
        found = _VIOLATION.search(complaint.lower())
        waiting = self._asked.get(found[1], set()) if found else set()
        for future in list(waiting):
            if not future.done():
                future.set_exception(DeniedError(f"the broker refuses this agent to publish to {found[1]}"))  # type: ignore[index]
        return bool(waiting)

    async def _process_err(self, err_msg: str) -> None:
        """nats-py closes the connection over a subscription too many; the broker only refuses that one."""
        if TOO_MANY_SUBSCRIPTIONS in err_msg.lower():
            await self._error_cb(NatsError(f"nats: {TOO_MANY_SUBSCRIPTIONS}"))
            return
        await super()._process_err(err_msg)

    @property
    def subscriptions(self) -> int:
        """How many there are on this connection."""
        return len(self._subs)

    def fail_pending(self, error: Exception) -> None:
        """Wake everybody who waits for an answer on this connection."""
        for future in [each for waiting in self._asked.values() for each in waiting]:
            if not future.done():
                future.set_exception(error)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        # nats-py writes the PING past what is still pending, so `flush` would return before the broker read it.
        self._write_out()
        await super()._send_ping(future)

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Any:
        # A replacement character is in no name of ours, so such a subject parses as nothing and is quarantined.
        return self.msg_class(
            subject=subject.decode(errors="replace"),
            reply=reply.decode(errors="replace"),
            data=data,
            headers=headers,
            _client=self,
            _sid=sid,
        )

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        return _read_block(headers)


def _read_block(headers: bytes) -> HeaderDict | None:
    if not headers:
        return None
    found = HeaderDict()
    found.raw = bytes(headers)
    if not found.raw.startswith(_PLAIN_BLOCK):
        with suppress(WireError):  # a block that does not parse says nothing
            block = Headers.parse(found.raw)
            if block.status is not None:
                found["Status"] = str(block.status)
                found["Description"] = block.description
    return found


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


def raw_headers(message: Any) -> bytes:
    """The header block of a received message, byte for byte; empty if it had none."""
    return message.headers.raw if isinstance(message.headers, HeaderDict) else b""


def status_of(message: Any) -> Headers | None:
    """The block of a word from the server itself (it has a status), or None for a message."""
    found = message.headers
    if not isinstance(found, HeaderDict) or "Status" not in found:
        return None
    return Headers.parse(found.raw)


async def _ignore_error(_error: Exception) -> None:
    """Boundary: nats-py prints errors nobody asked for; callers that care pass their own callback."""


async def connect(
    url: str,
    creds: Path | str,
    user_id: str,
    *,
    name: str,
    reconnect: bool = True,
    on_error: ErrorCallback = _ignore_error,
    on_closed: Callback | None = None,
    on_disconnected: Callback | None = None,
    on_reconnected: Callback | None = None,
    timeout: float = 5.0,
) -> Connection:
    """Open a connection whose replies arrive in this user's own inbox.

    `creds` is a creds file (0600, checked), or its text for a user that lives only in this process. nats-py sleeps
    two seconds after a refused first try, so the port is probed first.
    """
    if isinstance(creds, Path):
        check_private(creds)
    await _probe(url, timeout)
    connection = Connection()
    refused: list[Exception] = []

    async def remember(error: Exception) -> None:
        refused.append(error)
        await on_error(error)

    try:
        async with asyncio.timeout(timeout):
            await connection.connect(
                url,
                name=name,
                user_credentials=str(creds) if isinstance(creds, Path) else RawCredentials(creds),
                inbox_prefix=f"_INBOX_{user_id}",
                allow_reconnect=reconnect,
                max_reconnect_attempts=-1 if reconnect else 0,
                reconnect_time_wait=0.1,  # type: ignore[arg-type]  # any number of seconds works
                ping_interval=10,
                max_outstanding_pings=2,
                connect_timeout=2,
                error_cb=remember,
                closed_cb=on_closed,
                disconnected_cb=on_disconnected,
                reconnected_cb=on_reconnected,
            )
    except (TimeoutError, NatsError, OSError) as error:
        await close_quietly(connection)
        raise _why_not(url, name, [*refused, error]) from error
    except asyncio.CancelledError:
        transport: Any = connection._transport
        if transport is not None:
            transport.close()  # nats-py leaves the socket of a broker that never said hello
        raise
    connection.incarnation = str(connection._server_info.get("server_id", ""))
    connection.read_directly()
    return connection


def _why_not(url: str, name: str, errors: Sequence[BaseException]) -> AuthRevoked | BrokerUnreachable:
    """What a connection that was not made means, by everything that was heard of it."""
    text = " ".join(map(str, errors)).lower()
    if "authorization" in text or "authentication" in text:
        return AuthRevoked(f"the broker at {url} refuses {name}: revoked, expired or not of this space")
    return BrokerUnreachable(f"no broker answers at {url} ({errors[-1] or type(errors[-1]).__name__})")


async def close_quietly(connection: Connection) -> None:
    """Close in bounded time, even if the broker is gone: nats-py still tries to write to the dead socket."""
    try:
        async with asyncio.timeout(1):
            await connection.close()
    except (TimeoutError, NatsError, OSError):
        return  # nobody is there to say goodbye to


async def _probe(url: str, timeout: float) -> None:
    host, _, port = url.removeprefix("nats://").removeprefix("tls://").rpartition(":")
    try:
        async with asyncio.timeout(timeout):
            _reader, writer = await asyncio.open_connection(host.rpartition("@")[2], int(port))
    except (OSError, TimeoutError, ValueError, socket.gaierror) as error:
        raise BrokerUnreachable(f"no broker answers at {url}: is the space running? (`tidings up`)") from error
    writer.close()
