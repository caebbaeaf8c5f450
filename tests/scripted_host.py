"""A host that answers by a script: a `HostTransport` without a socket, for tests of what it makes of answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from tidings.client.agent import Agent
from tidings.client.host_http import HostClient, Json, ServerEvent
from tidings.client.host_session import SessionFile, SessionSource
from tidings.client.host_transport import HostAgent, HostTransport
from tidings.contract.core import Request
from tidings.wire import message as wire
from tidings.wire.message import Sender
from tools.examples import example

A = TypeVar("A")
ADA, BOB = "U" + "A" * 55, "U" + "B" * 55
_ASKED = wire.compose(Sender(ADA, "ada"), text="look")
#: a task as the host tells it
TASK: Json = {
    "id": _ASKED.id,
    "seq": 1,
    "role": "reviewer",
    "attempt": 1,
    "deadline": time.time() + 600,
    "asker": {"id": ADA, "name": "ada"},
    "origin": "",
    "origin_id": "",
    "text": "look",
    "parts": wire.document(_ASKED)["parts"],
    "message": wire.document(_ASKED),
    "program": "mcp",
    "silent": 0.0,
}


class ScriptedHost:
    """Answers an operation with what the script says: JSON, or what a function answers, which may raise. `fails` are
    raised first, in order. Fields that are not in the script have some value of their type."""

    patience = 10.0

    def __init__(self, *fails: Exception) -> None:
        self.fails = list(fails)
        self.answers: dict[str, Json | Callable[[], Any]] = {"task fail": {"state": "queued"}}
        #: what was asked: the request, its body and its session
        self.asked: list[tuple[str, Any, str | None]] = []
        #: how many requests wait for an answer that never comes
        self.waiting = 0
        #: what whoever follows is told
        self.events: list[ServerEvent] | Exception = []
        self.socket = Path("s")
        self.closed = False

    async def call(
        self,
        request: Request[A],
        *,
        token: str | None = None,
        op: str | None = None,  # noqa: ARG002
        wait: float = 0.0,  # noqa: ARG002
        timeout: float | None = None,  # noqa: ARG002
    ) -> A:
        operation = request.operation
        self.asked.append((operation.name, msgspec.json.decode(msgspec.json.encode(request)), token))
        await asyncio.sleep(0)
        if self.fails:
            raise self.fails.pop(0)
        answer = self.answers.get(operation.name, {})
        if callable(answer):
            found = answer()
            answer = await found if asyncio.iscoroutine(found) else found
        whole = example(msgspec.inspect.type_info(operation.answer)) | dict(answer)
        return msgspec.convert(whole, operation.answer)  # type: ignore[no-any-return]

    async def stream(self, token: str, after: int | None) -> AsyncIterator[ServerEvent]:  # noqa: ARG002
        if isinstance(self.events, Exception):
            raise self.events
        for event in self.events:
            yield event

    async def never(self) -> Json:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1
        return {}

    def asked_for(self, request: str) -> list[Any]:
        """The bodies of one kind of request."""
        return [body for asked, body, _ in self.asked if asked == request]

    def close(self) -> None:
        self.closed = True


class ScriptedSessions:
    """Sessions with the tokens 1, 2 and so on, one for each time that one is asked for."""

    ends = True

    def __init__(self) -> None:
        self.opened = 0

    async def obtain(self, host: HostClient, stale: SessionFile | None) -> SessionFile:  # noqa: ARG002
        self.opened += 1
        await asyncio.sleep(0)
        return session_file(token=str(self.opened))


def session_file(**changed: Any) -> SessionFile:
    known = {"socket": "s", "session": "s", "token": "t", "space": "main", "space_id": "A", "agent": BOB, "name": "bob"}
    return SessionFile(**({"receive": True} | known | changed))


class Found:
    """How often the host was looked for."""

    def __init__(self, host: ScriptedHost) -> None:
        self.host, self.times = host, 0

    async def __call__(self) -> HostClient:
        self.times += 1
        await asyncio.sleep(0)
        return cast("HostClient", self.host)


@asynccontextmanager
async def at(
    host: ScriptedHost, source: SessionSource | None = None, find: Found | None = None
) -> AsyncIterator[HostAgent]:
    """bob at this host."""
    async with Agent(HostTransport(find or Found(host), source or ScriptedSessions())) as endpoint:
        yield endpoint


def home_file(home: Path, name: str) -> Path:
    """A session of that agent in a file of a home."""
    path = home / "run" / "session.json"
    session_file(socket=str(home.resolve() / "run" / "host.sock"), name=name).write(path)
    return path
