"""Records on their way to an application: a live copy, a line of history or a part of a frame, opened and verified.

All become the same `LiveRecord`, so what is surfaced live and what is read back speak of the same sequence. What
does not verify is counted by reason and never surfaced.
"""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tidings.errors import WireError
from tidings.wire.envelope import Received, open_record
from tidings.wire.frames import Kept
from tidings.wire.headers import REPUBLISH_HEADERS, Fields, Headers, read_plain_copy, split_block
from tidings.wire.marks import record_mark
from tidings.wire.subjects import Subjects
from tidings.wire.times import parse_time


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """A verified channel message with its place in the log."""

    seq: int
    time_ns: int
    received: Received
    #: tells it from another record at the same sequence of a log that was set back
    mark: str = ""

    @property
    def channel(self) -> str:
        return self.received.destination

    @property
    def identity(self) -> tuple[str, str]:
        return self.received.identity


@dataclass(frozen=True, slots=True)
class LiveCopy:
    """A copy of the log that arrived: where it belongs, and the message in it if it may be surfaced."""

    subject: str
    seq: int
    #: the record before it on this subject; 0 if the log has none
    previous: int
    record: LiveRecord | None


class RecordOpener:
    """Opens records for one endpoint and counts what it refuses."""

    def __init__(self, subjects: Subjects, space_id: str) -> None:
        self.subjects = subjects
        self.space_id = space_id
        self.refused: Counter[str] = Counter()
        self._live_root = f"{subjects.root}.live."

    def live(self, message: Any) -> LiveCopy | None:
        """A copy from `td.S.live.>`: the broker's word is the tail of its headers, the rest is the sender's."""
        block = message.block
        plain = read_plain_copy(block)
        try:
            own, subject, *numbers = plain or _read_copy(block)
            seq, time_ns, previous = int(numbers[0]), parse_time(numbers[1]), int(numbers[2])
        except (KeyError, ValueError):
            # an answer that somebody aimed at a live subject: no log sequence, so not a copy of the log
            self.refused["not_a_log_copy"] += 1
            return None
        if message.subject != self._live_root + self.subjects.tail(subject):
            self.refused["not_a_log_copy"] += 1
            return None
        return LiveCopy(subject, seq, previous, self._open(seq, time_ns, subject, own, message.data))

    def stored(self, line: dict[str, Any]) -> LiveRecord | None:
        """A line of a history page."""
        own, payload = base64.b64decode(line["headers"]), base64.b64decode(line["payload"])
        return self._open(line["seq"], parse_time(line["time"]), line["subject"], _own_fields(own), payload)

    def kept(self, kept: Kept) -> LiveRecord | None:
        """A record in a frame."""
        return self._open(kept.seq, kept.time_ns, f"{self.subjects.root}.{kept.tail}", kept.headers, kept.payload)

    def _open(self, seq: int, time_ns: int, subject: str, fields: Fields | None, payload: bytes) -> LiveRecord | None:
        if fields is None:
            self.refused["header"] += 1
            return None
        opened = open_record(self.subjects, self.space_id, subject, fields, payload)
        if not isinstance(opened, Received) or opened.kind != "chat":
            self.refused["wrong_kind" if isinstance(opened, Received) else opened.reason] += 1
            return None
        return LiveRecord(seq, time_ns, opened, record_mark(time_ns, subject, payload))


def _read_copy(block: bytes) -> tuple[Fields | None, str, str, str, str]:
    """The same as `read_plain_copy` for any block: KeyError if the broker appended nothing."""
    own, broker = split_block(block, REPUBLISH_HEADERS)
    seq, when, previous = broker["Nats-Sequence"], broker["Nats-Time-Stamp"], broker["Nats-Last-Sequence"]
    return _own_fields(own), broker["Nats-Subject"], seq, when, previous


def _own_fields(block: bytes) -> Fields | None:
    """A sender's fields, or None if they are no header block."""
    try:
        return Headers.parse(block).fields if block else ()
    except WireError:
        return None
