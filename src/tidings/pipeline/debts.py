"""Debts: what is owed to somebody whose mailbox had no room, as numbers instead of copies.

A lane is (owner, channel). A lane in debt is owed everything of its channel after `after`, up to the deliver floor:
the floor moves on, the debt needs no further word. While a lane is in debt nothing newer of it is published, so order
per channel holds. The table of debts is a list of events that only grows: `owe` puts a lane into debt or sets it back,
`paid` moves it forward, `settled` ends it at the floor, `cancel` (an operator) moves it forward and makes what was
skipped a loss that its owner is told, `lost` is a loss of another cause, `told` says that the owner was told, `reset`
that the frames of an owner begin a new series. The fold does not care who wrote an event; `order` says which came
first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from tidings.wire.frames import Lost

EventKind = Literal["owe", "paid", "settled", "cancel", "lost", "told", "reset"]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)
Lane = tuple[str, str]


@dataclass(frozen=True, slots=True)
class DebtEvent:
    """`seq`: owed after it (`owe`), or settled, lost or told through it; `first` and `count` are of a loss."""

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


@dataclass(slots=True)
class Debts:
    """The debts in force. `apply` is the fold."""

    open: dict[Lane, Debt] = field(default_factory=dict)
    #: owner -> what it must be told it will not get; a count of 0 means nobody has counted yet
    untold: dict[str, list[Lost]] = field(default_factory=dict)
    #: owner -> (DLV sequence after which it counts, series of its frames)
    series: dict[str, tuple[int, str]] = field(default_factory=dict)
    newest: int = 0

    @classmethod
    def of(cls, events: Iterable[DebtEvent]) -> Debts:
        debts = cls()
        for event in sorted(events, key=lambda event: event.order):
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
                    loss = Lost(event.channel, debt.after + 1, event.seq, 0, event.cause)
                    self.untold.setdefault(event.owner, []).append(loss)
                    self._forward(lane, event.seq)
            case "reset":
                self.series[event.owner] = (event.seq, event.cause)
            case "lost":
                loss = Lost(event.channel, event.first, event.seq, event.count, event.cause)
                self.untold.setdefault(event.owner, []).append(loss)
            case "told":
                kept = [loss for loss in self.untold.pop(event.owner, []) if loss.last > event.seq or not loss.count]
                if kept:
                    self.untold[event.owner] = kept

    def _forward(self, lane: Lane, through: int) -> None:
        debt = self.open.get(lane)
        if debt is not None and through > debt.after:
            self.open[lane] = Debt(debt.owner, debt.channel, through, debt.cause, debt.since_ns)

    def uncounted(self) -> list[tuple[str, Lost]]:
        return [(owner, loss) for owner, losses in self.untold.items() for loss in losses if not loss.count]

    def counted(self, owner: str, loss: Lost, count: int) -> None:
        """How many records a loss was; none at all is no loss."""
        rest = [each for each in self.untold.get(owner, []) if each != loss]
        if count:
            rest.append(Lost(loss.channel, loss.first, loss.last, count, loss.cause))
        self.untold[owner] = rest
        if not rest:
            del self.untold[owner]

    def tellable(self) -> dict[str, tuple[Lost, ...]]:
        """What can be told now: losses that were counted."""
        told = {owner: tuple(loss for loss in losses if loss.count) for owner, losses in self.untold.items()}
        return {owner: losses for owner, losses in told.items() if losses}

    def oldest(self) -> int | None:
        """Everything after this is still needed to pay somebody."""
        return min((debt.after for debt in self.open.values()), default=None)

    def of_owner(self, owner: str) -> list[Debt]:
        return sorted((d for d in self.open.values() if d.owner == owner), key=lambda debt: debt.after)
