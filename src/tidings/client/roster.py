"""The roster as an endpoint holds it: a snapshot, and the steward's signed deltas on top.

A hole in the deltas, another term of the steward, or a key it does not know makes it ask for a new snapshot; until that
comes the roster stays what it was and `freshness` says how old it is. It never blocks sending. The steward's key is
followed from the anchor of this identity through the rotation records, which are verified here. What arrives on the
roster's subject and is not the steward's word is dropped and counted in `refused`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from tidings.client.connection import AgentConnection
from tidings.client.directory import each_once, resolve_among
from tidings.contract.agents import DamageRow, KeptAttention, RosterAnswer, RosterRequest
from tidings.contract.channels import RawRecord
from tidings.errors import (
    OutcomeUnknown,
    PeerUnheard,
    StewardUnreachable,
    TidingsError,
    UnknownPeer,
    UnreachableError,
    WireError,
)
from tidings.nats.client import Connection
from tidings.server.steward_keys import followed_key
from tidings.util.task_ends import end_tasks
from tidings.wire.message import Mention
from tidings.wire.records import Headers
from tidings.wire.roster import AgentEntry, Attention, Backstop, Delta, open_delta

RETRY_PAUSE = 1.0
REFUSED_PAUSE = 10.0
#: snapshots of many endpoints after a steward's restart are spread over this time
SPREAD = 0.2
HELD = 1_000
DEFAULT_TTL = 25.0

Report = Callable[[str, Any], None]


class Roster:
    """Who is in the space, as of `freshness` seconds ago."""

    def __init__(self, connection: AgentConnection, report: Report) -> None:
        self.connection = connection
        self.refused: Counter[str] = Counter()
        self.snapshots = 0
        self.head = 0
        self.floor = 0
        self.backstop = Backstop()
        #: seconds after which the steward takes a silent agent for offline
        self.ttl = DEFAULT_TTL
        #: hear every row of this agent itself, and every snapshot
        self.on_own_row: list[Callable[[AgentEntry], None]] = []
        self.on_snapshot: list[Callable[[], None]] = []
        #: hear which log the steward speaks of: another epoch is a log that went backwards
        self.on_epoch: list[Callable[[str], None]] = []
        #: hear the sequence of the newest link record, and where the log ended then
        self.on_links: list[Callable[[int, int], None]] = []
        #: hear what the store of the space lost that concerns this agent
        self.on_damage: list[Callable[[DamageRow], None]] = []
        #: hear the attention the steward keeps for this agent, with its number (0: none is kept)
        self.on_kept_attention: list[Callable[[Attention, int], None]] = []
        self._attention_number = -1
        #: how often the steward had something to tell, when it was last heard
        self._told = 0
        self._report = report
        self.rows: dict[str, AgentEntry] = {}
        #: linked spaces whose agents are not told of now, and why
        self.unheard: dict[str, str] = {}
        #: name and roles of those who are in the roster no more: what they said is still theirs
        self.left: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._boot, self._n = "", 0
        self._key = connection.identity.steward_key
        self._heard: float | None = None
        self._held: list[Delta] = []
        self._wanted = asyncio.Event()
        self._loaded = asyncio.Event()
        #: set once the steward was asked for the first time, whatever came of it
        self.asked = asyncio.Event()
        #: why the steward does not tell this agent, if it said so last
        self._refusal: TidingsError | None = None
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        connection.on_session(self._on_session)

    # --- questions ---

    def agents(self) -> list[AgentEntry]:
        """Everybody, offline ones included, by name."""
        return sorted(self.rows.values(), key=lambda agent: (agent.name.casefold(), agent.id))

    def get(self, agent_id: str) -> AgentEntry | None:
        return self.rows.get(agent_id)

    @property
    def loaded(self) -> bool:
        return self._loaded.is_set()

    @property
    def freshness(self) -> float | None:
        """Seconds since the steward last spoke; None if it never did."""
        return None if self._heard is None else time.monotonic() - self._heard

    def resolve(self, text: str) -> AgentEntry:
        """Who is meant by an id or a name, by what is known now."""
        return resolve_among(self.rows.values(), text, self.unheard)

    async def wait_loaded(self, timeout: float = 5.0) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self.asked.wait()
                self._check_not_refused()
                await self._loaded.wait()
        except TimeoutError:
            self._check_not_refused()
            raise StewardUnreachable("the roster is not known yet: the steward does not answer") from None

    def _check_not_refused(self) -> None:
        if self._refusal is not None:
            raise type(self._refusal)(str(self._refusal)) from self._refusal

    async def find(self, text: str, timeout: float = 5.0) -> AgentEntry:
        """Like `resolve`, but asks the steward once more before it says that there is nobody."""
        await self.wait_loaded(timeout)
        try:
            return self.resolve(text)
        except (UnknownPeer, PeerUnheard):
            with suppress(UnreachableError, OutcomeUnknown):
                await self._take_snapshot(timeout)
            return self.resolve(text)

    async def mentions(self, named: Iterable[Mention | str], timeout: float = 5.0) -> list[Mention]:
        """Mentions by name or id as mentions by both, each agent once; UnknownPeer if one is nobody."""
        found: list[Mention] = []
        for each in named:
            if isinstance(each, str):
                agent = await self.find(each, timeout)
                each = Mention(agent.id, agent.own_name)
            found.append(each)
        return each_once(found)

    # --- deltas ---

    async def _on_session(self, connection: Connection) -> None:
        await connection.subscribe(self.connection.identity.subjects.live_roster, cb=self._receive)
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.create_task(self._keep_known(), name=f"roster of {self.connection.identity.name}")

    async def _receive(self, message: Any) -> None:
        try:
            block = Headers.parse(raw) if (raw := message.block) else Headers()
        except WireError:
            block = Headers()
        fields = block.fields if block.status is None else ()
        identity = self.connection.identity
        delta = open_delta(identity.subjects, identity.space_id, self._key, message.subject, fields, message.data)
        if isinstance(delta, str):
            self.refused[delta] += 1
            if delta == "signature":  # nobody but the steward can sign at all here: perhaps with a key we do not know
                self._wanted.set()
            return
        self._take(delta)

    def _take(self, delta: Delta) -> None:
        if delta.boot == self._boot and delta.n <= self._n:
            self.refused["stale"] += 1
            return
        if self._wanted.is_set() or delta.boot != self._boot or delta.n != self._n + 1:
            self._held = [*self._held[-HELD:], delta]
            self._wanted.set()
            return
        self._apply(delta)

    def _apply(self, delta: Delta) -> None:
        self._n, self._heard = delta.n, time.monotonic()
        self.head, self.floor, self.backstop = delta.head, delta.floor, delta.backstop
        self._tell_links(delta.links)
        before, self.unheard = self.unheard, delta.unheard
        changed = [row for row in delta.rows if self._put(row)]
        gone = [self._dismiss(each) for each in delta.gone if each in self.rows]
        told = [*changed, *(replace(agent, status="offline", attention=None) for agent in gone)]
        self._tell(told)
        if not told and before != self.unheard:
            self._report("roster", self)

    def _tell_links(self, newest: int) -> None:
        for hear in self.on_links:
            hear(newest, self.head)

    def _dismiss(self, agent_id: str) -> AgentEntry:
        agent = self.rows.pop(agent_id)
        self.left[agent_id] = agent.name, agent.roles
        if len(self.left) > HELD:
            del self.left[next(iter(self.left))]
        return agent

    def _put(self, row: AgentEntry) -> bool:
        before = self.rows.get(row.id)
        self.rows[row.id] = row
        if row.id == self.connection.identity.id:
            for hear in self.on_own_row:
                hear(row)
            if (row.attention_number or 0) > self._attention_number >= 0:
                self._wanted.set()  # what it says is told to this agent only, with the next snapshot
            if row.told != self._told:
                self._wanted.set()
        return before is None or _shown(before) != _shown(row)

    def _tell(self, changed: list[AgentEntry]) -> None:
        for agent in changed:
            self._report("presence", agent)
        if changed:
            self._report("roster", self)

    # --- snapshots ---

    async def _keep_known(self) -> None:
        """One snapshot at a time, whenever one is wanted, for as long as it takes."""
        while True:
            await self._wanted.wait()
            pause = random.uniform(SPREAD / 2, SPREAD)
            try:
                await self.connection.ready(30)
                await self._take_snapshot()
            except (UnreachableError, OutcomeUnknown):
                pause = RETRY_PAUSE
            except TidingsError as error:
                self._refusal = error
                self._report("error", error)
                pause = REFUSED_PAUSE
            self.asked.set()
            await asyncio.sleep(pause)

    async def _take_snapshot(self, timeout: float = 5.0) -> None:
        async with self._lock:
            first = page = await self.connection.call(RosterRequest(), timeout=timeout)
            rows = list(page.rows)
            while page.next is not None:
                page = await self.connection.call(RosterRequest(page.next), timeout=timeout)
                if page.boot != first.boot:
                    raise StewardUnreachable("the steward changed while it was asked for the roster")
                rows += page.rows
            self._adopt(first, rows)

    def _stand(self, kept: KeptAttention | None) -> None:
        attention, number = (kept.attention, kept.number) if kept else (Attention(), 0)
        if number > self._attention_number:
            self._attention_number = number
            for hear in self.on_kept_attention:
                hear(attention, number)

    def _adopt(self, first: RosterAnswer, rows: list[AgentEntry]) -> None:
        self._refusal = None
        self._stand(first.attention)
        if first.boot == self._boot and first.n < self._n and not self._wanted.is_set():
            return  # deltas were quicker
        self._key = self._follow_key(first.rotations)
        held, self._held = self._held, []
        self._wanted.clear()
        self._told = first.told
        self._boot, self._n, self._heard = first.boot, first.n, time.monotonic()
        self.ttl, self.head, self.floor = first.ttl, first.head, first.floor
        self.backstop, self.unheard = first.backstop, first.unheard
        gone = self.rows.keys() - {row.id for row in rows}
        lost = [replace(self._dismiss(each), status="offline", attention=None) for each in gone]
        changed = [row for row in rows if self._put(row)]
        self.snapshots += 1
        if self.loaded:
            self._tell([*changed, *lost])
        else:
            self._loaded.set()
            self._report("roster", self)
        for delta in held:
            if delta.boot != self._boot or delta.n > self._n:
                self._take(delta)
        for hear in self.on_snapshot:
            hear()
        for tell in self.on_epoch:
            tell(first.epoch)
        self._tell_links(first.links)
        for row in first.damage:
            for told in self.on_damage:
                told(row)

    def _follow_key(self, rotations: tuple[RawRecord, ...]) -> str:
        """The key in force by records that verify from the anchor; what does not verify changes nothing."""
        identity = self.connection.identity
        found = followed_key(identity.subjects, identity.space_id, identity.steward_key, msgspec.to_builtins(rotations))
        if found.refused:
            self.refused["rotation"] += found.refused
        return found.key

    async def close(self) -> None:
        await end_tasks([self._task])


def _shown(row: AgentEntry) -> AgentEntry:
    """A row without what is no news to anybody but the agent itself."""
    return replace(row, last_seen=None, access=0, moved=0, wanted=0, told=0)
