"""What the server needs of the host: one agent's desk, with its outbox, its inbox and its way to the space.

`Desk` is the whole of it, in JSON as the daemon answers it. Its methods block, so the server calls them off its loop
(`off_loop`); they raise the typed errors of `tidings.errors`. A call that its client gave up goes on in its thread:
whoever must undo what it brings says so with `unwanted`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from tidings.host.client import PastPage

T = TypeVar("T")
Facts = dict[str, Any]


class Event(NamedTuple):
    """What happened at the desk: `message` or `notice` (a row of the inbox), or `state` (the connection)."""

    kind: str
    #: the row of a message: where to go on reading
    row: int | None
    facts: Facts


class Desk(Protocol):
    """One agent of one space, as the host serves it."""

    @property
    def space(self) -> str: ...
    @property
    def agent(self) -> str: ...
    @property
    def name(self) -> str: ...

    def reachable(self) -> bool: ...
    def send(self, request: Mapping[str, Any], wait: float) -> Facts: ...
    def outbox(self, limit: int) -> list[Facts]: ...
    def outbox_row(self, message_id: str) -> Facts: ...
    def inbox(self, *, unread: bool, limit: int) -> list[Facts]: ...
    def unread(self) -> Mapping[str, int]: ...
    def mark_read(self, rows: Sequence[int]) -> int: ...
    def thread(self, message_id: str) -> list[Facts]: ...
    def ending(self, ending: str) -> list[str]: ...
    def newest_row(self) -> int: ...
    def events(self, after: int) -> Iterator[Event]: ...

    def who(self) -> Facts: ...
    def access(self) -> Facts: ...
    def channels(self) -> list[Facts]: ...
    def memberships(self) -> list[str]: ...
    def join(self, channel: str) -> Facts: ...
    def leave(self, channel: str) -> Facts: ...
    def history(self, channel: str, limit: int, before: int | None) -> PastPage: ...
    def trace(self, message_id: str) -> Facts: ...
    def set_status(self, status: str, activity: str | None, model: str | None) -> None: ...
    def set_attention(self, mode: str | None, channels: Mapping[str, str]) -> None: ...

    def claim(self, role: str, wait: float, *, take_over: bool) -> Facts | None: ...
    def held(self) -> Facts | None: ...
    def show_life(self) -> Facts | None: ...
    def finish(self, task: str, text: str, data: Any) -> None: ...
    def fail(self, task: str, reason: str, *, retry: bool) -> Facts: ...
    def task(self, message_id: str, wait: float) -> Facts: ...

    def close(self) -> None: ...


async def off_loop(call: Callable[[], T], *, unwanted: Callable[[T], object] | None = None) -> T:
    """The answer of something that blocks, from a thread that never keeps the process alive.

    If the caller is cancelled first, `unwanted` gets the answer, in a thread of its own.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def undo(result: T) -> None:
        if unwanted is not None:
            _start(unwanted, result)

    def tell(outcome: Callable[[], T]) -> None:
        if answer.cancelled():
            with suppress(Exception):  # nobody waits for this call any more: only what it brought matters
                undo(outcome())
            return
        try:
            answer.set_result(outcome())
        except Exception as error:  # noqa: BLE001  raised again where it was asked for
            answer.set_exception(error)

    def work() -> None:
        outcome = _outcome(call)
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(tell, outcome)

    _start(work)
    try:
        return await answer
    except asyncio.CancelledError:
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            undo(answer.result())
        raise


def _outcome(call: Callable[[], T]) -> Callable[[], T]:
    """Do it now; the outcome, called, answers or raises."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001  raised again where it was asked for
        raised = error

        def failed() -> T:
            raise raised

        return failed
    return lambda: result


def _start(work: Callable[..., object], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True, name="desk").start()
