"""How a message that this host owes a broker is accepted and leaves, as functions of a SQLite connection.

    accept -> pending -> inflight -> confirmed -> done        (the broker has it, and has it on disk)
                 |  ^        |  |        |
                 |  +--------+  |        +-> pending          (the broker lost it: the same bytes again)
                 +--------------+-> dead | cancelled          (a reason by name; requeue makes a new row)

A row in flight is leased: owner, attempt and expiry. Whoever settles states all of it, so a late or foreign answer
changes nothing; that a message arrived after all is noted beside the state. A lane is (space, sender, kind,
destination): its oldest owed row goes first and alone. How it is kept until the broker has it on disk, and how it ends
without having left, is in `outbox.py`, whose `OutboxStore` runs all of them in the writer. Reading is in
`outbox_views`. What is sent, and how, is not known here.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from tidings.errors import IdReused
from tidings.host import outbox_views as views
from tidings.host.fingerprint import Kind
from tidings.host.outbox_views import OutboxRow, as_row
from tidings.host.outcomes import Outcome
from tidings.util.backoff import Backoff

#: how long a publish may take before somebody else may try it
LEASE = 60_000
MAX_AGE = 7 * 24 * 3_600_000
AT_ONCE = 64

CANCELLED = ("cancelled", "cancelled before it was sent")
TOO_OLD = ("too_old", "not sent within its longest age")


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message ready to go: resolved, sealed and signed. The times are of the clock that `accept` is given.

    Its fields are columns of the outbox."""

    space: str
    sender: str
    id: str
    fingerprint: bytes
    kind: Kind
    destination: str
    subject: str
    payload: bytes
    signature: str
    priority: str = "next"
    max_age: int = MAX_AGE


class Accepted(NamedTuple):
    row: OutboxRow
    #: False if it was accepted before; `row` says what became of it
    new: bool


class Leased(NamedTuple):
    row: OutboxRow
    payload: bytes
    signature: str


class Lane(NamedTuple):
    """What waits together. Empty strings mean every one: `Lane("main")` is a whole space."""

    space: str
    sender: str = ""
    kind: str = ""
    destination: str = ""


class LogPosition(NamedTuple):
    """Where the broker put it, and which run of the broker said so."""

    seq: int
    stream: str
    incarnation: str


@dataclass(frozen=True)
class Terms:
    """Who leases, for how long, and how long to wait after a failure."""

    owner: str
    lease: int = LEASE
    #: in milliseconds
    backoff: Backoff = field(default_factory=lambda: Backoff(500, 60_000))
    luck: Callable[[], float] = random.random


# ------------------------------------------------------------------------------------------------------- accepting

_ACCEPT = f"""
INSERT INTO outbox ({", ".join(NewRow.__struct_fields__)}, accepted_at, state, next_attempt_at)
VALUES ({"?, " * len(NewRow.__struct_fields__)}?, 'pending', ?)
ON CONFLICT (space, sender, id) DO NOTHING"""


def accept(connection: sqlite3.Connection, new: NewRow, now: int) -> Accepted:
    """Keep it, or answer as before if it is kept. IdReused if the id was accepted for something else."""
    made = connection.execute(_ACCEPT, (*msgspec.structs.astuple(new), now, now))
    if made.rowcount:
        assert made.lastrowid is not None
        return Accepted(_pending(made.lastrowid, new, now), new=True)
    known = views.find(connection, new.space, new.sender, new.id)
    assert known is not None, "an id is never freed"
    if known.fingerprint != new.fingerprint:
        raise reused(known)
    return Accepted(known, new=False)


def _pending(row: int, new: NewRow, now: int) -> OutboxRow:
    """The row as it was just written: reading its thirty columns back would cost half as much as writing it."""
    return OutboxRow(
        row,
        new.space,
        new.sender,
        new.id,
        new.fingerprint,
        new.kind,
        new.destination,
        new.subject,
        new.priority,
        now,
        new.max_age,
        "pending",
        next_attempt_at=now,
    )


def reused(known: OutboxRow) -> IdReused:
    return IdReused(
        f"id {known.id} was accepted before for another message ({known.kind} to {known.destination}, {known.state}): "
        "send this one under an id of its own; nothing was changed"
    )


# --------------------------------------------------------------------------------------------------------- leasing

