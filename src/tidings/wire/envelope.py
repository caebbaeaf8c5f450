"""Opening a record: the one function every reading path uses to decide whether a message may be surfaced.

Live, delivery, history, direct, tasks, archive and audit all call `open_record` with the record's subject, the
sender's own headers and the payload bytes, so they cannot disagree. It checks, in this order: subject, kind, headers,
size, signature, strict JSON, claimed sender. What fails is `Refused` with a reason from a fixed list, to be counted
and quarantined. It never raises on hostile input, keeps nothing, and does not know memberships or access: whether the
owner is *owed* the message is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tidings.errors import MalformedMessage
from tidings.wire import message as wire_message
from tidings.wire.headers import Fields, refused_headers, values_of
from tidings.wire.message import MAX_PAYLOAD, Message
from tidings.wire.signing import SIGNATURE_HEADER, verifies
from tidings.wire.subjects import Chat, Direct, Subjects, Task, Via

Kind = Literal["chat", "dm", "task"]
Reason = Literal["malformed_subject", "wrong_kind", "header", "too_large", "signature", "malformed", "sender_mismatch"]
REASONS: tuple[Reason, ...] = get_args(Reason)
#: so begins what the sender of a message hears that opens and yet does not count
RULED_OUT = "the rules in force did not allow it"


@dataclass(frozen=True, slots=True)
class Received:
    """A verified message. How it was addressed comes from the subject, never from the payload."""

    kind: Kind
    sender: str
    destination: str
    message: Message
    signature: str
    headers: Fields = ()

    @property
    def identity(self) -> tuple[str, str]:
        """(sender, id): what identifies a message everywhere."""
        return self.sender, self.message.id


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a record is not surfaced: `reason` is for counters, `detail` for people."""

    reason: Reason
    detail: str


def open_record(subjects: Subjects, space_id: str, subject: str, headers: Fields, payload: bytes) -> Received | Refused:
    """The message in a record, or why it is refused. `headers` are the sender's own (`own_fields`)."""
    kind: Kind
    match subjects.parse(subject):
        case Chat(sender, destination):
            kind = "chat"
        case Direct(_, destination, sender):
            kind = "dm"
        case Task(destination, sender):
            kind = "task"
        case Via():
            return Refused("wrong_kind", "via needs a link table")
        case None:
            return Refused("malformed_subject", f"{subject[:300]!r} is not a subject of this space")
        case other:
            return Refused("wrong_kind", f"{type(other).__name__} is not a message")
    refused = refused_headers(headers)
    if refused:
        return Refused("header", f"a sender may not set {', '.join(refused)[:200]!r}")
    signatures = values_of(headers, SIGNATURE_HEADER)
    if len(signatures) > 1:
        return Refused("header", f"{SIGNATURE_HEADER} occurs {len(signatures)} times")
    if not signatures:
        return Refused("signature", f"no {SIGNATURE_HEADER} header")
    if len(payload) > MAX_PAYLOAD:
        return Refused("too_large", f"payload has {len(payload)} bytes, the limit is {MAX_PAYLOAD}")
    if not verifies(signatures[0], space_id, kind, sender, destination, payload):
        return Refused("signature", f"not signed by {sender} for {kind} to {destination} in this space")
    try:
        message = wire_message.decode(payload)
    except MalformedMessage as error:
        return Refused("malformed", str(error))
    if message.sender.id != sender:
        return Refused("sender_mismatch", f"published by {sender}, claims to be from {message.sender.id}")
    return Received(kind, sender, destination, message, signatures[0], headers)
