"""Direct messages that came from linked spaces, as functions of a connection to the ledger.

A page is one transaction: what became of each message in it, and how far the peer's mail was handled. A message has
one row for as long as its sender's space may offer it again, and what was refused is told there once. How far our own
receipts were told is beside it. All of it is kept for each peer, not for each agreement.

A token alone says little: mail is removed once it was read, and a stream that was set back uses its sequences again.
So a row remembers the mark of its message there, and whether that may still be there: the peer goes on from the newest
that it still has (`claims`). What was let in and may still be there is what can be fetched again if it is lost here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from tidings.links.directory import PeerPlace
from tidings.wire.link_exchange import CLAIMS_AT_ONCE
from tidings.wire.message import is_message_id
from tidings.wire.records import Stamp

#: rows of a peer that are kept, and milliseconds for which they are: longer than any space keeps unread mail
MOST_ROWS, KEPT_FOR = 50_000, 60 * 86_400_000
Outcome = Literal["admitted", "had", "refused"]
#: what a message is known by: sender, id, reader
MailKey = tuple[str, str, str]
_OF_ONE = "WHERE space = ? AND peer = ? AND sender = ? AND id = ? AND reader = ?"


class HandledMail(NamedTuple):
    """What became of one message of the peer's."""

    sender: str
    id: str
    reader: str
    seq: int
    outcome: Outcome
    why: str = ""
    mark: str = ""

    @property
    def key(self) -> MailKey:
        return self.sender, self.id, self.reader

    def refused(self, why: str) -> HandledMail:
        return self._replace(outcome="refused", why=why[:200])

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
    told_mark: str = ""
    #: our broker, by its process, when what was let in was last known to be there; and how often it was not
    broker: str = ""
    losses: int = 0
    #: the peer's broker whose mail was looked at
    their_broker: str = ""
    #: how often mail was passed over that nobody signed
    forged: int = 0


class MailLooked(NamedTuple):
    """What a page of the peer's mail moves: the token, and how much up to there nobody signed."""

    epoch: str
    people: str
    through: int
    forged: int = 0
    #: the peer's, by its process
    broker: str = ""


def state(connection: sqlite3.Connection, place: PeerPlace) -> MailState:
    found = connection.execute(
        """SELECT epoch, people, through, told_epoch, told_through, told_mark, broker, losses, their_broker, forged
        FROM peer_mail WHERE space = ? AND peer = ?""",
        place,
    ).fetchone()
    return MailState(*found) if found else MailState()


