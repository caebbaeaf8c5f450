"""What a record of the log is to the pipeline: a message to deliver, a ruling, void, or poison.

The same questions in the same order for every record, by the rules in force at its own sequence. Poison (a subject,
header block or payload that is not what it claims) is kept aside with its reason and never stops a batch. Void means
well formed and not owed to anybody: its sender might not post there, or no link admits it. Signatures are not checked
here: every reader checks them, and a pipeline that could vouch for a message could also invent one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tidings.errors import WireError
from tidings.model.rulebook import Rulebook
from tidings.wire import message as wire_message
from tidings.wire.frames import FrameRecord
from tidings.wire.links import HOPS_HEADER, ORIGIN_HEADER, read_origin
from tidings.wire.message import MAX_PAYLOAD, Addressed, read_plain
from tidings.wire.records import Fields, Headers, StoredRecord, read_plain_block, refused_headers, values_of
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.subjects import Chat, Ruling, Subjects, Via

#: what a frame keeps of a sender's headers, whatever their case: readers look them up so
_KEPT = (SIGNATURE_HEADER, "Nats-Msg-Id", ORIGIN_HEADER, HOPS_HEADER)
KEPT_HEADERS = frozenset((*_KEPT, *map(str.lower, _KEPT)))
_EMPTY_BLOCK = b"NATS/1.0\r\n\r\n"


class Deliverable(msgspec.Struct, frozen=True):
    """A message that counts: whoever is in the audience of `channel` at its sequence is owed it."""

    channel: str
    sender: str
    kept: FrameRecord
    #: on a live channel: the ids that a mention buys a copy
    mentions: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Poison:
    seq: int
    subject: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Void:
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class NotForMembers:
    """A ruling record, or a message on a live channel that mentions nobody."""

    seq: int


Classification = Deliverable | Poison | Void | NotForMembers


@dataclass(slots=True)
class _Stretch:
    """What is known of a subject. `allowed` and `live` hold from sequence `first` on and before `end`."""

    parsed: Chat | Via
    tail: str
    first: int = 0
    end: int = 0
    allowed: bool = False
    live: bool = False


class Classifier:
    """Judges records of one space. Remembers answers that cannot change between two rulings.

    It remembers every subject it was asked about, so it is for one range of a log and not for a whole life.
    """

    def __init__(self, subjects: Subjects, rules: Rulebook) -> None:
        self._subjects = subjects
        self._rules = rules
        self._lanes: dict[str, _Stretch] = {}

    def classify(self, record: StoredRecord) -> Classification:
        lane = self._lanes.get(record.subject)
        if lane is None:
            parsed = self._subjects.parse(record.subject)
            if isinstance(parsed, Ruling):
                return NotForMembers(record.seq)
            if not isinstance(parsed, Chat | Via):
                return self._poison(record, "malformed_subject", "not a subject of this space")
            lane = self._lanes[record.subject] = _Stretch(parsed, self._subjects.tail(record.subject))
        fields = self._fields(record)
        if isinstance(fields, Poison):
            return fields
        if not lane.first <= record.seq < lane.end:
            self._look_up(lane, record.seq)
        void = self._void(record, lane, fields)
        if void is not None:
            return void
        return self._message(record, lane, fields)

    def _look_up(self, lane: _Stretch, seq: int) -> None:
        sender, channel = lane.parsed.sender, lane.parsed.channel
        lane.allowed = self._rules.post_allowed(sender, channel, seq)
        lane.live = self._rules.class_at(channel, seq) == "live"
        lane.first, lane.end = self._rules.steady(sender, channel, seq)

    def _fields(self, record: StoredRecord) -> Fields | Poison:
        plain = read_plain_block(record.own_block)
        if plain is not None and len(record.payload) <= MAX_PAYLOAD:
            return plain
        try:
            fields = Headers.parse(record.own_block or _EMPTY_BLOCK).fields
        except WireError as error:
            return self._poison(record, "header", str(error))
        if refused := refused_headers(fields):
            return self._poison(record, "header", f"a sender may not set {', '.join(refused)[:200]!r}")
        if (signatures := len(values_of(fields, SIGNATURE_HEADER))) != 1:
            reason = "header" if signatures else "signature"
            return self._poison(record, reason, f"needs {SIGNATURE_HEADER} once and has it {signatures} times")
        if len(record.payload) > MAX_PAYLOAD:
            return self._poison(record, "too_large", f"payload has {len(record.payload)} bytes")
        return fields

    def _void(self, record: StoredRecord, lane: _Stretch, fields: Fields) -> Void | None:
        seq, parsed = record.seq, lane.parsed
        if isinstance(parsed, Chat):
            return None if lane.allowed else Void(seq, "the sender might not post there")
        said = read_origin(fields)
        if said is None:
            return Void(seq, "it does not say where it was said")
        origin, theirs, hops = said
        allowed = self._rules.admission_allowed(
            parsed.link, origin, theirs, parsed.channel, seq, hops=hops, time_ns=record.time_ns
        )
        return None if allowed else Void(seq, "no link in force admits it")

    def _message(self, record: StoredRecord, lane: _Stretch, fields: Fields) -> Classification:
        sender = lane.parsed.sender
        try:
            addressed = read_plain(record.payload) or _addressed(record.payload)
        except WireError as error:
            return self._poison(record, "malformed", str(error))
        if addressed.sender != sender:
            return self._poison(record, "sender_mismatch", f"claims to be from {addressed.sender[:80]!r}")
        mentions: tuple[str, ...] | None = None
        if lane.live:
            mentions = tuple(dict.fromkeys(each for each in addressed.mentions if each != sender))
            if not mentions:
                return NotForMembers(record.seq)
        kept = FrameRecord(
            record.seq,
            record.time_ns,
            lane.tail,
            tuple([field for field in fields if field[0] in KEPT_HEADERS or field[0].lower() in KEPT_HEADERS]),
            record.payload,
        )
        return Deliverable(lane.parsed.channel, sender, kept, mentions)

    @staticmethod
    def _poison(record: StoredRecord, reason: str, detail: str) -> Poison:
        return Poison(record.seq, record.subject[:1000], reason, detail[:500])


def _addressed(payload: bytes) -> Addressed:
    message = wire_message.decode(payload)
    return Addressed(message.sender.id, tuple(mention.id for mention in message.mentions))
