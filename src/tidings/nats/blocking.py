"""The driver for one thread and a blocking socket: workers that read and write in bulk.

It keeps no promise across a lost connection (`ConnectionGone`): reads are repeated by their caller. Answers carry the
token of their request, so several may be under way; `parts` reads a long answer without an object for each message.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from tidings.nats.address import Address, parse_addresses
from tidings.nats.core import ANSWERS, Auth, Complaint, Core, Event, Info, Msg, Pong, anonymous, status_of
from tidings.nats.errors import (
    AuthRefused,
    ConnectionGone,
    NatsError,
    ProtocolError,
    PublishDenied,
    ServerFailed,
    Unwritable,
    all_failed,
    failure,
)

CHUNK = 1 << 20


class Reply(NamedTuple):
    """One message that came back: to which of our requests, with its raw header block."""

    token: int
    block: bytes
    payload: bytes

    @property
    def status(self) -> int | None:
        return status_of(self.block)


class BlockingConnection:
    """One connection, used by one thread. Open it with `connect`; every method may raise `ConnectionGone`."""

    def __init__(self, sock: socket.socket, core: Core, timeout: float) -> None:
        self._sock = sock
        self._core = core
        self.timeout = timeout
        #: when it was last written to
        self.used = time.monotonic()

    @classmethod
    def connect(
        cls,
        servers: str,
        *,
        auth: Auth = anonymous,
        name: str = "",
        inbox: str = "_INBOX",
        tls: ssl.SSLContext | None = None,
        tls_first: bool = False,
        timeout: float = 5.0,
    ) -> Self:
        """The first of these servers that takes us. A refused credential is tried once more (see `aio.connect`)."""
        refused: NatsError | None = None
        for _ in range(2):
            failed: list[ServerFailed] = []
            for address in parse_addresses(servers):
                core = Core(name=name, inbox=f"{inbox}.{time.monotonic_ns():x}", auth=auth)
                try:
                    return cls._open(address, core, tls, tls_first=tls_first or address.tls_first, timeout=timeout)
                except (NatsError, OSError) as error:
                    failed.append(failure(address, error))
            refused = all_failed(failed)
            if not isinstance(refused, AuthRefused):
                break
        assert refused is not None
        raise refused

    @classmethod
    def _open(
        cls, address: Address, core: Core, tls: ssl.SSLContext | None, *, tls_first: bool, timeout: float
    ) -> Self:
        if address.websocket:
            raise Unwritable("workers that read in bulk speak no websocket: give them a tls:// or nats:// address")
        context = tls or (address.context() if address.tls or tls_first else None)
        sock = socket.create_connection((address.host, address.port), timeout=timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = cls(sock, core, timeout)
        try:
            connection._greet(address.server_name, context, tls_first=tls_first)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, host: str, context: ssl.SSLContext | None, *, tls_first: bool) -> None:
        if context is not None and tls_first:
            self._sock = context.wrap_socket(self._sock, server_hostname=host)
        info = self._until(Info)
        assert isinstance(info, Info)
        if not tls_first and (context is not None or info.fields.get("tls_required")):
            if not (info.fields.get("tls_required") or info.fields.get("tls_available")):
                raise ProtocolError(f"{host} offers no TLS")
            if not self._core.is_between:
                raise ProtocolError("the server speaks before TLS has begun")
            context = context or ssl.create_default_context()
            self._sock = context.wrap_socket(self._sock, server_hostname=host)
        self._core.hello()
        self.ping()

    def close(self) -> None:
        self._sock.close()

    @property
    def max_payload(self) -> int:
        return self._core.max_payload

    @property
    def server_id(self) -> str:
        return str(self._core.info.get("server_id", ""))

    @property
    def is_clustered(self) -> bool:
        """Is the server one of several? Then a stream may have replicas, and some of them lag."""
        return bool(self._core.info.get("cluster"))

    # --- asking ---

    def request(self, subject: str, payload: bytes = b"", *, timeout: float | None = None) -> Reply:
        """One answer to one request."""
        return self.answer(self.send_request(subject, payload), timeout)

    def send_request(self, subject: str, payload: bytes) -> int:
        """Send without waiting. Answers carry the token that is returned."""
        token = self._ask(subject, payload, b"")
        self._flush()
        return token

    def publish_all(self, messages: Iterable[tuple[str, bytes, bytes]]) -> list[int]:
        """Send (subject, header block, payload) of many at once; answers their tokens. Awaiting is the caller's."""
        tokens = [self._ask(subject, payload, block) for subject, block, payload in messages]
        self._flush()
        return tokens

    def publish_together(self, messages: Sequence[tuple[str, bytes, bytes]]) -> int:
        """The same for a batch that is answered once, for its last message; answers that one's token."""
        for subject, block, payload in messages[:-1]:
            self._core.publish(subject, payload, block=block)
        (token,) = self.publish_all(messages[-1:])
        return token

    def _ask(self, subject: str, payload: bytes, block: bytes) -> int:
        token = self._core.request(subject, payload, block, None)
        self._core.waiting.clear()  # who waits is known by whoever asks for answers here
        return int(token)

    def answer(self, token: int, timeout: float | None = None) -> Reply:
        """The next answer to `token`; older answers nobody waits for any more are dropped."""
        for reply in self.replies(timeout):
            if reply.token == token:
                return reply
        raise AssertionError("replies never end")

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        """Every answer that comes, until the caller stops asking. `timeout` seconds of silence end it."""
        while True:
            event = self._next(timeout or self.timeout)
            if type(event) is Msg and event.sid == ANSWERS:
                yield self._reply(event)

    def parts(self, token: int, timeout: float | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Header block and payload of every answer to `token`, like `replies` and several times as quick.

        What ends them is for the caller to see: only it knows a record from a status.
        """
        wanted = b"%d" % token
        while True:
            yield from self._core.whole_answers(wanted)
            event = self._next(timeout or self.timeout)  # a part of an answer, or something else: the careful way
            if type(event) is Msg and event.sid == ANSWERS and self._core.token_of(event) == wanted:
                yield event.block, event.data

    def ping(self) -> None:
        """A round trip: everything sent before has reached the server. Answers that come meanwhile are dropped."""
        self._core.ping()
        self._flush()
        self._until(Pong)

    # --- events ---

    def _reply(self, message: Msg) -> Reply:
        token = self._core.token_of(message)
        return Reply(int(token) if token.isdigit() else 0, message.block, message.data)

    def _until(self, kind: type[Event]) -> Event:
        while not isinstance(event := self._next(self.timeout), kind):
            pass
        return event

    def _next(self, timeout: float) -> Event:
        while (event := self._core.next_event()) is None:
            self._sock.settimeout(timeout)
            self._fill()
        if type(event) is Complaint:
            raise _error_of(event)
        return event

    def _fill(self) -> None:
        self._flush()  # a PING may have been read
        try:
            chunk = self._sock.recv(CHUNK)
        except OSError as error:
            raise ConnectionGone(f"the server went silent: {error}") from error
        if not chunk:
            raise ConnectionGone("the server closed the connection")
        self._core.feed(chunk)

    def _flush(self) -> None:
        if not self._core.out_size:
            return
        self.used = time.monotonic()
        try:
            self._sock.sendall(self._core.take())
        except OSError as error:
            raise ConnectionGone(f"the connection to the server went: {error}") from error


def _error_of(complaint: Complaint) -> NatsError:
    if complaint.kind == "auth":
        return AuthRefused(complaint.text)
    return PublishDenied(complaint.text) if complaint.subject else ConnectionGone(f"the server says: {complaint.text}")
