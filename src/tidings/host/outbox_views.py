"""Looking at the outbox: one row, many in pages, how many in which state, the chain of what replaced what.

Functions of a SQLite connection that only read. A row as shown here has everything but its payload. `outbox_entry`
makes the answer of a row, for the host and for files that are read without one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict

from tidings.client.message_json import moment
from tidings.contract.host import OutboxDetails, OutboxEntry
from tidings.errors import UnknownMessage
from tidings.wire.states import ReceiptStage


class OutboxRow(NamedTuple):
    """A message this host owes, or owed; see `host/schema.py` for each column."""

    row: int
    space: str
    sender: str
    id: str
    fingerprint: bytes
    kind: str
    destination: str
    subject: str
    priority: str
    accepted_at: int
    max_age: int
    state: str
    attempts: int = 0
    next_attempt_at: int = 0
    lease_owner: str | None = None
    lease_until: int | None = None
    cancel_asked: int = 0
    doubt: int = 0
    seq: int | None = None
    stream: str | None = None
    incarnation: str | None = None
    confirmed_at: int | None = None
    confirmed_tick: int | None = None
    late_seq: int | None = None
    late_incarnation: str | None = None
    code: str | None = None
    words: str | None = None
    ended_at: int | None = None
    supersedes: int | None = None
    superseded_by: int | None = None


class BlockRow(NamedTuple):
    """What makes lanes wait. Empty strings mean every one."""

    space: str
    sender: str
    kind: str
    destination: str
    code: str
    words: str
    since: int
    until: int | None
    failures: int


class SpaceRow(NamedTuple):
    space: str
    incarnation: str | None
    paused_at: int | None
    pause_reason: str | None


COLUMNS = ", ".join(OutboxRow._fields)
CHAIN_SHOWN = 1_000
#: rows that one job changes at most, so that no caller waits long for the writer
STEP = 500


def as_row(found: Iterable[Any]) -> OutboxRow:
    return OutboxRow._make(found)


def find(connection: sqlite3.Connection, space: str, sender: str, message_id: str) -> OutboxRow | None:
    found = connection.execute(
        f"SELECT {COLUMNS} FROM outbox WHERE space = ? AND sender = ? AND id = ?", (space, sender, message_id)
    ).fetchone()
    return None if found is None else as_row(found)


def ending(connection: sqlite3.Connection, space: str, sender: str, end: str, limit: int = 8) -> list[str]:
    """Ids of what one agent handed over, by how they end."""
    query = "SELECT id FROM outbox WHERE space = ? AND sender = ? AND substr(id, ?) = ? LIMIT ?"
    return [found for (found,) in connection.execute(query, (space, sender, -len(end), end, limit))]


def show(connection: sqlite3.Connection, row: int) -> OutboxRow:
    found = connection.execute(f"SELECT {COLUMNS} FROM outbox WHERE row = ?", (row,)).fetchone()
    if found is None:
        raise UnknownMessage(f"the outbox has no row {row}: `tidings outbox list` shows what it has")
    return as_row(found)


def payload(connection: sqlite3.Connection, row: int) -> tuple[bytes, str] | None:
    """The bytes and the signature of a row; None once they were dropped."""
    found = connection.execute("SELECT payload, signature FROM outbox WHERE row = ?", (row,)).fetchone()
    return None if found is None or found[0] is None else (found[0], found[1])


def listed(
    connection: sqlite3.Connection,
    space: str | None = None,
    sender: str | None = None,
    states: Sequence[str] = (),
    after: int = 0,
    limit: int = 100,
) -> list[OutboxRow]:
    """A page in row order, beginning behind row `after`."""
    where: list[str] = ["row > ?"]
    asked: list[Any] = [after]
    for column, value in (("space", space), ("sender", sender)):
        if value is not None:
            where.append(f"{column} = ?")
            asked.append(value)
    if states:
        where.append(f"state IN ({', '.join('?' * len(states))})")
        asked.extend(states)
    query = f"SELECT {COLUMNS} FROM outbox WHERE {' AND '.join(where)} ORDER BY row LIMIT ?"
    return [as_row(one) for one in connection.execute(query, (*asked, limit))]


def newest(
    connection: sqlite3.Connection, space: str, sender: str, states: Sequence[str], before: int, limit: int
) -> list[OutboxRow]:
    """What one agent handed over, newest first, beginning below row `before`."""
    among = f"AND state IN ({', '.join('?' * len(states))})" if states else ""
    query = f"SELECT {COLUMNS} FROM outbox WHERE space = ? AND sender = ? AND row < ? {among} ORDER BY row DESC LIMIT ?"
    return [as_row(one) for one in connection.execute(query, (space, sender, before, *states, limit))]


# Each of these reads a small index. What is done grows for ever, and was counted when it was done.
_COUNTS = """
SELECT space, 'owed', count(*) FROM outbox WHERE state IN ('pending', 'inflight') GROUP BY space
UNION ALL SELECT space, 'inflight', count(*) FROM outbox WHERE state = 'inflight' GROUP BY space
UNION ALL SELECT space, 'confirmed', count(*) FROM outbox WHERE state = 'confirmed' GROUP BY space
UNION ALL SELECT space, state, count(*) FROM outbox WHERE state IN ('dead', 'cancelled') GROUP BY space, state
UNION ALL SELECT space, 'done', done FROM outbox_space WHERE done > 0"""


def counts(connection: sqlite3.Connection) -> dict[tuple[str, str], int]:
    """How many rows by (space, state); a state without rows is not in it."""
    found = {(space, state): number for space, state, number in connection.execute(_COUNTS)}
    for space in [space for space, state in found if state == "owed"]:
        pending = found.pop((space, "owed")) - found.get((space, "inflight"), 0)
        if pending:
            found[space, "pending"] = pending
    return found


def chain(connection: sqlite3.Connection, row: int) -> list[OutboxRow]:
    """What this row replaced and what replaced it, oldest first, itself included."""
    first = show(connection, row)
    walked = [first]
    while (earlier := walked[0].supersedes) is not None and len(walked) < CHAIN_SHOWN:
        walked.insert(0, show(connection, earlier))
    while (later := walked[-1].superseded_by) is not None and len(walked) < 2 * CHAIN_SHOWN:
        walked.append(show(connection, later))
    return walked


def ahead_of(connection: sqlite3.Connection, row: OutboxRow) -> str | None:
    """The id of the oldest row of the same lane that has not left, if that is another one."""
    found = connection.execute(
        """SELECT id FROM outbox WHERE space = ? AND sender = ? AND kind = ? AND destination = ? AND row < ?
        AND state IN ('pending', 'inflight') ORDER BY row LIMIT 1""",
        (row.space, row.sender, row.kind, row.destination, row.row),
    ).fetchone()
    return None if found is None else str(found[0])


def named(connection: sqlite3.Connection, row: OutboxRow) -> str:
    """The name of whom a direct message is for, as last seen."""
    query = "SELECT name FROM directory WHERE space = ? AND agent = ?"
    found = connection.execute(query, (row.space, row.destination)).fetchone()
    return "" if found is None else str(found[0])


def blocks(connection: sqlite3.Connection) -> list[BlockRow]:
    return [BlockRow._make(one) for one in connection.execute("SELECT * FROM outbox_block")]


def spaces(connection: sqlite3.Connection) -> list[SpaceRow]:
    columns = ", ".join(SpaceRow._fields)
    return [SpaceRow._make(one) for one in connection.execute(f"SELECT {columns} FROM outbox_space")]


# --- answers ---


def outbox_entry(row: OutboxRow, to_name: str | None = None) -> OutboxEntry:
    """Returns a row as the host shows it, without its content."""
    return OutboxEntry(
        row=row.row,
        id=row.id,
        kind=row.kind,
        to=row.destination,
        state=row.state,
        stage=ReceiptStage.CONFIRMED.value if row.seq is not None else "stored",
        seq=row.seq,
        attempts=row.attempts,
        accepted=moment(row.accepted_at),
        gives_up=moment(row.accepted_at + row.max_age),
        ended=moment(row.ended_at),
        code=row.code,
        words=row.words,
        cancel_asked=bool(row.cancel_asked),
        late_seq=row.late_seq,
        supersedes=row.supersedes,
        superseded_by=row.superseded_by,
        to_name=to_name,
    )


def outbox_details(row: OutboxRow, to_name: str | None, chain: Iterable[OutboxRow], waits: list[str]) -> OutboxDetails:
    """Returns the same with the rows of its chain, as far as they are of the same agent."""
    entries = [outbox_entry(each) for each in chain if (each.space, each.sender) == (row.space, row.sender)]
    return OutboxDetails(**asdict(outbox_entry(row, to_name)), chain=entries, waits=waits)


def paused_reason(space: str, reason: str | None) -> str:
    """Returns why nothing leaves for a space that its user paused, and what ends that."""
    return f"{space} is held back here{f' ({reason})' if reason else ''}: `tidings outbox resume`"
