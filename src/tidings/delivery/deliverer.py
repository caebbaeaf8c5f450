"""The order of effects of a delivery, and nothing else: what to read and write is behind three small ports.

A batch is a log range (after, through] judged at a head read afresh. Its effects come in this order: debts known
beforehand, frames acknowledged by the broker, debts of the frames that were not, `deliveries`, the deliver floor; then
Spark commits. A crash anywhere repeats what is not done: done is what lies at or below `floor`, whatever number Spark
gives a batch, so one that reaches further than what was done is delivered from there on (`remaining`).

Whoever lost a right to read since the last head has its mailbox emptied first, and what lay unread in it becomes debts,
to be paid under the new access. The same is done to the fullest mailboxes when all of them together have nearly no room
left, and to a mailbox that has lost frames. The log keeps what is unread or owed (`needed`); what
it could not keep is told as lost, with its range and count, and so is what nobody read for too long (`expire`).

The same class runs in the Spark driver and, with ports that crash, in the simulator (`tests/tools/delivery.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tidings.model.blocks import BlockInfo
from tidings.model.deferred import DebtEvent, Debts, EventKind, Lane
from tidings.model.planning import (
    BATCH_BYTES,
    Audience,
    Choice,
    Counter,
    Delivered,
    Plan,
    Settlement,
    by_reference,
    plan,
    settle,
)
from tidings.model.projection import Table
from tidings.model.unread import UnreadWindow
from tidings.util.failpoints import reach
from tidings.wire.frames import is_by_reference

#: beyond every sequence
NEVER = 2**62
#: series of owners whose mailboxes may hold frames of a log that went backwards
OLD_LOG = "log:"
#: an owner with fewer free places in its mailbox waits: paying frame by frame would cost a read each
ROOM_TO_PAY = 8


@dataclass(frozen=True, slots=True)
class DeliverBatch:
    """A range of the log. `number` is Spark's, for people; a payment of debts has none."""

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


@dataclass(frozen=True, slots=True)
class HandedRange:
    """A range of a channel that somebody was handed in a frame."""

    channel: str
    first: int
    last: int
    count: int