_NEXT = """
SELECT n.row FROM outbox n WHERE n.state IN ('pending', 'inflight') AND {0}
ORDER BY n.space, n.sender, n.kind, n.destination, n.row LIMIT 1"""
# The heads of all lanes, a few index lookups a lane however long each is. SQLite seeks by the first column only when
# all four are compared as one value, so each column has its own step.
_HEADS = f"""
WITH RECURSIVE head (row) AS (
  SELECT * FROM ({_NEXT.format("n.space > ''")})
  UNION ALL
  SELECT coalesce(
    ({_NEXT.format("n.space = c.space AND n.sender = c.sender AND n.kind = c.kind AND n.destination > c.destination")}),
    ({_NEXT.format("n.space = c.space AND n.sender = c.sender AND n.kind > c.kind")}),
    ({_NEXT.format("n.space = c.space AND n.sender > c.sender")}),
    ({_NEXT.format("n.space > c.space")}))
  FROM head JOIN outbox c ON c.row = head.row)
"""
# The same of one space.
_HEADS_OF_SPACE = f"""
WITH RECURSIVE head (row) AS (
  SELECT * FROM ({_NEXT.format("n.space = :space")})
  UNION ALL
  SELECT coalesce(
    ({_NEXT.format("n.space = c.space AND n.sender = c.sender AND n.kind = c.kind AND n.destination > c.destination")}),
    ({_NEXT.format("n.space = c.space AND n.sender = c.sender AND n.kind > c.kind")}),
    ({_NEXT.format("n.space = c.space AND n.sender > c.sender")}))
  FROM head JOIN outbox c ON c.row = head.row)
"""
_HEAD_OF = """
WITH head (row) AS (
  SELECT min(row) FROM outbox WHERE state IN ('pending', 'inflight')
    AND space = :space AND sender = :sender AND kind = :kind AND destination = :destination)
"""
# The heads of the lanes of some rows, a lane for each of them.
_HEADS_AFTER = """
WITH head (row) AS (
  SELECT (SELECT min(n.row) FROM outbox n WHERE n.state IN ('pending', 'inflight')
    AND n.space = was.space AND n.sender = was.sender AND n.kind = was.kind AND n.destination = was.destination)
  FROM json_each(:after) CROSS JOIN outbox was ON was.row = value)
"""
# Less and greater are two lookups; "not equal" would read everything the lane has confirmed, for each of its rows.
_OF_ANOTHER_RUN = """
    SELECT 1 FROM outbox_space s JOIN outbox c ON c.state = 'confirmed' AND c.space = s.space AND c.sender = o.sender
      AND c.kind = o.kind AND c.destination = o.destination AND c.incarnation {0} s.incarnation
    WHERE s.space = o.space"""
_DUE = f"""
SELECT o.row FROM head JOIN outbox o ON o.row = head.row
WHERE o.state = 'pending'
  AND (o.next_attempt_at <= :now OR o.next_attempt_at > :far)
  AND NOT EXISTS (  -- a later one, if the broker lost this one meanwhile
    SELECT 1 FROM outbox f WHERE f.state = 'inflight' AND f.space = o.space AND f.sender = o.sender
      AND f.kind = o.kind AND f.destination = o.destination)
  AND NOT EXISTS (SELECT 1 FROM outbox_space s WHERE s.space = o.space AND s.paused_at IS NOT NULL)
  AND NOT EXISTS (
    SELECT 1 FROM outbox_block b WHERE b.space = o.space
      AND (b.sender = '' OR (b.sender = o.sender
        AND (b.kind = '' OR (b.kind = o.kind AND b.destination = o.destination))))
      AND (b.until IS NULL OR (b.until > :now AND b.until <= :far)))
  AND NOT EXISTS ({_OF_ANOTHER_RUN.format("<")})
  AND NOT EXISTS ({_OF_ANOTHER_RUN.format(">")})
ORDER BY o.row LIMIT :limit"""
_LEASE = """
UPDATE outbox SET state = 'inflight', attempts = attempts + 1, lease_owner = ?, lease_until = ?
WHERE row IN (SELECT value FROM json_each(?)) AND state = 'pending'"""
_WILL_BE = {"state": "'inflight'", "attempts": "attempts + 1", "lease_owner": "?", "lease_until": "?"}
# The row as `_LEASE` leaves it. RETURNING would copy it, with its payload, through a table of its own.
_LEASABLE = f"""
SELECT {", ".join(_WILL_BE.get(name, name) for name in OutboxRow._fields)}, payload, signature
FROM outbox WHERE row IN (SELECT value FROM json_each(?)) AND state = 'pending' ORDER BY row"""


