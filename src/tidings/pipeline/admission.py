"""How much of a stream one batch takes, and how its tasks share it.

Records are counted by their sequences, which costs nothing. **Bytes** are harder: JetStream tells the size of a record
only together with the record, and an average says nothing about a backlog of 100,000 small records that ends in 4,000
of 200 KB. So a bound in bytes is kept in two steps, the first of which is nearly always enough in a running query:

1. What the stream says of itself. Its `bytes` are those of every record it holds, so a range of a stream that is
   smaller than the bound is smaller too. Between two looks at the stream during which nothing was removed (as many
   records came as there are more now) its `bytes` grew by exactly what came: a query that keeps up has its last look at
   the end of its last batch, and knows the size of the next one for nothing.
2. If that leaves it open, the range is **measured**: read as a task would read it, only as far as the bound, a page at
   a time, and nothing of it is kept but the sizes. That reads what the tasks read again, and no more than the bound:
   some microseconds for each record in the driver, once (docs/spark-source.md has the figures). Where the sizes are
   known the tasks get parts of about the same number of bytes.

A record counts with its payload, its headers, its subject and what the broker writes beside them (about 150 bytes).
A batch has at least one record, however large. Sizes come from direct get, which a replica that lags may answer; one
that ends early is not believed (`RangeReader`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

from pyspark.sql.datasource import InputPartition

from tidings.broker.records import Page
from tidings.pipeline.stream_reader import StreamReader, StreamState

_SEQUENCE = b"\r\nNats-Sequence: "


@dataclass(frozen=True, slots=True)
class Measured:
    """Sizes of a range that was read: which sequences it has records at, and the bytes of all up to each."""

    seqs: Sequence[int]
    sums: Sequence[int]

    @property
    def total(self) -> int:
        return self.sums[-1] if self.sums else 0


@dataclass
class SeqRange(InputPartition):
    """One task's part: first..last. What is gone from `kept_from` on is missing; None: from the stream's first on."""

    first: int
    last: int
    kept_from: int | None = None


@dataclass(slots=True)
class BatchAdmission:
    """What one query takes in a batch: at most `max_bytes`, if that is a number."""

    subjects: Sequence[str]
    max_bytes: int | None
    #: the last look at the stream that ended where a batch did
    _look: StreamState | None = None
    _measured: dict[tuple[int, int], Measured] = field(default_factory=dict)

    def end(self, reader: StreamReader, state: StreamState, after: int, last: int) -> int:
        """The end of the batch that begins after `after` and may reach to `last`; `state`: the stream as it is now."""
        self._measured.clear()
        if self.max_bytes is not None and self._most(state, after) > self.max_bytes:
            measured = measure(reader, self.subjects, after + 1, last, self.max_bytes)
            cut = bisect_left(measured.sums, self.max_bytes + 1)
            if cut < len(measured.sums):
                # up to the record that is too much; at least one, however large
                last = measured.seqs[cut] - 1 if cut else measured.seqs[0]
            kept = max(cut, 1)
            self._measured[after, last] = Measured(measured.seqs[:kept], measured.sums[:kept])
        if last == state.last:
            self._look = state
        return last

    def sizes(self, after: int, last: int) -> Measured | None:
        """What is known of the batch that was planned last."""
        return self._measured.get((after, last))

    def _most(self, state: StreamState, after: int) -> int:
        """No record after `after` is left out of this many bytes."""
        look = self._look
        if look is not None and look.last == after and look.created == state.created:
            removed = (state.last - look.last) - (state.messages - look.messages)
            if not removed:
                return state.bytes - look.bytes
        return state.bytes


def measure(reader: StreamReader, subjects: Sequence[str], first: int, last: int, enough: int) -> Measured:
    """The sizes of the records of a range, up to the first that brings them above `enough`."""
    seqs, sums = array("q"), array("q")
    total = 0
    for page in reader.merged(first, last, subjects, max_bytes=enough + 1, page_type=SizePage):
        assert isinstance(page, SizePage)
        seqs.extend(page.seqs)
        sums.extend(islice(accumulate(page.sizes, initial=total), 1, None))
        total = sums[-1]
        if total > enough:
            break
    return Measured(seqs, sums)


class SizePage(Page):
    """A page that keeps of each record where it is and how large: half the work of one that keeps everything."""

    __slots__ = ("sizes",)
    COLUMNS = ("seqs", "sizes")

    def clear(self) -> None:
        self.seqs: list[int] = []
        self.sizes: list[int] = []
        self.status = b""

    def take(self, block: bytes, payload: bytes) -> bool:
        """The broker's own sequence is the last in the block, whatever the sender wrote before; a status has none."""
        at = block.rfind(_SEQUENCE)
        if at < 0:
            self.status = block
            return False
        at += len(_SEQUENCE)
        self.seqs.append(int(block[at : block.index(b"\r", at)]))
        self.sizes.append(len(block) + len(payload))
        return True


@dataclass(frozen=True, slots=True)
class PartSizes:
    """How large a task's part may be, and how many there are at least."""

    records: int
    bytes: int
    at_least: int = 1


def split(
    first: int,
    last: int,
    sizes: PartSizes,
    kept_from: int | None = None,
    *,
    guess: float = 0,
    of: Measured | None = None,
) -> list[SeqRange]:
    """Ranges that together are first..last, each of at most `sizes.records` sequences.

    Where the sizes of the records are known (`of`) they have about the same number of bytes; else about the same number
    of sequences, so many as a record of `guess` bytes asks for.
    """
    count = last - first + 1
    if count <= 0:
        return []
    total = of.total if of else guess * count
    parts = min(count, max(-(-count // sizes.records), sizes.at_least, -(-int(total) // sizes.bytes)))
    ends = _even_ends(first, last, parts) if of is None else _ends_by_bytes(of, last, parts)
    ranges: list[SeqRange] = []
    at = first
    for end in ends:
        pieces = -(-(end - at + 1) // sizes.records)
        for piece in _even_ends(at, end, pieces):
            ranges.append(SeqRange(at, piece, kept_from))
            at = piece + 1
    return ranges


def _even_ends(first: int, last: int, parts: int) -> list[int]:
    size = -(-(last - first + 1) // parts)
    return [*range(first + size - 1, last, size), last]


def _ends_by_bytes(of: Measured, last: int, parts: int) -> list[int]:
    """A part ends with the record that brings it to its share."""
    shares = (of.total * part // parts for part in range(1, parts))
    ends = sorted({of.seqs[bisect_left(of.sums, share)] for share in shares if of.seqs})
    return [*(end for end in ends if end < last), last]
