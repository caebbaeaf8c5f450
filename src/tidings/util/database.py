"""A SQLite database of this host: one writer thread with group commit, readers that cannot write, typed failures.

    callers of one turn -> queue -> writer: BEGIN IMMEDIATE, every job that waits, COMMIT (synced) -> all are answered

Nobody is answered before the commit that holds its job has returned. A job that raises is undone alone: its group is
done again, each job in a savepoint of its own. A commit that fails fails all of it, leaves nothing, and the next job
tries anew, so that a full disk needs no restart. Nobody else writes or checkpoints: a lock of the kernel beside the
file keeps other processes out. A file that is damaged, not ours or newer than this code is refused by name and never
replaced. What a job does is not known here.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from tidings.errors import (
    ConfigError,
    SpaceBusy,
    StoreBroken,
    StoreBusy,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTooNew,
)
from tidings.util.failpoints import reach
from tidings.util.private_files import check_private, locked, private_dir

log = logging.getLogger(__name__)
T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]
#: opens a file in a mode of SQLite's ("rw", "ro"); `tests/tools/power.py` has another one
Connect = Callable[[Path, str], sqlite3.Connection]

#: jobs in one commit
GROUP = 256
BUSY_MS = 5_000
CACHED_STATEMENTS = 256
#: never `rwc`: a file that is gone must not be made anew by opening it
WRITER_MODE = "rw"
#: a file up to this size is checked whole when it is opened
CHECKED_BYTES = 64 * 1024 * 1024
CLOSE_PATIENCE = 10.0
#: steps of SQLite's machine after which a long statement looks whether the database is being closed
LOOK_UP_EVERY = 100_000
#: bytes that are written to find out whether anything can be
TRIAL = 65_536
#: how every commit reaches the disk before anybody is answered
DURABILITY = ("journal_mode = WAL", "synchronous = FULL", "journal_size_limit = 67108864")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: what SQLite says of a statement of ours if the schema in the file is not the one we wrote, though its pages are whole
_NOT_OUR_SCHEMA = re.compile(
    r"^(no such |unknown |malformed |could not decode |error in |wrong number of arguments|unrecognized token|near \")"
    r"|has no column named|incomplete input",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Schema:
    """What a new file is made with. `application_id` tells our files from those of other programs."""

    application_id: int
    sql: str
    version: int = 1

    def check_version(self, path: Path, found: int) -> None:
        """Refuses a file that a newer Tidings wrote."""
        if found > self.version:
            raise StoreTooNew(
                f"{path} has version {found}, this Tidings knows {self.version}: use the Tidings that wrote it, "
                "or set TIDINGS_HOME to another directory"
            )


class _Job(Generic[T]):
    """A job on its way. `loop` is where its future lives; None for one that a thread waits for."""

    __slots__ = ("answered", "error", "future", "loop", "run", "value")

    def __init__(self, run: Job[T], future: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        self.run, self.future, self.loop = run, future, loop
        self.value: T | None = None
        self.error: BaseException | None = None
        self.answered = False

    def answer(self) -> None:
        if self.future.done():  # the caller went away; its job was done all the same
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


def means_damage(error: BaseException) -> bool:
    """Does this say that the file does not hold what was written to it? Statements are ours and known to be good, so
    one that names what the schema does not have met a schema that was changed, and text that is no UTF-8 is not ours.
    """
    if isinstance(error, UnicodeDecodeError | json.JSONDecodeError):
        return True
    if not isinstance(error, sqlite3.Error):
        return False
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return True
    return code in (0, sqlite3.SQLITE_ERROR) and _NOT_OUR_SCHEMA.search(str(error)) is not None


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection for any thread that begins no transaction by itself."""
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=CACHED_STATEMENTS,
    )


