"""`links.db`, the ledger as a file: opened by one process at a time, refused when it is not what was written to it.

What it holds can be had again from the logs, so whatever is wrong with it is told with what to do. A worker that has it
open keeps part of it in a log beside it (`links.db-wal`): a file that somebody writes, replaces or deletes meanwhile,
an older copy say, no longer belongs to that log, though each of them may be whole. The two are never used together:
that it happened is noted on disk (`links.db.refused`), until a new ledger is begun.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tidings.admin.home import SpaceHome
from tidings.errors import ConfigError, SpaceBusy, StoreBroken, StoreBusy, StoreError
from tidings.links import link_store as books
from tidings.links.schema import SCHEMA
from tidings.util.database import Database
from tidings.util.private_files import lock_holder, locked, write_private

log = logging.getLogger(__name__)
#: commits between two checkpoints
CHECKPOINT_EVERY = 128
#: the first bytes of a log, in either byte order of its checksums
LOG_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
#: what helps whatever is wrong with the file
ANEW = (
    "Nothing is lost with it that other spaces still have: `tidings link rebuild --ledger` begins a new one, which is "
    "filled from their logs and this one; what is here does not come twice, and what this space removed by age comes "
    "again if they still have it"
)


class _Seen(NamedTuple):
    """A file as it was left by us; all of it None if it is not there, or nothing is in it."""

    inode: int | None = None
    size: int | None = None
    changed: int | None = None

    @classmethod
    def of(cls, path: Path) -> _Seen:
        try:
            found = path.stat()
        except OSError:
            return cls()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else cls()


class LedgerDatabase(Database):
    """Only the writer thread changes the files. It checks before and after each transaction that no other program did.

    A commit appends to the log only: automatic checkpoints are off, and `_end` runs them between transactions. So every
    change of `links.db` itself during a transaction is foreign, and is not mistaken for our own.
    """

    def __init__(self, path: Path) -> None:
        self._refused, self._log_path = path.with_name(f"{path.name}.refused"), path.with_name(f"{path.name}-wal")
        super().__init__(path, SCHEMA)
        self._left = self._seen()

    async def check(self) -> None:
        """`StoreBroken` if it cannot be used any more; what may pass is nobody's end."""
        try:
            await self.write(books.links)
        except StoreBroken:
            raise
        except StoreError as error:
            log.warning("the ledger of links: %s", error)

    def _opened(self, *, again: bool = False) -> sqlite3.Connection:
        if self._refused.exists():
            raise self._foreign()
        connection = super()._opened(again=again)
        connection.execute("PRAGMA wal_autocheckpoint = 0").close()
        return connection

    def _begun(self) -> sqlite3.Connection:
        if self._seen() != self._left:
            self._refuse()
            raise self._foreign()
        used = self._connection
        try:
            return super()._begun()
        finally:
            if self._connection is not used:  # the last connection that closes checkpoints, and deletes the log
                self._note_files(reopened=True)

    def _end(self, connection: sqlite3.Connection, group: list[Any]) -> None:
        super()._end(connection, group)
        if self._note_files() and self.commits % CHECKPOINT_EVERY == 0:
            # Boundary: a checkpoint that fails is repeated later; until then the log holds its pages.
            with suppress(sqlite3.Error):
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").close()
            self._note_files(checkpointed=True)

    def _close_writer(self, connection: sqlite3.Connection) -> None:
        if self._seen() != self._left:  # closing writes the log into the file, so the result must not be used
            self._refuse()
        super()._close_writer(connection)

    def _note_files(self, *, reopened: bool = False, checkpointed: bool = False) -> bool:
        """Remember the files as they are now, if this process made the difference. Else keep what was remembered, so
        that the next transaction is refused, and return False."""
        (file, log_file), (file_now, log_now) = self._left, self._seen()
        same_file = file_now.inode == file.inode if reopened or checkpointed else file_now == file
        same_log = reopened or log_file.inode in (None, log_now.inode)
        if same_file and same_log and self._is_log(log_now):
            self._left = file_now, log_now
            return True
        self._refuse()
        return False

    def _is_log(self, found: _Seen) -> bool:
        """Every commit changes size and time of the log, so bytes written over it show in its header only."""
        if found.inode is None:
            return True
        with suppress(OSError), self._log_path.open("rb") as file:
            return file.read(4) in LOG_MAGIC
        return False

    def _refuse(self) -> None:
        with suppress(ConfigError):  # a disk without room: this process refuses it all the same
            write_private(self._refused, f"{self.path} was changed while it was in use\n")

    def _seen(self) -> tuple[_Seen, _Seen]:
        return _Seen.of(self.path), _Seen.of(self._log_path)

    def _foreign(self) -> StoreBroken:
        return StoreBroken(
            f"{self.path} was changed, replaced or deleted by another program while it was in use: it is not used any "
            f"more. {ANEW}"
        )

    def _broken(self, said: str) -> StoreBroken:
        said = said.replace("*** in database main ***", "").strip()
        return StoreBroken(f"{self.path} is damaged ({said}): it was left as it is. {ANEW}")


def open_store(home: SpaceHome) -> LedgerDatabase:
    """The ledger of a space. One process has it at a time."""
    try:
        return LedgerDatabase(home.link_store)
    except StoreBroken as error:
        raise error if ANEW in str(error) else StoreBroken(f"{error}. {ANEW}") from error
    except StoreBusy as error:
        holder = lock_holder(home.link_store.with_name(f"{home.link_store.name}.lock")) or "another process"
        raise StoreBusy(
            f"links of space {home.name} are carried by another process ({holder.split(' (')[0]}): one does it at a "
            "time; `tidings link list` shows how they are, and `tidings up --no-links` starts the space without"
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
            store.with_name(f"{store.name}.refused").unlink(missing_ok=True)
            return aside if moved else None
    except SpaceBusy as error:
        raise StoreBusy(f"{error}: end it, or `tidings down`, and ask again") from error
