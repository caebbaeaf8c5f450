"""Runs and blocks: consecutive messages of a channel with one audience, encoded once for all of it.

A run ends where a ruling may change the audience of its channel, and where the read range ends. A block is a piece of
a run that fits into a frame. A message on a live channel that mentions somebody is a block of its own, because its
audience is its own. Pure; the workers call it on their part of a batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tidings.model.classify import Deliverable
from tidings.wire.frames import MAX_BLOCK_BYTES, MAX_FRAME_MESSAGES, encode_block, encode_seqs, raw_size, ref_size
from tidings.wire.names import covers, is_channel

Cuts = Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What the planner has to know of a block; its bytes stay where they were made."""

    channel: str
    first: int
    last: int
    count: int
    #: bytes in a frame: of the block, and of a reference to it
    size: int
    ref_size: int
    senders: tuple[tuple[str, int], ...]
    #: whom mentions buy a copy on a live channel; None: the members
    mentioned: tuple[str, ...] | None = None

    def owed_to(self, owner: str) -> int:
        """How many of its messages `owner` did not send itself."""
        return self.count - sum(count for sender, count in self.senders if sender == owner)


@dataclass(frozen=True, slots=True)
class MadeBlock:
    info: BlockInfo
    data: bytes
    #: `encode_seqs` of its messages
    seqs: bytes


class Segments:
    """Which run of its channel a sequence belongs to."""

    def __init__(self, cuts: Cuts) -> None:
        #: most cuts are of one channel: looking through all of them for each channel would cost their product
        self._named: dict[str, list[int]] = {}
        self._wide: list[tuple[int, str]] = []
        for at, pattern in cuts:
            if is_channel(pattern):
                self._named.setdefault(pattern, []).append(at)
            else:
                self._wide.append((at, pattern))
        self._of_channel: dict[str, list[int]] = {}

    def number(self, channel: str, seq: int) -> int:
        cuts = self._of_channel.get(channel)
        if cuts is None:
            wide = (at for at, pattern in self._wide if covers(pattern, channel))
            cuts = self._of_channel[channel] = sorted([*self._named.get(channel, ()), *wide])
        return bisect_left(cuts, seq)


def cut_blocks(messages: Iterable[Deliverable], cuts: Cuts) -> Iterator[MadeBlock]:
    """Blocks of `messages` (in log order), as soon as each is full; the rest at the end, oldest first."""
    segments = Segments(cuts)
    growing: dict[str, tuple[int, _Growing]] = {}
    for message in messages:
        if message.mentions is not None:
            yield _Growing([message]).made()
            continue
        segment = segments.number(message.channel, message.kept.seq)
        number, block = growing.get(message.channel, (segment, None))
        if block is not None and number == segment and block.take(message):
            continue
        if block is not None:
            yield block.made()
        growing[message.channel] = (segment, _Growing([message]))
    for _, block in sorted(growing.values(), key=lambda entry: entry[1].first):
        yield block.made()


class _Growing:
    def __init__(self, messages: list[Deliverable]) -> None:
        self._messages = messages
        self._raw = sum(raw_size(message.kept) for message in messages)

    @property
    def first(self) -> int:
        return self._messages[0].kept.seq

    def take(self, message: Deliverable) -> bool:
        """Add it, unless the block is full."""
        raw = self._raw + raw_size(message.kept)
        if raw > MAX_BLOCK_BYTES or len(self._messages) >= MAX_FRAME_MESSAGES:
            return False
        self._messages.append(message)
        self._raw = raw
        return True

    def made(self) -> MadeBlock:
        data = encode_block([message.kept for message in self._messages])
        seqs = encode_seqs([message.kept.seq for message in self._messages])
        channel = self._messages[0].channel
        senders = tuple(sorted(Counter(message.sender for message in self._messages).items()))
        info = BlockInfo(
            channel,
            self.first,
            self._messages[-1].kept.seq,
            len(self._messages),
            len(data),
            ref_size(channel, seqs),
            senders,
            self._messages[0].mentions,
        )
        return MadeBlock(info, data, seqs)