def due(
    connection: sqlite3.Connection, now: int, terms: Terms, limit: int = AT_ONCE, lane: Lane | None = None
) -> list[int]:
    """At most one row of each free lane, oldest first; none of a lane whose confirmed rows must be verified first.

    `lane`: of this one only, or of all lanes of a space.
    """
    asked = {"now": now, "far": now + terms.backoff.bound, "limit": limit}
    heads = _HEADS if lane is None else _HEAD_OF if lane.destination else _HEADS_OF_SPACE
    return [row for (row,) in connection.execute(heads + _DUE, asked if lane is None else asked | lane._asdict())]


def _due_after(connection: sqlite3.Connection, rows: list[int], now: int, terms: Terms) -> list[int]:
    """What is due in the lanes of these rows, each of another lane."""
    if not rows:
        return []
    asked = {"now": now, "far": now + terms.backoff.bound, "limit": len(rows), "after": json.dumps(rows)}
    return [row for (row,) in connection.execute(_HEADS_AFTER + _DUE, asked)]


def lease(connection: sqlite3.Connection, rows: list[int], now: int, terms: Terms) -> list[Leased]:
    """Take those of these rows that are pending: two statements, however many there are."""
    if not rows:
        return []
    asked = (terms.owner, now + terms.lease, json.dumps(rows))
    found = connection.execute(_LEASABLE, asked).fetchall()
    changed = connection.execute(_LEASE, asked).rowcount
    assert changed == len(found), "nobody else writes between the two"
    return [Leased(as_row(one[:-2]), one[-2], one[-1]) for one in found]


def take(
    connection: sqlite3.Connection, now: int, terms: Terms, limit: int = AT_ONCE, lane: Lane | None = None
) -> list[Leased]:
    """Lease what is due."""
    return take_and_look(connection, now, terms, limit, lane)[0]


def take_and_look(
    connection: sqlite3.Connection, now: int, terms: Terms, limit: int = AT_ONCE, lane: Lane | None = None
) -> tuple[list[Leased], bool]:
    """Lease what is due. True with it if more was due than the limit."""
    expire_leases(connection, now, terms)
    found = due(connection, now, terms, limit + 1, lane)
    return lease(connection, found[:limit], now, terms), len(found) > limit


def next_due(connection: sqlite3.Connection, space: str, since: int, now: int, terms: Terms) -> int | None:
    """Milliseconds until the next head of a lane, or the next block, has waited long enough; None if none waits.

    `since`: when it was last looked for what is due. What came due after that counts, as 0, or nobody would look again.
    """
    asked = {"space": space, "since": since, "far": now + terms.backoff.bound}
    (head,) = connection.execute(
        f"""{_HEADS_OF_SPACE} SELECT min(o.next_attempt_at) FROM head JOIN outbox o ON o.row = head.row
        WHERE o.state = 'pending' AND o.next_attempt_at > :since AND o.next_attempt_at <= :far""",
        asked,
    ).fetchone()
    (block,) = connection.execute(
        "SELECT min(until) FROM outbox_block WHERE space = :space AND until > :since AND until <= :far", asked
    ).fetchone()
    return min((max(0, moment - now) for moment in (head, block) if moment is not None), default=None)


_VOID = "(lease_owner <> :owner OR lease_until <= :now OR lease_until > :far)"


def expire_leases(connection: sqlite3.Connection, now: int, terms: Terms) -> int:
    """Give back what another run, an expired lease, or one from before the clock went back holds. How many.

    Nobody knows whether those attempts arrived. What was to be cancelled is cancelled now.
    """
    asked = {"owner": terms.owner, "now": now, "far": now + terms.lease}
    code, words = CANCELLED
    ended = connection.execute(
        f"""UPDATE outbox SET state = 'cancelled', lease_owner = NULL, lease_until = NULL, doubt = 1, code = :code,
          words = :words, ended_at = :now WHERE state = 'inflight' AND cancel_asked = 1 AND {_VOID}""",
        asked | {"code": code, "words": words},
    ).rowcount
    given_back = connection.execute(
        f"""UPDATE outbox SET state = 'pending', lease_owner = NULL, lease_until = NULL, doubt = 1,
          next_attempt_at = :now WHERE state = 'inflight' AND cancel_asked = 0 AND {_VOID}""",
        asked,
    ).rowcount
    return ended + given_back


