"""Whether a row of the outbox went another way before: its program was not answered, and sent it itself under its id.

The broker knows an id for ten minutes, and a row that waited longer would be stored a second time. Programs choose
their ids before they ask, so any old row may be one of these. One look through a lane serves all that waits in it: what
is stored after the look, the broker still knows while the look counts. Rows whose own attempt had no answer are not
judged here: they are looked for one by one.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from tidings.client.publishing import Kind
from tidings.errors import NotLookedFor, UnreachableError
from tidings.host.outbox import Lane, OutboxRow, OutboxStore
from tidings.host.outbox_views import COLUMNS, as_row
from tidings.wire.ids import id_time_ms

#: the broker knows a message id for ten minutes; what is younger than this is within that
WINDOW_MS = 8 * 60_000
#: rows that one look is for
AT_ONCE = 1_000
#: together with the publish that follows, well before the lease of a minute ends
TURN_WITHIN, LOOK_WITHIN = 10.0, 20.0
#: a clock that is behind by no more than this was not put back
CLOCK_SLACK_MS = 30_000


class Looker(Protocol):
    async def which_stored(self, kind: Kind, destination: str, ids: list[str], since: float) -> set[str]: ...


def first_tried(row: OutboxRow) -> int:
    """Milliseconds since 1970 before which nobody can have sent it: its program makes an id, then sends."""
    return min(row.accepted_at, id_time_ms(row.id) or row.accepted_at)


@dataclass(frozen=True, slots=True)
class _Look:
    """When it was, by both clocks, for which rows of its lane, and which of them may have been in the log then."""

    now: int
    tick: int
    asked: frozenset[str]
    found: frozenset[str]


class DuplicateCheck:
    """The looks that the drain of one space took."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        #: oldest first
        self._looks: dict[Lane, _Look] = {}
        #: the steward searches for one caller at a time, and refuses those who wait in numbers
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        #: where the clock would be if nobody had put it back, at that tick
        self._straight, self._tick = store.now(), store.tick()
        #: where the clock was when it was put back: how old a row from before that is, it does not say
        self._put_back_at = -1

    def broker_knows(self, row: OutboxRow) -> bool:
        """Would the broker itself notice that this is there already? Of no row that may be older than it seems."""
        now, first = self._now(), first_tried(row)
        return first > self._put_back_at and 0 <= now - first < WINDOW_MS

    def _now(self) -> int:
        now, tick = self._store.now(), self._store.tick()
        self._straight, self._tick = max(now, self._straight + tick - self._tick), tick
        if self._straight - now > CLOCK_SLACK_MS:
            self._put_back_at, self._straight = max(self._put_back_at, self._straight), now
        return now

    async def may_be_stored(self, looker: Looker, row: OutboxRow) -> bool:
        """May it be in the log although it was never tried from here? False: it may be published."""
        if self.broker_knows(row):
            return False
        look = self._look_for(row)
        return row.id in (look or await self._looked_in_turn(looker, row)).found

    def _look_for(self, row: OutboxRow) -> _Look | None:
        look = self._looks.get(_lane_of(row))
        return look if look is not None and row.id in look.asked and self._counts(look) else None

    def _counts(self, look: _Look) -> bool:
        ages = (self._store.now() - look.now, self._store.tick() - look.tick)
        return all(0 <= age < WINDOW_MS for age in ages)

    async def _looked_in_turn(self, looker: Looker, row: OutboxRow) -> _Look:
        """NotLookedFor if it cannot be done now: nothing was sent, so the row is as it was."""
        turn = self._turns[row.sender]
        try:
            async with asyncio.timeout(TURN_WITHIN):
                await turn.acquire()
        except TimeoutError as error:
            raise NotLookedFor("whether it arrived before was not asked yet: other looks of its agent go on") from error
        try:
            async with asyncio.timeout(LOOK_WITHIN):
                look = await self._looked(looker, row)
        except TimeoutError as error:
            raise NotLookedFor(f"the steward did not say within {LOOK_WITHIN:.0f} s what is stored") from error
        except UnreachableError as error:
            raise NotLookedFor(f"whether it arrived before cannot be found out yet: {error}") from error
        finally:
            turn.release()
        self._forget_old_looks()
        self._looks.pop(_lane_of(row), None)
        self._looks[_lane_of(row)] = look
        return look

    async def _looked(self, looker: Looker, row: OutboxRow) -> _Look:
        """For this row and those that wait behind it."""
        lane, now, tick = _lane_of(row), self._store.now(), self._store.tick()
        rows = [row, *await self._store.database.read(lambda c: _waiting(c, lane, row.row, AT_ONCE - 1))]
        asked = frozenset(each.id for each in rows)
        since = min(first_tried(each) for each in rows) / 1000
        found = await looker.which_stored(row.kind, row.destination, sorted(asked), since)  # type: ignore[arg-type]
        return _Look(now, tick, asked, asked & found)

    def _forget_old_looks(self) -> None:
        while self._looks and not self._counts(next(iter(self._looks.values()))):
            del self._looks[next(iter(self._looks))]


def _lane_of(row: OutboxRow) -> Lane:
    return Lane(row.space, row.sender, row.kind, row.destination)


def _waiting(connection: sqlite3.Connection, lane: Lane, after: int, limit: int) -> list[OutboxRow]:
    found = connection.execute(
        f"""SELECT {COLUMNS} FROM outbox WHERE state IN ('pending', 'inflight')
        AND space = ? AND sender = ? AND kind = ? AND destination = ? AND row > ? ORDER BY row LIMIT ?""",
        (*lane, after, limit),
    )
    return [as_row(one) for one in found]
