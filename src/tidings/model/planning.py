"""Planning a batch: which blocks go to whom, in which frames, and what has to wait. Pure.

`plan` packs blocks into frames per owner, numbers them, and leaves out lanes in debt; owners beyond the byte cap of a
batch become debts, the largest first, so that a huge audience is late and never a stall for the small ones. Blocks that
are stored once and named in frames (`by_reference`) count once, and in each frame with the bytes of a reference. Which
they are depends on nothing that may be different when the batch is repeated: the same frames then have the same bytes,
and the broker knows them. `settle`
turns what the broker said into rows of `deliveries`, debts and counters: the frames of an owner are published one
after the other, so the first that was not acknowledged and all after it become debts of their lanes. An outcome nobody
knows counts as not acknowledged: a repeat at worst.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from tidings.model.blocks import BlockInfo
from tidings.model.deferred import Debts, Lane, Loss
from tidings.wire.frames import MAX_FRAME_BYTES, MAX_FRAME_MESSAGES, MAX_FRAME_REFS, Lost, is_by_reference

#: bytes of DLV and BLK one batch may write
BATCH_BYTES = 256 * 1024 * 1024
#: room for what surrounds the blocks of a frame
FRAME_OVERHEAD = 4 * 1024

Audience = Callable[[BlockInfo], Iterable[str]]
#: does a block of so many bytes for so many readers go by reference? One reader is told from more, no more
Choice = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Counter:
    """Where the numbering of an owner's frames stands.

    The series is in every frame: after a mailbox was emptied the same content must not have the same bytes, or the
    broker takes it for a repeat of what is no longer there.
    """

    series: str
    number: int = 0
    prev: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a frame that belongs to one lane: `count` is what the owner is owed of it."""

    channel: str
    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class FramePlan:
    owner: str
    series: str
    number: int
    prev: tuple[int, int, int] | None
    losses: tuple[Loss, ...]
    #: indices into the blocks that were planned
    blocks: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def lost(self) -> tuple[Lost, ...]:
        return tuple(loss.lost for loss in self.losses)

    @property
    def counter(self) -> Counter:
        """Where the numbering stands once this frame was acknowledged."""
        return Counter(self.series, self.number, self.summary)

    @property
    def summary(self) -> tuple[int, int, int]:
        """What the next frame says of this one."""
        if not self.pieces:
            return (0, 0, 0)
        first, last = min(p.first for p in self.pieces), max(p.last for p in self.pieces)
        return (first, last, sum(p.count for p in self.pieces))


@dataclass(slots=True)
class Plan:
    #: owner -> frames in the order they must be published
    frames: dict[str, list[FramePlan]] = field(default_factory=dict)
    #: lanes that go into debt before anything is published: everything after the number
    deferred: dict[Lane, int] = field(default_factory=dict)
    #: which of the blocks frames only name
    refs: frozenset[int] = frozenset()
    bytes: int = 0

    def within(self, rooms: Mapping[str, int]) -> Plan:
        """Only as many frames as each mailbox has room for; one whose room nobody knows is tried with one."""
        frames = {owner: frames[: rooms.get(owner, 1)] for owner, frames in self.frames.items()}
        return Plan(frames, self.deferred, self.refs, self.bytes)

    @property
    def named(self) -> set[int]:
        """Blocks that must be stored before the frames that name them."""
        used = (frame.blocks for frames in self.frames.values() for frame in frames)
        return set(chain.from_iterable(used)) & self.refs


@dataclass(frozen=True, slots=True)
class Delivered:
    """One row of `deliveries`: a range of one channel in one frame."""

    owner: str
    series: str
    number: int
    channel: str
    first: int
    last: int
    count: int
    dlv_seq: int


@dataclass(slots=True)
class Settlement:
    delivered: list[Delivered] = field(default_factory=list)
    #: lanes of frames that were not acknowledged: everything after the number is owed
    owed: dict[Lane, int] = field(default_factory=dict)
    #: the same lanes, and where the plan began with each
    begun: dict[Lane, int] = field(default_factory=dict)
    counters: dict[str, Counter] = field(default_factory=dict)
    #: owner -> (orders of the losses it was told, DLV sequence of the frame)
    told: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)


def by_reference(blocks: Sequence[BlockInfo], readers: Audience, choice: Choice = is_by_reference) -> frozenset[int]:
    """Which blocks are stored once and named. `readers`: whom each is owed to, whatever became of it and them since."""
    chosen: set[int] = set()
    for index, block in enumerate(blocks):
        # whoever is only mentioned may not be shown the history of the channel, from which a lost one is read
        if block.mentioned is None and choice(block.size, 2):
            some = islice((owner for owner in readers(block) if block.owed_to(owner)), 2)
            if choice(block.size, sum(1 for _ in some)):
                chosen.add(index)
    return frozenset(chosen)


