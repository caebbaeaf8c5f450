"""Coding agents with servers of their own: `tidings mcp` as a process, asked by the SDK's client or line by line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client
from mcp_types import CallToolResult, TextResourceContents

import tidings
from blocking_host import HostClient, Session
from tidings.admin.identity import local_identity
from tidings.host.claims import Claims
from tidings.host.daemon import Daemon
from tidings.mcp.server import build_server
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

SOURCES = str(Path(__file__).parents[1] / "src")
PATIENCE = 20.0


def command(home: Path, agent: str, *options: str) -> list[str]:
    return ["-m", "tidings.cli", "mcp", "--agent", agent, "--home", str(home), *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SOURCES}


@asynccontextmanager
async def hosted(home: Path, claims: Claims | None = None) -> AsyncIterator[Daemon]:
    """The host of a home, in this process."""
    daemon = Daemon(home, claims=claims)
    running = asyncio.create_task(daemon.run())
    await eventually(lambda: daemon.ready.is_set() or running.done(), what="the host answers")
    try:
        yield daemon
    finally:
        daemon.stopping.set()
        await asyncio.wait_for(running, 30)


async def peer(space: RealSpace, name: str) -> Session:
    """Another program of this machine: it needs no server of its own. Its calls block, so they are made in threads."""
    identity = await local_identity(space.home, name)
    return await asyncio.to_thread(HostClient(space.home.home).session, identity, receive=True, program="test")


def words(answer: CallToolResult) -> str:
    (content,) = answer.content
    assert content.type == "text"
    return content.text


class CodingAgent:
    """What a coding agent does with its server."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def resource(self, uri: str) -> Any:
        async with asyncio.timeout(PATIENCE):
            (content,) = (await self.client.read_resource(uri)).contents
        assert isinstance(content, TextResourceContents)
        return json.loads(content.text)

    async def refused(self, tool: str, **arguments: Any) -> str:
        """What it says when it will not."""
        answer = await self.raw(tool, **arguments)
        assert answer.is_error, answer.structured_content
        return words(answer)

    async def raw(self, tool: str, **arguments: Any) -> CallToolResult:
        async with asyncio.timeout(PATIENCE):
            answer = await self.client.call_tool(tool, arguments)
        assert isinstance(answer, CallToolResult)
        return answer

    async def __call__(self, tool: str, **arguments: Any) -> Any:
        answer = await self.raw(tool, **arguments)
        assert not answer.is_error, answer.content
        return answer.structured_content

    async def connected(self) -> None:
        """Its agent's session is open: asked again while it is not."""
        await eventually(lambda: self._reachable(), what="the space answers", within=PATIENCE)

    async def _reachable(self) -> bool:
        return bool((await self("orient"))["reachable"])


@asynccontextmanager
async def coding(home: Path, *names: str) -> AsyncIterator[list[CodingAgent]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(coding_with(command(home, name))) for name in names]
        for each in found:
            await each.connected()
        yield found


@asynccontextmanager
async def coding_here(space: RealSpace, *names: str) -> AsyncIterator[list[CodingAgent]]:
    """The same with servers in this process, over the real host: for tests of what is answered, not of processes."""
    async with AsyncExitStack() as stack:
        found = []
        for name in names:
            connected = tidings.connect(space.home.name, name=name, home=space.home.home, via="host")
            agent = await stack.enter_async_context(connected)
            found.append(CodingAgent(await stack.enter_async_context(Client(build_server(agent)))))
        for each in found:
            await each.connected()
        yield found


@asynccontextmanager
async def coding_with(arguments: list[str]) -> AsyncIterator[CodingAgent]:
    started = StdioServerParameters(command=sys.executable, args=arguments, env=environment())
    async with Client(stdio_client(started)) as client:
        yield CodingAgent(client)


class Pipe:
    """A server whose client is this test, line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    @classmethod
    async def start(cls, arguments: list[str]) -> Pipe:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=environment()
        )
        started = cls(process)
        client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        try:
            await started.ask(1, "initialize", client)
        except BaseException:
            await started.kill()
            raise
        started.say({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return started

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def request(self, number: int, method: str, params: dict[str, Any]) -> None:
        self.say({"jsonrpc": "2.0", "id": number, "method": method, "params": params})

    async def ask(self, number: int, method: str, params: dict[str, Any]) -> Any:
        self.request(number, method, params)
        assert self.process.stdout is not None
        while True:
            line = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE)
            assert line, (await self.process.stderr.read()).decode() if self.process.stderr else ""
            self.lines.append(line.decode())
            answer = json.loads(line)
            if answer.get("id") == number:
                return answer["result"]

    async def call(self, number: int, tool: str, **arguments: Any) -> Any:
        answer = await self.ask(number, "tools/call", {"name": tool, "arguments": arguments})
        return answer.get("structuredContent")

    def vanish(self) -> None:
        """As a client that was killed: an answer to it goes nowhere."""
        transport: Any = self.process._transport  # type: ignore[attr-defined]
        self.request(99, "tools/list", {})
        for descriptor in (1, 0):
            transport.get_pipe_transport(descriptor).close()

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def piped(arguments: list[str]) -> AsyncIterator[Pipe]:
    pipe = await Pipe.start(arguments)
    try:
        yield pipe
    finally:
        await pipe.kill()
