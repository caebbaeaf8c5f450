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
    """`authority`: the certificates (DER, concatenated) that a bundle trusts at this address; empty if the space has no
    authority of its own."""

    access: Access
    seq: int
    authority: bytes


@operation("access get", changes=False)
class AccessRequest(Request[AccessAnswer]):
    """Return this agent's current access record, with a new token if there is one."""


# --- attention ---


class KeptAttention(Struct, frozen=True):
    """The attention that the steward keeps for an agent. A later change has a higher number (milliseconds)."""

    attention: Attention
    number: Count


class AttentionAnswer(Answer):
    """`standing` is kept by the steward, under `number` (0: none is kept). `running`: what a session says now."""

    standing: Attention | None
    number: int
    running: Attention | None


@operation("attention get", host=True, changes=False)
class AttentionRequest(Request[AttentionAnswer]):
    """Show what may wake this agent. `session` is left out of `running`."""

    session: str | None = None


@operation("attention set", host=True)
class ChangeAttentionRequest(Request[AttentionAnswer]):
    """Change what may wake this agent: the mode, levels of channels or patterns, or both."""

    mode: Mode | None = None
    channels: dict[str, Level] = field(default_factory=dict)
    session: str | None = None


# --- presence and the receiving session ---


class BeatAnswer(Answer):
    """`boot` identifies the term of the steward."""

    boot: str


@operation("presence beat")
class BeatRequest(Request[BeatAnswer], kw_only=True):
    """State what one session of this agent does. Clients publish it without waiting for an answer."""

    session: Session
    status: Status
    activity: Activity | None = None
    attention: Attention = Attention()
    model: Model | None = None


class SessionAnswer(Answer):
    """`unsettled`: the number of frames that the session before this one received and did not settle."""

    number: int
    superseded: bool
    boot: str
    unsettled: int


@operation("session take")
class TakeSessionRequest(Request[SessionAnswer]):
    """Receive as this session. `held`: its number, if it has one; it never replaces a newer session. `ended`: take it
    only in place of the session of this number."""

    session: SessionId
    held: Annotated[int, Meta(ge=1, le=2**53 - 1)] | None = None
    ended: Integer | None = None


@operation("session release")
class ReleaseSessionRequest(Request[EmptyAnswer]):
    """Stop receiving as this session."""

    session: SessionId


class EndedSessionAnswer(Answer):
    """`ended`: the number of the session that received last, or null while it may be alive."""

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
    """A page of agents, ordered by id; deltas of `boot` with a number above the `n` of the first page apply to it.
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
    """Ids that the space does not know are missing. Agents of linked spaces are called `name@space`."""

    names: dict[str, NameRow]


@operation("roster names", host=True, changes=False)
class NamesRequest(Request[NamesAnswer]):
    """Look up the names and roles of agents by id, also of revoked ones."""

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
    `space`: its name here. Both maps lead from its channels to ours, `beyond` for each space behind it. `mail`,
    `tasks`: whether direct messages and tasks come in."""

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
    """Rows ordered by link, then by sequence. `newest`: the sequence of the newest link record. `through`: up to there
    no change is missing from the rows."""

    links: tuple[LinkVersionRow, ...]
    next: str | None
    newest: int
    through: int
    floor: int


@operation("space links", host=True, changes=False)
class LinksRequest(Request[LinksAnswer]):
    """List what each link of the space imports, and since when, in pages."""

    after: str | None = None


# --- health ---


class GateFacts(Answer):
    """Whether the log takes messages. `closed_by` is `disk` or `budget`."""

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
    """Report every fact of the space and its problems, after a real round trip."""


class DescribeAnswer(Answer):
    operations: tuple[dict[str, Any], ...]


@operation("health describe", host=True, changes=False)
class DescribeRequest(Request[DescribeAnswer]):
    """List the operations that agents may call."""
