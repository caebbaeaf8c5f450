"""Carries operations over a unix socket of this user: one request per connection, as lines of JSON.

    {"do": "link pause", "link": ...}  ->  {"ok": true, ...}, or one such line per answer of a stream;
                                           {"ok": false, "error": {"code": ..., "message": ...}} for a refusal

A running link worker is the only writer of its link store, so commands send it every change. While none runs, a command
may open the link store itself (`links/operations.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tidings.contract.core import DECLARED, Request, Server, read_body
from tidings.errors import TidingsError, UsageError, WorkerUnreachable
from tidings.rpc.control import decode_answer
from tidings.rpc.dispatch import encode_answer, encode_refusal
from tidings.util.private_sockets import bind, connect_at_once, peer_uid

#: the largest line in bytes: a longer request cannot be read, nor a longer answer of a stream
MAX_LINE = 4 * 1024 * 1024
#: seconds to connect and send the request, and to answer
CONNECT_TIMEOUT, ANSWER_TIMEOUT = 5.0, 15.0
A = TypeVar("A")
log = logging.getLogger(__name__)


class LocalServer:
    """Serves the operations of a server with these handlers."""

    def __init__(self, path: Path, server: Server, handlers: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
        self.path = path
        self._name, self._handlers = server, handlers
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, sock=bind(self.path), limit=MAX_LINE)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in tuple(self._open):
                task.cancel()
            if self._open:
                await asyncio.wait(tuple(self._open))
            with suppress(FileNotFoundError):
                self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if peer_uid(writer.get_extra_info("socket")) in (None, os.geteuid(), 0):
                await self._serve_request(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the caller disconnected, or this server closes
        finally:
            self._open.discard(task)
            writer.close()

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                line = await reader.readline()
        except ValueError:  # how asyncio reports a line over its limit
            refusal = UsageError(f"{self._name}: the request has more than {MAX_LINE:,} bytes")
            await _write(writer, encode_refusal(refusal, self._name))
            return
        disconnected = asyncio.create_task(reader.read(1))  # the caller sends nothing more, so this returns at its end
        answering = asyncio.create_task(self._answer(line, writer))
        try:
            await asyncio.wait({disconnected, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (disconnected, answering):
                each.cancel()
            await asyncio.wait({disconnected, answering})

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            request = self._decode(line)
            answer = await self._handlers[request.operation.name](request)
            if not request.operation.stream:
                await _write(writer, encode_answer(answer))
                return
            async with aclosing(answer) as answers:
                async for each in answers:
                    await _write(writer, encode_answer(each))
        except Exception as error:  # boundary: every request gets an answer, even after a bug of ours
            if not isinstance(error, TidingsError):
                log.exception("a request failed")
            await _write(writer, encode_refusal(error, self._name))

    def _decode(self, line: bytes) -> Request[Any]:
        body = read_body(self._name, line)
        name = body.pop("do", None)
        operation = DECLARED[self._name].get(name) if isinstance(name, str) else None
        if operation is None:
            known = ", ".join(DECLARED[self._name])
            raise UsageError(f"the {self._name} has no operation {str(name)[:64]!r} in `do`: it has {known}")
        return operation.decode(body)


async def call(path: Path, request: Request[A], timeout: float = ANSWER_TIMEOUT) -> A:
    """Returns the answer. Raises WorkerUnreachable if no link worker runs, or if it does not answer within the timeout
    plus the time for which the operation waits."""
    try:
        async with asyncio.timeout(timeout + request.operation.waits), _send(path, request) as reader:
            return decode_answer(request, await _received(reader.read()))
    except TimeoutError as error:
        raise WorkerUnreachable("the link worker runs but does not answer: see `tidings logs links`") from error


async def follow(path: Path, request: Request[AsyncGenerator[A]]) -> AsyncGenerator[A]:
    """Yields the answers of a stream. Raises WorkerUnreachable when the link worker closes it."""
    async with _send(path, request) as reader:
        while True:
            answer: Any = decode_answer(request, await _received(reader.readline()))
            yield answer


@asynccontextmanager
async def _send(path: Path, request: Request[Any]) -> AsyncIterator[asyncio.StreamReader]:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            connection = await connect_at_once(path)
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE)
    except (OSError, TimeoutError) as error:
        raise WorkerUnreachable("no link worker runs for this space") from error
    try:
        await _write(writer, msgspec.json.encode({"do": request.operation.name, **msgspec.to_builtins(request)}))
        yield reader
    finally:
        writer.close()


async def _received(reading: Awaitable[bytes]) -> bytes:
    """Returns complete lines. Raises WorkerUnreachable if the link worker stopped before."""
    try:
        data = await reading
    except OSError:
        data = b""
    if not data.endswith(b"\n"):
        raise WorkerUnreachable("the link worker stopped before it answered")
    return data


async def _write(writer: asyncio.StreamWriter, line: bytes) -> None:
    writer.write(line + b"\n")
    with suppress(ConnectionError):  # the next read reports that the other side disconnected
        await writer.drain()
