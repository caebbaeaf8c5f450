"""The steward's roster: who is here, kept in memory from beats, told to everybody as signed deltas.

`RosterTable` is the state, pure and without a clock; `RosterService` publishes what changed and answers snapshots. The
directory is every agent that is not revoked, offline ones included. Names and roles are the access record's; status,
activity and model are the agent's own word. Several sessions of one agent may beat: the one that receives speaks for
it while it lives, else the one that beat first. An unchanged beat costs no delta, and no message gets a task.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.errors import ConflictError, TidingsError, UsageError
from tidings.nats.errors import NatsError
from tidings.space.home import SpaceHome
from tidings.steward.agent_handlers import Answer, Handler, access_of
from tidings.steward.attention import StandingAttention, get_attention, set_attention
from tidings.steward.backstop import BackstopWatch
from tidings.steward.history import encoded
from tidings.steward.requests import Request
from tidings.wire.roster import Agent, Beat, Delta, read_beat, sign_delta
from tidings.wire.rulings import Access
from tidings.wire.subjects import AccessSubject, MemberSubject

if TYPE_CHECKING:
    from tidings.steward.service import Steward

#: bytes of rows in one delta or page
PAGE_BYTES = 256 * 1024
SESSIONS_KEPT = 8
#: ids in one question for names
MOST_NAMES = 64
SEEN_KEY = "roster.seen"
SEEN_KEPT = 2_000
SAVE_EVERY = 60.0
#: how far ahead of this clock the number of a session may be; numbers are milliseconds, and clocks differ
CLOCK_SLACK_MS = 86_400_000
#: a receiving session that was silent for so many times to live is taken for ended: it may only be cut off, and whoever
#: takes its place then ends it for good
ENDED_AFTER_TTLS = 4
log = logging.getLogger(__name__)

AccessOf = Callable[[str], Access | None]
SequenceOf = Callable[[str], int]


@dataclass(slots=True)
class _Session:
    beat: Beat
    heard: float


@dataclass(slots=True)
class _Presence:
    """What is known of one agent beyond its access record."""

    sessions: dict[str, _Session] = field(default_factory=dict)
    last_seen: float | None = None
    #: the session that receives, and its number
    holder: str | None = None
    number: int | None = None
    #: when that session last said that it lives; None of one that does not say it, of which silence proves nothing
    heard: float | None = None

    def speaks(self) -> Beat | None:
        if self.holder in self.sessions:
            return self.sessions[self.holder].beat
        return next((session.beat for session in self.sessions.values()), None)


class RosterTable:
    """Presence of every agent. `heard` times are monotonic, `seen` times are for people."""

    def __init__(
        self,
        access: AccessOf,
        ttl: float,
        access_seq: SequenceOf = lambda _owner: 0,
        moved: SequenceOf = lambda _owner: 0,
        wanted: SequenceOf = lambda _owner: 0,
        told: SequenceOf = lambda _owner: 0,
    ) -> None:
        self.ttl = ttl
        self._access = access
        self._access_seq = access_seq
        self._moved = moved
        self._wanted = wanted
        self._to_tell = told
        self._presence: dict[str, _Presence] = {}
        self._told: dict[str, Agent] = {}
        self._standing: dict[str, int] = {}
        self._changed: set[str] = set()
        self._swept: float | None = None
        #: when this table began to listen
        self._began: float | None = None

    # --- what happens ---

    def admit(self, ids: Iterable[str]) -> None:
        """These agents' access or memberships are new or changed."""
        self._changed.update(ids)

    def remember(self, seen: dict[str, float]) -> None:
        for owner, when in seen.items():
            self._of(owner).last_seen = when

    def stand(self, owner: str, number: int) -> None:
        """The attention kept for `owner` is now the one of this number."""
        self._standing[owner] = number
        self._changed.add(owner)

    def beat(self, owner: str, beat: Beat, heard: float, seen: float) -> None:
        presence = self._of(owner)
        before = presence.speaks()
        if beat.status == "offline":
            presence.sessions.pop(beat.session, None)
        elif (session := presence.sessions.get(beat.session)) is not None:
            session.beat, session.heard = beat, heard
        else:
            if len(presence.sessions) >= SESSIONS_KEPT:
                del presence.sessions[min(presence.sessions, key=lambda key: presence.sessions[key].heard)]
            presence.sessions[beat.session] = _Session(beat, heard)
        presence.last_seen = seen
        if beat.session == presence.holder:  # one that is seen no longer may go on to receive
            presence.heard = None if beat.status == "offline" else heard
        if presence.speaks() != before:
            self._changed.add(owner)

    def sweep(self, now: float) -> None:
        """Forget sessions that were silent for too long. If it was us who slept, nobody was silent."""
        slept, self._swept = now - (self._swept if self._swept is not None else now), now
        if self._began is None or slept > self.ttl / 2:
            self._began = now
        for owner, presence in self._presence.items():
            if slept > self.ttl / 2 and presence.heard is not None:
                presence.heard += slept
            for key, session in list(presence.sessions.items()):
                if slept > self.ttl / 2:
                    session.heard += slept
                elif now - session.heard > self.ttl:
                    del presence.sessions[key]
                    self._changed.add(owner)

    def take(
        self, owner: str, session: str, held: int | None, now_ms: int, *, ended: int | None = None, heard: float = 0.0
    ) -> tuple[int, bool]:
        """Give the receiving session to `session`, unless it `held` one that is older than another's.

        `ended`: the number of the session that `ended` answered; nobody else's place is taken then. Who has the number
        of a session that another holds goes on for it, under a higher one, so that the two are told apart. The second
        answer is whether it is superseded. Numbers are milliseconds, so that a steward that remembers nothing still
        gives higher ones than the steward before it.
        """
        presence = self._of(owner)
        current = presence.number or 0
        if presence.holder == session and current:
            presence.heard = heard
            return current, False
        if (held is not None and held < current) or (ended is not None and ended != self.ended(owner, heard)):
            return current, True
        if held is None:
            presence.number = max(current + 1, now_ms)
        else:
            presence.number = held + 1 if held == current and presence.holder is not None else held
        presence.holder = session
        presence.heard = heard if session in presence.sessions else None
        self._changed.add(owner)
        return presence.number, False

    def is_held_by(self, owner: str, session: str) -> bool:
        return self._of(owner).holder == session

    def release(self, owner: str, session: str) -> None:
        """This session ended in order. The number stays: it is that of the newest session there was."""
        presence = self._of(owner)
        if presence.holder == session:
            presence.holder = presence.heard = None

    def ended(self, owner: str, now: float) -> int | None:
        """The number of the receiving session if it ended, 0 if there was none; None while it may live.

        It ended if it said so, or was silent for long. Under a new steward whoever lives takes its session again.
        """
        presence = self._presence.get(owner) or _Presence()
        patience = self.ttl * ENDED_AFTER_TTLS
        if presence.holder is not None:
            is_over = presence.heard is not None and now - presence.heard > patience
        elif presence.number is not None:
            is_over = True
        else:
            is_over = self._began is not None and now - self._began > patience
        return (presence.number or 0) if is_over else None

    # --- what is told ---

    def row(self, owner: str) -> Agent | None:
        """The agent as others see it; None if it is not one, or no longer."""
        access = self._access(owner)
        if access is None or access.revoked:
            return None
        presence = self._presence.get(owner) or _Presence()
        said = presence.speaks()
        row = Agent(
            id=owner,
            name=access.name,
            roles=access.roles,
            last_seen=presence.last_seen,
            session=presence.number,
            access=self._access_seq(owner),
            moved=self._moved(owner),
            wanted=self._wanted(owner),
            told=self._to_tell(owner),
            attention_number=self._standing.get(owner),
        )
        if said is None:
            return row
        return replace(row, status=said.status, activity=said.activity, model=said.model, attention=said.attention.mode)

    def running(self, owner: str, *, but: str) -> Beat | None:
        """What the session that speaks for `owner` said, as if the session `but` were not there."""
        presence = self._presence.get(owner) or _Presence()
        others = {key: session for key, session in presence.sessions.items() if key != but}
        return _Presence(others, holder=presence.holder).speaks()

    @property
    def has_news(self) -> bool:
        return bool(self._changed)

    def news(self) -> tuple[list[Agent], list[str]]:
        """Rows that differ from what was told, and ids that are gone. What is answered counts as told."""
        rows, gone = [], []
        for owner in sorted(self._changed):
            row, told = self.row(owner), self._told.get(owner)
            if row is None:
                self._presence.pop(owner, None)
                if self._told.pop(owner, None) is not None:
                    gone.append(owner)
            elif told is None or replace(told, last_seen=row.last_seen) != row:
                self._told[owner] = row
                rows.append(row)
        self._changed.clear()
        return rows, gone

    def after(self, owner: str) -> list[Agent]:
        """Every row whose id sorts after `owner`, in order."""
        known = self._told.keys() | self._changed
        return [row for each in sorted(known) if each > owner and (row := self.row(each)) is not None]

    def seen(self) -> dict[str, float]:
        """When each agent was last seen, the latest ones."""
        found = [(p.last_seen, owner) for owner, p in self._presence.items() if p.last_seen is not None]
        return {owner: when for when, owner in sorted(found, reverse=True)[:SEEN_KEPT]}

    def _of(self, owner: str) -> _Presence:
        return self._presence.setdefault(owner, _Presence())


