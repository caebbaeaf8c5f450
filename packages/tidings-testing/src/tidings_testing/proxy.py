"""A TCP proxy that misbehaves on demand: slow, deaf, torn, gone.

    async with fault_proxy(port) as proxy:
        endpoint = tidings.connect(..., url=proxy.url)
        proxy.black_hole = True          # bytes are taken and go nowhere, both ways: a half-open connection

No root is needed, and only what runs through this proxy is affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

CHUNK = 65_536
#: seconds, beside a round trip, after which a lost packet is sent again
RETRANSMITTED = 0.2


class FaultProxy:
    """Forwards connections to a port of this machine; the attributes may be changed while it runs."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.target, self.target_host = port, host
        self.port = 0
        #: seconds every chunk is held, each way
        self.delay = 0.0
        #: share of chunks that are lost: they come when they were sent again, and what is behind them waits
        self.loss = 0.0
        self.lost = 0
        self._loss_owed = 0.0
        self.black_hole = False
        #: nothing is read, so that whoever sends finds its buffers full
        self.stalled = False
        self.refuse = False
        #: forward a byte at a time
        self.split = False
        self.connections = 0
        #: called with the number of a connection and the bytes that came back through it so far
        self.on_answer: Callable[[int, int], None] = lambda _connection, _bytes: None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Reset every connection that runs through here."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        try:
            there, onward = await asyncio.open_connection(self.target_host, self.target)
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        self._writers |= {writer, onward}
        for source, sink, number in ((reader, onward, None), (there, writer, self.connections)):
            task = asyncio.create_task(self._pump(source, sink, number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, number: int | None) -> None:
        """Chunks keep their order and each its delay: they are stamped when read and written when due."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        writing = asyncio.create_task(self._drain(waiting, sink))
        loop = asyncio.get_running_loop()
        heard = 0
        with suppress(OSError):
            while data := await source.read(CHUNK):
                heard += len(data)
                if number is not None:
                    self.on_answer(number, heard)
                while self.stalled:
                    await asyncio.sleep(0.01)
                if not self.black_hole:
                    waiting.put_nowait((loop.time() + self.delay + self._sent_again(), data))
        waiting.put_nowait((loop.time(), b""))
        await writing

    def _sent_again(self) -> float:
        self._loss_owed += self.loss
        if self._loss_owed < 1:
            return 0.0
        self._loss_owed -= 1
        self.lost += 1
        return RETRANSMITTED + 2 * self.delay

    async def _drain(self, waiting: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                due, data = await waiting.get()
                if not data:
                    break
                await asyncio.sleep(max(0.0, due - loop.time()))
                for piece in [data[i : i + 1] for i in range(len(data))] if self.split else [data]:
                    sink.write(piece)
                    await sink.drain()
        self._writers.discard(sink)
        sink.close()

    async def close(self) -> None:
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def fault_proxy(port: int, host: str = "127.0.0.1") -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(port, host)
    server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
