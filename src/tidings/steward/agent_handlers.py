"""What the steward does for agents: join, leave, list, channel settings, their own access.

Each service checks the access record in force and, if something is to be ruled, writes it under the writer's lock,
so that the check and the record are one step. Repeating a request with the same op gives the same answer. Listings
come in pages: `next`, given back as `after`, continues one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from tidings.admin.agents import Ledger
from tidings.contract.agents import (
    AccessAnswer,
    AccessRequest,
    LinksAnswer,
    LinksRequest,
    LinkVersionRow,
    SpaceRequest,
    SpaceSettingsAnswer,
)
from tidings.contract.channels import (
    AudienceAnswer,
    AudienceRequest,
    ChangeChannelRequest,
    ChannelAnswer,
    ChannelChangedAnswer,
    ChannelRequest,
    ChannelRow,
    ChannelsAnswer,
    ChannelsRequest,
    JoinAnswer,
    JoinRequest,
    LastMessage,
    LeaveAnswer,
    LeaveRequest,
    MemberRow,
    MembersAnswer,
    MembershipRow,
    MembershipsAnswer,
    MembershipsRequest,
    MembersRequest,
)
from tidings.contract.core import Caller
from tidings.errors import ConflictError, DeniedError, LogFull
from tidings.model.membership import Interval
from tidings.model.rulebook import Rulebook
from tidings.rpc.dispatch import handler
from tidings.server.lease import StewardLease
from tidings.steward.context import SpaceContext, now
from tidings.steward.gate import LogGate
from tidings.steward.linked_people import LinkedPeople
from tidings.steward.marks import Marks
from tidings.steward.requests import fitting
from tidings.steward.roster_service import RosterService
from tidings.steward.writer import Completed, RulingWriter
from tidings.wire.links import channel_map
from tidings.wire.names import check_channel, check_pattern, covers_any, covers_pattern, may_meet
from tidings.wire.records import record_time, seconds_of
from tidings.wire.rulings import Channel, Link, Member

#: two subscriptions each, and a connection has at most 1,000
MAX_MEMBERSHIPS = 480
JOIN_BURST = 500
JOINS_PER_SECOND = 5.0
#: of one page of a listing; rows of channels are read from the broker, so they are fewer
PAGE_BYTES = 256 * 1024
MEMBERS_PER_PAGE = 2_000
CHANNELS_PER_PAGE = 50
LINKS_PER_PAGE = 200
#: of what one reader remembers of the log
MOST_CLAIMS = 64
#: settings that a request may change
CHANGEABLE = ("cls", "replay", "replay_window", "description", "instructions", "listed")
#: what a join and a leave can have come to
JOINED, LEFT = ("opened", "resumed"), ("left", "absent")
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentHandlers:
    space: SpaceContext
    writer: RulingWriter
    lease: StewardLease
    gate: LogGate
    marks: Marks
    roster: RosterService
    people: LinkedPeople
    #: of each agent: joins it may make at once, and since when that was so
    _joins_left: dict[str, tuple[float, float]] = field(default_factory=dict)

    @handler(JoinRequest)
    async def join(self, caller: Caller, request: JoinRequest) -> JoinAnswer:
        pattern = check_pattern(request.pattern)
        async with self.writer.lock:
            access = self.space.access_of(caller.id)
            if not covers_any(access.read, pattern):
                raise DeniedError(
                    f"{access.name} may not read {pattern}; it may read {', '.join(access.read) or 'nothing'}"
                )
            subject = self.space.subjects.member(caller.id, self.space.tag(pattern))
            held = self.open_interval(caller.id, pattern)
            operations = self.writer.operations
            if (done := operations.outcome(caller.id, caller.op, subject, *JOINED)) is not None:
                seq, state = done.seq, done.state  # its answer was lost, or it comes late: it is told once more
            elif held is None:
                self._check_room_to_join(caller.id)
                record = Member(op=caller.op, at=now(), state="in", pattern=pattern)
                seq, state = await self.writer.write(subject, record), "opened"
            else:
                seq, state = held.joined, "resumed"
                operations.note(caller.id, caller.op, Completed(subject, seq, state))
        facts = await self.roster.facts()
        return JoinAnswer(
            state=state,
            seq=seq,
            # a repeat of an operation whose membership has ended since does not open another one
            left=self._left(caller.id, pattern, seq),
            # whatever is older than this answer was stored at or below it
            head=facts["head"],
            backstop=facts["backstop"],
            **self.space.channel_facts(pattern),
            **await self.agreement(caller, request, int(facts["head"])),
        )

    async def agreement(self, caller: Caller, request: JoinRequest, head: int) -> dict[str, Any]:
        """Which log this is and, if the caller knew another one, up to where both are the same.

        What it remembers decides for itself alone; for everybody a new epoch begins only if a steward vouched for it.
        """
        marks, floor, known = self.marks, self.space.table.floor, request.epoch
        claims = sorted((each for each in request.marks[:MOST_CLAIMS] if each.seq > 0), key=lambda each: -each.seq)
        head = await self.space.log_head() if claims else head
        contradicted, confirmed = await marks.compare(claims, head, floor)
        if contradicted:
            await self.lease.prove()
            await marks.believe(claims, head, floor)
            if known == marks.file.epoch:
                marks.doubts[caller.id] = contradicted
                name = self.space.name_of(caller.id)
                log.warning("%s remembers another record at %d than the log has", name, contradicted)
        by_epoch = marks.agreed_since(known) if known else None
        differs = contradicted or by_epoch is not None
        agreed = max(confirmed, by_epoch or 0) if differs else None
        return {"epoch": marks.file.epoch, "agreed": agreed, "stamp": await marks.stamp(head)}

    def _check_room_to_join(self, owner: str) -> None:
        """Every join is a record that stays. Leaving is never refused; joining is, before it crowds out leaving."""
        if len(self.space.open_intervals(owner)) >= MAX_MEMBERSHIPS:
            raise ConflictError(f"an agent is in at most {MAX_MEMBERSHIPS} channels and patterns: use a wider pattern")
        if self.gate.half_of_reserve_is_used:
            raise LogFull("the log is full and half its reserve is used: joins wait until room is made")
        # bursts are fine, flapping is not
        moment = time.monotonic()
        left, since = self._joins_left.get(owner, (float(JOIN_BURST), moment))
        left = min(JOIN_BURST, left + (moment - since) * JOINS_PER_SECOND)
        self._joins_left[owner] = (left - 1 if left >= 1 else left, moment)
        if left < 1:
            raise ConflictError("too many joins in a short time: wait a moment and ask again")

    @handler(LeaveRequest)
    async def leave(self, caller: Caller, request: LeaveRequest) -> LeaveAnswer:
        """Close the membership that `joined` names, or the open one. Needs no read access: it works after a narrowing.

        A leave that comes late or twice ends what it named and nothing that was opened since. `open` is the sequence of
        a membership of the same pattern that stands afterwards.
        """
        pattern, named = check_pattern(request.pattern), request.joined
        async with self.writer.lock:
            subject = self.space.subjects.member(caller.id, self.space.tag(pattern))
            held = self.open_interval(caller.id, pattern)
            operations = self.writer.operations
            if (done := operations.outcome(caller.id, caller.op, subject, *LEFT)) is not None:
                seq, state = done.seq, done.state
            elif held is not None and named in (None, held.joined):
                record = Member(op=caller.op, at=now(), state="out", pattern=pattern, ends=held.joined)
                seq, state = await self.writer.write(subject, record), "left"
            else:
                ended = self._left(caller.id, pattern, named) if named is not None else None
                seq = ended or self.writer.last_op.get(subject, ("", 0))[1]
                state = "left" if ended else "absent"
                operations.note(caller.id, caller.op, Completed(subject, seq, state))
        held = self.open_interval(caller.id, pattern)
        covering = (i.pattern for i in self.space.open_intervals(caller.id) if covers_pattern(i.pattern, pattern))
        return LeaveAnswer(state, seq, held.joined if held else None, tuple(covering))

    def _left(self, owner: str, pattern: str, joined: int) -> int | None:
        """Where the membership that began at `joined` ended."""
        stays = (i for i in self.space.table.intervals(owner) if i.pattern == pattern and i.joined == joined)
        return next((stay.left for stay in stays), None)

    @handler(MembershipsRequest)
    async def memberships(self, caller: Caller, _request: MembershipsRequest) -> MembershipsAnswer:
        held = (MembershipRow(i.pattern, i.joined) for i in self.space.open_intervals(caller.id))
        return MembershipsAnswer(tuple(held), self.space.position)

    @handler(MembersRequest)
    async def members(self, caller: Caller, request: MembersRequest) -> MembersAnswer:
        """Lists the members of a channel, for agents that may read it."""
        channel = check_channel(request.channel)
        access = self.space.access_of(caller.id)
        if not covers_any(access.read, channel):
            raise DeniedError(f"{access.name} may not read {channel}, so it may not see who is in it")
        owners = _after(self.space.table.members_at(channel, self.space.position + 1), request.after)
        rows = [MemberRow(owner, self.space.name_of(owner)) for owner in owners[:MEMBERS_PER_PAGE]]
        return MembersAnswer(tuple(shown := _within_page(rows)), _next(owners, shown), self.space.position)

    @handler(AudienceRequest)
    async def check_audience(self, caller: Caller, request: AudienceRequest) -> AudienceAnswer:
        """Finds the agents that do not receive a channel, for callers that may post or read there."""
        channel = check_channel(request.channel)
        access = self.space.access_of(caller.id)
        if not covers_any((*access.read, *access.post), channel):
            raise DeniedError(f"{access.name} may neither read nor post to {channel}")
        at, inside = self.space.position, set(self.space.table.members_at(channel, self.space.position + 1))
        reasons = {each: self._why_not_reached(each, channel, at) for each in request.ids if each not in inside}
        return AudienceAnswer({each: reason for each, reason in reasons.items() if reason}, at)

    def _why_not_reached(self, agent_id: str, channel: str, at: int) -> str:
        """Returns the reason for an agent that is not a member; only a linked space knows its own members."""
        if self.people.find(agent_id) is not None:
            return "" if self.people.hears(agent_id, channel) else "space"
        return "member" if self.space.table.allowed_at(agent_id, channel, at) else "read"

    @handler(ChannelsRequest)
    async def channel_list(self, caller: Caller, request: ChannelsRequest) -> ChannelsAnswer:
        """Lists channels that have a record or a member, as far as the caller may read them."""
        access = self.space.access_of(caller.id)
        known = [name for name in self.space.table.channel_names(self.space.position) if not self._is_removed(name)]
        names = _after((name for name in known if covers_any(access.read, name)), request.after)
        held = [each.pattern for each in self.space.open_intervals(caller.id)]
        rows = [
            ChannelRow(
                **self.space.channel_facts(name),
                members=self._member_count(name),
                joined=covers_any(held, name),
                last=await self._last(name),
            )
            for name in names[:CHANNELS_PER_PAGE]
        ]
        return ChannelsAnswer(tuple(shown := _within_page(rows)), _next(names, shown), self.space.position)

    def _is_removed(self, name: str) -> bool:
        """A channel whose settings were removed and that nobody is in."""
        record = self.space.table.channel_at(name, self.space.position)
        return record is not None and not record.listed and not self._member_count(name)

    @handler(ChannelRequest)
    async def channel_info(self, caller: Caller, request: ChannelRequest) -> ChannelAnswer:
        """Shows a channel's settings; members and activity only to agents that may read it."""
        channel = check_channel(request.channel)
        access = self.space.access_of(caller.id)
        if not covers_any((*access.read, *access.post), channel):
            raise DeniedError(f"{access.name} may neither read nor post to {channel}")
        activity: dict[str, Any] = {}
        if covers_any(access.read, channel):
            activity = {"members": self._member_count(channel), **await self._activity(channel)}
        return ChannelAnswer(
            **self.space.channel_facts(channel),
            seq=self.space.position,
            backstop=(await self.roster.facts())["backstop"],
            **activity,
        )

    def _member_count(self, channel: str) -> int:
        return len(self.space.table.members_at(channel, self.space.position + 1))

    async def _last(self, channel: str) -> LastMessage | None:
        """The newest record of a channel: one lookup for what was said here, one for what came over a link."""
        stream = self.space.subjects.log_stream
        found = [await self.space.js.last(stream, each) for each in self.space.channel_filters(channel)]
        newest = max((record for record in found if record), key=lambda record: record.seq, default=None)
        return LastMessage(newest.seq, record_time(newest.time_ns)) if newest else None

    async def _activity(self, channel: str) -> dict[str, Any]:
        """The newest message, how many the log still holds, and how many that is in an hour since the oldest."""
        stream, last = self.space.subjects.log_stream, await self._last(channel)
        if last is None:
            return {"last": None, "messages": 0, "per_hour": 0.0}
        oldest, count = seconds_of(last.time), 0
        for each in self.space.channel_filters(channel):
            first = await self.space.js.following(stream, each, 1)
            if first is not None:
                count += sum((await self.space.js.counts_of(stream, each)).values())
                oldest = min(oldest, first.time_ns / 1e9)
        hours = max(time.time() - oldest, 60.0) / 3600
        return {"last": last, "messages": count, "per_hour": round(count / hours, 2)}

    @handler(ChangeChannelRequest)
    async def channel_set(self, caller: Caller, request: ChangeChannelRequest) -> ChannelChangedAnswer:
        name = check_channel(request.channel)
        async with self.writer.lock:
            access = self.space.access_of(caller.id)
            if not covers_any(access.manage, name):
                raise DeniedError(
                    f"{access.name} may not change settings of {name}: its access has no such `manage` pattern"
                )
            subject = self.space.subjects.channel(self.space.tag(name))
            if (done := self.writer.operations.outcome(caller.id, caller.op, subject)) is not None:
                return ChannelChangedAnswer(**self.space.channel_facts(name), seq=done.seq)
            before = self.space.table.channel_at(name, self.space.position)
            seq = await self.writer.write(subject, changed_channel(before, caller, request))
        return ChannelChangedAnswer(**self.space.channel_facts(name), seq=seq)

    @handler(SpaceRequest)
    async def space_info(self, caller: Caller, _request: SpaceRequest) -> SpaceSettingsAnswer:
        self.space.access_of(caller.id)
        return SpaceSettingsAnswer(self.space.settings(), self.space.position)

    @handler(LinksRequest)
    async def space_links(self, caller: Caller, request: LinksRequest) -> LinksAnswer:
        """Lists what links import into channels that the caller may read: the names of others are hidden. Where only
        listed channels may be used, only those count."""
        access = self.space.access_of(caller.id)
        head = await self.space.log_head()  # before the rules are read: they are not older than it
        rules = self.space.table.rules
        found = {f"{name}.{seq:016d}": (seq, record) for name, seq, record in _link_versions(rules)}
        keys = _after(found, request.after)
        rows = [_link_row(rules, *found[key], access.read) for key in keys[:LINKS_PER_PAGE]]
        return LinksAnswer(
            links=tuple(shown := _within_page(rows)),
            next=_next(keys, shown),
            newest=rules.links_revised,
            through=max(head, rules.floor),
            floor=rules.floor,
        )

    @handler(AccessRequest)
    async def own_access(self, caller: Caller, _request: AccessRequest) -> AccessAnswer:
        """Returns the caller's access with its current token, which is no secret without the seed."""
        access = self.space.access_of(caller.id)
        if (row := Ledger(self.space.home.issued).renewed(caller.id, access.iat or 0)) is not None:
            access = replace(access, jwt=row.token, iat=row.iat)  # the one in the record ended, or will
        trusted = self.space.home.read_info().trusted  # it may change while we run
        return AccessAnswer(access, self.space.position, trusted)

    def open_interval(self, owner: str, pattern: str) -> Interval | None:
        return next((i for i in self.space.open_intervals(owner) if i.pattern == pattern), None)


