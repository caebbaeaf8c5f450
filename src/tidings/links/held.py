"""What the ledger says, held against both logs: the peer's, by digests, and the one here, record by record.

`HeldRecords` is the ledger's side of a comparison; `links/compare.py` asks it like the peer.

Every record that has a disposition counts, whatever became of it: what was left out or put aside is known, and is no
difference. What the peer does not share any more does not count: that it is here and not there says nothing. Rows are
read in pieces, each in a job of its own, so that a page is committed in between.

What comparing with a peer shows is what the ledger knows; a log here that was damaged or set back unnoticed is not seen
by that. So `lost_here` reads the log itself. Memory does not grow with the log: what the log holds is put into a file
that goes away again.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tidings.links import link_store as books
from tidings.links.compare import MOST_IDS
from tidings.links.link_store import BookedLink, HeldRow, LetIn
from tidings.links.ports import Destination, IndexPage, PeerFacts, Source
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

#: rows of the ledger that are looked at together
AT_ONCE = 1_000
#: lost messages that are named
MOST_NAMED = 100


class HeldRecords:
    """One link's. `peer` is asked what it shares at the beginning of each comparison; without it everything counts."""

    def __init__(self, ledger: BookedLink, peer: Source | None = None) -> None:
        self._ledger, self._peer = ledger, peer
        self._shared: PeerFacts | None = None

    async def digest(self, through: int, *, floor: int) -> DigestAnswer:
        row = self._ledger.row
        if self._peer is not None:
            self._shared = await self._peer.hello()
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
        wanted = frozenset(buckets)

        def job(connection: sqlite3.Connection) -> list[RecordIdentity]:
            rows = self._rows(connection, channel, day, max(floor, after + 1), through)
            named = (RecordIdentity(row.seq, row.sender, row.id, bytes.fromhex(row.hash)) for row in rows)
            return [each for each in named if bucket_of(each.item) in wanted][: MOST_IDS + 1]

        found = await self._ledger.read(job)
        return IdsAnswer(floor, through, found[:MOST_IDS], more=len(found) > MOST_IDS)

    async def _day(self, channel: str, day: str, floor: int, through: int) -> DayDigests:
        def job(connection: sqlite3.Connection) -> DayDigests:
            made = DayDigests()
            for each in self._rows(connection, channel, day, floor, through):
                made.add(item_hash(each.sender, each.id, bytes.fromhex(each.hash)))
            return made

        return await self._ledger.read(job)

    def _rows(
        self, connection: sqlite3.Connection, channel: str, day: str, floor: int, through: int
    ) -> Iterator[HeldRow]:
        shared = self._shared
        rows = books.held_rows(connection, self._ledger.row, channel, day, floor, through)
        return (each for each in rows if shared is None or shared.shows(each.origin, channel))


class LostHere(NamedTuple):
    """How many messages the log lost that the ledger has as let in, and the first of them."""

    lost: int
    named: tuple[LetIn, ...]


async def lost_here(ledger: BookedLink, destination: Destination) -> LostHere:
    """What was removed by age is not lost; what came while we look is not asked about."""
    before = await destination.facts()
    with tempfile.TemporaryDirectory(prefix="tidings-verify-") as folder:
        held = await asyncio.to_thread(_Held, Path(folder) / "held.db")
        with closing(held.connection):
            through = 0
            while through < before.head:
                page = await destination.index(through)
                await asyncio.to_thread(held.add, page)
                through = max(page.through, through + 1)
            floor = (await destination.facts()).floor
            return await _compared(ledger, floor, before.head, held.lacks)


async def _compared(ledger: BookedLink, floor: int, head: int, lacks: Callable[[list[LetIn]], list[LetIn]]) -> LostHere:
    count, named, after = 0, list[LetIn](), 0
    while True:
        start = after
        rows = await ledger.read(lambda c: books.let_in(c, ledger.row, start, AT_ONCE))  # noqa: B023
        if not rows:
            return LostHere(count, tuple(named))
        after = rows[-1].seq
        lost = await asyncio.to_thread(lacks, [each for each in rows if floor <= each.local_seq <= head])
        count += len(lost)
        named += lost[: MOST_NAMED - len(named)]


class _Held:
    """What the log holds, by identity."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, check_same_thread=False)
        self.connection.execute("PRAGMA synchronous = OFF")
        self.connection.execute(
            "CREATE TABLE held (origin, sender, id, PRIMARY KEY (origin, sender, id)) WITHOUT ROWID"
        )

    def add(self, page: IndexPage) -> None:
        with self.connection as held:
            held.executemany("INSERT OR IGNORE INTO held VALUES (?, ?, ?)", [row.identity for row in page.rows])

    def lacks(self, rows: list[LetIn]) -> list[LetIn]:
        query = "SELECT 1 FROM held WHERE origin = ? AND sender = ? AND id = ?"
        return [each for each in rows if self.connection.execute(query, each.identity).fetchone() is None]
