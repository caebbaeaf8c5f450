"""Subjects: the only module that builds or parses one.

`Subjects("main")` builds; `parse` turns a subject back into a typed value, or `None` if it is not exactly one of
ours. Nothing parses as something it is not: arity, tokens, ids, tags and shards are all checked, so a subject that
parsed can be trusted to name what it says. Who may publish where is `server/grants.py`; this module only spells.
The tags in subjects and the keys of the state bucket are spelled here too.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from tidings.errors import InvalidName
from tidings.wire import names

SHARDS = 16
#: of sealed blocks: so many that a name shares its own with nothing
BLOCK_SHARDS = 2**31 - 1
BLOCK_NAME = re.compile(r"[0-9a-f]{40}")
#: longer than anything we spell; a broker takes subjects of 60 KiB, and what parses is remembered
MAX_TAIL = 1024

#: control services an agent may call; each is exported by name, so `admin` is not reachable from an agent account
AGENT_SERVICES = (
    "access",
    "attention",
    "channel",
    "confirm",
    "dead",
    "health",
    "history",
    "member",
    "presence",
    "receipt",
    "roster",
    "session",
    "space",
    "task",
    "trace",
)
ADMIN_SERVICE = "admin"
#: the only one that whoever was invited may call, from an account of its own
INVITATION_SERVICE = "accept"
#: what the worker of a linked space may ask, and what this space's own worker may, both from the account of links
LINK_SERVICE, ADMISSION_SERVICE = "link", "admission"
SERVICES = (*AGENT_SERVICES, INVITATION_SERVICE, LINK_SERVICE, ADMISSION_SERVICE, ADMIN_SERVICE)


class StreamKind(StrEnum):
    """The streams of a space. All but the log have the subjects `td.<space>.<kind>.>`."""

    LOG = "log"
    DIRECT = "dm"
    TASK = "task"
    DELIVERY = "dlv"
    AUDIT = "aud"
    DEAD = "dead"
    BLOCKS = "blk"


@dataclass(frozen=True, slots=True)
class Chat:
    sender: str
    channel: str


@dataclass(frozen=True, slots=True)
class Via:
    link: str
    sender: str
    channel: str


@dataclass(frozen=True, slots=True)
class MemberSubject:
    owner: str
    tag: str


@dataclass(frozen=True, slots=True)
class AccessSubject:
    owner: str


@dataclass(frozen=True, slots=True)
class ChannelSubject:
    tag: str


@dataclass(frozen=True, slots=True)
class LinkSubject:
    link: str


@dataclass(frozen=True, slots=True)
class StewardLeaseSubject:
    pass


@dataclass(frozen=True, slots=True)
class SpaceSubject:
    pass


@dataclass(frozen=True, slots=True)
class Direct:
    shard: int
    target: str
    sender: str


@dataclass(frozen=True, slots=True)
class Task:
    #: of this space, or `role@<space id>`
    role: str
    sender: str


@dataclass(frozen=True, slots=True)
class Delivery:
    shard: int
    owner: str


@dataclass(frozen=True, slots=True)
class DeliveryLease:
    pass


@dataclass(frozen=True, slots=True)
class Audit:
    rest: str


@dataclass(frozen=True, slots=True)
class Dead:
    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class Control:
    service: str
    sender: str


@dataclass(frozen=True, slots=True)
class LiveRoster:
    pass


Ruling = MemberSubject | AccessSubject | ChannelSubject | LinkSubject | StewardLeaseSubject | SpaceSubject
Parsed = Chat | Via | Ruling | Direct | Task | Delivery | DeliveryLease | Audit | Dead | Control

#: first token after `td.<space>` of every ruling record
RULING_KINDS = ("member", "acl", "channel", "link", "lease", "space")


def shard_of(owner: str) -> int:
    """Stable shard of an agent, 0 to 15: part of its DM and DLV subjects from day one."""
    return hashlib.sha256(owner.encode()).digest()[0] % SHARDS


def block_shard(name: str) -> int:
    """The shard of a sealed block: FNV-1a of its name in 32 bits, which is what the broker's `partition` gives."""
    found = 0x811C9DC5
    for byte in name.encode():
        found = (found ^ byte) * 0x01000193 & 0xFFFFFFFF
    return found % BLOCK_SHARDS


