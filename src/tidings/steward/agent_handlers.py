"""What the steward does for agents: join, leave, list, channel settings, their own access.

Each service checks the access record in force and, if something is to be ruled, writes it under the writer's lock,
so that the check and the record are one step. Repeating a request with the same op gives the same answer. Listings
come in pages: `next`, given back as `after`, continues one.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidings.admin.agents import Ledger
from tidings.errors import ConflictError, DeniedError, LogFull, UsageError
from tidings.model.membership import Interval
from tidings.model.rulebook import Rulebook
from tidings.server.lease import StewardLease
from tidings.steward.context import SpaceContext, now
from tidings.steward.gate import LogGate
from tidings.steward.linked_people import LinkedPeople
from tidings.steward.marks import Marks
from tidings.steward.requests import Answer, ControlRequest, fitting, handles
from tidings.steward.roster_service import RosterService
from tidings.steward.writer import Completed, RulingWriter
from tidings.wire.links import channel_map
from tidings.wire.message import MAX_MENTIONS
from tidings.wire.names import check_channel, check_pattern, covers_any, covers_pattern, may_meet
from tidings.wire.records import Stamp, record_time, seconds_of
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
#: what a join and a leave can have come to
JOINED, LEFT = ("opened", "resumed"), ("left", "absent")
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

    @handles("member", "join")
    async def join(self, request: ControlRequest) -> Answer:
        pattern = check_pattern(request.text("pattern"))
        async with self.writer.lock:
            access = self.space.access_of(request.sender)
            if not covers_any(access.read, pattern):
                raise DeniedError(
                    f"{access.name} may not read {pattern}; it may read {', '.join(access.read) or 'nothing'}"
                )
            subject = self.space.subjects.member(request.sender, self.space.tag(pattern))
            held = self.open_interval(request.sender, pattern)
            operations = self.writer.operations
            if (done := operations.outcome(request.sender, request.op, subject, *JOINED)) is not None:
                seq, state = done.seq, done.state  # its answer was lost, or it comes late: it is told once more
            elif held is None:
                self._check_room_to_join(request.sender)
                record = Member(op=request.op, at=now(), state="in", pattern=pattern)
                seq, state = await self.writer.write(subject, record), "opened"
            else:
                seq, state = held.joined, "resumed"
                operations.note(request.sender, request.op, Completed(subject, seq, state))
        facts = await self.roster.facts()
        return {
            "state": state,
            "seq": seq,
            # the membership of this operation is over since, and the operation does not open another one
            "left": self._left(request.sender, pattern, seq),
            # whatever is older than this answer was stored at or below it
            "head": facts["head"],
            "backstop": msgspec.to_builtins(facts["backstop"]),
            **self.space.channel_facts(pattern),
            **await self.agreement(request, int(facts["head"])),
        }

    async def agreement(self, request: ControlRequest, head: int) -> dict[str, Any]:
        """Which log this is and, if the caller knew another one, up to where both are the same.

        What it remembers decides for itself alone; for everybody a new epoch begins only if a steward vouched for it.
        """
        marks, floor, known = self.marks, self.space.table.floor, request.optional("epoch", str)
        claims = read_claims(request)
        head = await self.space.log_head() if claims else head
        contradicted, confirmed = await marks.compare(claims, head, floor)
        if contradicted:
            await self.lease.prove()
            await marks.believe(claims, head, floor)
            if known == marks.file.epoch:
                marks.doubts[request.sender] = contradicted
                name = self.space.name_of(request.sender)
                log.warning("%s remembers another record at %d than the log has", name, contradicted)
        by_epoch = marks.agreed_since(known) if known else None
        differs = contradicted or by_epoch is not None
        stamp = await marks.stamp(head)
        return {
            "epoch": marks.file.epoch,
            "agreed": max(confirmed, by_epoch or 0) if differs else None,
            "stamp": msgspec.to_builtins(stamp) if stamp else None,
        }

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

    @handles("member", "leave")
    async def leave(self, request: ControlRequest) -> Answer:
        """Close the membership that `joined` names, or the open one. Needs no read access: it works after a narrowing.

        A leave that comes late or twice ends what it named and nothing that was opened since. `open` is the sequence of
        a membership of the same pattern that stands afterwards.
        """
        pattern, named = check_pattern(request.text("pattern")), request.optional("joined", int)
        async with self.writer.lock:
            subject = self.space.subjects.member(request.sender, self.space.tag(pattern))
            held = self.open_interval(request.sender, pattern)
            operations = self.writer.operations
            if (done := operations.outcome(request.sender, request.op, subject, *LEFT)) is not None:
                seq, state = done.seq, done.state
            elif held is not None and named in (None, held.joined):
                record = Member(op=request.op, at=now(), state="out", pattern=pattern, ends=held.joined)
                seq, state = await self.writer.write(subject, record), "left"
            else:
                ended = self._left(request.sender, pattern, named) if named is not None else None
                seq = ended or self.writer.last_op.get(subject, ("", 0))[1]
                state = "left" if ended else "absent"
                operations.note(request.sender, request.op, Completed(subject, seq, state))
        held = self.open_interval(request.sender, pattern)
        remaining = [i.pattern for i in self.space.open_intervals(request.sender) if covers_pattern(i.pattern, pattern)]
        return {"state": state, "seq": seq, "open": held.joined if held else None, "still_covered_by": remaining}

    def _left(self, owner: str, pattern: str, joined: int) -> int | None:
        """Where the membership that began at `joined` ended."""
        stays = (i for i in self.space.table.intervals(owner) if i.pattern == pattern and i.joined == joined)
        return next((stay.left for stay in stays), None)

    @handles("member", "list")
    async def memberships(self, request: ControlRequest) -> Answer:
        held = self.space.open_intervals(request.sender)
        return {"memberships": [{"pattern": i.pattern, "joined": i.joined} for i in held], "seq": self.space.position}

    @handles("member", "members")
    async def members(self, request: ControlRequest) -> Answer:
        """Who is in a channel, for those who may read it."""
        channel = check_channel(request.text("channel"))
        access = self.space.access_of(request.sender)
        if not covers_any(access.read, channel):
            raise DeniedError(f"{access.name} may not read {channel}, so it may not see who is in it")
        owners = _after(self.space.table.members_at(channel, self.space.position + 1), request)
        rows = [{"id": owner, "name": self.space.name_of(owner)} for owner in owners[:MEMBERS_PER_PAGE]]
        return {"members": (shown := _within_page(rows)), "next": _next(owners, shown), "seq": self.space.position}

    @handles("member", "deaf")
    async def deaf(self, request: ControlRequest) -> Answer:
        """Which of these agents do not get what is said in a channel, and why: for whoever may post or read there."""
        channel, ids = check_channel(request.text("channel")), request.arguments.get("ids")
        access = self.space.access_of(request.sender)
        if not covers_any((*access.read, *access.post), channel):
            raise DeniedError(f"{access.name} may neither read nor post to {channel}")
        if not isinstance(ids, list) or len(ids) > MAX_MENTIONS or not all(isinstance(each, str) for each in ids):
            raise UsageError(f"member deaf needs `ids`, a list of at most {MAX_MENTIONS} ids of agents")
        at, inside = self.space.position, set(self.space.table.members_at(channel, self.space.position + 1))
        reasons = {each: self._why_deaf(each, channel, at) for each in ids if each not in inside}
        return {"deaf": {each: reason for each, reason in reasons.items() if reason}, "seq": at}

    def _why_deaf(self, agent_id: str, channel: str, at: int) -> str:
        """Of somebody who is not in a channel. Who of a linked space is in it there, only that space knows."""
        if self.people.find(agent_id) is not None:
            return "" if self.people.hears(agent_id, channel) else "space"
        return "member" if self.space.table.allowed_at(agent_id, channel, at) else "read"

    @handles("channel", "list")
    async def channel_list(self, request: ControlRequest) -> Answer:
        """Channels with a record or a member, as far as the caller may read them: is it in them, members, activity."""
        access = self.space.access_of(request.sender)
        known = [name for name in self.space.table.channel_names(self.space.position) if not self._is_removed(name)]
        names = _after((name for name in known if covers_any(access.read, name)), request)
        held = [each.pattern for each in self.space.open_intervals(request.sender)]
        rows = [
            {
                **self.space.channel_facts(name),
                **self._crowd(name),
                "joined": covers_any(held, name),
                "last": await self._last(name),
            }
            for name in names[:CHANNELS_PER_PAGE]
        ]
        return {"channels": (shown := _within_page(rows)), "next": _next(names, shown), "seq": self.space.position}

    def _is_removed(self, name: str) -> bool:
        """A channel whose settings were removed and that nobody is in."""
        record = self.space.table.channel_at(name, self.space.position)
        return record is not None and not record.listed and not self._crowd(name)["members"]

    @handles("channel", "info")
    async def channel_info(self, request: ControlRequest) -> Answer:
        """What holds on a channel, and to those who may read it also how many are in it and what goes on there."""
        channel = check_channel(request.text("channel"))
        access = self.space.access_of(request.sender)
        if not covers_any((*access.read, *access.post), channel):
            raise DeniedError(f"{access.name} may neither read nor post to {channel}")
        backstop = (await self.roster.facts())["backstop"]
        facts = {
            **self.space.channel_facts(channel),
            "seq": self.space.position,
            "backstop": msgspec.to_builtins(backstop),
        }
        if covers_any(access.read, channel):
            facts |= {**self._crowd(channel), **await self._activity(channel)}
        return facts

    def _crowd(self, channel: str) -> dict[str, int]:
        return {"members": len(self.space.table.members_at(channel, self.space.position + 1))}

    async def _last(self, channel: str) -> dict[str, Any] | None:
        """The newest record of a channel: one lookup for what was said here, one for what came over a link."""
        stream = self.space.subjects.log_stream
        found = [await self.space.js.last(stream, each) for each in self.space.channel_filters(channel)]
        newest = max((record for record in found if record), key=lambda record: record.seq, default=None)
        return {"seq": newest.seq, "time": record_time(newest.time_ns)} if newest else None

    async def _activity(self, channel: str) -> dict[str, Any]:
        """The newest message, how many the log still holds, and how many that is in an hour since the oldest."""
        stream, last = self.space.subjects.log_stream, await self._last(channel)
        if last is None:
            return {"last": None, "messages": 0, "per_hour": 0.0}
        oldest, count = seconds_of(last["time"]), 0
        for each in self.space.channel_filters(channel):
            first = await self.space.js.following(stream, each, 1)
            if first is not None:
                count += sum((await self.space.js.counts_of(stream, each)).values())
                oldest = min(oldest, first.time_ns / 1e9)
        hours = max(time.time() - oldest, 60.0) / 3600
        return {"last": last, "messages": count, "per_hour": round(count / hours, 2)}

    @handles("channel", "set")
    async def channel_set(self, request: ControlRequest) -> Answer:
        name = check_channel(request.text("channel"))
        async with self.writer.lock:
            access = self.space.access_of(request.sender)
            if not covers_any(access.manage, name):
                raise DeniedError(
                    f"{access.name} may not change settings of {name}: its access has no such `manage` pattern"
                )
            subject = self.space.subjects.channel(self.space.tag(name))
            if (done := self.writer.operations.outcome(request.sender, request.op, subject)) is not None:
                return {**self.space.channel_facts(name), "seq": done.seq}
            before = self.space.table.channel_at(name, self.space.position)
            record = changed_channel(before, name, request)
            seq = await self.writer.write(subject, record)
        return {**self.space.channel_facts(name), "seq": seq}

    @handles("space", "info")
    async def space_info(self, request: ControlRequest) -> Answer:
        self.space.access_of(request.sender)
        return {"space": self.space.settings(), "seq": self.space.position}

    @handles("space", "links")
    async def space_links(self, request: ControlRequest) -> Answer:
        """What links let in, by the channels the caller may read: who may not read one is not told its name. Where only
        listed channels may be used, those that are."""
        access = self.space.access_of(request.sender)
        head = await self.space.log_head()  # before the rules are read: they are not older than it
        rules = self.space.table.rules
        found = {f"{name}.{seq:016d}": (seq, record) for name, seq, record in _link_versions(rules)}
        keys = _after(found, request)
        rows = [_link_row(rules, *found[key], access.read) for key in keys[:LINKS_PER_PAGE]]
        return {
            "links": (shown := _within_page(rows)),
            "next": _next(keys, shown),
            "newest": rules.links_revised,
            "through": max(head, rules.floor),
            "floor": rules.floor,
        }

    @handles("access", "get")
    async def own_access(self, request: ControlRequest) -> Answer:
        """The caller's access with its current token, which is no secret without the seed."""
        access = self.space.access_of(request.sender)
        found = msgspec.to_builtins(access)
        if (row := Ledger(self.space.home.issued).renewed(request.sender, access.iat or 0)) is not None:
            found |= {"jwt": row.token, "iat": row.iat}  # the one in the record ended, or will
        trusted = base64.b64encode(self.space.home.read_info().trusted).decode()  # it may change while we run
        return {"access": found, "seq": self.space.position, "authority": trusted}

    def open_interval(self, owner: str, pattern: str) -> Interval | None:
        return next((i for i in self.space.open_intervals(owner) if i.pattern == pattern), None)


