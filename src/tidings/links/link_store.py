"""What a worker knows of its links, as functions of a SQLite connection; `BookedLink` runs them in the writer.

    page -> one transaction: a disposition for each of its records, and the token moves over them
    gap  -> one transaction: the token goes back, and the dispositions of what the peer's log lost go with it

A token is only ever moved by stating the one it was: of two workers the slower one is refused. It does not go back and
does not change its domain, but by `go_back` and `rebuild`, which say so. Records that wait are in `obligations.py`,
the index of the local log is in `local_index.py`. Nothing here does network I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from tidings.contract.link_worker import ChannelCount, OmittedRange
from tidings.errors import LinkConflict, QuarantineFull, TokenRefused
from tidings.links.definition import SECRET_BYTES, LinkDefinition, LinkKey
from tidings.links.ports import OriginIdentity
from tidings.wire.links import LinkedRecord, Token

T = TypeVar("T")
Kind = Literal["admitted", "duplicate", "omitted", "quarantined", "obligation"]

#: pages that may be received and not handled; a link that has more repairs instead
MOST_RECEIVED = 100
#: what a link may have in quarantine; a page that would add more stops
MOST_QUARANTINED = 10_000
MOST_QUARANTINED_BYTES = 64 * 1024 * 1024
#: records below the peer's floor that are forgotten with one page
FORGOTTEN_AT_ONCE = 2_000
#: milliseconds until a record that was put aside is tried for the first time
QUARANTINE_REST = 60_000
#: milliseconds
DAY = 24 * 3_600_000


class LinkRow(NamedTuple):
    """A link as the ledger has it. `handled`: every record up to it has its disposition; None before the first page."""

    row: int
    key: LinkKey
    definition: LinkDefinition
    handled: Token | None
    received: Token | None
    received_pages: int
    #: nanoseconds: when the last handled record was stored there
    handled_time: int
    #: milliseconds: when the token last moved, by our clock
    handled_at: int | None
    lives: int
    paused: str | None


class Disposed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one record of the peer's log. `record` is there iff it is quarantined."""

    seq: int
    identity: OriginIdentity
    channel: str
    hash: str
    kind: Kind
    day: str = ""
    reason: str = ""
    local_seq: int | None = None
    record: LinkedRecord | None = None
    words: str = ""


class WentBack(NamedTuple):
    """How many dispositions were given up because their records are read again, and how many could not be."""

    reread: int
    vanished: int


class HeldRow(NamedTuple):
    """A record as digests know it, whatever became of it; `hash` is the SHA-256 of its payload, in hex."""

    seq: int
    sender: str
    id: str
    hash: str
    origin: str


class HeldChannel(NamedTuple):
    """How many records of a channel of a space are known, and how many of them were left out because they are not
    taken."""

    origin: str
    channel: str
    records: int
    not_taken: int


class LetIn(NamedTuple):
    """A record of the peer's log that is said to be in the log here, at `local_seq`."""

    seq: int
    local_seq: int
    channel: str
    identity: OriginIdentity


_COLUMNS = """row, space, peer, scope, authority, definition, handled_epoch, handled_seq, handled_mark, received_epoch,
  received_seq, received_mark, received_pages, handled_time, handled_at, lives, pause_reason"""
_IS_HANDLED = "handled_epoch IS ? AND handled_seq IS ? AND handled_mark IS ?"


def open_link(connection: sqlite3.Connection, definition: LinkDefinition, secret: bytes, now: int) -> LinkRow:
    """The link of this definition, made if there is none. `secret` is for a space that has none yet."""
    key = definition.key
    connection.execute("INSERT OR IGNORE INTO space (space, secret) VALUES (?, ?)", (key.space, secret))
    connection.execute(
        """INSERT OR IGNORE INTO link (space, peer, scope, authority, definition, created_at)
        VALUES (?, ?, ?, ?, ?, ?)""",
        (*key, definition.text(), now),
    )
    found = _one(connection, "space = ? AND peer = ? AND scope = ? AND authority = ?", key)
    if found.definition != definition:
        raise LinkConflict(
            f"the ledger has link {definition.link} with {key.peer} under the same authority, but says otherwise what "
            "it takes: make a new link record, or remove the link from the ledger"
        )
    return found