def _link_versions(rules: Rulebook) -> Iterator[tuple[str, int, Link]]:
    """(link, sequence, record) wherever a link lets other things in than before: by its own record, or because other
    channels are listed."""
    listings = list(rules.listings())
    for name, history in rules.links.items():
        told: LinkVersionRow | None = None
        own = {seq for seq, _, _ in history.entries(rules.floor)}
        listed = {seq for seq, channel in listings if _concerns(history.at(seq), channel)}
        for seq in sorted(own | listed):
            record = history.at(seq)
            if record is None:
                continue
            row = replace(_link_row(rules, seq, record, (">",)), seq=0)
            if row != told:
                told = row
                yield name, seq, record


def _concerns(record: Link | None, channel: str | None) -> bool:
    """Does it take something into this channel? None: into any."""
    if record is None or channel is None:
        return record is not None
    maps = (record.channels, *record.beyond.values())
    return any(channel_map(each).theirs(channel) is not None for each in maps)


def _link_row(rules: Rulebook, seq: int, record: Link, readable: Iterable[str]) -> LinkVersionRow:
    patterns = tuple(readable)
    listed = rules.listed_at(seq)

    def shown(channels: dict[str, str]) -> dict[str, str]:
        if listed is not None:
            names = channel_map(channels)
            channels = {theirs: ours for ours in listed if (theirs := names.theirs(ours)) is not None}
        return {theirs: ours for theirs, ours in channels.items() if any(may_meet(each, ours) for each in patterns)}

    return LinkVersionRow(
        link=record.link,
        seq=seq,
        state=record.state,
        origin=record.origin,
        space=record.space,
        channels=shown(record.channels),
        beyond={space: shown(channels) for space, channels in record.beyond.items()},
        hops=record.hops,
        until=record.until,
        mail=record.passes_mail,
        tasks=record.passes_tasks,
    )


def _after(keys: Iterable[str], after: str | None) -> list[str]:
    """Returns the rest of a listing, in order."""
    return sorted(key for key in keys if key > (after or ""))


def _within_page(rows: list[T]) -> list[T]:
    return fitting(rows, lambda row: len(msgspec.json.encode(row)) + 1, PAGE_BYTES)


def _next(keys: Sequence[str], shown: Sequence[Any]) -> str | None:
    return keys[len(shown) - 1] if len(shown) < len(keys) else None


def changed_channel(before: Channel | None, caller: Caller, request: ChangeChannelRequest) -> Channel:
    """Returns the channel's record with the settings that the request names, and nothing else, changed."""
    changes = {name: value for name in CHANGEABLE if (value := getattr(request, name)) is not UNSET}
    if "listed" not in changes:
        changes["listed"] = True  # setting a channel after its removal restores it
    base = before or Channel(op=caller.op, name=request.channel)
    return replace(base, **changes, op=caller.op, at=now(), by=caller.id)
