"""Records on their way to an application: opened and verified, whatever they came in.

A message comes live, from the log, inside a hole, or as a durable copy. All become the same `LiveRecord`, so what is
surfaced live and what is read back speak of the same sequence; what does not verify is counted by reason and never
surfaced. What came over a link may have to wait until the links of the space are known: then it is `UNDECIDED`, and
opened again later. What becomes of a record is `intake.py`'s part.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Final, Literal

import msgspec

from tidings.client.links import Judge, LinkTable
from tidings.contract.channels import RawRecord
from tidings.nats.core import Msg
from tidings.wire.envelope import Received, open_record
from tidings.wire.frames import FrameRecord
from tidings.wire.message import Message
from tidings.wire.records import Fields, fields_of, parse_time, read_copy, record_mark
from tidings.wire.subjects import Subjects


class LiveRecord(msgspec.Struct, frozen=True):
    """A verified channel message with its place in the log."""

    seq: int
    time_ns: int
    channel: str
    sender: str
    message: Message
    #: (sender, id): what identifies a message everywhere
    identity: tuple[str, str]
    #: tells it from another record at the same sequence of a log that was set back
    mark: str = ""
    #: of what was said in another space: the id of that space, and the name it has here, if it has one
    origin: str = ""
    space: str = ""


class Undecided(Enum):
    """It came over a link, and whether that may let it in is not known yet."""

    UNDECIDED = "undecided"


UNDECIDED: Final = Undecided.UNDECIDED
Opened = LiveRecord | Literal[Undecided.UNDECIDED] | None


class LiveCopy(msgspec.Struct, frozen=True):
    """A copy of the log that arrived: where it belongs, and the message in it if it may be surfaced."""

    subject: str
    seq: int
    #: the record before it on this subject; 0 if the log has none
    previous: int
    record: LiveRecord | None
    #: what arrived, if it is to be opened again once more links are known
    undecided: Msg | None = None


class RecordOpener:
    """Opens records for one endpoint and counts what it refuses."""

    def __init__(self, subjects: Subjects, space_id: str, links: LinkTable | None = None) -> None:
        self.subjects = subjects
        self.space_id = space_id
        self.links = links
        self._via_root = f"{subjects.root}.via."
        self.refused: Counter[str] = Counter()
        self._root = f"{subjects.root}."
        self._live_root = f"{subjects.root}.live."

    def live(self, message: Msg) -> LiveCopy | None:
        """A copy from `td.S.live.>`: the broker's word is the tail of its headers, the rest is the sender's."""
        try:
            own, subject, seq, time_ns, previous = read_copy(message.block)
        except (KeyError, ValueError):
            # an answer that somebody aimed at a live subject: no log sequence, so not a copy of the log
            self.refused["not_a_log_copy"] += 1
            return None
        if message.raw_subject != f"{self._live_root}{subject.removeprefix(self._root)}".encode():
            self.refused["not_a_log_copy"] += 1
            return None
        opened = self._open(seq, time_ns, subject, own, message.data)
        if opened is UNDECIDED:
            return LiveCopy(subject, seq, previous, None, message)
        return LiveCopy(subject, seq, previous, opened)

    async def learn_links(self, seq: int) -> None:
        """Have it known what links let in at `seq`: what was undecided there is not any more."""
        if self.links is not None:
            await self.links.learn(seq)

    def stored(self, record: RawRecord) -> Opened:
        """Opens a record of a history page."""
        fields = fields_of(record.headers)
        return self._open(record.seq, parse_time(record.time), record.subject, fields, record.payload)

    def kept(self, kept: FrameRecord) -> Opened:
        """A record in a frame."""
        return self._open(kept.seq, kept.time_ns, f"{self.subjects.root}.{kept.tail}", kept.headers, kept.payload)

    def _open(self, seq: int, time_ns: int, subject: str, fields: Fields | None, payload: bytes) -> Opened:
        if fields is None:
            self.refused["header"] += 1
            return None
        judge = None
        if self.links is not None and subject.startswith(self._via_root):
            judge = Judge(self.links, seq, time_ns)
        opened = open_record(self.subjects, self.space_id, subject, fields, payload, judge)
        if judge is not None and judge.is_open:
            return UNDECIDED
        if not isinstance(opened, Received) or opened.kind != "chat":
            self.refused["wrong_kind" if isinstance(opened, Received) else opened.reason] += 1
            return None
        sender, message = opened.sender, opened.message
        mark = record_mark(time_ns, subject, payload)
        record = LiveRecord(seq, time_ns, opened.destination, sender, message, (sender, message.id), mark)
        if opened.admission is None or self.links is None:
            return record
        space = self.links.space_name(opened.link, opened.origin, seq)
        return msgspec.structs.replace(record, origin=opened.origin, space=space)
