"""How a message of the outbox ends without having left, as functions of a SQLite connection.

It is cancelled, or waited longer than it may; either can be sent again as a new row, once, and the two know each other.
Of what did leave the bytes are forgotten after a while: never the id and the fingerprint.
"""

from __future__ import annotations

import sqlite3

from tidings.errors import WrongState
from tidings.host import outbox_views as views
from tidings.host.outbox_transitions import CANCELLED, TOO_OLD, reused
from tidings.host.outbox_views import COLUMNS, STEP, OutboxRow, as_row


def cancel(connection: sqlite3.Connection, row: int, now: int) -> OutboxRow:
    """Do not send it. What is in flight is cancelled once its attempt ended without an acknowledgement."""
    code, words = CANCELLED
    connection.execute(
        "UPDATE outbox SET state = 'cancelled', code = ?, words = ?, ended_at = ? WHERE row = ? AND state = 'pending'",
        (code, words, now, row),
    )
    connection.execute("UPDATE outbox SET cancel_asked = 1 WHERE row = ? AND state = 'inflight'", (row,))
    return views.show(connection, row)


_REQUEUE = f"""
INSERT INTO outbox (space, sender, id, fingerprint, kind, destination, subject, priority, payload, signature,
  accepted_at, max_age, state, next_attempt_at, supersedes)
SELECT space, sender, :id, fingerprint, kind, destination, subject, priority, :payload, :signature,
  :now, max_age, 'pending', :now, row
FROM outbox WHERE row = :row AND state IN ('dead', 'cancelled') AND superseded_by IS NULL
RETURNING {COLUMNS}"""


def requeue(
    connection: sqlite3.Connection, row: int, new_id: str, payload: bytes, signature: str, now: int
) -> OutboxRow:
    """A new row to the same destination; `payload` is the same message composed under `new_id`. Once for each row."""
    old = views.show(connection, row)
    if old.superseded_by is not None:
        known = views.show(connection, old.superseded_by)
        if known.id == new_id:
            return known
        raise WrongState(f"message {old.id} was queued again as {known.id} ({known.state}): look at that one")
    if old.state not in ("dead", "cancelled"):
        raise WrongState(f"message {old.id} is {old.state}: only what is dead or cancelled can be queued again")
    if used := views.find(connection, old.space, old.sender, new_id):
        raise reused(used)
    asked = {"row": row, "id": new_id, "payload": payload, "signature": signature, "now": now}
    successor = as_row(connection.execute(_REQUEUE, asked).fetchone())
    connection.execute("UPDATE outbox SET superseded_by = ? WHERE row = ?", (successor.row, row))
    return successor


def expire(connection: sqlite3.Connection, now: int, limit: int = STEP) -> list[OutboxRow]:
    """Rows that waited longer than they may are dead. What is in flight is left to its attempt."""
    code, words = TOO_OLD
    ended = connection.execute(
        f"""UPDATE outbox SET state = 'dead', ended_at = :now, code = :code,
          words = :words || CASE WHEN code IS NULL THEN '' ELSE '; last: ' || code || ': ' || words END
        WHERE row IN (SELECT row FROM outbox WHERE state IN ('pending', 'inflight') AND state = 'pending'
          AND accepted_at + max_age <= :now LIMIT :limit) RETURNING {COLUMNS}""",
        {"now": now, "code": code, "words": words, "limit": limit},
    )
    return sorted(as_row(one) for one in ended.fetchall())


def drop_payloads(connection: sqlite3.Connection, before: int, limit: int = STEP) -> int:
    """Forget the bytes of rows done before a moment. Their ids and fingerprints are never forgotten."""
    return connection.execute(
        """UPDATE outbox SET payload = NULL, signature = NULL WHERE row IN (
          SELECT row FROM outbox WHERE state = 'done' AND payload IS NOT NULL AND ended_at < ? LIMIT ?)""",
        (before, limit),
    ).rowcount