def pages(rows: list[Agent], limit: int = PAGE_BYTES) -> list[list[Agent]]:
    """The rows in pages of at most `limit` bytes, at least one row each."""
    found: list[list[Agent]] = []
    used = 0
    for row in rows:
        size = len(msgspec.json.encode(row)) + 1
        if not found or used + size > limit:
            found.append([])
            used = 0
        found[-1].append(row)
        used += size
    return found


def _is_starting(home: SpaceHome) -> bool:
    """Does the supervisor say that it starts durable delivery?"""
    return (home.read_state().get("pipeline") or {}).get("phase") == "starting"


class RosterService:
    """The roster of one steward's term: beats in, deltas and snapshots out."""

    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        self.boot = steward.lease.holder_id
        self.n = 0
        self.table = RosterTable(
            lambda owner: steward.table.access_at(owner, steward.position),
            steward.intervals.presence,
            self._access_seq,
            lambda owner: steward.table.moved.get(owner, 0),
            lambda owner: steward.dead_mail.wanted(owner),
            lambda owner: steward.store.told[owner],
        )
        self.attention = StandingAttention(steward)
        self.backstop = BackstopWatch(steward.state, is_starting=lambda: _is_starting(steward.home))
        self._told_running = False
        self._published = float("-inf")
        self._swept = 0.0
        self._saved = time.monotonic()
        self._saved_seen: dict[str, float] = {}
        self._rotations: dict[int, dict[str, Any]] = {}

    def _access_seq(self, owner: str) -> int:
        return self.steward.writer.last_op.get(self.steward.subjects.access(owner), ("", 0))[1]

    async def load(self) -> None:
        """Start from the access records, and from when each agent was last seen."""
        entry = await self.steward.state.get(SEEN_KEY)
        if entry is not None:
            self._saved_seen = {str(owner): float(when) for owner, when in entry.value.get("seen", {}).items()}
            self.table.remember(self._saved_seen)
        for owner, number in (await self.attention.load()).items():
            self.table.stand(owner, number)
        self.table.admit(self.steward.table.owners())
        self.steward.writer.on_effective = self._ruled

    def _ruled(self, subject: str) -> None:
        parsed = self.steward.subjects.parse(subject)
        if isinstance(parsed, AccessSubject | MemberSubject):
            self.table.admit([parsed.owner])

    def beat(self, request: Request) -> Answer:
        access_of(self.steward, request.sender)
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
        due = now - self._published >= self.steward.intervals.roster_heartbeat
        due = due or self.backstop.running != self._told_running
        if (self.table.has_news or due) and self.steward.lease.is_fresh:
            await self._publish(due=due)
        if now - self._saved >= SAVE_EVERY:
            await self.save()

    async def _publish(self, *, due: bool) -> None:
        facts = await self.facts()
        self._told_running = facts["backstop"].running
        rows, gone = self.table.news()
        if not rows and not gone and not due:
            return
        parts = pages(rows) or [[]]
        for number, part in enumerate(parts):
            self.n += 1
            delta = Delta(boot=self.boot, n=self.n, rows=tuple(part), gone=() if number else tuple(gone), **facts)
            payload, headers = sign_delta(self.steward.writer.key, self.steward.info.id, delta)
            try:
                await self.steward.js.connection.publish(self.steward.subjects.live_roster, payload, headers=headers)
            except (NatsError, OSError) as error:
                log.warning("delta %d was not published (%s): readers see the hole and ask", self.n, error)
        self._published = time.monotonic()

    async def facts(self) -> dict[str, Any]:
        head = await self.steward.log_head()
        await self.backstop.look()
        return {"head": head, "floor": self.steward.table.floor, "backstop": self.backstop.fact(head)}

    async def save(self) -> None:
        """Keep when each agent was last seen, for the steward after this one. Losing it costs nobody a message."""
        self._saved = time.monotonic()
        seen = self.table.seen()
        if seen == self._saved_seen:
            return
        entry = await self.steward.state.get(SEEN_KEY)
        try:
            await self.steward.state.put(SEEN_KEY, {"seen": seen}, entry.revision if entry else 0)
        except ConflictError as error:
            log.warning("last-seen times were not kept: %s", error)
        else:
            self._saved_seen = seen

    async def rotations(self) -> list[dict[str, Any]]:
        """The records that named a new steward key, as they are stored: readers follow them from their anchor."""
        for seq in self.steward.table.rotations:
            if seq not in self._rotations:
                stored = await self.steward.js.at(self.steward.subjects.log_stream, seq)
                if stored is not None:
                    self._rotations[seq] = encoded(stored)
        return [self._rotations[seq] for seq in self.steward.table.rotations if seq in self._rotations]