def read_claims(request: ControlRequest) -> list[Stamp]:
    """What a reader remembers of the log, newest first."""
    given = request.optional("marks", list) or []
    try:
        claims = msgspec.convert(given[:MOST_CLAIMS], list[Stamp])
    except msgspec.ValidationError as error:
        raise UsageError(f"`marks` are lists of sequence, mark, epoch and proof, not this: {error}") from error
    return sorted((each for each in claims if each.seq > 0), key=lambda each: -each.seq)


def _link_versions(rules: Rulebook) -> Iterator[tuple[str, int, Link]]:
    """(link, sequence, record) wherever a link lets other things in than before: by its own record, or because other
    channels are listed."""
    listings = list(rules.listings())
    for name, history in rules.links.items():
        told: dict[str, Any] = {}
        own = {seq for seq, _, _ in history.entries(rules.floor)}
        listed = {seq for seq, channel in listings if _concerns(history.at(seq), channel)}
        for seq in sorted(own | listed):
            record = history.at(seq)
            row = _link_row(rules, seq, record, (">",)) | {"seq": 0} if record is not None else {}
            if record is not None and row != told:
                told = row
                yield name, seq, record


def _concerns(record: Link | None, channel: str | None) -> bool:
    """Does it take something into this channel? None: into any."""
    if record is None or channel is None:
        return record is not None
    maps = (record.channels, *record.beyond.values())
    return any(channel_map(each).theirs(channel) is not None for each in maps)


