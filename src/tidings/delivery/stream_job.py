"""A job that reads the log of a space as a Spark query: under a lease, from a checkpoint, again after whatever failed.

A subclass says what a life of the query begins with (`_open`), what a batch does (`_deliver`) and what is done between
batches (`_between`). Here is what every such job needs: connections and the lease with its beat, a checkpoint that may
be damaged or of a log that went backwards since, a query that is watched, and the restart. A lost broker connection or
a failed batch starts the query again from its checkpoint; a lost lease ends the job, and so does a Spark that is gone.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from tidings.delivery.deliverer import OLD_LOG
from tidings.delivery.folders import CheckpointFolder, folder_at
from tidings.delivery.range_encoder import SMALL_RECORDS
from tidings.delivery.session import gone
from tidings.delivery.source import NatsSource, mark_of, offset_at, regressed
from tidings.delivery.storage import below
from tidings.delivery.stream_reader import StreamLocation, StreamReader
from tidings.errors import LeaseHeld, LeaseLost, OutcomeUnknown, TidingsError, UnhealthyError, UnreachableError
from tidings.nats.jetstream_blocking import BlockingJetStream, WorkerConnection
from tidings.server.lease import DeliverLease
from tidings.util.backoff import Backoff
from tidings.util.private_files import read_private
from tidings.wire.message import new_id
from tidings.wire.subjects import Subjects

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidings.delivery.broker_state import DeliverFloor

log = logging.getLogger(__name__)
RESTART = Backoff(1.0, 3.0)
#: a task for fewer records and fewer bytes costs more than it saves, and every task ends the blocks of its channels
SMALLEST_PART = 2_000
SMALLEST_PART_BYTES = 1024 * 1024
#: seconds between two beats of the lease; without an answer of the JVM for `JVM_SILENT` nobody may say that delivery
#: runs, and after `JVM_STUCK` it is not waited for any more
BEAT_EVERY, JVM_SILENT, JVM_STUCK = 2.0, 15.0, 60.0
#: in this order Spark writes a checkpoint: what a batch will be, then that it is done
CHECKPOINT_LOGS, CHECKPOINT_VERSION = ("offsets", "commits"), "v1"
ATTEMPTS, IDENTITY = "tidings-attempts", "tidings-id"


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Where a job works. Every driver of the space must reach `lake`, and `checkpoint` if both are folders.

    `storage`: what deltalake needs to open the tables. `creds` is a file of the driver; with `carry_creds` what it
    holds travels with each task, otherwise workers open it by its path.
    """

    space: str
    space_id: str
    anchor_key: str
    url: str
    creds: str
    checkpoint: str
    lake: str
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)
    carry_creds: bool = False
    max_records: int = 30_000
    max_bytes: int = 64 * 1024 * 1024
    small_records: int = SMALL_RECORDS
    wait_ms: int = 1_000
    pay_every: float = 1.0
    look_every: float = 15.0
    lease_ttl: float = 3.0


@dataclass
class Tally:
    """What a job has done since it started, for `status` and for agents."""

    batches: int = 0
    messages: int = 0
    deliveries: int = 0
    frames: int = 0
    poison: int = 0
    void: int = 0
    missing: int = 0
    last_batch_ms: float = 0.0
    last_error: str | None = None


class SparkEnded(UnhealthyError):
    """There is no Spark any more to run a query: the process must end, and whoever keeps it starts another."""


