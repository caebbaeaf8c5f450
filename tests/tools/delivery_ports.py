"""What delivery has its effects on, in a simulation: mailboxes and books in memory, and a process that dies anywhere.

`Mailboxes` and `Books` stand where the deliver job has the broker and its ledger. They survive every crash, lose
answers, forget what they deduplicated and run full, as the real ones do. `Fate` decides at which effect the process
dies. Nothing here knows who is owed what, nor checks anything: that is `delivery_space.py` and `delivery_reader.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tidings.pipeline.blocks import BlockInfo, MadeBlock
from tidings.pipeline.debts import DebtEvent, Debts
from tidings.pipeline.deliverer import DeliverBatch, Emptied
from tidings.pipeline.planning import Counter, Delivered, Plan
from tidings.wire.frames import encode_frame, frame_id

EPOCH = "epoch"
#: small, so that mailboxes are full often
MAILBOX_FRAMES = 12


class Crash(Exception):
    """The process died here."""


@dataclass
class Fate:
    """Decides when the pipeline dies: after so many effects."""

    rng: random.Random
    left: int = -1
    #: what somebody else does meanwhile, before some effect
    meanwhile: Callable[[], None] | None = None

    def arm(self) -> None:
        self.left = self.rng.randint(0, 12) if self.rng.random() < 0.5 else -1

    def effect(self) -> None:
        if self.meanwhile is not None and self.rng.random() < 0.05:
            self.meanwhile()
        if self.left == 0:
            self.left = -1
            raise Crash
        self.left -= 1 if self.left > 0 else 0


@dataclass
class Mailbox:
    frames: list[tuple[int, bytes]] = field(default_factory=list)
    acknowledged: int = 0
    noted: int | None = None
    #: everything up to here was emptied, read or not
    emptied: int = 0


class Mailboxes:
    """DLV: per-owner bound, deduplication that forgets, outcomes that get lost."""

    def __init__(self, rng: random.Random, fate: Fate) -> None:
        self._rng, self._fate = rng, fate
        self.boxes: dict[str, Mailbox] = {}
        self.ids: dict[str, int] = {}
        self.seq = 0
        self.blocks: list[MadeBlock] = []

    def box(self, owner: str) -> Mailbox:
        return self.boxes.setdefault(owner, Mailbox())

    def publish(self, planned: Plan, blocks: Sequence[BlockInfo]) -> dict[str, list[int]]:
        assert len(blocks) == len(self.blocks)
        acknowledged: dict[str, list[int]] = {}
        for owner, frames in planned.frames.items():
            answers = acknowledged.setdefault(owner, [])
            for frame in frames:
                self._fate.effect()
                data = encode_frame(
                    owner,
                    EPOCH,
                    frame.series,
                    frame.number,
                    [self.blocks[i].data for i in frame.blocks],
                    prev=frame.prev,
                    lost=frame.lost,
                )
                seq = self._store(owner, data)
                if seq is None or self._rng.random() < 0.04:  # refused, or stored and the answer was lost
                    break
                answers.append(seq)
        return acknowledged

    def _store(self, owner: str, data: bytes) -> int | None:
        name = frame_id(data)
        if name in self.ids and self._rng.random() < 0.8:
            return self.ids[name]
        box = self.box(owner)
        if len(box.frames) >= MAILBOX_FRAMES or self._rng.random() < 0.02:
            return None
        self.seq += 1
        self.ids[name] = self.seq
        box.frames.append((self.seq, data))
        return self.seq

    def note_and_empty(self, owner: str) -> Emptied:
        box = self.box(owner)
        box.noted = min(box.acknowledged, box.acknowledged if box.noted is None else box.noted)
        box.frames.clear()
        box.emptied = self.seq
        box.acknowledged = self.seq  # what a real broker does to the acknowledgement floor
        return Emptied(box.noted, self.seq)

    def empty(self, owner: str) -> Emptied:
        self._fate.effect()
        return self.note_and_empty(owner)

    def noted(self) -> Iterable[str]:
        return [owner for owner, box in self.boxes.items() if box.noted is not None]

    def crowding(self) -> Iterable[str]:
        return [owner for owner in self.boxes if self._rng.random() < 0.01]

    def forget_emptied(self, emptied: Mapping[str, Emptied]) -> None:
        for owner in emptied:
            self._fate.effect()
            self.box(owner).noted = None

    def rooms(self, owners: Iterable[str]) -> dict[str, int]:
        return {owner: MAILBOX_FRAMES - len(self.box(owner).frames) for owner in owners}


class Books:
    """The ledger and the floors, surviving every crash."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate
        self.events: list[DebtEvent] = []
        self.rows: list[tuple[DeliverBatch, Delivered]] = []
        self.done: set[int] = set()
        self.floor = 0
        self.order = 0
        #: an operator's events that the running process has not seen
        self.foreign: list[DebtEvent] = []

    def is_done(self, batch: DeliverBatch) -> bool:
        return batch.number in self.done

    def next_order(self) -> int:
        self.order += 1
        return self.order

    def write_events(self, events: Sequence[DebtEvent]) -> None:
        self._fate.effect()
        self.events += events

    def foreign_events(self) -> Sequence[DebtEvent]:
        news, self.foreign = self.foreign, []
        return news

    def cancel(self, owner: str, channel: str, through: int) -> None:
        """What an operator writes beside the running pipeline."""
        event = DebtEvent(self.next_order(), "cancel", owner, channel, through, "an operator gave it up")
        self.events.append(event)
        self.foreign.append(event)

    def load_debts(self) -> Debts:
        self.foreign = []
        return Debts.of(self.events)

    def write_deliveries(self, batch: DeliverBatch, rows: Sequence[Delivered]) -> None:
        self._fate.effect()
        self.rows += [(batch, row) for row in rows]
        if batch.number is not None:
            self.done.add(batch.number)
        self._fate.effect()

    def unread(self, owner: str, above: int) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for _, row in self.rows:
            if row.owner == owner and row.dlv_seq > above:
                found[row.channel] = min(row.first, found.get(row.channel, row.first))
        return found

    def advance(self, through: int, debts_after: int | None) -> None:
        self._fate.effect()
        self.needed = min(through, through if debts_after is None else debts_after)
        self.floor = max(self.floor, through)

    def last_frames(self) -> dict[str, tuple[Counter, int]]:
        last: dict[str, list[tuple[DeliverBatch, Delivered]]] = {}
        for batch, row in self.rows:
            held = last.setdefault(row.owner, [(batch, row)])
            if row.dlv_seq > held[0][1].dlv_seq:
                last[row.owner] = [(batch, row)]
            elif row is not held[0][1] and row.dlv_seq == held[0][1].dlv_seq:
                held.append((batch, row))
        return {
            owner: (
                Counter(
                    rows[0][1].series,
                    rows[0][1].number,
                    (min(r.first for _, r in rows), max(r.last for _, r in rows), sum(r.count for _, r in rows)),
                ),
                rows[0][1].dlv_seq,
            )
            for owner, rows in last.items()
        }
