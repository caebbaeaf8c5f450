"""The deliver job: Spark reads and encodes the log, the driver decides and publishes.

One instance delivers for one space at a time (the lease says which). A micro-batch is one Spark job: the source reads a
range, workers judge, cut and encode it, the driver plans and publishes and writes the ledger (`delivering.py` has the
order). Between batches debts are paid. A lost broker connection or a failed batch starts the query again from its
checkpoint; a lost checkpoint starts at the deliver floor; a log that went backwards starts a new checkpoint where it
still agrees; a lost lease ends the job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from tidings.backoff import Backoff
from tidings.broker.blocking import BlockingJetStream, WorkerConnection
from tidings.broker.private_files import own_secret
from tidings.broker.records import StoredRecord
from tidings.errors import (
    ConflictError,
    LeaseHeld,
    LeaseLost,
    OutcomeUnknown,
    TidingsError,
    UnhealthyError,
    UnreachableError,
)
from tidings.pipeline.admission import SeqRange, measure
from tidings.pipeline.blocks import BlockInfo, MadeBlock
from tidings.pipeline.broker_state import BrokerState, DeliverFloor
from tidings.pipeline.checkpoint import Checkpoint
from tidings.pipeline.deliverer import DeliverBatch, Deliverer, Figures, resume_counters
from tidings.pipeline.encoding import ARROW as ENCODED
from tidings.pipeline.encoding import (
    SCHEMA,
    Encoded,
    EncodingRules,
    OwnRules,
    RulesHolder,
    decode_rows,
    encode_partition,
)
from tidings.pipeline.heartbeat import Heartbeat, JvmWatchdog
from tidings.pipeline.ledger import DeltaLedger, LedgerPaths
from tidings.pipeline.planning import BATCH_BYTES, FramePlan, Plan
from tidings.pipeline.publishing import Outgoing, acknowledged, publish_in_order, store_blocks
from tidings.pipeline.sent_rules import LentRules, SentRules
from tidings.pipeline.session import gone
from tidings.pipeline.source import NatsSource, mark_of, offset_at, regressed, rows_of
from tidings.pipeline.source_options import SourceOptions
from tidings.pipeline.stream_reader import StreamLocation, StreamReader
from tidings.pipeline.unread import UnreadWindow
from tidings.space.fold import Table
from tidings.space.lease import DeliverLease
from tidings.space.log import ruling_steps
from tidings.wire.block_refs import SECRET_BYTES, BlockSealer
from tidings.wire.frames import HEAD_HEADER, encode_frame, frame_id
from tidings.wire.state_keys import StateKey
from tidings.wire.subjects import Subjects

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)
RESTART = Backoff(1.0, 3.0)
#: sequences that a payment reads at most
PAY_CHUNK = 50_000
#: seconds that unread mail is kept if the space says nothing else
KEEP_UNREAD = 14 * 86_400
#: from this share of its budget on, what only an absent reader needs does not keep the log from shrinking
FULL_LOG = 0.7
FULL_LOG_WORDS = "the log had no room left to keep it"
#: a batch that failed again and again is cut into so many pieces at most
MOST_PIECES = 256
#: a range with at most so many records and bytes is encoded without Spark
SMALL_RECORDS, SMALL_BYTES = 1_000, 4 * 1024 * 1024
#: a task for fewer records and fewer bytes costs more than it saves, and every task ends the blocks of its channels
SMALLEST_PART = 2_000
SMALLEST_PART_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Where the job works. `checkpoint` and `lake` must be on storage that every driver of the space can reach."""

    space: str
    space_id: str
    anchor_key: str
    url: str
    creds: str
    checkpoint: Path
    lake: Path
    max_records: int = 30_000
    max_bytes: int = 64 * 1024 * 1024
    wait_ms: int = 1_000
    pay_every: float = 1.0
    look_every: float = 15.0
    lease_ttl: float = 3.0


@dataclass
class Tally:
    """What the job has done since it started, for `status` and for agents."""

    batches: int = 0
    messages: int = 0
    deliveries: int = 0
    frames: int = 0
    poison: int = 0
    void: int = 0
    missing: int = 0
    last_batch_ms: float = 0.0
    last_error: str | None = None


