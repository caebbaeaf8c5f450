"""Waiting in tests: for a condition or an answer, never for a time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

from tidings.errors import OutcomeUnknown, UnreachableError

T = TypeVar("T")


@overload
async def eventually(
    condition: Callable[[], Awaitable[T]], *, within: float = 10.0, what: str = "", every: float = 0.02
) -> T: ...
@overload
async def eventually(condition: Callable[[], T], *, within: float = 10.0, what: str = "", every: float = 0.02) -> T: ...
async def eventually(condition: Callable[[], Any], *, within: float = 10.0, what: str = "", every: float = 0.02) -> Any:
    """Ask until the answer is true, and return it. An AssertionError says what did not come about in time."""
    deadline = asyncio.get_running_loop().time() + within
    while True:
        found = condition()
        answer = await found if inspect.isawaitable(found) else found
        if answer:
            return answer
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {within:.0f} s: {what or condition}; the last answer was {answer!r}")
        await asyncio.sleep(every)


async def insist(ask: Callable[[], Awaitable[T]], *, within: float = 15.0) -> T:
    """Ask again while nobody answers, as a client with an operation id may. Refusals are raised at once."""
    deadline = asyncio.get_running_loop().time() + within
    while True:
        try:
            return await ask()
        except (UnreachableError, OutcomeUnknown):
            if asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(0.05)