def agree_anew(connection: sqlite3.Connection, row: int, definition: LinkDefinition) -> None:
    """The same is taken under another agreement: everything that is known of it stays true."""
    key = definition.key
    connection.execute(
        "UPDATE link SET scope = ?, authority = ?, definition = ? WHERE row = ?",
        (key.scope, key.authority, definition.text(), row),
    )


def find_row(connection: sqlite3.Connection, definition: LinkDefinition) -> LinkRow | None:
    """What the ledger has of a link as it is agreed now."""
    return next((row for row in links(connection, definition.space) if row.key == definition.key), None)


def last_row(connection: sqlite3.Connection, space: str, link: str) -> LinkRow | None:
    """What the ledger has of a link, under whichever agreement it was carried last."""
    rows = [row for row in links(connection, space) if row.definition.link == link]
    return rows[-1] if rows else None


def opened(connection: sqlite3.Connection, definition: LinkDefinition, now: int, secret: bytes = b"") -> LinkRow:
    """The same, made if it is not there. One that takes the same under another agreement goes on where it was; else all
    is read again, and what was known under the one before is given up. A link that is paused stays so, and what is in
    quarantine stays there: the peer may have it no more. `secret` is for a space that has none yet."""
    if (found := find_row(connection, definition)) is not None:
        return open_link(connection, definition, b"", now) if found.definition != definition else found
    before = [row for row in links(connection, definition.space) if row.definition.link == definition.link]
    if before and before[-1].definition.takes == definition.takes:
        agree_anew(connection, before[-1].row, definition)
        return find(connection, before[-1].row)
    row = open_link(connection, definition, secret or os.urandom(SECRET_BYTES), now)
    if before and before[-1].paused is not None:
        pause(connection, row.row, before[-1].paused, now)
    for each in before:
        keep_quarantine(connection, each.row, row.row, now)
        delete(connection, each.row)
    return find(connection, row.row)


def find(connection: sqlite3.Connection, row: int) -> LinkRow:
    return _one(connection, "row = ?", (row,))


def links(connection: sqlite3.Connection, space: str | None = None) -> list[LinkRow]:
    """All links into a space, or all there are, in the order in which they were made."""
    query = f"SELECT {_COLUMNS} FROM link WHERE space = coalesce(?, space) ORDER BY row"
    return [_as_row(found) for found in connection.execute(query, (space,))]


def delete(connection: sqlite3.Connection, row: int) -> None:
    """The link and all that is known of it. What it brought stays in the log."""
    for table in ("obligation", "quarantine", "disposition", "omitted_range", "forgotten"):
        connection.execute(f"DELETE FROM {table} WHERE link = ?", (row,))
    connection.execute("DELETE FROM link WHERE row = ?", (row,))


def keep_quarantine(connection: sqlite3.Connection, before: int, row: int, now: int) -> None:
    """What one link has in quarantine is another's from now on, under lives of its own: its sequences are read again.
    What was agreed may let it in, so it is tried at once."""
    lives = find(connection, row).lives
    last = lives + find(connection, before).lives + 1
    moved = connection.execute(
        """UPDATE disposition SET link = ?, life = CASE life WHEN 0 THEN ? ELSE life + ? END
        WHERE link = ? AND kind = 'quarantined'""",
        (row, last, lives, before),
    ).rowcount
    if moved:
        connection.execute("UPDATE link SET lives = ? WHERE row = ?", (last, row))
        connection.execute("UPDATE quarantine SET next_at = ? WHERE link = ?", (now, row))


def rebuild(connection: sqlite3.Connection, row: int) -> None:
    """Begin anew: everything the peer's log has is read again, and what is here already is found in the index, which is
    read from the log again too. What is in quarantine stays there, under a life of its own: the peer may have it no
    more. It is tried at once."""
    connection.execute("UPDATE space SET epoch = '' WHERE space = (SELECT space FROM link WHERE row = ?)", (row,))
    _set_token(connection, row, "handled", None)
    _set_token(connection, row, "received", None)
    connection.execute("UPDATE link SET received_pages = 0, handled_time = 0, lives = lives + 1 WHERE row = ?", (row,))
    connection.execute("DELETE FROM disposition WHERE link = ? AND kind <> 'quarantined'", (row,))
    for table in ("obligation", "omitted_range", "forgotten"):
        connection.execute(f"DELETE FROM {table} WHERE link = ?", (row,))
    life = find(connection, row).lives
    connection.execute("UPDATE disposition SET life = ? WHERE link = ? AND life = 0", (life, row))
    connection.execute("UPDATE quarantine SET next_at = 0 WHERE link = ?", (row,))


