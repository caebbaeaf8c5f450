"""Server-Sent Events: an agent's inbox as it fills, by row.

    event: message    id: the row    data: the message        event: state    data: how the connection is
    event: notice     id: the row    data: what the agent is told that is no message, such as a loss

There is no queue of events: a stream reads the inbox behind the last row it sent, and is woken when there is more. So
`Last-Event-ID` continues where a stream ended, across reconnects and restarts, without a gap or a second copy, and a
slow reader costs nobody anything; one that takes nothing for a while is cut, and can come back. The first event tells
where the stream begins, so that a reader that came without a number has one too.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from tidings.errors import HostBusy, UsageError
from tidings.host import serialise
from tidings.host.host import Changed
from tidings.host.http_api import ApiRoute, AppState, Scoped
from tidings.host.inbox import InboxRow, Wanted
from tidings.host.routes_operator import health_of
from tidings.host.sessions import HostSession
from tidings.util.task_ends import end_tasks
from tidings.wire.signing import KeyPair

KEEPALIVE = 15.0
#: a reader that takes nothing for so long is cut
SLOWEST = 30.0
AT_ONCE = 16
#: a stream looks so often by itself, whether or not it was woken
LOOK = 15.0
MOST_STREAMS = 256
MOST_STREAMS_OF_ONE = 64
log = logging.getLogger(__name__)


class Stream(EventSourceResponse):
    """A stream that counts from when it is made, and cuts its reader off instead of waiting for it."""

    def __init__(self, app: AppState, session: HostSession, content: AsyncIterator[ServerSentEvent]) -> None:
        super().__init__(content, ping=KEEPALIVE, send_timeout=SLOWEST, sep="\n", cleanup_timeout=1.0)
        self._app, self._session = app, session
        # here, so that nothing comes between the look whether there is room and the count
        app.streams += 1
        app.streaming[session.scope] += 1
        app.presence.follow(session.scope, 1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        whose = self._session.scope
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            who = self._session.scope
            log.info("a reader of %s in %s took nothing for %.0f s and is cut", who.name, who.space, SLOWEST)
            transport = scope.get("state", {}).get("transport")
            if transport is not None:
                transport.abort()
                await asyncio.sleep(0)  # its end is noticed before the answer is missed
        finally:
            self._app.streams -= 1
            self._app.streaming[whose] -= 1
            self._app.presence.follow(whose, -1)


async def events(asked: Scoped) -> Stream:
    """Server-Sent Events: rows of the inbox behind `Last-Event-ID`, then each as it comes; `state` when the connection
    changes."""
    after = await _begin(asked)
    if asked.app.streams >= MOST_STREAMS:
        raise HostBusy(f"{MOST_STREAMS} programs follow their inboxes here: end one")
    if asked.app.streaming[asked.scope] >= MOST_STREAMS_OF_ONE:
        raise HostBusy(f"{MOST_STREAMS_OF_ONE} programs follow the inbox of {asked.scope.name}: end one")
    return Stream(asked.app, asked.session, _follow(asked.app, asked.session, after))


async def _begin(asked: Scoped) -> int:
    """Behind which row; the newest there is unless the reader says."""
    said = asked.request.headers.get("last-event-id")
    if said is None:
        return await asked.host.inbox.last(*asked.mine)
    if not (said.isascii() and said.isdigit()) or len(said) > 18:
        raise UsageError(f"Last-Event-ID is the number of a row, not {said[:32]!r}")
    return int(said)


async def _follow(app: AppState, session: HostSession, after: int) -> AsyncIterator[ServerSentEvent]:
    scope = session.scope
    changed, told = app.host.changes(scope), _state(app, session)
    yield _event("state", told, after)
    ending = app.sessions.ending(session)
    while not app.stopping.is_set() and not ending.is_set():
        wanted = Wanted(after=after, limit=AT_ONCE)
        rows = await app.host.inbox.listed(scope.space_id, scope.agent, wanted)
        for event in (
            await asyncio.to_thread(_messages, rows, app.host.key(scope), app.host.names(scope)) if rows else ()
        ):
            if ending.is_set():
                return
            yield event
        after = rows[-1].row if rows else after
        if (now := _state(app, session)) != told:
            told = now
            yield _event("state", told)
        if not rows:
            await _woken(changed, ending, app.stopping)


def _messages(rows: list[InboxRow], key: KeyPair | None, names: dict[str, str]) -> list[ServerSentEvent]:
    """For a thread: opening megabytes of sealed mail takes longer than the loop may stand still."""
    kinds = ("notice" if row.kind == "notice" else "message" for row in rows)
    return [_event(kind, serialise.mail(row, key, names), row.row) for kind, row in zip(kinds, rows, strict=True)]


async def _woken(changed: Changed, *ends: asyncio.Event) -> None:
    """Until there is news, a moment passed, or one of these is set: the session ends, the host stops."""
    waiting = [asyncio.ensure_future(each) for each in (changed.wait(LOOK), *(end.wait() for end in ends))]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(waiting)


def _state(app: AppState, session: HostSession) -> dict[str, Any]:
    """How the agent's connection is, without what changes every moment."""
    return {name: value for name, value in health_of(app, session.scope).items() if name != "age"}


def _event(kind: str, data: dict[str, Any], row: int | None = None) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(data), event=kind, id=None if row is None else str(row), sep="\n")


ROUTES = [
    ApiRoute("GET", "/v1/events", events),
]
