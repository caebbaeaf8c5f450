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

from tidings.contract.agents import (
    AttentionAnswer,
    AttentionRequest,
    BeatAnswer,
    BeatRequest,
    ChangeAttentionRequest,
    EndedSessionAnswer,
    EndedSessionRequest,
    KeptAttention,
    NameRow,
    NamesAnswer,
    NamesRequest,
    ReleaseSessionRequest,
    RosterAnswer,
    RosterRequest,
    SessionAnswer,
    TakeSessionRequest,
)
from tidings.contract.channels import RawRecord
from tidings.contract.core import Caller, EmptyAnswer
from tidings.errors import ConflictError, TidingsError, UsageError
from tidings.nats.errors import NatsError
from tidings.rpc.dispatch import handler
from tidings.steward.backstop import BackstopWatch
from tidings.steward.context import SpaceContext
from tidings.steward.history import raw_record
from tidings.steward.marks import Marks
from tidings.steward.roster import RosterTable, pages
from tidings.steward.store_watch import StoreWatch
from tidings.steward.writer import RulingWriter
from tidings.wire.roster import Attention, Delta, Level, Mode, sign_delta
from tidings.wire.subjects import AccessSubject, MemberSubject

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
        self._rotations: dict[int, RawRecord] = {}

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

    @handler(BeatRequest)
    async def beat(self, caller: Caller, request: BeatRequest) -> BeatAnswer:
        self.space.access_of(caller.id)
        self.table.beat(caller.id, request, time.monotonic(), time.time())
        return BeatAnswer(self.boot)

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

    async def rotations(self) -> list[RawRecord]:
        """The records that named a new steward key, as they are stored: readers follow them from their anchor."""
        for seq in self.space.table.rotations:
            if seq not in self._rotations:
                stored = await self.space.js.at(self.space.subjects.log_stream, seq)
                if stored is not None:
                    self._rotations[seq] = raw_record(stored)
        return [self._rotations[seq] for seq in self.space.table.rotations if seq in self._rotations]

    # --- requests ---

    @handler(RosterRequest)
    async def snapshot(self, caller: Caller, request: RosterRequest) -> RosterAnswer:
        self.space.access_of(caller.id)
        is_first = not request.after
        facts = await self.facts()
        rotations = await self.rotations() if is_first else []
        page, more = self.table.page(request.after or "")
        return RosterAnswer(
            boot=self.boot,
            n=self.n,
            rows=tuple(page),
            next=page[-1].id if more else None,
            ttl=self.table.ttl,
            epoch=self.marks.file.epoch,
            damage=tuple(self.store.told_to(caller.id)) if is_first else (),
            told=self.store.told[caller.id],
            rotations=tuple(rotations),
            attention=self.attention.of(caller.id),
            **facts,
        )

    @handler(NamesRequest)
    async def names(self, caller: Caller, request: NamesRequest) -> NamesAnswer:
        """Names agents by their access records, so that revoked ones, which no roster lists, have one too."""
        self.space.access_of(caller.id)
        known = {each: self.space.access(each) or self.table.row(each) for each in request.ids}
        return NamesAnswer({each: NameRow(a.name, a.roles) for each, a in known.items() if a is not None})

    @handler(TakeSessionRequest)
    async def take_session(self, caller: Caller, request: TakeSessionRequest) -> SessionAnswer:
        self.space.access_of(caller.id)
        session, held = request.session, request.held
        now_ms = time.time_ns() // 1_000_000
        if held is not None and held > now_ms + CLOCK_SLACK_MS:
            raise UsageError("session take: `held` is not the number of a session: it lies in the future")
        table = self.table
        renews = held is not None and table.is_held_by(caller.id, session)
        heard = time.monotonic()
        number, superseded = table.take(caller.id, session, held, now_ms, ended=request.ended, heard=heard)
        unsettled = 0 if superseded or renews else await self._in_hand(caller.id)
        return SessionAnswer(number=number, superseded=superseded, boot=self.boot, unsettled=unsettled)

    @handler(ReleaseSessionRequest)
    async def release_session(self, caller: Caller, request: ReleaseSessionRequest) -> EmptyAnswer:
        self.space.access_of(caller.id)
        self.table.release(caller.id, request.session)
        return EmptyAnswer()

    @handler(EndedSessionRequest)
    async def ended_session(self, caller: Caller, _request: EndedSessionRequest) -> EndedSessionAnswer:
        self.space.access_of(caller.id)
        return EndedSessionAnswer(self.table.ended(caller.id, time.monotonic()))

    async def _in_hand(self, owner: str) -> int:
        """Frames of this agent that a session had in hand and left: the broker brings them after its patience."""
        try:
            info = await self.space.consumer(self.space.subjects.delivery_stream, f"dlv_{owner}")
        except TidingsError:  # boundary: no answer costs a flag, and must not cost the session
            info = None
        return int(info.get("num_ack_pending", 0)) if info else 0

    def _attention(self, agent: str, session: str | None) -> AttentionAnswer:
        standing = self.attention.of(agent)
        running = self.table.running(agent, but=session or "")
        return AttentionAnswer(
            standing=standing.attention if standing else None,
            number=standing.number if standing else 0,
            running=running.attention if running else None,
        )

    @handler(AttentionRequest)
    async def get_attention(self, caller: Caller, request: AttentionRequest) -> AttentionAnswer:
        self.space.access_of(caller.id)
        return self._attention(caller.id, request.session)

    @handler(ChangeAttentionRequest)
    async def set_attention(self, caller: Caller, request: ChangeAttentionRequest) -> AttentionAnswer:
        self.space.access_of(caller.id)
        if request.mode is None and not request.channels:
            raise UsageError("attention set: give `mode`, or `channels` with a level for each")
        standing = await self.attention.set(caller.id, request.mode, request.channels)
        self.table.stand(caller.id, standing.number)
        return self._attention(caller.id, request.session)


