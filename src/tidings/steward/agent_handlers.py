"""What the steward does for agents: join, leave, list, channel settings, their own access.

Each service checks the access record in force and, if something is to be ruled, writes it under the writer's lock,
so that the check and the record are one step. Repeating a request with the same op gives the same answer. Listings
come in pages: `next`, given back as `after`, continues one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.broker.config import RESERVE
from tidings.errors import AuthRevoked, ConflictError, DeniedError, LogFull, UsageError
from tidings.space.membership import Interval
from tidings.steward.operations import Completed
from tidings.steward.requests import Request
from tidings.wire.marks import Stamp
from tidings.wire.message import MAX_MENTIONS
from tidings.wire.names import check_channel, check_pattern
from tidings.wire.patterns import covers_any, covers_pattern, is_concrete
from tidings.wire.rulings import Access, Channel, Member

if TYPE_CHECKING:
    from tidings.steward.service import Steward

#: two subscriptions each, and a connection has at most 1,000
MAX_MEMBERSHIPS = 480
JOIN_BURST = 500
JOINS_PER_SECOND = 5.0
#: of one page of a listing; rows of channels are read from the broker, so they are fewer
PAGE_BYTES = 256 * 1024
MEMBERS_PER_PAGE = 2_000
CHANNELS_PER_PAGE = 50
#: of what one reader remembers of the log
MOST_CLAIMS = 64
OWN = (("class", "cls"), ("replay", "replay"), ("replay_window", "replay_window"))
#: what a join and a leave can have come to
JOINED, LEFT = ("opened", "resumed"), ("left", "absent")
log = logging.getLogger(__name__)
Answer = Mapping[str, Any]
Handler = Callable[["Steward", Request], Awaitable[Answer]]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def access_of(steward: Steward, owner: str) -> Access:
    """The access record in force, or the reason there is none."""
    access = steward.table.access_at(owner, steward.position)
    if access is None:
        raise DeniedError(
            f"{owner} is not an agent of space {steward.subjects.space}: `tidings agent add` provisions one"
        )
    if access.revoked:
        raise AuthRevoked(f"{access.name} ({owner}) was revoked")
    return access


async def join(steward: Steward, request: Request) -> Answer:
    pattern = check_pattern(request.text("pattern"))
    async with steward.writer.lock:
        access = access_of(steward, request.sender)
        if not covers_any(access.read, pattern):
            raise DeniedError(
                f"{access.name} may not read {pattern}; it may read {', '.join(access.read) or 'nothing'}"
            )
        subject = steward.subjects.member(request.sender, steward.tag(pattern))
        held = open_interval(steward, request.sender, pattern)
        operations = steward.writer.operations
        if (done := operations.outcome(request.sender, request.op, subject, *JOINED)) is not None:
            seq, state = done.seq, done.state  # its answer was lost, or it comes late: it is told once more
        elif held is None:
            _check_room_to_join(steward, request.sender)
            record = Member(op=request.op, at=now(), state="in", pattern=pattern)
            seq, state = await steward.writer.write(subject, record), "opened"
        else:
            seq, state = held.joined, "resumed"
            operations.note(request.sender, request.op, Completed(subject, seq, state))
    facts = await steward.roster.facts()
    return {
        "state": state,
        "seq": seq,
        # the membership of this operation is over since, and the operation does not open another one
        "left": _left(steward, request.sender, pattern, seq),
        # whatever is older than this answer was stored at or below it
        "head": facts["head"],
        "backstop": msgspec.to_builtins(facts["backstop"]),
        **channel_facts(steward, pattern),
        **await agreement(steward, request, int(facts["head"])),
    }


async def agreement(steward: Steward, request: Request, head: int) -> dict[str, Any]:
    """Which log this is and, if the caller knew another one, up to where both are the same.

    What it remembers decides for itself alone; for everybody a new epoch begins only if a steward vouched for it.
    """
    marks, floor, known = steward.marks, steward.table.floor, request.optional("epoch", str)
    claims = read_claims(request)
    head = await steward.log_head() if claims else head
    contradicted, confirmed = await marks.compare(claims, head, floor)
    if contradicted:
        await steward.lease.prove()
        await marks.believe(claims, head, floor)
        if known == marks.file.epoch:
            steward.doubts[request.sender] = contradicted
            name = name_of(steward, request.sender)
            log.warning("%s remembers another record at %d than the log has", name, contradicted)
    by_epoch = marks.agreed_since(known) if known else None
    differs = contradicted or by_epoch is not None
    stamp = await marks.stamp(head)
    return {
        "epoch": marks.file.epoch,
        "agreed": max(confirmed, by_epoch or 0) if differs else None,
        "stamp": msgspec.to_builtins(stamp) if stamp else None,
    }


def read_claims(request: Request) -> list[Stamp]:
    """What a reader remembers of the log, newest first."""
    given = request.optional("marks", list) or []
    try:
        claims = msgspec.convert(given[:MOST_CLAIMS], list[Stamp])
    except msgspec.ValidationError as error:
        raise UsageError(f"`marks` are lists of sequence, mark, epoch and proof, not this: {error}") from error
    return sorted((each for each in claims if each.seq > 0), key=lambda each: -each.seq)


def _check_room_to_join(steward: Steward, owner: str) -> None:
    """Every join is a record that stays. Leaving is never refused; joining is, before it could crowd out leaving."""
    if len(open_intervals(steward, owner)) >= MAX_MEMBERSHIPS:
        raise ConflictError(f"an agent is in at most {MAX_MEMBERSHIPS} channels and patterns: use a wider pattern")
    gate = steward.gate
    if gate is not None and not gate.open and gate.used > gate.budget + RESERVE // 2:
        raise LogFull("the log is full and half its reserve is used: joins wait until room is made")
    if not steward.join_rate.allows(owner):
        raise ConflictError("too many joins in a short time: wait a moment and ask again")


class JoinRate:
    """How often one agent may join: bursts are fine, flapping is not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def allows(self, owner: str) -> bool:
        moment = self._clock()
        left, since = self._left.get(owner, (float(JOIN_BURST), moment))
        left = min(JOIN_BURST, left + (moment - since) * JOINS_PER_SECOND)
        self._left[owner] = (left - 1 if left >= 1 else left, moment)
        return left >= 1


