"""The message: what one agent says, as strict JSON of at most 256 KiB.

`decode` takes only what fits (ids, names and digests have one spelling), ignores fields it does not know at any
level, and keeps part kinds it does not know verbatim if they are reverse-DNS names (`com.example.widget`). `ts` is
RFC 3339 in UTC with exactly three decimals (`2025-11-15T12:00:00.000Z`): it sorts as text and people can read it.
`raw` is the bytes as they travelled; a received message is passed on as `raw`, never written again. Whether the
sender is who it claims is not decided here but in `wire/envelope`, which also knows how the message was addressed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

import msgspec
import uuid_utils
from msgspec import UNSET, Meta, Struct, UnsetType

from tidings.errors import MalformedMessage, TidingsError, TooLarge, UsageError
from tidings.wire import strict_json

#: UUIDv7 in lower-case canonical text, so that ids sort by the time they were made; one id has one spelling
ID_PATTERN = "[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_ID = re.compile(ID_PATTERN + r"\Z")
MAX_PAYLOAD = 256 * 1024
MAX_MENTIONS = 32
MAX_PARTS = 64
#: the largest whole number that every language reads as it was written
MAX_WHOLE = 2**53 - 1

# `$` would let a final newline pass in Python and Java; this means "end of input" in every dialect with lookahead.
_END = r"(?![\s\S])"
_PRINTABLE = r"^[^\u0000-\u001f\u007f]+" + _END
EXTENSION_KIND = r"^[a-z][a-z0-9-]*(\.[a-z0-9][a-z0-9-]*)+" + _END
_EXTENSION = re.compile(EXTENSION_KIND)

Priority = Literal["now", "next", "low"]
MessageId = Annotated[str, Meta(pattern=f"^{ID_PATTERN}{_END}", description="UUIDv7, lower case")]
AgentId = Annotated[str, Meta(pattern=f"^U[A-Z2-7]{{55}}{_END}", description="nkey public key of a user")]
Name = Annotated[str, Meta(pattern=f"^[A-Za-z0-9_-]{{1,64}}{_END}")]
# The days of the calendar from year 1 on, so that schema and reader refuse the same: 30 February, year 0, hour 24.
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
TIMESTAMP_PATTERN = rf"^(?!0000){_DAY}T(?:[01][0-9]|2[0-3])(?::[0-5][0-9]){{2}}\.[0-9]{{3}}Z{_END}"
Timestamp = Annotated[
    str,
    Meta(
        pattern=TIMESTAMP_PATTERN,
        description="RFC 3339, UTC, exactly three decimals",
        extra_json_schema={"format": "date-time"},
    ),
]
FileName = Annotated[
    str, Meta(pattern=rf"^(?!\.{{1,2}}{_END})[^\u0000-\u001f\u007f/\\]+{_END}", max_length=255, description="no path")
]
MediaType = Annotated[str, Meta(pattern=rf"^[!-.0-:<-~]+/[!-.0-:<-~]+( *;[ -~]+)?{_END}", max_length=255)]
Digest = Annotated[str, Meta(pattern=f"^sha256:[0-9a-f]{{64}}{_END}")]
Uri = Annotated[str, Meta(pattern=rf"^[A-Za-z][A-Za-z0-9+.-]*:[!-~]+{_END}", max_length=2048)]
Context = Annotated[str, Meta(pattern=_PRINTABLE, max_length=256, description="conversation this belongs to")]


class Sender(Struct, frozen=True, omit_defaults=True):
    """Who says it. `id` must equal the sender the broker pinned in the subject."""

    id: AgentId
    name: Name
    role: Name | None = None


class Mention(Struct, frozen=True):
    """An agent the sender's endpoint resolved: the id counts, the name is for people."""

    id: AgentId
    name: Name


class TextPart(Struct, frozen=True, tag_field="kind", tag="text"):
    kind: ClassVar[str] = "text"
    text: str


class DataPart(Struct, frozen=True, tag_field="kind", tag="data"):
    """Any JSON value."""

    kind: ClassVar[str] = "data"
    data: Any


class ArtifactPart(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="artifact"):
    """A reference to bytes kept elsewhere; the digest says whether one found the right ones."""

    kind: ClassVar[str] = "artifact"
    name: FileName
    media_type: MediaType
    digest: Digest
    #: what every language reads exactly; written 3.0 or 3e0 it is the same number
    size: Annotated[int, Meta(ge=0, le=MAX_WHOLE)]
    uri: Uri | None = None


