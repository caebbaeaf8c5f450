"""The folder `_delta_log` of a table: what lies in it, what is broken in it, and what nobody needs any more.

Every commit lists this folder, and on a local disk a list costs for each entry in it, however old. So old entries go by
number, not by age: whatever is older than a checkpoint that itself has a newer one. Delta keeps which batches are done
in checkpoints, so nothing that decides a delivery goes with them.
Delta does not sync what it writes. After a power cut an entry can be empty (Delta takes it for a commit of nothing, and
says nothing), torn (Delta refuses the table, for ever) or gone. A checkpoint is made from entries and can be made
again; an entry cannot. The newest ones, if they are torn, are put aside: they are not done, and whoever wrote them sees
that by what the table reached. Any other that is broken is said, with what to do, and never touched here.

The rows of a Delta table: from a folder with Arrow's own files, from a store file by file.

deltalake's own files pass each read through Python, on threads of Arrow, and a process that used them often aborts at
its end (measured: every third). So from a store each file is fetched whole, by threads of ours that end, and decoded
from memory; files that cannot hold what is asked for are not fetched, as far as their minima and maxima say so.
While a store is waited for nothing may hold the interpreter: the beat of the lease would stop (deltalake's lists, its
queries and openings without a known size do, measured; so none of them is used here).

Is a Delta table damaged, or can its files only not be read now? The first is put aside, the second waits.

Arrow and deltalake raise `OSError` for both: for a flipped bit in a file as for a full table of descriptors or a store
that refuses. So they are told apart by reading: each file is fetched whole, and then decoded from memory. What fails in
fetching is the disk's, the network's or a permission's; what fails in decoding is damage, and so is a file that the
table names and that is gone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from tidings.errors import StoreBroken
from tidings.wire.message import new_id

LOG = "_delta_log"
HINT = f"{LOG}/_last_checkpoint"
ENTRY = re.compile(r"(\d{20})\.(.+)")


@dataclass(frozen=True, slots=True)
class Listing:
    #: version -> bytes
    commits: Mapping[int, int]
    checkpoints: Mapping[int, int]
    #: version and path of everything that has a version, oldest first
    entries: tuple[tuple[int, str], ...]

    def after(self, version: int) -> list[int]:
        return sorted(each for each in self.commits if each > version)


def local_folder(uri: str) -> str | None:
    """The folder of a table on this machine; None if it lies elsewhere."""
    if "://" not in uri:
        return os.path.abspath(uri)  # noqa: PTH100 - a URI, of which only this form is a path
    parts = urlsplit(uri)
    return unquote(parts.path) if parts.scheme == "file" else None


class DeltaLog:
    def __init__(self, uri: str, storage_options: Mapping[str, str] | None) -> None:
        self.uri = uri
        self._options = dict(storage_options or {})
        self._folder = local_folder(uri)

    @cached_property
    def files(self) -> pa_fs.FileSystem:
        """Everything of the table, by paths below its place."""
        return pa_fs.PyFileSystem(DeltaStorageHandler(self.uri, self._options))

    def listing(self) -> Listing:
        commits: dict[int, int] = {}
        checkpoints: dict[int, int] = {}
        entries: list[tuple[int, str]] = []
        for info in self.files.get_file_info(pa_fs.FileSelector(LOG, allow_not_found=True)):
            if found := ENTRY.fullmatch(info.base_name):
                version = int(found[1])
                entries.append((version, info.path))
                if found[2] == "json":
                    commits[version] = info.size
                elif found[2] == "checkpoint.parquet":
                    checkpoints[version] = info.size
        return Listing(commits, checkpoints, tuple(sorted(entries)))

    def trim(self, *, keep: int) -> int:
        """Remove what no opening needs: below a checkpoint that has a newer one, and not of the last `keep` commits.

        Only in a folder: a store is asked for what is new, and a list of it holds the interpreter.
        """
        listing = self.listing()
        *older, _newest = sorted(listing.checkpoints) or [0]
        floor = max((each for each in older if each <= max(listing.commits, default=0) - keep), default=0)
        old = [path for version, path in listing.entries if version < floor]
        if old:
            self._sync(self._checkpoint(floor))
        for path in old:
            self.files.delete_file(path)
        return len(old)

    def _sync(self, path: str) -> None:
        """What the removed entries said is on the disk before they go. A store of objects sees to that itself."""
        if self._folder is None:
            return
        for each in (f"{self._folder}/{path}", f"{self._folder}/{LOG}"):
            descriptor = os.open(each, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # --- damage ---

    def mend(self) -> list[str]:
        """What was put aside or removed so that the rest can be read; their names. Nothing in a store of objects.

        There a write is whole or not at all, and a list that lacks something would make sound entries look broken.
        """
        if self._folder is None:
            return []
        return self.put_torn_aside() + self.drop_broken_checkpoints()

    def drop_broken_checkpoints(self) -> list[str]:
        """Remove the newest checkpoints that cannot be read, if entries before them can tell the same; their names."""
        listing = self.listing()
        sound = sorted(listing.checkpoints)
        broken = []
        while sound and not self._readable(self._checkpoint(sound[-1])):
            broken.append(self._checkpoint(sound.pop()))
        base = sound[-1] if sound else -1
        tail = listing.after(base)
        if tail != list(range(base + 1, base + 1 + len(tail))) or (base < 0 and not tail):
            return []
        hinted = self.files.get_file_info(HINT).type == pa_fs.FileType.File
        gone = broken + [HINT] * hinted
        for path in gone:
            self.files.delete_file(path)
        return gone

    def lost_commits(self) -> list[int]:
        """The newest commits, if a power cut left them empty. Raises `StoreBroken` if a later one is there."""
        if self._folder is None:
            return []
        listing = self.listing()
        tail = listing.after(max(listing.checkpoints, default=-1))
        empty = [version for version in tail if not listing.commits[version]]
        if empty and empty != tail[-len(empty) :]:
            raise StoreBroken(
                f"{self.uri}: {self._commit(empty[0])} is empty and later commits are there: what it said is lost. "
                f"Take the table from a backup; or go on without: DeltaTable({self.uri!r}).create_checkpoint()"
            )
        return empty

    def put_torn_aside(self) -> list[str]:
        """Rename the newest commits if they are torn and all others are whole; their names."""
        listing = self.listing()
        checkpoint = max((c for c in listing.checkpoints if self._readable(self._checkpoint(c))), default=-1)
        tail = listing.after(checkpoint)
        torn = [version for version in tail if listing.commits[version] and not self._whole(version)]
        if not torn or torn != tail[-len(torn) :] or torn[0] == 0:
            return []
        paths = [self._commit(version) for version in torn]
        for path in paths:
            self.files.move(path, f"{path}.torn-{new_id()}")
        return paths

    def damage(self) -> str:
        """What is broken and what to do, for a table that cannot be opened."""
        if self._folder is None:
            return "if it stays so, take it from a backup, or move it away to begin a new one"
        listing = self.listing()
        checkpoint = max((c for c in listing.checkpoints if self._readable(self._checkpoint(c))), default=-1)
        tail = listing.after(checkpoint)
        if not tail and checkpoint < 0:
            return "its log is empty. Take the table from a backup, or move its folder away to begin a new one"
        for expected, version in enumerate(tail, start=checkpoint + 1):
            if version != expected:
                return f"{self._commit(expected)} is missing. Take it, or the table, from a backup"
        torn = [version for version in tail if not self._whole(version)]
        if not torn:
            return "every entry of its log can be read. Is it there, and may this process read it?"
        if torn[0] == 0:
            return f"{self._commit(0)} is torn: it was being made. Move its folder away to begin a new one"
        return f"{self._commit(torn[0])} is torn and later commits are there. Take it, or the table, from a backup"

    def _whole(self, version: int) -> bool:
        text = self.files.open_input_stream(self._commit(version)).read()
        try:
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            return False
        return bool(lines) and all(isinstance(line, dict) for line in lines)

    def _readable(self, path: str) -> bool:
        try:
            pq.ParquetFile(self.files.open_input_file(path)).close()
        except (pa.ArrowException, OSError):
            return False
        return True

    def _commit(self, version: int) -> str:
        return f"{LOG}/{version:020}.json"

    def _checkpoint(self, version: int) -> str:
        return f"{LOG}/{version:020}.checkpoint.parquet"


Filters = list[tuple[str, str, Any]]
#: fetches at a time
FETCHES = 8


class TableFiles:
    """The files of one table, by paths below it."""

    def __init__(self, uri: str, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        folder = local_folder(uri)
        self._native = None if folder is None else pa_fs.SubTreeFileSystem(folder, pa_fs.LocalFileSystem())

    def rows(self, table: DeltaTable, columns: Sequence[str] | None = None, filters: Filters | None = None) -> pa.Table:
        chosen = None if columns is None else list(columns)
        if self._native is not None:
            return table.to_pyarrow_table(columns=chosen, filters=filters, filesystem=self._native)
        where = None if filters is None else pq.filters_to_expression(filters)
        # nothing is opened through this one: it only knows which files there are, and their minima and maxima
        dataset = table.to_pyarrow_dataset(filesystem=pa_fs.LocalFileSystem())
        paths = [fragment.path for fragment in dataset.get_fragments(where)]
        with ThreadPoolExecutor(FETCHES) as pool:
            contents = list(pool.map(self.fetcher(table), paths))
        parts = [decoded(content, dataset.schema, chosen, where) for content in contents]
        empty = dataset.schema.empty_table()
        return pa.concat_tables([empty if chosen is None else empty.select(chosen), *parts])

    def parts(
        self, table: DeltaTable, columns: Sequence[str] | None = None, filters: Filters | None = None
    ) -> Iterator[pa.Table]:
        """The same rows, those of one file at a time."""
        chosen = None if columns is None else list(columns)
        where = None if filters is None else pq.filters_to_expression(filters)
        dataset = table.to_pyarrow_dataset(filesystem=self._native or pa_fs.LocalFileSystem())
        fetch = self.fetcher(table)
        for fragment in dataset.get_fragments(where):
            yield decoded(fetch(fragment.path), dataset.schema, chosen, where)

    def fetcher(self, table: DeltaTable) -> Callable[[str], Any]:
        """What answers the content of a file of that table."""
        native = self._native
        if native is not None:
            return lambda path: native.open_input_stream(path).read()
        # without the sizes each opening would ask the store, and hold the interpreter meanwhile
        sizes = table._table.get_add_file_sizes()
        files = DeltaStorageHandler.from_table(table._table, self._options, sizes)
        return lambda path: files.open_input_file(path).read()


def decoded(content: Any, schema: pa.Schema, columns: list[str] | None = None, where: Any = None) -> pa.Table:
    # Arrow decodes on its own threads. One that released bytes of Python while the process ends would abort it.
    owned = pa.allocate_buffer(len(content))
    pa.FixedSizeBufferWriter(owned).write(content)
    return pq.read_table(pa.BufferReader(owned), schema=schema, columns=columns, filters=where, use_threads=False)


#: what reading a table raises if its bytes are not what they were
UNDECODABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: what follows the path of an address: with some stores it holds a signature
_QUERY = re.compile(r"(?<=://)([^\s?]*)\?\S+")
LONGEST = 450


def fault_of(rows: pa.Table, needed: Sequence[str]) -> str | None:
    """What is wrong with rows that could be decoded: texts that are none, or nothing where something must be."""
    try:
        rows.validate(full=True)
    except pa.ArrowException as error:
        return words_of(error)
    empty = [name for name in needed if name in rows.column_names and rows[name].null_count]
    return f"rows have nothing in {', '.join(empty)}" if empty else None


def damaged_file(table: DeltaTable, files: TableFiles, needed: Sequence[str]) -> str | None:
    """The first file of the table that is damaged, and how; None if all are sound. `OSError`: they cannot be read."""
    schema, fetch = pa.schema(table.schema().to_arrow()), files.fetcher(table)
    for path in pa.table(table.get_add_actions(flatten=True))["path"].to_pylist():
        try:
            content = fetch(path)
        except FileNotFoundError:
            return f"{path} is gone"
        if why := _fault_in(content, schema, needed):
            return f"{path} is damaged ({why})"
    return None


def _fault_in(content: bytes, schema: pa.Schema, needed: Sequence[str]) -> str | None:
    try:
        return fault_of(decoded(content, schema), needed)
    except UNDECODABLE as error:
        return words_of(error)


def words_of(error: BaseException | None) -> str:
    """An error as part of a sentence: a store's goes over many lines, in colours, and may hold a signed address."""
    lines = [line.strip(" \t↳") for line in _COLOUR.sub("", str(error)).splitlines()]
    said = ": ".join(line for line in lines if line and not line.startswith("<"))  # the page that a server answered
    return _QUERY.sub(r"\1?..", said or type(error).__name__)[:LONGEST]