class StandingAttention:
    """Every agent's standing attention, in memory and in one bounded value of the state bucket.

    Rows of the roster carry its number, so a running session learns that it changed; losing it costs nobody a message.
    """

    def __init__(self, space: SpaceContext) -> None:
        self.space = space
        self._by_owner: dict[str, KeptAttention] = {}
        self._lock = asyncio.Lock()

    async def load(self) -> dict[str, int]:
        """Read what was kept. Answers the number of each agent."""
        entry = await self.space.state.get(ATTENTION_KEY)
        try:
            self._by_owner = msgspec.convert(entry.value if entry is not None else {}, dict[str, KeptAttention])
        except (msgspec.ValidationError, ValueError) as error:  # a steward that serves matters more
            log.warning("kept attention cannot be read and is forgotten: %s", error)
        return {owner: each.number for owner, each in self._by_owner.items()}

    def of(self, owner: str) -> KeptAttention | None:
        return self._by_owner.get(owner)

    async def set(self, owner: str, mode: Mode | None, levels: Mapping[str, Level]) -> KeptAttention:
        """Change what is named, keep it, and answer what holds now."""
        async with self._lock:
            before = self._by_owner.get(owner)
            number = max(time.time_ns() // 1_000_000, (before.number if before else 0) + 1)
            changed = KeptAttention(
                changed_attention(before.attention if before else Attention(), mode, levels), number
            )
            rows = {key: value for key, value in self._by_owner.items() if self.space.active_access(key) is not None}
            await self._keep({**rows, owner: changed})
            self._by_owner = {**rows, owner: changed}
            return changed

    async def _keep(self, rows: dict[str, KeptAttention]) -> None:
        value = msgspec.to_builtins(rows)
        if len(msgspec.json.encode(value)) > MAX_BYTES:
            raise ConflictError("the attention of all agents together is too long to keep: name fewer channels")
        entry = await self.space.state.get(ATTENTION_KEY)
        await self.space.state.put(ATTENTION_KEY, value, entry.revision if entry else 0)


def changed_attention(before: Attention, mode: Mode | None, levels: Mapping[str, Level]) -> Attention:
    """Attention with what was named changed. `normal` is forgotten, unless a wider pattern would speak instead."""
    kept = {pattern: level for pattern, level in before.channels.items() if pattern not in levels}
    wide = any("*" in pattern or ">" in pattern for pattern in (*kept, *levels))
    named = {pattern: level for pattern, level in levels.items() if level != "normal" or wide}
    try:
        return Attention(mode or before.mode, {**kept, **named})
    except ValueError as error:
        raise UsageError(f"attention set: {error}") from error