class ExtensionPart(Struct, frozen=True, tag_field="kind", tag="extension", rename={"kind": "of"}):
    """A reverse-DNS kind: `body` is the whole part verbatim, its own `kind` included. Ignored by Tidings."""

    kind: str
    body: dict[str, Any]


Part = TextPart | DataPart | ArtifactPart | ExtensionPart
_KNOWN_KINDS = frozenset({"text", "data", "artifact"})


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"sender": "from"}):
    """One message. `raw` is empty until it was encoded or received and is not a field of the wire."""

    id: MessageId
    ts: Timestamp
    sender: Sender
    parts: Annotated[tuple[Part, ...], Meta(min_length=1, max_length=MAX_PARTS)]
    priority: Priority = "next"
    mentions: Annotated[tuple[Mention, ...], Meta(max_length=MAX_MENTIONS)] = ()
    reply_to: MessageId | None = None
    context: Context | None = None
    raw: bytes = b""

    @property
    def text(self) -> str:
        """The text parts, one per line."""
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def ts_ms(self) -> int:
        """`ts` as milliseconds since 1970: what the sender claims, not when the log took it."""
        return round(datetime.fromisoformat(self.ts).timestamp() * 1000)


_TYPED = msgspec.json.Decoder(Message)


def timestamp(when: datetime) -> str:
    """`when` (with a time zone) as it is written in `ts`."""
    return when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _now() -> str:
    """This moment as `timestamp` writes it, a few times quicker."""
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1_000)
    return f"{_second(seconds)}.{milliseconds:03d}Z"


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def check_said(text: object, parts: object = (), mentions: object = (), *, more: bool = False) -> None:
    """UsageError for what a program hands over by mistake: bytes, nothing at all, one string where several belong."""
    if text is not None and not isinstance(text, str):
        advice = (
            "decode it, or send a reference to it" if isinstance(text, bytes | bytearray | memoryview) else "use str()"
        )
        raise UsageError(f"the text of a message is a str, not {type(text).__name__}: {advice}")
    check_list(parts, "parts", "TextPart('...')")
    check_list(mentions, "mentions", "'bob'")
    if not (more or parts or (text and text.strip())):
        raise UsageError("there is nothing to say: the text is empty, and there is neither data nor a part")


def check_list(given: object, what: str, such_as: str) -> None:
    """A string is a list of its letters, and never meant so."""
    if isinstance(given, str | bytes):
        raise UsageError(f"{what} is a list, not one {type(given).__name__}: write [{such_as}]")


def compose(
    sender: Sender,
    *,
    text: str | None = None,
    data: Any | UnsetType = UNSET,
    parts: Iterable[Part] = (),
    priority: Priority = "next",
    mentions: Iterable[Mention] = (),
    reply_to: str | None = None,
    context: str | None = None,
    id: str | None = None,  # noqa: A002  the name it has on the wire
    ts: str | None = None,
) -> Message:
    """A message ready to send, `raw` filled in. Text comes first, then data, then `parts`."""
    made: list[Part] = [] if text is None else [TextPart(text)]
    if data is not UNSET:
        made.append(DataPart(data))
    draft = Message(
        id=id or new_id(),
        ts=ts or _now(),
        sender=sender,
        parts=(*made, *parts),
        priority=priority,
        mentions=tuple(mentions),
        reply_to=reply_to,
        context=context,
    )
    return _frozen(draft)


class Draft(Struct, frozen=True):
    """What a program wants to send: a message without a sender and with mentions by name."""

    text: str | None = None
    #: any JSON value; None is no data
    data: Any = None
    parts: Iterable[Part] = ()
    mentions: Iterable[Mention | str] = ()
    priority: Priority = "next"
    reply_to: str | None = None
    context: str | None = None
    id: str | None = None
    #: a direct message that only its reader can open
    sealed: bool = True
    #: seconds from now after which nobody may finish a task
    deadline: float | None = None

    def check(self) -> Self:
        """Returns the draft. Raises UsageError if it is empty, or holds a value that programs pass by mistake."""
        check_said(self.text, self.parts, self.mentions, more=self.data is not None)
        return self

    def compose(self, sender: Sender, mentions: Iterable[Mention] = (), terms: Iterable[Part] = ()) -> Message:
        """Returns the message of this sender, with its mentions resolved. `terms`: parts of a task for the steward."""
        extra = {} if self.data is None else {"data": self.data}
        try:
            return compose(
                sender,
                text=self.text,
                parts=(*self.parts, *terms),
                mentions=mentions,
                priority=self.priority,
                reply_to=self.reply_to,
                context=self.context,
                id=self.id,
                **extra,
            )
        except TidingsError:
            raise
        except (TypeError, ValueError) as error:
            raise UsageError(f"this cannot be sent: {error}") from error


