"""Opening a record: the one function every reading path uses to decide whether a message may be surfaced.

Live, delivery, history, direct, tasks, archive and audit all call `open_record` with the record's subject, the
sender's own headers and the payload bytes, so they cannot disagree. It checks, in this order: subject, kind, headers,
size, signature, link, strict JSON, claimed sender. What fails is `Refused` with a reason from a fixed list, to be
counted and quarantined. It never raises on hostile input, keeps nothing, and does not know memberships or access:
whether the owner is *owed* the message is decided elsewhere.

What a link admitted (`via`) was said, and signed, in a channel of another space. It opens for readers who can say what
the link record in force at its sequence lets in (`admits`), and for nobody else. A direct message or a task of another
space names the link record it came by, and opens in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from tidings.errors import MalformedMessage
from tidings.wire import message as wire_message
from tidings.wire.links import ORIGIN_HEADER, read_mail_origin, read_origin
from tidings.wire.message import MAX_PAYLOAD, Message
from tidings.wire.names import role_elsewhere
from tidings.wire.records import Fields, refused_headers, values_of
from tidings.wire.signing import SIGNATURE_HEADER, verifies
from tidings.wire.subjects import Chat, Direct, Subjects, Task, Via

Kind = Literal["chat", "dm", "task"]
Reason = Literal[
    "malformed_subject", "wrong_kind", "header", "too_large", "signature", "link", "malformed", "sender_mismatch"
]
REASONS: tuple[Reason, ...] = get_args(Reason)
#: so begins what the sender of a message hears that opens and yet does not count
RULED_OUT = "the rules in force did not allow it"


class ClaimedOrigin(NamedTuple):
    """What a record that came over a link says of itself: who let it in, where it was said, and what that is here."""

    link: str
    #: the id of the space it was said in, and its channel there
    origin: str
    theirs: str
    channel: str
    hops: int
    #: of a direct message or a task, whose `channel` and `theirs` are whom it is to: the sequence of the link record it
    #: came by, and who says to have sent it
    agreed: int = 0
    sender: str = ""
    kind: Kind = "chat"


#: did the link record in force at the record's sequence let this in?
Admits = Callable[[ClaimedOrigin], bool]


@dataclass(frozen=True, slots=True)
class Received:
    """A verified message. How it was addressed comes from the subject, never from the payload."""

    kind: Kind
    sender: str
    destination: str
    message: Message
    signature: str
    headers: Fields = ()
    #: of a message of another space: how it came in
    admission: ClaimedOrigin | None = None

    @property
    def origin(self) -> str:
        """The id of the space it was said in; empty if it was said here."""
        return self.admission.origin if self.admission else ""

    @property
    def link(self) -> str:
        """The link it came over; empty if it was said here."""
        return self.admission.link if self.admission else ""

    @property
    def identity(self) -> tuple[str, str]:
        """(sender, id): what identifies a message everywhere."""
        return self.sender, self.message.id


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a record is not surfaced: `reason` is for counters, `detail` for people."""

    reason: Reason
    detail: str


def open_record(
    subjects: Subjects, space_id: str, subject: str, headers: Fields, payload: bytes, admits: Admits | None = None
) -> Received | Refused:
    """The message in a record, or why it is refused. `headers` are the sender's own (`own_fields`)."""
    kind: Kind
    link = ""
    match subjects.parse(subject):
        case Chat(sender, destination):
            kind = "chat"
        case Direct(_, destination, sender):
            kind = "dm"
        case Task(destination, sender):
            kind = "task"
        case Via(link, sender, destination) if admits is not None:
            kind = "chat"
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
    admission = None
    if link:
        said = read_origin(headers)
        if said is None:
            return Refused("link", "it does not say where it was said")
        admission = ClaimedOrigin(link, said[0], said[1], destination, said[2])
    elif kind != "chat" and values_of(headers, ORIGIN_HEADER):
        mail = read_mail_origin(headers)
        if mail is None or admits is None:
            return Refused("link", "it does not say where it was said")
        addressed = role_elsewhere(destination, space_id) if kind == "task" else destination
        admission = ClaimedOrigin(mail.link, mail.space, addressed, destination, 1, mail.agreed, sender, kind)
    origin, said_to = (admission.origin, admission.theirs) if admission else (space_id, destination)
    if not verifies(signatures[0], origin, kind, sender, said_to, payload):
        return Refused("signature", f"not signed by {sender} for {kind} to {said_to} in {_space_words(admission)}")
    if admission is not None and admits is not None:
        if admission.origin == space_id:
            return Refused("link", "it was said in this space, and cannot come into it over a link")
        if not admits(admission):
            what = {"dm": "mail", "task": "tasks"}.get(kind, f"#{said_to}")
            name_here = f" as #{destination}" if kind == "chat" else ""
            return Refused("link", f"no link in force lets {what} of {admission.origin} in{name_here}")
    try:
        message = wire_message.decode(payload)
    except MalformedMessage as error:
        return Refused("malformed", str(error))
    if message.sender.id != sender:
        return Refused("sender_mismatch", f"published by {sender}, claims to be from {message.sender.id}")
    return Received(kind, sender, destination, message, signatures[0], headers, admission)


def _space_words(admission: ClaimedOrigin | None) -> str:
    return f"the space {admission.origin[:80]!r}" if admission else "this space"
