"""The inbox: what the agents of this host received, each message once for each recipient, for ever.

Its key is (space, recipient, sender, id). Every function takes the recipient and answers about nobody else; only the
counts are about all. A message that came again is not new, whatever became of the first copy: expiry drops what it
said and never that it came, and unread mail stays unless told otherwise. Of one sender so much is kept and no more
(`Bound`): then what was read goes first, and what finds no room is counted and told as a notice. Notices are rows of
their own kind. What cannot be opened is kept aside with the reason. Words are found with FTS5 where SQLite has it, else
by comparing. `inbox_message` and `quarantined_mail` make the answers of rows, for the host and without one.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from msgspec import UNSET

from tidings.client.message_json import content_json, message_sender, moment
from tidings.client.notices import Notice
from tidings.client.state_file import KeptAs
from tidings.contract.host import InboxMessage, QuarantinedMail
from tidings.errors import WireError
from tidings.host.schema import HostStore
from tidings.util.database import Database
from tidings.wire import message as wire
from tidings.wire.message import Mention
from tidings.wire.names import TIDINGS, short_id
from tidings.wire.seal import is_sealed, open_sealed
from tidings.wire.signing import KeyPair
from tidings.wire.states import ReceiptStage

Kind = Literal["channel", "direct", "notice"]
STEP = 500
THREAD_SHOWN = 200
#: messages of a conversation that are walked through, whoever made it how wide
THREAD_WALKED = 2_000
QUARANTINE_REASON = 1_000
#: of what could not be opened, the newest are kept for each recipient: nobody can say whose it is
QUARANTINE_ROWS, QUARANTINE_BYTES = 1_000, 16 * 1024 * 1024
#: of whose mail it is tried whether mail can be kept: no id of a space, nor of an agent
TRIAL = "trial"
#: of what there was no room for, so many are known by their ids: far more than can come again
NOT_KEPT_KNOWN = 10_000
#: in `inbox_held`: all of a sender, whatever the channel
ALL = "*"


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A verified message on its way into the inbox; the fields are those of `endpoint.incoming.Incoming`."""

    space: str
    recipient: str
    sender: str
    id: str
    sender_name: str
    kind: Kind
    channel: str | None
    seq: int
    sent_at: int
    logged_at: int
    priority: str = "next"
    reply_to: str | None = None
    context: str | None = None
    historical: bool = False
    sealed: bool = False
    mentions_me: bool = False
    wakes: bool = True
    text: str
    raw: bytes
    #: a notice that asks for nothing is read as it comes
    read_at: int | None = None
    #: the space it was said in, by the name that has here and by its id; empty if it was said in this one
    origin: str = ""
    origin_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How much one recipient keeps of one sender, unread included: on one channel, or as direct messages."""

    rows: int = 10_000
    bytes: int = 32 * 1024 * 1024
    #: of all channels of a sender together, so many times as much
    times: int = 8


class InboxRow(NamedTuple):
    row: int
    space: str
    recipient: str
    sender: str
    id: str
    sender_name: str
    kind: str
    channel: str | None
    seq: int
    sent_at: int
    logged_at: int
    received_at: int
    priority: str
    reply_to: str | None
    context: str | None
    historical: int
    sealed: int
    mentions_me: int
    wakes: int
    text: str
    raw: bytes
    read_at: int | None
    origin: str
    origin_id: str


class KeepResult(NamedTuple):
    row: int
    #: False if it had come before
    new: bool
    #: False if there was no room for it: then it is counted, and `row` is 0
    kept: bool = True


class Aside(NamedTuple):
    """Something that could not be opened."""

    row: int
    raw: bytes
    reason: str
    received_at: int


class DueReceipt(NamedTuple):
    row: int
    sender: str
    id: str
    seq: int
    stage: ReceiptStage


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which messages of a recipient. `after`, `before`: rows between these two; `sender`: an agent's id."""

    unread: bool = False
    sender: str | None = None
    channel: str | None = None
    kind: Kind | None = None
    after: int = 0
    before: int = 2**62
    limit: int = 50
    direct_first: bool = False
    #: the last of them instead of the first, in the same order
    newest: bool = False