def recover(connection: sqlite3.Connection, now: int, tick: int, terms: Terms) -> int:
    """What a run does first: leases of earlier runs are void, and ticks of an earlier boot mean nothing."""
    connection.execute(
        "UPDATE outbox SET confirmed_tick = ? WHERE state = 'confirmed' AND confirmed_tick > ?", (tick,) * 2
    )
    return expire_leases(connection, now, terms)


# -------------------------------------------------------------------------------------------------------- settling

#: `late`: it had ended otherwise, and that it arrived is noted; `ignored`: of an attempt that is over
Confirmation = Literal["confirmed", "late", "ignored"]
_HELD = "row = ? AND state = 'inflight' AND lease_owner = ? AND attempts = ?"


def settle(
    connection: sqlite3.Connection, row: int, attempt: int, outcome: Outcome, now: int, terms: Terms
) -> str | None:
    """The state after an attempt that was not acknowledged; None if this attempt is not the one in flight."""
    held = (row, terms.owner, attempt)
    found = connection.execute(f"SELECT cancel_asked, space, sender FROM outbox WHERE {_HELD}", held).fetchone()
    if found is None:
        return None
    cancel_asked, space, sender = found
    waits = now
    if outcome.blocks == "lane":
        waits += round(terms.backoff.delay(attempt, terms.luck()))
    elif outcome.blocks != "row":
        _block_again(connection, Lane(space, sender if outcome.blocks == "sender" else ""), outcome, now, terms)
    state = "cancelled" if cancel_asked else "pending" if outcome.retryable else "dead"
    code, words = CANCELLED if cancel_asked else (outcome.code, outcome.words)
    changed = connection.execute(
        f"""UPDATE outbox SET state = ?, lease_owner = NULL, lease_until = NULL, next_attempt_at = ?,
          doubt = max(doubt, ?), code = ?, words = ?, ended_at = ? WHERE {_HELD}""",
        (state, waits, int(outcome.maybe_stored), code, words, None if state == "pending" else now, *held),
    ).rowcount
    assert changed == 1
    return state


def _block_again(connection: sqlite3.Connection, scope: Lane, outcome: Outcome, now: int, terms: Terms) -> None:
    """Wait longer with each failure in a row; the many lanes that fail together count once."""
    known = connection.execute(
        "SELECT failures, until FROM outbox_block WHERE space = ? AND sender = ? AND kind = '' AND destination = ''",
        scope[:2],
    ).fetchone()
    failures, until = known or (0, now)
    if until is None or now < until <= now + terms.backoff.bound:
        return
    pause = round(terms.backoff.delay(failures + 1, terms.luck()))
    block(connection, scope, outcome.code, outcome.words, now, now + pause, failures + 1)


def confirmed(
    connection: sqlite3.Connection, row: int, attempt: int, place: LogPosition, now: int, tick: int, terms: Terms
) -> Confirmation:
    """The broker acknowledged it. Of a row that ended meanwhile only that is noted."""
    held = (row, terms.owner, attempt)
    changed = connection.execute(
        f"""UPDATE outbox SET state = 'confirmed', lease_owner = NULL, lease_until = NULL, seq = ?, stream = ?,
          incarnation = ?, confirmed_at = ?, confirmed_tick = ?, code = NULL, words = NULL WHERE {_HELD}""",
        (*place, now, tick, *held),
    ).rowcount
    if changed:
        _lift_passing_blocks(connection, row)
        return "confirmed"
    noted = connection.execute(
        """UPDATE outbox SET late_seq = ?, late_incarnation = ?
        WHERE row = ? AND state IN ('dead', 'cancelled') AND late_seq IS NULL""",
        (place.seq, place.incarnation, row),
    ).rowcount
    return "late" if noted else "ignored"


class Landed(NamedTuple):
    """What the broker acknowledged. `go_on`: lease the next of its lane with it."""

    row: OutboxRow
    place: LogPosition
    go_on: bool


