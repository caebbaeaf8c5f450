"""`HostClient`: HTTP to the host of this machine over its unix socket, with asyncio and kept connections.

    host = HostClient(home)
    status = await host.call(HostStatusRequest())

h11 implements the protocol; this module has the socket, the pool and the errors. A refusal raises the class of its
code. HostUnreachable: the request had no effect, or changes nothing; OutcomeUnknown: it may have taken effect.
Without a session the host answers with states and counts, never contents; sessions are in `host_transport.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import h11
import msgspec

from tidings.contract.core import Request
from tidings.contract.host import API, HostHealthRequest
from tidings.errors import (
    ERRORS_BY_CODE,
    ConfigError,
    HostBusy,
    HostUnreachable,
    OutcomeUnknown,
    TidingsError,
    UsageError,
)
from tidings.util.private_sockets import connect_at_once, peer_uid
from tidings.version import __version__

#: seconds that an answer may take, in addition to the requested wait
PATIENCE = 10.0
FIND_PATIENCE = 2.0
#: seconds without an event or a keepalive after which a stream is dead
STREAM_SILENCE = 45.0
#: idle connections that are kept for the next request
MOST_IDLE = 4
READ = 64 * 1024
#: the stream of events; everything else is an operation
EVENTS = "/v1/events"
Json = dict[str, Any]
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """`kind` is `message` or `notice` for the inbox row `row`, or `state` for the state of the agent's connection."""

    kind: str
    row: int | None
    data: Json = field(default_factory=dict)


