"""What a record of the log is to the pipeline: a message to deliver, a ruling, void, or poison.

The same questions in the same order for every record, by the rules in force at its own sequence. Poison (a subject,
header block or payload that is not what it claims) is kept aside with its reason and never stops a batch. Void means
well formed and not owed to anybody: its sender might not post there, or no link admits it. Signatures are not checked
here: every reader checks them, and a pipeline that could vouch for a message could also invent one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidings.broker.records import StoredRecord
from tidings.errors import WireError
from tidings.space.rulebook import Rulebook
from tidings.wire import message as wire_message
from tidings.wire.frames import FrameRecord
from tidings.wire.headers import Fields, Headers, read_plain_block, refused_headers, values_of
from tidings.wire.message import MAX_PAYLOAD
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.subjects import Chat, Ruling, Subjects, Via

ORIGIN_HEADER = "Td-Origin"
#: what a frame keeps of a sender's headers, whatever their case: readers look them up so
KEPT_HEADERS = frozenset(name.lower() for name in (SIGNATURE_HEADER, "Nats-Msg-Id", ORIGIN_HEADER, "Td-Hops"))
_EMPTY_BLOCK = b"NATS/1.0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Deliverable:
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


class Classifier:
    """Judges records of one space. Remembers answers that cannot change between two rulings."""

    def __init__(self, subjects: Subjects, rules: Rulebook) -> None:
        self._subjects = subjects
        self._rules = rules

    def classify(self, record: StoredRecord) -> Classification:
        parsed = self._subjects.parse(record.subject)
        if isinstance(parsed, Ruling):
            return NotForMembers(record.seq)
        if not isinstance(parsed, Chat | Via):
            return self._poison(record, "malformed_subject", "not a subject of this space")
        fields = self._fields(record)
        if isinstance(fields, Poison):
            return fields
        void = self._void(record.seq, parsed, fields)
        if void is not None:
            return void
        return self._message(record, parsed, fields)

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

    def _void(self, seq: int, parsed: Chat | Via, fields: Fields) -> Void | None:
        if isinstance(parsed, Chat):
            allowed = self._rules.post_allowed(parsed.sender, parsed.channel, seq)
            return None if allowed else Void(seq, "the sender might not post there")
        origin, _, theirs = next(iter(values_of(fields, ORIGIN_HEADER)), "").partition(" ")
        allowed = self._rules.admission_allowed(parsed.link, origin, theirs, parsed.channel, seq)
        return None if allowed else Void(seq, "no link in force admits it")

    def _message(self, record: StoredRecord, parsed: Chat | Via, fields: Fields) -> Classification:
        try:
            message = wire_message.decode(record.payload)
        except WireError as error:
            return self._poison(record, "malformed", str(error))
        if message.sender.id != parsed.sender:
            return self._poison(record, "sender_mismatch", f"claims to be from {message.sender.id[:80]!r}")
        mentions: tuple[str, ...] | None = None
        if self._rules.class_at(parsed.channel, record.seq) == "live":
            mentions = tuple(dict.fromkeys(m.id for m in message.mentions if m.id != parsed.sender))
            if not mentions:
                return NotForMembers(record.seq)
        kept = FrameRecord(
            record.seq,
            record.time_ns,
            self._subjects.tail(record.subject),
            tuple((name, value) for name, value in fields if name.lower() in KEPT_HEADERS),
            record.payload,
        )
        return Deliverable(parsed.channel, parsed.sender, kept, mentions)

    @staticmethod
    def _poison(record: StoredRecord, reason: str, detail: str) -> Poison:
        return Poison(record.seq, record.subject[:1000], reason, detail[:500])
