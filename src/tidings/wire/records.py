"""Records of a stream as the broker hands them over, whoever reads: one type, and pages of many by columns.

What the broker appends to a record's headers is cut from the end of the raw block, where no sender can write; the
sender's own block stays the bytes it is and may be garbage. A status is what has no sequence of the broker's: a record
whose sender wrote one into its first line is still a record.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import lt
from typing import ClassVar

from tidings.errors import WireError
from tidings.wire.headers import DIRECT_GET_HEADERS, Fields, Headers, split_block
from tidings.wire.times import parse_time, start_of_second

_APPENDED = b"\r\nNats-Stream: "
_END = b"\r\n\r\n"
#: what the broker appends to a record, exactly; anything else is left to `split_block`
_TAIL = re.compile(
    rb"\r\nNats-Stream: [!-~]+\r\nNats-Subject: ([!-~]+)\r\nNats-Sequence: ([0-9]+)"
    rb"\r\nNats-Time-Stamp: ([0-9T:-]+)(?:\.([0-9]{1,9}))?Z"
    rb"(?:\r\nNats-Num-Pending: [0-9]+)?(?:\r\nNats-Last-Sequence: [0-9]+)?\r\n\r\n\Z"
)


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record of a stream, with the header block its sender wrote (it may be garbage, or empty)."""

    seq: int
    time_ns: int
    subject: str
    own_block: bytes
    payload: bytes

    def own_fields(self) -> Fields | None:
        """The sender's header fields, or None if they do not parse."""
        if not self.own_block:
            return ()
        try:
            return Headers.parse(self.own_block).fields
        except WireError:
            return None


@dataclass(frozen=True, slots=True)
class Missing:
    """Sequences the stream does not have, confirmed with its leader."""

    first: int
    last: int


class Page:
    """Records of a stream in order, by columns: most of them never become objects."""

    __slots__ = ("own_blocks", "payloads", "seqs", "status", "subjects", "times")
    COLUMNS: ClassVar[tuple[str, ...]] = ("own_blocks", "payloads", "seqs", "subjects", "times")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seqs: list[int] = []
        self.times: list[int] = []
        self.subjects: list[str] = []
        self.own_blocks: list[bytes] = []
        self.payloads: list[bytes] = []
        #: the block that ended it
        self.status = b""

    def take(self, block: bytes, payload: bytes) -> bool:
        """Add an answer to a direct get, the broker's tail cut off; False if it is no record, but ends the page."""
        cut = block.rfind(_APPENDED)
        found = _TAIL.match(block, cut) if cut >= 0 else None
        if found is None:
            return self._take_strange(block, payload)
        subject, seq, second, fraction = found.groups()
        self.seqs.append(int(seq))
        self.times.append(start_of_second(second.decode()) + int((fraction or b"").ljust(9, b"0")))
        self.subjects.append(subject.decode())
        self.own_blocks.append(block[:cut] + _END)
        self.payloads.append(payload)
        return True

    def _take_strange(self, block: bytes, payload: bytes) -> bool:
        """A status, or a record whose sender's block or whose subject is not what one expects."""
        own, said = split_block(block, DIRECT_GET_HEADERS)
        if not {"Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"} <= said.keys():
            self.status = block
            return False
        self.seqs.append(int(said["Nats-Sequence"]))
        self.times.append(parse_time(said["Nats-Time-Stamp"]))
        self.subjects.append(said["Nats-Subject"])
        self.own_blocks.append(own)
        self.payloads.append(payload)
        return True

    def is_rising(self, first: int) -> bool:
        seqs = self.seqs
        return not seqs or (seqs[0] >= first and all(map(lt, seqs, seqs[1:])))

    def leading(self, last: int, *, unbroken: bool) -> int:
        """How many records from the start are not beyond `last` (and, if asked, without a hole)."""
        seqs = self.seqs
        count = bisect_right(seqs, last)
        if not unbroken or not count or seqs[count - 1] - seqs[0] == count - 1:
            return count
        return next(index for index in range(1, count) if seqs[index] != seqs[index - 1] + 1)

    def cut(self, start: int, end: int) -> Page:
        if start == 0 and end == len(self.seqs):
            return self
        part = type(self)()
        for name in self.COLUMNS:
            setattr(part, name, getattr(self, name)[start:end])
        return part

    def records(self) -> Iterator[StoredRecord]:
        return map(StoredRecord, self.seqs, self.times, self.subjects, self.own_blocks, self.payloads)
