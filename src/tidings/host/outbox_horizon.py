"""A confirmed message until the broker surely has it on disk, as functions of a SQLite connection.

A broker syncs a moment after it acknowledged, and a power cut in between loses its tail. So a confirmed row is done
only when the same run of the broker still answers a horizon later; what another run confirmed is looked for, and owed
again under the same id if it is not there. How it is looked for is not known here.
"""

from __future__ import annotations

import sqlite3

from tidings.host.outbox_views import COLUMNS, STEP, OutboxRow, as_row
from tidings.host.outcomes import Outcome

LOST = Outcome("lost_by_broker", "the broker lost it with its tail; it is sent again", True, "lane")


def meet(connection: sqlite3.Connection, space: str, incarnation: str) -> bool:
    """This run of the space's broker answers now. True if there are rows another run confirmed: verify them."""
    connection.execute(
        """INSERT INTO outbox_space (space, incarnation) VALUES (?, ?)
        ON CONFLICT (space) DO UPDATE SET incarnation = excluded.incarnation""",
        (space, incarnation),
    )
    return bool(to_verify(connection, space, incarnation, limit=1))


def release(
    connection: sqlite3.Connection, space: str, incarnation: str, tick: int, horizon: int, now: int, limit: int = STEP
) -> int:
    """Done with what this run of the broker confirmed a horizon before `tick`, when it was last known to run."""
    done = connection.execute(
        """UPDATE outbox SET state = 'done', ended_at = ? WHERE row IN (
          SELECT row FROM outbox WHERE state = 'confirmed' AND space = ? AND incarnation = ? AND confirmed_tick <= ?
          ORDER BY row LIMIT ?)""",
        (now, space, incarnation, tick - horizon, limit),
    ).rowcount
    if done:
        connection.execute(
            """INSERT INTO outbox_space (space, done) VALUES (?, ?)
            ON CONFLICT (space) DO UPDATE SET done = done + excluded.done""",
            (space, done),
        )
    return done


def to_verify(
    connection: sqlite3.Connection,
    space: str,
    incarnation: str,
    after: int = 0,
    limit: int = STEP,
    sender: str | None = None,
) -> list[OutboxRow]:
    """Rows (of one sender) that another run of this broker confirmed, oldest first: it may have lost them."""
    found = connection.execute(
        f"""SELECT {COLUMNS} FROM outbox WHERE state = 'confirmed' AND space = ? AND incarnation <> ? AND row > ?
        AND sender = coalesce(?, sender) ORDER BY row LIMIT ?""",
        (space, incarnation, after, sender, limit),
    )
    return [as_row(one) for one in found]


def has_confirmed(connection: sqlite3.Connection, space: str, incarnation: str) -> bool:
    """Are there rows that this run of the broker confirmed and that are not done?"""
    query = "SELECT 1 FROM outbox WHERE state = 'confirmed' AND space = ? AND incarnation = ? LIMIT 1"
    return connection.execute(query, (space, incarnation)).fetchone() is not None


def still_there(connection: sqlite3.Connection, row: OutboxRow, incarnation: str, tick: int) -> bool:
    """Verified under a new run: kept again for a whole horizon, because what it read may not be on disk."""
    changed = connection.execute(
        """UPDATE outbox SET incarnation = ?, confirmed_tick = ?
        WHERE row = ? AND state = 'confirmed' AND seq = ? AND incarnation = ?""",
        (incarnation, tick, row.row, row.seq, row.incarnation),
    )
    return changed.rowcount == 1


def lost(connection: sqlite3.Connection, row: OutboxRow, now: int) -> bool:
    """It is not where the earlier run put it: owed again, under the same id."""
    changed = connection.execute(
        """UPDATE outbox SET state = 'pending', seq = NULL, stream = NULL, incarnation = NULL, confirmed_at = NULL,
          confirmed_tick = NULL, cancel_asked = 0, next_attempt_at = ?, code = ?, words = ?
        WHERE row = ? AND state = 'confirmed' AND seq = ? AND incarnation = ?""",
        (now, LOST.code, LOST.words, row.row, row.seq, row.incarnation),
    )
    return changed.rowcount == 1