def around(message: Message, part: ExtensionPart) -> Message:
    """`part` as the only content of a message with the id, time, sender and priority of `message`.

    For what we make ourselves and know to be readable: if `message` was read back once, so would this be. The body of
    `part` holds text and whole numbers only.
    """
    outer = Message(id=message.id, ts=message.ts, sender=message.sender, parts=(part,), priority=message.priority)
    if not message.raw:
        return _frozen(outer)
    payload = msgspec.json.encode(_as_written(outer, part))
    if len(payload) > MAX_PAYLOAD:
        raise TooLarge(f"payload has {len(payload)} bytes, the limit is {MAX_PAYLOAD}: send an artifact reference")
    return msgspec.structs.replace(outer, raw=payload)


def _as_written(outer: Message, part: ExtensionPart) -> dict[str, Any]:
    """`document` of a message around a part, without a walk through its fields."""
    fields: dict[str, Any] = {"id": outer.id, "ts": outer.ts, "from": outer.sender}
    fields["parts"] = [part.body | {"kind": part.kind}]
    if outer.priority != "next":
        fields["priority"] = outer.priority
    return fields


def encode(message: Message) -> bytes:
    """The bytes to send. A message that has bytes keeps them; one that was changed since must be composed anew."""
    if message.raw:
        if decode(message.raw) != message:
            raise MalformedMessage(f"message {message.id} differs from its raw bytes: compose a new one")
        return message.raw
    return _frozen(message).raw


def decode(payload: bytes) -> Message:
    """The message in `payload`: TooLarge beyond the limit, MalformedMessage for anything that is not one."""
    if len(payload) > MAX_PAYLOAD:
        raise TooLarge(f"payload has {len(payload)} bytes, the limit is {MAX_PAYLOAD}: send an artifact reference")
    quick = _decoded_if_plain(payload)
    return _strictly_decoded(payload) if quick is None else quick


def _decoded_if_plain(payload: bytes) -> Message | None:
    """The message, if these are exactly the bytes we would write for its text; None says nothing about the payload.

    Writing it again is the proof that every reader sees the same: what was read holds no key twice, no unknown field,
    no number and no second spelling, because none of these would be written.
    """
    try:
        message = _TYPED.decode(payload)
        if message.raw or msgspec.json.encode(message) != payload:
            return None
        if not all(type(part) is TextPart for part in message.parts):
            return None
    except (ValueError, RecursionError):  # the strict reader says which: it counts how deep it nests
        return None
    return msgspec.structs.replace(message, raw=payload)


def _strictly_decoded(payload: bytes) -> Message:
    found = strict_json.loads(payload)
    if not isinstance(found, dict):
        raise MalformedMessage("not a message: the payload is not a JSON object")
    if isinstance(parts := found.get("parts"), list):
        found["parts"] = [_wrapped(part) for part in parts]
    found["raw"] = payload
    try:
        message = msgspec.convert(found, Message)
    except ValueError as error:
        # the text may quote the payload, and ends in logs and terminals
        said = "".join(c if c.isprintable() else "?" for c in str(error)[:300])
        raise MalformedMessage(f"not a message: {said}") from error
    return message


def read_parts(items: Iterable[Any]) -> tuple[Part, ...]:
    """Parts from JSON values, by the rules of a received message; MalformedMessage says what is wrong with one."""
    wrapped = [_wrapped(item) for item in items]
    if not wrapped:  # as in most messages; msgspec looks at the type for longer than at many parts
        return ()
    try:
        return msgspec.convert(wrapped, tuple[Part, ...])
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"not a part of a message: {str(error)[:300]}") from error


def write_parts(parts: Iterable[Part]) -> list[Any]:
    """Parts as the JSON values they travel as."""
    return [_written(part) for part in parts]


def document(message: Message) -> dict[str, Any]:
    """The message as the JSON object it travels as, without `raw`."""
    fields = msgspec.to_builtins(msgspec.structs.replace(message, parts=(), raw=b""))
    fields["parts"] = write_parts(message.parts)
    return dict(fields)


def _frozen(draft: Message) -> Message:
    """The draft as every reader will see it, `raw` included: what cannot be read back cannot be sent."""
    if all(type(part) is TextPart for part in draft.parts):
        return _frozen_text(draft)
    return decode(strict_json.write(document(draft)))


