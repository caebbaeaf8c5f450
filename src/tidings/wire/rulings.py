"""Ruling records: what the steward writes into the log to decide who is owed what.

Six kinds, one struct each. `decode` is strict (duplicate keys, NaN, depth over 32, wrong types, names that do not
fit the grammar: `MalformedRecord`) but ignores fields it does not know, so that a newer steward may add some; a
change that older readers must not misread raises `v`. `encode` refuses whatever `decode` would refuse. Whether a
record that decodes also counts is decided by the fold (`model/projection.py`), not here. `at` is for people and never
decides anything.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tidings.errors import InvalidName, MalformedMessage, MalformedRecord
from tidings.wire import names, signing, strict_json
from tidings.wire.keys import KeyPair, public_bytes
from tidings.wire.links import MOST_HOPS, channel_map

ChannelClass = Literal["live", "durable"]
Switch = Literal["on", "off"]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    op: Label
    v: Literal[1] = 1
    at: Annotated[str, msgspec.Meta(max_length=40)] | None = None


class Member(_Record, frozen=True, kw_only=True):
    """`td.S.member.<owner>.<tag>`: the owner's membership of one channel or pattern opens or closes here."""

    state: Literal["in", "out"]
    pattern: str
    #: of a leave: the sequence of the join it ends, and no other. Records that do not say end whichever is open
    ends: Count | None = None

    def __post_init__(self) -> None:
        names.check_pattern(self.pattern)


class Access(_Record, frozen=True, kw_only=True):
    """`td.S.acl.<owner>`: name, roles and rights from this sequence on. No record means not provisioned."""

    name: str
    roles: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    post: tuple[str, ...] = ()
    manage: tuple[str, ...] = ()
    revoked: bool = False
    jwt: str | None = None
    succeeds: str | None = None
    iat: Count | None = None
    #: why and since when it may send nothing at all (`since ...: ...`); empty if it may
    withheld: Annotated[str, msgspec.Meta(max_length=200)] = ""

    def __post_init__(self) -> None:
        names.check_agent_name(self.name)
        for role in self.roles:
            names.check_role(role)
        for pattern in (*self.read, *self.post, *self.manage):
            names.check_pattern(pattern)
        if self.succeeds is not None:
            names.check_agent_id(self.succeeds)


class Channel(_Record, frozen=True, kw_only=True):
    """`td.S.channel.<tag>`: settings of one channel. `None` leaves a setting to the space."""

    name: str
    cls: ChannelClass | None = msgspec.field(name="class", default=None)
    replay: bool | None = None
    replay_window: Count | None = None
    description: Annotated[str, msgspec.Meta(max_length=200)] = ""
    instructions: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    by: str | None = None
    listed: bool = True

    def __post_init__(self) -> None:
        names.check_channel(self.name)
        if self.by is not None:
            names.check_agent_id(self.by)


class Link(_Record, frozen=True, kw_only=True):
    """`td.S.link.<link>`: what passes between this space and another, `origin`, from this sequence on.

    What may come in is in `channels` and `beyond`, what the other may read of ours in `shares`. A link that is off, or
    past `until`, lets nothing pass.
    """

    link: str
    state: Switch
    origin: str
    #: channels and patterns of `origin` -> what they are called here (`wire/links.ChannelMap`)
    channels: dict[str, str]
    #: the name of `origin` as it is shown here: `ada@acme`
    space: str = ""
    #: its steward's key, by which its records are known
    steward: str | None = None
    #: channels and patterns of ours that it may read
    shares: tuple[str, ...] = ()
    #: spaces behind it -> what of theirs may come through it, and under which name
    beyond: dict[str, dict[str, str]] = {}
    #: links that a record may have come over, this one too
    hops: Annotated[int, msgspec.Meta(ge=1, le=MOST_HOPS)] = 1
    #: second of the epoch at which it ends
    until: Count | None = None
    #: the user that its worker is at our broker
    peer: str | None = None
    direct: Switch = "off"
    roster: Switch = "off"
    tasks: Switch = "off"

    def __post_init__(self) -> None:
        names.check_token(self.link, "link")
        _check_key(self.origin, "A")
        channel_map(self.channels)
        for space, channels in self.beyond.items():
            _check_key(space, "A")
            channel_map(channels)
        for pattern in self.shares:
            names.check_pattern(pattern)
        if self.space:
            names.check_space(self.space)
        if self.steward is not None:
            _check_key(self.steward)
        if self.peer is not None:
            names.check_agent_id(self.peer)

    def admits(self, origin: str, theirs: str, *, hops: int = 1, time_ns: int = 0) -> str | None:
        """What the channel `theirs` of the space `origin` is called here, if what was said there may come in."""
        if self.state != "on" or not 1 <= hops <= self.hops or self.has_ended(time_ns):
            return None
        channels = self.channels if origin == self.origin else self.beyond.get(origin)
        return channel_map(channels).ours(theirs) if channels else None

    @property
    def passes_mail(self) -> bool:
        """Direct messages go to agents by their keys, so who is there has to be agreed on too."""
        return self.direct == "on" and self.roster == "on"

    @property
    def passes_tasks(self) -> bool:
        """A task is sealed for those who hold its role, so who is there has to be agreed on too."""
        return self.tasks == "on" and self.roster == "on"

    def admits_to_agents(self, kind: str, origin: str, *, time_ns: int = 0) -> bool:
        """May a direct message (`dm`) or a task of the space `origin` come in?"""
        passes = self.passes_tasks if kind == "task" else self.passes_mail
        return self.state == "on" and passes and origin == self.origin and not self.has_ended(time_ns)

    def has_ended(self, time_ns: int) -> bool:
        return self.until is not None and time_ns >= self.until * 1_000_000_000


