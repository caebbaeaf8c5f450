"""A simulator of delivery: the real rules and the real order of effects, with ports that crash.

`simulate(seed)` makes a space live (`delivery_space.py`) while batches run, die at any effect and run again, mailboxes
fill up, acknowledgements get lost, stored blocks are forgotten (`delivery_ports.py`), debts are paid or cancelled by an
operator, retention removes what nobody needs, the steward empties mailboxes in two steps, older checkpoints, ledgers
and mailboxes are put back, and readers come and go, some of them settling out of order, and check what they are
promised (`delivery_reader.py`). This module runs the pipeline's `Deliverer` between them, and starts it again where it
died. A seed is the same life on every run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from tidings.delivery.deliverer import DeliverBatch, Deliverer, resume_counters
from tidings.model import blocks, planning
from tidings.model.blocks import BlockInfo, cut_blocks
from tidings.model.classify import Classification, Classifier, Deliverable
from tidings.model.unread import UnreadWindow
from tidings.wire.frames import MAX_FRAME_MESSAGES
from tools.delivery_ports import MAILBOX_FRAMES, Books, Crash, Fate, Mailboxes
from tools.delivery_reader import Reader, Violation
from tools.delivery_space import SimulatedSpace
from tools.generated import new_log

TABLES = ("both", "debts", "deliveries")


class World:
    """A simulated space, its pipeline and its readers."""

    def __init__(self, seed: int, *, careless: bool = False) -> None:
        self.rng = random.Random(seed)
        self.fate = Fate(self.rng)
        log = new_log(self.rng, agents=self.rng.randint(3, 5), channels=4)
        self.boxes = Mailboxes(self.rng, self.fate)
        self.books = Books(self.fate)
        orderly = {owner: self.rng.random() < 0.7 for owner in log.agents}
        self.space = SimulatedSpace(self.rng, log, narrowed=self.narrowed)
        self.readers = {
            owner: Reader(owner, self.space, self.books, self.boxes, orderly[owner], careless) for owner in log.agents
        }
        #: blocks of more bytes than this go by reference: a message has about 300
        self.inline = self.rng.choice((0, 400, 1_000))
        self.batch_number = 0
        self.pending: tuple[int, int] | None = None
        self.offset = 0
        #: the first sequence that retention has left in the log
        self.kept_from = 0
        #: (batch number, offset) of every commit: one of them may come back
        self.commits: list[tuple[int, int]] = [(0, 0)]
        #: mailboxes that the steward said it empties, and has not yet
        self.purges: list[tuple[str, int]] = []
        self.set_back = 0
        #: older ledgers too: not where somebody gives up meanwhile what only the newer one knows
        self.ledgers_come_back = True
        self.ledger_set_back = 0
        self.expired = 0
        self._judged: dict[int, Classification] = {}
        self.deliverer = self._start()

    def _start(self) -> Deliverer:
        """A process starts; it dies of that sometimes, and another one does."""
        while True:
            self.fate.arm()
            try:
                return self._start_once()
            except Crash:
                continue

    def _start_once(self) -> Deliverer:
        if self.books.is_older:  # a new checkpoint begins where anything may be unread
            self.books.rewind(max(0, self.books.needed - 1))
            self.batch_number, self.offset, self.pending = 0, max(self.books.floor, self.kept_from - 1), None
            self.commits = [(0, self.offset)]
        debts, oldest = self.books.load_debts(), self.boxes.oldest()
        places = [(row.dlv_seq, row.first) for _, _, row in self.books.rows if row.last >= self.books.needed]
        if not self.boxes.noted():
            places = [each for each in places if oldest is not None and each[0] >= oldest]
        deliverer = Deliverer(
            self.books,
            self.boxes,
            self.books,
            debts=debts,
            counters=resume_counters(self.books.last_frames(), debts),
            last_head=max((batch.head for _, batch, _ in self.books.rows), default=0),
            floor=max(self.books.floor, self.books.reached),
            unread=UnreadWindow(places),
            cap=self.rng.choice((2_000, 20_000, 10**9)),
            choice=lambda size, readers: size > self.inline and readers > 1,
        )
        found, self.boxes.lease = self.boxes.lease, (f"process {self.rng.getrandbits(48):x}", 0)
        if (unread := self.books.anew) is not None:
            deliverer.begin_anew("anew", self.boxes.seq, self.space.table)
            if unread < self.kept_from:
                deliverer.report_missing(self.space.table, [(unread, self.kept_from - 1)], None)
        deliverer.take_over(found if unread is None else None, self.boxes.lease, self.space.table)
        deliverer.advance_floor()
        return deliverer

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
            rest = self.deliverer.remaining(DeliverBatch(self.batch_number, after, through, head))
            if rest is not None:
                with self._folded():
                    self.deliverer.deliver(rest, table, self._blocks(rest.after, through))
                self._note_enforced(head)
            self.fate.effect()
        except Crash:
            self._crashed()
            return
        self.batch_number, self.offset, self.pending = self.batch_number + 1, through, None
        self.commits.append((self.batch_number, through))

    def _crashed(self) -> None:
        """The process is gone, and sometimes more than that."""
        what = self.rng.random()
        if what < 0.1:  # the checkpoint is lost
            self.batch_number, self.offset, self.pending = 0, max(self.books.floor, self.kept_from - 1), None
        elif what < 0.2:  # an older one was put back
            (self.batch_number, self.offset), self.pending = self.rng.choice(self.commits), None
        elif what < 0.3 and self.boxes.copies:
            self.boxes.put_back()
            self._mailboxes_were_set_back()
        elif what < 0.4:
            self.boxes.lose_tail()
            self._mailboxes_were_set_back()
        elif what < 0.5 and self.ledgers_come_back and self.books.put_back(self.rng.choice(TABLES)):
            self.ledger_set_back += 1
            for reader in self.readers.values():
                reader.delivery_was_set_back(self.books.floor)
        self.deliverer = self._start()

    def _mailboxes_were_set_back(self) -> None:
        self.set_back += 1
        self.purges.clear()  # the broker went, and what it was asked with it; the notes stay
        for reader in self.readers.values():
            reader.mailbox_was_set_back()

    def lose_a_frame(self) -> None:
        """The broker starts again and has lost a frame; nothing of the pipeline was broken off then."""
        debts, written_down = self.deliverer.debts, dict[str, set[int]]()
        for order, _, row in self.books.rows:
            if order > debts.reset_at(row.owner):
                written_down.setdefault(row.owner, set()).add(row.dlv_seq)
        self.boxes.lose_one(written_down)
        self.set_back += 1
        self.deliverer = self._start()

    @contextmanager
    def _folded(self) -> Iterator[None]:
        """The pipeline's fold answers from the log's floor on."""
        self.space.table.floor = self.kept_from
        try:
            yield
        finally:
            self.space.table.floor = 0

    def pay(self) -> None:
        """Pay a part of what is owed since mailboxes were full, or tell of what was cancelled; it may die of that."""
        if self.pending is not None:
            return  # a batch is to be repeated first
        self.fate.arm()
        table = self.space.table
        head = table.head
        try:
            self.deliverer.write_off(self.kept_from)
            payment = self.deliverer.payment(lambda after, floor: min(floor, after + 40))
            self._count_losses()
            if payment is None and (self.deliverer.debts.tellable() or self.boxes.noted()):
                self._blocks(head, head)
                self.deliverer.tell(DeliverBatch(None, head, head, head), table)
                self._note_enforced(head)
            if payment is not None:
                with self._folded():
                    found = self._blocks(payment.after, payment.through, payment.channels)
                    batch = DeliverBatch(None, payment.after, payment.through, head)
                    self.deliverer.pay(batch, table, payment, found)
                self._note_enforced(head)
        except Crash:
            self._crashed()

    def look_after_mailboxes(self) -> None:
        """What was read need not be kept any more."""
        self.fate.arm()
        try:
            self.deliverer.forget_read(self.boxes.oldest())
            self.deliverer.advance_floor()
        except Crash:
            self._crashed()

    def _blocks(self, after: int, through: int, channels: frozenset[str] | None = None) -> list[BlockInfo]:
        table = self.space.table
        classifier = Classifier(self.space.log.subjects, table.rules)
        messages: list[Deliverable] = []
        for record in self.space.stored[after:through]:  # the first record has sequence 1
            if record.seq < self.kept_from:
                continue
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
            if loss.lost.first < self.kept_from:
                debts.counted(owner, loss, loss.lost.last - loss.lost.first + 1)
                continue
            subjects = {r.seq: r.subject for r in self.space.stored[loss.lost.first - 1 : loss.lost.last]}
            of_channel = [seq for seq, subject in subjects.items() if subject.endswith(f".{loss.lost.channel}")]
            debts.counted(owner, loss, sum(owner in self.space.truth.get(seq, ()) for seq in of_channel))

    def _note_enforced(self, head: int) -> None:
        for reader in self.readers.values():
            reader.enforced = head

    # --- everybody else ---

    def narrowed(self, owner: str) -> None:
        """The steward empties a mailbox: it says so, and does it a little later."""
        self.purges.append((owner, self.boxes.note(owner)))

    def purge_one(self) -> None:
        if self.purges:
            self.boxes.purge(*self.purges.pop(0))

    def retain(self, *, careless: bool) -> None:
        """Retention removes what nobody needs; a careless one what it likes of what was delivered."""
        most = self.books.floor if careless else self.books.needed
        if most > self.kept_from:
            self.kept_from = self.rng.randint(self.kept_from, most)

    def expire(self) -> None:
        """Nobody reads the mailbox whose frame is oldest."""
        full = [owner for owner, box in self.boxes.boxes.items() if box.frames]
        if full and self.pending is None:
            owner = min(full, key=lambda owner: self.boxes.box(owner).frames[0][0])
            self.fate.arm()
            try:
                self.deliverer.expire(owner, self.space.table, "nobody read it")
                self.deliverer.advance_floor()
            except Crash:
                self._crashed()
            self.expired += 1

    def cancel(self) -> None:
        """An operator gives up part of a debt."""
        debts = [debt for debt in self.deliverer.debts.open.values() if debt.after < self.deliverer.floor]
        if debts:
            debt = self.rng.choice(debts)
            self.books.cancel(debt.owner, debt.channel, self.rng.randint(debt.after + 1, self.deliverer.floor))

    def read(self, owner: str, frames: int) -> None:
        self.readers[owner].read(self.boxes.box(owner), frames, self.rng, self.kept_from)

    def check_complete(self, *, telling: bool) -> None:
        for owner, reader in self.readers.items():
            reader.check_complete(self.boxes.box(owner), telling=telling)

    def is_at_rest(self) -> bool:
        """Is everything delivered, told and read?"""
        debts = self.deliverer.debts
        idle = self.offset >= self.space.table.head and self.pending is None and not (debts.open or debts.untold)
        idle = idle and not self.purges and not self.boxes.noted()
        return idle and not any(box.frames for box in self.boxes.boxes.values())


def simulate(
    seed: int, steps: int = 60, *, telling: bool = False, busy_operator: bool = False, careless: bool = False
) -> World:
    """One life of a space. Raises `Violation` if delivery broke a promise.

    `telling`: whoever was narrowed must have been told of what was cancelled too; the frame that said so may have been
    emptied out of its mailbox. `busy_operator`: cancels while a batch is under way, not only between two. `careless`:
    retention also removes what is owed or unread. Frames of many lives hold few messages, so that a batch has several
    for an owner.
    """
    small = random.Random(seed).choice((2, 4, MAX_FRAME_MESSAGES))
    with ExitStack() as patched:
        for module in (planning, blocks):
            patched.enter_context(mock.patch.object(module, "MAX_FRAME_MESSAGES", small))
        return _simulate(seed, steps, telling=telling, busy_operator=busy_operator, careless=careless)


def _simulate(seed: int, steps: int, *, telling: bool, busy_operator: bool, careless: bool) -> World:
    world = World(seed, careless=careless)
    world.ledgers_come_back = not (careless or busy_operator)
    agents = world.space.log.agents
    world.fate.meanwhile = world.purge_one
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
            world.narrowed(world.rng.choice(agents))
        if world.rng.random() < 0.3:
            world.purge_one()
        if world.rng.random() < 0.04:
            world.cancel()
        if world.rng.random() < 0.3:
            world.look_after_mailboxes()
        if world.rng.random() < 0.3:
            world.retain(careless=careless)
        if world.rng.random() < 0.1:
            world.boxes.keep_copy()
            world.books.keep_copy()
        if world.rng.random() < 0.15:
            world.boxes.forget_blocks()
        if world.rng.random() < 0.02:
            world.expire()
        if world.rng.random() < 0.02:
            world.lose_a_frame()
    world.fate.meanwhile = None
    _come_to_rest(world, random.Random(seed + 1))
    world.check_complete(telling=telling)
    return world


def _come_to_rest(world: World, rng: random.Random) -> None:
    world.fate.rng = rng
    for _ in range(400):
        world.purge_one()
        world.run_batch()
        world.pay()
        for owner in world.space.log.agents:
            world.read(owner, MAILBOX_FRAMES)
        if world.is_at_rest():
            return
    raise Violation("delivery never came to rest")
