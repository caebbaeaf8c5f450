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

from tidings.endpoint.publishing import Kind
from tidings.errors import StewardUnreachable, UsageError
from tidings.host.outbox import Lane, OutboxRow, OutboxStore
from tidings.host.outbox_views import COLUMNS, as_row
from tidings.wire.ids import id_time_ms

#: the broker knows a message id for ten minutes; what is younger than this is within that
WINDOW_MS = 8 * 60_000
#: rows that one look is for
AT_ONCE = 1_000
#: with the publish that follows, well before the lease of a minute ends
LOOK_WITHIN = 20.0


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


class Elsewhere:
    """The looks that the drain of one space took."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        #: oldest first
        self._looks: dict[Lane, _Look] = {}
        #: the steward searches for one caller at a time, and refuses those who wait in numbers
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def broker_knows(self, row: OutboxRow) -> bool:
        """Would the broker itself notice that this is there already?"""
        return 0 <= self._store.now() - first_tried(row) < WINDOW_MS

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
        try:
            async with asyncio.timeout(LOOK_WITHIN), self._turns[row.sender]:
                look = await self._looked(looker, row)
        except TimeoutError as error:
            raise StewardUnreachable(f"the steward did not say within {LOOK_WITHIN:.0f} s what is stored") from error
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
        try:
            found = await looker.which_stored(row.kind, row.destination, sorted(asked), since)  # type: ignore[arg-type]
        except UsageError:  # a steward of an earlier release: each is looked for by itself
            return _Look(now, tick, asked, asked)
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
