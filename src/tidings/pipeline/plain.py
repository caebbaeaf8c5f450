"""A NATS connection over a plain blocking socket, for workers that read and write in bulk.

nats-py parses every message into objects; reading a log of millions of records that way costs four times what the
broker needs. This one knows CONNECT, SUB, PUB, HPUB and the two kinds of message, answers PING whenever it reads, and
hands out header blocks and payloads as bytes. It is used by one thread, keeps no promise across a lost connection
(`PlainLost`; reads are repeated by their caller), and does no more than the pipeline needs.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tidings.broker.jwt import split_credentials
from tidings.errors import AuthRevoked, BrokerUnreachable, ConnectionLost, DeniedError, TidingsError

CHUNK = 1 << 20
#: seconds after which a connection has to show that it is still there
IDLE = 5.0
_HMSG = re.compile(rb"HMSG [^ ]+\.([0-9]+) [0-9]+ ([0-9]+) ([0-9]+)\r\n")
_AUTH_WORDS = ("authorization", "authentication", "revoked", "expired")


class PlainLost(ConnectionLost):
    """The connection went; what was asked for may be asked again."""

    code = "connection_lost"


class Reply(NamedTuple):
    """One message that came back: to which of our requests, with its raw header block."""

    token: int
    block: bytes
    payload: bytes

    @property
    def status(self) -> int | None:
        """The status of the protocol's first line: the only place a status can be."""
        return status_of(self.block)


def status_of(block: bytes) -> int | None:
    """The status in the first line of a header block. A record of a hostile sender may look as if it had one."""
    return int(block[9:12]) if block[:9] == b"NATS/1.0 " and block[9:12].isdigit() else None