class Subjects:
    """Builds and parses the subjects of one space."""

    def __init__(self, space: str) -> None:
        self.space = names.check_space(space)
        self.root = f"td.{space}"
        self.log_stream = self.stream(StreamKind.LOG)
        self.direct_stream = self.stream(StreamKind.DIRECT)
        self.task_stream = self.stream(StreamKind.TASK)
        self.delivery_stream = self.stream(StreamKind.DELIVERY)
        self.audit_stream = self.stream(StreamKind.AUDIT)
        self.dead_stream = self.stream(StreamKind.DEAD)
        self.block_stream = self.stream(StreamKind.BLOCKS)
        self.state_bucket = f"td_state_{space}"
        self.steward_lease = f"{self.root}.lease.steward"
        self.space_record = f"{self.root}.space"
        self.delivery_lease = f"{self.root}.dlv.lease"
        self.live_roster = f"{self.root}.live.roster"

    def stream(self, kind: StreamKind) -> str:
        return f"{kind.upper()}_{self.space}"

    def chat(self, sender: str, channel: str) -> str:
        return f"{self.root}.chat.{names.check_agent_id(sender)}.{names.check_channel(channel)}"

    def via(self, link: str, sender: str, channel: str) -> str:
        return (
            f"{self.root}.via.{names.check_token(link, 'link')}.{names.check_agent_id(sender)}"
            f".{names.check_channel(channel)}"
        )

    def member(self, owner: str, tag: str) -> str:
        return f"{self.root}.member.{names.check_agent_id(owner)}.{_checked_tag(tag)}"

    def access(self, owner: str) -> str:
        return f"{self.root}.acl.{names.check_agent_id(owner)}"

    def channel(self, tag: str) -> str:
        return f"{self.root}.channel.{_checked_tag(tag)}"

    def link(self, link: str) -> str:
        return f"{self.root}.link.{names.check_token(link, 'link')}"

    def direct(self, target: str, sender: str) -> str:
        names.check_agent_id(target)
        return f"{self.root}.dm.{shard_of(target)}.{target}.{names.check_agent_id(sender)}"

    def direct_inbox(self, target: str) -> str:
        """Filter for everything addressed to one agent."""
        return f"{self.root}.dm.{shard_of(target)}.{names.check_agent_id(target)}.*"

    def task(self, role: str, sender: str) -> str:
        """`role` may be one of a linked space (`names.role_elsewhere`): no role of this one has an `@`."""
        return f"{self.root}.task.{names.check_role_address(role)}.{names.check_agent_id(sender)}"

    def delivery(self, owner: str) -> str:
        return f"{self.root}.dlv.{shard_of(owner)}.{names.check_agent_id(owner)}"

    def audit(self, *tokens: str) -> str:
        return ".".join((f"{self.root}.aud", *(names.check_token(token, "audit token") for token in tokens)))

    def dead(self, kind: str, key: str) -> str:
        return f"{self.root}.dead.{names.check_token(kind, 'kind')}.{names.check_token(key, 'key')}"

    def block(self, name: str) -> str:
        """Where a sealed block lies. No record of anybody's is on such a subject, and none is parsed.

        The last token is what keeps a wildcard from covering the name, the shard what makes one useless: the broker
        computes it from the name an agent asks for.
        """
        if not BLOCK_NAME.fullmatch(name):
            raise InvalidName(f"block name {name!r} is not 40 hex digits")
        return f"{self.root}.blk.{block_shard(name)}.{name}.b"

    def block_get(self, name: str) -> str:
        """Whom to ask for a sealed block."""
        return f"$JS.API.DIRECT.GET.{self.block_stream}.{self.block(name)}"

    def control(self, service: str, sender: str) -> str:
        if service not in SERVICES:
            raise InvalidName(f"control service {service!r} does not exist; one of {', '.join(SERVICES)}")
        return f"{self.root}.ctl.{service}.{names.check_agent_id(sender)}"

    def live_chat(self, pattern: str) -> str:
        """Subscription for the live copies of a channel or pattern."""
        return f"{self.root}.live.chat.*.{names.check_pattern(pattern)}"

    def live_via(self, pattern: str) -> str:
        return f"{self.root}.live.via.*.*.{names.check_pattern(pattern)}"

    def live_link(self, peer: str) -> str:
        """Where the worker of a linked space hears that there is something new for it."""
        return f"{self.root}.live.link.{names.check_agent_id(peer)}"

    def ruling_filters(self) -> tuple[str, ...]:
        """Stream filters that together match every ruling record and nothing else."""
        return (
            f"{self.root}.acl.*",
            f"{self.root}.channel.*",
            self.steward_lease,
            f"{self.root}.link.*",
            f"{self.root}.member.*.*",
            self.space_record,
        )

    def tail(self, subject: str) -> str:
        """The subject after `td.<space>.`, as it is signed in ruling records."""
        return subject.removeprefix(self.root + ".")

    def parse(self, subject: str) -> Parsed | None:
        """What a subject names, or None. Live copies are parsed by `parse_live`."""
        root, dot, rest = subject.partition(self.root + ".")
        if root or not dot or len(rest) > MAX_TAIL:
            return None
        return _parse_tail(rest)

    def parse_live(self, subject: str) -> Chat | Via | LiveRoster | None:
        """What a live subject is a copy of: only chat, via and the roster are ever shown to agents."""
        root, dot, rest = subject.partition(self.root + ".live.")
        if root or not dot:
            return None
        if rest == "roster":
            return LiveRoster()
        if len(rest) > MAX_TAIL:
            return None
        parsed = _parse_tail(rest)
        return parsed if isinstance(parsed, Chat | Via) else None