class HostClient:
    """The host of a home."""

    def __init__(self, home: Path, *, patience: float = PATIENCE) -> None:
        self.home = home
        self.socket = socket_path(home)
        self.patience = patience
        #: the host's version and process, known after `health`
        self.version: str | None = None
        self.pid: int | None = None
        self._idle: list[_Connection] = []

    @classmethod
    async def find(cls, home: Path) -> HostClient | None:
        """Returns the host of this home if it answers, else None. Raises ConfigError if its API has another version."""
        client = cls(home)
        try:
            await client.health(timeout=FIND_PATIENCE)
        except HostUnreachable:
            client.close()
            return None
        return client

    @property
    def mismatch(self) -> str | None:
        """Returns a warning if the host runs another release than this program."""
        if self.version in (None, __version__):
            return None
        return (
            f"the host runs Tidings {self.version} and this is {__version__}: "
            "`tidings host down`, then `tidings host up`"
        )

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    # --- requests without a session ---

    async def health(self, timeout: float | None = None) -> None:
        """Reads the host's version. Raises ConfigError if its API has another version than this program's."""
        answer = await self.call(HostHealthRequest(), timeout=timeout)
        self.version, self.pid = answer.version, answer.pid
        if answer.api != API:
            raise ConfigError(
                f"the host runs Tidings {self.version} with API version {answer.api}, this is {__version__} "
                f"with API version {API}: `tidings host down`, then `tidings host up`"
            )

    # --- requests ---

    async def call(
        self,
        request: Request[A],
        *,
        token: str | None = None,
        op: str | None = None,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> A:
        """Sends one request and returns its answer. For a request that the host forwards, `op` is the id under which it
        takes effect once, and `wait` the additional seconds that the steward may take."""
        operation, payload = request.operation, _encoded(request)
        options = {name: value for name, value in (("op", op), ("wait", wait)) if value}
        if options and operation.server != "host":
            head = msgspec.json.encode(options)
            payload = head[:-1] + (b"," + payload[1:] if len(payload) > 2 else b"}")
        if timeout is None:
            timeout = self.patience + wait + (getattr(request, "wait", 0.0) if operation.waits else 0.0)
        headers = [("Accept", "application/json"), ("Content-Type", "application/json")]
        async with self._asking(operation.name, timeout, changes=operation.changes) as connection:
            await connection.send(_request("POST", operation.path, token, headers, payload), payload)
            status, answer = await connection.response()
        if status >= 400:
            raise _refusal(status, answer)
        return operation.read_answer(answer)  # type: ignore[no-any-return]

    async def stream(self, token: str, after: int | None) -> AsyncIterator[ServerEvent]:
        """Yields the events after a row until the host ends the stream. Raises HostUnreachable if the host stops."""
        headers = [("Accept", "text/event-stream")] + ([] if after is None else [("Last-Event-ID", str(after))])
        async with self._asking(EVENTS, STREAM_SILENCE, changes=False, fresh=True) as connection:
            async with asyncio.timeout(self.patience):
                await connection.send(_request("GET", EVENTS, token, headers, b""), b"")
                status = await connection.status()
            if status != 200:
                raise _refusal(status, await connection.rest())
            parser = _EventParser()
            while True:
                async with asyncio.timeout(STREAM_SILENCE):
                    data = await connection.data()
                if data is None:
                    return
                for event in parser.feed(data):
                    yield event

    @asynccontextmanager
    async def _asking(
        self, what: str, timeout: float, *, changes: bool, fresh: bool = False
    ) -> AsyncIterator[_Connection]:
        """Yields a connection for one request and keeps it afterwards if possible. Translates its errors into ours."""
        connection = None if fresh else self._take_idle()
        try:
            connection = connection or await self._connect(timeout)
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or str(error) or "the connection was not accepted"
            raise HostUnreachable(f"no host answers at {self.socket} ({why}): `tidings host up` starts it") from error
        try:
            if fresh:
                yield connection
            else:
                async with asyncio.timeout(timeout):
                    yield connection
        except h11.RemoteProtocolError as error:
            raise self._lost(what, changes, ConnectionResetError("it closed the connection")) from error
        except (OSError, TimeoutError) as error:
            raise self._lost(what, changes, error) from error
        finally:
            if not fresh and connection.start_next() and len(self._idle) < MOST_IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            connection.close()
        return None

    async def _connect(self, timeout: float) -> _Connection:
        async with asyncio.timeout(timeout):
            raw = await connect_at_once(self.socket)
        try:
            if peer_uid(raw) != os.geteuid():
                raise ConfigError(f"another user serves {self.socket}: nothing was sent")
            return _Connection(*await asyncio.open_connection(sock=raw), raw)
        except BaseException:
            raw.close()
            raise

    def _lost(self, what: str, changes: bool, error: Exception) -> TidingsError:
        """Returns the error for a missing answer."""
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        if not changes:
            return HostUnreachable(f"the host at {self.socket} did not answer `{what}` ({why}): retry")
        return OutcomeUnknown(f"the host did not answer `{what}` ({why}): it may have taken effect; retry")


class _Connection:
    """One connection: h11 over a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: socket.socket) -> None:
        self._reader, self._writer, self._raw = reader, writer, raw
        self._http = h11.Connection(our_role=h11.CLIENT)

    @property
    def is_open(self) -> bool:
        return not (self._reader.at_eof() or self._writer.is_closing())

    def start_next(self) -> bool:
        """Prepares for the next request. False if the last answer was not read to its end, or the connection closes."""
        if (self._http.our_state, self._http.their_state) != (h11.DONE, h11.DONE) or not self.is_open:
            return False
        self._http.start_next_cycle()
        return True

    async def send(self, request: h11.Request, payload: bytes) -> None:
        parts = [self._http.send(request), self._http.send(h11.Data(payload)), self._http.send(h11.EndOfMessage())]
        self._writer.write(b"".join(part for part in parts if part))
        # the host may refuse and close before it has read everything; then its answer has the reason
        with suppress(BrokenPipeError, ConnectionResetError):
            await self._writer.drain()

    async def status(self) -> int:
        while not isinstance(event := await self._next(), h11.Response):
            if isinstance(event, h11.ConnectionClosed | h11.EndOfMessage):
                raise ConnectionResetError("it closed without an answer")
        return event.status_code

    async def data(self) -> bytes | None:
        """Returns the next part of the answer's body; None at its end."""
        event = await self._next()
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def rest(self) -> bytes:
        body = bytearray()
        while (data := await self.data()) is not None:
            body += data
        return bytes(body)

    async def response(self) -> tuple[int, bytes]:
        return await self.status(), await self.rest()

    async def _next(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(READ))
        assert not isinstance(event, type)  # PAUSED comes only once the next cycle may begin
        return event

    def close(self) -> None:
        self._writer.transport.abort()


def _request(method: str, path: str, token: str | None, headers: list[tuple[str, str]], payload: bytes) -> h11.Request:
    length = [("Content-Length", str(len(payload)))] if payload else []
    access = [("Authorization", f"Bearer {token}")] if token else []
    return h11.Request(method=method, target=path, headers=[("Host", "localhost"), *headers, *length, *access])


def json_value(value: Any) -> Any:
    """Returns a value of a program as encoded JSON. Raises UsageError if that is impossible."""
    try:
        return msgspec.Raw(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the value cannot be written as JSON: {error}") from error


def _encoded(request: Request[Any]) -> bytes:
    try:
        return msgspec.json.encode(request)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"the request cannot be written as JSON: {error}") from error


def _refusal(status: int, body: bytes) -> TidingsError:
    try:
        refusal = json.loads(body)["error"]
        code, message = str(refusal["code"]), str(refusal["message"])
    except (ValueError, LookupError, TypeError):
        if status == 503:
            return HostBusy("the host has too many connections: retry in a moment")
        return TidingsError(f"the host answered {status} without JSON: see `tidings host status`")
    return ERRORS_BY_CODE.get(code, TidingsError)(message)


class _EventParser:
    """Parses Server-Sent Events from bytes. Ignores comments, which the host sends as keepalives."""

    def __init__(self) -> None:
        self._rest = b""
        self._begin()

    def _begin(self) -> None:
        self._kind, self._row, self._data = "message", None, []  # type: str, int | None, list[str]

    def feed(self, data: bytes) -> list[ServerEvent]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: list[ServerEvent] = []
        for line in lines:
            text = line.decode("utf-8").rstrip("\r")
            if text:
                self._take(*text.split(":", 1) if ":" in text else (text, ""))
            else:
                if self._data:
                    found.append(ServerEvent(self._kind, self._row, json.loads("\n".join(self._data))))
                self._begin()
        return found

    def _take(self, name: str, value: str) -> None:
        value = value.removeprefix(" ")
        if name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and value.isdigit():
            self._row = int(value)


def socket_path(home: Path) -> Path:
    """Returns the path of the host's socket without symbolic links, because session proofs contain it."""
    return Path(os.path.realpath(home)) / "run" / "host.sock"