async def snapshot(steward: Steward, request: Request) -> Answer:
    """A page of the directory, in order of ids; `after` continues it. Deltas above the first page's `n` come on top."""
    access_of(steward, request.sender)
    after = request.optional("after", str) or ""
    roster = steward.roster
    facts = await roster.facts()
    rotations = [] if after else await roster.rotations()
    standing = roster.attention.of(request.sender)
    found = pages(roster.table.after(after))
    page = found[0] if found else []
    return {
        "boot": roster.boot,
        "n": roster.n,
        "rows": msgspec.to_builtins(page),
        "next": page[-1].id if len(found) > 1 else None,
        "ttl": roster.table.ttl,
        "epoch": steward.marks.file.epoch,
        "damage": [] if after else steward.store.told_to(request.sender),
        "told": steward.store.told[request.sender],
        "rotations": rotations,
        "attention": msgspec.to_builtins(standing) if standing else None,
        **msgspec.to_builtins(facts),
    }


async def names(steward: Steward, request: Request) -> Answer:
    """Who ids are, by their access records: also agents that are revoked, which no roster lists."""
    access_of(steward, request.sender)
    ids = request.arguments.get("ids")
    if not isinstance(ids, list) or len(ids) > MOST_NAMES or not all(isinstance(each, str) for each in ids):
        raise UsageError(f"roster names needs `ids`, a list of at most {MOST_NAMES} ids of agents")
    known = {each: steward.table.access_at(each, steward.position) for each in ids}
    return {"names": {each: {"name": a.name, "roles": list(a.roles)} for each, a in known.items() if a is not None}}