def _checked_tag(tag: str) -> str:
    if not is_tag(tag):
        raise InvalidName(f"tag {tag!r} is not 26 base32 characters")
    return tag


def _chat(tokens: list[str]) -> Chat | None:
    channel = ".".join(tokens[1:])
    if len(tokens) < 2 or not names.is_agent_id(tokens[0]) or not names.is_channel(channel):
        return None
    return Chat(tokens[0], channel)


def _via(tokens: list[str]) -> Via | None:
    inner = _chat(tokens[1:])
    if inner is None or not names.is_token(tokens[0]):
        return None
    return Via(tokens[0], inner.sender, inner.channel)


def _member(tokens: list[str]) -> MemberSubject | None:
    if len(tokens) != 2 or not names.is_agent_id(tokens[0]) or not is_tag(tokens[1]):
        return None
    return MemberSubject(*tokens)


def _access(tokens: list[str]) -> AccessSubject | None:
    return AccessSubject(tokens[0]) if len(tokens) == 1 and names.is_agent_id(tokens[0]) else None


def _channel(tokens: list[str]) -> ChannelSubject | None:
    return ChannelSubject(tokens[0]) if len(tokens) == 1 and is_tag(tokens[0]) else None


def _link(tokens: list[str]) -> LinkSubject | None:
    return LinkSubject(tokens[0]) if len(tokens) == 1 and names.is_token(tokens[0]) else None


def _lease(tokens: list[str]) -> StewardLeaseSubject | None:
    return StewardLeaseSubject() if tokens == ["steward"] else None


def _space(tokens: list[str]) -> SpaceSubject | None:
    return SpaceSubject() if not tokens else None


