"""A host in a test: opened and closed in bounded time, and the few questions every test asks of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tidings.host import inbox as inbox_views
from tidings.host.host import Host, Scope
from tidings.host.inbox import InboxRow, Wanted
from tidings.host.outbox import OutboxRow
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

EVERYTHING = Wanted(limit=1_000_000)


@asynccontextmanager
async def host_in(home: Path, **options: Any) -> AsyncIterator[Host]:
    host = Host(home, **options)
    await host.open()
    try:
        yield host
    finally:
        async with asyncio.timeout(20):
            await host.close()


async def adopt(host: Host, space: RealSpace, name: str, *, receive: bool = False, knows: int = 0) -> Scope:
    """`knows`: wait until so many agents of the space are in the directory."""
    scope = await host.adopt(("home", str(space.home.home), space.home.name, name), receive)
    if knows:
        await eventually(lambda: len(host.directories.of(scope.space_id).known) >= knows)
    return scope


async def inbox_of(host: Host, scope: Scope) -> list[InboxRow]:
    """The messages; what Tidings itself tells beside them is `notices_of`."""
    rows = await host.inbox.read(inbox_views.listed, scope.space_id, scope.agent, EVERYTHING)
    return [row for row in rows if row.kind != "notice"]


async def notices_of(host: Host, scope: Scope) -> list[dict[str, Any]]:
    rows = await host.inbox.read(inbox_views.listed, scope.space_id, scope.agent, EVERYTHING)
    return [json.loads(row.raw) for row in rows if row.kind == "notice"]


async def texts_of(host: Host, scope: Scope) -> list[str]:
    return [row.text for row in await inbox_of(host, scope)]


async def has_texts(host: Host, scope: Scope, texts: list[str], within: float = 20.0) -> None:
    """Wait until there are as many; then they must be these, in this order."""
    await eventually(lambda: _has(host, scope, len(texts)), within=within, what=f"{len(texts)} messages")
    assert await texts_of(host, scope) == texts


async def _has(host: Host, scope: Scope, count: int) -> bool:
    return len(await inbox_of(host, scope)) >= count


async def in_state(host: Host, scope: Scope, message_id: str, *states: str, within: float = 20.0) -> OutboxRow:
    async def found() -> OutboxRow | None:
        row = await host.find(scope, message_id)
        return row if row.state in states else None

    row = await eventually(found, within=within, what=f"{message_id} is {' or '.join(states)}")
    assert row is not None
    return row


class Clock:
    """The real clock, put ahead (or back) by hand."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead
