"""The order of effects of a delivery, and nothing else: what to read and write is behind three small ports.

A batch is a log range (after, through] judged at a head read afresh. Its effects come in this order: debts known
beforehand, frames acknowledged by the broker, debts of the frames that were not, `deliveries`, the deliver floor; then
Spark commits. A crash anywhere repeats the batch from its start, except that a batch whose `deliveries` are written is
done: only its floor is still owed. Whoever lost a right to read since the last head has its mailbox emptied first, and
what lay unread in it becomes debts, to be paid under the new access. The same is done to the fullest mailboxes when all
of them together have nearly no room left: nobody who is away keeps others from theirs.

The same class runs in the Spark driver and, with ports that crash, in the simulator (`tests/tools/delivery.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidings.failpoints import reach
from tidings.pipeline.blocks import BlockInfo
from tidings.pipeline.debts import DebtEvent, Debts, EventKind, Lane
from tidings.pipeline.planning import BATCH_BYTES, Audience, Counter, Delivered, Plan, Settlement, plan, settle
from tidings.space.fold import Table

#: beyond every sequence
NEVER = 2**62
#: an owner with fewer free places in its mailbox waits: paying frame by frame would cost a read each
ROOM_TO_PAY = 8


@dataclass(frozen=True, slots=True)
class DeliverBatch:
    """Names a batch in the ledger. `number` is Spark's; a payment of debts has none."""

    number: int | None
    after: int
    through: int
    head: int


