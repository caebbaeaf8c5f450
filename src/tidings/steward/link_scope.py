"""What of the log goes over a link: one judgement for pages, for single records, and for digests.

A record passes if it counts here (its sender might post, or a link admitted it, and it is a message), if the link in
force shares its channel, and if it does not go back to where it came from. Signatures are not checked: whoever admits
it does, and the same records are counted in digests at both ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tidings.errors import MalformedMessage
from tidings.model.rulebook import Rulebook
from tidings.wire import message as wire_message
from tidings.wire.links import LinkedRecord, read_origin
from tidings.wire.message import MAX_PAYLOAD, read_plain
from tidings.wire.names import covers_any, covers_pattern
from tidings.wire.records import Fields, StoredRecord, read_plain_block, refused_headers, values_of
from tidings.wire.rulings import Link
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.subjects import Chat, Subjects, Via

#: above so many patterns the whole log is read instead of each of them
MOST_FILTERS = 8


class _From(msgspec.Struct):
    id: str


class _Message(msgspec.Struct, rename={"sender": "from"}):
    id: str
    ts: str
    sender: _From


_named = msgspec.json.Decoder(_Message).decode


class MessageIdentity(NamedTuple):
    sender: str
    id: str
    ts: str


def identity_of(payload: bytes) -> MessageIdentity | None:
    """Who says it, its id and its time; None if the payload is no message."""
    if len(payload) > MAX_PAYLOAD:
        return None
    if read_plain(payload) is not None:
        plain = _named(payload)
        return MessageIdentity(plain.sender.id, plain.id, plain.ts)
    try:
        found = wire_message.decode(payload)
    except MalformedMessage:
        return None
    return MessageIdentity(found.sender.id, found.id, found.ts)


def own_fields(record: StoredRecord) -> Fields | None:
    """The headers of a record that are as a sender may write them, with one signature."""
    fields = read_plain_block(record.own_block)
    if fields is not None:
        return fields
    fields = record.own_fields()
    if fields is None or refused_headers(fields) or len(values_of(fields, SIGNATURE_HEADER)) != 1:
        return None
    return fields


@dataclass(frozen=True, slots=True)
class AdmittedRecord:
    """Where a `via` record that counts was said."""

    link: str
    origin: str
    channel: str
    hops: int


def admitted(
    rules: Rulebook, space_id: str, record: StoredRecord, parsed: Via, fields: Fields
) -> AdmittedRecord | None:
    """Was it let in by the link it names, as that was at its sequence?"""
    said = read_origin(fields)
    if said is None or said[0] == space_id:
        return None
    origin, theirs, hops = said
    allowed = rules.admission_allowed(
        parsed.link, origin, theirs, parsed.channel, record.seq, hops=hops, time_ns=record.time_ns
    )
    return AdmittedRecord(parsed.link, origin, theirs, hops) if allowed else None


def minimal(patterns: tuple[str, ...]) -> list[str]:
    """Without those that another covers."""
    unique = list(dict.fromkeys(patterns))
    return [each for each in unique if not any(covers_pattern(other, each) for other in unique if other != each)]


@dataclass(frozen=True, slots=True)
class LinkScope:
    """What one link shares, as its record in force says."""

    subjects: Subjects
    space_id: str
    rules: Rulebook
    link: str
    record: Link
    #: subject -> what it is, and whether it is shared: most records of a log are of few subjects
    _known: dict[str, Chat | Via | None] = field(default_factory=dict)

    @property
    def passes_on(self) -> bool:
        """Does it share what came over other links?"""
        return self.record.hops > 1

    def filters(self, channel: str | None = None) -> list[str]:
        """Filters of the log that together have all that is shared, or all that was said in one channel."""
        root, shares = self.subjects.root, minimal(self.record.shares)
        if len(shares) > MOST_FILTERS:
            shares = [">"]
        chat = shares if channel is None else [channel] if covers_any(self.record.shares, channel) else []
        via = [f"{root}.via.*.*.{each}" for each in shares] if self.passes_on else []
        return [*(f"{root}.chat.*.{each}" for each in chat), *via]

    def shared(self, record: StoredRecord) -> LinkedRecord | None:
        """The record as it goes over the link; None if it does not."""
        parsed = self._parsed(record.subject)
        fields = own_fields(record) if parsed is not None else None
        if parsed is None or fields is None or len(record.payload) > MAX_PAYLOAD:
            return None
        if isinstance(parsed, Chat):
            if not self.rules.post_allowed(parsed.sender, parsed.channel, record.seq):
                return None
            return self._linked(record, parsed.sender, fields, self.space_id, parsed.channel, 1)
        came = admitted(self.rules, self.space_id, record, parsed, fields)
        if came is None or came.link == self.link or came.origin == self.record.origin:
            return None
        if came.hops >= self.record.hops:
            return None
        return self._linked(record, parsed.sender, fields, came.origin, came.channel, came.hops + 1)

    def _parsed(self, subject: str) -> Chat | Via | None:
        if subject not in self._known:
            parsed = self.subjects.parse(subject)
            known = isinstance(parsed, Chat) or (isinstance(parsed, Via) and self.passes_on)
            shown = known and covers_any(self.record.shares, parsed.channel)  # type: ignore[union-attr]
            self._known[subject] = parsed if shown else None  # type: ignore[assignment]
        return self._known[subject]

    @staticmethod
    def _linked(
        record: StoredRecord, sender: str, fields: Fields, origin: str, channel: str, hops: int
    ) -> LinkedRecord | None:
        said = identity_of(record.payload)
        if said is None or said.sender != sender:
            return None
        return LinkedRecord(
            seq=record.seq,
            time_ns=record.time_ns,
            origin=origin,
            channel=channel,
            sender=sender,
            signature=values_of(fields, SIGNATURE_HEADER)[0],
            payload=record.payload,
            hops=hops,
            mark=record.mark,
        )
