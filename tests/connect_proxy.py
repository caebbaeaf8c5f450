"""An HTTP proxy as closed networks have one: it opens tunnels (CONNECT), to whom it likes and for whom it knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class ConnectProxy:
    def __init__(self) -> None:
        self.port = 0
        #: what it answers; below 300 it opens the tunnel
        self.status = b"200 Connection established"
        #: the line it must be sent to let anybody through
        self.wants = b""
        #: what it was asked
        self.asked: list[bytes] = []
        #: everything that went through towards the server
        self.carried = b""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head)
            status = b"407 Proxy Authentication Required" if self.wants not in head else self.status
            writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n")
            if status.startswith(b"2"):
                host, _, port = head.split()[1].decode().rpartition(":")
                there, onward = await asyncio.open_connection(host, int(port))
                self._writers.add(onward)
                for source, sink, out in ((reader, onward, True), (there, writer, False)):
                    task = asyncio.create_task(self._pump(source, sink, out=out))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                return
        writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, out: bool) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                self.carried += data if out else b""
                sink.write(data)
                await sink.drain()
        sink.close()

    async def close(self) -> None:
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def connect_proxy() -> AsyncIterator[ConnectProxy]:
    proxy = ConnectProxy()
    server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