def _frozen_text(draft: Message) -> Message:
    """The same for what is sent most: text holds nothing that the strict reader and msgspec could read differently."""
    try:
        payload = msgspec.json.encode(draft)
        message = _TYPED.decode(payload)
    except ValueError as error:  # msgspec's errors, and text that is not Unicode
        raise MalformedMessage(f"not a message: {str(error)[:300]}") from error
    if len(payload) > MAX_PAYLOAD:
        raise TooLarge(f"payload has {len(payload)} bytes, the limit is {MAX_PAYLOAD}: send an artifact reference")
    return msgspec.structs.replace(message, raw=payload)


def _written(part: Part) -> Any:
    # data and extensions bypass msgspec, which would turn bytes and NaN into something else without a word
    if isinstance(part, DataPart):
        return {"kind": "data", "data": part.data}
    if isinstance(part, ExtensionPart):
        return part.body | {"kind": part.kind}
    return msgspec.to_builtins(part)


def _wrapped(part: Any) -> dict[str, Any]:
    """A known part as it is; an extension wrapped so that the typed decoder keeps it verbatim."""
    kind = part.get("kind") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise MalformedMessage("not a message: a part has no kind")
    if kind == "artifact" and isinstance(size := part.get("size"), float) and size.is_integer():
        return part | {"size": int(size)}  # type: ignore[no-any-return]
    if kind in _KNOWN_KINDS:
        return part  # type: ignore[no-any-return]
    if len(kind) > 128 or not _EXTENSION.match(kind):
        raise MalformedMessage(f"part kind {kind[:64]!r} is unknown: kinds of your own are reverse-DNS names")
    return {"kind": "extension", "of": kind, "body": part}


# --- ids ---


def new_id() -> str:
    return str(uuid_utils.uuid7())


def is_message_id(text: str) -> bool:
    return _ID.match(text) is not None


def check_message_id(text: str) -> str:
    """Returns the id. Raises UsageError if it is not one."""
    if not is_message_id(text):
        raise UsageError(f"{text[:64]!r} is not a message id")
    return text


def id_time_ms(text: str) -> int | None:
    """Milliseconds since 1970 that the id claims, or None if it is not a message id. They never decide delivery."""
    return int(text[:8] + text[9:13], 16) if is_message_id(text) else None


# --- plain message ---
# Who says it and whom it mentions, of a message that looks as nearly all do, in a third of the time of decoding it.
#
# The proof that `wire/message.decode` would take a payload has two halves. Read into a struct of the same shape and
# written again it must be the same bytes: so it holds no field twice, no unknown one, no number and no second spelling.
# And what that struct leaves unchecked because checking is slow (id, time, sender: half of the cost of a decode) is
# checked at once, by one pattern over the beginning of the payload, which by the first half is exactly those fields.
# What is not such a message may still be one: `read_plain` answers None and says nothing about it, and `decode` has to
# be asked, which alone knows every refusal and its reason. A property test holds the two against each other.


class Addressed(NamedTuple):
    """The ids in a message that decide what becomes of it."""

    sender: str
    mentions: tuple[str, ...]


class _Sender(Struct, frozen=True, omit_defaults=True):
    id: str
    name: str
    role: str | None = None


class _Plain(Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"sender": "from"}):
    """`Message` of text alone. What is plain `str` here is for `_HEAD` to check."""

    id: str
    ts: str
    sender: _Sender
    parts: Annotated[tuple[TextPart, ...], Meta(min_length=1, max_length=MAX_PARTS)]
    priority: Priority = "next"
    mentions: Annotated[tuple[Mention, ...], Meta(max_length=MAX_MENTIONS)] = ()
    reply_to: MessageId | None = None
    context: Context | None = None


def _unanchored(field: object) -> str:
    """The grammar of a field, to be followed by something."""
    meta = get_args(field)[1]
    return str(meta.pattern).removeprefix("^").removesuffix(r"(?![\s\S])")


_AGENT, _NAME = _unanchored(AgentId), _unanchored(Name)
_HEAD = re.compile(
    rf'\{{"id":"{ID_PATTERN}","ts":"{_unanchored(Timestamp)}",'
    rf'"from":\{{"id":"{_AGENT}","name":"{_NAME}"(?:,"role":"{_NAME}")?\}}'.encode()
).match
_decode = msgspec.json.Decoder(_Plain).decode
_encode = msgspec.json.Encoder().encode


def read_plain(payload: bytes) -> Addressed | None:
    """The ids, if the payload is plainly a message; None means only that `message.decode` must be asked."""
    if len(payload) > MAX_PAYLOAD or _HEAD(payload) is None:
        return None
    try:
        found = _decode(payload)
        if _encode(found) != payload:
            return None
    except (ValueError, RecursionError):
        return None
    return Addressed(found.sender.id, tuple([mention.id for mention in found.mentions]) if found.mentions else ())
