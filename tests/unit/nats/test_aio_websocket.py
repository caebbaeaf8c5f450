"""The asyncio driver inside of a websocket, towards a server that breaks its rules. Nobody is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tidings.nats import aio
from tidings.nats.errors import ConnectionGone, NatsError
from tidings_testing.waiting import eventually
from websocket_frames import BINARY, CLOSE, CONT, PING, PONG, TEXT, agreed, frame, unmasked

INFO = b'INFO {"server_id":"X","max_payload":1048576,"headers":true}\r\n'


class Server:
    """One accepted websocket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.heard: list[tuple[int, bytes]] = []

    async def agree(self) -> None:
        self.say(agreed(await self._reader.readuntil(b"\r\n\r\n")))

    async def welcome(self) -> None:
        await self.agree()
        self.say(frame(BINARY, INFO))
        while not b"".join(payload for _, payload in self.heard).endswith(b"PING\r\n"):
            await self.hear()
        self.say(frame(BINARY, b"PONG\r\n"))

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def hear(self) -> tuple[int, bytes]:
        head = await self._reader.readexactly(2)
        size = head[1] & 0x7F
        more = await self._reader.readexactly({126: 2, 127: 8}.get(size, 0))
        size = int.from_bytes(more, "big") if more else size
        opcode, _, payload = unmasked(head + more + await self._reader.readexactly(4 + size))
        self.heard.append((opcode, payload))
        return opcode, payload

    def hang_up(self) -> None:
        self._writer.close()


@asynccontextmanager
async def serving(script: Callable[[Server], Awaitable[None]]) -> AsyncIterator[str]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await script(Server(reader, writer))
            await asyncio.Event().wait()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_greeting_in_fragments_of_one_byte_with_pings_between_is_a_greeting() -> None:
    ponged: list[bytes] = []

    async def script(server: Server) -> None:
        await server.agree()
        for at in range(len(INFO)):
            server.say(frame(CONT if at else BINARY, INFO[at : at + 1], fin=at == len(INFO) - 1))
            server.say(frame(PING, b"%d" % at))
        while not ponged or ponged[-1] != b"%d" % (len(INFO) - 1):
            opcode, payload = await server.hear()
            if opcode == PONG:
                ponged.append(payload)
        server.say(frame(BINARY, b"PONG\r\n"))

    async with serving(script) as url, asyncio.timeout(10):
        connection = await aio.connect(url)
        assert connection.info["server_id"] == "X"
        await connection.close()
    assert ponged == [b"%d" % at for at in range(len(INFO))]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (frame(TEXT, INFO), "text where"),
        (frame(BINARY, INFO, masked=True), "rules of a websocket"),
        (frame(BINARY, b"HTTP/1.1 200 OK\r\n"), "does not speak NATS"),
        (frame(CLOSE, (1013).to_bytes(2, "big")), "closed the websocket"),
        (frame(BINARY, INFO)[:20], "does not answer"),
        (b"", "does not answer"),
    ],
    ids=["text", "masked", "not NATS", "close", "half a frame", "silence"],
)
async def test_what_is_no_greeting_is_refused_in_words_and_in_time(said: bytes, words: str) -> None:
    async def script(server: Server) -> None:
        await server.agree()
        server.say(said)

    async with serving(script) as url, asyncio.timeout(10):
        with pytest.raises(ConnectionGone, match=words):
            await aio.connect(url, timeout=1)


@pytest.mark.parametrize(
    "said",
    [frame(TEXT, b"x"), frame(BINARY, b"x", reserved=2), frame(CLOSE), frame(BINARY, b"MSG a 1 5\r\nhe")[:-3], None],
    ids=["text", "reserved bit", "close", "half a frame", "hang up"],
)
async def test_who_waits_for_an_answer_hears_at_once_that_the_websocket_went(said: bytes | None) -> None:
    async def script(server: Server) -> None:
        await server.welcome()
        await server.hear()
        server.say(said or b"")
        if said is None or b"MSG" in said:
            server.hang_up()

    async with serving(script) as url, asyncio.timeout(10):
        gone = asyncio.Event()
        connection = await aio.connect(url, on_closed=gone.set)
        with pytest.raises(NatsError):
            await connection.request("a.b", b"x", timeout=8)
        await gone.wait()
        await eventually(lambda: connection.is_closed)


async def test_closing_says_goodbye_and_waits_for_nobody() -> None:
    last: list[int] = []

    async def script(server: Server) -> None:
        await server.welcome()
        while True:
            last.append((await server.hear())[0])

    async with serving(script) as url, asyncio.timeout(10):
        connection = await aio.connect(url)
        await connection.publish("a.b", b"the last word")
        await connection.close()
        await eventually(lambda: last and last[-1] == CLOSE)
        assert last == [BINARY, CLOSE]
