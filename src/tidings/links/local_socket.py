"""How commands reach a worker that runs: a unix socket of this user, one request a connection, lines of JSON.

    {"do": "pause", "link": ...}  ->  {"ok": true, ...}, or one such line after the other for whoever follows a link;
                                      {"ok": false, "error": {"code": ..., "message": ...}} of what is refused

The worker is the only one that writes its ledger, so what would change it is asked for here. If nobody listens no
worker runs, and whoever asks may take the ledger itself (`links/operations.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tidings.errors import ERRORS_BY_CODE, TidingsError, UsageError, WorkerUnreachable
from tidings.util.private_sockets import bind, connect_at_once, peer_uid

#: a line; the payload of a quarantined record is in one
LONGEST_LINE = 4 * 1024 * 1024
#: seconds for a connection, and for its request
PATIENCE = 5.0
Answers = AsyncGenerator[dict[str, Any]]
log = logging.getLogger(__name__)


class LocalServer:
    """Answers while it is open. `answer` is asked with each request, and everything it yields is a line."""

    def __init__(self, path: Path, answer: Callable[[dict[str, Any]], Answers]) -> None:
        self.path = path
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, sock=bind(self.path), limit=LONGEST_LINE)

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
                await self._converse(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # whoever asked went away, or we do
        finally:
            self._open.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(PATIENCE):
            line = await reader.readline()
        gone = asyncio.create_task(reader.read(1))  # nothing comes but the end
        answering = asyncio.create_task(self._write_answers(line, writer))
        try:
            await asyncio.wait({gone, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (gone, answering):
                each.cancel()
            await asyncio.wait({gone, answering})

    async def _write_answers(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            async with aclosing(self._answer(_request(line))) as answers:
                async for each in answers:
                    await _write(writer, {"ok": True, **each})
        except TidingsError as error:
            await _write(writer, {"ok": False, "error": {"code": error.code, "message": str(error)}})
        except OSError:
            pass  # whoever asked went away
        except Exception as error:  # Boundary: a request that fails must not end the worker.
            log.exception("a request failed")
            await _write(writer, {"ok": False, "error": {"code": "failed", "message": f"{error!r}"}})


def _request(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError("a request is one line of JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("do"), str):
        raise UsageError("a request says what to do")
    return found


async def _write(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")
    await writer.drain()


# --- whoever asks ---


async def ask(path: Path, do: str, *, within: float | None = None, **arguments: Any) -> dict[str, Any]:
    """One answer. `WorkerUnreachable` if no worker runs, or it does not answer `within` seconds."""
    try:
        async with asyncio.timeout(within), _asked(path, do, arguments) as reader:
            return await _next(reader)
    except TimeoutError as error:
        raise WorkerUnreachable("the worker of links runs and does not answer: `tidings logs links`") from error


async def follow(path: Path, do: str, **arguments: Any) -> Answers:
    """Answers until the worker ends."""
    async with _asked(path, do, arguments) as reader:
        while True:
            yield await _next(reader)


@asynccontextmanager
async def _asked(path: Path, do: str, arguments: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    try:
        async with asyncio.timeout(PATIENCE):
            connection = await connect_at_once(path)
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LONGEST_LINE)
    except (OSError, TimeoutError) as error:
        raise WorkerUnreachable("no worker of links runs for this space") from error
    try:
        await _write(writer, {"do": do, **arguments})
        yield reader
    finally:
        writer.close()


async def _next(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        line = await reader.readline()
        said = dict(json.loads(line))
    except (OSError, ValueError) as error:
        raise WorkerUnreachable("the worker of links ended while it was asked") from error
    if said.pop("ok"):
        return said
    refusal = said["error"]
    raise ERRORS_BY_CODE.get(refusal["code"], TidingsError)(refusal["message"])
