"""Does the log here still hold what the ledger says it let in? Read from the log itself, and compared on disk.

What comparing with a peer shows is what the ledger knows; a log here that was damaged or set back unnoticed is not seen
by that. Memory does not grow with the log: what the log holds is put into a file that goes away again.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tidings.links import link_store as books
from tidings.links.link_store import BookedLink, LetIn
from tidings.links.ports import Destination, IndexPage

#: rows of the ledger that are looked at together
AT_ONCE = 1_000
#: lost messages that are named
MOST_NAMED = 100


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