def claims(connection: sqlite3.Connection, place: PeerPlace, through: int) -> list[Stamp]:
    """Messages up to there that the peer may still have: the newest that were handled, and the newest of which it was
    told nothing yet. Newest first."""
    query = "SELECT seq, mark FROM mail WHERE space = ? AND peer = ? AND seq <= ? AND mark <> ''"
    newest = " ORDER BY seq DESC LIMIT ?"
    found = {
        Stamp(seq, mark)
        for which in ("", " AND there = 1")
        for seq, mark in connection.execute(query + which + newest, (*place, through, CLAIMS_AT_ONCE // 2))
    }
    return sorted(found, key=lambda each: each.seq, reverse=True)


def gone(connection: sqlite3.Connection, place: PeerPlace, after: int, seen: int, shown: set[MailKey]) -> list[MailKey]:
    """Messages that were between two sequences of the peer's mail, and are not among those that it hands out there."""
    query = "SELECT sender, id, reader FROM mail WHERE space = ? AND peer = ? AND there = 1 AND seq > ? AND seq <= ?"
    return [key for key in connection.execute(query, (*place, after, seen)) if key not in shown]


def ended(connection: sqlite3.Connection, place: PeerPlace, keys: Iterable[MailKey]) -> dict[MailKey, Outcome]:
    """Those of these messages whose end the peer was told, or that it had no more, and what became of them. If it hands
    them out, it has forgotten that."""
    query = f"SELECT outcome FROM mail {_OF_ONE} AND there = 0"
    rows = ((key, connection.execute(query, (*place, *key)).fetchone()) for key in keys)
    return {key: row[0] for key, row in rows if row is not None}


def seqs_of(connection: sqlite3.Connection, place: PeerPlace, keys: Iterable[MailKey]) -> dict[MailKey, int]:
    """Those of these messages that came from the peer, and where they are in its mail."""
    query = f"SELECT seq FROM mail {_OF_ONE}"
    rows = ((key, connection.execute(query, (*place, *key)).fetchone()) for key in keys)
    return {key: int(row[0]) for key, row in rows if row is not None}


def commit(
    connection: sqlite3.Connection,
    place: PeerPlace,
    done: Sequence[HandledMail],
    looked: MailLooked,
    now: int,
    gone: Iterable[MailKey] = (),
) -> None:
    """A page: what became of everything in it, and the token. `gone` is not handed out there any more."""
    connection.executemany(
        """INSERT INTO mail (space, peer, sender, id, reader, seq, outcome, why, mark, told, at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT (space, peer, sender, id, reader) DO UPDATE SET seq = excluded.seq, mark = excluded.mark, there = 1,
        outcome = iif(excluded.outcome = 'refused', 'refused', outcome),
        why = iif(excluded.outcome = 'refused', excluded.why, why),
        told = iif(excluded.outcome = 'refused', excluded.told, told)""",
        [(*place, *each, int(not each.is_due), now) for each in done],
    )
    _end(connection, place, gone)
    _update(connection, place, "epoch = ?, people = ?, through = ?, forged = forged + ?, their_broker = ?", *looked)
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
    connection.executemany(f"UPDATE mail SET told = 1, there = 0 {_OF_ONE}", [(*place, *key) for key in told])


def _end(connection: sqlite3.Connection, place: PeerPlace, keys: Iterable[MailKey]) -> None:
    connection.executemany(f"UPDATE mail SET there = 0 {_OF_ONE}", [(*place, *key) for key in keys])


def _update(connection: sqlite3.Connection, place: PeerPlace, changes: str, *values: object) -> None:
    """Changes what is known of the mail of a peer; the row is made if it is the first."""
    connection.execute("INSERT OR IGNORE INTO peer_mail (space, peer) VALUES (?, ?)", place)
    connection.execute(f"UPDATE peer_mail SET {changes} WHERE space = ? AND peer = ?", (*values, *place))


def move_told(
    connection: sqlite3.Connection, place: PeerPlace, epoch: str, told: Stamp, ended: Iterable[MailKey] = ()
) -> None:
    """All receipts up to there were told, and with them what became of these messages."""
    _update(connection, place, "told_epoch = ?, told_through = ?, told_mark = ?", epoch, told.seq, told.mark)
    _end(connection, place, ended)


def look_anew(connection: sqlite3.Connection, place: PeerPlace, broker: str) -> None:
    """The peer's broker is another process: it may have forgotten what it was told last, so that all that it hands out
    is looked at."""
    _update(connection, place, "through = 0, their_broker = ?", broker)


def set_back(connection: sqlite3.Connection, place: PeerPlace, after: int) -> None:
    """The peer's mail is another one behind a sequence: what was there may come again at another place, or not at
    all; and what the peer was told it may have forgotten, too."""
    connection.execute("UPDATE mail SET mark = '' WHERE space = ? AND peer = ? AND seq > ?", (*place, after))
    tell_again(connection, place)


def forget_ends(connection: sqlite3.Connection, place: PeerPlace) -> None:
    """The peer hands out messages whose end it was told. If our own space forgot that too, they come in once more, and
    under another id: the broker may remember what was read and removed since."""
    tell_again(connection, place)
    _update(connection, place, "losses = losses + 1")


def tell_again(connection: sqlite3.Connection, place: PeerPlace) -> None:
    """The peer may not know any more what became of its messages."""
    _update(connection, place, "told_through = 0, told_mark = ''")
    # an id of a message has dashes; the rest cannot be told
    untold = "UPDATE mail SET told = 0 WHERE space = ? AND peer = ? AND outcome = 'refused' AND id LIKE '%-%'"
    connection.execute(untold, place)


def begin_again(connection: sqlite3.Connection, place: PeerPlace, epoch: str) -> None:
    """The mail here is that of another epoch, and may have lost what was let in: everything that the peer still has is
    looked at again."""
    move_told(connection, place, epoch, Stamp(0, ""))
    _update(connection, place, "epoch = '', people = '', through = 0")
    connection.execute("DELETE FROM mail WHERE space = ? AND peer = ? AND outcome <> 'refused'", place)


def let_in(connection: sqlite3.Connection, place: PeerPlace) -> list[MailKey]:
    """Messages that were let in, and that the peer may still have."""
    query = "SELECT sender, id, reader FROM mail WHERE space = ? AND peer = ? AND there = 1 AND outcome <> 'refused'"
    return list(connection.execute(query, place))


def lose(connection: sqlite3.Connection, place: PeerPlace, lost: Sequence[MailKey], broker: str) -> None:
    """What was let in was looked for under this broker, and these are not here: they are fetched again."""
    connection.executemany(f"DELETE FROM mail {_OF_ONE}", [(*place, *key) for key in lost])
    _update(connection, place, "broker = ?", broker)
    if lost:
        _update(connection, place, "through = 0, losses = losses + 1")


def counts(connection: sqlite3.Connection, place: PeerPlace) -> dict[str, int]:
    query = "SELECT outcome, count(*) FROM mail WHERE space = ? AND peer = ? GROUP BY outcome"
    return dict(connection.execute(query, place).fetchall())
