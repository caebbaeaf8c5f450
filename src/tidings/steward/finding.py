"""`ctl.trace find`: is a message of the caller's own stored, although its acknowledgement was lost long ago?

Only the one subject that the caller publishes such a message to is read: the caller is a token of it, so nobody is told
of another's. A request reads a bounded number of records and says where to go on (`next`). A direct message or task
that was read or done and then removed is `gone`, as long as its receipts or its fate are remembered; a channel message
that retention removed is not found. `ctl.trace which` asks the same of many ids at once, and only which may be there:
whoever sends a long queue asks once, and looks closely (`find`) for the few that are named.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from tidings.broker.jetstream import StoredRecord
from tidings.errors import UsageError
from tidings.steward.agent_handlers import Answer, Handler, access_of
from tidings.steward.receipt_services import message_id
from tidings.steward.requests import Request
from tidings.wire.envelope import Received, open_record
from tidings.wire.ids import id_time_ms, is_message_id
from tidings.wire.names import check_agent_id, check_channel, check_role

if TYPE_CHECKING:
    from tidings.steward.service import Steward

#: what one request reads
MOST_RECORDS, MOST_BYTES = 4_000, 4 * 1024 * 1024
PAGE = 1_000
#: ids that one request may ask for
MOST_IDS = 1_000
#: seconds by which the clock of whoever made the id, or says when it tried first, may be ahead of the broker's
AHEAD = 2 * 3600.0


async def find(steward: Steward, request: Request) -> Answer:
    """`kind`, `to` and `id` of a message, `since` when it was first tried, `after` the last sequence looked at."""
    access_of(steward, request.sender)
    mid, after = message_id(request), request.optional("after", int) or 0
    stream, subject = _place(steward, request)
    async with steward.traces.turn(request.sender):
        if not after and (known := await _remembered(steward, request, mid)):
            stored = await steward.js.at(stream, known)
            here = stored is not None and stored.subject == subject and _is_message(steward, stored, mid)
            return {"seq": known, "state": "stored" if here else "gone", "next": None}
        start = after + 1 if after else await _first(steward, stream, subject, _since(request, mid))
        found, last = await _search(steward, stream, subject, start, mid)
    return {"seq": found, "state": "stored" if found else "unknown", "next": last}


async def which(steward: Steward, request: Request) -> Answer:
    """`kind`, `to` and `ids` of messages, `since` the first of them was tried, `after` as with `find`.

    What is named may be there: readers may refuse it. What is not named, up to `next`, is not.
    """
    access_of(steward, request.sender)
    ids, after = _ids(request), request.optional("after", int) or 0
    stream, subject = _place(steward, request)
    async with steward.traces.turn(request.sender):
        known = set() if after else {mid for mid in ids if await _remembered(steward, request, mid)}
        start = after + 1 if after else await _first(steward, stream, subject, _since(request, min(ids)))
        found, last = await _gather(steward, stream, subject, start, frozenset(ids))
    return {"found": sorted(known | found), "next": last}


def _ids(request: Request) -> tuple[str, ...]:
    ids = request.texts("ids")
    if not 0 < len(ids) <= MOST_IDS or not all(is_message_id(mid) for mid in ids):
        raise UsageError(f"trace which: `ids` are 1 to {MOST_IDS} message ids")
    return ids


def _place(steward: Steward, request: Request) -> tuple[str, str]:
    """The stream and the subject of the caller's own messages of that kind to that destination."""
    s, to, kind = steward.subjects, request.text("to"), request.text("kind")
    if kind == "chat":
        return s.log_stream, s.chat(request.sender, check_channel(to))
    if kind == "dm":
        return s.direct_stream, s.direct(check_agent_id(to), request.sender)
    if kind == "task":
        return s.task_stream, s.task(check_role(to), request.sender)
    raise UsageError("trace find: `kind` is chat, dm or task")


async def _remembered(steward: Steward, request: Request, mid: str) -> int | None:
    """Where receipts or the fate of a task say that it was."""
    caller, to = request.sender, request.text("to")
    if request.text("kind") == "dm":
        await steward.receipts.ready()
        life = steward.receipts.lives.get((caller, mid, to))
        return life.seq if life else None
    if request.text("kind") == "task":
        task = steward.desk.book.find(caller, mid)
        return task.seq if task is not None and task.role == to else None
    return None


def _since(request: Request, mid: str) -> float | None:
    """Seconds since 1970 from which channel messages are looked at; a mailbox or queue is small enough for all of it.

    A clock that was ahead made an id of the future: nothing is stored later than now.
    """
    if request.text("kind") != "chat":
        return None
    told = request.optional("since", int)
    return min(told if told is not None else (id_time_ms(mid) or 0) / 1000, time.time()) - AHEAD


async def _first(steward: Steward, stream: str, subject: str, since: float | None) -> int | None:
    if since is None:
        return 1
    return await steward.js.first_after(stream, subject, datetime.fromtimestamp(max(0.0, since), UTC))


async def _search(
    steward: Steward, stream: str, subject: str, start: int | None, mid: str
) -> tuple[int | None, int | None]:
    """The first record from `start` that is the message, and the last one looked at if there may be more."""
    if start is None:
        return None, None
    end = int((await steward.js.info(stream))["state"]["last_seq"])
    records = size = 0
    async for page in steward.js.read(stream, subject, start, end, page=PAGE, max_bytes=MOST_BYTES):
        for record in page:
            if mid.encode() in record.payload and _is_message(steward, record, mid):
                return record.seq, record.seq
        records, size = records + len(page), size + sum(len(record.payload) for record in page)
        if records >= MOST_RECORDS or size >= MOST_BYTES:
            return None, page[-1].seq
    return None, None


class _Named(msgspec.Struct):
    id: str


_NAMED = msgspec.json.Decoder(_Named)


async def _gather(
    steward: Steward, stream: str, subject: str, start: int | None, ids: frozenset[str]
) -> tuple[set[str], int | None]:
    """Those of the ids that records from `start` claim, and the last one looked at if there may be more."""
    found: set[str] = set()
    if start is None:
        return found, None
    end = int((await steward.js.info(stream))["state"]["last_seq"])
    records = size = 0
    async for page in steward.js.read(stream, subject, start, end, page=PAGE, max_bytes=MOST_BYTES):
        found |= ids & {_claimed_id(record) for record in page}
        records, size = records + len(page), size + sum(len(record.payload) for record in page)
        if records >= MOST_RECORDS or size >= MOST_BYTES:
            return found, page[-1].seq
    return found, None


def _claimed_id(record: StoredRecord) -> str:
    try:
        return _NAMED.decode(record.payload).id
    except ValueError:  # no message: readers refuse it
        return ""


def _is_message(steward: Steward, record: StoredRecord, mid: str) -> bool:
    """A record that readers refuse is not the message, whatever id it has."""
    fields = record.own_fields()
    if fields is None:
        return False
    opened = open_record(steward.subjects, steward.info.id, record.subject, fields, record.payload)
    return isinstance(opened, Received) and opened.message.id == mid


FINDING_HANDLERS: dict[tuple[str, str], Handler] = {("trace", "find"): find, ("trace", "which"): which}
