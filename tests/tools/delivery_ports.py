"""What delivery has its effects on, in a simulation: mailboxes and books in memory, and a process that dies anywhere.

`Mailboxes` and `Books` stand where the deliver job has the broker and its ledger. They survive every crash, lose
answers, forget what they deduplicated and run full, as the real ones do. Blocks that frames only name may be refused,
and are forgotten at any time (`forget_blocks`). `Fate` decides at which effect the process
dies. Nothing here knows who is owed what, nor checks anything: that is `delivery_space.py` and `delivery_reader.py`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from tidings.delivery.deliverer import NEVER, DeliverBatch, Emptied, HandedRange
from tidings.model.blocks import BlockInfo, MadeBlock
from tidings.model.deferred import DebtEvent, Debts
from tidings.model.planning import Counter, Delivered, Plan
from tidings.wire.frames import SECRET_BYTES, BlockSealer, encode_frame, frame_id

EPOCH, SPACE_ID = "epoch", "space"
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
        self.left = self.rng.randint(0, self.rng.choice((12, 40))) if self.rng.random() < 0.5 else -1

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
        self.lease = ("", 0)
        self.copies: list[tuple[dict[str, Mailbox], int, dict[str, int], tuple[str, int]]] = []
        self.blocks: list[MadeBlock] = []
        #: BLK: name -> sealed bytes
        self.stored: dict[str, bytes] = {}
        self._sealer = BlockSealer(bytes(SECRET_BYTES), SPACE_ID, EPOCH)
        self._refs: dict[int, bytes] = {}

    def box(self, owner: str) -> Mailbox:
        return self.boxes.setdefault(owner, Mailbox())

    def store(self, blocks: Sequence[int]) -> set[int]:
        refused: set[int] = set()
        for index in blocks:
            self._fate.effect()
            block = self.blocks[index]
            sealed = self._sealer.seal(block.info.channel, block.data, block.seqs)
            self._refs[index] = sealed.ref
            if self._rng.random() < 0.05:
                refused.add(index)
            if index not in refused or self._rng.random() < 0.5:  # stored, and the answer was lost
                self.stored[sealed.name] = sealed.data
        return refused

    def forget_blocks(self) -> None:
        """The oldest go, or all of them, read or not."""
        gone = self._rng.choice((1, 3, len(self.stored)))
        for name in list(self.stored)[:gone]:
            del self.stored[name]

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
                    [self._refs[i] if i in planned.refs else self.blocks[i].data for i in frame.blocks],
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

    def note(self, owner: str, *, trusted: bool = True) -> int:
        """Somebody is about to empty a mailbox and says how far its owner had read. Answers where the stream ends."""
        box = self.box(owner)
        read = box.acknowledged if trusted else 0
        box.noted = read if box.noted is None else min(read, box.noted)
        return self.seq

    def purge(self, owner: str, end: int) -> None:
        """What a real broker does: frames up to `end` go, and the acknowledgement floor moves with them."""
        box = self.box(owner)
        box.frames = [frame for frame in box.frames if frame[0] > end]
        box.emptied = max(box.emptied, end)
        box.acknowledged = box.frames[0][0] - 1 if box.frames else self.seq

    def note_and_empty(self, owner: str, *, trusted: bool = True) -> Emptied:
        end = self.note(owner, trusted=trusted)
        self.purge(owner, end)
        noted = self.box(owner).noted
        assert noted is not None
        return Emptied(noted, end)

    def keep_copy(self) -> None:
        """Somebody copies the stream, or its disk has synced it so far."""
        self.copies.append((copy.deepcopy(self.boxes), self.seq, dict(self.ids), self.lease))

    def put_back(self) -> None:
        """The stream is what it was once; notes are kept elsewhere and stay."""
        notes = {owner: box.noted for owner, box in self.boxes.items()}
        boxes, self.seq, self.ids, self.lease = copy.deepcopy(self._rng.choice(self.copies))
        self.boxes = boxes
        for owner, noted in notes.items():
            self.box(owner).noted = noted

    def lose_one(self, written_down: Mapping[str, Set[int]]) -> None:
        """A flipped bit costs a mailbox one frame. One without frames that nobody wrote down: that were two faults."""
        places = {owner: {place for place, _ in box.frames} for owner, box in self.boxes.items()}
        full = [self.box(owner) for owner, held in places.items() if held and held <= written_down.get(owner, set())]
        if full:
            box = self._rng.choice(full)
            box.frames.pop(self._rng.randrange(len(box.frames)))
            self._forget_ids()

    def lose_tail(self) -> None:
        """A power cut takes what was not synced yet."""
        end = max(0, self.seq - self._rng.randint(1, 5))
        for box in self.boxes.values():
            box.frames = [frame for frame in box.frames if frame[0] <= end]
            box.acknowledged, box.emptied = min(box.acknowledged, end), min(box.emptied, end)
        self.seq = end
        self._forget_ids()

    def _forget_ids(self) -> None:
        """A broker that starts again knows the ids of what it holds."""
        held = {place for box in self.boxes.values() for place, _ in box.frames}
        self.ids = {name: place for name, place in self.ids.items() if place in held}

    def end(self) -> int:
        return self.seq

    def held(self) -> dict[str, int]:
        return {owner: len(box.frames) for owner, box in self.boxes.items() if box.frames}

    def read_through(self, owner: str) -> int | None:
        return self.box(owner).acknowledged

    def oldest(self) -> int | None:
        """The place of the frame that lies unread longest."""
        return min((frame[0] for box in self.boxes.values() for frame in box.frames), default=None)

    def empty(self, owner: str, *, trusted: bool = True) -> Emptied:
        self._fate.effect()
        return self.note_and_empty(owner, trusted=trusted)

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
        #: (order, batch, row)
        self.rows: list[tuple[int, DeliverBatch, Delivered]] = []
        self.reached = 0
        self.floor = 0
        self.needed = 0
        self.order = 0
        #: kept with the floor
        self.marked = (0, 0)
        self.anew: int | None = None
        #: `reached` is of one checkpoint
        self.checkpoint = 0
        self.copies: list[tuple[list[DebtEvent], list[tuple[int, DeliverBatch, Delivered]], tuple[int, int]]] = []
        #: an operator's events that the running process has not seen
        self.foreign: list[DebtEvent] = []

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
        order = self.next_order()
        self.rows += [(order, batch, row) for row in rows]
        if batch.number is not None:
            self.reached = max(self.reached, batch.through)
        self._fate.effect()

    def handed(self, owner: str, *, above: int, since: int, through: int = NEVER) -> list[HandedRange]:
        return [
            HandedRange(row.channel, row.first, row.last, row.count)
            for order, _, row in self.rows
            if row.owner == owner and above < row.dlv_seq <= through and order > since and row.last >= self.needed
        ]

    def owners(self) -> set[str]:
        return {row.owner for _, _, row in self.rows}

    everybody = owners

    def frames(self) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {}
        for order, _, row in self.rows:
            if row.last >= self.needed:
                found.setdefault(row.owner, []).append((order, row.dlv_seq))
        return found

    @property
    def mark(self) -> tuple[int, int]:
        return max((order for order, _, _ in self.rows), default=0), max((e.order for e in self.events), default=0)

    @property
    def is_older(self) -> bool:
        return self._is_behind()

    def _is_behind(self) -> bool:
        return any(then > now for then, now in zip(self.marked, self.mark, strict=True))

    def keep_copy(self) -> None:
        self.copies.append((list(self.events), list(self.rows), (self.checkpoint, self.reached)))

    def put_back(self, which: str) -> bool:
        """An older copy of one table or both. Is there one?

        Not one that knows of fewer losses, which nobody could tell then; and not one of the batch that the process died
        in, of which the floor does not know yet how new it made the ledger.
        """
        losses = [event for event in self.events if event.kind in ("lost", "cancel")]
        same = [copy for copy in self.copies if [e for e in copy[0] if e.kind in ("lost", "cancel")] == losses]
        before, now = (self.events, self.rows, self.reached), self._is_behind()
        if same:
            events, rows, (checkpoint, reached) = self._fate.rng.choice(same)
            self.events = list(events) if which != "deliveries" else self.events
            if which != "debts":
                self.rows, self.reached = list(rows), reached if checkpoint == self.checkpoint else 0
        if self._is_behind() and not now:
            return True
        self.events, self.rows, self.reached = before
        return False

    def rewind(self, seq: int) -> None:
        self._fate.effect()
        self.anew, self.floor, self.needed = self.needed, seq, seq
        self.checkpoint += 1
        self.reached, self.marked = 0, (0, 0)

    def advance(self, through: int, needed: int | None, mark: tuple[int, int]) -> None:
        self._fate.effect()
        self.marked, self.anew = mark, None
        self.floor = max(self.floor, through)
        self.needed = self.floor if needed is None else min(self.floor, needed)

    def last_frames(self) -> dict[str, tuple[Counter, int]]:
        last: dict[str, tuple[int, int]] = {}
        for order, _, row in self.rows:
            last[row.owner] = max(last.get(row.owner, (0, 0)), (order, row.dlv_seq))
        found: dict[str, tuple[Counter, int]] = {}
        for owner, newest in last.items():
            rows = [row for order, _, row in self.rows if (row.owner, order, row.dlv_seq) == (owner, *newest)]
            summary = (min(r.first for r in rows), max(r.last for r in rows), sum(r.count for r in rows))
            found[owner] = (Counter(rows[0].series, rows[0].number, summary), newest[0])
        return found
