"""Routes of one agent's mail: what it hands over to be sent, and what it was sent. Every query names the scope.

`events` are Server-Sent Events: an agent's inbox as it fills, by row.

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
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from tidings.client.directory import resolve_among
from tidings.errors import HostBusy, UsageError
from tidings.host import inbox as inbox_views
from tidings.host import outbox_views, serialise
from tidings.host.compose import MAX_BODY, SendRequest, read_request
from tidings.host.host import Changed
from tidings.host.http_api import ApiRoute, AppState, Scoped
from tidings.host.inbox import InboxRow, Wanted
from tidings.host.routes_operator import health_of
from tidings.host.sessions import HostSession
from tidings.util.task_ends import end_tasks
from tidings.wire.names import is_agent_id
from tidings.wire.signing import KeyPair
from tidings.wire.states import READER_STAGES, ReceiptStage

Json = dict[str, Any]
STATES = ("pending", "inflight", "confirmed", "done", "dead", "cancelled")
MOST_ROWS = 500
#: bytes of messages in one answer: a page ends before it is more than this
PAGE_BYTES = 4 * 1024 * 1024
MOST_MARKED = 10_000
FOREVER = 2**62
NAMES_PATIENCE = 3.0
ENDING = re.compile(r"[0-9a-f-]{4,36}\Z")


class Rows(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[int]


# --- sending ---


async def send(asked: Scoped) -> Json:
    """Hand a message over: to exactly one of `channel`, `agent`, `role`. Answers once it is on disk; `wait`: seconds
    for its space to confirm it, unless that is known to be away. The same `id` is the same message."""
    request = read_request(await asked.body(MAX_BODY))
    patience = asked.wait()
    if (request.agent and not is_agent_id(request.agent)) or request.mentions:
        await asked.app.unless_stopping(_names_known(asked))
    # never cancelled: a program that hears "not accepted" sends the message another way
    sent = await asked.host.send(asked.scope, request, wait=patience)
    answer: Json = msgspec.to_builtins(sent)  # `asdict` takes 8 us for it, this 0.5
    return answer | {"seq": sent.seq or None}


async def _names_known(asked: Scoped) -> None:
    """Nobody is refused because this host is just meeting the space for the first time."""
    until = time.monotonic() + NAMES_PATIENCE
    while asked.host.directories.of(asked.scope.space_id).at is None and time.monotonic() < until:
        if health_of(asked.app, asked.scope)["reason"]:
            return  # it cannot be reached, so there is nothing to wait for
        await asyncio.sleep(0.02)


async def outbox(asked: Scoped) -> Json:
    """What this agent handed over, newest first."""
    states = tuple(each for each in (asked.word("state") or "").split(",") if each)
    unknown = [each for each in states if each not in STATES]
    if unknown:
        raise UsageError(f"`state` is one of {', '.join(STATES)}, not {unknown[0][:32]!r}")
    limit, before = asked.number("limit", 50, MOST_ROWS), asked.number("before", FOREVER, FOREVER)
    rows = await asked.host.outbox.read(outbox_views.newest, *asked.mine, states, before, limit)
    return {"rows": [serialise.owed(row) | asked.host.destination(row) for row in rows]}


async def outbox_row(asked: Scoped) -> Json:
    """One message, why it waits, what it replaced and what replaced it."""
    row = await asked.host.find(asked.scope, asked.part("id"))
    more = asked.host.destination(row) | {"waits": await asked.host.why_it_waits(asked.scope, row)}
    return serialise.owed_with_chain(row, await asked.host.outbox.read(outbox_views.chain, row.row)) | more


async def requeue(asked: Scoped) -> Json:
    """Send what is dead or was cancelled again, under a new id."""
    await asked.body()
    return serialise.owed(await asked.host.requeue(asked.scope, asked.part("id")))


async def cancel(asked: Scoped) -> Json:
    """Do not send it, if it has not left."""
    await asked.body()
    return serialise.owed(await asked.host.cancel(asked.scope, asked.part("id")))


async def receipt(asked: Scoped) -> Json:
    """How far a direct message has come: waits for `stage`, delivered or read."""
    row = await asked.host.find(asked.scope, asked.part("id"))
    stage = asked.word("stage") or ReceiptStage.DELIVERED
    if row.kind != "dm":
        raise UsageError(f"message {row.id} is no direct message: only those have receipts")
    if stage not in READER_STAGES:
        raise UsageError(f"`stage` is delivered or read, not {stage[:32]!r}")
    if row.seq is None:
        return {"id": row.id, "stage": "stored", "seq": None, "to": row.destination, "why": ""}
    waiting = asked.host.endpoint(asked.scope).receipt(row.id, stage, timeout=asked.wait(), to=row.destination)
    found = await asked.unless_over(waiting)
    return {"id": row.id, "stage": found.stage, "seq": row.seq, "to": row.destination, "why": found.why}


# --- mail ---


async def inbox(asked: Scoped) -> Json:
    """What this agent was sent, oldest first; `newest`: the last of it. `wait`: seconds, if there is none yet."""
    wanted, text, until = _wanted(asked), asked.word("search"), time.monotonic() + asked.wait()
    changed = asked.host.changes(asked.scope)
    while True:
        found = await (
            asked.host.inbox.read(inbox_views.listed, *asked.mine, wanted)
            if text is None
            else asked.host.inbox.search(*asked.mine, text, wanted)
        )
        left = until - time.monotonic()
        if found or left <= 0:
            return await _paged(asked, found, from_the_end=wanted.newest and text is None)
        await asked.unless_over(changed.wait(left))


async def _paged(asked: Scoped, rows: list[InboxRow], *, from_the_end: bool = False) -> Json:
    """In a thread: opening megabytes of sealed mail takes longer than the loop may stand still.

    `from_the_end`: if not all fit, the last of them do.
    """
    way = -1 if from_the_end else 1
    key, names = asked.host.key(asked.scope), asked.host.names(asked.scope)
    return {"messages": (await asyncio.to_thread(page, rows[::way], key, names))[::way]}


def page(rows: list[InboxRow], key: KeyPair | None, names: dict[str, str]) -> list[Json]:
    """As many as fit one answer, at least one."""
    shown_rows: list[Json] = []
    size = 0
    for row in rows:
        size += len(row.raw) + len(row.text)
        if shown_rows and size > PAGE_BYTES:
            break
        shown_rows.append(serialise.mail(row, key, names))
    return shown_rows


def _wanted(asked: Scoped) -> Wanted:
    kind = asked.word("kind")
    if kind not in (None, "direct", "channel", "notice"):
        raise UsageError(f"`kind` is direct, channel or notice, not {kind[:32]!r}")
    return Wanted(
        unread=asked.flag("unread"),
        sender=_sender(asked),
        channel=asked.word("channel"),
        kind=kind,  # type: ignore[arg-type]
        after=asked.number("after", 0, FOREVER),
        before=asked.number("before", FOREVER, FOREVER),
        limit=asked.number("limit", 50, MOST_ROWS),
        direct_first=asked.flag("direct_first"),
        newest=asked.flag("newest"),
    )


def _sender(asked: Scoped) -> str | None:
    text = asked.word("from")
    if text is None or is_agent_id(text):
        return text
    return resolve_among(list(asked.host.directories.of(asked.scope.space_id).agents()), text).id


async def receive(asked: Scoped) -> Json:
    """Take the agent's mail here again, if a newer session elsewhere does; whether that worked, its health says."""
    await asked.body()
    asked.host.take_back(asked.scope)
    return {"asked": True}


