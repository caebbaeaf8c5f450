"""Operations on agents and their space: access, attention, presence, sessions, the roster, settings, links, health."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from tidings.contract.channels import RawRecord
from tidings.contract.core import Answer, EmptyAnswer, Integer, Request, operation
from tidings.wire.roster import Activity, AgentEntry, Attention, Backstop, Count, Level, Mode, Model, Session, Status
from tidings.wire.rulings import Access, Defaults, Parts, Switch

#: ids in one request for names
MOST_NAMES = 64

SessionId = Annotated[str, Meta(min_length=8, max_length=64)]


# --- access ---


class AccessAnswer(Answer):
    """`authority`: the certificates (DER, concatenated) that clients trust at this address; empty if the space has no
    authority of its own."""

    access: Access
    seq: int
    authority: bytes


@operation("access get", changes=False)
class AccessRequest(Request[AccessAnswer]):
    """Return this agent's current access record, with a new token if there is one."""


# --- attention ---


class KeptAttention(Struct, frozen=True):
    """The attention that the steward stores for an agent. `number` (milliseconds) increases with each change."""

    attention: Attention
    number: Count


class AttentionAnswer(Answer):
    """`standing` and its `number` are stored by the steward (0: none). `running`: the setting of a running session."""

    standing: Attention | None
    number: int
    running: Attention | None


@operation("attention get", host=True, changes=False)
class AttentionRequest(Request[AttentionAnswer]):
    """Show what may wake this agent. `running` ignores `session`."""

    session: str | None = None


@operation("attention set", host=True)
class ChangeAttentionRequest(Request[AttentionAnswer]):
    """Change what may wake this agent: the mode, levels of channels or patterns, or both."""

    mode: Mode | None = None
    channels: dict[str, Level] = field(default_factory=dict)
    session: str | None = None


# --- presence and the receiving session ---


class BeatAnswer(Answer):
    """`boot` identifies the run of the steward."""

    boot: str


@operation("presence beat")
class BeatRequest(Request[BeatAnswer], kw_only=True):
    """Report what one session of this agent does. Clients publish it without waiting for an answer."""

    session: Session
    status: Status
    activity: Activity | None = None
    attention: Attention = Attention()
    model: Model | None = None


class SessionAnswer(Answer):
    """`unsettled`: the number of frames that the previous session received and did not ack."""

    number: int
    superseded: bool
    boot: str
    unsettled: int


@operation("session take")
class TakeSessionRequest(Request[SessionAnswer]):
    """Make this the receiving session. `held`: its number, if it has one; it never replaces a newer session. `ended`:
    do so only in place of the session with this number."""

    session: SessionId
    held: Annotated[int, Meta(ge=1, le=2**53 - 1)] | None = None
    ended: Integer | None = None


@operation("session release")
class ReleaseSessionRequest(Request[EmptyAnswer]):
    """Stop receiving as this session."""

    session: SessionId


class EndedSessionAnswer(Answer):
    """`ended`: the number of the last receiving session, or null while it may be alive."""

    ended: int | None


@operation("session ended", changes=False)
class EndedSessionRequest(Request[EndedSessionAnswer]):
    """Find out whether the receiving session of this agent has ended."""


# --- the roster ---


class DamageRow(Answer, kw_only=True):
    """A loss that concerns this agent: records that the store lost, mail or a membership that was removed."""

    kind: str | None = None
    text: str
    channel: str | None
    first: int | None
    last: int | None
    count: int | None
    cause: str


class RosterAnswer(Answer):
    """A page of agents, ordered by id; published changes of `boot` numbered above the first page's `n` apply to it.
    `ttl`: seconds without a beat after which an agent is offline. `rotations`: the records that named a new steward
    key. `unheard`: linked spaces whose agents are not known now, with `starting` or `paused`."""

    boot: str
    n: int
    rows: tuple[AgentEntry, ...]
    next: str | None
    ttl: float
    epoch: str
    damage: tuple[DamageRow, ...]
    told: int
    rotations: tuple[RawRecord, ...]
    attention: KeptAttention | None
    head: int
    floor: int
    backstop: Backstop
    links: int
    unheard: dict[str, str]


@operation("roster snapshot", changes=False)
class RosterRequest(Request[RosterAnswer]):
    """List the agents of the space, in pages."""

    after: str | None = None


class NameRow(Answer):
    name: str
    roles: tuple[str, ...]


class NamesAnswer(Answer):
    """Unknown ids are missing. Agents of linked spaces are called `name@space`."""

    names: dict[str, NameRow]


@operation("roster names", host=True, changes=False)
class NamesRequest(Request[NamesAnswer]):
    """Look up the names and roles of agents by id, including revoked agents."""

    ids: Annotated[tuple[str, ...], Meta(max_length=MOST_NAMES)]


# --- the space ---


class SpaceSettings(Answer, kw_only=True):
    """The current settings of the space; see `wire/rulings.Space`."""

    defaults: Defaults
    channels: Literal["open", "listed"]
    parts: Parts
    keep_age: int | None
    keep_bytes: int | None
    keep_unread: int | None
    keep_receipts: int | None
    quota_records: int | None
    quota_bytes: int | None


class SpaceSettingsAnswer(Answer):
    space: SpaceSettings
    seq: int


@operation("space info", host=True, changes=False)
class SpaceRequest(Request[SpaceSettingsAnswer]):
    """Show the settings of the space."""


class LinkVersionRow(Answer, kw_only=True):
    """What a link imports from `seq` on, up to the next row of the same link. `origin`: the id of the linked space;
    `space`: its name here. `channels` maps its channels to ours, `beyond` those of each space behind it. `mail`,
    `tasks`: whether direct messages and tasks are imported."""

    link: str
    seq: int
    state: Switch
    origin: str
    space: str
    channels: dict[str, str]
    beyond: dict[str, dict[str, str]]
    hops: int
    until: int | None
    mail: bool
    tasks: bool


class LinksAnswer(Answer):
    """Rows ordered by link, then by sequence. `newest`: the sequence of the newest link record. `through`: the rows are
    complete up to this sequence."""

    links: tuple[LinkVersionRow, ...]
    next: str | None
    newest: int
    through: int
    floor: int


@operation("space links", host=True, changes=False)
class LinksRequest(Request[LinksAnswer]):
    """List what each link of the space imports, from which sequence on, in pages."""

    after: str | None = None


# --- health ---


class GateFacts(Answer):
    """Whether the log accepts messages. `closed_by` is `disk` or `budget`."""

    open: bool
    used: int
    budget: int
    closed_by: str | None


class HealthAnswer(Answer, kw_only=True):
    healthy: bool
    problems: tuple[str, ...]
    steward: dict[str, Any]
    broker_rtt_ms: float
    log_head: int
    floor: int
    backstop: dict[str, Any]
    floor_held_by: str | None
    epoch: str
    gate: GateFacts | None
    streams: dict[str, dict[str, int]]
    free_disk: int
    agents: int
    void_records: int
    void_messages: dict[str, int]
    counts: dict[str, int]
    mail: dict[str, int]
    tasks: dict[str, Any]
    removed: dict[str, int]
    withheld: tuple[str, ...]
    doubts: tuple[int, ...]
    regressions: tuple[dict[str, Any], ...]
    at: str


@operation("health ping", host=True, changes=False)
class HealthRequest(Request[HealthAnswer]):
    """Report the state of the space and its problems, after a round trip to the broker."""


class DescribeAnswer(Answer):
    operations: tuple[dict[str, Any], ...]


@operation("health describe", host=True, changes=False)
class DescribeRequest(Request[DescribeAnswer]):
    """List the operations that agents may call."""
