"""What a request to send is, as 32 bytes: the same request asked twice has the same, any other has another.

It covers everything that decides what arrives where, in the name of whom: the space, the sender, the destination as it
was resolved, and the whole content before sealing (sealing the same text twice gives different bytes). The message id
is not in it: the id is what the request is filed under.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tidings.errors import MalformedMessage
from tidings.wire.message import ExtensionPart, Message, Part, TextPart

Kind = Literal["chat", "dm", "task"]
_DOMAIN = b"tidings request 1\n"
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


class FingerprintFields(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody asked to be sent, its names resolved. `destination`: a channel, an agent's id, or a role."""

    space: str
    sender: str
    kind: Kind
    destination: str
    max_age: int
    text: str | None = None
    data: Any | UnsetType = UNSET
    parts: tuple[Part, ...] = ()
    #: ids of agents
    mentions: tuple[str, ...] = ()
    reply_to: str | None = None
    context: str | None = None
    priority: str = "next"


def fingerprint(request: FingerprintFields) -> bytes:
    """32 bytes. The order of the keys of JSON objects does not matter, the order of everything else does."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in _PLAIN}
    fields["parts"] = [_part(part) for part in request.parts]
    if request.data is not UNSET:
        fields["data"] = request.data
    else:
        plain = all(type(part) is TextPart for part in request.parts)
        if plain and (quick := _quickly(fields)) is not None:
            return hashlib.sha256(_DOMAIN + quick).digest()
    try:
        canonical = _CANONICAL.encode(fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedMessage(f"cannot be written as JSON: {error}") from error
    return hashlib.sha256(_DOMAIN + canonical.encode("ascii")).digest()


def fingerprint_of(space: str, kind: Kind, destination: str, message: Message, max_age: int) -> bytes:
    """That of a message as it was composed, before it is sealed."""
    asked = FingerprintFields(
        space=space,
        sender=message.sender.id,
        kind=kind,
        destination=destination,
        max_age=max_age,
        parts=message.parts,
        mentions=tuple(mention.id for mention in message.mentions),
        reply_to=message.reply_to,
        context=message.context,
        priority=message.priority,
    )
    return fingerprint(asked)


def _quickly(fields: dict[str, Any]) -> bytes | None:
    """What `_CANONICAL` writes of fields without data, ten times quicker; None of text that it would escape."""
    try:
        written = msgspec.json.encode(fields, order="sorted")
    except ValueError:  # text that is not Unicode
        return None
    return written if written.isascii() and b"\x7f" not in written else None


_PLAIN = (
    "space",
    "sender",
    "kind",
    "destination",
    "max_age",
    "text",
    "mentions",
    "reply_to",
    "context",
    "priority",
)


def _part(part: Part) -> Any:
    if isinstance(part, ExtensionPart):
        return ["extension", part.kind, part.body]
    return msgspec.to_builtins(part)
