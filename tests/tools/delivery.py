"""A simulator of delivery: the real rules and the real order of effects, with ports that crash.

`simulate(seed)` makes a space live (`delivery_space.py`) while batches run, die at any effect and run again, mailboxes
fill up, acknowledgements get lost (`delivery_ports.py`), debts are paid or cancelled by an operator, and readers come
and go, some of them settling out of order, and check what they are promised (`delivery_reader.py`). This module runs
the pipeline's `Deliverer` between them, and starts it again where it died. A seed is the same life on every run.
"""

from __future__ import annotations

import random

from tidings.pipeline.blocks import BlockInfo, cut_blocks
from tidings.pipeline.classify import Classification, Classifier, Deliverable
from tidings.pipeline.deliverer import DeliverBatch, Deliverer, resume_counters
from tools.delivery_ports import MAILBOX_FRAMES, Books, Crash, Fate, Mailboxes
from tools.delivery_reader import Reader, Violation
from tools.delivery_space import SimulatedSpace
from tools.generated import new_log


class World:
    """A simulated space, its pipeline and its readers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fate = Fate(self.rng)
        log = new_log(self.rng, agents=self.rng.randint(3, 5), channels=4)
        self.boxes = Mailboxes(self.rng, self.fate)
        self.books = Books(self.fate)
        orderly = {owner: self.rng.random() < 0.7 for owner in log.agents}
        self.space = SimulatedSpace(self.rng, log, narrowed=self.boxes.note_and_empty)
        self.readers = {owner: Reader(owner, self.space, self.books, orderly[owner]) for owner in log.agents}
        self.batch_number = 0
        self.pending: tuple[int, int] | None = None
        self.offset = 0
        self._judged: dict[int, Classification] = {}
        self.deliverer = self._start()

    def _start(self) -> Deliverer:
        debts = self.books.load_debts()
        return Deliverer(
            self.books,
            self.boxes,
            self.books,
            debts=debts,
            counters=resume_counters(self.books.last_frames(), debts),
            last_head=max((batch.head for batch, _ in self.books.rows), default=0),
            floor=max([self.books.floor, *(b.through for b, _ in self.books.rows if b.number is not None)]),
            cap=self.rng.choice((2_000, 20_000, 10**9)),
        )

    # --- the pipeline ---

    def run_batch(self) -> None:
        """A batch, dying where fate says; the next call repeats the same range, as Spark does."""
        table = self.space.table
        if self.pending is None:
            if self.offset >= table.head:
                return
            self.pending = (self.offset, self.rng.randint(self.offset + 1, table.head))
        after, through = self.pending
        head = table.head
        self.fate.arm()
        try:
            self.deliverer.deliver(
                DeliverBatch(self.batch_number, after, through, head), table, self._blocks(after, through)
            )
            self._note_enforced(head)
            self.fate.effect()
        except Crash:
            self.deliverer = self._start()
            if self.rng.random() < 0.1:  # the checkpoint is lost too
                self.batch_number, self.offset, self.pending = self.batch_number + 100, self.books.floor, None
            return
        self.batch_number, self.offset, self.pending = self.batch_number + 1, through, None

    def pay(self) -> None:
        """Pay a part of what is owed since mailboxes were full, or tell of what was cancelled; it may die of that."""
        self.fate.arm()
        table = self.space.table
        head = table.head
        try:
            payment = self.deliverer.payment(chunk=40)
            self._count_losses()
            if payment is None and self.deliverer.debts.tellable():
                self._blocks(head, head)
                self.deliverer.tell(DeliverBatch(None, head, head, head), table)
                self._note_enforced(head)
            if payment is not None:
                blocks = self._blocks(payment.after, payment.through, payment.channels)
                self.deliverer.pay(DeliverBatch(None, payment.after, payment.through, head), table, payment, blocks)
                self._note_enforced(head)
        except Crash:
            self.deliverer = self._start()

    def _blocks(self, after: int, through: int, channels: frozenset[str] | None = None) -> list[BlockInfo]:
        table = self.space.table
        classifier = Classifier(self.space.log.subjects, table.rules)
        messages: list[Deliverable] = []
        for record in self.space.stored[after:through]:  # the first record has sequence 1
            judged = self._judged.get(record.seq)
            if judged is None:
                judged = self._judged[record.seq] = classifier.classify(record)
            if isinstance(judged, Deliverable) and (channels is None or judged.channel in channels):
                messages.append(judged)
        self.boxes.blocks = list(cut_blocks(messages, table.cuts_within(after, through)))
        self.boxes.blocks.sort(key=lambda block: block.info.first)
        return [block.info for block in self.boxes.blocks]

    def _count_losses(self) -> None:
        debts = self.deliverer.debts
        for owner, loss in debts.uncounted():
            subjects = {r.seq: r.subject for r in self.space.stored[loss.lost.first - 1 : loss.lost.last]}
            of_channel = [seq for seq, subject in subjects.items() if subject.endswith(f".{loss.lost.channel}")]
            debts.counted(owner, loss, sum(owner in self.space.truth.get(seq, ()) for seq in of_channel))

    def _note_enforced(self, head: int) -> None:
        for reader in self.readers.values():
            reader.enforced = head

    # --- everybody else ---

    def cancel(self) -> None:
        """An operator gives up part of a debt."""
        debts = [debt for debt in self.deliverer.debts.open.values() if debt.after < self.deliverer.floor]
        if debts:
            debt = self.rng.choice(debts)
            self.books.cancel(debt.owner, debt.channel, self.rng.randint(debt.after + 1, self.deliverer.floor))

    def read(self, owner: str, frames: int) -> None:
        self.readers[owner].read(self.boxes.box(owner), frames, self.rng)

    def check_complete(self, *, telling: bool) -> None:
        for owner, reader in self.readers.items():
            reader.check_complete(self.boxes.box(owner), telling=telling)

    def is_at_rest(self) -> bool:
        """Is everything delivered, told and read?"""
        debts = self.deliverer.debts
        idle = self.offset >= self.space.table.head and self.pending is None and not (debts.open or debts.untold)
        return idle and not any(box.frames for box in self.boxes.boxes.values())


def simulate(seed: int, steps: int = 60, *, telling: bool = False, busy_operator: bool = False) -> World:
    """One life of a space. Raises `Violation` if delivery broke a promise.

    `telling`: whoever was narrowed must have been told of what was cancelled too; the frame that said so may have been
    emptied out of its mailbox. `busy_operator`: cancels while a batch is under way, not only between two.
    """
    world = World(seed)
    agents = world.space.log.agents
    if busy_operator:
        world.fate.meanwhile = world.cancel
    for _ in range(steps):
        world.space.step()
        if world.rng.random() < 0.6:
            world.run_batch()
        if world.rng.random() < 0.4:
            world.read(world.rng.choice(agents), world.rng.randint(1, 6))
        if world.rng.random() < 0.25:
            world.pay()
        if world.rng.random() < 0.03:  # a steward that starts again empties once more
            world.boxes.note_and_empty(world.rng.choice(agents))
        if world.rng.random() < 0.04:
            world.cancel()
    world.fate.meanwhile = None
    _come_to_rest(world, random.Random(seed + 1))
    world.check_complete(telling=telling)
    return world


def _come_to_rest(world: World, rng: random.Random) -> None:
    world.fate.rng = rng
    for _ in range(400):
        world.run_batch()
        world.pay()
        for owner in world.space.log.agents:
            world.read(owner, MAILBOX_FRAMES)
        if world.is_at_rest():
            return
    raise Violation("delivery never came to rest")