# One statement for all: SQLite works on it without the interpreter, which has the next ones to send meanwhile.
_CONFIRM_ALL = """
UPDATE outbox SET state = 'confirmed', lease_owner = NULL, lease_until = NULL, seq = l.seq, stream = l.stream,
  incarnation = l.incarnation, confirmed_at = :now, confirmed_tick = :tick, code = NULL, words = NULL
FROM (SELECT json_extract(value, '$[0]') AS number, json_extract(value, '$[1]') AS attempt,
    json_extract(value, '$[2]') AS seq, json_extract(value, '$[3]') AS stream,
    json_extract(value, '$[4]') AS incarnation FROM json_each(:landed)) AS l
WHERE row = l.number AND state = 'inflight' AND lease_owner = :owner AND attempts = l.attempt RETURNING row, attempts"""


def confirmed_all(
    connection: sqlite3.Connection, landed: Sequence[Landed], now: int, tick: int, terms: Terms
) -> list[tuple[Confirmation, Leased | None]]:
    """`confirmed` for each of several rows, and the next of its lane if it is due."""
    stated = json.dumps([(each.row.row, each.row.attempts, *each.place) for each in landed])
    asked = {"now": now, "tick": tick, "owner": terms.owner, "landed": stated}
    done = set(connection.execute(_CONFIRM_ALL, asked).fetchall())
    for row, _ in done if _has_passing_blocks(connection) else ():
        _lift_passing_blocks(connection, row)
    said: list[Confirmation] = [
        "confirmed"
        if (row.row, row.attempts) in done
        else confirmed(connection, row.row, row.attempts, place, now, tick, terms)
        for row, place, _ in landed
    ]
    after = {_lane_of(each.row): each.row.row for each in landed if each.go_on}
    following = _due_after(connection, list(after.values()), now, terms)
    leased = {_lane_of(each.row): each for each in lease(connection, following, now, terms)}
    return [
        (word, leased.pop(_lane_of(each.row), None) if each.go_on else None)
        for word, each in zip(said, landed, strict=True)
    ]


def _lane_of(row: OutboxRow) -> Lane:
    return Lane(row.space, row.sender, row.kind, row.destination)


def _has_passing_blocks(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM outbox_block WHERE until IS NOT NULL LIMIT 1").fetchone() is not None


def _lift_passing_blocks(connection: sqlite3.Connection, row: int) -> None:
    """It works again: what waited because of failures goes on. A block without an end is somebody's decision."""
    connection.execute(
        """DELETE FROM outbox_block AS b WHERE b.until IS NOT NULL AND b.kind = '' AND EXISTS (
          SELECT 1 FROM outbox o WHERE o.row = ? AND b.space = o.space AND b.sender IN ('', o.sender))""",
        (row,),
    )


# ------------------------------------------------------------------------------------------- what makes lanes wait


def pause(connection: sqlite3.Connection, space: str, reason: str, now: int) -> None:
    """Nothing of this space is sent until `resume`. What is in flight ends; rows grow old meanwhile."""
    connection.execute(
        """INSERT INTO outbox_space (space, paused_at, pause_reason) VALUES (?, ?, ?)
        ON CONFLICT (space) DO UPDATE SET paused_at = excluded.paused_at, pause_reason = excluded.pause_reason
        WHERE paused_at IS NULL""",
        (space, now, reason),
    )


def resume(connection: sqlite3.Connection, space: str) -> None:
    connection.execute("UPDATE outbox_space SET paused_at = NULL, pause_reason = NULL WHERE space = ?", (space,))


def block(
    connection: sqlite3.Connection,
    scope: Lane,
    code: str,
    words: str,
    now: int,
    until: int | None = None,
    failures: int = 1,
) -> None:
    """Make a lane, all lanes of a sender, or of a space wait until a moment, or (None) until `unblock`."""
    connection.execute(
        "INSERT OR REPLACE INTO outbox_block VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*scope, code, words, now, until, failures),
    )


def unblock(connection: sqlite3.Connection, scope: Lane) -> bool:
    """Lift exactly this block. True if there was one."""
    lifted = connection.execute(
        "DELETE FROM outbox_block WHERE space = ? AND sender = ? AND kind = ? AND destination = ?", scope
    )
    return lifted.rowcount == 1