def plan(
    blocks: Sequence[BlockInfo],
    audience: Audience,
    debts: Debts,
    counters: Mapping[str, Counter],
    *,
    refs: frozenset[int] = frozenset(),
    cap: int = BATCH_BYTES,
) -> Plan:
    """`blocks` in order of their first sequence per channel; `audience` says who is owed and allowed each."""
    sizes = [block.ref_size if index in refs else block.size for index, block in enumerate(blocks)]
    queues: dict[str, list[int]] = {}
    for index, block in enumerate(blocks):
        for owner in audience(block):
            if (owner, block.channel) not in debts.open and block.owed_to(owner):
                queues.setdefault(owner, []).append(index)
    untold = debts.tellable()
    for owner in untold:
        queues.setdefault(owner, [])
    packs = {owner: list(_packed(queue, blocks, sizes, refs)) for owner, queue in queues.items()}
    own = {o: sum(sizes[i] for i in queue) + FRAME_OVERHEAD * len(packs[o]) for o, queue in queues.items()}
    # by what it is to read: a reference to much is smaller than a little in full, and would make the small ones wait
    owed = {owner: sum(blocks[index].size for index in queue) for owner, queue in queues.items()}
    made = Plan(refs=refs)
    stored: set[int] = set()
    for owner in sorted(queues, key=lambda owner: (owed[owner], owner)):
        new = refs.intersection(queues[owner]) - stored
        size = own[owner] + sum(blocks[index].size for index in new)
        if made.bytes + size > cap and made.bytes:
            for index in reversed(queues[owner]):
                made.deferred[owner, blocks[index].channel] = blocks[index].first - 1
            continue
        made.bytes += size
        stored |= new
        counter = counters.get(owner, Counter("first"))
        made.frames[owner] = list(_frames(owner, packs[owner] or [()], blocks, counter, untold.get(owner, ())))
    return made


def _frames(
    owner: str,
    packs: Iterable[tuple[int, ...]],
    blocks: Sequence[BlockInfo],
    counter: Counter,
    untold: Iterable[Loss],
) -> Iterator[FramePlan]:
    lost = tuple(untold)
    for packed in packs:
        pieces = _pieces(owner, packed, blocks)
        frame = FramePlan(owner, counter.series, counter.number + 1, counter.prev, lost, packed, pieces)
        yield frame
        counter, lost = frame.counter, ()


def _packed(
    queue: Sequence[int], blocks: Sequence[BlockInfo], sizes: Sequence[int], refs: frozenset[int]
) -> Iterator[tuple[int, ...]]:
    packed: list[int] = []
    count = size = named = 0
    for index in queue:
        count += blocks[index].count
        size += sizes[index]
        named += index in refs
        full = count > MAX_FRAME_MESSAGES or size > MAX_FRAME_BYTES - FRAME_OVERHEAD or named > MAX_FRAME_REFS
        if packed and full:
            yield tuple(packed)
            packed, count, size, named = [], blocks[index].count, sizes[index], int(index in refs)
        packed.append(index)
    if packed:
        yield tuple(packed)


def _pieces(owner: str, packed: Sequence[int], blocks: Sequence[BlockInfo]) -> tuple[Piece, ...]:
    pieces: dict[str, Piece] = {}
    for block in (blocks[index] for index in packed):
        had = pieces.get(block.channel)
        first, count = (had.first, had.count) if had else (block.first, 0)
        pieces[block.channel] = Piece(block.channel, first, block.last, count + block.owed_to(owner))
    return tuple(pieces.values())


def settle(planned: Plan, acknowledged: Mapping[str, Sequence[int]], counters: Mapping[str, Counter]) -> Settlement:
    """`acknowledged`: owner -> the DLV sequences of its frames, as far as the broker acknowledged them in order."""
    result = Settlement()
    for owner, frames in planned.frames.items():
        sequences = acknowledged.get(owner, ())
        for frame, dlv_seq in zip(frames, sequences, strict=False):
            result.delivered += [
                Delivered(owner, frame.series, frame.number, p.channel, p.first, p.last, p.count, dlv_seq)
                for p in frame.pieces
            ]
            result.counters[owner] = frame.counter
            if frame.losses:
                result.told[owner] = (tuple(loss.order for loss in frame.losses), dlv_seq)
        for frame in frames[len(sequences) :]:
            for piece in frame.pieces:
                result.owed.setdefault((owner, piece.channel), piece.first - 1)
        starts: dict[Lane, int] = {}
        for piece in (piece for frame in frames for piece in frame.pieces):
            starts.setdefault((owner, piece.channel), piece.first - 1)
        result.begun |= {lane: start for lane, start in starts.items() if lane in result.owed}
        if not sequences and owner in counters:
            result.counters[owner] = counters[owner]
    return result
