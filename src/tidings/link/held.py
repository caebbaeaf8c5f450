"""What the ledger knows of a peer's log, as digests compare it: `link/compare.py` asks it like the peer.

Every record that has a disposition counts, whatever became of it: what was left out or put aside is known, and is no
difference. Rows are read in pieces, each in a job of its own, so that a page is committed in between.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from tidings.link import ledger as books
from tidings.link.compare import MOST_IDS
from tidings.link.ledger import BookedLink, HeldRow
from tidings.wire.digests import (
    BucketsAnswer,
    DayDigests,
    Digest,
    DigestAnswer,
    IdsAnswer,
    RecordIdentity,
    bucket_of,
    item_hash,
)


class HeldRecords:
    """One link's."""

    def __init__(self, ledger: BookedLink) -> None:
        self._ledger = ledger

    async def digest(self, through: int, *, floor: int) -> DigestAnswer:
        row = self._ledger.row
        days = await self._ledger.read(lambda c: books.held_days(c, row, floor, through))
        found: dict[str, dict[str, Digest]] = {}
        for channel, day in days:
            found.setdefault(channel, {})[day] = (await self._day(channel, day, floor, through)).total
        return DigestAnswer(floor, through, found)

    async def buckets(self, channel: str, day: str, through: int, *, floor: int) -> BucketsAnswer:
        return BucketsAnswer(floor, through, (await self._day(channel, day, floor, through)).buckets)

    async def ids(
        self, channel: str, day: str, buckets: Sequence[int], through: int, after: int, *, floor: int
    ) -> IdsAnswer:
        row, wanted = self._ledger.row, frozenset(buckets)

        def job(connection: sqlite3.Connection) -> list[RecordIdentity]:
            rows = books.held_rows(connection, row, channel, day, max(floor, after + 1), through)
            return [each for each in map(_identity, rows) if bucket_of(each.item) in wanted][: MOST_IDS + 1]

        found = await self._ledger.read(job)
        return IdsAnswer(floor, through, found[:MOST_IDS], more=len(found) > MOST_IDS)

    async def _day(self, channel: str, day: str, floor: int, through: int) -> DayDigests:
        row = self._ledger.row

        def job(connection: sqlite3.Connection) -> DayDigests:
            made = DayDigests()
            for each in books.held_rows(connection, row, channel, day, floor, through):
                made.add(item_hash(each.sender, each.id, bytes.fromhex(each.hash)))
            return made

        return await self._ledger.read(job)


def _identity(row: HeldRow) -> RecordIdentity:
    return RecordIdentity(row.seq, row.sender, row.id, bytes.fromhex(row.hash))