class PlainConnection:
    """One connection. Open it with `connect`; every method may raise `PlainLost`."""

    def __init__(self, sock: socket.socket, info: Mapping[str, Any], inbox: str, timeout: float) -> None:
        self._sock = sock
        self._buffer = b""
        self._position = 0
        self._inbox = inbox
        self._token = 0
        self.used = time.monotonic()
        self.timeout = timeout
        self.max_payload = int(info.get("max_payload", 1 << 20))
        self.server_id = str(info.get("server_id", ""))

    @classmethod
    def connect(
        cls, url: str, creds: Path | None = None, *, name: str = "tidings", timeout: float = 5.0
    ) -> PlainConnection:
        address = urlsplit(url if "//" in url else f"nats://{url}")
        host, port = address.hostname or "127.0.0.1", address.port or 4222
        try:
            sock = socket.create_connection((host, port), timeout=timeout)
        except OSError as error:
            raise BrokerUnreachable(f"no broker answers at {host}:{port}: {error}") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return cls._greet(sock, host, creds, name, timeout, tls=address.scheme == "tls")
        except BaseException:
            sock.close()
            raise

    @classmethod
    def _greet(
        cls, sock: socket.socket, host: str, creds: Path | None, name: str, timeout: float, *, tls: bool
    ) -> PlainConnection:
        line = _read_line(sock)
        if not line.startswith(b"INFO "):
            raise BrokerUnreachable(f"{host} does not greet like a NATS server")
        info = json.loads(line[5:])
        if tls or info.get("tls_required"):
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        options: dict[str, Any] = {
            "verbose": False,
            "pedantic": False,
            "lang": "python",
            "version": "1",
            "protocol": 1,
            "headers": True,
            "no_responders": True,
            "name": name,
        }
        owner = "plain"
        if creds is not None:
            token, key = split_credentials(creds.read_text())
            signature = base64.urlsafe_b64encode(key.sign(str(info.get("nonce", "")).encode()))
            options |= {"jwt": token, "sig": signature.rstrip(b"=").decode()}
            owner = key.id
        connection = cls(sock, info, f"_INBOX_{owner}.{time.monotonic_ns():x}", timeout)
        hello = json.dumps(options, separators=(",", ":")).encode()
        connection._send(b"CONNECT " + hello + b"\r\nSUB " + f"{connection._inbox}.*".encode() + b" 1\r\nPING\r\n")
        connection._await_pong()
        return connection

    def close(self) -> None:
        self._sock.close()

    # --- asking ---

    def request(self, subject: str, payload: bytes = b"", *, timeout: float | None = None) -> Reply:
        """One answer to one request."""
        token = self.send_request(subject, payload)
        return self.answer(token, timeout)

    def api(self, operation: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A `$JS.API` request; the answer may hold an `error`."""
        reply = self.request(f"$JS.API.{operation}", b"" if body is None else json.dumps(body).encode())
        if reply.status is not None:
            raise BrokerUnreachable(f"JetStream does not answer {operation} ({reply.status})")
        return dict(json.loads(reply.payload))

    def send_request(self, subject: str, payload: bytes) -> int:
        """Send without waiting. Answers carry the token that is returned."""
        self._token += 1
        head = f"PUB {subject} {self._inbox}.{self._token} {len(payload)}\r\n".encode()
        self._send(head + payload + b"\r\n")
        return self._token

    def publish_all(self, messages: Iterable[tuple[str, bytes, bytes]]) -> list[int]:
        """Send (subject, header block, payload) of many at once; answers their tokens. Awaiting is the caller's."""
        parts: list[bytes] = []
        tokens: list[int] = []
        for subject, block, payload in messages:
            self._token += 1
            tokens.append(self._token)
            sizes = f"{len(block)} {len(block) + len(payload)}\r\n"
            parts.append(f"HPUB {subject} {self._inbox}.{self._token} {sizes}".encode())
            parts += (block, payload, b"\r\n")
        self._send(b"".join(parts))
        return tokens

    def answer(self, token: int, timeout: float | None = None) -> Reply:
        """The next answer to `token`; older answers nobody waits for any more are dropped."""
        for reply in self.replies(timeout):
            if reply.token == token:
                return reply
        raise AssertionError("replies never end")

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        """Every message that comes, until the caller stops asking. `PlainLost` after `timeout` seconds of silence."""
        self._sock.settimeout(timeout or self.timeout)
        while True:
            line = self._line()
            if line.startswith((b"HMSG ", b"MSG ")):
                yield self._message(line)
            else:
                self._control(line)

    def parts(self, token: int, timeout: float | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Header block and payload of every answer to `token`, like `replies` and several times as quick.

        What ends them is for the caller to see: only it knows a record from a status.
        """
        self._sock.settimeout(timeout or self.timeout)
        wanted = b"%d" % token
        while True:
            found = _HMSG.match(self._buffer, self._position)
            if found is None or len(self._buffer) < (end := found.end() + int(found[3])) + 2:
                line = self._line()  # a part of a message, or something else: the careful way
                if line.startswith((b"HMSG ", b"MSG ")):
                    reply = self._message(line)
                    if reply.token == token:
                        yield reply.block, reply.payload
                else:
                    self._control(line)
                continue
            start = found.end()
            cut = start + int(found[2])
            self._position = end + 2
            if found[1] == wanted:
                yield self._buffer[start:cut], self._buffer[cut:end]

    def ping(self) -> None:
        """A round trip: everything sent before has reached the broker."""
        self._send(b"PING\r\n")
        self._await_pong()

    # --- the protocol ---

    def _message(self, line: bytes) -> Reply:
        words = line.split()
        total = int(words[-1])
        header = int(words[-2]) if line[:1] == b"H" else 0
        start = self._position
        while len(self._buffer) - start < total + 2:
            self._fill()
            start = self._position
        self._position = start + total + 2
        body = self._buffer[start : start + total]
        token = words[1].rpartition(b".")[2]
        return Reply(int(token) if token.isdigit() else 0, body[:header], body[header:])

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._position)) < 0:
            self._fill()
        line = self._buffer[self._position : end]
        self._position = end + 2
        return line

    def _fill(self) -> None:
        try:
            chunk = self._sock.recv(CHUNK)
        except (TimeoutError, OSError) as error:
            raise PlainLost(f"the broker went silent: {error}") from error
        if not chunk:
            raise PlainLost("the broker closed the connection")
        self._buffer = self._buffer[self._position :] + chunk
        self._position = 0

    def _control(self, line: bytes) -> None:
        if line == b"PING":
            self._send(b"PONG\r\n")
        elif line.startswith(b"-ERR"):
            raise _complaint(line[4:].decode(errors="replace").strip(" '"))

    def _await_pong(self) -> None:
        self._sock.settimeout(self.timeout)
        while (line := self._line()) != b"PONG":
            if line.startswith((b"HMSG ", b"MSG ")):
                self._message(line)
            else:
                self._control(line)

    def _send(self, data: bytes) -> None:
        self.used = time.monotonic()
        try:
            self._sock.sendall(data)
        except (TimeoutError, OSError) as error:
            raise PlainLost(f"the connection to the broker went: {error}") from error


class PlainLine:
    """A connection that is looked at before it is used again: the broker gives up on one that answered no PING."""

    def __init__(self, connect: Callable[[], PlainConnection]) -> None:
        self._connect = connect
        self._held: PlainConnection | None = None

    def live(self) -> PlainConnection:
        if self._held is not None and time.monotonic() - self._held.used > IDLE:
            try:
                self._held.ping()
            except PlainLost:
                self.close()
        if self._held is None:
            self._held = self._connect()
        return self._held

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def _read_line(sock: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\r\n"):
        try:
            byte = sock.recv(1)
        except OSError as error:
            raise BrokerUnreachable(f"the broker does not greet: {error}") from error
        if not byte or len(data) > 65_536:
            raise BrokerUnreachable("the broker closed the connection before greeting")
        data += byte
    return data[:-2]


def _complaint(text: str) -> TidingsError:
    lower = text.lower()
    if "permissions violation" in lower:
        return DeniedError(f"the broker refuses: {text}")
    if any(word in lower for word in _AUTH_WORDS):
        return AuthRevoked(f"the broker does not accept this credential: {text}")
    return PlainLost(f"the broker says: {text}")
