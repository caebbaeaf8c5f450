"""Records on their way to an application: a live copy or a line of history, opened and verified.

Both become the same `LiveRecord`, so what is surfaced live and what is read back speak of the same sequence. What
does not verify is counted by reason and never surfaced.
"""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tidings.broker.client import raw_headers
from tidings.broker.jetstream import parse_time
from tidings.errors import WireError
from tidings.wire.envelope import Received, open_record
from tidings.wire.headers import REPUBLISH_HEADERS, Headers, split_block
from tidings.wire.subjects import Subjects


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """A verified channel message with its place in the log."""

    seq: int
    time_ns: int
    received: Received

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

    def live(self, message: Any) -> LiveCopy | None:
        """A copy from `td.S.live.>`: the broker's word is the tail of its headers, the rest is the sender's."""
        own, broker = split_block(raw_headers(message), REPUBLISH_HEADERS)
        try:
            seq, time_ns = int(broker["Nats-Sequence"]), parse_time(broker["Nats-Time-Stamp"])
            subject, previous = broker["Nats-Subject"], int(broker["Nats-Last-Sequence"])
        except (KeyError, ValueError):
            # an answer that somebody aimed at a live subject: no log sequence, so not a copy of the log
            self.refused["not_a_log_copy"] += 1
            return None
        live_root = f"{self.subjects.root}.live."
        if message.subject != live_root + self.subjects.tail(subject):
            self.refused["not_a_log_copy"] += 1
            return None
        return LiveCopy(subject, seq, previous, self._open(seq, time_ns, subject, own, message.data))

    def stored(self, line: dict[str, Any]) -> LiveRecord | None:
        """A line of a history page."""
        own, payload = base64.b64decode(line["headers"]), base64.b64decode(line["payload"])
        return self._open(line["seq"], line["time_ns"], line["subject"], own, payload)

    def _open(self, seq: int, time_ns: int, subject: str, own_block: bytes, payload: bytes) -> LiveRecord | None:
        try:
            fields = Headers.parse(own_block).fields if own_block else ()
        except WireError:
            self.refused["header"] += 1
            return None
        opened = open_record(self.subjects, self.space_id, subject, fields, payload)
        if not isinstance(opened, Received) or opened.kind != "chat":
            self.refused["wrong_kind" if isinstance(opened, Received) else opened.reason] += 1
            return None
        return LiveRecord(seq, time_ns, opened)
