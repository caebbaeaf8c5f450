"""The steward of a space: one lease, one writer, every request answered.

    connect -> was the log ever further? -> take the lease -> fold the log -> finish what was interrupted -> serve

It writes the ruling records, closes and opens the gate, executes retention and beats. It holds no key that can mint
a credential. If the lease is lost it stops at once: whatever it still believes, the broker no longer takes it.
This module is its life, from taking over to letting go, and the one place where its parts are put together (`_build`):
no part knows the steward, each is given what it needs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.contract.catalogue import services_of
from tidings.errors import LeaseLost, OutcomeUnknown, TidingsError, UnreachableError
from tidings.model.projection import Table
from tidings.nats.client import Connection, close_quietly, connect
from tidings.nats.errors import NO_STREAM, ApiError
from tidings.nats.jetstream import JetStream
from tidings.nats.jetstream_api import info_from
from tidings.nats.jwt import split_credentials
from tidings.server.disk import DiskReserve
from tidings.server.lease import StewardLease
from tidings.server.log import read_rulings
from tidings.server.state import StateBucket
from tidings.steward.admin_handlers import AdminHandlers
from tidings.steward.admission_handlers import AdmissionHandlers
from tidings.steward.agent_handlers import AgentHandlers
from tidings.steward.backstop import BackstopWatch
from tidings.steward.context import Intervals, Lifecycle, SpaceContext
from tidings.steward.dead_handlers import DeadHandlers
from tidings.steward.dead_letters import DeadLetters
from tidings.steward.gate import LogGate
from tidings.steward.health import HealthReport, WriteProbe
from tidings.steward.history import HistoryHandlers
from tidings.steward.invitations import InvitationHandlers
from tidings.steward.link_floors import LinkFloors, LinkPushes
from tidings.steward.link_handlers import LinkHandlers
from tidings.steward.link_mail import LinkMail
from tidings.steward.link_records import LinkRecords
from tidings.steward.link_tasks import LinkTasks
from tidings.steward.link_wakes import LinkWakes
from tidings.steward.linked_people import LinkedPeople, RosterStatements
from tidings.steward.mail import Mail
from tidings.steward.marks import Marks
from tidings.steward.quotas import FloodWatch
from tidings.steward.receipts import ReceiptHandlers, ReceiptStore
from tidings.steward.requests import Dispatcher
from tidings.steward.retention import Retention, claim_floor, read_floor
from tidings.steward.roster import RosterTable
from tidings.steward.roster_service import RosterService
from tidings.steward.shares import Shares
from tidings.steward.side_streams import SideStreams
from tidings.steward.signing_key import SigningKey
from tidings.steward.store_watch import StoreWatch
from tidings.steward.task_handlers import TaskHandlers
from tidings.steward.tasks import TaskQueues
from tidings.steward.trace import TraceHandlers
from tidings.steward.unread import UnreadMail
from tidings.steward.voids import VoidWatch
from tidings.steward.writer import RulingWriter
from tidings.util.private_files import read_private
from tidings.util.task_ends import end_tasks
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import (
    Subjects,
    tag,
)

log = logging.getLogger(__name__)


class Steward:
    def __init__(
        self,
        home: SpaceHome,
        *,
        intervals: Intervals | None = None,
        tell_supervisor: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`tell_supervisor`: how to ask for what needs a key we do not hold; None if nobody could do it."""
        self.home = home
        self.info: SpaceInfo = home.read_info()
        self.subjects: Subjects = self.info.subjects
        self.intervals = intervals or Intervals()
        self.life = Lifecycle(tell_supervisor)
        self.started = time.time()
        self.ready = asyncio.Event()
        self.signing_key = SigningKey(home, self.info)
        self._user = ""
        self.wakes: LinkWakes | None = None
        self._secret = bytes.fromhex(read_private(home.creds / "space.secret").strip())

    # --- life ---

    async def run(self, *, after: str | None = None) -> None:
        """Serve until `stop` or until the lease is lost. `after`: a holder known to be dead."""
        connection, intake = await self._connect(f"steward of {self.info.name}", self._on_reconnected), None
        try:
            await self._take_over(connection, after)
            # Agents are heard on a connection of their own: one that floods may have it cut by the broker, and the
            # lease, the streams and the administrator go on.
            intake = await self._connect("steward, intake", self._on_heard_again)
            admin = [
                await connection.subscribe(
                    f"{self.subjects.root}.ctl.{service}.*", cb=partial(self.dispatcher.take, connection)
                )
                for service in services_of("admin")
            ]
            heard = [
                await intake.listen(f"{self.subjects.root}.ctl.{service}.*", partial(self.dispatcher.hear, intake))
                for service in services_of("agent", "invited", "peer", "link worker")
            ]
            await connection.flush()
            await intake.flush()
            self.ready.set()
            log.info("steward of %s serves under lease %d", self.info.name, self.lease.seq)
            await self._serve(connection)
            self.tasks.close()
            for subscription in (*admin, *heard):
                await subscription.unsubscribe()
            self.receipts.close()
            await self.life.finish(5.0 if connection.is_connected else 0.5)
            if self.life.failure is None and connection.is_connected:
                await self._guarded(self._note_mark)
                await self._guarded(self.store.stop)
                await self._guarded(self.roster.save)
                await self._guarded(self.lease.release)
        finally:
            self.life.cancel()
            if self.wakes is not None:
                await self.wakes.close()
            if intake is not None:
                await close_quietly(intake)
            await close_quietly(connection)
        if self.life.failure is not None:
            raise self.life.failure

    def stop(self) -> None:
        self.life.stop()

    async def _connect(self, name: str, on_reconnected: Callable[[], None]) -> Connection:
        self._user = self._user_on_disk()
        return await connect(
            lambda: self.home.read_info().url,  # where it listens and whom to trust may change
            self.home.creds / "steward.creds",
            self._user,
            name=name,
            on_closed=self._on_closed,
            on_reconnected=on_reconnected,
        )

    async def _connect_for_links(self) -> Connection:
        """One that is opened and closed as links come and go: nothing else hangs on it."""
        creds = self.home.creds / "steward.creds"
        return await connect(lambda: self.home.read_info().url, creds, self._user_on_disk(), name="steward, links")

    def _user_on_disk(self) -> str:
        return split_credentials(read_private(self.home.creds / "steward.creds"))[1].id

    def _has_new_credential(self) -> bool:
        """A connection that came back with another user's credential hears no answer: its inbox is the old one's."""
        if self._user_on_disk() == self._user:
            return False
        self.life.fail(UnreachableError("the steward was given a new credential: starting again with it"))
        return True

    def _on_closed(self) -> None:
        if not self.life.is_over:
            self.life.fail(UnreachableError("the steward's connection to the broker was closed for good"))

    def _on_heard_again(self) -> None:
        if not self._has_new_credential():
            log.warning("the connection on which agents are heard was cut and is back")

    def _on_reconnected(self) -> None:
        """The broker may have come back with an older store, or with another steward."""
        if self._has_new_credential():
            return
        self.life.spawn(self._check_until_answered())

    async def _check_until_answered(self) -> None:
        while not self.life.is_over:
            try:
                await self._check_after_reconnect()
                return
            except LeaseLost as error:
                self.life.fail(error)
            except TidingsError as error:
                log.warning("after a reconnect: %s; asking again", error)
                await asyncio.sleep(0.2)

    async def _check_after_reconnect(self) -> None:
        try:
            await self.lease.prove()
        except ApiError as error:
            if error.err_code != NO_STREAM:
                raise
            raise LeaseLost("the broker came back without the log: starting again from what it holds now") from error
        if await self._regression() is not None:
            raise LeaseLost("the log went backwards under this steward: starting again from what it holds now")
        await self.store.run()

    async def _take_over(self, connection: Connection, after: str | None) -> None:
        self.js = JetStream(connection)
        self.state = StateBucket(self.js, self.subjects)
        self.marks = Marks(self.home, self.info.id, self.js, self.subjects, partial(tag, self._secret))
        key = await self.signing_key.that_rules(self.js)
        ttl, replicated = self.intervals.lease_ttl, self.js.replicated
        self.lease = StewardLease(self.js, self.subjects, self.info.id, key, ttl=ttl, replicated=replicated)
        self.gate = LogGate(self.js, self.subjects, DiskReserve(self.home.store))
        await self.gate.close_if_full()
        if replicated:
            # its sequence is from a majority, so an older end of the log is the word of a replica that lags
            await self.lease.take(after=after)
            regression = await self._regression()
        else:
            regression = await self._regression()
            await self.lease.take(after=after)
        await self.marks.adopt_epoch(regression)
        await self._fold(key)
        self._build()
        await self.letters.load()
        await self.roster.load()
        await self.tasks.holds.load()
        await self._guarded(self.store.start)
        async with self.writer.lock:
            await self.signing_key.rotate_again(self.writer)
            for owner in sorted(self.table.owners()):
                closed = await self.admin.close_uncovered(owner)
                if closed:
                    log.warning("finished a narrowing of %s: closed %s", owner, ", ".join(closed))

    async def _fold(self, key: KeyPair) -> None:
        head = await self._log_head()
        floor = await claim_floor(self.state, self.lease.seq)
        self.table = Table(self.subjects, self.info.id, self.info.steward_key, floor=floor)
        self.writer = RulingWriter(self.js, self.lease, self.table, key)
        self.writer.on_unwritten = self._unwritten
        for record in await read_rulings(self.js, self.subjects, head):
            self.writer.learn(record)

    def _build(self) -> None:
        """Put the parts together, each after what it needs."""
        space = self.space = SpaceContext(
            self.home, self.info, self.js, self.state, self.table, self.intervals, self._secret
        )
        writer, life = self.writer, self.life
        self.people = LinkedPeople(space)
        rows = RosterTable(
            space.access,
            self.intervals.presence,
            writer.access_seq,
            moved=lambda owner: self.table.moved.get(owner, 0),
            wanted=lambda owner: self.letters.wanted(owner),
            told=lambda owner: self.store.told[owner],
            elsewhere=self.people.row,
        )
        self.people.admit = rows.admit
        backstop = BackstopWatch(self.state, is_starting=self._pipeline_is_starting)
        self.store = StoreWatch(space, self.lease, life, rows.admit)
        self.letters = DeadLetters(space, self.store, rows.admit)
        self.roster = RosterService(space, rows, writer, self.marks, self.store, backstop)
        self.roster.unheard = self.people.unheard
        self.floods = FloodWatch(space, writer, self.gate, life)
        self.dispatcher = Dispatcher(self.subjects, self.lease, life, self.floods.bar)
        self.invited = InvitationHandlers(space, life, self.dispatcher.idle)
        self.receipts = ReceiptStore(space, self.dispatcher.idle)
        self.tasks = TaskQueues(space, self.lease.seq, self.letters, self.store, self.dispatcher.idle, life.fail)
        self.mail = Mail(space, self.receipts, self.people)
        self.voids = VoidWatch(space, writer, self.receipts)
        self.shares = Shares(space, self.floods, self.receipts, self.store, self.tasks.has_ended)
        self.link_floors = LinkFloors(space)
        wakes = self.wakes = LinkWakes(space, self._connect_for_links)
        self.retention = Retention(self.js, self.table, self.state, self.link_floors.floors)
        self._tell_links = wakes.run
        self.linked = LinkHandlers(space, writer, self.marks, self.link_floors)
        self.link_mail = LinkMail(space, self.linked, self.people, self.receipts)
        self.link_tasks = LinkTasks(space, self.linked, self.people, self.tasks)
        self.sides = SideStreams(space, self.letters, self.tasks.holds, self.store)
        self.probe = WriteProbe(space, writer, self.gate.disk, life, self._unwritten)
        unread = UnreadMail(space, self.receipts, self.letters, self.store, backstop)
        self.admin = AdminHandlers(space, writer, self.signing_key, self.marks, self.store, self.mail, unread)
        self.health = HealthReport(
            space=space,
            lease=self.lease,
            gate=self.gate,
            probe=self.probe,
            backstop=backstop,
            marks=self.marks,
            store=self.store,
            retention=self.retention,
            sides=self.sides,
            shares=self.shares,
            floods=self.floods,
            voids=self.voids,
            invited=self.invited,
            mail=self.mail,
            receipts=self.receipts,
            letters=self.letters,
            tasks=self.tasks,
            counts=self.dispatcher.counts,
            started=self.started,
        )
        self.dispatcher.serve(
            AgentHandlers(space, writer, self.lease, self.gate, self.marks, self.roster, self.people),
            HistoryHandlers(space, self.marks),
            self.roster,
            ReceiptHandlers(space, self.receipts),
            self.mail,
            TraceHandlers(space, self.receipts, self.tasks),
            TaskHandlers(space, self.tasks, rows, self.started, self.people),
            DeadHandlers(space, self.letters, self.tasks),
            self.health,
            self.invited,
            self.admin,
            LinkRecords(space, writer),
            self.linked,
            AdmissionHandlers(space, writer, self.marks, self.gate, LinkPushes(space, self.link_floors)),
            self.people,
            RosterStatements(self.linked, self.roster),
            self.link_mail,
            self.link_tasks,
            unread,
        )

    def _pipeline_is_starting(self) -> bool:
        """Does the supervisor say that it starts durable delivery?"""
        return (self.home.read_state().get("pipeline") or {}).get("phase") == "starting"

    async def _regression(self) -> tuple[int, int] | None:
        """(was, agreed) if the log went backwards."""
        return await self.marks.newest_agreed(await self._log_head(), await read_floor(self.state))

    # --- what it does by itself ---

    async def _serve(self, connection: Connection) -> None:
        every = self.intervals
        steps: list[tuple[float, Callable[[], Awaitable[object]]]] = [
            (every.lease_ttl / 3, self._beat),
            (every.shares, self.shares.run),
            (every.gate, self.gate.tend),
            (every.retention, self._retain),
            (every.marks, self._note_mark),
            (every.roster, self.roster.tick),
            (every.mail, self.mail.run),
            (min(1.0, every.task_ack_wait / 6), self.tasks.tend),
            (every.retention, self.tasks.upkeep.retain),
            (every.retention, self.sides.run),
            (every.quotas, self.floods.run),
            (every.store, self.store.run),
            (every.voids, self.voids.run),
            (every.links, self._tell_links),
            (every.links, self.people.run),
            (every.links, self.link_mail.run),
            (every.links, self.link_tasks.run),
            (every.retention, self.link_floors.run),
            (every.stuck, self.probe.run),
            (every.reading, self.store.read_all),
        ]
        loops = [asyncio.create_task(self._every(seconds, step)) for seconds, step in steps]
        try:
            await self._until_stopped(set(loops), connection)
        finally:
            await end_tasks(loops)

    async def _until_stopped(self, loops: set[asyncio.Task[None]], connection: Connection) -> None:
        """Each of them ends by itself once stopped; one that asks a broker that is gone is not waited for."""
        while loops:
            ended, loops = await asyncio.wait(loops, timeout=0.5, return_when=asyncio.FIRST_EXCEPTION)
            for each in ended:
                each.result()
            if self.life.is_over and not connection.is_connected and loops:
                log.warning("stopping without a broker: what was under way is given up")
                return

    async def _every(self, seconds: float, step: Callable[[], Awaitable[object]]) -> None:
        """Repeat a step until stopped. A broker that is away for a while is not a failure; a lost lease is.

        Stopping is a flag, not a cancellation: a step that began is done, or its outcome is known.
        """
        while not self.life.is_over:
            try:
                await step()
            except LeaseLost as error:
                self.life.fail(error)
                return
            except TidingsError as error:
                log.warning("%s: %s", getattr(step, "__name__", "step"), error)
            await self.life.stopped_within(seconds)

    async def _beat(self) -> None:
        try:
            await self.lease.beat()
        except OutcomeUnknown as error:
            await self._unwritten(str(error))
            raise

    async def _unwritten(self, why: str) -> None:
        """A write was not answered. If reads are, a stream keeps a write error, and the broker must start again.

        Replicas answer reads while they choose a leader, and are not ours to start.
        """
        if self.lease.replicated:
            return
        with suppress(TidingsError):
            await self.lease.current()
            self.life.ask_for_restart(why)

    async def _retain(self) -> None:
        if self.gate.state is not None:
            await self.retention.run(self.gate.state, self.lease.seq)

    async def _note_mark(self) -> None:
        await self.lease.prove()  # a stale holder would write its old memory over the new one's
        await self.marks.note(await self._log_head())

    async def _guarded(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except LeaseLost as error:
            self.life.fail(error)
        except TidingsError as error:
            log.warning("%s", error)

    async def _log_head(self) -> int:
        """The end of the log. It is not before our lease: whoever says so of a log with replicas is behind."""
        steps = info_from(self.subjects.log_stream, self.lease.seq, replicated=self.lease.replicated)
        return int((await self.js.run(steps))["state"]["last_seq"])