EVERYTHING = Wanted()
COLUMNS = ", ".join(InboxRow._fields)
_TOP = ", ".join(f"i.{name}" for name in InboxRow._fields)
_WRITTEN = tuple(Arrival.__dataclass_fields__)
_values = attrgetter(*_WRITTEN)
_KEEP = f"""
INSERT INTO inbox ({", ".join(_WRITTEN)}, received_at) VALUES ({", ".join("?" * len(_WRITTEN))}, ?)
ON CONFLICT (space, recipient, sender, id) DO NOTHING RETURNING row"""
_MINE = "i.space = ? AND i.recipient = ? AND i.expired_at IS NULL"


# --------------------------------------------------------------------------------------------------------- keeping


def prepare_search(connection: sqlite3.Connection) -> bool:
    """Make the index of words, or complete it if an SQLite without FTS5 wrote meanwhile. False: there is no FTS5."""
    if not connection.execute("SELECT 1 FROM pragma_compile_options WHERE compile_options = 'ENABLE_FTS5'").fetchone():
        return False
    connection.execute(
        """CREATE VIRTUAL TABLE IF NOT EXISTS inbox_words
        USING fts5 (text, content = 'inbox_text', content_rowid = 'row')"""
    )
    (indexed,) = connection.execute("SELECT count(*) FROM inbox_words_docsize").fetchone()
    (kept,) = connection.execute("SELECT count(*) FROM inbox_text").fetchone()
    if indexed != kept:
        connection.execute("INSERT INTO inbox_words (inbox_words) VALUES ('rebuild')")
    return True


def keep(
    connection: sqlite3.Connection,
    arrival: Arrival,
    now: int,
    *,
    words: bool,
    bound: Bound = Bound(),  # noqa: B008  frozen
) -> KeepResult:
    """Keep it unless it came before; either way it may be acknowledged upstream once this is on disk.

    So may what there is no room for: else one sender would hold up what everybody else sent.
    """
    key = (arrival.space, arrival.recipient, arrival.sender, arrival.id)
    if not _has_room(connection, arrival, bound):
        known = _row_of(connection, key)
        if known is not None:
            return KeepResult(known, new=False)
        _forget_read(connection, arrival, bound, now, words=words)
        if not _has_room(connection, arrival, bound):
            _count_overflow(connection, arrival)
            return KeepResult(0, new=False, kept=False)
    made = connection.execute(_KEEP, (*_values(arrival), now)).fetchone()
    if made is None:
        known = _row_of(connection, key)
        assert known is not None
        return KeepResult(known, new=False)
    if words:
        connection.execute("INSERT INTO inbox_words (rowid, text) VALUES (?, ?)", (made[0], arrival.text))
    return KeepResult(made[0], new=True)


def _row_of(connection: sqlite3.Connection, key: tuple[str, str, str, str]) -> int | None:
    query = "SELECT row FROM inbox WHERE space = ? AND recipient = ? AND sender = ? AND id = ?"
    found = connection.execute(query, key).fetchone()
    return None if found is None else int(found[0])


def keep_notice(
    connection: sqlite3.Connection, space: str, recipient: str, notice: Notice, now: int, *, words: bool
) -> KeepResult:
    """Keep what an agent is told, the same thing once. What is no loss is there to be seen, and not unread."""
    arrival = Arrival(
        space=space,
        recipient=recipient,
        sender=TIDINGS,
        id=notice.id,
        sender_name=TIDINGS,
        kind="notice",
        channel=notice.channel,
        seq=notice.first or 0,
        sent_at=now,
        logged_at=now,
        priority="next" if notice.is_loss else "low",
        wakes=notice.is_loss,
        text=notice.text,
        raw=json.dumps(notice.facts()).encode(),
        read_at=None if notice.is_loss else now,
    )
    return keep(connection, arrival, now, words=words)


def try_to_keep(connection: sqlite3.Connection, now: int, *, words: bool) -> None:
    """Do with mail of nobody all that is done with mail, and undo it; raises what would keep mail from being kept."""
    connection.execute("SAVEPOINT mail").close()
    try:
        rows = [keep(connection, _trial(channel), now, words=words).row for channel in (None, "trial")]
        mark_read(connection, TRIAL, TRIAL, rows, now)
        told(connection, TRIAL, TRIAL, receipts_to_tell(connection, TRIAL, TRIAL))
        delete(connection, TRIAL, TRIAL, rows, now, words=words)
        keep_notice(connection, TRIAL, TRIAL, Notice("lost", TRIAL), now, words=words)
        _count_overflow(connection, _trial(None))
        tell_overflow(connection, TRIAL, TRIAL, now, words=words)
        quarantine(connection, TRIAL, TRIAL, TRIAL.encode(), TRIAL, now)
    finally:
        with suppress(sqlite3.Error):  # SQLite may have given up the transaction, and so have undone it
            connection.execute("ROLLBACK TO mail").close()
            connection.execute("RELEASE mail").close()