@dataclass(frozen=True, slots=True)
class Payment:
    """Lanes to pay, each with the sequence after which it is owed, from one range of the log."""

    after: int
    through: int
    due: Mapping[Lane, int]
    rooms: Mapping[str, int]

    @property
    def channels(self) -> frozenset[str]:
        return frozenset(channel for _, channel in self.due)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one batch did, for people."""

    messages: int
    frames: int
    deliveries: int
    bytes: int
    debts: int


@dataclass(frozen=True, slots=True)
class Emptied:
    """A mailbox was emptied at DLV sequence `at`; its owner had acknowledged everything through `above`."""

    above: int
    at: int


class LedgerPort(Protocol):
    """What outlives the process: debts and deliveries."""

    def is_done(self, batch: DeliverBatch) -> bool: ...
    def next_order(self) -> int: ...
    def write_events(self, events: Sequence[DebtEvent]) -> None: ...
    def foreign_events(self) -> Sequence[DebtEvent]:
        """Events somebody else (an operator) wrote since the last call."""
        ...

    def write_deliveries(self, batch: DeliverBatch, rows: Sequence[Delivered]) -> None: ...
    def unread(self, owner: str, above: int) -> Mapping[str, int]:
        """channel -> first sequence delivered to `owner` in frames above that DLV sequence."""
        ...


class MailboxPort(Protocol):
    """The mailboxes: DLV, written under the deliver lease."""

    def publish(self, planned: Plan, blocks: Sequence[BlockInfo]) -> Mapping[str, Sequence[int]]:
        """Owner -> DLV sequences of its frames, in order, up to the first that was not acknowledged."""
        ...

    def empty(self, owner: str) -> Emptied:
        """Remove what `owner` has not read, noting first how far it had: emptying moves that floor (measured)."""
        ...

    def noted(self) -> Iterable[str]:
        """Owners whose mailbox was emptied by somebody, which nobody has made good yet."""
        ...

    def crowding(self) -> Iterable[str]:
        """Owners whose unread frames take so much room that others could get none."""
        ...

    def forget_emptied(self, emptied: Mapping[str, Emptied]) -> None:
        """What was unread in these mailboxes is a debt now; the note of where it began may go."""
        ...

    def rooms(self, owners: Iterable[str]) -> Mapping[str, int]:
        """Owner -> frames its mailbox still takes."""
        ...


class FloorPort(Protocol):
    def advance(self, through: int, debts_after: int | None) -> None:
        """Everything up to `through` is delivered or a debt; everything after `debts_after` is needed to pay."""
        ...


class Deliverer:
    """Runs batches and payments, one at a time."""

    def __init__(
        self,
        ledger: LedgerPort,
        outlet: MailboxPort,
        floors: FloorPort,
        *,
        debts: Debts,
        counters: Mapping[str, Counter],
        last_head: int,
        floor: int,
        cap: int = BATCH_BYTES,
    ) -> None:
        self._ledger, self._outlet, self._floors = ledger, outlet, floors
        self.debts = debts
        self.counters = dict(counters)
        self.last_head = last_head
        self.floor = floor
        self._cap = cap

    # --- a batch of the log ---

    def deliver(self, batch: DeliverBatch, table: Table, blocks: Sequence[BlockInfo]) -> Figures | None:
        """The effects of one batch. None if they had all happened before.

        `floor` must not be below a batch that is done: a lane deferred in it would be settled below its debt.
        """
        if self._ledger.is_done(batch):
            self._advance(batch.through)
            return None
        self._take_foreign_events()
        self._empty_mailboxes(batch.head, table)
        reach("deliver.read")
        planned = plan(blocks, self.audience(table, batch.head), self.debts, self.counters, cap=self._cap)
        self._write("owe", planned.deferred, "the batch was too large")
        settled = self._publish(planned, blocks)
        reach("deliver.published")
        if settled.delivered:
            self._ledger.write_deliveries(batch, settled.delivered)
        reach("deliver.recorded")
        self.last_head = max(self.last_head, batch.head)
        self._advance(batch.through)
        reach("deliver.floor")
        return self._figures(blocks, planned, settled)

    def audience(self, table: Table, head: int) -> Audience:
        """Whom a block goes to: owed at its sequences, allowed at `head`."""
        allowed: dict[Lane, bool] = {}

        def may_read(owner: str, channel: str) -> bool:
            answer = allowed.get((owner, channel))
            if answer is None:
                answer = allowed[owner, channel] = table.allowed_at(owner, channel, head)
            return answer

        def owners(block: BlockInfo) -> list[str]:
            members = block.mentioned if block.mentioned is not None else table.audience_at(block.channel, block.first)
            return [owner for owner in members if may_read(owner, block.channel)]

        return owners

    def _publish(self, planned: Plan, blocks: Sequence[BlockInfo]) -> Settlement:
        acknowledged = self._outlet.publish(planned, blocks) if planned.frames else {}
        settled = settle(planned, acknowledged, self.counters)
        self.counters.update(settled.counters)
        self._write("owe", settled.owed, "the mailbox took no more")
        self._tell(settled)
        return settled

    def _advance(self, through: int) -> None:
        self.floor = max(self.floor, through)
        self._floors.advance(self.floor, self.debts.oldest())

    # --- access that became narrower ---

    def _empty_mailboxes(self, head: int, table: Table) -> frozenset[str]:
        narrowed = table.rules.narrowings(self.last_head, head)
        emptied: dict[str, Emptied] = {}
        events: list[DebtEvent] = []
        for owner in sorted({*narrowed, *self._outlet.noted(), *self._outlet.crowding()}):
            emptied[owner] = self._outlet.empty(owner)
            reason = f"access:{narrowed[owner]}" if owner in narrowed else "emptied"
            events += self._restart(owner, f"{reason}@{emptied[owner].at}", emptied[owner], table, head)
        self._record(events)
        self._outlet.forget_emptied(emptied)
        return frozenset(emptied)

    def _restart(self, owner: str, series: str, emptied: Emptied, table: Table, head: int) -> list[DebtEvent]:
        """A new series, and what lay unread as debts; whoever was revoked is owed nothing any more."""
        self.counters[owner] = Counter(series)
        order = self._ledger.next_order()
        events = [DebtEvent(order, "reset", owner, "", emptied.at, series, first=emptied.above)]
        if _is_revoked(table, owner, head):
            lanes = [debt.lane for debt in self.debts.of_owner(owner)]
            return events + [self._event("settled", lane, NEVER, "revoked") for lane in lanes]
        unread = self._ledger.unread(owner, emptied.above)
        cause = "the mailbox was emptied with mail unread"
        return events + [self._event("owe", (owner, channel), first - 1, cause) for channel, first in unread.items()]

    # --- debts ---

    def payment(self, chunk: int) -> Payment | None:
        """What can be paid next: lanes whose owners have room, over a range of at most `chunk` sequences."""
        self._take_foreign_events()
        rooms = self._outlet.rooms({debt.owner for debt in self.debts.open.values()})
        ready = [debt for debt in self.debts.open.values() if rooms.get(debt.owner, 0) >= ROOM_TO_PAY]
        if not ready:
            return None
        after = min(debt.after for debt in ready)
        through = max(after, min(self.floor, after + chunk))
        due = {debt.lane: debt.after for debt in ready if debt.after < through or debt.after >= self.floor}
        return Payment(after, through, due, {owner: rooms[owner] for owner, _ in due})

    def pay(self, batch: DeliverBatch, table: Table, payment: Payment, blocks: Sequence[BlockInfo]) -> Figures:
        """Pay from `blocks`, which hold all of the payment's channels in its range."""
        narrowed = self._empty_mailboxes(batch.head, table)
        self.last_head = max(self.last_head, batch.head)
        due = {lane: after for lane, after in payment.due.items() if lane[0] not in narrowed}
        audience = self.audience(table, batch.head)

        def owed(block: BlockInfo) -> Iterable[str]:
            return (o for o in audience(block) if block.last > due.get((o, block.channel), NEVER))

        planned = plan(blocks, owed, Debts(untold=self.debts.untold), self.counters, cap=self._cap)
        fitting = Plan({owner: frames[: payment.rooms.get(owner, 1)] for owner, frames in planned.frames.items()})
        acknowledged = self._outlet.publish(fitting, blocks) if planned.frames else {}
        reach("pay.published")
        settled = settle(planned, acknowledged, self.counters)
        self.counters.update(settled.counters)
        if settled.delivered:
            self._ledger.write_deliveries(batch, settled.delivered)
        self._tell(settled)
        unpaid = planned.deferred | settled.owed
        paid = {lane: unpaid.get(lane, max(after, payment.through)) for lane, after in due.items()}
        self._write("paid", {lane: seq for lane, seq in paid.items() if seq > due[lane]})
        self._write("settled", {lane: self.floor for lane, seq in paid.items() if seq >= self.floor})
        self._advance(self.floor)
        return self._figures(blocks, planned, settled)

    def tell(self, batch: DeliverBatch, table: Table) -> None:
        """Tell owners of losses although there is nothing else to deliver."""
        self._empty_mailboxes(batch.head, table)
        self.last_head = max(self.last_head, batch.head)
        planned = plan((), lambda _block: (), self.debts, self.counters)
        self._publish(planned, ())

    def owe_after(self, seq: int) -> None:
        """The log went back to `seq`: what a lane was paid beyond it may be another record now."""
        self._write("owe", {d.lane: seq for d in self.debts.open.values() if d.after > seq}, "the log went backwards")

    def restart_series(self, owners: Iterable[str], series: str, at: int) -> None:
        """Frames may have gone with the log: what follows is no gap after them. DLV is at `at` now."""
        events = [DebtEvent(self._ledger.next_order(), "reset", owner, "", at, series, first=at) for owner in owners]
        self._record(events)
        self.counters.update((event.owner, Counter(series)) for event in events)

    def report_missing(self, table: Table, missing: Iterable[tuple[int, int]]) -> None:
        """Sequences the log has lost: nobody knows whose they were, so every member hears of them, once.

        A batch that is repeated finds the same ones.
        """
        members = [owner for owner in table.owners() if table.memberships_at(owner, table.head + 1)]
        events = [
            DebtEvent(self._ledger.next_order(), "lost", owner, "*", last, "the log lost them", first, last - first + 1)
            for first, last in missing
            for owner in members
            if not self.debts.knows_lost(owner, "*", first, last)
        ]
        self._record(events)

    def _tell(self, settled: Settlement) -> None:
        events = [
            DebtEvent(self._ledger.next_order(), "told", owner, "", order, "", first=dlv_seq)
            for owner, (order, dlv_seq) in sorted(settled.told.items())
        ]
        self._record(events)

    def _take_foreign_events(self) -> None:
        for event in self._ledger.foreign_events():
            self.debts.apply(event)

    def _write(self, kind: EventKind, seqs: Mapping[Lane, int], cause: str = "") -> None:
        self._record([self._event(kind, lane, seq, cause) for lane, seq in sorted(seqs.items())])

    def _event(self, kind: EventKind, lane: Lane, seq: int, cause: str) -> DebtEvent:
        return DebtEvent(self._ledger.next_order(), kind, *lane, seq, cause)

    def _record(self, events: Sequence[DebtEvent]) -> None:
        if events:
            self._ledger.write_events(events)
        for event in events:
            self.debts.apply(event)

    def _figures(self, blocks: Sequence[BlockInfo], planned: Plan, settled: Settlement) -> Figures:
        return Figures(
            messages=sum(block.count for block in blocks),
            frames=len({(row.owner, row.dlv_seq) for row in settled.delivered}),
            deliveries=sum(row.count for row in settled.delivered),
            bytes=planned.bytes,
            debts=len(self.debts.open),
        )


def _is_revoked(table: Table, owner: str, head: int) -> bool:
    access = table.access_at(owner, head)
    return access is None or access.revoked


def resume_counters(last: Mapping[str, tuple[Counter, int]], debts: Debts) -> dict[str, Counter]:
    """Counters after a restart, from each owner's last frame and the DLV sequence it got.

    A series that was begun and has no frame yet wins over an older frame.
    """
    counters = {owner: counter for owner, (counter, _) in last.items()}
    for owner, (at, series) in debts.series.items():
        if owner not in last or last[owner][1] <= at:
            counters[owner] = Counter(series)
    return counters
