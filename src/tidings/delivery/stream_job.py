"""A job that reads the log of a space as a Spark query: under a lease, from a checkpoint, again after whatever failed.

A subclass says what a life of the query begins with (`_open`), what a batch does (`_deliver`) and what is done between
batches (`_between`). Here is what every such job needs: connections and the lease with its beat, a checkpoint that may
be damaged or of a log that went backwards since, a query that is watched, and the restart. A lost broker connection or
a failed batch starts the query again from its checkpoint; a lost lease ends the job, and so does a Spark that is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from tidings.delivery.checkpoint import Checkpoint
from tidings.delivery.deliverer import OLD_LOG
from tidings.delivery.folders import folder_at
from tidings.delivery.heartbeat import Heartbeat, JvmWatchdog
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
from tidings.wire.subjects import Subjects

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)
RESTART = Backoff(1.0, 3.0)
#: a task for fewer records and fewer bytes costs more than it saves, and every task ends the blocks of its channels
SMALLEST_PART = 2_000
SMALLEST_PART_BYTES = 1024 * 1024


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


class Floor(Protocol):
    """How far a job is, kept at the broker."""

    def read(self) -> Mapping[str, Any] | None: ...

    def read_by_all(self) -> int: ...

    def rewind(self, seq: int, series: str, lost: tuple[int, int] | None = None) -> None: ...


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

    def _rewind(self, reader: StreamReader, floor: Floor) -> int | None:
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
