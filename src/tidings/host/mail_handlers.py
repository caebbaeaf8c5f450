"""Handlers of an agent's outbox and inbox. Every query names the scope.

`events` streams the rows of an agent's inbox as Server-Sent Events.

    event: message    id: the row    data: the message        event: state    data: the state of the connection
    event: notice     id: the row    data: a notice, such as a loss

There is no queue of events: a stream reads the inbox after the last row it sent, and is woken by new rows. So
`Last-Event-ID` continues a stream across reconnects and restarts without a gap or a second copy, and a slow reader does
not delay others. A reader that takes nothing for a while is disconnected and can reconnect. The first event has the row
after which the stream begins, for readers that sent no `Last-Event-ID`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from tidings.client.directory import resolve_among
from tidings.contract import host as contract
from tidings.contract.core import EmptyAnswer
from tidings.errors import HostBusy, UsageError
from tidings.host import inbox as inbox_views
from tidings.host import outbox_views
from tidings.host.compose import check_request
from tidings.host.host import Changed
from tidings.host.http_api import AppState, SessionCaller
from tidings.host.inbox import InboxRow, Wanted
from tidings.host.operator_handlers import health_of
from tidings.host.outbox_views import outbox_entry
from tidings.host.sessions import HostSession
from tidings.rpc.dispatch import handler
from tidings.util.task_ends import end_tasks
from tidings.wire.names import is_agent_id
from tidings.wire.signing import KeyPair

#: the largest sum of message sizes in one answer, in bytes; a page with more is cut
PAGE_BYTES = 4 * 1024 * 1024
#: larger than every row number
FOREVER = 2**62
NAMES_PATIENCE = 3.0


# --- sending ---


@handler(contract.SendRequest)
async def send(caller: SessionCaller, request: contract.SendRequest) -> contract.SendAnswer:
    if (request.agent and not is_agent_id(request.agent)) or request.mentions:
        check_request(request)
        await caller.app.unless_stopping(_wait_for_names(caller))
    # never cancelled: a program that gets "not accepted" sends the message directly
    sent = await caller.host.send(caller.scope, request, wait=min(request.wait, contract.LONGEST_WAIT))
    answer = msgspec.convert(sent, contract.SendAnswer, from_attributes=True)
    answer.seq = sent.seq or None
    return answer


async def _wait_for_names(caller: SessionCaller) -> None:
    """Waits until the host has seen the agents of a new space once, so that names resolve."""
    until = time.monotonic() + NAMES_PATIENCE
    while caller.host.directories.of(caller.scope.space_id).at is None and time.monotonic() < until:
        if health_of(caller.app, caller.scope).reason:
            return  # the space cannot be reached
        await asyncio.sleep(0.02)


@handler(contract.ListOutboxRequest)
async def list_outbox(caller: SessionCaller, request: contract.ListOutboxRequest) -> contract.OutboxAnswer:
    before = FOREVER if request.before is None else request.before
    rows = await caller.host.outbox.read(outbox_views.newest, *caller.mine, request.states, before, request.limit)
    return contract.OutboxAnswer([outbox_entry(row, caller.host.destination(row)) for row in rows])


@handler(contract.ShowOutboxRequest)
async def show_outbox(caller: SessionCaller, request: contract.ShowOutboxRequest) -> contract.OutboxDetails:
    row = await caller.host.find(caller.scope, request.id)
    waits = await caller.host.why_it_waits(caller.scope, row)
    chain = await caller.host.outbox.read(outbox_views.chain, row.row)
    return outbox_views.outbox_details(row, caller.host.destination(row), chain, waits)


@handler(contract.RequeueRequest)
async def requeue(caller: SessionCaller, request: contract.RequeueRequest) -> contract.OutboxEntry:
    return outbox_entry(await caller.host.requeue(caller.scope, request.id))


@handler(contract.CancelRequest)
async def cancel(caller: SessionCaller, request: contract.CancelRequest) -> contract.OutboxEntry:
    return outbox_entry(await caller.host.cancel(caller.scope, request.id))


@handler(contract.MessageReceiptRequest)
async def receipt(caller: SessionCaller, request: contract.MessageReceiptRequest) -> contract.MessageReceiptAnswer:
    row = await caller.host.find(caller.scope, request.id)
    if row.kind != "dm":
        raise UsageError(f"message {row.id} is not a direct message: only direct messages have receipts")
    if row.seq is None:
        return contract.MessageReceiptAnswer(row.id, "stored", None, row.destination, "")
    wait = min(request.wait, contract.LONGEST_WAIT)
    waiting = caller.host.endpoint(caller.scope).receipt(row.id, request.stage, timeout=wait, to=row.destination)
    found = await caller.unless_over(waiting)
    return contract.MessageReceiptAnswer(row.id, found.stage, row.seq, row.destination, found.why)


# --- mail ---


@handler(contract.ListInboxRequest)
async def list_inbox(caller: SessionCaller, request: contract.ListInboxRequest) -> contract.InboxAnswer:
    wanted, until = _wanted(caller, request), time.monotonic() + min(request.wait, contract.LONGEST_WAIT)
    changed = caller.host.changes(caller.scope)
    while True:
        found = await (
            caller.host.inbox.search(*caller.mine, request.search, wanted)
            if request.search
            else caller.host.inbox.read(inbox_views.listed, *caller.mine, wanted)
        )
        left = until - time.monotonic()
        if found or left <= 0:
            return contract.InboxAnswer(await _page(caller, found, keep_last=wanted.newest and not request.search))
        await caller.unless_over(changed.wait(left))


async def _page(caller: SessionCaller, rows: list[InboxRow], *, keep_last: bool = False) -> list[contract.InboxMessage]:
    """Returns a page, built in a thread: opening megabytes of sealed mail would block the loop for too long.

    `keep_last`: if not all rows fit, keep the last instead of the first.
    """
    step = -1 if keep_last else 1
    key, names = caller.host.key(caller.scope), caller.host.names(caller.scope)
    return (await asyncio.to_thread(page, rows[::step], key, names))[::step]


def page(rows: list[InboxRow], key: KeyPair | None, names: dict[str, str]) -> list[contract.InboxMessage]:
    """Returns as many messages as fit into one answer, at least one."""
    shown: list[contract.InboxMessage] = []
    size = 0
    for row in rows:
        size += len(row.raw) + len(row.text)
        if shown and size > PAGE_BYTES:
            break
        shown.append(inbox_views.inbox_message(row, key, names))
    return shown


def _wanted(caller: SessionCaller, request: contract.ListInboxRequest) -> Wanted:
    sender = request.sender or None
    if sender is not None and not is_agent_id(sender):
        sender = resolve_among(list(caller.host.directories.of(caller.scope.space_id).agents()), sender).id
    return Wanted(
        unread=request.unread,
        sender=sender,
        channel=request.channel or None,
        kind=request.kind,
        after=request.after,
        before=FOREVER if request.before is None else request.before,
        limit=request.limit,
        direct_first=request.direct_first,
        newest=request.newest,
    )


@handler(contract.ReceiveHereRequest)
async def receive_here(caller: SessionCaller, _request: contract.ReceiveHereRequest) -> EmptyAnswer:
    caller.host.take_back(caller.scope)
    return EmptyAnswer()


@handler(contract.UnreadCountsRequest)
async def unread_counts(caller: SessionCaller, _request: contract.UnreadCountsRequest) -> contract.UnreadCountsAnswer:
    return contract.UnreadCountsAnswer(await caller.host.inbox.read(inbox_views.unread_of, *caller.mine))


@handler(contract.QuarantinedMailRequest)
async def list_quarantine(
    caller: SessionCaller, request: contract.QuarantinedMailRequest
) -> contract.QuarantinedMailAnswer:
    found = await caller.host.inbox.read(inbox_views.aside, *caller.mine, after=request.after)
    return contract.QuarantinedMailAnswer([inbox_views.quarantined_mail(each) for each in found])


@handler(contract.MarkReadRequest)
async def mark_read(caller: SessionCaller, request: contract.MarkReadRequest) -> contract.MarkReadAnswer:
    return contract.MarkReadAnswer(await caller.host.mark_read(caller.scope, request.rows))


@handler(contract.DeleteMailRequest)
async def delete_mail(caller: SessionCaller, request: contract.DeleteMailRequest) -> contract.DeleteMailAnswer:
    return contract.DeleteMailAnswer(await caller.host.delete_mail(caller.scope, request.rows))


@handler(contract.ThreadRequest)
async def thread(caller: SessionCaller, request: contract.ThreadRequest) -> contract.InboxAnswer:
    rows = await caller.host.inbox.read(inbox_views.thread, *caller.mine, request.id)
    # if the page is cut, it keeps the requested message and the newest of the others
    found = await _page(caller, sorted(rows, key=lambda row: (row.id != request.id, -row.row)))
    return contract.InboxAnswer(sorted(found, key=lambda message: message.row))


@handler(contract.MessageIdsRequest)
async def message_ids(caller: SessionCaller, request: contract.MessageIdsRequest) -> contract.MessageIdsAnswer:
    found = {
        *await caller.host.inbox.read(inbox_views.ending, *caller.mine, request.ending),
        *await caller.host.outbox.read(outbox_views.ending, *caller.mine, request.ending),
    }
    return contract.MessageIdsAnswer(tuple(sorted(found)))


# --- events ---

KEEPALIVE = 15.0
#: seconds after which a reader that takes nothing is disconnected
SLOWEST = 30.0
AT_ONCE = 16
#: seconds after which a stream reads the inbox even if it was not woken
LOOK = 15.0
MOST_STREAMS = 256
MOST_STREAMS_OF_ONE = 64
log = logging.getLogger(__name__)


class Stream(EventSourceResponse):
    """A stream of events. It counts as open from its construction on, and disconnects a reader that is too slow."""

    def __init__(self, app: AppState, session: HostSession, content: AsyncIterator[ServerSentEvent]) -> None:
        super().__init__(content, ping=KEEPALIVE, send_timeout=SLOWEST, sep="\n", cleanup_timeout=1.0)
        self._app, self._session = app, session
        # counted here, so that no other request runs between the check of the limit and the count
        app.streams += 1
        app.streaming[session.scope] += 1
        app.presence.follow(session.scope, 1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        agent = self._session.scope
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.info(
                "disconnecting a reader of %s in %s that took nothing for %.0f s", agent.name, agent.space, SLOWEST
            )
            transport = scope.get("state", {}).get("transport")
            if transport is not None:
                transport.abort()
                await asyncio.sleep(0)  # the server must notice the disconnect before the missing end of the answer
        finally:
            self._app.streams -= 1
            self._app.streaming[agent] -= 1
            self._app.presence.follow(agent, -1)


async def events(caller: SessionCaller) -> Stream:
    """Streams rows of the inbox after `Last-Event-ID`, then new rows, and `state` when the connection changes."""
    after = await _begin(caller)
    if caller.app.streams >= MOST_STREAMS:
        raise HostBusy(f"{MOST_STREAMS} programs follow an inbox at this host: stop one")
    if caller.app.streaming[caller.scope] >= MOST_STREAMS_OF_ONE:
        raise HostBusy(f"{MOST_STREAMS_OF_ONE} programs follow the inbox of {caller.scope.name}: stop one")
    return Stream(caller.app, caller.session, _follow(caller.app, caller.session, after))


async def _begin(caller: SessionCaller) -> int:
    """Returns the row after which the stream begins (default: the newest)."""
    text = caller.http.headers.get("last-event-id")
    if text is None:
        return await caller.host.inbox.read(inbox_views.last, *caller.mine)
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise UsageError(f"Last-Event-ID must be the number of a row, not {text[:32]!r}")
    return int(text)


async def _follow(app: AppState, session: HostSession, after: int) -> AsyncIterator[ServerSentEvent]:
    scope = session.scope
    changed, sent_state = app.host.changes(scope), _state(app, session)
    yield _event("state", sent_state, after)
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
        if (state := _state(app, session)) != sent_state:
            sent_state = state
            yield _event("state", sent_state)
        if not rows:
            await _wait_for_news(changed, ending, app.stopping)


def _messages(rows: list[InboxRow], key: KeyPair | None, names: dict[str, str]) -> list[ServerSentEvent]:
    """Returns the events of rows. For a thread: opening megabytes of sealed mail would block the loop for too long."""
    kinds = ("notice" if row.kind == "notice" else "message" for row in rows)
    return [
        _event(kind, inbox_views.inbox_message(row, key, names), row.row) for kind, row in zip(kinds, rows, strict=True)
    ]


async def _wait_for_news(changed: Changed, *ends: asyncio.Event) -> None:
    """Waits until there are new rows, `LOOK` seconds have passed, or one of `ends` is set."""
    waiting = [asyncio.ensure_future(each) for each in (changed.wait(LOOK), *(end.wait() for end in ends))]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(waiting)


def _state(app: AppState, session: HostSession) -> contract.ConnectionHealth:
    """Returns the state of the agent's connection without its age, which always changes."""
    return msgspec.structs.replace(health_of(app, session.scope), age=UNSET)


def _event(kind: str, data: msgspec.Struct, row: int | None = None) -> ServerSentEvent:
    encoded = msgspec.json.encode(data).decode()
    return ServerSentEvent(encoded, event=kind, id=None if row is None else str(row), sep="\n")
