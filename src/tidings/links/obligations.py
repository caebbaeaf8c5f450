"""What a link still has to do for records its token has passed, as functions of a SQLite connection.

An obligation is a record that must be asked for again: the log here lost it, or comparing found that it never came. A
record in quarantine was received and not let in; its bytes are kept. Both are tried sparsely, and end as any record
does: admitted, a duplicate, or omitted by name. Nothing ends by age or by number of attempts.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tidings.errors import ConflictError, UnknownMessage, UsageError
from tidings.links.link_store import Disposed, find, quarantine, quarantined
from tidings.links.ports import OriginIdentity
from tidings.util.backoff import Backoff
from tidings.wire.digests import RecordIdentity
from tidings.wire.links import LinkedRecord

#: milliseconds between attempts
OBLIGATION_DELAYS = Backoff(1_000, 300_000)
QUARANTINE_DELAYS = Backoff(60_000, 6 * 3_600_000)
#: why a message is asked for again
LOST_HERE = "lost_here"
NOT_RECEIVED = "not_received"
#: the reason of what was admitted behind younger messages of its sender
LATE = "late"
#: why a record is put aside whose channel has to be listed here, and is not
NOT_LISTED = "not_listed"


class OwedRecord(NamedTuple):
    """An obligation. The identity is empty if it was never received."""

    seq: int
    identity: OriginIdentity
    channel: str
    hash: str
    day: str
    attempts: int


class Quarantined(NamedTuple):
    life: int
    reason: str
    words: str
    record: LinkedRecord
    attempts: int
    first_at: int


def owe(connection: sqlite3.Connection, row: int, seqs: Iterable[int], now: int) -> int:
    """Records at or before the token that the peer has and that have no disposition are to be asked for. How many.

    Neither a range that was removed nor a record that had vanished says that nothing is there: a log that was put back
    may have it again."""
    again = """UPDATE disposition SET kind = 'obligation', reason = :reason,
      origin = '', channel = '', sender = '', id = '', hash = '', day = ''
      WHERE link = :row AND life = 0 AND seq = :seq AND reason = 'vanished'"""
    never = """INSERT INTO disposition (link, seq, kind, reason) SELECT :row, :seq, 'obligation', :reason
      WHERE EXISTS (SELECT 1 FROM link WHERE row = :row AND handled_seq >= :seq)
      AND NOT EXISTS (SELECT 1 FROM disposition WHERE link = :row AND life = 0 AND seq = :seq)"""
    new: list[tuple[int, int]] = []
    for seq in seqs:
        values = {"row": row, "seq": seq, "reason": NOT_RECEIVED}
        if connection.execute(again, values).rowcount or connection.execute(never, values).rowcount:
            new.append((row, seq))
    _note(connection, new, now)
    return len(new)


def first_other(connection: sqlite3.Connection, row: int, found: Iterable[RecordIdentity]) -> int | None:
    """The first of these sequences at which the ledger knows another record: that log is not the one it knew. What was
    put aside because it is no message has no id here, and is known by its bytes."""
    query = """SELECT sender, id, hash FROM disposition
      WHERE link = ? AND life = 0 AND seq = ? AND hash <> '' AND reason <> 'vanished'"""
    known = ((each, connection.execute(query, (row, each.seq)).fetchone()) for each in found)
    return min((one.seq for one, ours in known if ours is not None and _is_other(one, *ours)), default=None)


def _is_other(claimed: RecordIdentity, sender: str, name: str, hashed: str) -> bool:
    return hashed != claimed.hash.hex() or (name != "" and (sender, name) != (claimed.sender, claimed.id))


def lost_here(connection: sqlite3.Connection, space: str, floor: int, now: int) -> int:
    """The index was read anew: what links brought and it does not hold was lost, unless it was removed by age. What it
    holds may be at another place of the log than before."""
    connection.execute(
        """UPDATE disposition SET local_seq = p.seq FROM present AS p
        WHERE life = 0 AND kind IN ('admitted', 'duplicate')
        AND disposition.link IN (SELECT row FROM link WHERE space = ?) AND p.space = ?
        AND p.origin = disposition.origin AND p.sender = disposition.sender AND p.id = disposition.id
        AND p.seq <> local_seq""",
        (space, space),
    )
    lost = connection.execute(
        """UPDATE disposition SET kind = 'obligation', reason = ?, local_seq = NULL
        WHERE life = 0 AND kind IN ('admitted', 'duplicate') AND local_seq >= ?
        AND link IN (SELECT row FROM link WHERE space = ?)
        AND NOT EXISTS (SELECT 1 FROM present AS p WHERE p.space = ? AND p.origin = disposition.origin
          AND p.sender = disposition.sender AND p.id = disposition.id) RETURNING link, seq""",
        (LOST_HERE, floor, space, space),
    ).fetchall()
    _note(connection, lost, now)
    return len(lost)


def owed(connection: sqlite3.Connection, row: int, now: int, limit: int) -> list[OwedRecord]:
    """What is due, in the order of the peer's log. What is due later than it can be was put off by a wrong clock."""
    query = """SELECT d.seq, d.origin, d.sender, d.id, d.channel, d.hash, d.day, o.attempts
      FROM obligation AS o JOIN disposition AS d USING (link, life, seq)
      WHERE o.link = ? AND o.life = 0 AND (o.next_at <= ? OR o.next_at > ?) ORDER BY o.seq LIMIT ?"""
    found = connection.execute(query, (row, now, now + OBLIGATION_DELAYS.bound, limit))
    return [OwedRecord(seq, OriginIdentity(*name), *rest) for seq, name, rest in ((f[0], f[1:4], f[4:]) for f in found)]


