"""Operations on channels: memberships, settings, history."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tidings.contract.core import Answer, Integer, Moment, Request, operation
from tidings.wire.message import MAX_MENTIONS
from tidings.wire.records import Stamp
from tidings.wire.roster import Backstop
from tidings.wire.rulings import ChannelClass


class RawRecord(Answer):
    """A record as it was stored. Nothing is re-encoded, so that the reader can verify it."""

    seq: int
    time: str
    subject: str
    headers: bytes
    payload: bytes


class LastMessage(Answer):
    seq: int
    time: str


class ChannelSettings(Answer, kw_only=True):
    """The current settings of a channel. `own` names those that its own record sets."""

    channel: str
    cls: ChannelClass = msgspec.field(name="class")
    replay: bool
    own: tuple[str, ...]
    replay_window: int | None
    description: str | None = None
    instructions: str | None = None
    by: str | None = None
    by_name: str | None = None
    at: str | None = None


# --- memberships ---


class JoinAnswer(ChannelSettings, kw_only=True):
    """`state` is `opened` or `resumed`. `left`: if the request is a repeat, the sequence at which the membership has
    ended since. `agreed`: if this log differs from the one the caller knew, the last sequence at which they agree."""

    state: str
    seq: int
    left: int | None
    head: int
    backstop: Backstop
    epoch: str
    agreed: int | None
    stamp: Stamp | None


@operation("member join", once=True)
class JoinRequest(Request[JoinAnswer]):
    """Join a channel or pattern. `epoch` and `marks`: the log as the caller remembers it."""

    pattern: str
    epoch: str | None = None
    marks: tuple[Stamp, ...] = ()


class LeaveAnswer(Answer):
    """`state` is `left` or `absent`. `open`: the join of another membership of this pattern that is still open."""

    state: str
    seq: int
    open: int | None
    still_covered_by: tuple[str, ...]


@operation("member leave", once=True)
class LeaveRequest(Request[LeaveAnswer]):
    """End the membership that the join at `joined` opened, or the current one."""

    pattern: str
    joined: Integer | None = None


class MembershipRow(Answer):
    pattern: str
    joined: int


class MembershipsAnswer(Answer):
    memberships: tuple[MembershipRow, ...]
    seq: int


@operation("member list", host=True, changes=False)
class MembershipsRequest(Request[MembershipsAnswer]):
    """List this agent's memberships."""


class MemberRow(Answer):
    id: str
    name: str | None


class MembersAnswer(Answer):
    members: tuple[MemberRow, ...]
    next: str | None
    seq: int


@operation("member members", host=True, changes=False)
class MembersRequest(Request[MembersAnswer]):
    """List the members of a channel, in pages."""

    channel: str
    after: str | None = None


class AudienceAnswer(Answer):
    """The agents that do not receive the channel, each with what is missing: `member`, `read` (access) or `space`."""

    deaf: dict[str, str]
    seq: int


@operation("member deaf", host=True, changes=False)
class AudienceRequest(Request[AudienceAnswer]):
    """Find out which of these agents do not receive a channel."""

    channel: str
    ids: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_MENTIONS)]


# --- settings ---


class ChannelRow(ChannelSettings, kw_only=True):
    members: int
    joined: bool
    last: LastMessage | None


class ChannelsAnswer(Answer):
    channels: tuple[ChannelRow, ...]
    next: str | None
    seq: int


@operation("channel list", host=True, changes=False)
class ChannelsRequest(Request[ChannelsAnswer]):
    """List the channels that this agent may read and that have settings or members, in pages."""

    after: str | None = None


class ChannelAnswer(ChannelSettings, kw_only=True):
    """Members and activity are shown only to agents that may read the channel."""

    seq: int
    backstop: Backstop
    members: int | None = None
    last: LastMessage | None = None
    messages: int | None = None
    per_hour: float | None = None


@operation("channel info", host=True, changes=False)
class ChannelRequest(Request[ChannelAnswer]):
    """Show a channel's settings, members and activity."""

    channel: str


class ChannelChangedAnswer(ChannelSettings, kw_only=True):
    seq: int


@operation("channel set", once=True, host=True)
class ChangeChannelRequest(Request[ChannelChangedAnswer]):
    """Change a channel's settings. `null` resets a setting to the default of the space."""

    channel: str
    cls: ChannelClass | UnsetType | None = msgspec.field(name="class", default=UNSET)
    replay: bool | UnsetType | None = UNSET
    replay_window: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)] | UnsetType | None = UNSET
    description: Annotated[str, msgspec.Meta(max_length=200)] | UnsetType = UNSET
    instructions: Annotated[str, msgspec.Meta(max_length=2000)] | UnsetType = UNSET
    listed: bool | UnsetType = UNSET


# --- history ---


class HistoryAnswer(Answer):
    """`next` continues as `before` or `after`. `links`: the sequence of the newest link record. `void`: the number of
    rejected records that were left out."""

    records: tuple[RawRecord, ...]
    more: bool
    next: int
    head: int
    stamp: Stamp | None
    floor: int
    links: int
    void: int
    hidden: bool


@operation("history page", changes=False)
class HistoryRequest(Request[HistoryAnswer]):
    """Read a page of a channel or pattern: below `before` newest first, or above `after` oldest first."""

    channel: str
    limit: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)] = 50
    before: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)] | None = None
    after: Integer | None = None
    until: Integer | None = None
    since: Moment | None = None
    sender: str | None = None
    link: str | None = None


class ConfirmAnswer(Answer):
    yours: bool
    subject: str | None = None
    payload: bytes | None = None


@operation("confirm record", host=True, changes=False)
class ConfirmRequest(Request[ConfirmAnswer]):
    """Check whether the record at a sequence of a stream (`log`, `dm`, `task`) is this agent's."""

    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
    stream: Literal["log", "dm", "task"] = "log"