class Lease(_Record, frozen=True, kw_only=True):
    """`td.S.lease.steward`: who writes the rulings from here on; only the newest one matters."""

    holder: Label
    host: Annotated[str, msgspec.Meta(max_length=255)]
    pid: Count
    key: str

    def __post_init__(self) -> None:
        _check_key(self.key)


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a channel is when neither its record nor anybody else says so."""

    cls: ChannelClass | None = msgspec.field(name="class", default=None)
    replay: bool | None = None
    replay_window: Count | None = None


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts whose floor retention waits for. Not starting one is not switching it off."""

    deliver: Switch = "on"
    archive: Switch = "off"


class Space(_Record, frozen=True, kw_only=True):
    """`td.S.space`: settings of the whole space.

    A `steward_key` that is not the one in force is a rotation: the old key signs this record, the new one every
    record after it.
    """

    defaults: Defaults = Defaults()
    channels: Literal["open", "listed"] = "open"
    parts: Parts = Parts()
    keep_age: Count | None = None
    keep_bytes: Count | None = None
    #: seconds that mail nobody reads is kept, in mailboxes and by the log
    keep_unread: Count | None = None
    #: seconds that receipts and task results are kept
    keep_receipts: Count | None = None
    #: what one sender may publish each second for long; 0 is no limit, None the built-in one
    quota_records: Count | None = None
    quota_bytes: Count | None = None
    steward_key: str | None = None

    def __post_init__(self) -> None:
        if self.steward_key is not None:
            _check_key(self.steward_key)


RulingRecord = Member | Access | Channel | Link | Lease | Space

#: the first subject token after `td.S.` names the kind
KINDS: dict[str, type[RulingRecord]] = {
    "member": Member,
    "acl": Access,
    "channel": Channel,
    "link": Link,
    "lease": Lease,
    "space": Space,
}
_KIND_OF: dict[type[RulingRecord], str] = {struct: kind for kind, struct in KINDS.items()}


def encode(record: RulingRecord) -> bytes:
    """The payload of a ruling record: JSON with every field spelled out, so a later default changes no old record."""
    payload = msgspec.json.encode(record)
    decode(_KIND_OF[type(record)], payload)
    return payload


def decode(kind: str, payload: bytes) -> RulingRecord:
    """The record in `payload`, where `kind` is the first token of its subject after `td.S.`."""
    struct = KINDS.get(kind)
    if struct is None:
        raise MalformedRecord(f"{kind!r} is not a kind of ruling record; one of {', '.join(KINDS)}")
    try:
        return msgspec.convert(strict_json.loads(payload), struct, strict=True)
    except (msgspec.ValidationError, MalformedMessage, InvalidName) as error:
        raise MalformedRecord(f"this {kind} record does not decode: {error}") from error


def sign_ruling(key: KeyPair, space_id: str, tail: str, payload: bytes) -> str:
    """The `Td-Sig` of a ruling record; `tail` is its subject after `td.S.`."""
    return signing.sign(key, space_id, "ruling", tail, payload)


def verify_ruling(signature: str | None, space_id: str, steward_key: str, tail: str, payload: bytes) -> bool:
    """Did the holder of `steward_key` sign exactly this payload for exactly this subject of this space?"""
    return signing.verifies(signature, space_id, "ruling", steward_key, tail, payload)


def _check_key(key: str, prefix: str = "") -> None:
    if not key.startswith(prefix):
        raise InvalidName(f"{key!r} is not a key of the kind {prefix}")
    public_bytes(key)