def first_words(error: Exception) -> str:
    """An error as one sentence: Spark's go on for pages, and those of a worker end with what matters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if line.startswith(("tidings.errors.", "tidings.pipeline."))]
    return (own or lines or [type(error).__name__])[0][:500]


def agrees(reader: StreamReader, offset: Mapping[str, Any]) -> bool:
    """Is the record at the offset still the one it was?"""
    return bool(offset["seq"] == 0 or (offset["mark"] and mark_of(reader.at(offset["seq"])) == offset["mark"]))


def pieces_for(attempts: int) -> int:
    """Into how many pieces a batch is cut that nobody could encode so often: the whole of it may be too much."""
    return min(MOST_PIECES, 1 << max(0, attempts - 1))


def cut(batch: DeliverBatch, pieces: int) -> Iterator[DeliverBatch]:
    """The same range in so many pieces, in order; fewer if it has fewer sequences."""
    size = max(1, -(-(batch.through - batch.after) // pieces))
    for after in range(batch.after, batch.through, size):
        yield replace(batch, after=after, through=min(after + size, batch.through))


def owner_of(frame: StoredRecord) -> str:
    return frame.subject.rpartition(".")[2]


class SpaceTable:
    """The fold of the ruling records, kept at the head."""

    def __init__(self, reader: StreamReader, settings: JobSettings, floor: int) -> None:
        self._reader = reader
        self._subjects = Subjects(settings.space)
        self.table = Table(self._subjects, settings.space_id, settings.anchor_key, floor=floor)

    def advance(self, head: int) -> None:
        """Apply every ruling record up to `head`."""
        if head > self.table.head:
            self.table.apply_all(self._reader.run(ruling_steps(self._subjects, self.table.head + 1, head)))


class Mailboxes(BrokerState):
    """The mailboxes as the deliverer wants them, over a connection of their own: frames go to DLV under the lease,
    blocks that frames only name to BLK before them."""

    def __init__(self, asking: BlockingJetStream, publishing: BlockingJetStream, lease: DeliverLease) -> None:
        super().__init__(asking, lease.subjects)
        self._publishing, self._lease = publishing, lease
        #: names and closes what is stored; set before anything is published
        self.sealer: BlockSealer
        self.blocks: Sequence[MadeBlock] = ()
        self.head = 0
        self._refs: dict[int, bytes] = {}

    def store(self, blocks: Sequence[int]) -> Collection[int]:
        outgoing = {index: self._sealed(index) for index in blocks}
        refused, serves = store_blocks(self._publishing.connection, outgoing)
        if not serves:
            self._publishing.close()
        if refused:
            why = next(iter(refused.values()))
            log.warning("%d blocks travel in frames, because they could not be stored: %s", len(refused), why)
        return refused

    def _sealed(self, index: int) -> Iterator[Outgoing]:
        """Sealed when its turn comes: only what is on its way is held twice."""
        block = self.blocks[index]
        sealed = self.sealer.seal(block.info.channel, block.data, block.seqs)
        self._refs[index] = sealed.ref
        yield Outgoing(self.subjects.block(sealed.name), None, sealed.data)

    def publish(self, planned: Plan, blocks: Sequence[BlockInfo]) -> Mapping[str, Sequence[int]]:
        assert len(blocks) == len(self.blocks)
        outgoing = partial(self._outgoing, planned.refs)
        frames = {owner: map(outgoing, frames) for owner, frames in planned.frames.items()}
        sent = publish_in_order(self._publishing.connection, frames, self._lease.fence)
        self._refs.clear()
        return acknowledged(sent)

    def end(self) -> int:
        return self._lease.seq - 1

    def _outgoing(self, refs: frozenset[int], frame: FramePlan) -> Outgoing:
        blocks = [self._refs[index] if index in refs else self.blocks[index].data for index in frame.blocks]
        epoch = self.sealer.epoch
        data = encode_frame(frame.owner, epoch, frame.series, frame.number, blocks, prev=frame.prev, lost=frame.lost)
        subject = self.subjects.delivery(frame.owner)
        return Outgoing(subject, frame_id(data), data, ((HEAD_HEADER, str(self.head)),))


class SparkEnded(UnhealthyError):
    """There is no Spark any more to run a query: the process must end, and whoever keeps it starts another."""


class DeliverJob:
    """One run of the job. `run` returns when `stop` was called, or raises what ended it.

    `on_ready` is told when a query runs, `on_halt` when one ended that is tried again, and why, `on_stuck` that Spark
    does not answer and this process is of no use any more.
    """

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
        self.checkpoint = Checkpoint(settings.checkpoint / "spark")
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._on_ready, self._on_halt, self._on_stuck = on_ready, on_halt, on_stuck
        self._failure: BaseException | None = None

    def stop(self) -> None:
        self._stopping.set()

    @property
    def busy(self) -> bool:
        """Is a batch or a payment under way, so that the tally may still be behind the floor?"""
        return self._lock.locked()

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
        asking, publishing, beating = (self._js(name) for name in ("deliver", "deliver-frames", "deliver-beat"))
        reader = StreamReader(
            StreamLocation(self.settings.url, self.settings.creds, self.subjects.log_stream, "deliver-read")
        )
        try:
            lease = DeliverLease(beating, self.subjects, ttl=self.settings.lease_ttl)
            lease.take()
            beat = Heartbeat(lease, self._on_stuck)
            self._sent_rules = SentRules(self.spark.sparkContext)
            try:
                self._prepare(Mailboxes(asking, publishing, lease), lease, reader)
                self._stream(beat)
            finally:
                beat.end()
                self._sent_rules.close()
                with suppress(
                    LeaseLost, UnreachableError, OutcomeUnknown
                ):  # nobody is there to hear it, or somebody else has it
                    lease.release()
        finally:
            for each in (asking, publishing, beating):
                each.close()
            reader.close()

    def _js(self, name: str) -> BlockingJetStream:
        creds = Path(self.settings.creds)
        return BlockingJetStream(lambda: WorkerConnection.open(self.settings.url, creds, name=f"tidings-{name}"))

    def _prepare(self, mailboxes: Mailboxes, lease: DeliverLease, reader: StreamReader) -> None:
        epoch = offset_at(reader, 0)["epoch"]
        self.settings.checkpoint.mkdir(parents=True, exist_ok=True)
        secret = own_secret(self.settings.checkpoint / "blocks.secret", SECRET_BYTES)
        mailboxes.sealer = BlockSealer(secret, self.settings.space_id, epoch)
        floors = DeliverFloor(mailboxes, lease, epoch)
        self._put_damaged_checkpoint_aside()
        rewound = self._rewind(reader, floors, epoch)
        known = floors.read()
        kept_from = mailboxes.log_floor()
        # what retention removed while nobody delivered is not ours to deliver, nor lost
        self.start = max(int(known["seq"]) if known else 0, kept_from - 1)
        paths = LedgerPaths.below(self.settings.checkpoint, self.settings.lake)
        self.ledger = DeltaLedger(paths, app=f"deliver:{self.checkpoint.identity()}", epoch=epoch)
        debts = self.ledger.load_debts()
        if known and known.get("epoch") == epoch and debts.holder[0]:  # older versions did not count what is unread
            self.ledger.needed = int(known["needed"])
        self.reader, self.mailboxes = reader, mailboxes
        self.folded = SpaceTable(reader, self.settings, kept_from)
        head = reader.state().last
        self.folded.advance(head)
        through, last_head = self.ledger.reached(), self.ledger.last_head()
        if not through:  # a new checkpoint: what was seen beyond its start is seen again
            last_head = min(last_head, self.start)
        self._replay = self.checkpoint.pending()
        self._pieces = 1 if self._replay is None else pieces_for(self.checkpoint.count_attempt(self._replay))
        self.deliverer = Deliverer(
            self.ledger,
            mailboxes,
            floors,
            debts=debts,
            counters=resume_counters(self.ledger.last_frames(), debts),
            last_head=max(last_head, kept_from),
            floor=max(self.start, through),
            unread=self._unread_window(),
            cap=min(BATCH_BYTES, mailboxes.delivery_budget() // 4),
        )
        if rewound is not None:
            self.deliverer.owe_after(rewound)
            self.deliverer.restart_series(self.ledger.everybody(), epoch, mailboxes.delivered_through())
        found = None if rewound is not None else (lease.before.id, lease.before.seq)
        if short := self.deliverer.take_over(found, (lease.holder_id, lease.seq), self.folded.table):
            words = f"{len(short)} mailboxes were not as they were left; what is unread is delivered again from the log"
            log.warning("%s", words)
            self.tally.last_error = words
        self.deliverer.advance_floor()

    def _unread_window(self) -> UnreadWindow:
        """Everything from the oldest frame on, or more where somebody emptied a mailbox and left a note."""
        oldest = self.mailboxes.oldest_frame()
        if self.mailboxes.noted():
            return UnreadWindow(self.ledger.unread_since(0))
        return UnreadWindow(self.ledger.unread_since(oldest.seq) if oldest is not None else ())

    def _put_damaged_checkpoint_aside(self) -> None:
        """Spark would refuse it at every start. The floor and the ledger know how far delivery is."""
        if (damage := self.checkpoint.damage()) is not None:
            words = f"the checkpoint could not be read ({damage}) and was put aside; delivery went on at its floor"
            log.warning("%s", words)
            self.tally.last_error = words
            self.checkpoint.retire()

    def _rewind(self, reader: StreamReader, floors: DeliverFloor, epoch: str) -> int | None:
        """If the log went backwards: a new checkpoint from where it still agrees. Answers where; None if it did not."""
        offsets = self.checkpoint.offsets()
        known = floors.read()
        went_back = known is not None and known.get("epoch") != epoch
        if offsets and not went_back:
            went_back = offsets[-1]["epoch"] != epoch or regressed(reader, offsets[-1]) is not None
        last = reader.state().last
        if known is not None and not went_back:
            went_back = int(known["seq"]) > last
        if not went_back:
            return None
        agreed = next((offset["seq"] for offset in reversed(offsets) if agrees(reader, offset)), 0)
        log.warning("the log went backwards: delivering again after %d", agreed)
        self.tally.last_error = f"the log went backwards; delivery began again after {agreed}"
        self.checkpoint.retire()
        floors.rewind(agreed)
        return agreed

    def _parts(self) -> dict[str, str]:
        """Options of the source: a batch as large as one may be, in records or in bytes, has a task for every core."""
        cores = int(self.spark.sparkContext.defaultParallelism)
        return {
            "partitionRecords": str(max(SMALLEST_PART, -(-self.settings.max_records // cores))),
            "partitionBytes": str(max(SMALLEST_PART_BYTES, -(-self.settings.max_bytes // cores))),
        }

    def _stream(self, beat: Heartbeat) -> None:
        frame = (
            self.spark.readStream.format("nats")
            .options(**self._options)
            .option("start", str(self.start + 1))
            .option("missing", "rows")
            .option("maxRecordsPerTrigger", str(self.settings.max_records))
            .option("maxBytesPerTrigger", str(self.settings.max_bytes))
            .options(**self._parts())
            .option("waitMs", str(self.settings.wait_ms))
            .load()
        )
        query = (
            frame.writeStream.foreachBatch(self._batch)
            .option("checkpointLocation", str(self.checkpoint.folder))
            .start()
        )
        self._failure = None
        watchdog = beat.watchdog = JvmWatchdog(lambda: query.isActive)
        beat.say(delivers=True)
        self._on_ready()
        try:
            self._tend(query, beat)
        finally:
            watchdog.end()
            beat.say(delivers=False)
            query.stop()

    def _tend(self, query: Any, beat: Heartbeat) -> None:
        """Pay debts, look after mailboxes and report until told to stop, the query or Spark ends, the lease is gone."""
        paid = looked = 0.0
        while not self._stopping.wait(min(0.2, self.settings.pay_every)):
            beat.check()
            if not query.isActive:
                why = query.exception()
                raise self._failure or TidingsError(f"the query failed: {why}" if why else "the query was ended")
            if time.monotonic() - paid < self.settings.pay_every:
                continue
            if self._replay is None:  # a payment before would take the frame numbers of the batch that is repeated
                self._count_losses()
                self._pay()
                if time.monotonic() - looked >= self.settings.look_every:
                    self._look_after_mailboxes()
                    looked = time.monotonic()
            self._report()
            paid = time.monotonic()

    # --- a batch ---

    def _batch(self, frame: DataFrame, number: int) -> None:
        try:
            self._deliver(frame, number)
        except BaseException as error:
            self._failure = error  # Spark hands its caller only the text
            raise

    def _deliver(self, frame: DataFrame, number: int) -> None:
        started = time.monotonic()
        with self._lock:
            after, through = self.checkpoint.range_of(number)
            planned = DeliverBatch(number, self.start if after is None else after, through, self._advance_fold())
            rest = self.deliverer.remaining(planned)
            if rest is not None:
                if self._pieces == 1 and rest == planned:
                    self._deliver_range(frame, rest)
                else:
                    for piece in cut(rest, self._pieces):
                        self._deliver_range(self._read(piece.after, piece.through), piece)
            self._replay, self._pieces = None, 1
            self.deliverer.debts = self.ledger.tend(self.deliverer.debts)
            self.tally.batches += 1
            self.tally.last_batch_ms = (time.monotonic() - started) * 1_000

    def _deliver_range(self, frame: DataFrame, batch: DeliverBatch) -> None:
        encoded = self._encode_here(batch.after, batch.through, None) or self._encode(frame, batch.after, None)
        if self._replay is not None:
            self.checkpoint.count_success()
        self.ledger.write_quarantine(batch, encoded.poison)
        self.deliverer.report_missing(self.folded.table, encoded.missing, None)
        self._offer(encoded, batch.head)
        figures = self.deliverer.deliver(batch, self.folded.table, [block.info for block in encoded.blocks])
        self._count(encoded, figures)

    def _advance_fold(self) -> int:
        """Apply the rulings up to the end of the log. Answers where that is."""
        head = self.reader.state().last
        self.folded.advance(head)
        return head

    def _encode(self, frame: DataFrame, after: int, channels: frozenset[str] | None) -> Encoded:
        with self._lend_rules(after) as sent:
            return self._encode_with(sent, frame, after, channels)

    def _lend_rules(self, after: int) -> LentRules:
        """The rules at the workers, for records after `after`; under the lock, because the fold must stand still."""
        return self._sent_rules.lend(self.folded.table.rules, after)

    def _encode_with(self, sent: RulesHolder, frame: DataFrame, after: int, channels: frozenset[str] | None) -> Encoded:
        rows = frame.mapInArrow(partial(encode_partition, self._rules(sent, after, channels)), SCHEMA)
        return decode_rows(rows.toArrow())

    def _encode_here(self, after: int, through: int, channels: frozenset[str] | None) -> Encoded | None:
        """A small range is encoded by this process, to the same bytes: a Spark job costs more than its work.

        None if it is not small: that depends on the range alone, so a repeated batch is encoded as it was before.
        Under the lock.
        """
        if through - after > SMALL_RECORDS:
            return None
        options = SourceOptions.of(self._options | {"missing": "rows"})
        part = SeqRange(after + 1, through, after + 1 if after else None)
        rows, size = list[pa.RecordBatch](), 0
        for batch in rows_of(self.reader, options, part):
            rows.append(batch)
            size += batch.nbytes
            if size > SMALL_BYTES:
                return None
        rules = self._rules(OwnRules(self.folded.table.rules), after, channels)
        return decode_rows(pa.Table.from_batches(encode_partition(rules, rows), ENCODED))

    def _rules(self, sent: RulesHolder, after: int, channels: frozenset[str] | None) -> EncodingRules:
        table = self.folded.table
        return EncodingRules(self.settings.space, sent, table.cuts_within(after, table.head), channels)

    def _offer(self, encoded: Encoded, head: int) -> None:
        self.mailboxes.blocks, self.mailboxes.head = encoded.blocks, head

    def _count(self, encoded: Encoded, figures: Figures) -> None:
        tally = self.tally
        tally.poison += len(encoded.poison)
        tally.void += encoded.void
        tally.missing += sum(last - first + 1 for first, last in encoded.missing)
        tally.messages += figures.messages
        tally.deliveries += figures.deliveries
        tally.frames += figures.frames

    # --- between batches ---

    def _pay(self) -> None:
        """Pay a part of what is owed. Reading takes long, so batches go on meanwhile."""
        debts = self.deliverer.debts
        if not (debts.open or debts.untold) or not self._lock.acquire(blocking=False):
            return
        try:
            self.deliverer.write_off(self.mailboxes.log_floor())
            payment = self.deliverer.payment(self._payable)
            head = self._advance_fold()
            if payment is None and debts.tellable():
                self._tell(head)
            if payment is None:
                return
            encoded = self._encode_here(payment.after, payment.through, payment.channels)
            lent = self._lend_rules(payment.after) if encoded is None else None
        finally:
            self._lock.release()
        if lent is not None:
            with lent as sent:
                frame = self._read(payment.after, payment.through)
                encoded = self._encode_with(sent, frame, payment.after, payment.channels)
        assert encoded is not None
        with self._lock:
            if self.mailboxes.log_floor() > payment.after + 1:
                return  # retention passed while we read: what is gone is written off next time
            table, head = self.folded.table, self._advance_fold()
            self.deliverer.report_missing(table, encoded.missing, {owner for owner, _ in payment.due})
            self._offer(encoded, head)
            batch = DeliverBatch(None, payment.after, payment.through, head)
            figures = self.deliverer.pay(batch, table, payment, [block.info for block in encoded.blocks])
            self.tally.deliveries += figures.deliveries
            self.tally.frames += figures.frames

    def _payable(self, after: int, floor: int) -> int:
        """How far a payment goes that begins after a sequence: it is read at once, so its bytes are counted."""
        last = min(floor, after + PAY_CHUNK)
        sizes = measure(self.reader, [">"], after + 1, last, self.settings.max_bytes // 2)
        return sizes.through(last, self.settings.max_bytes // 2)

    def _tell(self, head: int) -> None:
        self._offer(Encoded.nothing(), head)
        self.deliverer.tell(DeliverBatch(None, head, head, head), self.folded.table)

    def _read_again(self, after: int, through: int, channels: frozenset[str]) -> Encoded:
        here = self._encode_here(after, through, channels)
        return here or self._encode(self._read(after, through), after, channels)

    def _read(self, after: int, through: int) -> DataFrame:
        return (
            self.spark.read.format("nats")
            .options(**self._options)
            .option("start", str(after + 1))
            .option("end", str(through))
            .option("missing", "rows")
            .options(**self._parts())
            .load()
        )

    @property
    def _options(self) -> dict[str, str]:
        """Where the log is read, by Spark and here."""
        settings = self.settings
        return {"url": settings.url, "creds": settings.creds, "stream": self.subjects.log_stream}

    def _look_after_mailboxes(self) -> None:
        """What was read need not be kept; what nobody reads must not be kept for ever."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.mailboxes.noted():  # no message came since that would have made it good
                self._tell(self._advance_fold())
            oldest = self.mailboxes.oldest_frame()
            self.deliverer.forget_read(oldest.seq if oldest else None)
            if (found := self._overdue(oldest)) is not None:
                owner, cause = found
                log.warning("giving up what waits for %s: %s", owner, cause)
                self.deliverer.expire(owner, self.folded.table, cause)
            self.deliverer.advance_floor()
        finally:
            self._lock.release()

    def _overdue(self, oldest: StoredRecord | None) -> tuple[str, str] | None:
        """Whose mail is given up, and why: nobody read it for too long, or the log is full of what is kept for it."""
        table = self.folded.table
        kept = table.space_at(max(table.head, table.floor)).keep_unread or KEEP_UNREAD
        if oldest is not None and time.time_ns() - oldest.time_ns > kept * 10**9:
            return owner_of(oldest), f"nobody read it for {kept / 86_400:.3g} days"
        needed = self.deliverer.needed
        if needed is None or self.mailboxes.log_floor() < needed or self.mailboxes.log_share() < FULL_LOG:
            return None
        debt = min(self.deliverer.debts.open.values(), key=lambda debt: debt.after, default=None)
        if debt is not None and debt.after + 1 == needed:
            return debt.owner, FULL_LOG_WORDS
        return (owner_of(oldest), FULL_LOG_WORDS) if oldest is not None else None

    def _count_losses(self) -> None:
        """How many records an operator cancelled: their owner is told the number."""
        if not self.deliverer.debts.uncounted() or not self._lock.acquire(blocking=False):
            return
        try:
            kept_from = self.mailboxes.log_floor()
            table = self.folded.table
            audience = self.deliverer.audience(table, max(table.head, table.floor))
            for owner, loss in self.deliverer.debts.uncounted():
                lost = loss.lost
                encoded = self._read_again(lost.first - 1, lost.last, frozenset({lost.channel}))
                count = sum(b.info.owed_to(owner) for b in encoded.blocks if owner in set(audience(b.info)))
                count += max(0, min(kept_from - 1, lost.last) - lost.first + 1)  # nobody can count those any more
                self.deliverer.debts.counted(owner, loss, count)
        finally:
            self._lock.release()

    def _report(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            entry = self.mailboxes.get(StateKey.DELIVER_FIGURES)
            last, floor = self.reader.state().last, self.deliverer.floor
            oldest = self.reader.following(">", floor + 1) if last > floor else None
            said = {
                "at_ns": time.time_ns(),
                "floor": floor,
                "behind": max(0, last - floor),
                "lag_s": round((time.time_ns() - oldest.time_ns) / 1e9, 3) if oldest else 0.0,
                "debts": len(self.deliverer.debts.open),
                "owners_in_debt": len({debt.owner for debt in self.deliverer.debts.open.values()}),
                **{name: getattr(self.tally, name) for name in Tally.__dataclass_fields__},
            }
            with suppress(ConflictError):  # a report that is lost costs nothing; the next one comes in a second
                self.mailboxes.put(StateKey.DELIVER_FIGURES, said, entry.revision if entry else 0)
        finally:
            self._lock.release()