def _trial(channel: str | None) -> Arrival:
    kind: Kind = "channel" if channel else "direct"
    return Arrival(
        space=TRIAL,
        recipient=TRIAL,
        sender=TRIAL,
        id=kind,
        sender_name=TRIAL,
        kind=kind,
        channel=channel,
        seq=1,
        sent_at=0,
        logged_at=0,
        text=TRIAL,
        raw=TRIAL.encode(),
    )


# ---------------------------------------------------------------------------------------------------------- its bounds


def _has_room(connection: sqlite3.Connection, arrival: Arrival, bound: Bound) -> bool:
    size = len(arrival.raw) + len(arrival.text.encode())
    found = connection.execute(
        """SELECT channel, rows, bytes FROM inbox_held
        WHERE space = ? AND recipient = ? AND sender = ? AND channel IN (?, ?)""",
        (arrival.space, arrival.recipient, arrival.sender, arrival.channel or "", ALL),
    )
    for channel, rows, held in found:
        times = bound.times if channel == ALL else 1
        if rows >= bound.rows * times or held + size > bound.bytes * times:
            return False
    return True


def _forget_read(connection: sqlite3.Connection, arrival: Arrival, bound: Bound, now: int, *, words: bool) -> None:
    """Make room: what was read, the oldest first, a good part of it at a time; on this channel, else on any."""
    step = max(1, min(STEP, bound.rows // 16))
    whose = (arrival.space, arrival.recipient, arrival.sender)
    for where, asked in (("channel IS ?", (*whose, arrival.channel)), ("true", whose)):
        old = connection.execute(
            f"""SELECT row, text FROM inbox WHERE space = ? AND recipient = ? AND sender = ? AND {where}
            AND read_at IS NOT NULL AND expired_at IS NULL ORDER BY row LIMIT ?""",
            (*asked, step),
        ).fetchall()
        _expire(connection, old, now, words=words)
        if old:
            return


def _count_overflow(connection: sqlite3.Connection, arrival: Arrival) -> None:
    if arrival.kind == "notice":
        return  # there are as many unread notices already as anybody reads
    fresh = connection.execute(
        """INSERT INTO inbox_not_kept (space, recipient, sender, id) VALUES (?, ?, ?, ?)
        ON CONFLICT DO NOTHING RETURNING row""",
        (arrival.space, arrival.recipient, arrival.sender, arrival.id),
    ).fetchone()
    if fresh is None:
        return
    connection.execute("DELETE FROM inbox_not_kept WHERE row <= ?", (fresh[0] - NOT_KEPT_KNOWN,))
    connection.execute(
        """INSERT INTO inbox_overflow
          (space, recipient, sender, channel, sender_name, first, last, count, total)
        VALUES (:space, :recipient, :sender, :channel, :name, :seq, :seq, 1, 1)
        ON CONFLICT DO UPDATE SET count = count + 1, total = total + 1, sender_name = :name,
          first = min(coalesce(first, :seq), :seq), last = max(coalesce(last, :seq), :seq)""",
        {
            "space": arrival.space,
            "recipient": arrival.recipient,
            "sender": arrival.sender,
            "channel": arrival.channel or "",
            "name": arrival.sender_name,
            "seq": arrival.seq,
        },
    )


def tell_overflow(connection: sqlite3.Connection, space: str, recipient: str, now: int, *, words: bool) -> int:
    """Make notices of what was not kept since the last time; how many there are."""
    found = connection.execute(
        """SELECT sender, channel, sender_name, first, last, count, total FROM inbox_overflow
        WHERE space = ? AND recipient = ? AND count > 0""",
        (space, recipient),
    ).fetchall()
    for sender, channel, name, first, last, count, total in found:
        notice = overflow_notice(sender, channel, name, first, last, count, total)
        keep_notice(connection, space, recipient, notice, now, words=words)
        connection.execute(
            """UPDATE inbox_overflow SET count = 0, first = NULL, last = NULL
            WHERE space = ? AND recipient = ? AND sender = ? AND channel = ?""",
            (space, recipient, sender, channel),
        )
    return len(found)


def overflow_notice(sender: str, channel: str, name: str, first: int, last: int, count: int, total: int) -> Notice:
    what = f"{count} message{'' if count == 1 else 's'} of {name}"
    why = "more of this sender was unread than the inbox keeps: mark it as read to make room"
    cause = f"the bound of the inbox for {sender}, {total} so far"  # the same range may come twice, and is told twice
    if channel:
        text = f"{what} in #{channel} between {first} and {last} were not kept; {why}"
        text += f". `tidings history {channel} --before {last + 1}` shows them while the log has them"
        return Notice("flood", text, channel, first, last, count, cause)
    return Notice("flood", f"{what} to you were not kept; {why}", None, first, last, count, cause)


_DROP_OLD_ASIDE = """
DELETE FROM quarantine WHERE row IN (SELECT row FROM (
  SELECT row, sum(length(raw)) OVER newest AS held, row_number() OVER newest AS place FROM quarantine
  WHERE space = ? AND recipient = ? WINDOW newest AS (ORDER BY row DESC))
WHERE place > 1 AND (held > ? OR place > ?))"""


def quarantine(
    connection: sqlite3.Connection, space: str, recipient: str, raw: bytes, reason: str, now: int
) -> KeepResult:
    """Keep aside what cannot be opened; the same bytes once."""
    key = (space, recipient, hashlib.sha256(raw).digest())
    made = connection.execute(
        """INSERT INTO quarantine (space, recipient, digest, raw, reason, received_at) VALUES (?, ?, ?, ?, ?, ?)
        ON CONFLICT (space, recipient, digest) DO NOTHING RETURNING row""",
        (*key, raw, reason[:QUARANTINE_REASON], now),
    ).fetchone()
    if made is not None:
        connection.execute(_DROP_OLD_ASIDE, (space, recipient, QUARANTINE_BYTES, QUARANTINE_ROWS))
        return KeepResult(made[0], new=True)
    query = "SELECT row FROM quarantine WHERE space = ? AND recipient = ? AND digest = ?"
    return KeepResult(connection.execute(query, key).fetchone()[0], new=False)


# --------------------------------------------------------------------------------------------------------- reading


def holds(connection: sqlite3.Connection, space: str, recipient: str, kept: KeptAs) -> bool:
    """Is this message in this row? Rows are for ever and written in order: then so is all that came before it."""
    return _row_of(connection, (space, recipient, kept.sender, kept.id)) == kept.row


def newest_kept(connection: sqlite3.Connection, space: str, recipient: str) -> KeptAs | None:
    """The newest row of this recipient, whether its content is still there or not."""
    # unless told, SQLite goes through the mail of everybody else
    query = """SELECT max(row), sender, id FROM inbox INDEXED BY inbox_ids WHERE space = ? AND recipient = ?"""
    row, sender, mid = connection.execute(query, (space, recipient)).fetchone()
    return None if row is None else KeptAs(row, sender, mid)


def listed(connection: sqlite3.Connection, space: str, recipient: str, wanted: Wanted = EVERYTHING) -> list[InboxRow]:
    """A page in the order of arrival; direct messages before the others if asked for."""
    where, asked = _filters(space, recipient, wanted)
    direct, way = ("i.kind = 'direct' DESC, " if wanted.direct_first else ""), ("DESC" if wanted.newest else "ASC")
    query = f"SELECT {_TOP} FROM inbox i WHERE {where} ORDER BY {direct}i.row {way} LIMIT ?"
    found = _rows(connection.execute(query, (*asked, wanted.limit)))
    if wanted.newest:
        found.sort(key=lambda row: (wanted.direct_first and row.kind != "direct", row.row))
    return found


def last(connection: sqlite3.Connection, space: str, recipient: str) -> int:
    """The newest row of this recipient; 0 if there is none."""
    query = "SELECT coalesce(max(row), 0) FROM inbox WHERE space = ? AND recipient = ? AND expired_at IS NULL"
    return int(connection.execute(query, (space, recipient)).fetchone()[0])


def _filters(space: str, recipient: str, wanted: Wanted) -> tuple[str, list[Any]]:
    where, asked = [_MINE, "i.row > ?", "i.row < ?"], [space, recipient, wanted.after, wanted.before]
    if wanted.unread:
        where.append("i.read_at IS NULL")
    for column in ("sender", "channel", "kind"):
        value = getattr(wanted, column)
        if value is not None:
            where.append(f"i.{column} = ?")
            asked.append(value)
    return " AND ".join(where), asked


def search(
    connection: sqlite3.Connection,
    space: str,
    recipient: str,
    text: str,
    wanted: Wanted = EVERYTHING,
    *,
    words: bool,
) -> list[InboxRow]:
    """Messages that hold every word of `text` (or a word that begins with it), newest first."""
    terms = text.replace("\x00", " ").split()
    if not terms:
        return []
    where, asked = _filters(space, recipient, wanted)
    if words:
        quoted = " ".join('"' + term.replace('"', '""') + '"*' for term in terms)
        source = "inbox_words JOIN inbox i ON i.row = inbox_words.rowid"
        where, asked = f"inbox_words MATCH ? AND {where}", [quoted, *asked]
    else:
        source = "inbox i"
        for term in terms:
            where += " AND i.text LIKE ? ESCAPE '\\'"
            asked.append("%" + _literally(term) + "%")
    query = f"SELECT {_TOP} FROM {source} WHERE {where} ORDER BY i.row DESC LIMIT ?"
    return _rows(connection.execute(query, (*asked, wanted.limit)))


def _literally(term: str) -> str:
    for special in ("\\", "%", "_"):
        term = term.replace(special, "\\" + special)
    return term


_THREAD = f"""
WITH RECURSIVE
up (id, reply_to) AS (
  SELECT i.id, i.reply_to FROM inbox i WHERE {_MINE} AND i.id = ?
  UNION SELECT i.id, i.reply_to FROM up JOIN inbox i ON i.id = up.reply_to AND {_MINE} LIMIT {THREAD_SHOWN}),
down (id) AS (
  SELECT id FROM up UNION SELECT ?
  UNION SELECT i.id FROM down JOIN inbox i ON i.reply_to = down.id AND {_MINE} LIMIT {THREAD_WALKED}),
found (row) AS (
  SELECT i.row FROM inbox i WHERE {_MINE} AND i.id IN (SELECT id FROM down)
  UNION SELECT i.row FROM inbox i WHERE {_MINE} AND i.context IN (
    SELECT i.context FROM inbox i WHERE {_MINE} AND i.id = ? AND i.context IS NOT NULL))
SELECT {_TOP} FROM found JOIN inbox i ON i.row = found.row ORDER BY i.id = ? DESC, i.row DESC LIMIT ?"""


def thread(
    connection: sqlite3.Connection, space: str, recipient: str, message_id: str, limit: int = THREAD_SHOWN
) -> list[InboxRow]:
    """What this recipient has of a conversation: what the message answers, what answers it, and its context.

    Of a long one the newest, and the message itself in any case.
    """
    mine = (space, recipient)
    asked = (*mine, message_id, *mine, message_id, *mine, *mine, *mine, *mine, message_id, message_id, limit)
    return sorted(_rows(connection.execute(_THREAD, asked)))


def ending(connection: sqlite3.Connection, space: str, recipient: str, end: str, limit: int = 8) -> list[str]:
    """Ids of what this recipient has, by how they end."""
    query = f"SELECT DISTINCT i.id FROM inbox i WHERE {_MINE} AND substr(i.id, ?) = ? LIMIT ?"
    return [found for (found,) in connection.execute(query, (space, recipient, -len(end), end, limit))]


def aside(connection: sqlite3.Connection, space: str, recipient: str, after: int = 0, limit: int = 50) -> list[Aside]:
    """What could not be opened."""
    found = connection.execute(
        """SELECT row, raw, reason, received_at FROM quarantine WHERE space = ? AND recipient = ? AND row > ?
        ORDER BY row LIMIT ?""",
        (space, recipient, after, limit),
    )
    return [Aside._make(one) for one in found]


def unread_counts(connection: sqlite3.Connection) -> dict[tuple[str, str, str], int]:
    """How many unread messages by (space, recipient, kind): numbers, for those who may see no more."""
    found = connection.execute(
        """SELECT space, recipient, kind, count(*) FROM inbox WHERE read_at IS NULL AND expired_at IS NULL
        GROUP BY space, recipient, kind"""
    )
    return {(space, recipient, kind): number for space, recipient, kind, number in found}


def unread_of(connection: sqlite3.Connection, space: str, recipient: str) -> dict[str, int]:
    """How many unread messages of one recipient, by kind."""
    # unless told, SQLite takes an index of all the mail there is
    found = connection.execute(
        """SELECT kind, count(*) FROM inbox INDEXED BY inbox_unread
        WHERE space = ? AND recipient = ? AND read_at IS NULL
        AND expired_at IS NULL GROUP BY kind""",
        (space, recipient),
    )
    return {"direct": 0, "channel": 0, "notice": 0} | dict(found)


def _rows(found: sqlite3.Cursor) -> list[InboxRow]:
    return [InboxRow._make(one) for one in found]


# -------------------------------------------------------------------------------------------------- what became of it


def mark_read(connection: sqlite3.Connection, space: str, recipient: str, rows: Sequence[int], now: int) -> int:
    """How many of these became read now. Rows of others, and what is read, are passed over."""
    return connection.executemany(
        "UPDATE inbox SET read_at = ? WHERE row = ? AND space = ? AND recipient = ? AND read_at IS NULL",
        [(now, row, space, recipient) for row in rows],
    ).rowcount


def expire(connection: sqlite3.Connection, before: int, now: int, *, words: bool, limit: int = STEP) -> int:
    """Forget what messages received before a moment said. Unread ones stay."""
    old = connection.execute(
        """SELECT row, text FROM inbox WHERE expired_at IS NULL AND received_at < ?
        AND read_at IS NOT NULL ORDER BY row LIMIT ?""",
        (before, limit),
    ).fetchall()
    _expire(connection, old, now, words=words)
    return len(old)


def delete(
    connection: sqlite3.Connection, space: str, recipient: str, rows: Sequence[int], now: int, *, words: bool
) -> int:
    """Forget what these said, read or not; that they came stays, so that they do not come again. How many it were.

    Rows of others, and what is gone already, are passed over.
    """
    query = f"SELECT i.row, i.text FROM inbox i WHERE i.row = ? AND {_MINE}"
    found = [connection.execute(query, (row, space, recipient)).fetchone() for row in dict.fromkeys(rows)]
    mine = [each for each in found if each is not None]
    _expire(connection, mine, now, words=words)
    return len(mine)


def _expire(connection: sqlite3.Connection, old: Sequence[tuple[int, str]], now: int, *, words: bool) -> None:
    if words:
        connection.executemany("INSERT INTO inbox_words (inbox_words, rowid, text) VALUES ('delete', ?, ?)", old)
    connection.executemany(
        "UPDATE inbox SET expired_at = ?, text = '', raw = NULL WHERE row = ?", [(now, row) for row, _ in old]
    )


_UNTOLD = "kind = 'direct' AND (told = 'nothing' OR (told = 'delivered' AND read_at IS NOT NULL))"


def receipts_to_tell(connection: sqlite3.Connection, space: str, recipient: str, limit: int = 256) -> list[DueReceipt]:
    """What the senders of this recipient's direct messages do not know yet, the furthest stage of each."""
    found = connection.execute(
        f"""SELECT row, sender, id, seq, CASE WHEN read_at IS NULL THEN 'delivered' ELSE 'read' END FROM inbox
        WHERE space = ? AND recipient = ? AND {_UNTOLD} ORDER BY row LIMIT ?""",
        (space, recipient, limit),
    )
    return [DueReceipt._make((*known, ReceiptStage(stage))) for *known, stage in found]


def told(connection: sqlite3.Connection, space: str, recipient: str, receipts: Sequence[DueReceipt]) -> None:
    """These were taken by the steward. A stage never goes back."""
    connection.executemany(
        """UPDATE inbox SET told = ? WHERE row = ? AND space = ? AND recipient = ? AND kind = 'direct'
        AND told <> 'read' AND (? = 'delivered' OR read_at IS NOT NULL)""",
        [(one.stage, one.row, space, recipient, one.stage) for one in receipts],
    )


class InboxStore(HostStore):
    """The inbox over a database: what a method changed is on disk when it returns. Made by `open`."""

    def __init__(self, database: Database, *, words: bool, bound: Bound | None = None) -> None:
        self.database, self.words, self.bound = database, words, bound or Bound()
        self._write, self._now = database.write, database.now

    @classmethod
    async def open(cls, database: Database, bound: Bound | None = None) -> InboxStore:
        return cls(database, words=await database.write(prepare_search), bound=bound)

    async def keep(self, arrival: Arrival) -> KeepResult:
        now = self._now()
        return await self._write(lambda c: keep(c, arrival, now, words=self.words, bound=self.bound))

    async def keep_notice(self, space: str, recipient: str, notice: Notice) -> KeepResult:
        now = self._now()
        return await self._write(lambda c: keep_notice(c, space, recipient, notice, now, words=self.words))

    async def tell_overflow(self, space: str, recipient: str) -> int:
        now = self._now()
        return await self._write(lambda c: tell_overflow(c, space, recipient, now, words=self.words))

    async def quarantine(self, space: str, recipient: str, raw: bytes, reason: str) -> KeepResult:
        now = self._now()
        return await self._write(lambda c: quarantine(c, space, recipient, raw, reason, now))

    async def try_to_keep(self) -> None:
        """Raises why no mail could be kept now; leaves nothing."""
        now = self._now()
        await self._write(lambda c: try_to_keep(c, now, words=self.words))

    async def search(self, space: str, recipient: str, text: str, wanted: Wanted = EVERYTHING) -> list[InboxRow]:
        return await self.read(search, space, recipient, text, wanted, words=self.words)

    async def mark_read(self, space: str, recipient: str, rows: Sequence[int]) -> int:
        now = self._now()
        return await self._write(lambda c: mark_read(c, space, recipient, rows, now))

    async def delete(self, space: str, recipient: str, rows: Sequence[int]) -> int:
        now = self._now()
        return await self._write(lambda c: delete(c, space, recipient, rows, now, words=self.words))

    async def expire(self, older_than: int) -> int:
        now = self._now()
        return await self._write(lambda c: expire(c, now - older_than, now, words=self.words))

    async def told(self, space: str, recipient: str, receipts: Sequence[DueReceipt]) -> None:
        await self._write(lambda c: told(c, space, recipient, receipts))


# --- answers ---

#: bytes that are shown of what could not be opened
BEGINNING = 200


def inbox_message(row: InboxRow, key: KeyPair | None, names: Mapping[str, str]) -> InboxMessage:
    """Returns a row as the host shows it. `key`: its recipient's, to open what is sealed; without it only the text is
    shown. `names`: of agents, by id. An agent that is mentioned and not among them is shown as the beginning of its
    id: the name in the message is its sender's word."""
    sender, content = message_sender(row.sender, row.sender_name, None), _JUST_TEXT
    if row.kind != "notice":
        try:
            message = wire.decode(row.raw)
            # of another space's agent it is the name it signed, with that space behind it
            claimed = None if row.origin_id else message.sender.name
            sender = message_sender(message.sender.id, row.sender_name, claimed)
            if is_sealed(message) and key is not None:
                message = open_sealed(key, row.sender, message)
            if not is_sealed(message):
                mentioned = (Mention(each.id, names.get(each.id) or short_id(each.id)) for each in message.mentions)
                content = content_json(message, mentioned)
        except WireError:  # it cannot be opened: its text is shown
            pass
    return InboxMessage(
        **{"priority": row.priority, "reply_to": row.reply_to, "context": row.context} | content,
        row=row.row,
        id=row.id,
        kind=row.kind,
        channel=row.channel,
        sender=sender,
        text=row.text,
        notice=_notice_facts(row.raw) if row.kind == "notice" else UNSET,
        mentions_me=bool(row.mentions_me),
        wakes=bool(row.wakes),
        historical=bool(row.historical),
        sealed=bool(row.sealed),
        origin=row.origin or None,
        origin_id=row.origin_id or None,
        seq=row.seq,
        time=moment(row.logged_at),
        received=moment(row.received_at),
        read=moment(row.read_at),
    )


_JUST_TEXT: dict[str, Any] = {"parts": [], "mentions": [], "mention_ids": [], "ts": None, "role": None}


def _notice_facts(raw: bytes) -> dict[str, Any]:
    try:
        facts = dict(json.loads(raw))
    except (ValueError, TypeError):  # a disk that changed a bit of it; the text is there
        return {}
    return {name: value for name, value in facts.items() if name != "text"}


def quarantined_mail(found: Aside) -> QuarantinedMail:
    """Returns something that could not be opened. Nobody has signed it: only its beginning is shown, in ASCII."""
    begins = found.raw[:BEGINNING].decode("ascii", "backslashreplace")
    return QuarantinedMail(found.row, found.reason, len(found.raw), begins, moment(found.received_at))