def _shard(token: str, owner: str) -> int | None:
    """The shard, only if it is the owner's: a wrong shard would be a second mailbox nobody reads."""
    return shard_of(owner) if names.is_agent_id(owner) and token == str(shard_of(owner)) else None


def _direct(tokens: list[str]) -> Direct | None:
    if len(tokens) != 3 or not names.is_agent_id(tokens[2]):
        return None
    shard = _shard(tokens[0], tokens[1])
    return None if shard is None else Direct(shard, tokens[1], tokens[2])


def _task(tokens: list[str]) -> Task | None:
    if len(tokens) != 2 or not names.is_role_address(tokens[0]) or not names.is_agent_id(tokens[1]):
        return None
    return Task(*tokens)


def _delivery(tokens: list[str]) -> Delivery | DeliveryLease | None:
    if tokens == ["lease"]:
        return DeliveryLease()
    if len(tokens) != 2:
        return None
    shard = _shard(tokens[0], tokens[1])
    return None if shard is None else Delivery(shard, tokens[1])


def _audit(tokens: list[str]) -> Audit | None:
    return Audit(".".join(tokens)) if tokens and all(map(names.is_token, tokens)) else None


def _dead(tokens: list[str]) -> Dead | None:
    return Dead(*tokens) if len(tokens) == 2 and all(map(names.is_token, tokens)) else None


def _control(tokens: list[str]) -> Control | None:
    if len(tokens) != 2 or tokens[0] not in SERVICES or not names.is_agent_id(tokens[1]):
        return None
    return Control(*tokens)


_PARSERS: dict[str, Callable[[list[str]], Parsed | None]] = {
    "chat": _chat,
    "via": _via,
    "member": _member,
    "acl": _access,
    "channel": _channel,
    "link": _link,
    "lease": _lease,
    "space": _space,
    "dm": _direct,
    "task": _task,
    "dlv": _delivery,
    "aud": _audit,
    "dead": _dead,
    "ctl": _control,
}


@lru_cache(maxsize=16_384)
def _parse_tail(rest: str) -> Parsed | None:
    kind, *tokens = rest.split(".")
    parser = _PARSERS.get(kind)
    return parser(tokens) if parser else None


# --- tags ---
# Tags: how a pattern or channel appears in a ruling subject without being readable there.
#
# An agent can test any subject it can spell with a sequence expectation and the broker answers with the last sequence.
# So the subject carries a keyed hash that only the steward can compute; the name is in the signed payload.


TAG_LENGTH = 26
SECRET_BYTES = 32


def tag(secret: bytes, text: str) -> str:
    """26 base32 characters of HMAC-SHA256(space secret, pattern or channel name)."""
    digest = hmac.new(secret, text.encode(), hashlib.sha256).digest()
    return base64.b32encode(digest).decode()[:TAG_LENGTH]


def is_tag(text: str) -> bool:
    return len(text) == TAG_LENGTH and all(c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567" for c in text)


# --- state keys ---
# The keys of the state bucket `td_state_<space>`: small facts about a space that are not in its log.
#
# Each has one writer, or is written by compare-and-set on its revision (`server/state.py`). What the pipeline may read
# and write of them is in `server/grants.py`.


class StateKey(StrEnum):
    """Keys with a fixed name."""

    STEWARD_BEAT = "beat.steward"
    DELIVER_BEAT = "beat.deliver"
    DELIVER_FLOOR = "floor.deliver"
    DELIVER_FIGURES = "figures.deliver"
    LOG_FLOOR = "floor.log"
    #: owner -> DLV sequence through which it had acknowledged everything when its mailbox was emptied: the pipeline
    #: delivers again what lay above, as far as it is still allowed, and takes the note away
    EMPTIED = "emptied"
    ROSTER_SEEN = "roster.seen"
    ROSTER_ATTENTION = "roster.attention"
    VOIDS = "voids"