def _link_row(rules: Rulebook, seq: int, record: Link, readable: Iterable[str]) -> dict[str, Any]:
    patterns = tuple(readable)
    listed = rules.listed_at(seq)

    def shown(channels: dict[str, str]) -> dict[str, str]:
        if listed is not None:
            names = channel_map(channels)
            channels = {theirs: ours for ours in listed if (theirs := names.theirs(ours)) is not None}
        return {theirs: ours for theirs, ours in channels.items() if any(may_meet(each, ours) for each in patterns)}

    return {
        "link": record.link,
        "seq": seq,
        "state": record.state,
        "origin": record.origin,
        "space": record.space,
        "channels": shown(record.channels),
        "beyond": {space: shown(channels) for space, channels in record.beyond.items()},
        "hops": record.hops,
        "until": record.until,
        "mail": record.passes_mail,
        "tasks": record.passes_tasks,
    }


def _after(keys: Iterable[str], request: ControlRequest) -> list[str]:
    """What is left of a listing, in order."""
    after = request.optional("after", str) or ""
    return sorted(key for key in keys if key > after)


def _within_page(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return fitting(rows, lambda row: len(msgspec.json.encode(row)) + 1, PAGE_BYTES)


def _next(keys: Sequence[str], shown: Sequence[Any]) -> str | None:
    return keys[len(shown) - 1] if len(shown) < len(keys) else None


def changed_channel(before: Channel | None, name: str, request: ControlRequest) -> Channel:
    """The channel's record with what the request names changed, and nothing else."""
    base = msgspec.to_builtins(before) if before else {"name": name}
    base["listed"] = True  # one that is set after it was removed is there again
    wanted = {key: value for key, value in request.arguments.items() if key != "channel"}
    try:
        return msgspec.convert(base | wanted | {"op": request.op, "at": now(), "by": request.sender}, Channel)
    except msgspec.ValidationError as error:
        raise UsageError(f"channel {name}: {error}") from error