async def unread(asked: Scoped) -> Json:
    """How many rows are unread, by kind."""
    return {"unread": await asked.host.inbox.read(inbox_views.unread_of, *asked.mine)}


async def quarantine(asked: Scoped) -> Json:
    """What came and could not be opened: why, and how it begins."""
    found = await asked.host.inbox.read(inbox_views.aside, *asked.mine, after=asked.number("after", 0, FOREVER))
    return {"quarantine": [serialise.aside(each) for each in found]}


async def read(asked: Scoped) -> Json:
    """Mark rows as read; senders of direct messages are told."""
    return {"read": await asked.host.mark_read(asked.scope, await _rows(asked))}


async def delete(asked: Scoped) -> Json:
    """Delete what rows say; that they came stays, so none comes again."""
    return {"deleted": await asked.host.delete_mail(asked.scope, await _rows(asked))}


async def _rows(asked: Scoped) -> list[int]:
    rows = (await asked.fields(Rows)).rows
    if len(rows) > MOST_MARKED:
        raise UsageError(f"at most {MOST_MARKED} rows are marked or deleted at once, not {len(rows)}")
    if any(not 0 < row < FOREVER for row in rows):
        raise UsageError("`rows` are numbers of messages in the inbox")
    return rows


async def thread(asked: Scoped) -> Json:
    """What the inbox has of the conversation of a message."""
    named = asked.part("id")
    rows = await asked.host.inbox.read(inbox_views.thread, *asked.mine, named)
    # a page ends where it is full: the message that was named and the newest of the others come first
    found = await _paged(asked, sorted(rows, key=lambda row: (row.id != named, -row.row)))
    return {"messages": sorted(found["messages"], key=lambda message: int(message["row"]))}


async def ids(asked: Scoped) -> Json:
    """Whole ids of messages in this agent's inbox and outbox, by how they end."""
    ending = asked.word("ending")
    if ending is None or not ENDING.match(ending):
        raise UsageError("name the `ending` of an id: its last 4 to 36 characters")
    found = {
        *await asked.host.inbox.read(inbox_views.ending, *asked.mine, ending),
        *await asked.host.outbox.read(outbox_views.ending, *asked.mine, ending),
    }
    return {"ids": sorted(found)}


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
        return await asked.host.inbox.read(inbox_views.last, *asked.mine)
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
        rows = await app.host.inbox.read(inbox_views.listed, scope.space_id, scope.agent, wanted)
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
    ApiRoute("POST", "/v1/send", send, "wait", body=SendRequest),
    ApiRoute("GET", "/v1/outbox", outbox, "state", "limit", "before"),
    ApiRoute("GET", "/v1/outbox/{id}", outbox_row),
    ApiRoute("POST", "/v1/outbox/{id}/requeue", requeue),
    ApiRoute("POST", "/v1/outbox/{id}/cancel", cancel),
    ApiRoute("GET", "/v1/receipts/{id}", receipt, "stage", "wait"),
    ApiRoute(
        "GET",
        "/v1/inbox",
        inbox,
        "unread",
        "from",
        "channel",
        "kind",
        "after",
        "before",
        "limit",
        "direct_first",
        "newest",
        "search",
        "wait",
    ),
    ApiRoute("POST", "/v1/inbox/receive", receive),
    ApiRoute("GET", "/v1/inbox/quarantine", quarantine, "after"),
    ApiRoute("GET", "/v1/inbox/unread", unread),
    ApiRoute("POST", "/v1/inbox/read", read, body=Rows),
    ApiRoute("POST", "/v1/inbox/delete", delete, body=Rows),
    ApiRoute("GET", "/v1/threads/{id}", thread),
    ApiRoute("GET", "/v1/ids", ids, "ending"),
    ApiRoute("GET", "/v1/events", events),
]
