"""The deliver job: Spark reads and encodes the log, the driver decides and publishes.

One instance delivers for one space at a time (the lease says which). A micro-batch is a range of the log: it is read,
judged, cut and encoded (`range_encoder.py`), then the driver plans and publishes and writes the ledger (`deliverer.py`
has the order). Between batches debts are paid and mailboxes looked after. What every such job needs is in
`stream_job.py`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidings.delivery.batch_sizing import measure
from tidings.delivery.broker_state import BrokerState, DeliverFloor
from tidings.delivery.deliverer import DeliverBatch, Deliverer, Figures, resume_counters
from tidings.delivery.encoding import Encoded
from tidings.delivery.folders import folder_at
from tidings.delivery.ledger import DeltaLedger, LedgerPaths, put_damaged_aside
from tidings.delivery.publishing import Outgoing, batch_of, publish_in_order, store_blocks
from tidings.delivery.range_encoder import RangeEncoder
from tidings.delivery.source import offset_at
from tidings.delivery.storage import is_folder
from tidings.delivery.stream_job import JobSettings, StreamJob, Tally, first_words
from tidings.delivery.stream_reader import StreamReader
from tidings.errors import ConflictError, StoreBroken, UnhealthyError
from tidings.model.blocks import BlockInfo, MadeBlock
from tidings.model.deferred import Debts
from tidings.model.planning import BATCH_BYTES, FramePlan, Plan
from tidings.model.projection import Table
from tidings.model.unread import UnreadWindow
from tidings.nats.jetstream_blocking import BlockingJetStream
from tidings.server.lease import DeliverLease
from tidings.server.log import ruling_steps
from tidings.util.private_files import own_secret
from tidings.wire.frames import HEAD_HEADER, SECRET_BYTES, BlockSealer, encode_frame, frame_id
from tidings.wire.records import StoredRecord
from tidings.wire.subjects import StateKey, Subjects

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)
#: sequences that a payment reads at most
PAY_CHUNK = 50_000
BLOCK_SECRET = "blocks.secret"
#: seconds that unread mail is kept if the space says nothing else
KEEP_UNREAD = 14 * 86_400
#: from this share of its budget on, what only an absent reader needs does not keep the log from shrinking
FULL_LOG = 0.7
FULL_LOG_WORDS = "the log had no room left to keep it"
UNITS = (("days", 86_400), ("hours", 3_600), ("minutes", 60))
#: a batch that failed again and again is cut into so many pieces at most
MOST_PIECES = 256


def pieces_for(attempts: int) -> int:
    """Into how many pieces a batch is cut that nobody could encode so often: the whole of it may be too much."""
    return min(MOST_PIECES, 1 << max(0, attempts - 1))


def cut(batch: DeliverBatch, pieces: int) -> Iterator[DeliverBatch]:
    """The same range in so many pieces, in order; fewer if it has fewer sequences."""
    size = max(1, -(-(batch.through - batch.after) // pieces))
    for after in range(batch.after, batch.through, size):
        yield replace(batch, after=after, through=min(after + size, batch.through))


def span(seconds: float) -> str:
    """A time for people."""
    unit, size = next((each for each in UNITS if seconds >= each[1]), ("seconds", 1))
    return f"{seconds / size:.3g} {unit}"


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
            replicated = self._reader.replicated
            steps = ruling_steps(self._subjects, self.table.head + 1, head, replicated=replicated)
            self.table.apply_all(self._reader.run(steps))


class DeliverJob(StreamJob):
    """One run of durable delivery."""

    name = "deliver"

    # --- one life of the query ---

    def _run_once(self) -> None:
        """A table that cannot be read is as good as none: the floor knows from where on anything may be unread."""
        try:
            super()._run_once()
        except StoreBroken as error:
            aside = put_damaged_aside(self._ledger_paths)
            if not aside:
                raise
            words = f"{', '.join(aside)} could not be read and was put aside ({first_words(error)})"
            raise UnhealthyError(words) from error

    @property
    def _ledger_paths(self) -> LedgerPaths:
        return LedgerPaths.below(self.settings.checkpoint, self.settings.lake, self.settings.storage)

    def _open(self, life: ExitStack, lease: DeliverLease, reader: StreamReader) -> None:
        mailboxes = Mailboxes(self._js(life, "ask"), self._js(life, "frames"), lease)
        epoch = offset_at(reader, 0)["epoch"]
        mailboxes.sealer = BlockSealer(self._block_secret(), self.settings.space_id, epoch)
        floors = DeliverFloor(mailboxes, lease, epoch)
        self._put_damaged_checkpoint_aside()
        debts = self._open_ledger(epoch)
        if self._set_back(reader, floors):
            debts = self._open_ledger(epoch)
        known, kept_from = floors.read(), mailboxes.log_floor()
        anew: list[Any] | None = known.get("anew") if known else None
        # what retention removed while nobody delivered is not ours to deliver, nor lost
        self.start = max(int(known["seq"]) if known else 0, kept_from - 1)
        if known and known.get("epoch") == epoch and debts.holder[0]:  # older versions did not count what is unread
            self.ledger.needed = int(known["needed"])
        self.reader, self.mailboxes = reader, mailboxes
        self.folded = SpaceTable(reader, self.settings, kept_from)
        head = reader.state().last
        self.folded.advance(head)
        options, small = self.source_options(), self.settings.small_records
        self.encoder = RangeEncoder(self.spark, self.settings.space, options, reader, self.folded.table, small)
        life.callback(self.encoder.close)
        through, last_head = self.ledger.reached(), self.ledger.last_head()
        if not through:  # a new checkpoint: what was seen beyond its start is seen again
            last_head = min(last_head, self.start)
        self._looked = 0.0
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
        if anew is not None:
            series, unread, *lost = anew
            for first, last in lost:
                self.deliverer.lose_debts(first, last)
            self.deliverer.begin_anew(series, mailboxes.delivered_through(), self.folded.table)
            if unread < kept_from:
                self.deliverer.report_missing(self.folded.table, [(unread, kept_from - 1)], None)
        found = None if anew is not None else (lease.before.id, lease.before.seq)
        if short := self.deliverer.take_over(found, (lease.holder_id, lease.seq), self.folded.table):
            words = f"{len(short)} mailboxes were not as they were left; what is unread is delivered again from the log"
            self._say(words)
        self.deliverer.advance_floor()

    def _block_secret(self) -> bytes:
        """It names stored blocks, and losing it costs nothing: one in a store is as private as the store."""
        place = self.settings.checkpoint
        if is_folder(place):
            Path(place).mkdir(parents=True, exist_ok=True)
            return own_secret(Path(place, BLOCK_SECRET), SECRET_BYTES)
        folder = folder_at(self.spark, place)
        kept = folder.read(BLOCK_SECRET)
        if kept is None or len(kept) != SECRET_BYTES:
            kept = os.urandom(SECRET_BYTES)
            folder.write(BLOCK_SECRET, kept)
        return kept

    def _set_back(self, reader: StreamReader, floors: DeliverFloor) -> bool:
        """If the log or the ledger went backwards, delivery does, with a new checkpoint. Did it?"""
        if self._rewind(reader, floors) is not None:
            return True
        if not floors.is_newer_than(self.ledger.mark):
            return False
        self._say("the ledger is older than what was delivered; what may be unread is delivered again from the log")
        self.checkpoint.retire()
        floors.rewind(floors.read_by_all(), "anew")
        return True

    def _open_ledger(self, epoch: str) -> Debts:
        self.ledger = DeltaLedger(self._ledger_paths, app=f"deliver:{self.checkpoint.identity()}", epoch=epoch)
        return self.ledger.load_debts()

    def _unread_window(self) -> UnreadWindow:
        """Everything from the oldest frame on, or more where somebody emptied a mailbox and left a note."""
        oldest = self.mailboxes.oldest_frame()
        if self.mailboxes.noted():
            return UnreadWindow(self.ledger.unread_since(0))
        return UnreadWindow(self.ledger.unread_since(oldest.seq) if oldest is not None else ())

    def _between(self) -> None:
        """Pay debts, look after mailboxes and report."""
        if self._replay is None:  # a payment before would take the frame numbers of the batch that is repeated
            self._count_losses()
            self._pay()
            if time.monotonic() - self._looked >= self.settings.look_every:
                self._look_after_mailboxes()
                self._looked = time.monotonic()
        self._report()

    # --- a batch ---

    def _deliver(self, frame: DataFrame, number: int) -> None:
        after, through = self.checkpoint.range_of(number)
        planned = DeliverBatch(number, self.start if after is None else after, through, self._advance_fold())
        rest = self.deliverer.remaining(planned)
        if rest is not None:
            if self._pieces == 1 and rest == planned:
                self._deliver_range(rest, frame)
            else:
                for piece in cut(rest, self._pieces):
                    self._deliver_range(piece)
        self._replay, self._pieces = None, 1
        self.deliverer.debts = self.ledger.tend(self.deliverer.debts)

    def _deliver_range(self, batch: DeliverBatch, frame: DataFrame | None = None) -> None:
        encoded = self.encoder.encode(batch.after, batch.through, frame=frame)
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
            finish = self.encoder.begin(payment.after, payment.through, payment.channels)
        finally:
            self._lock.release()
        encoded = finish()
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
            return owner_of(oldest), f"nobody read it for {span(kept)}"
        needed = self.deliverer.needed
        if needed is None or self.mailboxes.log_floor() < needed or self.mailboxes.log_share() < FULL_LOG:
            return None
        debt = min(self.deliverer.debts.open.values(), key=lambda debt: debt.after, default=None)
        if debt is not None and debt.after + 1 == needed:
            return debt.owner, FULL_LOG_WORDS
        return (owner_of(oldest), FULL_LOG_WORDS) if oldest is not None else None

    def _count_losses(self) -> None:
        """How many records an operator cancelled: their owner is told the number."""
        if not self.deliverer.debts.untold or not self._lock.acquire(blocking=False):
            return
        try:
            kept_from = self.mailboxes.log_floor()
            table = self.folded.table
            audience = self.deliverer.audience(table, max(table.head, table.floor))
            for owner, loss in self.deliverer.debts.uncounted():
                lost = loss.lost
                encoded = self.encoder.encode(lost.first - 1, lost.last, frozenset({lost.channel}))
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
        sent = publish_in_order(self._publishing.connection, frames, self._lease.fence, batch=self._batch())
        self._refs.clear()
        return {owner: each.sequences for owner, each in sent.items()}

    def _batch(self) -> int | None:
        """How many frames go at a time under the lease: with replicas a batch of them, or one; else many alone."""
        if not self._publishing.replicated:
            return None
        return batch_of(self._delivery_info()["config"])

    def _known_through(self) -> int:
        return self._lease.seq if self._lease.replicated else 0

    def end(self) -> int:
        return self._lease.seq - 1

    def _outgoing(self, refs: frozenset[int], frame: FramePlan) -> Outgoing:
        blocks = [self._refs[index] if index in refs else self.blocks[index].data for index in frame.blocks]
        epoch = self.sealer.epoch
        data = encode_frame(frame.owner, epoch, frame.series, frame.number, blocks, prev=frame.prev, lost=frame.lost)
        subject = self.subjects.delivery(frame.owner)
        return Outgoing(subject, frame_id(data), data, ((HEAD_HEADER, str(self.head)),))
