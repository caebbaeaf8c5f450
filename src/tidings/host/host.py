"""The host in one process: an outbox and an inbox on disk, and a session for each agent it works for.

    host = Host(home)
    await host.open()
    ada = await host.adopt(("home", home, "main", "ada"), receive=True)
    sent = await host.send(ada, SendRequest(channel="general", text="hello"))     # stored, whatever the network does

Everything that reads or writes takes a `Scope`, and one that this host does not work for is refused. What is in
`host.db` is enough to go on after a restart: agents, who is in their spaces, what is owed, what was received. How
programs reach it is another layer's part (HTTP over a socket); this one opens no socket but those of the endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tidings.admin.home import SpaceHome
from tidings.admin.identity import Identity
from tidings.client.agent import Agent
from tidings.client.direct_transport import DirectAgent, DirectTransport
from tidings.client.directory import resolve_among
from tidings.client.roster import Roster
from tidings.client.transport import Receipt
from tidings.contract.host import SendRequest
from tidings.errors import (
    AmbiguousPeer,
    AuthRevoked,
    DeniedError,
    PeerUnheard,
    Reconnecting,
    StoreError,
    TidingsError,
    UnknownMessage,
    UnknownPeer,
)
from tidings.host import outbox_views
from tidings.host.agent_sessions import (
    OPEN,
    STUCK_AFTER,
    AgentSession,
    Hooks,
    SessionPublisher,
    SessionPublishers,
    SessionState,
)
from tidings.host.compose import Composed, compose_again, compose_request, fingerprint_again, in_ms
from tidings.host.directory import Directories
from tidings.host.drain import STORE_RETRY, Drain
from tidings.host.fingerprint import fingerprint_of
from tidings.host.inbox import Bound, InboxStore
from tidings.host.mailbox import bound_of, held_number, state_file
from tidings.host.outbox import Lane, NewRow, OutboxRow, OutboxStore, Terms
from tidings.host.outbox_transitions import reused
from tidings.host.receiver import Receiver, Unkept
from tidings.host.registry import Adopted, Registry, Scope, Source, check_source, identity_of
from tidings.host.schema import SCHEMA
from tidings.server.config import SYNC_SECONDS
from tidings.util.database import Database
from tidings.util.failpoints import reach
from tidings.util.task_ends import end_tasks
from tidings.wire import message as wire
from tidings.wire.message import Mention, Sender, new_id
from tidings.wire.names import role_parts
from tidings.wire.signing import KeyPair
from tidings.wire.states import ReceiptStage

__all__ = ["AgentHealth", "Changed", "Host", "Scope"]

#: our broker syncs each second; of a broker elsewhere nothing is known, so nats-server's own default is taken
LOCAL_HORIZON_MS = 2 * SYNC_SECONDS * 1000
REMOTE_HORIZON_MS = 2 * 120_000
#: a roster is compared with what is kept at most so often
DIRECTORY_PAUSE = 0.5
#: mail that was read keeps its content so long
READ_MAIL_KEPT_MS = 90 * 24 * 3_600_000
TIDY_EVERY = 3_600.0
PROBLEMS_KEPT = 8
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentHealth:
    """How one agent of this host is doing. `age`: seconds since the last round trip to its broker."""

    scope: Scope
    state: SessionState
    age: float | None
    receiving: bool
    superseded: bool
    #: why it is not open
    reason: str | None
    #: what its endpoint last complained of, such as mail that will not be delivered; newest last
    problems: tuple[str, ...] = ()
    #: mail of it waits to be written to the inbox
    unkept: Unkept | None = None
    #: it does not get open, and that is not because its space cannot be reached
    stuck: bool = False


class Changed:
    """Woken when an inbox row of a scope was committed, or its session is in another state."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self, timeout: float | None = None) -> bool:
        """True if something changed since the last time this was asked."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()
        changed = self._event.is_set()
        self._event.clear()
        return changed


class _Agent:
    """An agent this host works for, while it runs."""

    def __init__(self, host: Host, adopted: Adopted, identity: Identity | None) -> None:
        self.host, self.adopted, self.scope = host, adopted, adopted.scope
        #: as it was last read; without it nothing new can be signed
        self.identity = identity
        self.problems: deque[str] = deque(maxlen=PROBLEMS_KEPT)
        #: is a program of it attached? Others see it as here for exactly so long
        self.attended = False
        self.changed: weakref.WeakSet[Changed] = weakref.WeakSet()
        hooks = Hooks(on_open=self._on_open, on_incarnation=self._on_incarnation, on_state=self._on_state)
        held = held_number(host.home, self.scope)
        self.session = AgentSession(self.scope.space, self.scope.name, self._endpoint, hooks, held)
        self.publisher = SessionPublisher(self.session)
        self.receiver = Receiver(self.scope, host.inbox, self.wake_changed, self.session.renew)
        self._roster: Roster | None = None
        self._roster_news = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def lane(self) -> Lane:
        return Lane(self.scope.space_id, self.scope.agent)

    async def start(self) -> None:
        await self.host.outbox.block(self.lane, "connecting", f"{self.scope.name} is not connected to its space yet")
        self._watch = asyncio.create_task(self._keep_directory(), name=f"directory of {self.scope.space}")
        self.session.start()

    async def stop(self) -> None:
        await end_tasks([self._watch])
        await self.receiver.end()
        await self.session.stop()

    def attend(self, attended: bool) -> None:
        self.attended = attended
        with suppress(Reconnecting):  # the next endpoint begins with it
            self.session.endpoint.transport.presence.attend(attended)

    def wake_changed(self) -> None:
        for each in list(self.changed):
            each.wake()

    # --- its session ---

    def _endpoint(self) -> DirectAgent:
        state = self.host.state_file(self.scope)
        receive, presence = self.adopted.receive, self.attended
        endpoint = Agent(DirectTransport(self._find_identity, state=state, receive=receive, presence=presence))
        endpoint.on("roster", self._on_roster)
        endpoint.on("error", self._on_error)
        endpoint.on("notice", self.receiver.keep_notice)
        return endpoint

    async def _find_identity(self) -> Identity:
        """As it is on disk now. A name that came back with another key is another agent: it never sends this one's."""
        found = await identity_of(self.adopted.source)
        if (found.space_id, found.id) != (self.scope.space_id, self.scope.agent):
            raise AuthRevoked(
                f"{self.scope.name} of {self.scope.space} has another key now: what was stored under its old one "
                "cannot leave; cancel it and send it anew"
            )
        self.host.check_anchor(found)
        self.identity = found
        # the endpoint that asks this reads its state file next
        await self.receiver.check_memory(self.host.state_file(self.scope))
        return found

    async def _on_open(self, endpoint: DirectAgent) -> None:
        endpoint.transport.presence.attend(self.attended)  # it may have changed while this one connected
        if self.adopted.receive:
            await self.receiver.begin(endpoint)

    async def _on_incarnation(self, _before: str | None, now: str) -> None:
        """The outbox meets this run of the broker before anything leaves for it."""
        await self._insist(lambda: self.host.outbox.meet(self.scope.space_id, now))
        self.publisher.met = now
        await self.host.drain.of(self.scope.space_id).verify(self.scope.agent, now)

    async def _on_state(self, state: SessionState) -> None:
        await self._insist(self._let_out if state in OPEN else self._hold_back)
        self.wake_changed()
        self.host.look_again()

    async def _let_out(self) -> None:
        await self.host.outbox.unblock(self.lane)
        await self.host.outbox.unblock(Lane(self.scope.space_id))
        self.host.drain.of(self.scope.space_id).wake()
        self.receiver.tell()

    async def _hold_back(self) -> None:
        health = self.session.health
        why = health.error or f"{self.scope.name} is {health.state} in {self.scope.space}"
        await self.host.outbox.block(self.lane, "revoked" if health.state == "revoked" else "unreachable", why)

    @staticmethod
    async def _insist(write: Callable[[], Awaitable[object]]) -> None:
        """Nothing would leave if this was not written: a full disk is waited for, and so is what nobody foresaw."""
        delays = STORE_RETRY.delays()
        while True:
            try:
                await write()
                return
            except Exception as error:  # boundary: else the agent would be silent and said to be open
                unforeseen = None if isinstance(error, StoreError) else error
                log.warning("the outbox cannot be written now: %s", error, exc_info=unforeseen)
            await asyncio.sleep(next(delays))

    def _on_error(self, error: BaseException) -> None:
        log.warning("%s in %s: %s", self.scope.name, self.scope.space, error)
        self.problems.append(str(error))

    # --- who is in its space ---

    def _on_roster(self, roster: Roster) -> None:
        self._roster = roster
        self._roster_news.set()

    async def _keep_directory(self) -> None:
        while True:
            await self._roster_news.wait()
            self._roster_news.clear()
            assert self._roster is not None
            try:
                roster = self._roster
                await self.host.directories.refresh(self.scope.space_id, roster.agents(), roster.unheard)
            except Exception as error:  # noqa: BLE001  boundary: names would resolve to who was here long ago
                log.warning("who is in %s could not be kept: %s", self.scope.space, error)
                self._roster_news.set()
            await asyncio.sleep(DIRECTORY_PAUSE)


