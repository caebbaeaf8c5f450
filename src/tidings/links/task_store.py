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

from tidings.links.directory import PeerPlace

#: milliseconds for which the row of a task that has ended is kept: longer than any deadline
KEPT_FOR = 60 * 86_400_000
#: and rows of a peer that have ended, the newest
MOST_ROWS = 20_000
RowState = Literal["open", "refused", "ended"]


class BookedTask(NamedTuple):
    sender: str
    id: str
    #: where it is in the peer's queue
    seq: int
    state: RowState
    #: why it was refused
    why: str = ""
    #: how far it was when the peer was told last, and when; empty: it was not, or is to be told at once
    told: str = ""
    told_at: int = 0
    role: str = ""
    #: where it is in the queue here; 0 if that is not known
    local_seq: int = 0
    #: of its payload, if it was put into the queue here
    size: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.sender, self.id


def find(
    connection: sqlite3.Connection, place: PeerPlace, keys: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], BookedTask]:
    """Those of these tasks that have a row."""
    query = f"SELECT {_COLUMNS} FROM task WHERE space = ? AND peer = ? AND sender = ? AND id = ?"
    rows = (connection.execute(query, (*place, *key)).fetchone() for key in keys)
    found = (BookedTask(*row) for row in rows if row is not None)
    return {each.key: each for each in found}


def take(connection: sqlite3.Connection, place: PeerPlace, tasks: Sequence[BookedTask], now: int) -> None:
    """New rows. One that is there already is to be told again: its asker's space does not know how far it is."""
    connection.executemany(
        """INSERT INTO task (space, peer, sender, id, seq, state, why, role, local_seq, size, at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT (space, peer, sender, id) DO UPDATE SET seq = excluded.seq, told = ''""",
        [(*place, t.sender, t.id, t.seq, t.state, t.why, t.role, t.local_seq, t.size, now) for t in tasks],
    )
    _prune(connection, place, now)


def due(connection: sqlite3.Connection, place: PeerPlace, limit: int) -> list[BookedTask]:
    """What has no end yet or is to be told, the longest untold first."""
    query = f"""SELECT {_COLUMNS} FROM task WHERE space = ? AND peer = ? AND (state = 'open' OR told = '')
      ORDER BY told_at, seq LIMIT ?"""
    return [BookedTask(*row) for row in connection.execute(query, (*place, limit))]


def note_told(connection: sqlite3.Connection, place: PeerPlace, tasks: Iterable[BookedTask], now: int) -> None:
    """These as they are now: their state, and what was told."""
    connection.executemany(
        "UPDATE task SET state = ?, told = ?, told_at = ? WHERE space = ? AND peer = ? AND sender = ? AND id = ?",
        [(each.state, each.told, now, *place, *each.key) for each in tasks],
    )


def drop(connection: sqlite3.Connection, place: PeerPlace, task: BookedTask) -> None:
    """The queue here does not have it any more: it may be handed out and queued again."""
    connection.execute("DELETE FROM task WHERE space = ? AND peer = ? AND sender = ? AND id = ?", (*place, *task.key))


class OpenTasks(NamedTuple):
    """How many are open here, of each asker and for each role; and how many came lately, and their bytes."""

    askers: dict[str, int]
    roles: dict[str, int]
    lately: int
    size: int


def open_of(connection: sqlite3.Connection, place: PeerPlace, since: int) -> OpenTasks:
    """`since`: milliseconds since 1970, from when on what came counts as lately."""
    query = "SELECT {0}, count(*) FROM task WHERE space = ? AND peer = ? AND state = 'open' GROUP BY {0}"
    askers, roles = (dict(connection.execute(query.format(each), place).fetchall()) for each in ("sender", "role"))
    lately = "SELECT count(*), coalesce(sum(size), 0) FROM task WHERE space = ? AND peer = ? AND at >= ?"
    return OpenTasks(askers, roles, *connection.execute(lately, (*place, since)).fetchone())


def counts(connection: sqlite3.Connection, place: PeerPlace) -> dict[str, int]:
    query = "SELECT state, count(*) FROM task WHERE space = ? AND peer = ? GROUP BY state"
    return dict(connection.execute(query, place).fetchall())


def _prune(connection: sqlite3.Connection, place: PeerPlace, now: int) -> None:
    connection.execute(
        "DELETE FROM task WHERE space = ? AND peer = ? AND state <> 'open' AND at < ?", (*place, now - KEPT_FOR)
    )
    connection.execute(
        """DELETE FROM task WHERE space = ? AND peer = ? AND state <> 'open' AND at < (SELECT at FROM task
        WHERE space = ? AND peer = ? AND state <> 'open' ORDER BY at DESC LIMIT 1 OFFSET ?)""",
        (*place, *place, MOST_ROWS),
    )


_COLUMNS = "sender, id, seq, state, why, told, told_at, role, local_seq, size"