class Database:
    """`write` and `read` take a job, a function of a connection. Opening it blocks, and is done in `__init__`."""

    def __init__(
        self,
        path: Path,
        schema: Schema,
        *,
        clock: Callable[[], float] = time.time,
        readers: int = 2,
        connect: Connect = connect,
    ) -> None:
        self.path, self.clock = path, clock
        self._connect = connect
        #: commits and jobs done since this was opened
        self.commits = self.jobs = 0
        self._schema = schema
        self._queue: SimpleQueue[list[_Job[Any]] | None] = SimpleQueue()
        self._gathered: dict[asyncio.AbstractEventLoop, list[_Job[Any]]] = {}
        self._gate = threading.Lock()
        self._closed = self._abandoned = self._suspect = False
        self._running: list[_Job[Any]] = []
        self._held = ExitStack()
        with ExitStack() as opening:
            opening.enter_context(self._held)
            self._lock()
            self._connection: sqlite3.Connection | None = self._opened()
            opening.pop_all()
        self._own_readers = _Readers(path, readers, self._failure, connect)
        self._writer = threading.Thread(target=self._write_until_closed, name=f"{path.name} writer", daemon=True)
        self._writer.start()

    def now(self) -> int:
        """Milliseconds of this database's clock."""
        return int(self.clock() * 1000)

    async def write(self, job: Job[T]) -> T:
        """What the job returned, once it is on disk.

        It runs in the writer thread, perhaps twice, and must do nothing but use its connection and not end the
        transaction.
        """
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[T] = loop.create_future()
        self._gather(_Job(job, waiting, loop), loop)
        return await waiting

    def write_blocking(self, job: Job[T], timeout: float | None = None) -> T:
        """The same for a thread without a loop."""
        waiting: Future[T] = Future()
        self._put(_Job(job, waiting, None))
        return waiting.result(timeout)

    async def read(self, job: Job[T]) -> T:
        """What the job read, in one snapshot, on a connection that cannot write."""
        return await asyncio.wrap_future(self._submit_read(job))

    def read_blocking(self, job: Job[T], timeout: float | None = None) -> T:
        return self._submit_read(job).result(timeout)

    async def try_to_write(self) -> None:
        """Raises what a caller that wants to write now would get; leaves nothing in the file but room."""
        await self.write(_grow_and_shrink)
        await asyncio.to_thread(self._write_beside)

    def close(self, patience: float = CLOSE_PATIENCE) -> None:
        """Do what is queued, for at most `patience` seconds; whatever is left fails as StoreClosed."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
            for jobs in self._gathered.values():
                self._queue.put(jobs)
            self._gathered.clear()
        self._own_readers.close()  # first: the writer, closed last, leaves one file that can be copied
        self._queue.put(None)
        self._writer.join(patience)
        if self._writer.is_alive():
            self._abandon()
            self._writer.join(1.0)
        if self._writer.is_alive():  # a job that does not end: it may still commit, so the lock stays
            self._fail_all(self._running, self._closing_words("it was being done: ask what became of it"))
            return
        self._held.close()

    # ------------------------------------------------------------------------------------------------- the writer

    def _put(self, job: _Job[Any]) -> None:
        with self._gate:
            if self._closed:
                raise self._closing_words("nothing was done")
            self._queue.put([job])

    def _gather(self, job: _Job[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Queue it with all that is asked for in this turn of its loop.

        Those who were answered together ask together again. If the first of them woke the writer, it would commit one
        job while the others are being made, and both threads would fight for the interpreter.
        """
        with self._gate:
            if self._closed:
                raise self._closing_words("nothing was done")
            gathered = self._gathered.get(loop)
            if gathered is not None:
                gathered.append(job)
                return
            self._gathered[loop] = [job]
        loop.call_soon(self._queue_gathered, loop)

    def _queue_gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._gate:
            jobs = self._gathered.pop(loop, None)
            if jobs is not None:
                self._queue.put(jobs)

    def _submit_read(self, job: Job[T]) -> Future[T]:
        with self._gate:
            if self._closed:
                raise self._closing_words("nothing was read")
            return self._own_readers.submit(job)

    def _closing_words(self, consequence: str) -> StoreClosed:
        return StoreClosed(f"{self.path} is closed, {consequence}; ask again when the host runs")

    def _abandon(self) -> None:
        self._abandoned = True
        while left := self._queued([]):
            self._fail_all(left, self._closing_words("nothing was done"))

    def _write_until_closed(self) -> None:
        while (first := self._queue.get()) is not None:
            self._running = self._queued(first)
            for start in range(0, len(self._running), GROUP):
                self._do(self._running[start : start + GROUP])
        if self._connection is not None:
            self._close_writer(self._connection)

    def _close_writer(self, connection: sqlite3.Connection) -> None:
        # Boundary: what is not in the file itself is in its log, and found there.
        with suppress(sqlite3.Error):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
        connection.close()

    def _queued(self, jobs: list[_Job[Any]]) -> list[_Job[Any]]:
        """These, and those that wait behind them: enough for one commit."""
        with suppress(Empty):
            while len(jobs) < GROUP:
                more = self._queue.get_nowait()
                if more is None:  # the end of the queue: seen again by whoever waits for it
                    self._queue.put(None)
                    break
                jobs = jobs + more
        return jobs

    def _do(self, group: list[_Job[Any]]) -> None:
        """Do a group in as few transactions as it can be: one, unless a job fails or SQLite itself gave one up."""
        hopeful = len(group) > 1
        while group:
            if self._abandoned:
                self._fail_all(group, self._closing_words("nothing was done"))
                return
            try:
                connection = self._begun()
            except Exception as error:  # noqa: BLE001  it belongs to every caller; the next group tries anew
                self._fail_all(group, self._failure(error))
                return
            if hopeful:
                done = self._do_all(connection, group)
                self._end(connection, group[:done])
                group, hopeful = group[done:], bool(done)
                continue
            taken = self._do_each(connection, group)
            again = self._innocent(connection, group[:taken])
            self._end(connection, [job for job in group[:taken] if job not in again])
            group = again + group[taken:]

    def _do_all(self, connection: sqlite3.Connection, group: list[_Job[Any]]) -> int:
        """Do a group in which nothing fails, as in most: all of it, or as far as there was a transaction.

        0: a job failed, everything was undone, and each needs a savepoint.
        """
        try:
            for number, job in enumerate(group, 1):
                job.value = job.run(connection)
                if not connection.in_transaction:
                    return number
        except Exception as error:  # noqa: BLE001  it is met again when the job is done alone
            log.debug("a group of %d is done one by one: %s", len(group), error)
            with suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            return 0
        return len(group)

    def _do_each(self, connection: sqlite3.Connection, group: list[_Job[Any]]) -> int:
        """How many were done until the transaction was gone, or all."""
        for number, job in enumerate(group, 1):
            self._do_one(connection, job, alone=len(group) == 1)
            if not connection.in_transaction:
                return number
        return len(group)

    def _innocent(self, connection: sqlite3.Connection, done: list[_Job[Any]]) -> list[_Job[Any]]:
        """Jobs that were undone because SQLite gave the transaction up in a later one (a disk that was full for it)."""
        if connection.in_transaction or not isinstance(done[-1].error, StoreError):
            return []
        return [job for job in done[:-1] if job.error is None]

    def _begun(self) -> sqlite3.Connection:
        """A transaction, on a new connection if the one we have is of no use."""
        if self._connection is not None and not self._suspect:
            with suppress(sqlite3.Error):
                self._connection.execute("BEGIN IMMEDIATE")
                return self._connection
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._suspect = False
        self._connection = self._opened(again=True)
        self._connection.execute("BEGIN IMMEDIATE")
        return self._connection

    def _do_one(self, connection: sqlite3.Connection, job: _Job[Any], alone: bool) -> None:
        """One job; what it raises is its caller's and undoes it alone."""
        try:
            if not alone:
                connection.execute("SAVEPOINT job")
            job.value = job.run(connection)
            if not alone and connection.in_transaction:
                connection.execute("RELEASE job")
        except Exception as error:  # noqa: BLE001  it belongs to the caller, who gets it
            job.error = self._failure(error)
            # A connection that was opened read-only stays so. After other failures it is kept: opening anew would
            # read a commit that was written, not synced, and reported as failed.
            self._suspect = self._suspect or isinstance(job.error, StoreReadOnly | StoreBroken)
            if connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._undo_one(connection, alone)

    def _undo_one(self, connection: sqlite3.Connection, alone: bool) -> None:
        if alone:
            connection.execute("ROLLBACK")
        else:
            connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")

    def _end(self, connection: sqlite3.Connection, group: list[_Job[Any]]) -> None:
        """Commit, then answer. Without a transaction to commit nothing of the group is kept."""
        if not group:
            return
        try:
            if connection.in_transaction:
                reach("store.before_commit")
                connection.execute("COMMIT")
                reach("store.after_commit")
                self.commits += 1
            else:
                self._nothing_kept(group)
        except Exception as error:  # noqa: BLE001  it belongs to every caller of the group
            failed = self._failure(error)
            with suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            for job in group:
                job.error = job.error or failed
        self.jobs += len(group)
        self._answer(group)

    def _nothing_kept(self, group: list[_Job[Any]]) -> None:
        for job in group:
            job.error = job.error or StoreError(
                f"{self.path}: a job ended the transaction it shares, so nothing of it is certain; look and ask again"
            )

    def _fail_all(self, jobs: list[_Job[Any]], error: BaseException) -> None:
        for job in jobs:
            job.error = error
        self._answer(jobs)

    def _answer(self, jobs: list[_Job[Any]]) -> None:
        """Wake each loop once for all of its callers."""
        loops: dict[asyncio.AbstractEventLoop, list[_Job[Any]]] = {}
        for job in jobs:
            if job.answered:
                continue
            job.answered = True
            if job.loop is None:
                job.answer()
            else:
                loops.setdefault(job.loop, []).append(job)
        for loop, theirs in loops.items():
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_answer_each, theirs)

    # ------------------------------------------------------------------------------------------- opening the file

    def _lock(self) -> None:
        try:
            private_dir(self.path.parent)
            self._held.enter_context(locked(self.path.with_name(f"{self.path.name}.lock"), f"use {self.path}"))
        except SpaceBusy as error:
            raise StoreBusy(f"{error}: one process uses it at a time; `tidings host status` shows which") from error
        except (ConfigError, OSError) as error:
            cause = error.__cause__ if isinstance(error, ConfigError) else error
            if isinstance(cause, OSError) and cause.errno in (*_NO_ROOM, errno.EROFS):
                raise self._disk_failure(cause) from error
            raise

    def _opened(self, *, again: bool = False) -> sqlite3.Connection:
        """A connection that may write, its schema ours. `again`: the file was there and must still be."""
        if not again:
            self._create_if_missing()
        try:
            check_private(self.path)
            connection = self._connect(self.path, WRITER_MODE)
        except sqlite3.Error as error:
            raise self._failure(error) from error
        try:
            self._check_or_create_tables(connection)
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.Error | UnicodeDecodeError):
                raise self._opening_failure(error) from error
            raise
        return connection

    def _opening_failure(self, error: sqlite3.Error | UnicodeDecodeError) -> BaseException:
        """What is done while opening works on every file that is whole, so what nobody can name is damage."""
        found = self._failure(error)
        if found is not error or getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_NOMEM:
            return found
        return self._broken(str(error))

    def _create_if_missing(self) -> None:
        if self.path.exists():
            return
        self._check_no_log_is_left()
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except OSError as error:
            raise self._disk_failure(error) from error

    def _check_no_log_is_left(self) -> None:
        """A log that holds something belongs to a file that should be here. Whoever looked into a file that nobody had
        open left an empty one, which goes: a new file must not share it with a look that still goes on."""
        log_of_it = self.path.with_name(f"{self.path.name}-wal")
        if not log_of_it.exists():
            return
        if log_of_it.stat().st_size:
            raise StoreBroken(f"{self.path} is gone but its log is there: put the file back, or move {log_of_it} away")
        for left in (log_of_it, self.path.with_name(f"{self.path.name}-shm")):
            left.unlink(missing_ok=True)

    def _check_or_create_tables(self, connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        connection.set_progress_handler(lambda: self._abandoned, LOOK_UP_EVERY)
        version = self._found_version(connection)
        self._schema.check_version(self.path, version)
        for setting in DURABILITY:
            connection.execute(f"PRAGMA {setting}")
        if not version:
            self._create_tables(connection)
        connection.execute("PRAGMA foreign_keys = ON")

    def _found_version(self, connection: sqlite3.Connection) -> int:
        """The version of a file that is whole and ours; 0 for an empty one."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != self._schema.application_id and (application or tables):
            raise StoreBroken(f"{self.path} is a database of another program: move it away and start again")
        if self.path.stat().st_size <= CHECKED_BYTES:
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if said != "ok":
                raise self._broken(said)
        return int(version)

    def _create_tables(self, connection: sqlite3.Connection) -> None:
        """All tables and the version, or neither."""
        schema = self._schema
        mark = f"PRAGMA user_version = {schema.version};\nPRAGMA application_id = {schema.application_id};"
        try:
            connection.executescript(f"BEGIN IMMEDIATE;\n{schema.sql};\n{mark}\nCOMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    # --------------------------------------------------------------------------------------------------- failures

    def _failure(self, error: BaseException) -> BaseException:
        """An error of SQLite by what it means for the file; what only concerns a statement stays as it is."""
        found: StoreError | None = None
        if means_damage(error):
            found = self._broken(str(error))
        elif isinstance(error, sqlite3.Error):
            found = self._meaning(getattr(error, "sqlite_errorcode", 0) & 0xFF, error)
        if found is not None:
            found.__cause__ = error
        return found or error

    def _meaning(self, code: int, error: sqlite3.Error) -> StoreError | None:
        if code == sqlite3.SQLITE_FULL:
            return self._full()
        if code == sqlite3.SQLITE_READONLY:
            return self._read_only()
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreBusy(f"{self.path} is held by a program that did not ask: end it and ask again")
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            return self._why_not_written(error)
        if code == sqlite3.SQLITE_INTERRUPT:
            return self._closing_words("nothing was done")
        return None

    def _full(self) -> StoreFull:
        return StoreFull(f"no room to write {self.path}: make room on that disk and ask again; nothing was changed")

    def _read_only(self) -> StoreReadOnly:
        return StoreReadOnly(f"{self.path} cannot be written: make it and its disk writable and ask again")

    def _broken(self, said: str) -> StoreBroken:
        said = said.replace("*** in database main ***", "").strip()
        return StoreBroken(
            f"{self.path} is damaged ({said}): it was left as it is; restore a copy, or save what can be read with "
            f"`sqlite3 {self.path} .recover`"
        )

    def _why_not_written(self, error: Exception) -> StoreError:
        """SQLite does not tell a quota from a failing disk, so ask the disk: is a file in this directory written?"""
        if not self.path.exists():
            return StoreBroken(f"{self.path} is gone: put it back or restore a copy; it was not made anew")
        try:
            self._write_beside()
        except StoreError as refused:
            return refused
        return StoreError(f"{self.path} could not be used ({error}): look after the disk and ask again")

    def _write_beside(self) -> None:
        try:
            with tempfile.TemporaryFile(dir=self.path.parent) as probe:
                probe.write(bytes(TRIAL))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as refused:
            raise self._disk_failure(refused) from refused

    def _disk_failure(self, error: OSError) -> StoreError:
        if error.errno in _NO_ROOM:
            return self._full()
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return self._read_only()
        return StoreError(f"{self.path} could not be used ({error.strerror}): look after the disk and ask again")


def _grow_and_shrink(connection: sqlite3.Connection) -> None:
    """Needs as much room as a message, in the file and in its log; what free pages can take needs none."""
    connection.execute("CREATE TABLE trial (content BLOB)").close()
    connection.execute("INSERT INTO trial VALUES (zeroblob(?))", (TRIAL,)).close()
    connection.execute("DROP TABLE trial").close()


def _answer_each(jobs: list[_Job[Any]]) -> None:
    for job in jobs:
        job.answer()


class _Readers:
    """A few threads with a connection each that cannot write."""

    def __init__(
        self, path: Path, count: int, failure: Callable[[BaseException], BaseException], connect: Connect
    ) -> None:
        self._path, self._failure, self._connect = path, failure, connect
        self._mine = threading.local()
        self._closed = False
        self._connections: list[sqlite3.Connection] = []
        self._asked: set[Future[Any]] = set()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=f"{path.name} reader")

    def submit(self, job: Job[T]) -> Future[T]:
        asked = self._threads.submit(self._read, job)
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        return asked

    def close(self, patience: float = 1.0) -> None:
        self._closed = True
        _, stuck = wait(set(self._asked), timeout=patience)
        self._threads.shutdown(wait=not stuck)
        if not stuck:
            for connection in self._connections:
                connection.close()

    def _read(self, job: Job[T]) -> T:
        if self._closed:
            raise StoreClosed(f"{self._path} is closed, nothing was read; ask again when the host runs")
        try:
            connection = self._connected()
            connection.execute("BEGIN")
            try:
                return job(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except (sqlite3.Error, ValueError) as error:
            raise self._failure(error) from error

    def _connected(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._connect(self._path, "ro")
            connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
            connection.execute("PRAGMA query_only = ON")
            connection.set_progress_handler(lambda: self._closed, LOOK_UP_EVERY)
            self._mine.connection = connection
            self._connections.append(connection)
        return connection
