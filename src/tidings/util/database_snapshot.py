"""Looking into a database of this host that no process of it has open: one snapshot, on a connection that cannot write.

A file that is open to others, damaged, of another program or of a newer version of its schema is refused by name. It
takes no lock that the owner of the file would wait for: SQLite keeps a snapshot whole while somebody writes.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from tidings.errors import StoreBroken, StoreError
from tidings.util.database import BUSY_MS, Job, Schema, connect, means_damage
from tidings.util.private_files import check_private

T = TypeVar("T")


def look(path: Path, schema: Schema, job: Job[T]) -> T:
    """What the job reads."""
    check_private(path)
    try:
        with closing(connect(path, "ro")) as connection:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
            connection.execute("PRAGMA query_only = ON")
            connection.execute("BEGIN")
            _check_version(connection, path, schema)
            return job(connection)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        kind, what = (StoreBroken, "is damaged") if means_damage(error) else (StoreError, "cannot be read")
        raise kind(f"{path} {what} ({error}): it was left as it is; `tidings host up` says what it needs") from error


def _check_version(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != schema.application_id:
        raise StoreBroken(
            f"{path} is not a database of Tidings: move it away, or set TIDINGS_HOME to another directory"
        )
    schema.check_version(path, version)