def postpone(connection: sqlite3.Connection, row: int, seqs: Iterable[int], now: int, luck: float) -> None:
    """They were tried in vain."""
    for seq in seqs:
        _postpone(connection, "obligation", (row, 0, seq), now, OBLIGATION_DELAYS, luck)


def due_again(connection: sqlite3.Connection, row: int, seqs: Iterable[int], now: int) -> None:
    """They were not tried after all: what was asked for did not fit into one answer."""
    query = "UPDATE obligation SET attempts = 0, next_at = ? WHERE link = ? AND life = 0 AND seq = ?"
    connection.executemany(query, [(now, row, seq) for seq in seqs])


def settle(connection: sqlite3.Connection, row: int, disposed: Sequence[Disposed], now: int, life: int = 0) -> None:
    """What became of records that waited. One that was settled meanwhile stays as it is."""
    put_aside = []
    for d in disposed:
        waited = "('obligation')" if d.kind == "quarantined" else "('quarantined', 'obligation')"
        settled = connection.execute(
            f"""UPDATE disposition SET origin = ?, sender = ?, id = ?, channel = ?, hash = ?, day = ?, kind = ?,
              reason = ?, local_seq = ? WHERE link = ? AND life = ? AND seq = ? AND kind IN {waited}""",
            (*d.identity, d.channel, d.hash, d.day, d.kind, d.reason, d.local_seq, row, life, d.seq),
        )
        if settled.rowcount and d.kind == "quarantined":
            put_aside.append(d)
    quarantine(connection, row, put_aside, now)


def due_in_quarantine(connection: sqlite3.Connection, row: int, now: int, limit: int) -> list[Quarantined]:
    due = "q.link = ? AND (q.next_at <= ? OR q.next_at > ?) ORDER BY q.next_at, q.seq LIMIT ?"
    return _quarantined(connection, due, (row, now, now + QUARANTINE_DELAYS.bound, limit))


def in_quarantine(connection: sqlite3.Connection, row: int, after: int = 0, limit: int = 100) -> list[Quarantined]:
    return _quarantined(connection, "q.link = ? AND q.seq > ? ORDER BY q.seq, q.life LIMIT ?", (row, after, limit))


def quarantine_tried(
    connection: sqlite3.Connection, row: int, tried: Iterable[tuple[int, int]], now: int, luck: float
) -> None:
    """(life, sequence) of those that are tried again now: next time later."""
    for life, seq in tried:
        _postpone(connection, "quarantine", (row, life, seq), now, QUARANTINE_DELAYS, luck)


def still_quarantined(connection: sqlite3.Connection, row: int, life: int, seq: int, reason: str, words: str) -> None:
    """It was tried again in vain."""
    place = (row, life, seq)
    connection.execute("UPDATE disposition SET reason = ? WHERE link = ? AND life = ? AND seq = ?", (reason, *place))
    connection.execute(
        "UPDATE quarantine SET words = ? WHERE link = ? AND life = ? AND seq = ?", (words[:1_000], *place)
    )


def retry_quarantined(connection: sqlite3.Connection, row: int, seqs: Sequence[int] | None, now: int) -> int:
    """An operator wants them tried now; None is all of them."""
    if seqs is None:
        return connection.execute("UPDATE quarantine SET next_at = ? WHERE link = ?", (now, row)).rowcount
    query = "UPDATE quarantine SET next_at = ? WHERE link = ? AND seq = ?"
    count = sum(connection.execute(query, (now, row, seq)).rowcount for seq in seqs)
    if seqs and not count:
        raise _not_in_quarantine(connection, row, seqs)
    return count


def retry_unlisted(connection: sqlite3.Connection, row: int, now: int) -> None:
    """Other channels are listed now: what waited for that is tried."""
    connection.execute(
        """UPDATE quarantine SET next_at = ? WHERE link = ? AND (life, seq) IN (
          SELECT life, seq FROM disposition WHERE link = ? AND kind = 'quarantined' AND reason = ?)""",
        (now, row, row, NOT_LISTED),
    )


