"""Tasks of linked spaces that were queued here, as functions of a connection to the ledger.

A task has one row from when it was queued or refused, for as long as its asker's space may hand it out again. `open` is
one whose end is not told there yet. What was told last is kept, so that a change is seen, and what stays the same is
told again now and then: the other space hands out again what it hears nothing of. Rows are kept for each peer, not for
each agreement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from tidings.link.people import PeerPlace

#: milliseconds for which the row of a task that has ended is kept: longer than any deadline
KEPT_FOR = 60 * 86_400_000
#: and rows of a peer that have ended, the newest
MOST_ROWS = 20_000
TaskState = Literal["open", "refused", "ended"]


class BookedTask(NamedTuple):
    sender: str
    id: str
    #: where it is in the peer's queue
    seq: int
    state: TaskState
    #: why it was refused
    why: str = ""
    #: how far it was when the peer was told last, and when; empty: it was not, or is to be told at once
    told: str = ""
    told_at: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.sender, self.id


def find(connection: sqlite3.Connection, place: PeerPlace, keys: Iterable[tuple[str, str]]) -> dict[str, BookedTask]:
    """Those of these tasks that have a row, by their id."""
    query = f"SELECT {_COLUMNS} FROM task WHERE space = ? AND peer = ? AND sender = ? AND id = ?"
    rows = (connection.execute(query, (*place, *key)).fetchone() for key in keys)
    return {row[1]: BookedTask(*row) for row in rows if row is not None}


def take(connection: sqlite3.Connection, place: PeerPlace, tasks: Sequence[BookedTask], now: int) -> None:
    """New rows. One that is there already is to be told again: its asker's space does not know how far it is."""
    connection.executemany(
        """INSERT INTO task (space, peer, sender, id, seq, state, why, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT (space, peer, sender, id) DO UPDATE SET seq = excluded.seq, told = ''""",
        [(*place, each.sender, each.id, each.seq, each.state, each.why, now) for each in tasks],
    )
    _prune(connection, place, now)


def due(connection: sqlite3.Connection, place: PeerPlace, limit: int) -> list[BookedTask]:
    """What has no end yet or is to be told, the longest untold first."""
    query = f"""SELECT {_COLUMNS} FROM task WHERE space = ? AND peer = ? AND (state = 'open' OR told = '')
      ORDER BY told_at, seq LIMIT ?"""
    return [BookedTask(*row) for row in connection.execute(query, (*place, limit))]


def note_told(connection: sqlite3.Connection, place: PeerPlace, task: BookedTask, now: int) -> None:
    """`task` as it is now: its state, and what was told."""
    connection.execute(
        "UPDATE task SET state = ?, told = ?, told_at = ? WHERE space = ? AND peer = ? AND sender = ? AND id = ?",
        (task.state, task.told, now, *place, *task.key),
    )


def drop(connection: sqlite3.Connection, place: PeerPlace, task: BookedTask) -> None:
    """The queue here does not have it any more: it may be handed out and queued again."""
    connection.execute("DELETE FROM task WHERE space = ? AND peer = ? AND sender = ? AND id = ?", (*place, *task.key))


def open_of(connection: sqlite3.Connection, place: PeerPlace) -> dict[str, int]:
    """How many open tasks each asker has here."""
    query = "SELECT sender, count(*) FROM task WHERE space = ? AND peer = ? AND state = 'open' GROUP BY sender"
    return dict(connection.execute(query, place).fetchall())


def counts(connection: sqlite3.Connection, place: PeerPlace) -> dict[str, int]:
    query = "SELECT state, count(*) FROM task WHERE space = ? AND peer = ? GROUP BY state"
    return dict(connection.execute(query, place).fetchall())


def forget(connection: sqlite3.Connection, place: PeerPlace) -> None:
    """Everything of a peer: the link was removed."""
    connection.execute("DELETE FROM task WHERE space = ? AND peer = ?", place)


def _prune(connection: sqlite3.Connection, place: PeerPlace, now: int) -> None:
    connection.execute(
        "DELETE FROM task WHERE space = ? AND peer = ? AND state <> 'open' AND at < ?", (*place, now - KEPT_FOR)
    )
    connection.execute(
        """DELETE FROM task WHERE space = ? AND peer = ? AND state <> 'open' AND at < (SELECT at FROM task
        WHERE space = ? AND peer = ? AND state <> 'open' ORDER BY at DESC LIMIT 1 OFFSET ?)""",
        (*place, *place, MOST_ROWS),
    )


_COLUMNS = "sender, id, seq, state, why, told, told_at"