async def leave(steward: Steward, request: Request) -> Answer:
    """Close the membership that `joined` names, or the open one. Needs no read access: it must work after a narrowing.

    A leave that comes late or twice ends what it named and nothing that was opened since. `open` is the sequence of a
    membership of the same pattern that stands afterwards.
    """
    pattern, named = check_pattern(request.text("pattern")), request.optional("joined", int)
    async with steward.writer.lock:
        subject = steward.subjects.member(request.sender, steward.tag(pattern))
        held = open_interval(steward, request.sender, pattern)
        operations = steward.writer.operations
        if (done := operations.outcome(request.sender, request.op, subject, *LEFT)) is not None:
            seq, state = done.seq, done.state
        elif held is not None and named in (None, held.joined):
            record = Member(op=request.op, at=now(), state="out", pattern=pattern, ends=held.joined)
            seq, state = await steward.writer.write(subject, record), "left"
        else:
            ended = _left(steward, request.sender, pattern, named) if named is not None else None
            seq = ended or steward.writer.last_op.get(subject, ("", 0))[1]
            state = "left" if ended else "absent"
            operations.note(request.sender, request.op, Completed(subject, seq, state))
    held = open_interval(steward, request.sender, pattern)
    remaining = [i.pattern for i in open_intervals(steward, request.sender) if covers_pattern(i.pattern, pattern)]
    return {"state": state, "seq": seq, "open": held.joined if held else None, "still_covered_by": remaining}


def _left(steward: Steward, owner: str, pattern: str, joined: int) -> int | None:
    """Where the membership that began at `joined` ended."""
    stays = (i for i in steward.table.intervals(owner) if i.pattern == pattern and i.joined == joined)
    return next((stay.left for stay in stays), None)


async def memberships(steward: Steward, request: Request) -> Answer:
    held = open_intervals(steward, request.sender)
    return {"memberships": [{"pattern": i.pattern, "joined": i.joined} for i in held], "seq": steward.position}


async def members(steward: Steward, request: Request) -> Answer:
    """Who is in a channel, for those who may read it."""
    channel = check_channel(request.text("channel"))
    access = access_of(steward, request.sender)
    if not covers_any(access.read, channel):
        raise DeniedError(f"{access.name} may not read {channel}, so it may not see who is in it")
    owners = _after(steward.table.members_at(channel, steward.position + 1), request)
    rows = [{"id": owner, "name": name_of(steward, owner)} for owner in owners[:MEMBERS_PER_PAGE]]
    return {"members": (shown := _within_page(rows)), "next": _next(owners, shown), "seq": steward.position}