class StreamJob(ABC):
    """One run of a job. `run` returns when `stop` was called, or raises what ended it.

    `on_ready` is told when a query runs, `on_halt` when one ended that is tried again, and why, `on_stuck` that Spark
    does not answer and this process is of no use any more.
    """

    #: its connections, checkpoint and figures are called so
    name: str

    def __init__(
        self,
        spark: SparkSession,
        settings: JobSettings,
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_halt: Callable[[str], None] = lambda _why: None,
        on_stuck: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self.spark, self.settings = spark, settings
        self.subjects = Subjects(settings.space)
        self.tally = Tally()
        self.checkpoint = Checkpoint(folder_at(spark, below(settings.checkpoint, "spark")))
        #: a batch, a payment and a report exclude each other
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._on_ready, self._on_halt, self._on_stuck = on_ready, on_halt, on_stuck
        self._failure: BaseException | None = None
        #: the sequence after which a new checkpoint begins
        self.start = 0

    @abstractmethod
    def _open(self, life: ExitStack, lease: DeliverLease, reader: StreamReader) -> None:
        """Make ready for a query, with the lease; what must be closed at its end is pushed on `life`."""

    @abstractmethod
    def _deliver(self, frame: DataFrame, number: int) -> None:
        """A batch: what `frame` has, which the checkpoint calls `number`. In a thread of Spark's."""

    @abstractmethod
    def _between(self) -> None:
        """Every `pay_every` seconds while the query runs. A batch may run meanwhile."""

    def stop(self) -> None:
        self._stopping.set()

    @property
    def busy(self) -> bool:
        """Is a batch or a payment under way, so that the tally may still be behind the floor?"""
        return self._lock.locked()

    @property
    def has_worked(self) -> bool:
        return self.tally.batches > 0

    def run(self) -> None:
        self.spark.dataSource.register(NatsSource)
        delays = RESTART.delays(fresh_after=60)
        while not self._stopping.is_set():
            try:
                self._run_once()
            except (LeaseLost, LeaseHeld):
                raise
            except (TidingsError, OSError, PySparkException, Py4JError) as error:  # also: a worker could not read
                if why := gone(self.spark):
                    raise SparkEnded(why) from error
                self.tally.last_error = first_words(error)
                log.warning("starting again: %s", error)
                self._on_halt(self.tally.last_error)
                self._stopping.wait(next(delays))

    # --- one life of the query ---

    def _run_once(self) -> None:
        with ExitStack() as life:
            where = StreamLocation(
                self.settings.url, self.settings.creds, self.subjects.log_stream, f"{self.name}-read"
            )
            reader = life.enter_context(closing(StreamReader(where)))
            beats = self._js(life, "beat")
            lease = DeliverLease(beats, self.subjects, ttl=self.settings.lease_ttl, replicated=beats.replicated)
            lease.take()
            life.callback(_give_back, lease)
            beat = Heartbeat(lease, self._on_stuck)
            life.callback(beat.end)
            self._open(life, lease, reader)
            self._stream(beat)

    def _js(self, life: ExitStack, purpose: str) -> BlockingJetStream:
        """A connection of its own."""
        creds, name = Path(self.settings.creds), f"tidings-{self.name}-{purpose}"
        return life.enter_context(
            closing(BlockingJetStream(lambda: WorkerConnection.open(self.settings.url, creds, name=name)))
        )

    def _stream(self, beat: Heartbeat) -> None:
        limits = {"maxRecordsPerTrigger": self.settings.max_records, "maxBytesPerTrigger": self.settings.max_bytes}
        frame = (
            self.spark.readStream.format("nats")
            .options(**self.source_options(), **{name: str(limit) for name, limit in limits.items()})
            .option("start", str(self.start + 1))
            .option("missing", "rows")
            .option("waitMs", str(self.settings.wait_ms))
            .load()
        )
        query = (
            frame.writeStream.foreachBatch(self._batch)
            .option("checkpointLocation", self.checkpoint.folder.place)
            .start()
        )
        self._failure = None
        watchdog = beat.watchdog = JvmWatchdog(lambda: query.isActive)
        beat.say(delivers=True)
        self._on_ready()
        try:
            self._watch(query, beat)
        finally:
            watchdog.end()
            beat.say(delivers=False)
            query.stop()

    def source_options(self) -> dict[str, str]:
        """Where the log is read, and how it is cut: a batch as large as one may be has a task for every core."""
        settings, cores = self.settings, int(self.spark.sparkContext.defaultParallelism)
        return {
            "url": settings.url,
            **self._login(),
            "stream": self.subjects.log_stream,
            "partitionRecords": str(max(SMALLEST_PART, -(-settings.max_records // cores))),
            "partitionBytes": str(max(SMALLEST_PART_BYTES, -(-settings.max_bytes // cores))),
        }

    def _login(self) -> dict[str, str]:
        """Read anew for each life of the query: a credential that was renewed is the one that counts."""
        path = self.settings.creds
        return {"credsSecret": read_private(Path(path))} if self.settings.carry_creds else {"creds": path}

    def _watch(self, query: Any, beat: Heartbeat) -> None:
        """Until told to stop, the query or Spark ends, or the lease is gone."""
        last = 0.0
        while not self._stopping.wait(min(0.2, self.settings.pay_every)):
            beat.check()
            if not query.isActive:
                why = query.exception()
                raise self._failure or TidingsError(f"the query failed: {why}" if why else "the query was ended")
            if time.monotonic() - last >= self.settings.pay_every:
                self._between()
                last = time.monotonic()

    def _batch(self, frame: DataFrame, number: int) -> None:
        started = time.monotonic()
        try:
            with self._lock:
                self._deliver(frame, number)
                self.tally.batches += 1
                self.tally.last_batch_ms = (time.monotonic() - started) * 1_000
        except BaseException as error:
            self._failure = error  # Spark hands its caller only the text
            raise

    # --- the checkpoint, before a query ---

    def _say(self, words: str) -> None:
        """To operators, in the log and in `status`."""
        log.warning("%s", words)
        self.tally.last_error = words

    def _put_damaged_checkpoint_aside(self) -> None:
        """Spark would refuse it at every start. The floor and the ledger know how far the job is."""
        if (damage := self.checkpoint.damage()) is not None:
            self._say(f"the checkpoint could not be read ({damage}) and was put aside; delivery went on at its floor")
            self.checkpoint.retire()

    def _rewind(self, reader: StreamReader, floor: DeliverFloor) -> int | None:
        """If the log went backwards: a new checkpoint from where it still agrees. Answers where; None if it did not.

        Mailboxes and the floor may have gone with the log, to an earlier moment than the checkpoint's: then all that
        may be unread since comes again.
        """
        epoch, last = offset_at(reader, 0)["epoch"], reader.state().last
        offsets, known = self.checkpoint.offsets(), floor.read()
        went_back = known is not None and (known.get("epoch") != epoch or int(known["seq"]) > last)
        if offsets and not went_back:
            went_back = offsets[-1]["epoch"] != epoch or regressed(reader, offsets[-1]) is not None
        if not went_back:
            return None
        agreed = next((int(offset["seq"]) for offset in reversed(offsets) if agrees(reader, offset)), 0)
        reached = max([int(known["seq"]) if known else 0, *(int(offset["seq"]) for offset in offsets)])
        lost = (agreed + 1, reached) if 0 < agreed < reached else None  # delivered, and the log has other records there
        if known is not None:  # of whichever epoch: a steward that noticed it gave the log a new one
            agreed = min(agreed, floor.read_by_all())
        self._say(f"the log went backwards; delivery began again after {agreed}")
        self.checkpoint.retire()
        floor.rewind(agreed, f"{OLD_LOG}{epoch}", lost)
        return agreed


def _give_back(lease: DeliverLease) -> None:
    with suppress(LeaseLost, UnreachableError, OutcomeUnknown):  # nobody is there to hear it, or somebody else has it
        lease.release()


def first_words(error: Exception) -> str:
    """An error as one sentence: Spark's go on for pages, and those of a worker end with what matters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if line.startswith(("tidings.errors.", "tidings.delivery."))]
    return (own or lines or [type(error).__name__])[0][:500]


def agrees(reader: StreamReader, offset: Mapping[str, Any]) -> bool:
    """Is the record at the offset still the one it was?"""
    return bool(offset["seq"] == 0 or (offset["mark"] and mark_of(reader.at(offset["seq"])) == offset["mark"]))


class JvmWatchdog:
    """Ask until `end`; what asking raises ends the asking, and is for others to see.

    The JVM is asked in a thread of its own, because whoever asks a process that is stopped waits for ever. A long batch
    or collection of garbage is no silence: other threads of the JVM answer meanwhile.
    """

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._over = threading.Event()
        self._answered = time.monotonic()
        self._ended = False
        threading.Thread(target=self._run, name="jvm-watchdog", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._ask()
                self._answered = time.monotonic()
                self._over.wait(BEAT_EVERY)
        except Exception:  # noqa: BLE001  # boundary: a JVM that is gone is found by who uses it, with its reason
            self._ended = True

    @property
    def silent_for(self) -> float:
        """Seconds since the last answer; 0 once nobody asks."""
        return 0.0 if self._ended or self._over.is_set() else time.monotonic() - self._answered

    def end(self) -> None:
        """Nobody asks any more. A question without an answer is left to its thread."""
        self._over.set()


class Heartbeat:
    """Says that the holder of the lease lives, in a thread of its own: a long batch or payment must not look dead."""

    def __init__(self, lease: DeliverLease, on_stuck: Callable[[str], None] = lambda _why: None) -> None:
        self._lease = lease
        self._over = False
        self._due = threading.Event()
        self._delivers = False
        #: set while a query runs
        self.watchdog: JvmWatchdog | None = None
        self._on_stuck = on_stuck
        self._failure: TidingsError | None = None
        self._thread = threading.Thread(target=self._run, name="deliver-beat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._due.wait(self._lease.ttl / 3)
            self._due.clear()
            if self._over:
                return
            self._look()
            try:
                self._lease.beat()
            except TidingsError as error:
                self._failure = error
                return

    def _look(self) -> None:
        silent = self.watchdog.silent_for if self.watchdog is not None else 0.0
        self._lease.delivers = self._delivers and silent < JVM_SILENT
        if silent >= JVM_STUCK:
            self._on_stuck(f"the JVM of Spark has not answered for {silent:.0f} s: it is stopped, or hangs")

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def say(self, *, delivers: bool) -> None:
        """From now on, and at once, every beat says whether a query runs."""
        self._delivers = delivers
        self._due.set()

    def end(self) -> None:
        self._over = True
        self._due.set()
        self._thread.join()


class Checkpoint:
    """The folder that Spark is given, what we keep in it, and whether it can be read at all.

    A crash within a power cut can leave a file of it empty or torn, and Spark then refuses to start, for ever. Nothing
    is lost with a checkpoint: the deliver floor and the ledger know how far delivery is. So one that cannot be read is
    put aside, which is said, and a new one begins at the floor.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder

    def offsets(self) -> list[dict[str, Any]]:
        """What Spark wrote down before each batch, oldest first: {epoch, seq, mark} of the last ones."""
        found = (self._offset(number) for number in self._numbers("offsets"))
        return [offset for offset in found if offset is not None]

    def range_of(self, number: int) -> tuple[int | None, int]:
        """(after, through) of a batch as Spark wrote it down; after is None for the first one."""
        through = self._offset(number)
        if through is None:
            raise UnhealthyError(f"{self.folder.place} says nothing of batch {number}, which Spark runs")
        before = self._offset(number - 1)
        return (None if before is None else int(before["seq"])), int(through["seq"])

    def _offset(self, number: int) -> dict[str, Any] | None:
        lines = self._text(f"offsets/{number}").splitlines()
        return dict(json.loads(lines[2])) if len(lines) >= 3 and lines[2].startswith("{") else None

    def _text(self, name: str) -> str:
        return (self.folder.read(name) or b"").decode()

    def pending(self) -> int | None:
        """The batch that was begun and not committed; None if there is none."""
        newest, done = ((self._numbers(name) or [-1])[-1] for name in CHECKPOINT_LOGS)
        return newest if newest > done else None

    def count_attempt(self, number: int) -> int:
        """Write down that a batch is begun once more. Answers how often it was since `count_success`."""
        known = self._text(ATTEMPTS).split()
        before = int(known[1]) if len(known) == 2 and known[0] == str(number) and known[1].isdigit() else 0
        self.folder.write(ATTEMPTS, f"{number} {before + 1}".encode())
        return before + 1

    def count_success(self) -> None:
        """Whatever ended the attempts before, the batch as it is cut now can be read and encoded."""
        self.folder.remove(ATTEMPTS)

    def identity(self) -> str:
        """Its own word: a new checkpoint counts batches from zero under another one."""
        if self.folder.read(IDENTITY) is None:
            self.folder.write(IDENTITY, new_id().encode())
        return self._text(IDENTITY).strip()

    def retire(self) -> None:
        """Put it aside; the next one is new."""
        self.folder.put_aside(new_id())

    def damage(self) -> str | None:
        """Which file of it cannot be read, if any, and why."""
        for name in (
            "metadata",
            IDENTITY,
            *(f"{log}/{number}" for log in CHECKPOINT_LOGS for number in self._numbers(log)),
        ):
            content = self.folder.read(name)
            if content is not None and (why := _fault_of(name, content)):
                return f"{name} {why}"
        return None

    def _numbers(self, name: str) -> list[int]:
        return sorted(int(each) for each in self.folder.names(name) if each.isdigit())


def _fault_of(name: str, content: bytes) -> str | None:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return "is not text"
    lines = text.splitlines()
    if not text.strip():
        return "is empty"
    if name == IDENTITY:
        return None
    if "/" in name and (lines.pop(0) != CHECKPOINT_VERSION or not lines):
        return f"does not begin with {CHECKPOINT_VERSION}, or ends there"
    try:
        for line in lines:
            json.loads(line)
    except ValueError:
        return "is torn, or holds what Spark did not write"
    return None
