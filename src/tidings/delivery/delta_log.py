"""The folder `_delta_log` of a table: what lies in it, what is broken in it, and what nobody needs any more.

Every commit lists this folder, and on a local disk a list costs for each entry in it, however old. So old entries go by
number, not by age: whatever is older than a checkpoint that itself has a newer one. Delta keeps which batches are done
in checkpoints, so nothing that decides a delivery goes with them.
Delta does not sync what it writes. After a power cut an entry can be empty (Delta takes it for a commit of nothing, and
says nothing), torn (Delta refuses the table, for ever) or gone. A checkpoint is made from entries and can be made
again; an entry cannot. The newest ones, if they are torn, are put aside: they are not done, and whoever wrote them sees
that by what the table reached. Any other that is broken is said, with what to do, and never touched here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
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