async def deaf(steward: Steward, request: Request) -> Answer:
    """Which of these agents do not get what is said in a channel, and why: for whoever may post there or read it."""
    channel, ids = check_channel(request.text("channel")), request.arguments.get("ids")
    access = access_of(steward, request.sender)
    if not covers_any((*access.read, *access.post), channel):
        raise DeniedError(f"{access.name} may neither read nor post to {channel}")
    if not isinstance(ids, list) or len(ids) > MAX_MENTIONS or not all(isinstance(each, str) for each in ids):
        raise UsageError(f"member deaf needs `ids`, a list of at most {MAX_MENTIONS} ids of agents")
    at, inside = steward.position, set(steward.table.members_at(channel, steward.position + 1))
    reasons = {each: "member" if steward.table.allowed_at(each, channel, at) else "read" for each in ids}
    return {"deaf": {each: reason for each, reason in reasons.items() if each not in inside}, "seq": at}


async def channel_list(steward: Steward, request: Request) -> Answer:
    """Channels that have a record or a member, as far as the caller may read them: is it in them, members, activity."""
    access = access_of(steward, request.sender)
    known = [name for name in steward.table.channel_names(steward.position) if not _is_removed(steward, name)]
    names = _after((name for name in known if covers_any(access.read, name)), request)
    held = [each.pattern for each in open_intervals(steward, request.sender)]
    rows = [
        {
            **channel_facts(steward, name),
            **_crowd(steward, name),
            "joined": covers_any(held, name),
            "last": await _last(steward, name),
        }
        for name in names[:CHANNELS_PER_PAGE]
    ]
    return {"channels": (shown := _within_page(rows)), "next": _next(names, shown), "seq": steward.position}


def _is_removed(steward: Steward, name: str) -> bool:
    """A channel whose settings were removed and that nobody is in."""
    record = steward.table.channel_at(name, steward.position)
    return record is not None and not record.listed and not _crowd(steward, name)["members"]


def _after(keys: Iterable[str], request: Request) -> list[str]:
    """What is left of a listing, in order."""
    after = request.optional("after", str) or ""
    return sorted(key for key in keys if key > after)


