"""A Delta table that one job writes, batch by batch, for years: the base of the ledger, and of jobs like it.

What it promises: a batch is committed once, with the number its job counts by (`app`, `version`) in the same commit, so
that `reached` is true after every crash; whoever writes under the same name from an older view is refused; a commit
costs the same after ten thousand others; nothing is lost if the process dies in any step of the upkeep.
A commit costs for each file of the table and for each entry of its log (measured: 0.1 ms and 3 us). `tend`, called
between batches, keeps both few: it merges small files, by sizes so that a row is written again only a few times, and
removes old files and entries of the log. It does one step in a call, so a batch waits for one merge at most.

The table is at a URI: a path, or s3://, abfss:// and what else deltalake opens with its storage options. It is for one
thread. Others may append to it meanwhile, or read it: what a snapshot needs stays for `keep_hours` after it is history.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction, write_deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError

from tidings.delivery.delta_log import DeltaLog, Filters, TableFiles, damaged_file, fault_of, local_folder, words_of
from tidings.delivery.storage import for_table
from tidings.errors import ConfigError, ConflictError, OutcomeUnknown, StoreBroken, StoreError
from tidings.wire.message import new_id

KIB, MIB = 1024, 1024**2
#: how often a commit is tried again from the newest snapshot; deltalake itself tries each 15 times
ATTEMPTS = 4
#: a table with this property forgets which batches are done
FORGETS = "delta.setTransactionRetentionDuration"

#: no version: an application that somebody else moved
TAKEN = -1
#: the log is trimmed here, by number
HOOKS = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)

#: what reading rows raises, whatever the cause
UNREAD = (DeltaError, OSError, pa.ArrowException)

log = logging.getLogger(__name__)
T = TypeVar("T")


class UnsoundRows(pa.ArrowInvalid):  # type: ignore[misc]
    """Rows that were read and cannot be what was written."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """When a table is tended, and what stays for readers of an older snapshot."""

    #: so many files below the first size are merged into one
    small_files: int = 50
    #: so many between one size and the next
    merged_files: int = 16
    #: files grow to about these sizes, one after the other; what reached the last is not touched again
    sizes: tuple[int, ...] = (512 * KIB, 8 * MIB, 128 * MIB)
    checkpoint_every: int = 100
    #: commits that stay in the log, for `history`
    log_entries: int = 200
    #: files that no snapshot has stay so long, for readers of older ones; 0 only where nobody else reads or writes
    keep_hours: int = 1
    #: seconds between looks for files that can go
    vacuum_every: float = 600.0


@dataclass(frozen=True, slots=True)
class Tended:
    """What a step of the upkeep did. `failed` says why one could not: the table is as good as before."""

    merged: int = 0
    files_removed: int = 0
    entries_removed: int = 0
    failed: str | None = None

    def __bool__(self) -> bool:
        return self != Tended()


class DeltaWriter:
    """`indexed` names the columns whose minimum and maximum are kept for each file: those that reads filter by.

    `needed` names those in which every row has something: one that has nothing there is damage.
    """

    def __init__(
        self,
        uri: str,
        schema: pa.Schema,
        *,
        storage_options: Mapping[str, str] | None = None,
        indexed: Sequence[str] = (),
        needed: Sequence[str] = (),
        upkeep: Upkeep | None = None,
    ) -> None:
        self.uri = uri
        self.schema = schema
        self.upkeep = upkeep or Upkeep()
        self._options = for_table(uri, storage_options or {})
        self._log = DeltaLog(uri, self._options)
        self._indexed, self._needed = tuple(indexed), tuple(needed)
        self.table = self._open(self._create)
        self._files = TableFiles(uri, self._options)
        #: what each application reached, in the snapshot at hand
        self._reached: dict[str, int | None] = {}
        #: what it reached when this writer first saw it, or by this writer since: nobody else may move it
        self._held: dict[str, int | None] = {}
        self._tended = -self.upkeep.small_files
        self._trimmed = -self.upkeep.log_entries
        self._vacuumed = -self.upkeep.vacuum_every

    # --- opening ---

    def _open(self, absent: Callable[[], DeltaTable]) -> DeltaTable:
        try:
            table = self._sound(absent)
            self._check(table)
        except OSError as error:
            raise StoreError(f"{self.uri} cannot be reached: {words_of(error)}") from error
        return table

    def _sound(self, absent: Callable[[], DeltaTable]) -> DeltaTable:
        try:
            table = self._load()
        except TableNotFoundError:
            table = absent()
        except DeltaError as error:
            table = self._recover(error)
        if lost := self._log.lost_commits():
            log.warning("%s: the last commits %s are empty, as a power cut leaves them: not done", self.uri, lost)
            table.create_checkpoint()
        return table

    def _load(self) -> DeltaTable:
        return DeltaTable(self.uri, storage_options=self._options)

    def _create(self) -> DeltaTable:
        try:
            DeltaTable.create(
                self.uri, self.schema, mode="ignore", configuration=self._properties(), storage_options=self._options
            )
        except DeltaError as error:
            try:
                return self._load()  # somebody else made it meanwhile
            except DeltaError:
                raise StoreBroken(f"{self.uri} cannot be made: {words_of(error)}") from error
        return self._load()

    def _recover(self, error: DeltaError) -> DeltaTable:
        """Without the newest commits if they are torn, and the checkpoints that cannot be read, if that helps; once."""
        if dropped := self._log.mend():
            try:
                table = self._load()
            except DeltaError as still:
                error = still
            else:
                log.warning("%s: %s could not be read; opened from the entries before", self.uri, ", ".join(dropped))
                table.create_checkpoint()
                return table
        raise StoreBroken(f"{self.uri} cannot be opened: {self._log.damage()} ({words_of(error)})") from error

    def _properties(self) -> dict[str, str]:
        properties = {
            "delta.checkpointInterval": str(self.upkeep.checkpoint_every),
            "delta.deletedFileRetentionDuration": f"interval {self.upkeep.keep_hours} hours",
            "delta.enableExpiredLogCleanup": "false",
        }
        if local_folder(self.uri) is None:
            properties["delta.logRetentionDuration"] = "interval 1 days"
        return properties | ({"delta.dataSkippingStatsColumns": ",".join(self._indexed)} if self._indexed else {})

    def _check(self, table: DeltaTable) -> None:
        """Refuses a table that is not ours; sets the properties that it lacks."""
        present = table.metadata().configuration
        if FORGETS in present:
            raise ConfigError(f"{self.uri} would forget which batches are done: take {FORGETS} from its properties")
        theirs = {field.name: field for field in table.schema().fields}
        ours = Schema.from_arrow(self.schema).fields
        if wrong := [field.name for field in ours if field.name in theirs and theirs[field.name].type != field.type]:
            raise ConfigError(f"{self.uri} has another type in {', '.join(wrong)}: is it the table you mean?")
        if missing := [field.name for field in ours if field.name not in theirs]:
            raise ConfigError(f"{self.uri} has no column {', '.join(missing)}: is it the table you mean?")
        if lacking := {name: value for name, value in self._properties().items() if name not in present}:
            table.alter.set_table_properties(lacking)

    # --- reading ---

    def reached(self, app: str) -> int | None:
        """The newest version `app` committed, in the snapshot at hand."""
        if app not in self._reached:
            found = self._look_up(app)
            self._reached[app] = found
            self._held.setdefault(app, found)
        return self._reached[app]

    def _look_up(self, app: str) -> int | None:
        try:
            return self.table.transaction_version(app)
        except (DeltaError, OSError):  # it is read from the log, and the entries of an old snapshot may be gone
            self.refresh()
        try:
            return self.table.transaction_version(app)
        except (DeltaError, OSError) as error:
            raise StoreError(f"{self.uri} cannot be read now: {words_of(error)}") from error

    def refresh(self) -> None:
        """See what others committed."""
        self._reached.clear()
        try:
            self.table.update_incremental()
        except (DeltaError, OSError):
            self.table = self._open(self._gone)

    def _gone(self) -> DeltaTable:
        raise StoreBroken(f"{self.uri} was there and is gone: take it from a backup, or start again to begin a new one")

    def read(self, columns: Sequence[str] | None = None, filters: Filters | None = None) -> pa.Table:
        """The rows of the snapshot at hand; of the newest, if files of that one are gone.

        `StoreBroken` if they are damaged, `StoreError` if they cannot be read now.
        """
        chosen = self.schema.names if columns is None else columns
        return self._insist(lambda: self._sound_rows(self._files.rows(self.table, chosen, filters)))

    def reduce(
        self, step: Callable[[T, pa.Table], T], start: T, columns: Sequence[str], filters: Filters | None = None
    ) -> T:
        """Fold the rows of one file after the other: for more than fits into memory. Fails as `read` does."""

        def fold() -> T:
            folded = start
            for part in self._files.parts(self.table, columns, filters):
                folded = step(folded, self._sound_rows(part))
            return folded

        return self._insist(fold)

    def greatest(self, column: str) -> int:
        """The greatest number in an indexed column, by what the table says of its files; 0 if it has no rows."""
        files = pa.table(self.table.get_add_actions(flatten=True))
        name = f"max.{column}"
        if name not in files.column_names or files[name].null_count:  # a file of which nothing is said is read
            return int(pc.max(self.read([column])[column]).as_py() or 0)
        return int(pc.max(files[name]).as_py() or 0)

    def _insist(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except FileNotFoundError:
            self.refresh()
        except UNREAD:
            pass  # once more: what is said of it below must be true of the table, not of one moment
        try:
            return read()
        except UNREAD as error:
            raise self._why_unread(error) from error

    def _sound_rows(self, rows: pa.Table) -> pa.Table:
        if why := fault_of(rows, self._needed):
            raise UnsoundRows(why)
        return rows

    def _why_unread(self, error: BaseException) -> StoreError:
        try:
            damage = damaged_file(self.table, self._files, self._needed)
        except (DeltaError, OSError) as unreachable:
            return StoreError(f"{self.uri} cannot be read now: {words_of(unreachable)}")
        if damage is None and not isinstance(error, UnsoundRows):
            return StoreError(f"{self.uri} could not be read ({words_of(error)}), and each of its files can")
        return StoreBroken(
            f"{self.uri}: {damage or words_of(error)}. Take the table from a backup, or move it away; "
            f"if a file is gone, DeltaTable({self.uri!r}).repair() goes on without its rows"
        )

    # --- writing ---

    def append(
        self,
        rows: pa.Table,
        *,
        app: str | None = None,
        version: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        """Add rows in one commit; False if `app` reached `version` already, and nothing was written.

        `metadata` is for people: the history of the table shows it. If `app` was moved by somebody else since this
        writer first saw it, that is a `ConflictError`; commits under other names, and merges, stand in nobody's way.
        """
        if (app is None) != (version is None):
            raise ValueError("app and version belong together")
        transactions = []
        if app is not None and version is not None:
            if version < 0:
                raise ValueError("versions count from zero")
            reached = self._hold(app)
            if reached is not None and reached >= version:
                return False
            transactions = [Transaction(app, version)]
        for _ in range(ATTEMPTS):
            error = self._commit(rows, "append", metadata, transactions)
            if error is None:
                if app is not None:
                    self._reached[app] = self._held[app] = version
                return True
            if app is not None:
                self._hold(app)
        raise ConflictError(f"{self.uri}: a commit was refused {ATTEMPTS} times: {words_of(error)}") from error

    def _hold(self, app: str) -> int | None:
        """What `app` reached, by this writer and nobody else."""
        seen, version = app in self._held, self.table.version()
        reached = self.reached(app)
        if reached != self._held[app] or (not seen and self.table.version() != version):
            self._held[app] = TAKEN
            raise ConflictError(
                f"somebody else writes {self.uri} as {app}, or did since it was opened here: is another one running?"
            )
        return reached

    def replace(self, fold: Callable[[pa.Table], pa.Table], *, metadata: Mapping[str, str] | None = None) -> None:
        """Write the table anew, in one commit, as `fold` makes it of what it holds; again if somebody appended."""
        for _ in range(ATTEMPTS):
            # with retries of its own deltalake would leave both the new rows and files a merge made meanwhile
            error = self._commit(fold(self.read()), "overwrite", metadata, [], retries=0)
            if error is None:
                return
        raise ConflictError(f"{self.uri} changes too quickly to be written anew: {words_of(error)}") from error

    def _commit(
        self,
        rows: pa.Table,
        mode: Literal["append", "overwrite"],
        metadata: Mapping[str, str] | None,
        transactions: list[Transaction],
        retries: int | None = None,
    ) -> Exception | None:
        """Why it was not committed, the snapshot then being the newest; None if it was."""
        mark = new_id()
        since = self.table.version()
        properties = CommitProperties(
            custom_metadata={**(metadata or {}), "commit": mark},
            app_transactions=transactions,
            max_commit_retries=retries,
        )
        try:
            write_deltalake(self.table, rows, mode=mode, commit_properties=properties, post_commithook_properties=HOOKS)
        except (DeltaError, OSError) as error:
            try:
                self.refresh()
            except StoreError as unseen:
                raise OutcomeUnknown(f"{self.uri}: it may be committed or not: {unseen}") from error
            # the commit may have been made, and what follows it (a checkpoint) failed
            newer = self.table.version() - since
            if newer > 0 and any(entry.get("commit") == mark for entry in self.table.history(newer)):
                log.warning("%s: committed, but not what follows a commit: %s", self.uri, words_of(error))
                return None
            if not newer:
                raise StoreError(f"{self.uri} cannot be written: {words_of(error)}") from error
            return error
        return None

    # --- upkeep ---

    def tend(self) -> Tended:
        """One step of the upkeep, if one is due."""
        version = self.table.version()
        if version - self._tended < self.upkeep.small_files:
            return Tended()
        self._reached.clear()  # a merge looks at what others committed
        try:
            for step in (self._merge, self._vacuum, self._trim):
                if done := step():
                    return done
        except (DeltaError, OSError) as error:
            self._tended = version
            log.warning("%s could not be tended: %s", self.uri, words_of(error))
            return Tended(failed=words_of(error))
        self._tended = version
        return Tended()

    def _merge(self) -> Tended:
        present = pa.table(self.table.get_add_actions(flatten=True))["size_bytes"].to_pylist()
        limit, grown = self.upkeep.small_files, 0
        for size in self.upkeep.sizes:
            # a merged file ends somewhat below the size it aimed at; from half of it on it counts for the next
            if sum(grown <= each < size // 2 for each in present) >= limit:
                done = self.table.optimize.compact(
                    target_size=size,
                    max_concurrent_tasks=1,
                    min_commit_interval=10,
                    post_commithook_properties=HOOKS,
                )
                return Tended(merged=done["numFilesRemoved"])
            limit, grown = self.upkeep.merged_files, size // 2
        return Tended()

    def _vacuum(self) -> Tended:
        if time.monotonic() - self._vacuumed < self.upkeep.vacuum_every:
            return Tended()
        self._vacuumed = time.monotonic()
        # each vacuum is two commits, so there is none without need; a full one finds what a killed writer left
        if not self._vacuum_now(dry_run=True):
            return Tended()
        return Tended(files_removed=len(self._vacuum_now(dry_run=False)))

    def _vacuum_now(self, *, dry_run: bool) -> list[str]:
        return self.table.vacuum(
            self.upkeep.keep_hours,
            dry_run,
            enforce_retention_duration=False,
            full=True,
            post_commithook_properties=HOOKS,
        )

    def _trim(self) -> Tended:
        version = self.table.version()
        if version - self._trimmed < self.upkeep.checkpoint_every:
            return Tended()
        self._trimmed = version
        if local_folder(self.uri) is None:
            self.table.cleanup_metadata()  # by age, see the properties
            return Tended()
        return Tended(entries_removed=self._log.trim(keep=self.upkeep.log_entries))
