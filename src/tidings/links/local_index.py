"""What the log here holds of what links brought, by identity, as functions of a SQLite connection.

It is read from the log itself and shared by all links of a space, so that a message that comes twice, over whichever
link, is put into the log once, however long ago that was: also if the log has removed it by age since. Its end is a
sequence of one epoch of that log. In another epoch it is read anew from the floor on, and only at its end is it known
what the log lost. A ledger that was lost knows nothing of what was removed, and lets that in again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from tidings.errors import LogRegressed
from tidings.links import obligations
from tidings.links.ports import IndexPage, IndexRow, LocalFacts, OriginIdentity


class IndexState(NamedTuple):
    epoch: str
    through: int
    #: it is being read anew, because the log was set back
    anew: bool
    #: changes whenever it begins anew
    life: int


class Present(NamedTuple):
    hash: str
    link: str
    seq: int


def state(connection: sqlite3.Connection, space: str) -> IndexState:
    found = connection.execute("SELECT epoch, through, anew, lives FROM space WHERE space = ?", (space,)).fetchone()
    return IndexState(found[0], found[1], bool(found[2]), found[3])


def meet(connection: sqlite3.Connection, facts: LocalFacts) -> IndexState:
    """The log as it is now: if it is not the one the index knows, or ends before it, the index begins anew. What it
    knew stays aside, with its sequence negated, until it is read again or `complete` says what became of it."""
    known = state(connection, facts.space)
    if known.epoch == facts.epoch and known.through <= facts.head:
        return known
    connection.execute("UPDATE present SET seq = -seq WHERE space = ? AND seq > 0", (facts.space,))
    connection.execute(
        "UPDATE space SET epoch = ?, through = 0, anew = 1, lives = lives + 1 WHERE space = ?",
        (facts.epoch, facts.space),
    )
    return state(connection, facts.space)


def check(connection: sqlite3.Connection, space: str, known: IndexState) -> None:
    """What was let in was looked for in this life of the index. If it began anew meanwhile, perhaps the log lost what
    it said it took, after that was looked for: nothing may be said of it."""
    if state(connection, space).life != known.life:
        raise LogRegressed(f"the log of {space} was set back while a page was let in: the page is handled again")


def extend(connection: sqlite3.Connection, space: str, known: IndexState, page: IndexPage) -> IndexState:
    """Take a page of the index that follows what is known. If it went on meanwhile, that is what is known now."""
    now = state(connection, space)
    if now != known or page.epoch != known.epoch or page.through <= known.through:
        return now
    connection.executemany(
        """INSERT INTO present (space, origin, sender, id, hash, link, channel, seq) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET hash = excluded.hash, link = excluded.link, channel = excluded.channel,
          seq = excluded.seq WHERE present.seq < 0""",
        [(space, *row.identity, row.hash, row.link, row.channel, row.seq) for row in page.rows],
    )
    connection.execute("UPDATE space SET through = ? WHERE space = ?", (page.through, space))
    return known._replace(through=page.through)


def extend_own(
    connection: sqlite3.Connection, space: str, known: IndexState, rows: Mapping[int, IndexRow]
) -> IndexState:
    """Take what a worker just put into the log, by sequence, if that is all that follows what is known: then nobody has
    to be asked. Otherwise nothing is taken, and it is read from the log."""
    if not rows or known.anew or sorted(rows) != list(range(known.through + 1, known.through + 1 + len(rows))):
        return known
    page = IndexPage(epoch=known.epoch, rows=tuple(rows.values()), through=max(rows))
    return extend(connection, space, known, page)


def complete(connection: sqlite3.Connection, facts: LocalFacts, now: int) -> int:
    """The index was read anew up to the end, before these facts: how many messages the log lost, which are owed again
    now. What lay below the floor was removed by age; it was here all the same, and stays known."""
    connection.execute("UPDATE space SET anew = 0 WHERE space = ?", (facts.space,))
    connection.execute("DELETE FROM present WHERE space = ? AND -seq >= max(?, 1)", (facts.space, facts.floor))
    connection.execute("UPDATE present SET seq = -seq WHERE space = ? AND seq < 0", (facts.space,))
    return obligations.lost_here(connection, facts.space, facts.floor, now)


def present(
    connection: sqlite3.Connection, space: str, identities: Iterable[OriginIdentity]
) -> dict[OriginIdentity, Present]:
    """Those that the log here holds, or held until it removed them by age; one statement, however many are asked."""
    query = """SELECT p.origin, p.sender, p.id, p.hash, p.link, p.seq FROM json_each(?) AS asked CROSS JOIN present AS p
      ON p.space = ? AND p.origin = json_extract(asked.value, '$[0]')
      AND p.sender = json_extract(asked.value, '$[1]') AND p.id = json_extract(asked.value, '$[2]') AND p.seq > 0"""
    found = connection.execute(query, (msgspec.json.encode(list(identities)).decode(), space))
    return {OriginIdentity(*row[:3]): Present(*row[3:]) for row in found}