def _within_page(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As many rows as fit one answer, at least one."""
    size = 0
    for count, row in enumerate(rows):
        size += len(msgspec.json.encode(row)) + 1
        if size > PAGE_BYTES and count:
            return rows[:count]
    return rows


def _next(keys: Sequence[str], shown: Sequence[Any]) -> str | None:
    return keys[len(shown) - 1] if len(shown) < len(keys) else None


def name_of(steward: Steward, owner: str | None) -> str | None:
    access = steward.table.access_at(owner, steward.position) if owner else None
    return access.name if access else None


async def channel_info(steward: Steward, request: Request) -> Answer:
    """What holds on a channel, and to those who may read it also how many are in it and what goes on there."""
    channel = check_channel(request.text("channel"))
    access = access_of(steward, request.sender)
    if not covers_any((*access.read, *access.post), channel):
        raise DeniedError(f"{access.name} may neither read nor post to {channel}")
    backstop = (await steward.roster.facts())["backstop"]
    facts = {**channel_facts(steward, channel), "seq": steward.position, "backstop": msgspec.to_builtins(backstop)}
    if covers_any(access.read, channel):
        facts |= {**_crowd(steward, channel), **await _activity(steward, channel)}
    return facts


def _crowd(steward: Steward, channel: str) -> dict[str, int]:
    return {"members": len(steward.table.members_at(channel, steward.position + 1))}


def _filters(steward: Steward, channel: str) -> tuple[str, str]:
    root = steward.subjects.root
    return f"{root}.chat.*.{channel}", f"{root}.via.*.*.{channel}"


async def _last(steward: Steward, channel: str) -> dict[str, Any] | None:
    """The newest record of a channel: one lookup for what was said here, one for what came over a link."""
    stream = steward.subjects.log_stream
    found = [await steward.js.last(stream, each) for each in _filters(steward, channel)]
    newest = max((record for record in found if record), key=lambda record: record.seq, default=None)
    return {"seq": newest.seq, "time": newest.time_ns / 1e9} if newest else None


async def _activity(steward: Steward, channel: str) -> dict[str, Any]:
    """The newest message, how many the log still holds, and how many that is in an hour since the oldest of them."""
    stream, last = steward.subjects.log_stream, await _last(steward, channel)
    if last is None:
        return {"last": None, "messages": 0, "per_hour": 0.0}
    oldest, count = last["time"], 0
    for each in _filters(steward, channel):
        first = await steward.js.following(stream, each, 1)
        if first is not None:
            count += sum((await steward.js.counts_of(stream, each)).values())
            oldest = min(oldest, first.time_ns / 1e9)
    hours = max(time.time() - oldest, 60.0) / 3600
    return {"last": last, "messages": count, "per_hour": round(count / hours, 2)}


async def channel_set(steward: Steward, request: Request) -> Answer:
    name = check_channel(request.text("channel"))
    async with steward.writer.lock:
        access = access_of(steward, request.sender)
        if not covers_any(access.manage, name):
            raise DeniedError(
                f"{access.name} may not change settings of {name}: its access has no such `manage` pattern"
            )
        subject = steward.subjects.channel(steward.tag(name))
        if (done := steward.writer.operations.outcome(request.sender, request.op, subject)) is not None:
            return {**channel_facts(steward, name), "seq": done.seq}
        before = steward.table.channel_at(name, steward.position)
        record = changed_channel(before, name, request)
        seq = await steward.writer.write(subject, record)
    return {**channel_facts(steward, name), "seq": seq}


def changed_channel(before: Channel | None, name: str, request: Request) -> Channel:
    """The channel's record with what the request names changed, and nothing else."""
    base = msgspec.to_builtins(before) if before else {"name": name}
    base["listed"] = True  # one that is set after it was removed is there again
    wanted = {key: value for key, value in request.arguments.items() if key != "channel"}
    try:
        return msgspec.convert(base | wanted | {"op": request.op, "at": now(), "by": request.sender}, Channel)
    except msgspec.ValidationError as error:
        raise UsageError(f"channel {name}: {error}") from error


def channel_facts(steward: Steward, pattern: str) -> dict[str, Any]:
    """What holds on a channel now. A pattern has no record of its own: defaults speak for it."""
    at = steward.position
    defaults = steward.table.space_at(at).defaults
    record = steward.table.channel_at(pattern, at) if is_concrete(pattern) else None
    facts: dict[str, Any] = {
        "channel": pattern,
        "class": steward.table.class_at(pattern, at) if is_concrete(pattern) else defaults.cls or "durable",
        "replay": _first(record.replay if record else None, defaults.replay, True),
        #: which of these the channel itself says; the rest is the space's default
        "own": [name for name, key in OWN if record and getattr(record, key) is not None],
        "replay_window": _first(record.replay_window if record else None, defaults.replay_window),
    }
    if record:
        facts |= {
            "description": record.description,
            "instructions": record.instructions,
            "by": record.by,
            "by_name": name_of(steward, record.by),
            "at": record.at,
        }
    return facts


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


async def space_info(steward: Steward, request: Request) -> Answer:
    access_of(steward, request.sender)
    return {"space": steward.space_settings(), "seq": steward.position}


async def own_access(steward: Steward, request: Request) -> Answer:
    """The caller's access with its current token, which is no secret without the seed."""
    access = access_of(steward, request.sender)
    return {"access": msgspec.to_builtins(access), "seq": steward.position}


def open_intervals(steward: Steward, owner: str) -> list[Interval]:
    return [interval for interval in steward.table.intervals(owner) if interval.left is None]


def open_interval(steward: Steward, owner: str, pattern: str) -> Interval | None:
    return next((i for i in open_intervals(steward, owner) if i.pattern == pattern), None)


AGENT_HANDLERS: dict[tuple[str, str], Handler] = {
    ("member", "join"): join,
    ("member", "leave"): leave,
    ("member", "list"): memberships,
    ("member", "members"): members,
    ("member", "deaf"): deaf,
    ("channel", "list"): channel_list,
    ("channel", "info"): channel_info,
    ("channel", "set"): channel_set,
    ("space", "info"): space_info,
    ("access", "get"): own_access,
}
