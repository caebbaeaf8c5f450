"""A simulator of delivery: the real rules and the real order of effects, with ports that crash.

`simulate(seed)` makes a space live through joins, leaves, class changes, narrowing, revocation, links and messages,
good and poisoned, while batches run, die at any effect and run again, mailboxes fill up, acknowledgements get lost,
debts are paid or cancelled by an operator, and readers come and go, some of them settling out of order. It checks at
every step that nobody is handed what it is not owed or no longer allowed, that numbers have no gap and channels are in
order, and at the end that everything owed and allowed all along arrived, or was cancelled and its owner told. A seed is
the same life on every run. What is owed is taken from `testing/model.py`, which knows nothing of the pipeline.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tidings.pipeline.debts import DebtEvent, Debts
from tidings.pipeline.delivering import Batch, Deliverer, Emptied, resume_counters
from tidings.pipeline.judging import ORIGIN_HEADER, Deliverable, Judge, Judgement, Stored
from tidings.pipeline.planning import Counter, Delivered, Plan
from tidings.pipeline.runs import BlockInfo, MadeBlock, cut_blocks
from tidings.space.fold import LogRecord, Table
from tidings.testing import model
from tidings.testing.generated import GeneratedLog, new_log, seeded_key
from tidings.wire.frames import Lost, decode_frame, encode_frame, frame_id, open_block
from tidings.wire.headers import encode_headers
from tidings.wire.keys import ACCOUNT
from tidings.wire.message import Mention, Message, Sender, compose
from tidings.wire.rulings import Access, Channel, Defaults, Link, Space, verify_ruling

EPOCH = "epoch"
#: small, so that mailboxes are full often
MAILBOX_FRAMES = 12
FAKE_SIGNATURE = "A" * 88
LINKS = ("east", "west")
#: table and model both verify every ruling; once is enough
verify_once = lru_cache(maxsize=1024)(verify_ruling)


class Crash(Exception):
    """The process died here."""


class Violation(AssertionError):
    """Delivery broke a promise; the message says which and for whom."""


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
        self.rows: list[tuple[Batch, Delivered]] = []
        self.done: set[int] = set()
        self.floor = 0
        self.order = 0
        #: an operator's events that the running process has not seen
        self.foreign: list[DebtEvent] = []

    def is_done(self, batch: Batch) -> bool:
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

    def write_deliveries(self, batch: Batch, rows: Sequence[Delivered]) -> None:
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
        last: dict[str, list[tuple[Batch, Delivered]]] = {}
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


@dataclass
class Reader:
    """One owner: takes frames, opens them, remembers what it saw. An orderly one settles each before the next."""

    owner: str
    orderly: bool = True
    series: str = ""
    number: int = 0
    #: series -> numbers it saw
    numbers: dict[str, set[int]] = field(default_factory=dict)
    #: the newest frame it saw, by its place in the mailbox
    last: tuple[int, str] = (0, "")
    seen: set[int] = field(default_factory=set)
    newest: dict[str, int] = field(default_factory=dict)
    told: list[Lost] = field(default_factory=list)


class World:
    """Everything of one simulated space."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fate = Fate(self.rng)
        self.log: GeneratedLog = new_log(self.rng, agents=self.rng.randint(3, 5), channels=4)
        self.boxes = Mailboxes(self.rng, self.fate)
        self.books = Books(self.fate)
        self.readers = {owner: Reader(owner, orderly=self.rng.random() < 0.7) for owner in self.log.agents}
        self.elsewhere, self.stranger = seeded_key(self.rng, ACCOUNT).id, seeded_key(self.rng).id
        self.stored: list[Stored] = []
        self.batch_number = 0
        self.pending: tuple[int, int] | None = None
        self.offset = 0
        #: owner -> the newest access record the pipeline has acted on
        self.enforced: dict[str, int] = {}
        self.table = Table(self.log.subjects, self.log.space_id, self.log.anchor_key, verify=verify_once)
        self.state = model.Running("main", self.log.space_id, self.log.anchor_key, verify=verify_once)
        #: sequence of a message -> whom it is owed to
        self.truth: dict[int, set[str]] = {}
        self.channel_of: dict[int, str] = {}
        self._judged: dict[int, Judgement] = {}
        self.deliverer = self._start()
        for owner in self.log.agents:
            self.grant(owner, (">",), (">",))

    # --- the log ---

    def _append(self, record: LogRecord, headers: bytes | None = None) -> None:
        if headers is None:
            headers = encode_headers(record.headers.items())
        self.stored.append(Stored(record.seq, record.time_ns, record.subject, headers, record.payload))
        self.table.apply(record)
        self._learn(record)

    def grant(self, owner: str, read: tuple[str, ...], post: tuple[str, ...], *, revoked: bool = False) -> None:
        before = self.table.head
        name = f"agent{self.log.agents.index(owner)}"
        access = Access(op=f"op{self.log.seq}", name=name, read=read, post=post, revoked=revoked)
        self._append(self.log.access(owner, access))
        for interval in self.table.uncovered(owner):
            self._append(self.log.member(owner, interval.pattern, "out"))
        if self.table.rules.narrowings(before, self.table.head).get(owner):
            self.boxes.note_and_empty(owner)

    def _message(self, sender: str, text: str, mentions: Sequence[str] = ()) -> Message:
        """The same on every run of a seed: sizes decide what fits."""
        number = f"{self.rng.getrandbits(48):012x}"
        return compose(
            Sender(sender, "name"),
            text=text,
            mentions=[Mention(owner, "somebody") for owner in mentions],
            id=f"01890000-0000-7000-8000-{number}",
            ts="2026-01-01T00:00:00.000Z",
        )

    def chat(self, sender: str, channel: str, mentions: Sequence[str] = ()) -> None:
        message = self._message(sender, "hello", mentions)
        record = self.log.append(self.log.subjects.chat(sender, channel), message.raw, FAKE_SIGNATURE)
        self._append(record, encode_headers([("Td-Sig", FAKE_SIGNATURE), ("Nats-Msg-Id", message.id)]))

    def poison(self, sender: str, channel: str) -> None:
        """A record that is not what it claims to be; nobody is owed it."""
        other = self.rng.choice([agent for agent in self.log.agents if agent != sender])
        message = self._message(sender, "hello")
        good = encode_headers([("Td-Sig", FAKE_SIGNATURE)])
        headers, payload = self.rng.choice(
            (
                (good, b"not a message"),
                (good, message.raw[:-1]),
                (good, self._message(other, "I am another").raw),
                (b"", message.raw),
                (b"NATS/1.0\r\ngarbage", message.raw),
                (encode_headers([("Td-Sig", FAKE_SIGNATURE), ("Nats-Sequence", "1")]), message.raw),
            )
        )
        record = self.log.append(self.log.subjects.chat(sender, channel), payload)
        self.truth[record.seq] = set()
        self._append(record, headers)

    def via(self, link: str, sender: str, theirs: str, channel: str) -> None:
        origin = self.rng.choice((self.elsewhere, self.elsewhere, self.log.space_id))
        message = self._message(sender, "hello from elsewhere")
        record = self.log.append(self.log.subjects.via(link, sender, channel), message.raw, FAKE_SIGNATURE)
        fields = [("Td-Sig", FAKE_SIGNATURE), ("Nats-Msg-Id", message.id), (ORIGIN_HEADER, f"{origin} {theirs}")]
        self.truth[record.seq] = self.state.owed_via(record.seq, link, sender, origin, theirs, channel)
        self._append(record, encode_headers(fields))

    def step_log(self) -> None:
        rng, log = self.rng, self.log
        owner, channel = rng.choice(log.agents), rng.choice(log.channels)
        pattern = rng.choice([*log.channels, "team.>", ">"])
        link = rng.choice(LINKS)
        match rng.choices(range(10), (60, 16, 8, 5, 3, 2, 1, 5, 8, 4))[0]:
            case 0:
                for _ in range(rng.choice((1, 1, 3, 20))):
                    self.chat(rng.choice(log.agents), channel, rng.sample(log.agents, rng.choice((0, 0, 1, 2))))
            case 1:
                self._append(log.member(owner, pattern, "in"))
            case 2:
                self._append(log.member(owner, pattern, "out"))
            case 3:
                self.grant(owner, rng.choice(((">",), (channel,), ("team.>",), ())), rng.choice(((">",), (channel,))))
            case 4:
                self._append(log.channel(Channel(op="x", name=channel, cls=rng.choice(("live", "durable", None)))))
            case 5:
                self._append(log.space(Space(op="x", defaults=Defaults(cls=rng.choice(("live", "durable"))))))
            case 6:
                self.grant(owner, (), (), revoked=True)
            case 7:
                self.poison(owner, channel)
            case 8:
                sender = rng.choice((self.stranger, self.stranger, owner))
                for _ in range(rng.choice((1, 1, 4))):
                    self.via(link, sender, rng.choice((channel, "theirs")), channel)
            case 9:
                ruling = Link(
                    op="x",
                    link=link,
                    state=rng.choice(("on", "on", "off")),
                    origin=self.elsewhere,
                    channels={rng.choice((channel, "theirs")): channel for channel in log.channels},
                )
                self._append(log.rule(log.subjects.link(link), ruling))

    # --- the pipeline ---

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

    def _blocks(self, after: int, through: int, channels: frozenset[str] | None = None) -> list[BlockInfo]:
        judge = Judge(self.log.subjects, self.table.rules)
        messages: list[Deliverable] = []
        for record in self.stored[after:through]:  # the first record has sequence 1
            judged = self._judged.get(record.seq)
            if judged is None:
                judged = self._judged[record.seq] = judge.judge(record)
            if isinstance(judged, Deliverable) and (channels is None or judged.channel in channels):
                messages.append(judged)
        self.boxes.blocks = list(cut_blocks(messages, self.table.cuts_within(after, through)))
        self.boxes.blocks.sort(key=lambda block: block.info.first)
        return [block.info for block in self.boxes.blocks]

    def run_batch(self) -> None:
        """A batch, dying where fate says; the next call repeats the same range, as Spark does."""
        if self.pending is None:
            if self.offset >= self.table.head:
                return
            self.pending = (self.offset, self.rng.randint(self.offset + 1, self.table.head))
        after, through = self.pending
        head = self.table.head
        self.fate.arm()
        try:
            self.deliverer.deliver(
                Batch(self.batch_number, after, through, head), self.table, self._blocks(after, through)
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
        self.fate.arm()
        head = self.table.head
        try:
            payment = self.deliverer.payment(chunk=40)
            self._count_losses()
            if payment is None and self.deliverer.debts.tellable():
                self._blocks(head, head)
                self.deliverer.tell(Batch(None, head, head, head), self.table)
                self._note_enforced(head)
            if payment is not None:
                blocks = self._blocks(payment.after, payment.through, payment.channels)
                batch = Batch(None, payment.after, payment.through, head)
                self.deliverer.pay(batch, self.table, payment, blocks)
                self._note_enforced(head)
        except Crash:
            self.deliverer = self._start()

    def _count_losses(self) -> None:
        debts = self.deliverer.debts
        for owner, loss in debts.uncounted():
            subjects = {r.seq: r.subject for r in self.stored[loss.lost.first - 1 : loss.lost.last]}
            of_channel = [seq for seq, subject in subjects.items() if subject.endswith(f".{loss.lost.channel}")]
            debts.counted(owner, loss, sum(owner in self.truth.get(seq, ()) for seq in of_channel))

    def cancel(self) -> None:
        """An operator gives up part of a debt."""
        debts = [debt for debt in self.deliverer.debts.open.values() if debt.after < self.deliverer.floor]
        if debts:
            debt = self.rng.choice(debts)
            self.books.cancel(debt.owner, debt.channel, self.rng.randint(debt.after + 1, self.deliverer.floor))

    def _note_enforced(self, head: int) -> None:
        for owner in self.log.agents:
            self.enforced[owner] = head

    # --- the readers ---

    def read(self, owner: str, frames: int) -> None:
        box, reader = self.boxes.box(owner), self.readers[owner]
        taken = list(box.frames[:frames])
        if not reader.orderly:
            self.rng.shuffle(taken)
        for dlv_seq, data in taken:
            self._open(reader, dlv_seq, data)
            if self.rng.random() < 0.9:
                box.frames = [held for held in box.frames if held[0] != dlv_seq]
                box.acknowledged = dlv_seq if not box.frames else box.frames[0][0] - 1
            else:
                break

    def _open(self, reader: Reader, dlv_seq: int, data: bytes) -> None:
        frame = decode_frame(data)
        if frame.owner != reader.owner:
            raise Violation(f"a frame of {frame.owner} in the mailbox of {reader.owner}")
        if frame.series != reader.series:
            reader.series, reader.number = frame.series, 0
        if reader.orderly and frame.number > reader.number + 1:
            raise Violation(f"{reader.owner} has frame {reader.number} and gets {frame.number}: a gap without a loss")
        reader.number = max(reader.number, frame.number)
        reader.numbers.setdefault(frame.series, set()).add(frame.number)
        reader.last = max(reader.last, (dlv_seq, frame.series))
        reader.told += frame.lost
        for block in frame.blocks:
            for kept in open_block(block):
                self._surface(reader, kept.seq, kept.tail)

    def _surface(self, reader: Reader, seq: int, tail: str) -> None:
        sender, channel = _addressed(tail)
        if sender == reader.owner or seq in reader.seen:
            return
        # what was given up may still come along in a block that is owed for its later part
        if (
            reader.orderly
            and seq <= reader.newest.get(channel, 0)
            and not self._is_cancelled(reader.owner, channel, seq)
        ):
            raise Violation(f"{reader.owner} gets {seq} of {channel} after {reader.newest[channel]}")
        if reader.owner not in self.truth[seq]:
            raise Violation(f"{reader.owner} was never owed {seq} of {channel}")
        enforced = self.enforced.get(reader.owner, 0)
        changes = self.table.rules.access[reader.owner].changes(max(seq, enforced), self.table.head)
        if not any(
            self.may_read(reader.owner, channel, h) for h in (max(seq, enforced), *(at for at, _, _ in changes))
        ):
            raise Violation(f"{reader.owner} gets {seq} of {channel}, which it may not read since {enforced}")
        reader.seen.add(seq)
        reader.newest[channel] = max(seq, reader.newest.get(channel, 0))

    # --- the truth, by the naive model ---

    def _learn(self, record: LogRecord) -> None:
        """Whom the record is owed to, mentions on live channels included; nothing later changes it."""
        tail = self.log.subjects.tail(record.subject)
        if not tail.startswith(("chat.", "via.")):
            self.state.follow(record)
            return
        sender, channel = _addressed(tail)
        self.channel_of[record.seq] = channel
        if record.seq in self.truth:  # whoever wrote it knew better
            return
        owed = self.state.owed(record.seq, sender, channel)
        if self.state.is_live(channel) and self.state.may_post(sender, channel):
            owed = {mention["id"] for mention in json.loads(record.payload).get("mentions", ())} - {sender}
        self.truth[record.seq] = owed

    def may_read(self, owner: str, channel: str, seq: int) -> bool:
        return self.table.allowed_at(owner, channel, seq)

    def check_complete(self, *, telling: bool = True) -> None:
        """Everything owed and allowed from its sequence to now was surfaced, or cancelled and its owner told."""
        for seq, channel in self.channel_of.items():
            for owner in self.truth[seq]:
                if seq not in self.readers[owner].seen and self._was_allowed_since(owner, channel, seq):
                    self._check_cancelled(owner, channel, seq, telling=telling)
        for reader in self.readers.values():
            newest, series = reader.last
            numbers = reader.numbers.get(series, set())
            if newest > self.boxes.box(reader.owner).emptied and numbers != set(range(1, max(numbers, default=0) + 1)):
                raise Violation(f"{reader.owner} has the numbers {sorted(numbers)}: a gap without a loss")

    def _was_allowed_since(self, owner: str, channel: str, seq: int) -> bool:
        changes = self.table.rules.access[owner].changes(seq, self.table.head)
        return all(self.may_read(owner, channel, head) for head in (seq, *(at for at, _, _ in changes)))

    def _is_cancelled(self, owner: str, channel: str, seq: int) -> bool:
        events = (e for e in self.books.events if (e.kind, e.owner, e.channel) == ("cancel", owner, channel))
        return any(event.seq >= seq for event in events)

    def _check_cancelled(self, owner: str, channel: str, seq: int, *, telling: bool) -> None:
        if not self._is_cancelled(owner, channel, seq):
            raise Violation(f"{owner} was owed {seq} of {channel} and never got it")
        if not telling and owner in self.table.rules.narrowings(0, self.table.head):
            return
        if not any(lost.channel == channel and lost.first <= seq <= lost.last for lost in self.readers[owner].told):
            raise Violation(f"{owner} was owed {seq} of {channel}, it was cancelled, and nobody told")


def _addressed(tail: str) -> tuple[str, str]:
    """Sender and channel of a message, from its subject."""
    kind, *rest = tail.split(".")
    sender, *channel = rest if kind == "chat" else rest[1:]
    return sender, ".".join(channel)


def simulate(seed: int, steps: int = 60, *, telling: bool = False, busy_operator: bool = False) -> World:
    """One life of a space. Raises `Violation` if delivery broke a promise.

    `telling`: whoever was narrowed must have been told of what was cancelled too; the frame that said so may have been
    emptied out of its mailbox. `busy_operator`: cancels while a batch is under way, not only between two.
    """
    world = World(seed)
    if busy_operator:
        world.fate.meanwhile = world.cancel
    for _ in range(steps):
        world.step_log()
        if world.rng.random() < 0.6:
            world.run_batch()
        if world.rng.random() < 0.4:
            world.read(world.rng.choice(world.log.agents), world.rng.randint(1, 6))
        if world.rng.random() < 0.25:
            world.pay()
        if world.rng.random() < 0.03:  # a steward that starts again empties once more
            world.boxes.note_and_empty(world.rng.choice(world.log.agents))
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
        for owner in world.log.agents:
            world.read(owner, MAILBOX_FRAMES)
        debts = world.deliverer.debts
        idle = world.offset >= world.table.head and world.pending is None and not (debts.open or debts.untold)
        if idle and not any(box.frames for box in world.boxes.boxes.values()):
            return
    raise Violation("delivery never came to rest")
