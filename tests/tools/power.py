"""A disk that loses its power: what was not synced is gone, torn, or there in part. Needs `apsw` (the dev group).

`PowerDisk(directory)` is a file system for SQLite whose writes stay in memory until they are synced; give its
`connect` to a `Database`. `cut` at any moment, or `cut_after` a number of writes and syncs (so also inside a commit),
turns it off: from then on everything fails. `write_image` makes a directory as the machine finds it when it starts
again: what was synced, and of the rest what the `Luck` of that day left, by sectors; the same for names that were
made or removed since their directory was synced. Locks and the shared memory are those of real files; after a
cut the locks are gone, and the file of the shared memory is missing or holds anything.
"""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote

import apsw

SECTOR = 512
#: what became of what was not synced: none of it, all, up to some byte of some write, or any of its sectors
Luck = Literal["dropped", "kept", "torn", "scattered"]
LUCKS: tuple[Luck, ...] = ("dropped", "kept", "torn", "scattered")
_JOURNALS = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL
_names = count()


@dataclass(frozen=True)
class _Change:
    """A write at `at`, or (`data` is None) a cut of the file to the length `at`."""

    at: int
    data: bytes | None

    def apply(self, content: bytearray, luck: random.Random | None = None) -> None:
        if self.data is None:
            del content[self.at :]
            return
        if (gap := self.at - len(content)) > 0:  # what a file grew over and was never written may be anything
            content.extend(luck.randbytes(gap) if luck else bytes(gap))
        content[self.at : self.at + len(self.data)] = self.data

    def sectors(self) -> Iterator[_Change]:
        if self.data is None:
            yield self
            return
        at, end = self.at, self.at + len(self.data)
        while at < end:
            until = min(end, (at // SECTOR + 1) * SECTOR)
            yield _Change(at, self.data[at - self.at : until - self.at])
            at = until

    def torn(self, luck: random.Random) -> _Change | None:
        return None if not self.data else _Change(self.at, self.data[: luck.randrange(len(self.data))])


@dataclass
class _Node:
    """A file as the programs see it, as it is on the disk, and what is between the two."""

    content: bytearray = field(default_factory=bytearray)
    stable: bytearray = field(default_factory=bytearray)
    unsynced: list[_Change] = field(default_factory=list)

    def change(self, change: _Change) -> None:
        change.apply(self.content)
        self.unsynced.append(change)

    def sync(self) -> None:
        for change in self.unsynced:
            change.apply(self.stable)
        self.unsynced.clear()

    def after_cut(self, fate: Luck, luck: random.Random) -> bytes:
        found = bytearray(self.stable)
        for change in self._survivors(fate, luck):
            change.apply(found, luck)
        return bytes(found)

    def _survivors(self, fate: Luck, luck: random.Random) -> Iterable[_Change]:
        if fate == "kept":
            return self.unsynced
        if fate == "torn" and self.unsynced:
            last = luck.randrange(len(self.unsynced))
            torn = self.unsynced[last].torn(luck)
            return [*self.unsynced[:last], *([torn] if torn else [])]
        if fate == "scattered":
            share = luck.choice((0.1, 0.5, 0.9))
            return [piece for change in self.unsynced for piece in change.sectors() if luck.random() < share]
        return []


class PowerDisk:
    """The files of one directory, until the power goes. `lies`: a sync answers and does nothing."""

    def __init__(self, directory: Path, *, lies: bool = False, checkpoint_pages: int = 1_000) -> None:
        self.directory, self.lies = directory, lies
        #: the power is gone
        self.off = False
        #: writes, syncs, truncations and removals so far
        self.operations = 0
        self._checkpoint_pages = checkpoint_pages
        self._cut_at: int | None = None
        self._gate = threading.RLock()
        self._seen: dict[str, _Node] = {}
        for file in directory.iterdir():
            if file.is_file():
                content = file.read_bytes()
                self._seen[str(file)] = _Node(bytearray(content), bytearray(content))
        self._on_disk = dict(self._seen)
        self._vfs = _PowerVFS(f"power{next(_names)}", self)

    def connect(self, path: Path, mode: str) -> sqlite3.Connection:
        """A connection with what `Database` uses of one, over this disk."""
        address = f"file:{quote(str(path))}?mode={mode}&vfs={self._vfs.name}"
        return cast("sqlite3.Connection", _Connection(address, self, self._checkpoint_pages))

    def cut(self) -> None:
        with self._gate:
            self.off = True

    def cut_after(self, operations: int) -> None:
        """Cut the power during the n-th operation from now."""
        with self._gate:
            self._cut_at = self.operations + operations

    def write_image(self, into: Path, fate: Luck, luck: random.Random) -> None:
        """Make `into` the directory that is found after the cut."""
        assert self.off, "the power is on"
        into.mkdir(mode=0o700, parents=True)
        for name in sorted(self._seen.keys() | self._on_disk.keys()):
            node = self._directory_entry(name, fate, luck)
            if node is not None:
                file = into / Path(name).name
                file.touch(0o600)
                file.write_bytes(node.after_cut(fate, luck))
                if fate == "scattered" and file.name.endswith("-wal"):
                    file.with_name(file.name.removesuffix("wal") + "shm").write_bytes(luck.randbytes(32_768))

    def _directory_entry(self, name: str, fate: Luck, luck: random.Random) -> _Node | None:
        newest = fate == "kept" or (fate != "dropped" and luck.random() < 0.5)
        return (self._seen if newest else self._on_disk).get(name)

    # ---------------------------------------------------------------------------------- what the file system does

    def node(self, name: str) -> _Node:
        with self._gate:
            return self._seen.setdefault(name, _Node())

    def exists(self, name: str) -> bool:
        with self._gate:
            return name in self._seen

    def change(self, node: _Node, change: _Change) -> None:
        with self._gate:
            self._powered()
            node.change(change)
            self._operation()

    def sync(self, node: _Node, *, directory_too: bool) -> None:
        with self._gate:
            self._powered()
            self._operation()
            if not self.lies:
                node.sync()
                if directory_too:
                    self._on_disk = dict(self._seen)

    def remove(self, name: str, *, directory_too: bool) -> None:
        with self._gate:
            self._powered()
            self._seen.pop(name, None)
            self._operation()
            if directory_too and not self.lies:
                self._on_disk = dict(self._seen)

    def _operation(self) -> None:
        self.operations += 1
        if self.operations == self._cut_at:
            self.off = True
            self._powered()

    def _powered(self) -> None:
        if self.off:
            raise apsw.IOError("the power is off")


class _PowerVFS(apsw.VFS):
    def __init__(self, name: str, disk: PowerDisk) -> None:
        self.name, self._disk = name, disk
        super().__init__(name, base="")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        if name is None:
            return apsw.VFSFile("", name, flags)
        path = name if isinstance(name, str) else name.filename()
        return _PowerFile(name, path, flags, self._disk)

    def xAccess(self, pathname: str, flags: int) -> bool:  # noqa: N802
        return self._disk.exists(pathname) if flags == apsw.SQLITE_ACCESS_EXISTS else super().xAccess(pathname, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        self._disk.remove(filename, directory_too=syncdir)
        super().xDelete(filename, syncdir)


class _PowerFile(apsw.VFSFile):
    """One open file: locks and shared memory of the real one, the content from the disk that may fail."""

    def __init__(self, name: str | apsw.URIFilename, path: str, flags: list[int], disk: PowerDisk) -> None:
        # as the unix file system does: a journal that is made here makes its name durable with its first sync
        self._names_first = bool(flags[0] & apsw.SQLITE_OPEN_CREATE and flags[0] & _JOURNALS)
        super().__init__("", name, flags)
        self._disk, self._node = disk, disk.node(path)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        return bytes(self._node.content[offset : offset + amount])

    def xFileSize(self) -> int:  # noqa: N802
        return len(self._node.content)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        self._disk.change(self._node, _Change(offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._disk.change(self._node, _Change(newsize, None))

    def xSync(self, flags: int) -> None:  # noqa: ARG002, N802
        self._disk.sync(self._node, directory_too=self._names_first)
        self._names_first = False

    def xFileControl(self, op: int, ptr: int) -> bool:  # noqa: N802
        # a hint about size would be carried out on the real, empty file
        return op == apsw.SQLITE_FCNTL_SIZE_HINT or super().xFileControl(op, ptr)


# ------------------------------------------------------------------- apsw with the manners of the `sqlite3` module


class _Cursor:
    """All rows of a statement that has ended."""

    def __init__(self, rows: list[tuple[Any, ...]], rowcount: int, lastrowid: int) -> None:
        self._rows, self.rowcount, self.lastrowid = iter(rows), rowcount, lastrowid

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self._rows

    def fetchone(self) -> tuple[Any, ...] | None:
        return next(self._rows, None)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self._rows)

    def close(self) -> None:
        self._rows = iter(())


class _Connection:
    def __init__(self, address: str, disk: PowerDisk, checkpoint_pages: int) -> None:
        self._disk = disk
        flags = apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_READWRITE
        try:
            self._inner = apsw.Connection(address, flags=flags)
            self._inner.wal_autocheckpoint(checkpoint_pages)
        except apsw.Error as error:
            raise _translated(error) from error

    @property
    def in_transaction(self) -> bool:
        return self._inner.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> _Cursor:
        try:
            if self._disk.off:  # a machine without power runs nothing, not even from memory
                raise apsw.IOError("the power is off")
            rows = list(self._inner.execute(sql, parameters))
        except apsw.Error as error:
            raise _translated(error) from error
        return _Cursor(rows, self._inner.changes(), self._inner.last_insert_rowid())

    def executemany(self, sql: str, many: Iterable[Sequence[Any]]) -> _Cursor:
        changed = sum(self.execute(sql, parameters).rowcount for parameters in many)
        return _Cursor([], changed, self._inner.last_insert_rowid())

    def executescript(self, sql: str) -> _Cursor:
        return self.execute(sql)

    def set_progress_handler(self, handler: Any, steps: int) -> None:
        self._inner.set_progress_handler(handler, steps)

    def close(self) -> None:
        with suppress(apsw.Error):  # `sqlite3` is silent about a checkpoint that fails here
            self._inner.close()


def _translated(error: apsw.Error) -> sqlite3.Error:
    kind = sqlite3.IntegrityError if isinstance(error, apsw.ConstraintError) else sqlite3.OperationalError
    translated = kind(str(error))
    code = getattr(error, "extendedresult", 0) or (apsw.SQLITE_IOERR if isinstance(error, apsw.IOError) else 0)
    translated.sqlite_errorcode = code
    return translated