def pause(connection: sqlite3.Connection, row: int, reason: str, now: int) -> None:
    connection.execute("UPDATE link SET paused_at = ?, pause_reason = ? WHERE row = ?", (now, reason, row))


def resume(connection: sqlite3.Connection, row: int) -> None:
    connection.execute("UPDATE link SET paused_at = NULL, pause_reason = NULL WHERE row = ?", (row,))


def secret(connection: sqlite3.Connection, space: str) -> bytes:
    (found,) = connection.execute("SELECT secret FROM space WHERE space = ?", (space,)).fetchone()
    return bytes(found)


def message_id(secret: bytes, *name: str) -> str:
    """The same whenever it is made of the same name, so that the log takes one of two copies that come at once; and
    known to nobody, so that it cannot be burnt in advance."""
    return hmac.digest(secret, "\n".join(name).encode(), hashlib.sha256).hex()[:32]


def milliseconds() -> int:
    return int(time.time() * 1000)


# --------------------------------------------------------------------------------------------------------- tokens


def begin(connection: sqlite3.Connection, row: int, token: Token) -> None:
    """The first token of a link, or of one that was rebuilt."""
    _move(connection, row, None, token)


def receive(connection: sqlite3.Connection, row: int, token: Token) -> bool:
    """Note how far pages came that are not handled. False: there are as many as there may be."""
    link = find(connection, row)
    if link.handled is None or link.handled.domain != token.domain:
        raise TokenRefused(f"a page of {token.domain} was received, but {link.handled} was handled: go back first")
    if link.received is not None and link.received.domain == token.domain and not link.received.is_before(token):
        return True
    if link.received_pages >= MOST_RECEIVED:
        return False
    _set_token(connection, row, "received", token)
    connection.execute("UPDATE link SET received_pages = received_pages + 1 WHERE row = ?", (row,))
    return True


