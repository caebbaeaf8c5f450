"""How much of a stream one batch takes, and how its tasks share it.

Records are counted by their sequences, which costs nothing. **Bytes** are harder: JetStream tells the size of a record
only together with the record, and an average says nothing about a backlog of 100,000 small records that ends in 4,000
of 200 KB. So a bound in bytes is kept in two steps, the first of which is nearly always enough in a running query:

1. What the stream says of itself. Its `bytes` are those of every record it holds, so a range of a stream that is
   smaller than the bound is smaller too. Between two looks at the stream during which nothing was removed (as many
   records came as there are more now) its `bytes` grew by exactly what came: a query that keeps up has its last look at
   the end of its last batch, and knows the size of the next one for nothing.
2. If that leaves it open, the range is **measured**: read as a task would read it, only as far as the bound, a page at
   a time, and nothing of it is kept but the sizes. That is as long as one bare reader needs for the range, so while a
   batch of a backlog is worked on, the next one is measured beside it; the broker sends the data twice
   (docs/spark-source.md has figures). Where the sizes are known the tasks get parts of about the same number of bytes.

A record counts with its payload, its headers, its subject and what the broker writes beside them (about 150 bytes).
A batch has at least one record, however large. Sizes come from direct get, which a replica that lags may answer; one
that ends early is not believed (`RangeReader`).
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice

from pyspark.sql.datasource import InputPartition

from tidings.delivery.stream_reader import StreamLocation, StreamReader, StreamState
from tidings.errors import TidingsError
from tidings.nats.errors import NatsError
from tidings.wire.records import Page

_SEQUENCE = b"\r\nNats-Sequence: "


@dataclass(frozen=True, slots=True)
class Measured:
    """Sizes of a range that was read: which sequences it has records at, and the bytes of all up to each."""

    seqs: Sequence[int]
    sums: Sequence[int]

    @property
    def total(self) -> int:
        return self.sums[-1] if self.sums else 0

    def through(self, last: int, most: int) -> int:
        """How far a range of at most `most` bytes goes, up to `last`: at least one record, however large."""
        above = bisect_right(self.sums, most)
        return min(last, max(self.seqs[above] - 1, self.seqs[0])) if above < len(self.seqs) else last


@dataclass
class SeqRange(InputPartition):
    """One task's part: first..last. What is gone from `kept_from` on is missing; None: from the stream's first on."""

    first: int
    last: int
    kept_from: int | None = None


class BatchAdmission:
    """What one query takes in a batch: at most `max_bytes`, if that is a number."""

    def __init__(
        self, location: StreamLocation, subjects: Sequence[str], max_records: int, max_bytes: int | None
    ) -> None:
        self._subjects, self._max_records, self._max_bytes = subjects, max_records, max_bytes
        #: the last look at the stream that ended where a batch did
        self._look: StreamState | None = None
        self._measured: dict[tuple[int, int], Measured] = {}
        self._ahead = MeasuringAhead(location, subjects, max_bytes or 0)

    def end(self, reader: StreamReader, state: StreamState, after: int, last: int) -> int:
        """The end of the batch that begins after `after` and may reach to `last`; `state`: the stream as it is now."""
        self._measured.clear()
        if self._max_bytes is not None and self._most(state, after) > self._max_bytes:
            ahead = self._ahead.taken(after + 1)
            through, measured = ahead or (last, measure(reader, self._subjects, after + 1, last, self._max_bytes))
            last = measured.through(min(last, through), self._max_bytes)
            kept = bisect_right(measured.seqs, last)
            self._measured[after, last] = Measured(measured.seqs[:kept], measured.sums[:kept])
            if last < state.last:
                self._ahead.start(last + 1, min(state.last, last + self._max_records))
        if last == state.last:
            self._look = state
        return last

    def sizes(self, after: int, last: int) -> Measured | None:
        """What is known of the batch that was planned last."""
        return self._measured.get((after, last))

    def close(self) -> None:
        self._ahead.close()

    def _most(self, state: StreamState, after: int) -> int:
        """No record after `after` is left out of this many bytes."""
        look = self._look
        if look is not None and look.last == after and look.created == state.created:
            removed = (state.last - look.last) - (state.messages - look.messages)
            if not removed:
                return state.bytes - look.bytes
        return state.bytes


class MeasuringAhead:
    """Measures the next batch of a backlog while the one before is worked on: a thread and a connection of its own.

    What it finds stays true: records do not change, and one that is removed meanwhile was counted too much.
    """

    def __init__(self, location: StreamLocation, subjects: Sequence[str], enough: int) -> None:
        self._reader = StreamReader(location)
        self._subjects, self._enough = subjects, enough
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._first = 0
        self._found: tuple[int, Measured] | None = None

    def start(self, first: int, last: int) -> None:
        self.close()
        self._stop = threading.Event()
        self._first, self._found = first, None
        self._thread = threading.Thread(target=self._run, args=(first, last, self._stop), name="measure", daemon=True)
        self._thread.start()

    def taken(self, first: int) -> tuple[int, Measured] | None:
        """The end of the range that begins there, and its sizes; None if it was not measured."""
        if self._thread is None or self._first != first:
            return None
        self._thread.join()
        self._thread = None
        return self._found

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._reader.close()

    def _run(self, first: int, last: int, stop: threading.Event) -> None:
        # whoever needs it measures it again, and says what is wrong
        with suppress(TidingsError, NatsError, OSError):
            measured = measure(self._reader, self._subjects, first, last, self._enough, stop)
            if not stop.is_set():
                self._found = last, measured


def measure(
    reader: StreamReader,
    subjects: Sequence[str],
    first: int,
    last: int,
    enough: int,
    stop: threading.Event | None = None,
) -> Measured:
    """The sizes of the records of a range, up to the first that brings them above `enough`."""
    seqs, sums = array("q"), array("q")
    total = 0
    for page in reader.merged(first, last, subjects, max_bytes=enough + 1, page_type=SizePage):
        assert isinstance(page, SizePage)
        seqs.extend(page.seqs)
        sums.extend(islice(accumulate(page.sizes, initial=total), 1, None))
        total = sums[-1]
        if total > enough or (stop is not None and stop.is_set()):
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
