"""From a link record to the link of the ledger it stands for: which ones take something in, and under which key."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

from tidings.broker.private_files import lock_holder, locked
from tidings.errors import SpaceBusy, StoreBroken, StoreBusy
from tidings.link import ledger as books
from tidings.link.definition import LinkDefinition
from tidings.link.ledger import LinkRow
from tidings.link.schema import MIGRATIONS
from tidings.space.home import SpaceHome
from tidings.store.database import Database
from tidings.wire.links import authorization_epoch
from tidings.wire.rulings import Link

SECRET_BYTES = 32
#: what helps whatever is wrong with the file
ANEW = (
    "Nothing is lost with it that other spaces still have: `tidings link rebuild --ledger` begins a new one, which is "
    "filled from their logs and this one; what is here does not come twice, and what this space removed by age comes "
    "again if they still have it"
)


def takes_something(record: Link, now: float) -> bool:
    """Does it let anything in at this moment?"""
    return record.state == "on" and carries(record) and not record.has_ended(int(now * 1e9))


def carries(record: Link) -> bool:
    """Is there anything for a worker to do, as it is agreed?"""
    return bool(record.channels or record.beyond) or record.roster == "on"


def definition_of(space: str, record: Link) -> LinkDefinition:
    """`space`: the id of the space the record is of."""
    return LinkDefinition(
        link=record.link,
        space=space,
        peer=record.origin,
        authority=authorization_epoch(record),
        channels=record.channels,
        beyond=record.beyond,
        hops=record.hops,
        until=record.until,
    )


class LedgerDatabase(Database):
    """The ledger on disk. What it holds can be had again, so that damage is told with what to do."""

    def _broken(self, said: str) -> StoreBroken:
        said = said.replace("*** in database main ***", "").strip()
        return StoreBroken(f"{self.path} is damaged ({said}): it was left as it is. {ANEW}")


def open_store(home: SpaceHome) -> Database:
    """The ledger of a space. One process has it at a time."""
    try:
        return LedgerDatabase(home.link_store, MIGRATIONS)
    except StoreBroken as error:
        raise error if ANEW in str(error) else StoreBroken(f"{error}. {ANEW}") from error
    except StoreBusy as error:
        holder = lock_holder(home.link_store.with_name(f"{home.link_store.name}.lock")) or "another process"
        raise StoreBusy(
            f"links of space {home.name} are carried by another process ({holder.split(' (')[0]}): one does it at a "
            "time; `tidings link list` shows how they are"
        ) from error


def set_ledger_aside(home: SpaceHome, wait: float) -> Path | None:
    """Move the ledger away, whatever is in it, so that the next worker begins a new one; answers where it is now. An
    older one that was set aside is deleted. `StoreBusy` if somebody has it for longer than `wait` seconds."""
    store, aside = home.link_store, home.link_store.with_name(f"{home.link_store.name}.aside")
    try:
        with locked(store.with_name(f"{store.name}.lock"), f"set {store} aside", wait=wait):
            moved = store.exists()
            for end in ("-shm", "-wal", ""):
                part, kept = store.with_name(store.name + end), aside.with_name(aside.name + end)
                kept.unlink(missing_ok=True)
                if part.exists():
                    part.rename(kept)
            return aside if moved else None
    except SpaceBusy as error:
        raise StoreBusy(f"{error}: end it, or `tidings down`, and ask again") from error


def find_row(connection: sqlite3.Connection, definition: LinkDefinition) -> LinkRow | None:
    """What the ledger has of a link as it is agreed now."""
    return next((row for row in books.links(connection, definition.space) if row.key == definition.key), None)


def last_row(connection: sqlite3.Connection, space: str, link: str) -> LinkRow | None:
    """What the ledger has of a link, under whichever agreement it was carried last."""
    rows = [row for row in books.links(connection, space) if row.definition.link == link]
    return rows[-1] if rows else None


def opened(connection: sqlite3.Connection, definition: LinkDefinition, now: int) -> LinkRow:
    """The same, made if it is not there. One that takes the same under another agreement goes on where it was; else all
    is read again, and what was known under the one before is given up. A link that is paused stays so, and what is in
    quarantine stays there: the peer may have it no more."""
    if (found := find_row(connection, definition)) is not None:
        return books.open_link(connection, definition, b"", now) if found.definition != definition else found
    before = [row for row in books.links(connection, definition.space) if row.definition.link == definition.link]
    if before and before[-1].definition.takes == definition.takes:
        books.agree_anew(connection, before[-1].row, definition)
        return books.find(connection, before[-1].row)
    row = books.open_link(connection, definition, os.urandom(SECRET_BYTES), now)
    if before and before[-1].paused is not None:
        books.pause(connection, row.row, before[-1].paused, now)
    for each in before:
        books.keep_quarantine(connection, each.row, row.row, now)
        books.delete(connection, each.row)
    return books.find(connection, row.row)


def milliseconds() -> int:
    return int(time.time() * 1000)