def commit_page(
    connection: sqlite3.Connection,
    row: int,
    before: Token,
    through: Token,
    disposed: Sequence[Disposed],
    now: int,
    time_ns: int = 0,
) -> None:
    """Every record of a page has its disposition, and the token is behind the last one; or nothing is changed."""
    for each in disposed:
        if not before.seq < each.seq <= through.seq:
            raise TokenRefused(f"record {each.seq} is not of the page between {before.seq} and {through.seq}")
    _move(connection, row, before, through)
    connection.executemany(
        """INSERT INTO disposition (link, seq, origin, sender, id, channel, hash, day, kind, reason, local_seq)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        [
            (row, one.seq, *one.identity, one.channel, one.hash, one.day, one.kind, one.reason, one.local_seq)
            for one in disposed
        ],
    )
    if find(connection, row).lives:
        # a record that is in quarantine from before, and came again as it was, is known by what became of it now
        connection.executemany(
            "DELETE FROM disposition WHERE link = ? AND life > 0 AND seq = ? AND hash = ? AND kind = 'quarantined'",
            [(row, one.seq, one.hash) for one in disposed if one.hash],
        )
    quarantine(connection, row, disposed, now)
    connection.execute(
        "UPDATE link SET handled_at = ?, handled_time = coalesce(nullif(?, 0), handled_time) WHERE row = ?",
        (now, time_ns, row),
    )


def forget_removed(connection: sqlite3.Connection, row: int, floor: int, limit: int = FORGOTTEN_AT_ONCE) -> int:
    """What became of records below the floor of the peer's log is counted, and no longer kept: nobody can compare them
    or ask for them again. What waits stays. How many were forgotten; at most `limit` at a time."""
    gone = connection.execute(
        """DELETE FROM disposition WHERE link = ? AND life = 0 AND seq IN (
          SELECT seq FROM disposition WHERE link = ? AND life = 0 AND seq < ?
          AND kind IN ('admitted', 'duplicate', 'omitted') ORDER BY seq LIMIT ?) RETURNING kind""",
        (row, row, floor, limit),
    ).fetchall()
    connection.executemany(
        """INSERT INTO forgotten (link, kind, records) VALUES (?, ?, ?)
        ON CONFLICT DO UPDATE SET records = records + excluded.records""",
        [(row, kind, count) for (kind,), count in Counter(gone).items()],
    )
    return len(gone)


def omit_range(connection: sqlite3.Connection, row: int, before: Token, through: Token, now: int) -> None:
    """What lies between them was removed before it was asked for: say so, and go on behind it."""
    _move(connection, row, before, through)
    connection.execute(
        "INSERT INTO omitted_range (link, first, last, reason, at) VALUES (?, ?, ?, 'too_old', ?)",
        (row, before.seq + 1, through.seq, now),
    )


def go_back(connection: sqlite3.Connection, row: int, before: Token, token: Token) -> WentBack:
    """The peer's log is another one from `token` on. What is known of the rest is given up, because it is read again:
    what came from it is in the log here. What waits cannot be asked for any more and is named; what is in quarantine
    stays there."""
    moved = connection.execute(
        f"""UPDATE link SET handled_space = ?, handled_epoch = ?, handled_seq = ?, handled_mark = ?, lives = lives + 1,
          received_space = NULL, received_epoch = NULL, received_seq = NULL, received_mark = NULL, received_pages = 0
        WHERE row = ? AND {_IS_HANDLED}""",
        (token.space, token.epoch, token.seq, token.mark, row, before.epoch, before.seq, before.mark),
    )
    _check_moved(moved.rowcount, row)
    beyond = (row, token.seq)
    vanished = connection.execute(
        """UPDATE disposition SET kind = 'omitted', reason = 'vanished'
        WHERE link = ? AND life = 0 AND seq > ? AND kind = 'obligation'""",
        beyond,
    ).rowcount
    reread = connection.execute(
        """DELETE FROM disposition WHERE link = ? AND life = 0 AND seq > ?
        AND kind <> 'quarantined' AND reason <> 'vanished'""",
        beyond,
    ).rowcount
    life = find(connection, row).lives
    connection.execute("UPDATE disposition SET life = ? WHERE link = ? AND life = 0 AND seq > ?", (life, *beyond))
    connection.execute("UPDATE omitted_range SET life = ? WHERE link = ? AND life = 0 AND first > ?", (life, *beyond))
    connection.execute("UPDATE omitted_range SET last = min(last, ?) WHERE link = ? AND life = 0", (token.seq, row))
    # What had vanished may be in the log that was put back: it is asked for once more.
    again = connection.execute(
        """UPDATE disposition SET kind = 'obligation', reason = 'not_received'
        WHERE link = ? AND life = 0 AND reason = 'vanished' RETURNING seq""",
        (row,),
    ).fetchall()
    connection.executemany("INSERT INTO obligation (link, seq, next_at) VALUES (?, ?, 0)", [(row, *s) for s in again])
    return WentBack(reread, vanished)


def _move(connection: sqlite3.Connection, row: int, before: Token | None, after: Token) -> None:
    if before is not None and before.domain != after.domain:
        raise TokenRefused(f"{after.domain} is another log than {before.domain}: going there is said explicitly")
    if before is not None and after.is_before(before):
        raise TokenRefused(f"from {before.seq} a token does not go back to {after.seq}")
    expected = (None, None, None) if before is None else (before.epoch, before.seq, before.mark)
    moved = connection.execute(
        f"""UPDATE link SET handled_space = ?, handled_epoch = ?, handled_seq = ?, handled_mark = ?
        WHERE row = ? AND {_IS_HANDLED}""",
        (after.space, after.epoch, after.seq, after.mark, row, *expected),
    )
    _check_moved(moved.rowcount, row)
    link = find(connection, row)
    if link.received is None or link.received.domain != after.domain or not after.is_before(link.received):
        _set_token(connection, row, "received", after)
        connection.execute("UPDATE link SET received_pages = 0 WHERE row = ?", (row,))


def _check_moved(moved: int, row: int) -> None:
    if not moved:
        raise LinkConflict(f"link {row} of the ledger is not where it was: another worker went on, or it was removed")


def _set_token(connection: sqlite3.Connection, row: int, which: str, token: Token | None) -> None:
    values = (None,) * 4 if token is None else (token.space, token.epoch, token.seq, token.mark)
    connection.execute(
        f"UPDATE link SET {which}_space = ?, {which}_epoch = ?, {which}_seq = ?, {which}_mark = ? WHERE row = ?",
        (*values, row),
    )


# -------------------------------------------------------------------------------------------------- what is inside


def quarantine(connection: sqlite3.Connection, row: int, disposed: Iterable[Disposed], now: int) -> None:
    """Keep the payloads of those that are quarantined, if there is room for all of them."""
    kept = [(each, each.record) for each in disposed if each.record is not None]
    if not kept:
        return
    times = now, now + QUARANTINE_REST
    connection.executemany(
        """INSERT INTO quarantine (link, seq, payload, bytes, signature, hops, time_ns, mark, words, first_at, next_at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        [
            (row, r.seq, r.payload, len(r.payload), r.signature, r.hops, r.time_ns, r.mark, one.words[:1_000], *times)
            for one, r in kept
        ],
    )
    rows, size = quarantined(connection, row)
    if rows > MOST_QUARANTINED or size > MOST_QUARANTINED_BYTES:
        raise QuarantineFull(
            f"link {row} has {rows} records, {size} bytes, in quarantine: nothing more is taken over it until some are "
            "let in or dropped (`tidings link quarantine`)"
        )


def spend(connection: sqlite3.Connection, row: int, size: int, share: int, now: int) -> None:
    """So many bytes were put into the log here. Time pays them back, `share` of them in a day."""
    key = find(connection, row).key
    connection.execute(
        """INSERT INTO spent (space, peer, bytes, at) VALUES (?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET bytes = excluded.bytes, at = excluded.at""",
        (key.space, key.peer, spent(connection, row, share, now) + size, now),
    )


def spent(connection: sqlite3.Connection, row: int, share: int, now: int) -> int:
    """Bytes that came from the peer of a link and are not paid back yet, under whichever terms they came."""
    query = "SELECT s.bytes, s.at FROM spent AS s JOIN link AS l USING (space, peer) WHERE l.row = ?"
    size, at = connection.execute(query, (row,)).fetchone() or (0, now)
    return max(0, int(size - share * max(0, now - at) / DAY))


def quarantined(connection: sqlite3.Connection, row: int) -> tuple[int, int]:
    """How many records, and how many bytes."""
    count, size = connection.execute("SELECT count(*), sum(bytes) FROM quarantine WHERE link = ?", (row,)).fetchone()
    return count, size or 0


def counts(connection: sqlite3.Connection, row: int) -> dict[str, int]:
    """How many records have each disposition."""
    query = """SELECT kind, sum(records) FROM (
      SELECT kind, count(*) AS records FROM disposition WHERE link = ? GROUP BY kind
      UNION ALL SELECT kind, records FROM forgotten WHERE link = ?) GROUP BY kind ORDER BY kind"""
    return dict(connection.execute(query, (row, row)).fetchall())


def omissions(connection: sqlite3.Connection, row: int, after: int = 0, limit: int = 100) -> list[OmittedRange]:
    """What of the peer's log is not here, by name: single records and ranges, from the oldest on."""
    query = """SELECT seq, seq, reason FROM disposition WHERE link = ? AND kind = 'omitted' AND seq > ?
      UNION ALL SELECT first, last, reason FROM omitted_range WHERE link = ? AND last > ? ORDER BY 1 LIMIT ?"""
    return [OmittedRange(*found) for found in connection.execute(query, (row, after, row, after, limit))]


def let_in(connection: sqlite3.Connection, row: int, after: int, limit: int) -> list[LetIn]:
    """Those that are said to be in the log here, over whichever link, by their place in the peer's log."""
    query = """SELECT seq, local_seq, channel, origin, sender, id FROM disposition
      WHERE link = ? AND life = 0 AND seq > ? AND kind IN ('admitted', 'duplicate') ORDER BY seq LIMIT ?"""
    found = connection.execute(query, (row, after, limit))
    return [LetIn(seq, local, channel, OriginIdentity(*name)) for seq, local, channel, *name in found]


def read_index_anew(connection: sqlite3.Connection, space: str) -> None:
    """What the log here holds is read from it again before anything is let in; what it lost is owed then."""
    connection.execute("UPDATE space SET epoch = '' WHERE space = ?", (space,))


def not_taken(connection: sqlite3.Connection, row: int, limit: int = 20) -> list[ChannelCount]:
    """What the peer passes on of other spaces and is not taken."""
    query = """SELECT d.origin, d.channel, count(*) FROM disposition AS d JOIN link AS l ON l.row = d.link
      WHERE d.link = ? AND d.kind = 'omitted' AND d.reason = 'not_shared' AND d.origin NOT IN (l.peer, l.space)
      GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT ?"""
    return [ChannelCount(*found) for found in connection.execute(query, (row, limit))]


def held_days(connection: sqlite3.Connection, row: int, floor: int, through: int) -> list[tuple[str, str]]:
    """(channel, day) of the messages of the peer's log that have a disposition, from `floor` to `through`. What has
    vanished is not in that log, and not among them."""
    query = """SELECT DISTINCT channel, day FROM disposition
      WHERE link = ? AND life = 0 AND id <> '' AND reason <> 'vanished' AND seq BETWEEN ? AND ? ORDER BY channel, day"""
    return [(channel, day) for channel, day in connection.execute(query, (row, floor, through))]


def held_rows(
    connection: sqlite3.Connection, row: int, channel: str, day: str, floor: int, through: int
) -> list[HeldRow]:
    query = """SELECT seq, sender, id, hash, origin FROM disposition
      WHERE link = ? AND life = 0 AND id <> '' AND reason <> 'vanished' AND channel = ? AND day = ?
      AND seq BETWEEN ? AND ? ORDER BY seq"""
    return [HeldRow(*found) for found in connection.execute(query, (row, channel, day, floor, through))]


def held_channels(connection: sqlite3.Connection, row: int, floor: int, through: int) -> list[HeldChannel]:
    """What the same messages are of."""
    query = """SELECT origin, channel, count(*), sum(kind = 'omitted' AND reason = 'not_shared') FROM disposition
      WHERE link = ? AND life = 0 AND id <> '' AND reason <> 'vanished' AND seq BETWEEN ? AND ?
      GROUP BY origin, channel ORDER BY origin, channel"""
    return [HeldChannel(*found) for found in connection.execute(query, (row, floor, through))]


def said_elsewhere(connection: sqlite3.Connection, row: int, seqs: Iterable[int]) -> set[int]:
    """Those of these records that were said in another space than the peer's."""
    query = """SELECT d.seq FROM disposition AS d JOIN link AS l ON l.row = d.link
      WHERE d.link = ? AND d.life = 0 AND d.seq = ? AND d.origin <> l.peer"""
    return {seq for each in seqs for (seq,) in connection.execute(query, (row, each))}


def _one(connection: sqlite3.Connection, where: str, values: Sequence[object]) -> LinkRow:
    found = connection.execute(f"SELECT {_COLUMNS} FROM link WHERE {where}", tuple(values)).fetchone()
    if found is None:
        raise LinkConflict("the ledger does not have this link any more: it was removed")
    return _as_row(found)


def _as_row(found: Sequence[Any]) -> LinkRow:
    row, space, peer, scope, authority, definition, *tokens = found
    handled, received, rest = tokens[:3], tokens[3:6], tokens[6:]
    key = LinkKey(space, peer, scope, authority)
    return LinkRow(row, key, _definition(definition), _token(peer, *handled), _token(peer, *received), *rest)


def _token(space: str, epoch: str, seq: int | None, mark: str) -> Token | None:
    return None if seq is None else Token(space=space, epoch=epoch, seq=seq, mark=mark)


_decode = msgspec.json.Decoder(LinkDefinition).decode


@lru_cache(maxsize=256)
def _definition(text: str) -> LinkDefinition:
    """Read once: it is looked at with each page."""
    return _decode(text)


# ------------------------------------------------------------------------------------------------------ its writer


class Jobs(Protocol):
    """`tidings.util.database.Database`, as far as it is used here."""

    async def write(self, job: Callable[[sqlite3.Connection], T]) -> T: ...

    async def read(self, job: Callable[[sqlite3.Connection], T]) -> T: ...


class BookedLink:
    """One link of the ledger: functions of this module, `obligations` and `local_index`, as jobs of the database."""

    def __init__(self, jobs: Jobs, row: int) -> None:
        self.read, self.write, self.row = jobs.read, jobs.write, row
        self._secret = b""

    async def link(self) -> LinkRow:
        return await self.read(lambda c: find(c, self.row))

    async def message_id(self, space: str, *name: str) -> str:
        """The message id of something that comes into a space over this link, or over another one."""
        if not self._secret:
            self._secret = await self.read(lambda c: secret(c, space))
        return message_id(self._secret, *name)
