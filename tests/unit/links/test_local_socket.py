"""Asking a worker over its socket: one answer, many, a refusal, nobody, a worker that dies or says nothing."""

import asyncio
import socket
import stat
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tidings.errors import LinkConflict, TidingsError, UsageError, WorkerUnreachable
from tidings.links.local_socket import LocalServer, ask, follow


class Counting:
    """Answers what it is asked, and knows how many follow it."""

    def __init__(self) -> None:
        self.following = 0

    async def answer(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        match request["do"]:
            case "refuse":
                raise LinkConflict("somebody else went on")
            case "stumble":
                raise RuntimeError("never meant")
            case "hang":
                self.following += 1
                try:
                    await asyncio.sleep(60)
                finally:
                    self.following -= 1
            case "follow":
                self.following += 1
                try:
                    for number in range(10**6):
                        yield {"number": number}
                        await asyncio.sleep(0.001)
                finally:
                    self.following -= 1
            case _:
                yield {"asked": request}


@pytest.fixture
async def counting(tmp_path: Path) -> AsyncGenerator[tuple[Path, Counting]]:
    found, path = Counting(), tmp_path / "run" / "links.sock"
    server = LocalServer(path, found.answer)
    await server.start()
    yield path, found
    await server.close()


async def test_an_answer_a_refusal_and_a_fault_are_told_apart(counting: tuple[Path, Counting]) -> None:
    path, _ = counting
    assert await ask(path, "look", link="a") == {"asked": {"do": "look", "link": "a"}}
    with pytest.raises(LinkConflict, match="somebody else went on"):
        await ask(path, "refuse")
    with pytest.raises(TidingsError, match="never meant"):
        await ask(path, "stumble")
    assert (await ask(path, "look"))["asked"]["do"] == "look"


async def test_who_stops_following_is_let_go(counting: tuple[Path, Counting]) -> None:
    path, found = counting
    lines = follow(path, "follow")
    assert [(await anext(lines))["number"] for _ in range(3)] == [0, 1, 2]
    assert found.following == 1
    await lines.aclose()
    async with asyncio.timeout(10):
        while found.following:
            await asyncio.sleep(0.01)


async def test_a_worker_that_says_nothing_is_not_waited_for_longer_than_asked(counting: tuple[Path, Counting]) -> None:
    path, found = counting
    with pytest.raises(WorkerUnreachable, match="does not answer"):
        await ask(path, "hang", within=0.1)
    async with asyncio.timeout(10):  # what nobody waits for is given up
        while found.following:
            await asyncio.sleep(0.01)


async def test_one_that_ends_while_it_is_asked_or_followed_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "links.sock"
    server = LocalServer(path, Counting().answer)
    await server.start()
    asked = asyncio.create_task(ask(path, "hang"))
    lines = follow(path, "follow")
    await anext(lines)
    await asyncio.sleep(0.05)
    await server.close()
    with pytest.raises(WorkerUnreachable, match="ended while it was asked"):
        await asked
    with pytest.raises(WorkerUnreachable):
        await _all_of(lines)
    assert not path.exists()


async def _all_of(lines: AsyncGenerator[dict[str, Any]]) -> None:
    async for _ in lines:
        pass


async def test_nobody_there_is_said_so_and_so_is_a_socket_that_was_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "links.sock"
    with pytest.raises(WorkerUnreachable, match="no worker of links runs"):
        await ask(path, "look")
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with pytest.raises(WorkerUnreachable, match="no worker of links runs"):
        await ask(path, "look")


async def test_only_this_user_may_open_it_however_long_its_path_is(tmp_path: Path) -> None:
    path = tmp_path / ("deep" * 30) / "links.sock"
    server = LocalServer(path, Counting().answer)
    await server.start()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await ask(path, "look"))["asked"] == {"do": "look"}
    finally:
        await server.close()


@pytest.mark.parametrize("line", [b"nothing\n", b"[]\n", b'{"what": 1}\n', b"\n"])
async def test_what_is_no_request_is_refused(counting: tuple[Path, Counting], line: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(counting[0]))
    writer.write(line)
    said = await reader.readline()
    writer.close()
    assert UsageError.code.encode() in said
