"""From a link record to the link of the ledger it stands for: which ones take something in, and under which key."""

from __future__ import annotations

import hashlib
import hmac
import os
import sqlite3
from pathlib import Path

from tidings.links import link_store as books
from tidings.links.definition import LinkDefinition
from tidings.links.link_store import LinkRow
from tidings.nats.jwt import split_credentials
from tidings.util.private_files import read_private
from tidings.wire.links import authorization_epoch
from tidings.wire.rulings import Link
from tidings.wire.signing import seed_bytes

SECRET_BYTES = 32


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


def secret_of(creds: Path) -> bytes:
    """What message ids of a space are made with: known to nobody who does not have its worker's key. Two ledgers of one
    space, in a copied home say, have the same one, so that of two workers at once the log takes one copy."""
    if not creds.exists():
        return os.urandom(SECRET_BYTES)
    key = split_credentials(read_private(creds))[1]
    return hmac.digest(seed_bytes(key), b"message ids of links", hashlib.sha256)


def find_row(connection: sqlite3.Connection, definition: LinkDefinition) -> LinkRow | None:
    """What the ledger has of a link as it is agreed now."""
    return next((row for row in books.links(connection, definition.space) if row.key == definition.key), None)


def last_row(connection: sqlite3.Connection, space: str, link: str) -> LinkRow | None:
    """What the ledger has of a link, under whichever agreement it was carried last."""
    rows = [row for row in books.links(connection, space) if row.definition.link == link]
    return rows[-1] if rows else None


def opened(connection: sqlite3.Connection, definition: LinkDefinition, now: int, secret: bytes = b"") -> LinkRow:
    """The same, made if it is not there. One that takes the same under another agreement goes on where it was; else all
    is read again, and what was known under the one before is given up. A link that is paused stays so, and what is in
    quarantine stays there: the peer may have it no more. `secret` is for a space that has none yet."""
    if (found := find_row(connection, definition)) is not None:
        return books.open_link(connection, definition, b"", now) if found.definition != definition else found
    before = [row for row in books.links(connection, definition.space) if row.definition.link == definition.link]
    if before and before[-1].definition.takes == definition.takes:
        books.agree_anew(connection, before[-1].row, definition)
        return books.find(connection, before[-1].row)
    row = books.open_link(connection, definition, secret or os.urandom(SECRET_BYTES), now)
    if before and before[-1].paused is not None:
        books.pause(connection, row.row, before[-1].paused, now)
    for each in before:
        books.keep_quarantine(connection, each.row, row.row, now)
        books.delete(connection, each.row)
    return books.find(connection, row.row)
