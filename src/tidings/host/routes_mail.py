"""Routes of one agent's mail: what it hands over to be sent, and what it was sent. Every query names the scope."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import msgspec

from tidings.client.directory import resolve_among
from tidings.errors import UsageError
from tidings.host import serialise
from tidings.host.compose import MAX_BODY, SendRequest, read_request
from tidings.host.http_api import ApiRoute, Scoped
from tidings.host.inbox import InboxRow, Wanted
from tidings.host.routes_operator import health_of
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
    # Never given up half-way: an answer that says it was not taken sends its program another way with it.
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
    rows = await asked.host.outbox.newest(*asked.mine, states, before, limit)
    return {"rows": [serialise.owed(row) | asked.host.destination(row) for row in rows]}


async def outbox_row(asked: Scoped) -> Json:
    """One message, why it waits, what it replaced and what replaced it."""
    row = await asked.host.find(asked.scope, asked.part("id"))
    more = asked.host.destination(row) | {"waits": await asked.host.why_it_waits(asked.scope, row)}
    return serialise.owed_with_chain(row, await asked.host.outbox.chain(row.row)) | more


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
            asked.host.inbox.listed(*asked.mine, wanted)
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
    return {"unread": await asked.host.inbox.unread_of(*asked.mine)}


async def quarantine(asked: Scoped) -> Json:
    """What came and could not be opened: why, and how it begins."""
    found = await asked.host.inbox.aside(*asked.mine, after=asked.number("after", 0, FOREVER))
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
    rows = await asked.host.inbox.thread(*asked.mine, named)
    # a page ends where it is full: the message that was named and the newest of the others come first
    found = await _paged(asked, sorted(rows, key=lambda row: (row.id != named, -row.row)))
    return {"messages": sorted(found["messages"], key=lambda message: int(message["row"]))}


async def ids(asked: Scoped) -> Json:
    """Whole ids of messages in this agent's inbox and outbox, by how they end."""
    ending = asked.word("ending")
    if ending is None or not ENDING.match(ending):
        raise UsageError("name the `ending` of an id: its last 4 to 36 characters")
    found = {*await asked.host.inbox.ending(*asked.mine, ending), *await asked.host.outbox.ending(*asked.mine, ending)}
    return {"ids": sorted(found)}


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
]
