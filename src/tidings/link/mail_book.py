"""Direct messages that came from linked spaces, as functions of a connection to the ledger.

A page is one transaction: what became of each message in it, and how far the peer's mail was handled. A message has
one row for as long as its sender's space may offer it again, and what was refused is told there once. How far our own
receipts were told is beside it. All of it is kept for each peer, not for each agreement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from tidings.link.people import PeerPlace
from tidings.wire.ids import is_message_id

#: rows of a peer that are kept, and milliseconds for which they are: longer than any space keeps unread mail
MOST_ROWS, KEPT_FOR = 50_000, 60 * 86_400_000
Outcome = Literal["admitted", "had", "refused"]
#: what a message is known by: sender, id, reader
MailKey = tuple[str, str, str]


class HandledMail(NamedTuple):
    """What became of one message of the peer's."""

    sender: str
    id: str
    reader: str
    seq: int
    outcome: Outcome
    why: str = ""

    @property
    def key(self) -> MailKey:
        return self.sender, self.id, self.reader

    @property
    def is_due(self) -> bool:
        """Is its sender's space to be told? What is no message cannot be named to it."""
        return self.outcome == "refused" and is_message_id(self.id)


class MailState(NamedTuple):
    """How far the peer's mail was handled, and how far our receipts were told to it."""

    epoch: str = ""
    #: names who was known of us there: mail to others was not looked for
    people: str = ""
    through: int = 0
    told_epoch: str = ""
    told_through: int = 0


def state(connection: sqlite3.Connection, place: PeerPlace) -> MailState:
    query = "SELECT epoch, people, through, told_epoch, told_through FROM peer_mail WHERE space = ? AND peer = ?"
    found = connection.execute(query, place).fetchone()
    return MailState(*found) if found else MailState()


def seqs_of(connection: sqlite3.Connection, place: PeerPlace, keys: Iterable[MailKey]) -> dict[MailKey, int]:
    """Those of these messages that came from the peer, and where they are in its mail."""
    query = "SELECT seq FROM mail WHERE space = ? AND peer = ? AND sender = ? AND id = ? AND reader = ?"
    rows = ((key, connection.execute(query, (*place, *key)).fetchone()) for key in keys)
    return {key: int(row[0]) for key, row in rows if row is not None}


def commit(
    connection: sqlite3.Connection,
    place: PeerPlace,
    done: Sequence[HandledMail],
    epoch: str,
    people: str,
    through: int,
    now: int,
    forged: int = 0,
) -> None:
    """A page: what became of everything in it, and the token. `forged`: how much up to there nobody signed."""
    connection.executemany(
        """INSERT INTO mail (space, peer, sender, id, reader, seq, outcome, why, told, at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT (space, peer, sender, id, reader) DO UPDATE SET seq = excluded.seq""",
        [(*place, *each, int(not each.is_due), now) for each in done],
    )
    connection.execute(
        """INSERT INTO peer_mail (space, peer, epoch, people, through, forged) VALUES (?, ?, ?, ?, ?, ?)
        ON CONFLICT (space, peer) DO UPDATE SET epoch = excluded.epoch, people = excluded.people,
        through = excluded.through, forged = forged + excluded.forged""",
        (*place, epoch, people, through, forged),
    )
    if done:
        _prune(connection, place, now)


def _prune(connection: sqlite3.Connection, place: PeerPlace, now: int) -> None:
    connection.execute("DELETE FROM mail WHERE space = ? AND peer = ? AND at < ?", (*place, now - KEPT_FOR))
    connection.execute(
        """DELETE FROM mail WHERE space = ? AND peer = ? AND at < (SELECT at FROM mail WHERE space = ? AND peer = ?
        ORDER BY at DESC LIMIT 1 OFFSET ?)""",
        (*place, *place, MOST_ROWS),
    )


def refused(connection: sqlite3.Connection, place: PeerPlace, limit: int) -> list[HandledMail]:
    """What was refused and not told yet, oldest first."""
    query = """SELECT sender, id, reader, seq, outcome, why FROM mail
      WHERE space = ? AND peer = ? AND told = 0 ORDER BY seq LIMIT ?"""
    return [HandledMail(*row) for row in connection.execute(query, (*place, limit))]


def note_told(connection: sqlite3.Connection, place: PeerPlace, told: Iterable[MailKey]) -> None:
    connection.executemany(
        "UPDATE mail SET told = 1 WHERE space = ? AND peer = ? AND sender = ? AND id = ? AND reader = ?",
        [(*place, *key) for key in told],
    )


def move_told(connection: sqlite3.Connection, place: PeerPlace, epoch: str, through: int) -> None:
    connection.execute(
        """INSERT INTO peer_mail (space, peer, told_epoch, told_through) VALUES (?, ?, ?, ?) ON CONFLICT (space, peer)
        DO UPDATE SET told_epoch = excluded.told_epoch, told_through = excluded.told_through""",
        (*place, epoch, through),
    )


def tell_again(connection: sqlite3.Connection, place: PeerPlace) -> None:
    """The peer may not know any more what became of its messages."""
    connection.execute("UPDATE peer_mail SET told_through = 0 WHERE space = ? AND peer = ?", place)
    # an id of a message has dashes; the rest cannot be told
    untold = "UPDATE mail SET told = 0 WHERE space = ? AND peer = ? AND outcome = 'refused' AND id LIKE '%-%'"
    connection.execute(untold, place)


def begin_again(connection: sqlite3.Connection, place: PeerPlace, epoch: str) -> None:
    """The mail here is that of another epoch, and may have lost what was let in: everything that the peer still has is
    looked at again."""
    move_told(connection, place, epoch, 0)
    connection.execute("UPDATE peer_mail SET epoch = '', people = '', through = 0 WHERE space = ? AND peer = ?", place)
    connection.execute("DELETE FROM mail WHERE space = ? AND peer = ? AND outcome <> 'refused'", place)


def forged(connection: sqlite3.Connection, place: PeerPlace) -> int:
    """How often mail was passed over that nobody signed."""
    found = connection.execute("SELECT forged FROM peer_mail WHERE space = ? AND peer = ?", place).fetchone()
    return int(found[0]) if found else 0


def counts(connection: sqlite3.Connection, place: PeerPlace) -> dict[str, int]:
    query = "SELECT outcome, count(*) FROM mail WHERE space = ? AND peer = ? GROUP BY outcome"
    return dict(connection.execute(query, place).fetchall())


def forget(connection: sqlite3.Connection, place: PeerPlace) -> None:
    """Everything of a peer: the link was removed."""
    for table in ("mail", "peer_mail"):
        connection.execute(f"DELETE FROM {table} WHERE space = ? AND peer = ?", place)
