"""HTTP to the host of this machine: asyncio over its unix socket, connections kept for the next request.

    host = HostClient(home)
    status = await host.call(HostStatusRequest())

The protocol is h11's; here are the socket, the pool and what each failure means. Refusals are raised as the class of
their code. HostUnreachable: the request was not taken, or changes nothing; OutcomeUnknown: it may have been taken.
Without a session the host tells states and counts, never contents; sessions are in `host_transport.py`.
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

#: seconds an answer may take beyond what was asked to be waited for
PATIENCE = 10.0
FIND_PATIENCE = 2.0
#: a stream that says nothing for so long, not even that it lives, is dead
STREAM_SILENCE = 45.0
#: connections that are kept for the next request
MOST_IDLE = 4
READ = 64 * 1024
#: the stream of events; everything else is an operation
EVENTS = "/v1/events"
Json = dict[str, Any]
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """`message` or `notice`: a row of the inbox, `row` its number. `state`: how the agent's connection is now."""

    kind: str
    row: int | None
    data: Json = field(default_factory=dict)


class HostClient:
    """The host of a home."""

    def __init__(self, home: Path, *, patience: float = PATIENCE) -> None:
        self.home = home
        self.socket = socket_path(home)
        self.patience = patience
        #: what the host said it is, once `health` asked
        self.version: str | None = None
        self.pid: int | None = None
        self._idle: list[_Connection] = []

    @classmethod
    async def find(cls, home: Path) -> HostClient | None:
        """The host of this home, if it answers. ConfigError if it speaks another version than this program."""
        client = cls(home)
        try:
            await client.health(timeout=FIND_PATIENCE)
        except HostUnreachable:
            client.close()
            return None
        return client

    @property
    def mismatch(self) -> str | None:
        """What to say if the host is of another release than this program."""
        if self.version in (None, __version__):
            return None
        return (
            f"the host runs Tidings {self.version} and this is {__version__}: "
            "`tidings host down`, then `tidings host up`"
        )

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    # --- what needs no session ---

    async def health(self, timeout: float | None = None) -> None:
        """Asks which version runs there. Raises ConfigError if it speaks another version than this program."""
        found = await self.call(HostHealthRequest(), timeout=timeout)
        self.version, self.pid = found.version, found.pid
        if found.api != API:
            raise ConfigError(
                f"the host runs Tidings {self.version} and speaks version {found.api}, this is {__version__} "
                f"and speaks {API}: `tidings host down`, then `tidings host up`"
            )

    # --- asking ---

    async def call(
        self,
        request: Request[A],
        *,
        token: str | None = None,
        op: str | None = None,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> A:
        """Sends one request and returns its answer. `op`, `wait`: of a request that the host forwards, the id under
        which it takes effect once, and seconds that the steward may take beyond the usual."""
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
        """One connection of events, behind a row; ends when the host ends it. HostUnreachable if it goes away."""
        headers = [("Accept", "text/event-stream")] + ([] if after is None else [("Last-Event-ID", str(after))])
        async with self._asking(EVENTS, STREAM_SILENCE, changes=False, fresh=True) as connection:
            async with asyncio.timeout(self.patience):
                await connection.send(_request("GET", EVENTS, token, headers, b""), b"")
                status = await connection.status()
            if status != 200:
                raise _refusal(status, await connection.rest())
            lines = _Lines()
            while True:
                async with asyncio.timeout(STREAM_SILENCE):
                    data = await connection.data()
                if data is None:
                    return
                for event in lines.fed(data):
                    yield event

    @asynccontextmanager
    async def _asking(
        self, what: str, timeout: float, *, changes: bool, fresh: bool = False
    ) -> AsyncIterator[_Connection]:
        """A connection for one request, kept if it may have another; its failures as errors of ours."""
        connection = None if fresh else self._kept()
        try:
            connection = connection or await self._connect(timeout)
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or str(error) or "nobody takes the connection"
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
            if not fresh and connection.may_ask_again() and len(self._idle) < MOST_IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def _kept(self) -> _Connection | None:
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
                raise ConfigError(f"{self.socket} is served by another user: nothing was said to it")
            return _Connection(*await asyncio.open_connection(sock=raw), raw)
        except BaseException:
            raw.close()
            raise

    def _lost(self, what: str, changes: bool, error: Exception) -> TidingsError:
        """Returns the error for an answer that did not come."""
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        if not changes:
            return HostUnreachable(f"the host at {self.socket} did not answer `{what}` ({why}): ask again")
        return OutcomeUnknown(f"the host did not answer `{what}` ({why}): it may be done or not, ask again")


class _Connection:
    """One connection: h11 over a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: socket.socket) -> None:
        self._reader, self._writer, self._raw = reader, writer, raw
        self._http = h11.Connection(our_role=h11.CLIENT)

    @property
    def is_open(self) -> bool:
        return not (self._reader.at_eof() or self._writer.is_closing())

    def may_ask_again(self) -> bool:
        """Was the last answer read to its end, and does the other side want more? Ready for the next, if so."""
        if (self._http.our_state, self._http.their_state) != (h11.DONE, h11.DONE) or not self.is_open:
            return False
        self._http.start_next_cycle()
        return True

    async def send(self, request: h11.Request, payload: bytes) -> None:
        parts = [self._http.send(request), self._http.send(h11.Data(payload)), self._http.send(h11.EndOfMessage())]
        self._writer.write(b"".join(part for part in parts if part))
        # it may answer and close before it has read everything, and then its answer says why
        with suppress(BrokenPipeError, ConnectionResetError):
            await self._writer.drain()

    async def status(self) -> int:
        while not isinstance(event := await self._next(), h11.Response):
            if isinstance(event, h11.ConnectionClosed | h11.EndOfMessage):
                raise ConnectionResetError("it closed without an answer")
        return event.status_code

    async def data(self) -> bytes | None:
        """What comes next of the answer's body; None at its end."""
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
    """Returns a value of a program as JSON that is ready to send. Raises UsageError if it is none."""
    try:
        return msgspec.Raw(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"this cannot be written as JSON: {error}") from error


def _encoded(request: Request[Any]) -> bytes:
    try:
        return msgspec.json.encode(request)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"this cannot be written as JSON: {error}") from error


def _refusal(status: int, body: bytes) -> TidingsError:
    try:
        refusal = json.loads(body)["error"]
        code, message = str(refusal["code"]), str(refusal["message"])
    except (ValueError, LookupError, TypeError):
        if status == 503:
            return HostBusy("the host has as many connections as it takes: ask again in a moment")
        return TidingsError(f"the host answered {status} with something else than JSON: see `tidings host status`")
    return ERRORS_BY_CODE.get(code, TidingsError)(message)


class _Lines:
    """Server-Sent Events out of bytes; comments, which say that the host lives, are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._begin()

    def _begin(self) -> None:
        self._kind, self._row, self._data = "message", None, []  # type: str, int | None, list[str]

    def fed(self, data: bytes) -> list[ServerEvent]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        found: list[ServerEvent] = []
        for line in whole:
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
    """Where the host of a home listens: spelled one way, because sessions are proven for it."""
    return Path(os.path.realpath(home)) / "run" / "host.sock"
