"""The roster of one steward's term: beats in, signed deltas and snapshots out; which session receives for an agent.

`RosterTable` (`roster.py`) is the state. An unchanged beat costs no delta, and no beat gets a task. Attention that
outlives a session is kept here too, whichever of an agent's programs set it, and is shown to that agent and nobody
else: channel names are in it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tidings.errors import ConflictError, TidingsError, UsageError
from tidings.nats.errors import NatsError
from tidings.steward.backstop import BackstopWatch
from tidings.steward.context import SpaceContext
from tidings.steward.history import encoded
from tidings.steward.marks import Marks
from tidings.steward.requests import Answer, ControlRequest, handles
from tidings.steward.roster import RosterTable, pages
from tidings.steward.store_watch import StoreWatch
from tidings.steward.writer import RulingWriter
from tidings.wire.roster import Attention, Count, Delta, read_beat, sign_delta
from tidings.wire.subjects import AccessSubject, MemberSubject

#: ids in one question for names
MOST_NAMES = 64
SEEN_KEY, ATTENTION_KEY = "roster.seen", "roster.attention"
SAVE_EVERY = 60.0
#: how far ahead of this clock the number of a session may be; numbers are milliseconds, and clocks differ
CLOCK_SLACK_MS = 86_400_000
#: what the attention of all agents together may take; the bucket also holds floors and beats
MAX_BYTES = 512 * 1024
log = logging.getLogger(__name__)


@dataclass(eq=False)
class RosterService:
    space: SpaceContext
    table: RosterTable
    writer: RulingWriter
    marks: Marks
    store: StoreWatch
    backstop: BackstopWatch

    def __post_init__(self) -> None:
        self.attention = StandingAttention(self.space)
        self.lease = self.writer.lease
        self.boot = self.lease.holder_id
        self.n = 0
        #: linked spaces whose agents nobody is told of now
        self.unheard: Callable[[], dict[str, str]] = dict
        self._told_running, self._told_links = False, 0
        self._told_unheard: dict[str, str] = {}
        self._published = float("-inf")
        self._swept = 0.0
        self._saved = time.monotonic()
        self._saved_seen: dict[str, float] = {}
        self._rotations: dict[int, dict[str, Any]] = {}

    async def load(self) -> None:
        """Start from the access records, and from when each agent was last seen."""
        entry = await self.space.state.get(SEEN_KEY)
        if entry is not None:
            self._saved_seen = {str(owner): float(when) for owner, when in entry.value.get("seen", {}).items()}
            self.table.remember(self._saved_seen)
        for owner, number in (await self.attention.load()).items():
            self.table.stand(owner, number)
        self.table.admit(self.space.table.owners())
        self.writer.on_effective = self._ruled

    def _ruled(self, subject: str) -> None:
        parsed = self.space.subjects.parse(subject)
        if isinstance(parsed, AccessSubject | MemberSubject):
            self.table.admit([parsed.owner])

    @handles("presence", "beat")
    async def beat(self, request: ControlRequest) -> Answer:
        self.space.access_of(request.sender)
        self.table.beat(request.sender, read_beat(request.arguments), time.monotonic(), time.time())
        return {"boot": self.boot}

    async def tick(self) -> None:
        """Tell what changed, or at least that we live, while anybody is there to hear it."""
        now = time.monotonic()
        if now - self._swept >= self.table.ttl / 25:
            self._swept = now
            self.table.sweep(now)
        await self.backstop.look()
        # also while nobody is here: who only keeps mail or looks on beats nothing, and wants to know how far the log is
        due = now - self._published >= self.space.intervals.roster_heartbeat
        due = due or self.backstop.running != self._told_running
        due = due or self.space.table.rules.links_revised != self._told_links or self.unheard() != self._told_unheard
        if (self.table.has_news or due) and self.lease.is_fresh:
            await self._publish(due=due)
        if now - self._saved >= SAVE_EVERY:
            await self.save()

    async def _publish(self, *, due: bool) -> None:
        facts = await self.facts()
        self._told_running, self._told_links = facts["backstop"].running, facts["links"]
        self._told_unheard = facts["unheard"]
        rows, gone = self.table.news()
        if not rows and not gone and not due:
            return
        parts = pages(rows) or [[]]
        for number, part in enumerate(parts):
            self.n += 1
            delta = Delta(boot=self.boot, n=self.n, rows=tuple(part), gone=() if number else tuple(gone), **facts)
            payload, headers = sign_delta(self.writer.key, self.space.info.id, delta)
            try:
                await self.space.js.connection.publish(self.space.subjects.live_roster, payload, headers=headers)
            except (NatsError, OSError) as error:
                log.warning("delta %d was not published (%s): readers see the hole and ask", self.n, error)
        self._published = time.monotonic()

    async def facts(self) -> dict[str, Any]:
        head = await self.space.log_head()
        await self.backstop.look()
        rules = self.space.table.rules
        return {
            "head": head,
            "floor": rules.floor,
            "backstop": self.backstop.fact(head),
            "links": rules.links_revised,
            "unheard": self.unheard(),
        }

    async def save(self) -> None:
        """Keep when each agent was last seen, for the steward after this one. Losing it costs nobody a message."""
        self._saved = time.monotonic()
        seen = self.table.seen()
        if seen == self._saved_seen:
            return
        entry = await self.space.state.get(SEEN_KEY)
        try:
            await self.space.state.put(SEEN_KEY, {"seen": seen}, entry.revision if entry else 0)
        except ConflictError as error:
            log.warning("last-seen times were not kept: %s", error)
        else:
            self._saved_seen = seen

    async def rotations(self) -> list[dict[str, Any]]:
        """The records that named a new steward key, as they are stored: readers follow them from their anchor."""
        for seq in self.space.table.rotations:
            if seq not in self._rotations:
                stored = await self.space.js.at(self.space.subjects.log_stream, seq)
                if stored is not None:
                    self._rotations[seq] = encoded(stored)
        return [self._rotations[seq] for seq in self.space.table.rotations if seq in self._rotations]

    # --- requests ---

    @handles("roster", "snapshot")
    async def snapshot(self, request: ControlRequest) -> Answer:
        """A page of the directory, in order of ids; `after` continues it. Deltas above the first `n` come on top."""
        self.space.access_of(request.sender)
        after = request.optional("after", str) or ""
        facts = await self.facts()
        rotations = [] if after else await self.rotations()
        standing = self.attention.of(request.sender)
        page, more = self.table.page(after)
        return {
            "boot": self.boot,
            "n": self.n,
            "rows": msgspec.to_builtins(page),
            "next": page[-1].id if more else None,
            "ttl": self.table.ttl,
            "epoch": self.marks.file.epoch,
            "damage": [] if after else self.store.told_to(request.sender),
            "told": self.store.told[request.sender],
            "rotations": rotations,
            "attention": msgspec.to_builtins(standing) if standing else None,
            **msgspec.to_builtins(facts),
        }

    @handles("roster", "names")
    async def names(self, request: ControlRequest) -> Answer:
        """Who ids are, by their access records: also agents that are revoked, which no roster lists. Agents of linked
        spaces that tell who is there are called `name@space`."""
        self.space.access_of(request.sender)
        ids = request.arguments.get("ids")
        if not isinstance(ids, list) or len(ids) > MOST_NAMES or not all(isinstance(each, str) for each in ids):
            raise UsageError(f"roster names needs `ids`, a list of at most {MOST_NAMES} ids of agents")
        known = {each: self.space.access(each) or self.table.row(each) for each in ids}
        return {"names": {each: {"name": a.name, "roles": list(a.roles)} for each, a in known.items() if a is not None}}

    @handles("session", "take")
    async def take_session(self, request: ControlRequest) -> Answer:
        """Receive as this session. `held`: the number it had, so that asking again never wins over a newer one."""
        self.space.access_of(request.sender)
        session, held, ended = request.text("session"), request.optional("held", int), request.optional("ended", int)
        now_ms = time.time_ns() // 1_000_000
        if not 8 <= len(session) <= 64 or (held is not None and not 0 < held <= now_ms + CLOCK_SLACK_MS):
            raise UsageError(
                "session take needs `session` (8 to 64 characters) and, if one was held, its number as `held`"
            )
        table = self.table
        renews = held is not None and table.is_held_by(request.sender, session)
        number, superseded = table.take(request.sender, session, held, now_ms, ended=ended, heard=time.monotonic())
        unsettled = 0 if superseded or renews else await self._in_hand(request.sender)
        return {"number": number, "superseded": superseded, "boot": self.boot, "unsettled": unsettled}

    @handles("session", "release")
    async def release_session(self, request: ControlRequest) -> Answer:
        """This session receives no longer, and nobody took its place."""
        self.space.access_of(request.sender)
        self.table.release(request.sender, request.text("session"))
        return {}

    @handles("session", "ended")
    async def ended_session(self, request: ControlRequest) -> Answer:
        """Did the session that receives for the asker end? Its number if it did, for `take`; None while it may live."""
        self.space.access_of(request.sender)
        return {"ended": self.table.ended(request.sender, time.monotonic())}

    async def _in_hand(self, owner: str) -> int:
        """Frames of this agent that a session had in hand and left: the broker brings them after its patience."""
        try:
            info = await self.space.consumer(self.space.subjects.delivery_stream, f"dlv_{owner}")
        except TidingsError:  # boundary: no answer costs a flag, and must not cost the session
            info = None
        return int(info.get("num_ack_pending", 0)) if info else 0

    def _attention(self, request: ControlRequest) -> dict[str, Any]:
        standing = self.attention.of(request.sender)
        running = self.table.running(request.sender, but=request.optional("session", str) or "")
        return {
            "standing": msgspec.to_builtins(standing.attention) if standing else None,
            "number": standing.number if standing else 0,
            "running": msgspec.to_builtins(running.attention) if running else None,
        }

    @handles("attention", "get")
    async def get_attention(self, request: ControlRequest) -> dict[str, Any]:
        """The caller's standing attention, and what its running session says now, if another than `session` runs."""
        self.space.access_of(request.sender)
        return self._attention(request)

    @handles("attention", "set")
    async def set_attention(self, request: ControlRequest) -> dict[str, Any]:
        """Change mode, levels of channels, or both."""
        self.space.access_of(request.sender)
        mode, levels = request.optional("mode", str), request.optional("channels", dict) or {}
        if mode is None and not levels:
            raise UsageError("attention set needs `mode`, or `channels` with a level each")
        standing = await self.attention.set(request.sender, mode, levels)
        self.table.stand(request.sender, standing.number)
        return self._attention(request)


