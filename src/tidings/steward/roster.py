"""Who is here, kept in memory from beats. Pure and without a clock; `roster_service.py` publishes it.

The directory is every agent that is not revoked, offline ones included. Names and roles are the access record's;
status, activity and model are the agent's own word. Several sessions of one agent may beat: the one that receives
speaks for it while it lives, else the one that beat first. An unchanged beat costs no delta.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import msgspec

from tidings.contract.agents import BeatRequest
from tidings.wire.records import moment
from tidings.wire.roster import AgentEntry
from tidings.wire.rulings import Access

#: bytes of rows in one delta or page
PAGE_BYTES = 256 * 1024
SESSIONS_KEPT = 8
SEEN_KEPT = 2_000
#: a receiving session that was silent for so many times to live is taken for ended: it may only be cut off, and whoever
#: takes its place then ends it for good
ENDED_AFTER_TTLS = 4

AccessOf = Callable[[str], Access | None]
SequenceOf = Callable[[str], int]


@dataclass(slots=True)
class _Session:
    beat: BeatRequest
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

    def speaks(self) -> BeatRequest | None:
        if self.holder in self.sessions:
            return self.sessions[self.holder].beat
        return next((session.beat for session in self.sessions.values()), None)


@dataclass(eq=False)
class RosterTable:
    """Presence of every agent. `heard` times are monotonic, `seen` times are for people."""

    access: AccessOf
    ttl: float
    access_seq: SequenceOf = lambda _owner: 0
    moved: SequenceOf = lambda _owner: 0
    wanted: SequenceOf = lambda _owner: 0
    told: SequenceOf = lambda _owner: 0
    #: rows of agents of linked spaces, who have no access record here
    elsewhere: Callable[[str], AgentEntry | None] = lambda _key: None

    def __post_init__(self) -> None:
        self._presence: dict[str, _Presence] = {}
        self._told: dict[str, AgentEntry] = {}
        #: ids of rows that a snapshot answered before a delta told them
        self._answered: set[str] = set()
        self._standing: dict[str, int] = {}
        self._changed: set[str] = set()
        #: every id of a row, and the same in order
        self._known: set[str] = set()
        self._in_order: list[str] = []
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

    def beat(self, owner: str, beat: BeatRequest, heard: float, seen: float) -> None:
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

    def row(self, owner: str) -> AgentEntry | None:
        """The agent as others see it; None if it is not one, or no longer."""
        access = self.access(owner)
        if access is None:
            return self.elsewhere(owner)
        if access.revoked:
            return None
        presence = self._presence.get(owner) or _Presence()
        said = presence.speaks()
        row = AgentEntry(
            id=owner,
            name=access.name,
            roles=access.roles,
            last_seen=None if presence.last_seen is None else moment(presence.last_seen),
            session=presence.number,
            access=self.access_seq(owner),
            moved=self.moved(owner),
            wanted=self.wanted(owner),
            told=self.told(owner),
            attention_number=self._standing.get(owner),
        )
        if said is None:
            return row
        return replace(row, status=said.status, activity=said.activity, model=said.model, attention=said.attention.mode)

    def running(self, owner: str, *, but: str) -> BeatRequest | None:
        """What the session that speaks for `owner` said, as if the session `but` were not there."""
        presence = self._presence.get(owner) or _Presence()
        others = {key: session for key, session in presence.sessions.items() if key != but}
        return _Presence(others, holder=presence.holder).speaks()

    @property
    def has_news(self) -> bool:
        return bool(self._changed)

    def news(self) -> tuple[list[AgentEntry], list[str]]:
        """Rows that differ from what was told, and ids that are gone. What is answered counts as told."""
        rows, gone = [], []
        for owner in sorted(self._changed):
            row, told = self.row(owner), self._told.get(owner)
            if row is None:
                self._presence.pop(owner, None)
                if self._told.pop(owner, None) is not None or owner in self._answered:
                    gone.append(owner)
                self._answered.discard(owner)
            elif told is None or replace(told, last_seen=row.last_seen) != row:
                self._told[owner] = row
                self._answered.discard(owner)
                rows.append(row)
        self._changed.clear()
        return rows, gone

    def page(self, after: str = "", limit: int = PAGE_BYTES) -> tuple[list[AgentEntry], bool]:
        """The first rows whose id sorts after `after`, of at most `limit` bytes; and whether there are more."""
        ids = self._ids()
        found: list[AgentEntry] = []
        used = 0
        for index in range(bisect_right(ids, after), len(ids)):
            if (row := self.row(ids[index])) is None:
                continue
            used += _size(row)
            if found and used > limit:
                return self._as_answered(found), True
            found.append(row)
        return self._as_answered(found), False

    def _ids(self) -> list[str]:
        """Of every row, in order: sorted again only when somebody came or went."""
        known = self._told.keys() | self._changed
        if known != self._known:
            self._known, self._in_order = known, sorted(known)
        return self._in_order

    def _as_answered(self, rows: list[AgentEntry]) -> list[AgentEntry]:
        """Whoever is answered a row that no delta has told yet must hear when it is gone."""
        self._answered.update(row.id for row in rows if row.id not in self._told)
        return rows

    def seen(self) -> dict[str, float]:
        """When each agent was last seen, the latest ones."""
        found = [(p.last_seen, owner) for owner, p in self._presence.items() if p.last_seen is not None]
        return {owner: when for when, owner in sorted(found, reverse=True)[:SEEN_KEPT]}

    def _of(self, owner: str) -> _Presence:
        return self._presence.setdefault(owner, _Presence())


def pages(rows: list[AgentEntry], limit: int = PAGE_BYTES) -> list[list[AgentEntry]]:
    """The rows in pages of at most `limit` bytes, at least one row each."""
    found: list[list[AgentEntry]] = []
    used = 0
    for row in rows:
        size = _size(row)
        if not found or used + size > limit:
            found.append([])
            used = 0
        found[-1].append(row)
        used += size
    return found


def _size(row: AgentEntry) -> int:
    return len(msgspec.json.encode(row)) + 1