class LedgerPort(Protocol):
    """What outlives the process: debts and deliveries."""

    def next_order(self) -> int:
        """A number above every one that was given before, also to rows of `deliveries`."""
        ...

    def write_events(self, events: Sequence[DebtEvent]) -> None: ...
    def foreign_events(self) -> Sequence[DebtEvent]:
        """Events somebody else (an operator) wrote since the last call."""
        ...

    def write_deliveries(self, batch: DeliverBatch, rows: Sequence[Delivered]) -> None: ...
    def handed(self, owner: str, *, above: int, since: int, through: int = NEVER) -> Sequence[HandedRange]:
        """What `owner` was handed in frames with a DLV sequence in (above, through], written after order `since`."""
        ...

    @property
    def mark(self) -> tuple[int, int]:
        """How new it is."""
        ...

    def owners(self) -> Iterable[str]:
        """Everybody who was ever handed a frame of this log."""
        ...

    def everybody(self) -> Iterable[str]:
        """The same, of whatever log."""
        ...

    def frames(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Owner -> (order, DLV sequence) of each of its frames that may still be unread."""
        ...


class MailboxPort(Protocol):
    """The mailboxes: DLV, written under the deliver lease, and BLK, where blocks lie that frames only name."""

    def store(self, blocks: Sequence[int]) -> Collection[int]:
        """Put these blocks where references find them. Answers those that are not there."""
        ...

    def publish(self, planned: Plan, blocks: Sequence[BlockInfo]) -> Mapping[str, Sequence[int]]:
        """Owner -> DLV sequences of its frames, in order, up to the first that was not acknowledged."""
        ...

    def empty(self, owner: str, *, trusted: bool = True) -> Emptied:
        """Remove what `owner` has not read, noting first how far it had: emptying moves that floor (measured).

        Without trust in what the stream says it counts as having read nothing.
        """
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

    def held(self) -> Mapping[str, int]:
        """Owner -> frames in its mailbox; owners of empty ones are left out."""
        ...

    def end(self) -> int:
        """The newest DLV sequence that was ever used, as far as DLV knows, before this process wrote anything."""
        ...

    def read_through(self, owner: str) -> int | None:
        """The DLV sequence through which `owner` has acknowledged everything; None if it has no mailbox."""
        ...


class FloorPort(Protocol):
    def advance(self, through: int, needed: int | None, mark: tuple[int, int]) -> None:
        """Everything up to `through` is delivered or a debt, as the ledger of this mark knows.

        The log must keep everything from `needed` on.
        """
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
        unread: UnreadWindow,
        cap: int = BATCH_BYTES,
        choice: Choice = is_by_reference,
    ) -> None:
        self._ledger, self._outlet, self._floors = ledger, outlet, floors
        self.debts = debts
        self.counters = dict(counters)
        self.last_head = last_head
        self.floor = floor
        self.unread = unread
        self._cap = cap
        self._choice = choice

    # --- a batch of the log ---

    def remaining(self, batch: DeliverBatch) -> DeliverBatch | None:
        """What is still to be delivered of a batch; None if all of it was before."""
        if batch.through <= self.floor:
            return None
        return replace(batch, after=max(batch.after, self.floor))

    def deliver(self, batch: DeliverBatch, table: Table, blocks: Sequence[BlockInfo]) -> Figures:
        """The effects of one batch, of which nothing was done before (`remaining`)."""
        assert batch.after >= self.floor, f"{batch} begins below {self.floor}"
        self._take_foreign_events()
        self._empty_mailboxes(batch.head, table)
        reach("deliver.read")
        refs = by_reference(blocks, lambda block: _members(table, block), self._choice)
        planned, _ = self._plan(blocks, self.audience(table, batch.head), self.debts, refs)
        self._write("owe", planned.deferred, "the batch was too large")
        settled = self._publish(planned, blocks)
        reach("deliver.published")
        self._record_deliveries(batch, settled.delivered)
        self._write("paid", {lane: seq for lane, seq in settled.owed.items() if seq > settled.begun[lane]})
        reach("deliver.recorded")
        self.last_head = max(self.last_head, batch.head)
        self._advance(batch.through)
        reach("deliver.floor")
        return self._figures(blocks, planned, settled)

    def audience(self, table: Table, head: int) -> Audience:
        """Whom a block goes to: owed at its sequences, allowed at `head`."""
        allowed: dict[Lane, bool] = {}
        now = max(head, table.floor)  # retention may have left nothing, not even at the head

        def may_read(owner: str, channel: str) -> bool:
            answer = allowed.get((owner, channel))
            if answer is None:
                answer = allowed[owner, channel] = table.allowed_at(owner, channel, now)
            return answer

        def owners(block: BlockInfo) -> list[str]:
            return [owner for owner in _members(table, block) if may_read(owner, block.channel)]

        return owners

    def _plan(
        self,
        blocks: Sequence[BlockInfo],
        audience: Audience,
        debts: Debts,
        refs: frozenset[int],
        rooms: Mapping[str, int] | None = None,
    ) -> tuple[Plan, Plan]:
        """A plan and what of it fits, its references leading somewhere: what is not stored travels in the frames."""
        stored: set[int] = set()
        while True:
            planned = plan(blocks, audience, debts, self.counters, refs=refs, cap=self._cap)
            fitting = planned if rooms is None else planned.within(rooms)
            missing = sorted(fitting.named - stored)
            gone = self._outlet.store(missing) if missing else ()
            if not gone:
                return planned, fitting
            stored.update(missing)
            refs = refs.difference(gone)

    def _publish(self, planned: Plan, blocks: Sequence[BlockInfo]) -> Settlement:
        acknowledged = self._outlet.publish(planned, blocks) if planned.frames else {}
        settled = settle(planned, acknowledged, self.counters)
        self.counters.update(settled.counters)
        # from where the batch began with a lane: should it be repeated, it leaves out a lane in debt, and whoever is
        # owed only the rest would have frames that no row is about
        self._write("owe", settled.begun, "the mailbox took no more")
        self._tell(settled)
        return settled

    def _record_deliveries(self, batch: DeliverBatch, rows: Sequence[Delivered]) -> None:
        if rows:
            self._ledger.write_deliveries(batch, rows)
            self.unread.add(max(row.dlv_seq for row in rows), min(row.first for row in rows))

    def _advance(self, through: int) -> None:
        self.floor = max(self.floor, through)
        self.advance_floor()

    def advance_floor(self) -> None:
        """Let retention and agents know how far delivery is, and what it needs of the log."""
        self._floors.advance(self.floor, self.needed, self._ledger.mark)

    def forget_read(self, oldest: int | None) -> None:
        """Frames below this place were read; None: all were. Not while a mailbox was emptied and nothing made good."""
        if not any(True for _ in self._outlet.noted()):
            self.unread.read_below(oldest)

    @property
    def needed(self) -> int | None:
        """The first sequence that the log must keep, for what is owed or unread; None: nothing is."""
        owed = self.debts.oldest()
        needed = [] if owed is None else [owed + 1]
        return min([*needed, *([] if self.unread.needed is None else [self.unread.needed])], default=None)

    # --- mailboxes that are emptied, were set back, or are not read ---

    def _empty_mailboxes(self, head: int, table: Table) -> frozenset[str]:
        narrowed = table.rules.narrowings(self.last_head, head)
        wanted = dict.fromkeys((*self._outlet.noted(), *self._outlet.crowding()), "emptied")
        return self._empty(wanted | {owner: f"access:{seq}" for owner, seq in narrowed.items()}, table)

    def _empty(self, reasons: Mapping[str, str], table: Table, *, trusted: bool = True) -> frozenset[str]:
        emptied: dict[str, Emptied] = {}
        events: list[DebtEvent] = []
        for owner, reason in sorted(reasons.items()):
            emptied[owner] = self._outlet.empty(owner, trusted=trusted)
            events += self._restart(owner, reason, emptied[owner], table)
        self._record_emptied(events, emptied)
        return frozenset(emptied)

    def _record_emptied(self, events: Sequence[DebtEvent], emptied: Mapping[str, Emptied]) -> None:
        """The notes go only when the floor says how new the ledger is: an older copy of it does not know them."""
        if emptied:
            self._record(events)
            self.advance_floor()
            self._outlet.forget_emptied(emptied)

    def _restart(self, owner: str, reason: str, emptied: Emptied, table: Table) -> list[DebtEvent]:
        """A new series, and what lay unread as debts; whoever was revoked is owed nothing any more."""
        since = self.debts.reset_at(owner)
        events = [self._reset(owner, reason, emptied)]
        if _is_revoked(table, owner):
            lanes = [debt.lane for debt in self.debts.of_owner(owner)]
            return events + [self._event("settled", lane, NEVER, "revoked") for lane in lanes]
        firsts: dict[str, int] = {}
        for piece in self._ledger.handed(owner, above=emptied.above, since=since):
            firsts[piece.channel] = min(piece.first, firsts.get(piece.channel, piece.first))
        cause = "the mailbox was emptied with mail unread"
        return events + [self._event("owe", (owner, channel), first - 1, cause) for channel, first in firsts.items()]

    def _reset(self, owner: str, reason: str, emptied: Emptied) -> DebtEvent:
        order = self._ledger.next_order()
        self.counters[owner] = Counter(f"{reason}@{order}")
        return DebtEvent(order, "reset", owner, "", emptied.at, self.counters[owner].series, first=emptied.above)

    def take_over(self, found: tuple[str, int] | None, own: tuple[str, int], table: Table) -> frozenset[str]:
        """Begin to deliver under the lease `own`. `found` is the one that was in the mailbox stream before.

        If that is not the one of the last who wrote to the ledger, the stream is another than it was left, however far
        it goes. None: nobody asks, because a log that went backwards left mailboxes that hold more than it does.
        Answers whose mailboxes were not as they should be.
        """
        trusted = self.debts.holder in (found, ("", 0))  # nobody before us said who it was
        wrong = {} if found is None else self._differing_mailboxes(trusted=trusted)
        short = self._empty(wrong, table, trusted=trusted)
        self._record([DebtEvent(self._ledger.next_order(), "held", "", "", own[1], own[0])])
        return short

    def _differing_mailboxes(self, *, trusted: bool) -> dict[str, str]:
        """Whose mailboxes do not hold what was put there and not read: they are emptied, and what they held is owed.

        The stream of mailboxes may be older than the ledger (a copy was put back, a power cut took what was not
        synced): then no mailbox is right, for what was taken out of one may be back. Or it has lost a part. One may
        hold more than is written down: frames of a batch that was broken off, which are made again, or, if it was
        emptied before, frames that are back and that its owner may no longer read; but also frames of a log that went
        backwards, which nobody could make again. One who acknowledges out of order looks the same as one who lost
        frames: it gets again what it settled, and knows it.
        """
        held, noted = self._outlet.held(), frozenset(self._outlet.noted())
        put = {owner: {place for place, _ in told} for owner, told in self.debts.told.items()}
        for owner, frames in self._ledger.frames().items():
            since = self.debts.reset_at(owner)
            put.setdefault(owner, set()).update(place for order, place in frames if order > since)
        trusted = trusted and max((max(places, default=0) for places in put.values()), default=0) <= self._outlet.end()
        if not trusted:
            ours = {owner for owner, (_, series) in self.debts.series.items() if not series.startswith(OLD_LOG)}
            return dict.fromkeys({*put, *noted, *held} & {*put, *noted, *ours, *self._ledger.owners()}, "lost")
        owners = {*put, *held} - noted
        return {o: "lost" for o in owners if self._differs(o, put.get(o, set()), held.get(o, 0))}

    def _differs(self, owner: str, places: set[int], held: int) -> bool:
        read = self._outlet.read_through(owner)
        if read is None:
            return False
        unread = sum(place > read for place in places)
        _, series = self.debts.series.get(owner, (0, OLD_LOG))
        return held < unread or (held > unread and not series.startswith(OLD_LOG))

    def expire(self, owner: str, table: Table, cause: str) -> None:
        """Nobody reads this mailbox: what lies in it and what is owed to its owner are told as lost, and end."""
        since = self.debts.reset_at(owner)
        emptied = self._outlet.empty(owner)
        events = [self._reset(owner, "expired", emptied)]
        ranges: dict[str, HandedRange] = {}
        for piece in self._ledger.handed(owner, above=emptied.above, since=since):
            had = ranges.get(piece.channel, replace(piece, count=0))
            first, last = min(had.first, piece.first), max(had.last, piece.last)
            ranges[piece.channel] = HandedRange(piece.channel, first, last, had.count + piece.count)
        if not _is_revoked(table, owner):
            events += [self._loss(owner, each, cause) for each in ranges.values()]
            events += [self._event("cancel", debt.lane, self.floor, cause) for debt in self.debts.of_owner(owner)]
        self._record_emptied(events, {owner: emptied})

    def _loss(self, owner: str, lost: HandedRange, cause: str) -> DebtEvent:
        order = self._ledger.next_order()
        return DebtEvent(order, "lost", owner, lost.channel, lost.last, cause, lost.first, lost.count)

    # --- debts ---

    def write_off(self, kept_from: int) -> None:
        """What is owed below the log's own floor cannot be paid any more: it is told as lost."""
        gone = [debt for debt in self.debts.open.values() if debt.after + 1 < kept_from]
        events: list[DebtEvent] = []
        for debt in sorted(gone, key=lambda debt: debt.lane):
            first, last = debt.after + 1, kept_from - 1
            handed = self._ledger.handed(debt.owner, above=0, since=0)
            known = {(p.first, p.last): p.count for p in handed if p.channel == debt.channel}
            count = sum(count for (a, b), count in known.items() if a >= first and b <= last) or last - first + 1
            lost = HandedRange(debt.channel, first, last, count)
            events.append(self._loss(debt.owner, lost, "the log removed it before it could be delivered"))
            events.append(self._event("paid", debt.lane, last, ""))
        self._record(events)

    def payment(self, reach_of: Callable[[int, int], int]) -> Payment | None:
        """What can be paid next: lanes whose owners have room. `reach_of` says how far one that begins after a
        sequence may go, up to the floor."""
        self._take_foreign_events()
        rooms = self._outlet.rooms({debt.owner for debt in self.debts.open.values()})
        ready = [debt for debt in self.debts.open.values() if rooms.get(debt.owner, 0) >= ROOM_TO_PAY]
        if not ready:
            return None
        after = min(debt.after for debt in ready)
        through = reach_of(after, self.floor) if after < self.floor else after
        due = {debt.lane: debt.after for debt in ready if debt.after < through or debt.after >= self.floor}
        return Payment(after, through, due, {owner: rooms[owner] for owner, _ in due})

    def pay(self, batch: DeliverBatch, table: Table, payment: Payment, blocks: Sequence[BlockInfo]) -> Figures:
        """Pay from `blocks`, which hold all of the payment's channels in its range.

        They were read before: a lane that was set back or given up meanwhile is left for another payment.
        """
        self._take_foreign_events()
        narrowed = self._empty_mailboxes(batch.head, table)
        self.last_head = max(self.last_head, batch.head)
        still = {debt.lane for debt in self.debts.open.values() if payment.due.get(debt.lane) == debt.after}
        due = {lane: after for lane, after in payment.due.items() if lane in still and lane[0] not in narrowed}
        audience = self.audience(table, batch.head)

        def owed(block: BlockInfo) -> Iterable[str]:
            return (o for o in audience(block) if block.last > due.get((o, block.channel), NEVER))

        untold, refs = Debts(untold=self.debts.untold), by_reference(blocks, owed, self._choice)
        planned, fitting = self._plan(blocks, owed, untold, refs, payment.rooms)
        acknowledged = self._outlet.publish(fitting, blocks) if planned.frames else {}
        reach("pay.published")
        settled = settle(planned, acknowledged, self.counters)
        self.counters.update(settled.counters)
        self._record_deliveries(batch, settled.delivered)
        self._tell(settled)
        unpaid = planned.deferred | settled.owed
        paid = {lane: unpaid.get(lane, max(after, payment.through)) for lane, after in due.items()}
        self._write("paid", {lane: seq for lane, seq in paid.items() if seq > due[lane]})
        self._write("settled", {lane: self.floor for lane, seq in paid.items() if seq >= self.floor})
        self._advance(self.floor)
        return self._figures(blocks, planned, settled)

    def tell(self, batch: DeliverBatch, table: Table) -> None:
        """Make good what was emptied and tell owners of losses, although there is nothing else to deliver."""
        self._empty_mailboxes(batch.head, table)
        self.last_head = max(self.last_head, batch.head)
        planned = plan((), lambda _block: (), self.debts, self.counters)
        self._publish(planned, ())

    def lose_debts(self, first: int, last: int) -> None:
        """The log went backwards and has other records from `first` to `last`: what was owed of those is lost."""
        cause = "the log went backwards, and lost them before they could be delivered"
        owed = [debt for debt in self.debts.open.values() if debt.after < last]
        ranges = [(debt, max(debt.after + 1, first)) for debt in sorted(owed, key=lambda debt: debt.lane)]
        losses = [(d.owner, HandedRange(d.channel, start, last, last - start + 1)) for d, start in ranges]
        self._record([self._loss(owner, lost, cause) for owner, lost in losses])

    def begin_anew(self, series: str, at: int, table: Table) -> None:
        """The log or the ledger went backwards, and delivery with it, to where anything may be unread. DLV is at `at`.

        So nothing is owed from before, and what comes now is no gap after frames that may be gone. What lies in
        mailboxes stays, for the log may not have it any more: it comes twice, and whoever has read it knows it. Losses
        that were told are told again, for nobody knows which of those frames were emptied.
        """
        self._write("settled", dict.fromkeys(self.debts.open, NEVER), "delivered anew")
        # whoever the ledger forgot too: a frame that was there once must not be made again with the same bytes
        owners = sorted({*self._ledger.everybody(), *self._outlet.held(), *table.owners()})
        self._record([self._reset(owner, series, Emptied(0, at)) for owner in owners])

    def report_missing(self, table: Table, missing: Iterable[tuple[int, int]], owners: Iterable[str] | None) -> None:
        """Sequences the log has lost: nobody knows whose they were, so every member hears of them, once.

        A batch that is repeated finds the same ones. `owners`: only these, because only they are owed of the range.
        """
        asked = table.owners() if owners is None else owners
        now = max(table.head + 1, table.floor)
        members = [owner for owner in asked if table.memberships_at(owner, now)]
        self._record(
            [
                self._loss(owner, HandedRange("*", first, last, last - first + 1), "the log lost them")
                for first, last in missing
                for owner in members
                if not self.debts.knows_lost(owner, "*", first, last)
            ]
        )

    def _tell(self, settled: Settlement) -> None:
        events = [
            DebtEvent(self._ledger.next_order(), "told", owner, "", order, "", first=dlv_seq, count=1)
            for owner, (orders, dlv_seq) in sorted(settled.told.items())
            for order in orders
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


def _members(table: Table, block: BlockInfo) -> Iterable[str]:
    """Whom a block is owed to; nothing later changes the answer."""
    return block.mentioned if block.mentioned is not None else table.audience_at(block.channel, block.first)


def _is_revoked(table: Table, owner: str) -> bool:
    access = table.access_at(owner, max(table.head, table.floor))
    return access is None or access.revoked


def resume_counters(last: Mapping[str, tuple[Counter, int]], debts: Debts) -> dict[str, Counter]:
    """Counters after a restart, from each owner's last frame and the order in which it was written down.

    A series that was begun and has no frame yet wins over an older frame.
    """
    counters = {owner: counter for owner, (counter, _) in last.items()}
    for owner, (order, series) in debts.series.items():
        if owner not in last or last[owner][1] <= order:
            counters[owner] = Counter(series)
    return counters