async def take_session(steward: Steward, request: Request) -> Answer:
    """Receive as this session. `held`: the number it had, so that asking again never wins over a newer one."""
    access_of(steward, request.sender)
    session, held, ended = request.text("session"), request.optional("held", int), request.optional("ended", int)
    now_ms = time.time_ns() // 1_000_000
    if not 8 <= len(session) <= 64 or (held is not None and not 0 < held <= now_ms + CLOCK_SLACK_MS):
        raise UsageError("session take needs `session` (8 to 64 characters) and, if one was held, its number as `held`")
    table = steward.roster.table
    renews = held is not None and table.is_held_by(request.sender, session)
    number, superseded = table.take(request.sender, session, held, now_ms, ended=ended, heard=time.monotonic())
    unsettled = 0 if superseded or renews else await _unsettled(steward, request.sender)
    return {"number": number, "superseded": superseded, "boot": steward.roster.boot, "unsettled": unsettled}


async def release_session(steward: Steward, request: Request) -> Answer:
    """This session receives no longer, and nobody took its place."""
    access_of(steward, request.sender)
    steward.roster.table.release(request.sender, request.text("session"))
    return {}


async def ended_session(steward: Steward, request: Request) -> Answer:
    """Did the session that receives for the asker end? Its number if it did, for `take`; None while it may live."""
    access_of(steward, request.sender)
    return {"ended": steward.roster.table.ended(request.sender, time.monotonic())}


async def _unsettled(steward: Steward, owner: str) -> int:
    """Frames of this agent that a session had in hand and did not settle: the broker brings them after its patience."""
    try:
        info = await steward.js.api(f"CONSUMER.INFO.{steward.subjects.delivery_stream}.dlv_{owner}")
    except TidingsError:  # boundary: no mailbox, or no answer; that costs a flag, and must not cost the session
        return 0
    return int(info.get("num_ack_pending", 0))


ROSTER_HANDLERS: dict[tuple[str, str], Handler] = {
    ("roster", "snapshot"): snapshot,
    ("roster", "names"): names,
    ("session", "take"): take_session,
    ("session", "release"): release_session,
    ("session", "ended"): ended_session,
    ("attention", "get"): get_attention,
    ("attention", "set"): set_attention,
}