class Host:
    """See above. `home` is TIDINGS_HOME; `clock` gives seconds since 1970, `tick` milliseconds that never jump."""

    def __init__(
        self,
        home: Path,
        *,
        clock: Callable[[], float] = time.time,
        tick: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        bound: Bound | None = None,
    ) -> None:
        self.home = home
        #: how much of one sender each inbox keeps; unless said, as the settings of this home have it
        self._bound = bound
        self._clock, self._tick = clock, tick
        self._agents: dict[tuple[str, str], _Agent] = {}
        #: the first steward of each space
        self._anchors: dict[str, str] = {}
        self._waiting: dict[int, list[asyncio.Event]] = {}
        self._hurried = False
        self._adopting = asyncio.Lock()
        self._tidying: asyncio.Task[None] | None = None

    # --- life ---

    async def open(self) -> None:
        """Take the database, and go on for every agent it knows. Does not wait for any broker."""
        self.database = await asyncio.to_thread(Database, self.home / "host.db", SCHEMA, clock=self._clock)
        try:
            self.outbox = OutboxStore(self.database, Terms(f"run {new_id()}"), self._tick)
            await self.outbox.recover()
            self.inbox = await InboxStore.open(self.database, self._bound or bound_of(self.home))
            self.registry = Registry(self.database)
            self.directories = await Directories.open(self.database)
            publishers = SessionPublishers(self._publisher, self._publishers_of)
            self.drain = Drain(self.outbox, publishers, self._horizon, self._moved)
            self.drain.start()
            self._tidying = asyncio.create_task(self._tidy_mail(), name="house of the inbox")
            self._anchors = await self.registry.anchors()
            for adopted in await self.registry.adopted():
                await self._start(adopted, await self._identity_if_there(adopted))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End in bounded time. What is stored stays stored, and goes on with the next run."""
        if hasattr(self, "drain"):
            await self.drain.stop()
        await end_tasks([self._tidying])
        await self._stop_agents()
        self.answer_now()
        await asyncio.to_thread(self.database.close)

    async def _stop_agents(self) -> None:
        agents = list(self._agents.values())
        ends = await asyncio.gather(*(agent.stop() for agent in agents), return_exceptions=True)
        for agent, error in zip(agents, ends, strict=True):
            if isinstance(error, BaseException):
                log.error("%s in %s did not stop well", agent.scope.name, agent.scope.space, exc_info=error)
        self._agents.clear()

    async def _tidy_mail(self) -> None:
        """Mail that was read long ago forgets its content, never that it came. What is unread stays."""
        while True:
            try:
                while await self.inbox.expire(READ_MAIL_KEPT_MS):
                    pass
            except StoreError as error:
                log.warning("read mail cannot be tidied now: %s", error)
            await asyncio.sleep(TIDY_EVERY)

    # --- agents ---

    async def adopt(self, identity_source: Source, receive: bool, identity: Identity | None = None) -> Scope:
        """Work for this agent from now on, restarts included. Does not wait for its broker.

        `identity`: as it was read there and proven; what the source says a moment later is not asked.
        """
        source = check_source(identity_source)
        identity = identity or await identity_of(source)
        async with self._adopting:
            self.check_anchor(identity)
            adopted = await self.registry.adopt(identity, source, receive)
            self._anchors.setdefault(identity.space_id, identity.steward_key)
            known = self._agents.get((adopted.scope.space_id, adopted.scope.agent))
            if known is None:
                await self._start(adopted, identity, takes=receive)
            else:
                began = adopted.receive and not known.adopted.receive
                known.adopted, known.identity = adopted, identity
                if began:
                    known.session.renew(takes=True)
                elif receive:
                    known.session.take_back()
        return adopted.scope

    def check_anchor(self, identity: Identity) -> None:
        """All agents of a space trust the same first steward: who is in it and which broker runs is known together.

        Whoever came first is believed, whenever that was. A bundle is a file that anybody can write.
        """
        if self._anchors.get(identity.space_id, identity.steward_key) != identity.steward_key:
            raise DeniedError(
                f"{identity.name} names another steward for the space {identity.subjects.space} than whoever this host "
                "first worked for there: export its bundle anew, or give it a home of its own"
            )

    async def _identity_if_there(self, adopted: Adopted) -> Identity | None:
        try:
            found = await identity_of(adopted.source)
            self.check_anchor(found)
        except (TidingsError, OSError) as error:
            log.warning("the identity of %s in %s cannot be read: %s", adopted.scope.name, adopted.scope.space, error)
            return None
        if (found.space_id, found.id) != (adopted.scope.space_id, adopted.scope.agent):
            return None
        self._anchors.setdefault(found.space_id, found.steward_key)
        return found

    async def _start(self, adopted: Adopted, identity: Identity | None, *, takes: bool = False) -> None:
        """`takes`: somebody asks to receive now, and takes the place of whoever does."""
        agent = _Agent(self, adopted, identity)
        if takes:
            agent.session.take_back()
        self._agents[adopted.scope.space_id, adopted.scope.agent] = agent
        await agent.start()

    def _agent(self, scope: Scope) -> _Agent:
        found = self._agents.get((scope.space_id, scope.agent))
        if found is None:
            raise DeniedError(f"this host does not work for {scope.name} of {scope.space}: open a session of it first")
        return found

    def scopes(self) -> list[Scope]:
        return [agent.scope for agent in self._agents.values()]

    def key(self, scope: Scope) -> KeyPair | None:
        """The key of an agent, to open what is sealed for it; None if its identity cannot be read."""
        identity = self._agent(scope).identity
        return None if identity is None else identity.key

    def names(self, scope: Scope) -> dict[str, str]:
        """Names of the agents of its space by their ids, as last seen."""
        return {each.id: each.name for each in self.directories.of(scope.space_id).known} | {scope.agent: scope.name}

    def endpoint(self, scope: Scope) -> DirectAgent:
        """The endpoint of an agent, for what needs its space now; UnreachableError says why there is none."""
        return self._agent(scope).session.endpoint

    def health(self) -> list[AgentHealth]:
        return [self._health(agent) for agent in self._agents.values()]

    def _health(self, agent: _Agent) -> AgentHealth:
        found = agent.session.health
        superseded = found.state == "superseded"
        receiving = agent.receiver.receiving and found.state == "open"
        unkept = agent.receiver.unkept
        reason = found.error or (unkept.cause if unkept and found.state == "waiting" else None)
        if found.stuck and reason is None:
            reason = f"it is connecting for longer than {STUCK_AFTER:.0f} s: see logs/host.log"
        if superseded:
            name = agent.scope.name
            reason = (
                f"another session of {name} receives: its mail goes there until that ends or you take it back "
                "(`tidings inbox`)"
            )
        problems = tuple(agent.problems)
        return AgentHealth(
            agent.scope, found.state, found.age, receiving, superseded, reason, problems, unkept, found.stuck
        )

    def attend(self, scope: Scope, attended: bool) -> None:
        """A program of this agent is attached, or none is any more."""
        if (scope.space_id, scope.agent) in self._agents:
            self._agent(scope).attend(attended)

    def wake(self, scope: Scope) -> None:
        """The network may be back: try now."""
        self._agent(scope).session.wake()

    def take_back(self, scope: Scope) -> None:
        """Receive here again, after a newer session elsewhere superseded this one."""
        self._agent(scope).session.take_back()

    def changes(self, scope: Scope) -> Changed:
        changed = Changed()
        self._agent(scope).changed.add(changed)
        return changed

    def state_file(self, scope: Scope) -> Path:
        return state_file(self.home, scope)

    # --- sending ---

    async def send(self, scope: Scope, request: SendRequest, wait: float = 0) -> Receipt:
        """Store it; with `wait` give its space so many seconds to confirm it. The answer says how far it is."""
        agent, directory = self._agent(scope), self.directories.of(scope.space_id)
        try:
            composed = compose_request(request, self._signing(agent), directory)
        except (DeniedError, UnknownPeer, AmbiguousPeer, PeerUnheard) as error:
            row = await self._accepted_before(scope, request, error)
            warnings: tuple[str, ...] = (f"it was stored before, and could not be now: {error}",)
        else:
            row, warnings = await self._accept(agent, composed), composed.warnings
        if wait > 0:
            row = await self._moved_within(agent, row, wait)
            warnings = (*warnings, *await self._unheard(agent, request, row))
        stage = ReceiptStage.CONFIRMED.value if row.state in ("confirmed", "done") else "stored"
        told = (*warnings, *self._why_it_waits(agent, row))
        to = row.destination if row.kind == "dm" else None
        return Receipt(row.id, row.seq or 0, stage, told, to, row.words or "", row.row, row.state, row.code)

    async def _unheard(self, agent: _Agent, request: SendRequest, row: OutboxRow) -> tuple[str, ...]:
        """Mentions that reach nobody, if whoever sends waits for an answer of its space anyway."""
        if request.channel is None or not request.mentions or row.state not in ("confirmed", "done"):
            return ()
        known = list(self.directories.of(agent.scope.space_id).agents())
        try:
            found = [resolve_among(known, each) for each in request.mentions]
            mentioned = [Mention(each.id, each.name) for each in found]
            return await agent.session.endpoint.transport.unheard(request.channel, mentioned)
        except TidingsError as error:  # it is stored, whatever can be said about it
            return (f"nobody could say whether who is mentioned is in {request.channel}: {error}",)

    async def _accept(self, agent: _Agent, composed: Composed) -> OutboxRow:
        accepted = await self.outbox.accept(_draft(agent.scope, composed))
        reach("host.accepted")
        if accepted.new and agent.session.state in OPEN:
            self.drain.of(agent.scope.space_id).wake()
        return accepted.row

    async def _accepted_before(self, scope: Scope, request: SendRequest, refusal: TidingsError) -> OutboxRow:
        """The row that this request made, while it could be composed: the same request has the same answer."""
        row = await self.outbox.read(outbox_views.find, scope.space_id, scope.agent, request.id) if request.id else None
        if row is None:
            raise refusal
        kept = await self.outbox.read(outbox_views.payload, row.row)
        sender, seen = Sender(scope.agent, scope.name), self.directories.of(scope.space_id)
        try:
            again = fingerprint_again(request, sender, row, seen, kept and wire.decode(kept[0]))
        except (UnknownPeer, AmbiguousPeer, PeerUnheard):
            raise type(refusal)(
                f"{refusal}. Message {row.id} is in the outbox already, as row {row.row}, {row.state}: "
                f"`tidings outbox show {row.id}`; whether this is the same cannot be told"
            ) from refusal
        if again != row.fingerprint:
            raise reused(row) from refusal
        return row

    def _signing(self, agent: _Agent) -> Identity:
        if agent.identity is None or agent.session.state == "revoked":
            why = agent.session.health.error or "its identity cannot be read"
            raise AuthRevoked(f"nothing can be sent as {agent.scope.name} of {agent.scope.space}: {why}")
        return agent.identity

    def _why_it_waits(self, agent: _Agent, row: OutboxRow) -> tuple[str, ...]:
        if row.state in ("dead", "cancelled"):
            return (f"{row.state}: {row.words}",)
        if row.state not in ("pending", "inflight"):
            return ()
        space = agent.scope.space
        if (reason := self.outbox.why_paused(agent.scope.space_id)) is not None:
            return (f"stored: {space} is paused here ({reason}); it leaves when that ends",)
        if not agent.session.is_connected:
            return (f"stored: {space} cannot be reached now; it leaves when it can",)
        return ()

    def destination(self, row: OutboxRow) -> str | None:
        """Returns the name of the agent of a direct message, or of the role of a task for another space; empty if it is
        not known. None: the destination of the row is its name."""
        agents, (role, space) = self.directories.of(row.space).agents(), role_parts(row.destination)
        if row.kind == "dm":
            return next((each.name for each in agents if each.id == row.destination), "")
        if row.kind == "task" and space:
            return next((f"{role}@{each.elsewhere}" for each in agents if each.space == space), "")
        return None

    async def why_it_waits(self, scope: Scope, row: OutboxRow) -> list[str]:
        """Everything that keeps a row from leaving, in sentences; nothing if it has left."""
        if row.state not in ("pending", "inflight"):
            return []
        agent, now = self._agent(scope), self.outbox.now()
        lane = (row.space, row.sender, row.kind, row.destination)
        found: list[str] = []
        if (paused := self.outbox.why_paused(scope.space_id)) is not None:
            found.append(outbox_views.paused_reason(scope.space, paused))
        if not agent.session.is_connected:
            why = agent.session.health.error or "it is not connected yet"
            found.append(f"{scope.name} cannot reach {scope.space}: {why}")
        else:
            held = [each for each in await self.outbox.read(outbox_views.blocks) if _covers(each[:4], lane)]
            found += [f"{each.code}: {each.words}" for each in held]
        if (ahead := await self.outbox.read(outbox_views.ahead_of, row)) is not None:
            found.append(f"message {ahead} to the same destination is before it")
        if row.attempts and row.code:
            pause = max(0, row.next_attempt_at - now) / 1000
            found.append(
                f"{row.attempts} tries failed, the last with {row.code}: {row.words}; the next in {pause:.0f} s"
            )
        return found or ["it leaves in a moment"]

    async def _moved_within(self, agent: _Agent, row: OutboxRow, seconds: float) -> OutboxRow:
        """The row once it is confirmed or has ended, or as it is when the time is over or its space is gone."""
        moved = asyncio.Event()
        self._waiting.setdefault(row.row, []).append(moved)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while (row := await self.outbox.read(outbox_views.show, row.row)).state in ("pending", "inflight"):
                        if self._hurried or agent.session.is_away:
                            break
                        await moved.wait()
                        moved.clear()
        finally:
            self._waiting[row.row].remove(moved)
            if not self._waiting[row.row]:
                del self._waiting[row.row]
        return row

    def answer_now(self) -> None:
        """Whoever waits for a confirmation is told how far it is: what is stored is stored, and the host stops."""
        self._hurried = True
        self.look_again()

    def look_again(self) -> None:
        """Whoever waits for a confirmation looks whether there is still something to wait for."""
        for events in self._waiting.values():
            for event in events:
                event.set()

    def _moved(self, row: OutboxRow, _state: str) -> None:
        for event in self._waiting.get(row.row, ()):
            event.set()

    async def find(self, scope: Scope, message_id: str) -> OutboxRow:
        """A message of this agent's outbox."""
        found = await self.outbox.read(outbox_views.find, scope.space_id, scope.agent, message_id)
        if found is None:
            raise UnknownMessage(f"the outbox of {scope.name} has no message {message_id}: list it to see what it has")
        return found

    async def cancel(self, scope: Scope, message_id: str) -> OutboxRow:
        """Do not send it, unless it is on its way: the answer says what became of it."""
        row = await self.outbox.cancel((await self.find(scope, message_id)).row)
        self._moved(row, row.state)
        self.drain.of(scope.space_id).wake()
        return row

    async def requeue(self, scope: Scope, message_id: str) -> OutboxRow:
        """Send what is dead or cancelled again, under a new id."""
        agent = self._agent(scope)
        row = await self.find(scope, message_id)
        kept = await self.outbox.read(outbox_views.payload, row.row)
        if kept is None or row.superseded_by is not None:
            return await self.outbox.requeue(row.row, new_id(), b"", "")  # says why not
        prepared = compose_again(self._signing(agent), row.kind, row.destination, kept[0])
        again = await self.outbox.requeue(row.row, prepared.id, prepared.payload, prepared.signature)
        self.drain.of(scope.space_id).wake()
        return again

    async def pause(self, space: str, reason: str = "paused by its user") -> None:
        """Nothing leaves for this space (its id) until `resume`."""
        await self.outbox.pause(space, reason)

    async def resume(self, space: str) -> None:
        await self.outbox.resume(space)
        self.drain.of(space).wake()

    # --- receiving ---

    async def mark_read(self, scope: Scope, rows: Sequence[int]) -> int:
        """How many became read; their senders are told, now or when the space can be reached."""
        agent = self._agent(scope)
        count = await self.inbox.mark_read(scope.space_id, scope.agent, rows)
        if count:
            agent.receiver.tell()
        return count

    async def delete_mail(self, scope: Scope, rows: Sequence[int]) -> int:
        """How many lost their content now; none of them comes again."""
        self._agent(scope)
        return await self.inbox.delete(scope.space_id, scope.agent, rows)

    # --- what the drain asks ---

    def _publisher(self, space: str, sender: str) -> SessionPublisher | None:
        found = self._agents.get((space, sender))
        return None if found is None else found.publisher

    def _publishers_of(self, space: str) -> Iterable[SessionPublisher]:
        return [agent.publisher for (its_space, _), agent in self._agents.items() if its_space == space]

    def _horizon(self, space: str) -> int:
        agents = [agent for (its_space, _), agent in self._agents.items() if its_space == space]
        local = next((agent.adopted for agent in agents if agent.adopted.is_local), None)
        return REMOTE_HORIZON_MS if local is None else self._local_horizon(local)

    def _local_horizon(self, adopted: Adopted) -> int:
        """Of a space on this machine; servers that others run sync when their administrator says they do."""
        _, home, space, _ = adopted.source
        info = SpaceHome(Path(home), space).read_info()
        return max(LOCAL_HORIZON_MS, 2_000 * info.sync_seconds) if info.servers else LOCAL_HORIZON_MS


def _draft(scope: Scope, composed: Composed) -> NewRow:
    prepared, message = composed.prepared, composed.message
    max_age = in_ms(composed.max_age)
    return NewRow(
        space=scope.space_id,
        sender=scope.agent,
        id=prepared.id,
        fingerprint=fingerprint_of(scope.space_id, prepared.kind, prepared.destination, message, max_age),
        kind=prepared.kind,
        destination=prepared.destination,
        subject=prepared.subject,
        payload=prepared.payload,
        signature=prepared.signature,
        priority=message.priority,
        max_age=max_age,
    )


def _covers(block: tuple[str, ...], lane: tuple[str, ...]) -> bool:
    """Does a block hold this lane? Empty means every one."""
    return all(its in ("", ours) for its, ours in zip(block, lane, strict=True))
