"""For scripts: one call, no event loop.

    tidings.send("general", "the build is green")

Each call connects, does one thing and closes. A program that talks more than now and then holds an endpoint instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tidings.client.connect import connect
from tidings.client.incoming import Incoming
from tidings.client.interface import AgentInterface, Receipt
from tidings.errors import UsageError

T = TypeVar("T")


def send(channel: str, text: str, *, space: str | None = None, name: str | None = None, **options: Any) -> Receipt:
    """Post to a channel and wait until the log has it."""
    return _once(space, name, lambda endpoint: endpoint.send(channel, text, **options))


def history(channel: str, limit: int = 50, *, space: str | None = None, name: str | None = None) -> list[Incoming]:
    """The newest messages of a channel, newest first."""
    return _once(space, name, lambda endpoint: endpoint.history(channel, limit))


def _once(space: str | None, name: str | None, act: Callable[[AgentInterface], Awaitable[T]]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_act(space, name, act))
    raise UsageError("inside an event loop use `async with tidings.connect(...)` instead")


async def _act(space: str | None, name: str | None, act: Callable[[AgentInterface], Awaitable[T]]) -> T:
    async with connect(space, name=name, presence=False) as endpoint:
        return await act(endpoint)
