"""A server that speaks NATS as a test tells it to, line by line: for what no real server does on purpose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

INFO = {"server_id": "SCRIPTED", "max_payload": 1 << 20, "headers": True, "nonce": "n"}


class Scripted:
    """One accepted connection: what was heard, and how to answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.heard: list[bytes] = []

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    def greet(self, **fields: Any) -> None:
        self.say(b"INFO %b\r\n" % json.dumps({**INFO, **fields}).encode())

    async def line(self) -> bytes:
        """The next line; a payload is one too."""
        heard = (await self._reader.readuntil(b"\r\n"))[:-2]
        self.heard.append(heard)
        return heard

    async def until(self, beginning: bytes) -> bytes:
        while not (heard := await self.line()).startswith(beginning):
            pass
        return heard

    async def welcome(self, **fields: Any) -> None:
        """Greet, and take the client in; its first subscription is the one for answers."""
        self.greet(**fields)
        await self.until(b"PING")
        self.say(b"PONG\r\n")

    def hang_up(self) -> None:
        self._writer.transport.abort()


Script = Callable[[Scripted], Awaitable[None]]


@asynccontextmanager
async def scripted_server(*scripts: Script) -> AsyncIterator[str]:
    """Its URL. The n-th connection is answered by the n-th script, further ones by the last."""
    taken = 0
    failures: list[BaseException] = []
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        script = scripts[min(taken, len(scripts) - 1)]
        taken += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await script(Scripted(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        except Exception as error:
            failures.append(error)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not failures, failures


async def stay(_server: Scripted) -> None:
    """The end of a script that says nothing more and does not hang up."""
    await asyncio.Event().wait()
