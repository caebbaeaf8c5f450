"""The outbox of one run of the host: each transition as one job of the database's writer.

How a message is accepted and leaves is in `outbox_transitions`; `outbox_views` only reads. What a method returns is on
disk. Rows are given as they were leased or read, so that every change states what it expects: a row that moved on
meanwhile is left alone, and the answer says so.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from tidings.errors import StoreError, WrongState
from tidings.host import outbox_transitions as moves
from tidings.host import outbox_views as views
from tidings.host.outbox_transitions import (
    AT_ONCE,
    CANCELLED,
    TOO_OLD,
    Accepted,
    Confirmation,
    Landed,
    Lane,
    Leased,
    LogPosition,
    NewRow,
    Terms,
    reused,
)
from tidings.host.outbox_views import COLUMNS, STEP, BlockRow, OutboxRow, SpaceRow, as_row
from tidings.host.outcomes import Outcome
from tidings.host.schema import HostStore
from tidings.util.database import Database, Job

LOST = Outcome("lost_by_broker", "the broker lost it with its tail; it is sent again", True, "lane")


# --- a confirmed message until the broker surely has it on disk ---
#
# A broker syncs a moment after it acknowledged, and a power cut in between loses its tail. So a confirmed row is done
# only when the same run of the broker still answers a horizon later; what another run confirmed is looked for, and owed
# again under the same id if it is not there.


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


# --- how a message ends without having left ---
#
# It is cancelled, or waited longer than it may; either can be sent again as a new row, once, and the two know each
# other. Of what did leave the bytes are forgotten after a while: never the id and the fingerprint.


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


__all__ = [
    "Accepted",
    "BlockRow",
    "Lane",
    "Leased",
    "LogPosition",
    "NewRow",
    "OutboxRow",
    "OutboxStore",
    "SpaceRow",
    "Terms",
]

#: rows that are confirmed in one job of the writer
TOGETHER = 128
_Waiting: TypeAlias = asyncio.Future[tuple[Confirmation, Leased | None]]


class OutboxStore(HostStore):
    """`tick` reads milliseconds of a clock that never jumps (`time.monotonic`)."""

    def __init__(self, database: Database, terms: Terms, tick: Callable[[], int]) -> None:
        self.database, self.terms, self.tick = database, terms, tick
        self._write, self._now = database.write, database.now
        #: the reason of each space that is paused, as on disk: nobody else writes it
        self._paused: dict[str, str] = {}
        self._landed: list[tuple[Landed, _Waiting]] = []
        self._confirming: asyncio.Task[None] | None = None

    def now(self) -> int:
        """Milliseconds since 1970, by the clock that ages are measured with."""
        return self._now()

    async def recover(self) -> int:
        """To be called first: how many leases of earlier runs were void."""
        now, tick = self._now(), self.tick()
        void = await self._write(lambda c: moves.recover(c, now, tick, self.terms))
        self._note_pauses(await self.read(views.spaces))
        return void

    async def accept(self, draft: NewRow) -> Accepted:
        now = self._now()
        return await self._write(lambda c: moves.accept(c, draft, now))

    async def take(self, limit: int = AT_ONCE, lane: Lane | None = None) -> list[Leased]:
        """Lease what is due: at most one row of each free lane."""
        now = self._now()
        return await self._write(lambda c: moves.take(c, now, self.terms, limit, lane))

    async def take_and_look(self, limit: int, lane: Lane) -> tuple[list[Leased], bool]:
        """The same, and whether more was due than the limit."""
        now = self._now()
        return await self._write(lambda c: moves.take_and_look(c, now, self.terms, limit, lane))

    async def settle(self, row: OutboxRow, outcome: Outcome) -> str | None:
        now = self._now()
        return await self._write(lambda c: moves.settle(c, row.row, row.attempts, outcome, now, self.terms))

    async def confirmed(self, row: OutboxRow, place: LogPosition) -> Confirmation:
        now, tick = self._now(), self.tick()
        return await self._write(lambda c: moves.confirmed(c, row.row, row.attempts, place, now, tick, self.terms))

    async def confirmed_and_next(
        self, row: OutboxRow, place: LogPosition, *, go_on: bool
    ) -> tuple[Confirmation, Leased | None]:
        """The same, in one job with all that was acknowledged in this turn of the loop.

        With `go_on` the next row of its lane is leased with it.
        """
        waiting: asyncio.Future[tuple[Confirmation, Leased | None]] = asyncio.get_running_loop().create_future()
        self._landed.append((Landed(row, place, go_on), waiting))
        if self._confirming is None:
            self._confirming = asyncio.create_task(self._confirm_landed())
        return await waiting

    async def _confirm_landed(self) -> None:
        """A bounded part at a time, one after the other: while the writer has one, those of the last are sent."""
        try:
            while self._landed:
                landed, self._landed = self._landed[:TOGETHER], self._landed[TOGETHER:]
                await self._confirm_part(landed)
        finally:
            self._confirming = None

    async def _confirm_part(self, landed: list[tuple[Landed, _Waiting]]) -> None:
        said: Sequence[Any] = ()
        try:
            said = await self._confirm_all([each for each, _ in landed])
        except Exception as error:  # noqa: BLE001  it belongs to everybody who waits
            said = [error] * len(landed)
        finally:
            for (_, waiting), answer in zip_longest(landed, said):
                _answer(waiting, answer)

    async def _confirm_all(self, landed: list[Landed]) -> Sequence[tuple[Confirmation, Leased | None] | BaseException]:
        """What was said of each. A row that cannot be confirmed keeps no other from it."""
        now, tick = self._now(), self.tick()

        def job(these: list[Landed]) -> Job[list[tuple[Confirmation, Leased | None]]]:
            return lambda c: moves.confirmed_all(c, these, now, tick, self.terms)

        try:
            return await self._write(job(landed))
        except StoreError:
            raise
        except Exception:  # noqa: BLE001  it is met again by the row it belongs to
            each = await asyncio.gather(*(self._write(job([one])) for one in landed), return_exceptions=True)
            return [answer if isinstance(answer, BaseException) else answer[0] for answer in each]

    async def next_due(self, space: str, since: int) -> int | None:
        """Milliseconds until something that waits there is due; None if nothing waits. `since`: read before `take`."""
        now = self._now()
        return await self.database.read(lambda c: moves.next_due(c, space, since, now, self.terms))

    async def meet(self, space: str, incarnation: str) -> bool:
        """To be called with each connection, before anything is taken. True: verify what earlier runs confirmed."""
        return await self._write(lambda c: meet(c, space, incarnation))

    async def release(self, space: str, incarnation: str, tick: int, horizon: int) -> int:
        """`tick` was read before the broker was asked whether it is still this run."""
        now = self._now()
        return await self._write(lambda c: release(c, space, incarnation, tick, horizon, now))

    async def to_verify(
        self, space: str, incarnation: str, after: int = 0, sender: str | None = None
    ) -> list[OutboxRow]:
        return await self.database.read(lambda c: to_verify(c, space, incarnation, after, sender=sender))

    async def has_confirmed(self, space: str, incarnation: str) -> bool:
        return await self.database.read(lambda c: has_confirmed(c, space, incarnation))

    async def still_there(self, row: OutboxRow, incarnation: str) -> bool:
        tick = self.tick()
        return await self._write(lambda c: still_there(c, row, incarnation, tick))

    async def lost(self, row: OutboxRow) -> bool:
        now = self._now()
        return await self._write(lambda c: lost(c, row, now))

    async def cancel(self, row: int) -> OutboxRow:
        now = self._now()
        return await self._write(lambda c: cancel(c, row, now))

    async def requeue(self, row: int, new_id: str, payload: bytes, signature: str) -> OutboxRow:
        now = self._now()
        return await self._write(lambda c: requeue(c, row, new_id, payload, signature, now))

    async def pause(self, space: str, reason: str) -> None:
        now = self._now()
        await self._write(lambda c: moves.pause(c, space, reason, now))
        self._note_pauses(await self.read(views.spaces))

    async def resume(self, space: str) -> None:
        await self._write(lambda c: moves.resume(c, space))
        self._note_pauses(await self.read(views.spaces))

    def _note_pauses(self, spaces: list[SpaceRow]) -> None:
        self._paused = {each.space: each.pause_reason or "" for each in spaces if each.paused_at is not None}

    def why_paused(self, space: str) -> str | None:
        """The reason if this space is paused: asked for each message that is accepted, so nothing is read."""
        return self._paused.get(space)

    async def block(self, scope: Lane, code: str, words: str, until: int | None = None) -> None:
        now = self._now()
        await self._write(lambda c: moves.block(c, scope, code, words, now, until))

    async def unblock(self, scope: Lane) -> bool:
        return await self._write(lambda c: moves.unblock(c, scope))

    async def expire(self) -> list[OutboxRow]:
        now = self._now()
        return await self._write(lambda c: expire(c, now))

    async def drop_payloads(self, older_than: int) -> int:
        before = self._now() - older_than
        return await self._write(lambda c: drop_payloads(c, before))


def _answer(waiting: asyncio.Future[Any], answer: Any) -> None:
    if waiting.done():  # whoever carried it was stopped
        return
    if answer is None:  # the loop is ending
        waiting.cancel()
    elif isinstance(answer, BaseException):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)