def unlisted(connection: sqlite3.Connection, row: int, limit: int = 20) -> list[str]:
    """What helps those that wait for their channel to be listed, in words, one for each channel."""
    query = """SELECT DISTINCT q.words FROM quarantine AS q JOIN disposition AS d USING (link, life, seq)
      WHERE q.link = ? AND d.reason = ? ORDER BY 1 LIMIT ?"""
    return [words for (words,) in connection.execute(query, (row, NOT_LISTED, limit))]


def drop(connection: sqlite3.Connection, row: int, seq: int, reason: str, life: int | None = None) -> None:
    """An operator gives a quarantined record up, and says why. `life` as in `one_quarantined`."""
    if not reason.strip():
        raise UsageError("say why: what is dropped is named with its reason")
    kept = one_quarantined(connection, row, seq, life)
    connection.execute(
        "UPDATE disposition SET kind = 'omitted', reason = ? WHERE link = ? AND life = ? AND seq = ?",
        (f"operator: {reason.strip()[:200]}", row, kept.life, seq),
    )


def one_quarantined(connection: sqlite3.Connection, row: int, seq: int, life: int | None = None) -> Quarantined:
    """The record in quarantine at a sequence. Several are there if the other log was set back, or something else was
    agreed on, and another one came in its place: then it has to be said of which life."""
    where = "q.link = ? AND q.seq = ? AND (? IS NULL OR q.life = ?) ORDER BY q.life"
    found = _quarantined(connection, where, (row, seq, life, life))
    if not found:
        raise _not_in_quarantine(connection, row, [seq])
    if len(found) > 1:
        lives = ", ".join(str(each.life) for each in found)
        raise ConflictError(f"{len(found)} records {seq} are in quarantine, of different lives: --life, one of {lives}")
    return found[0]


def _not_in_quarantine(connection: sqlite3.Connection, row: int, seqs: Sequence[int]) -> UnknownMessage:
    link = find(connection, row).definition.link
    of = f"of link {link}"
    named = f"record {seqs[0]} {of} is not" if len(seqs) == 1 else f"none of {', '.join(map(str, seqs))} {of} is"
    return UnknownMessage(f"{named} in quarantine: `tidings link quarantine list {link}` shows what is")


def counts(connection: sqlite3.Connection, row: int) -> tuple[int, int]:
    """How many records are owed, and how many are in quarantine."""
    (owing,) = connection.execute("SELECT count(*) FROM obligation WHERE link = ?", (row,)).fetchone()
    return owing, quarantined(connection, row)[0]


def next_due(connection: sqlite3.Connection, row: int) -> int | None:
    """When something that waits is due, in milliseconds."""
    query = """SELECT min(next_at) FROM (SELECT min(next_at) AS next_at FROM obligation WHERE link = ? AND life = 0
      UNION ALL SELECT min(next_at) FROM quarantine WHERE link = ?)"""
    (found,) = connection.execute(query, (row, row)).fetchone()
    return found if found is None else int(found)


def _note(connection: sqlite3.Connection, places: Iterable[tuple[int, int]], now: int) -> None:
    query = "INSERT INTO obligation (link, seq, next_at) VALUES (?, ?, ?)"
    connection.executemany(query, [(row, seq, now) for row, seq in places])


def _postpone(
    connection: sqlite3.Connection, table: str, place: tuple[int, int, int], now: int, delays: Backoff, luck: float
) -> None:
    where = "link = ? AND life = ? AND seq = ?"
    found = connection.execute(f"SELECT attempts FROM {table} WHERE {where}", place).fetchone()
    if found is not None:
        delay = int(delays.delay(found[0] + 1, luck))
        query = f"UPDATE {table} SET attempts = attempts + 1, next_at = ? WHERE {where}"
        connection.execute(query, (now + delay, *place))


def _quarantined(connection: sqlite3.Connection, where: str, values: Sequence[object]) -> list[Quarantined]:
    query = f"""SELECT q.life, d.reason, q.words, q.attempts, q.first_at, q.seq, q.time_ns, d.origin, d.channel,
      d.sender, q.signature, q.payload, q.hops, q.mark
      FROM quarantine AS q JOIN disposition AS d USING (link, life, seq) WHERE {where}"""
    names = ("seq", "time_ns", "origin", "channel", "sender", "signature", "payload", "hops", "mark")
    return [
        Quarantined(life, reason, words, LinkedRecord(**dict(zip(names, fields, strict=True))), attempts, first_at)
        for life, reason, words, attempts, first_at, *fields in connection.execute(query, tuple(values))
    ]