class Standing(msgspec.Struct, frozen=True):
    """What an agent last said, and the number of that change: milliseconds, so that a later one is higher."""

    attention: Attention
    number: Count


class StandingAttention:
    """Every agent's standing attention, in memory and in one bounded value of the state bucket.

    Rows of the roster carry its number, so a running session learns that it changed; losing it costs nobody a message.
    """

    def __init__(self, space: SpaceContext) -> None:
        self.space = space
        self._by_owner: dict[str, Standing] = {}
        self._lock = asyncio.Lock()

    async def load(self) -> dict[str, int]:
        """Read what was kept. Answers the number of each agent."""
        entry = await self.space.state.get(ATTENTION_KEY)
        try:
            self._by_owner = msgspec.convert(entry.value if entry is not None else {}, dict[str, Standing])
        except (msgspec.ValidationError, ValueError) as error:  # a steward that serves matters more
            log.warning("kept attention cannot be read and is forgotten: %s", error)
        return {owner: each.number for owner, each in self._by_owner.items()}

    def of(self, owner: str) -> Standing | None:
        return self._by_owner.get(owner)

    async def set(self, owner: str, mode: str | None, levels: Mapping[str, str]) -> Standing:
        """Change what is named, keep it, and answer what holds now."""
        async with self._lock:
            before = self._by_owner.get(owner)
            number = max(time.time_ns() // 1_000_000, (before.number if before else 0) + 1)
            changed = Standing(changed_attention(before.attention if before else Attention(), mode, levels), number)
            rows = {key: value for key, value in self._by_owner.items() if self.space.active_access(key) is not None}
            await self._keep({**rows, owner: changed})
            self._by_owner = {**rows, owner: changed}
            return changed

    async def _keep(self, rows: dict[str, Standing]) -> None:
        value = msgspec.to_builtins(rows)
        if len(msgspec.json.encode(value)) > MAX_BYTES:
            raise ConflictError("the attention of all agents together is too long to keep: name fewer channels")
        entry = await self.space.state.get(ATTENTION_KEY)
        await self.space.state.put(ATTENTION_KEY, value, entry.revision if entry else 0)


def changed_attention(before: Attention, mode: str | None, levels: Mapping[str, str]) -> Attention:
    """Attention with what was named changed. `normal` is forgotten, unless a wider pattern would speak instead."""
    kept = {pattern: level for pattern, level in before.channels.items() if pattern not in levels}
    wide = any("*" in pattern or ">" in pattern for pattern in (*kept, *levels))
    named = {pattern: level for pattern, level in levels.items() if level != "normal" or wide}
    try:
        return msgspec.convert({"mode": mode or before.mode, "channels": {**kept, **named}}, Attention)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"this is not an attention: {str(error)[:300]}") from error
