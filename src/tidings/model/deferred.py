"""Debts: what is owed to somebody whose mailbox had no room, as numbers instead of copies.

A lane is (owner, channel). A lane in debt is owed everything of its channel after `after`, up to the deliver floor:
the floor moves on, the debt needs no further word. While a lane is in debt nothing newer of it is published, so order
per channel holds. The table of debts is a list of events that only grows: `owe` puts a lane into debt or sets it back,
`paid` moves it forward, `settled` ends it at the floor, `cancel` (an operator) moves it forward and makes what was
skipped a loss that its owner is told, `lost` is a loss of another cause, `told` says that the owner was told, `reset`
that the frames of an owner begin a new series, `held` who delivers from now on. The fold does not care who wrote an
event; `order` says which came first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from tidings.wire.frames import Lost

EventKind = Literal["owe", "paid", "settled", "cancel", "lost", "told", "reset", "held"]
Lane = tuple[str, str]
#: losses of one owner remembered as told, until it has surely read of them
TOLD_KEPT = 256
LOST_PER_FRAME = 64


@dataclass(frozen=True, slots=True)
class DebtEvent:
    """What happened to a lane, or to an owner.

    `seq`: owed after it (`owe`); settled, cancelled or lost through it; of `told` the order of the loss told; of
    `reset` the DLV sequence at which the mailbox was emptied. `first`: of a loss its first sequence; of `told` the DLV
    sequence of the frame that told; of `reset` that through which the owner had read.
    """

    order: int
    kind: EventKind
    owner: str
    channel: str
    seq: int
    cause: str = ""
    first: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Debt:
    owner: str
    channel: str
    after: int
    cause: str
    since_ns: int

    @property
    def lane(self) -> Lane:
        return self.owner, self.channel


@dataclass(frozen=True, slots=True)
class Loss:
    """Something its owner must be told it will not get. A count of 0 means nobody has counted yet."""

    order: int
    lost: Lost


@dataclass(slots=True)
class Debts:
    """The debts in force. `apply` is the fold."""

    open: dict[Lane, Debt] = field(default_factory=dict)
    untold: dict[str, list[Loss]] = field(default_factory=dict)
    #: owner -> losses that a frame told, with its DLV sequence: should it be emptied unread, they are told again
    told: dict[str, list[tuple[int, Loss]]] = field(default_factory=dict)
    #: owner -> (order of the reset that began it, series of its frames)
    series: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: who delivered last: the id and the DLV sequence of its lease
    holder: tuple[str, int] = ("", 0)
    newest: int = 0

    @classmethod
    def of(cls, events: Iterable[DebtEvent]) -> Debts:
        debts = cls()
        for event in sorted(events, key=_order_of):
            debts.apply(event)
        return debts

    def apply(self, event: DebtEvent) -> None:
        self.newest = max(self.newest, event.order)
        lane = (event.owner, event.channel)
        debt = self.open.get(lane)
        match event.kind:
            case "owe":
                if debt is None or event.seq < debt.after:
                    since = debt.since_ns if debt else event.order
                    self.open[lane] = Debt(event.owner, event.channel, event.seq, event.cause, since)
            case "paid":
                self._forward(lane, event.seq)
            case "settled":
                if debt is not None and debt.after <= event.seq:
                    del self.open[lane]
            case "cancel":
                if debt is not None and event.seq > debt.after:
                    self._lose(event, Lost(event.channel, debt.after + 1, event.seq, 0, event.cause))
                    self._forward(lane, event.seq)
            case "lost":
                self._lose(event, Lost(event.channel, event.first, event.seq, event.count, event.cause))
            case "told":
                self._told(event)
            case "held":
                self.holder = (event.cause, event.seq)
            case "reset":
                self.series[event.owner] = (event.order, event.cause)
                again = [loss for at, loss in self.told.pop(event.owner, ()) if at > event.first]
                if again:
                    self.untold[event.owner] = sorted([*again, *self.untold.get(event.owner, ())], key=_order)

    def _lose(self, event: DebtEvent, lost: Lost) -> None:
        insort(self.untold.setdefault(event.owner, []), Loss(event.order, lost), key=_order)

    def _told(self, event: DebtEvent) -> None:
        losses = self.untold.pop(event.owner, [])
        told = [loss for loss in losses if loss.order == event.seq]
        known = (*self.told.get(event.owner, ()), *((event.first, loss) for loss in told))
        self.told[event.owner] = list(known)[-TOLD_KEPT:]
        if rest := [loss for loss in losses if loss not in told]:
            self.untold[event.owner] = rest

    def _forward(self, lane: Lane, through: int) -> None:
        debt = self.open.get(lane)
        if debt is not None and through > debt.after:
            self.open[lane] = Debt(debt.owner, debt.channel, through, debt.cause, debt.since_ns)

    def knows_lost(self, owner: str, channel: str, first: int, last: int) -> bool:
        """Is this range a loss of the owner already, told or not?"""
        losses = (*self.untold.get(owner, ()), *(loss for _, loss in self.told.get(owner, ())))
        return any((loss.lost.channel, loss.lost.first, loss.lost.last) == (channel, first, last) for loss in losses)

    def uncounted(self) -> list[tuple[str, Loss]]:
        return [(owner, loss) for owner, losses in self.untold.items() for loss in losses if not loss.lost.count]

    def counted(self, owner: str, loss: Loss, count: int) -> None:
        """How many records a loss was; none at all is no loss."""
        lost = loss.lost
        now = [Loss(loss.order, Lost(lost.channel, lost.first, lost.last, count, lost.cause))] if count else []
        rest = [each for held in self.untold.pop(owner, ()) for each in (now if held == loss else [held])]
        if rest:
            self.untold[owner] = rest

    def tellable(self) -> dict[str, tuple[Loss, ...]]:
        """What can be told now: losses in their order, as far as they were counted."""
        told = {
            owner: tuple(takewhile(lambda loss: loss.lost.count, losses))[:LOST_PER_FRAME]
            for owner, losses in self.untold.items()
        }
        return {owner: losses for owner, losses in told.items() if losses}

    def oldest(self) -> int | None:
        """Everything after this is still needed to pay somebody."""
        return min((debt.after for debt in self.open.values()), default=None)

    def events(self) -> list[DebtEvent]:
        """As few events as make the same debts: what the table holds after it was written anew."""
        order = self.newest
        told = [(owner, at, loss) for owner, each in self.told.items() for at, loss in each]
        losses = [(owner, loss) for owner, each in self.untold.items() for loss in each]
        losses += [(owner, loss) for owner, _, loss in told]
        events = [DebtEvent(d.since_ns, "owe", d.owner, d.channel, d.after, d.cause) for d in self.open.values()]
        events += [
            DebtEvent(loss.order, "lost", owner, lost.channel, lost.last, lost.cause, lost.first, lost.count)
            for owner, loss in losses
            for lost in (loss.lost,)
        ]
        events += [DebtEvent(at, "reset", owner, "", 0, name) for owner, (at, name) in self.series.items()]
        events += [DebtEvent(order, "told", owner, "", loss.order, first=at, count=1) for owner, at, loss in told]
        return sorted([*events, DebtEvent(order, "held", "", "", self.holder[1], self.holder[0])], key=_order_of)

    def reset_at(self, owner: str) -> int:
        """The order of the newest reset of an owner: what it was handed before that counts no more."""
        return self.series.get(owner, (0, ""))[0]

    def of_owner(self, owner: str) -> list[Debt]:
        return sorted((d for d in self.open.values() if d.owner == owner), key=lambda debt: debt.after)


def _order(loss: Loss) -> int:
    return loss.order


def _order_of(event: DebtEvent) -> tuple[int, bool]:
    """A loss of the same order comes before the word that it was told."""
    return event.order, event.kind == "told"
