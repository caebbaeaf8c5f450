"""The steward of a space: one lease, one writer, every request answered.

    connect -> was the log ever further? -> take the lease -> fold the log -> finish what was interrupted -> serve

It writes the ruling records, closes and opens the gate, executes retention and beats. It holds no key that can mint
a credential. If the lease is lost it stops at once: whatever it still believes, the broker no longer takes it.
This module is its life, from taking over to letting go, and what its parts share; each part has a module of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from tidings.broker.answers import NO_STREAM, ApiError
from tidings.broker.client import Connection, close_quietly, connect
from tidings.broker.disk import DiskReserve
from tidings.broker.ending import end_tasks
from tidings.broker.jetstream import JetStream
from tidings.broker.private_files import read_private
from tidings.broker.streams import GateState
from tidings.errors import LeaseLost, OutcomeUnknown, TidingsError, UnreachableError
from tidings.space.fold import Table
from tidings.space.home import SpaceHome, SpaceInfo
from tidings.space.log import read_rulings
from tidings.space.state import StateBucket
from tidings.steward.admin_handlers import close_uncovered
from tidings.steward.agent_handlers import JoinRate, now
from tidings.steward.damage import StoreWatch
from tidings.steward.dead_mail import DeadMail
from tidings.steward.dispatch import Answering
from tidings.steward.gate import close_if_full, tend_gate
from tidings.steward.health import LogWrite
from tidings.steward.history import PageTurns
from tidings.steward.intervals import Intervals
from tidings.steward.lease import StewardLease
from tidings.steward.mail import Mail
from tidings.steward.marks import Marks
from tidings.steward.quotas import FloodWatch
from tidings.steward.receipts import Receipts
from tidings.steward.retention import Retention, SideStreams, claim_floor, read_floor
from tidings.steward.roster import RosterService
from tidings.steward.shares import Shares
from tidings.steward.signing_key import SigningKey
from tidings.steward.stuck_streams import StuckStreams
from tidings.steward.tasks import TaskDesk
from tidings.steward.trace import Traces
from tidings.steward.voids import VoidWatch
from tidings.steward.writer import RulingWriter
from tidings.wire.ids import new_id
from tidings.wire.keys import KeyPair
from tidings.wire.rulings import Access, Parts, Space
from tidings.wire.subjects import ADMIN_SERVICE, AGENT_SERVICES, Subjects
from tidings.wire.tags import tag

#: seconds between two requests to start a broker again that stores nothing
RESTART_EVERY = 20.0
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
        self.tell_supervisor = tell_supervisor
        self.started = time.time()
        self.gate: GateState | None = None
        self.disk = DiskReserve(home.store)
        self._asked_for_restart = float("-inf")
        #: when something was written and read back for the last time, and what was wrong with it
        self.last_written: tuple[float, str | None] | None = None
        self.ready = asyncio.Event()
        self._secret = bytes.fromhex(read_private(home.creds / "space.secret").strip())
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self.pages = PageTurns()
        self.join_rate = JoinRate()
        self._tasks: set[asyncio.Task[None]] = set()
        #: records that retention took out of the log
        self.removed = 0
        #: agent -> a sequence at which it remembers another record than the log has
        self.doubts: dict[str, int] = {}
        self.signing_key = SigningKey(self)
        self.answering = Answering(self)
        self.receipts = Receipts(self)
        self.traces = Traces()
        self.mail = Mail(self)
        self.floods = FloodWatch(self)
        self.voids = VoidWatch(self)
        self.shares = Shares(self)
        self.sides = SideStreams(self)
        self.log_write = LogWrite(self)
        self.stuck = StuckStreams(self)

    # --- life ---

    async def run(self, *, after: str | None = None) -> None:
        """Serve until `stop` or until the lease is lost. `after`: a holder known to be dead."""
        connection, intake = await self._connect(f"steward of {self.info.name}", self._on_reconnected), None
        try:
            await self._take_over(connection, after)
            # Agents are heard on a connection of their own: one that floods may have it cut by the broker, and the
            # lease, the streams and the administrator go on.
            intake = await self._connect("steward, intake", self._on_heard_again)
            admin = await connection.subscribe(
                f"{self.subjects.root}.ctl.{ADMIN_SERVICE}.*", cb=partial(self.answering.take, connection)
            )
            heard = [
                await intake.listen(f"{self.subjects.root}.ctl.{service}.*", partial(self.answering.hear, intake))
                for service in AGENT_SERVICES
            ]
            await connection.flush()
            await intake.flush()
            self.ready.set()
            log.info("steward of %s serves under lease %d", self.info.name, self.lease.seq)
            await self._serve(connection)
            self.desk.close()
            for subscription in (admin, *heard):
                await subscription.unsubscribe()
            await self._finish_requests(5.0 if connection.is_connected else 0.5)
            if self._failure is None and connection.is_connected:
                await self._guarded(self._note_mark)
                await self._guarded(self.store.stop)
                await self._guarded(self.roster.save)
                await self.lease.release()
        finally:
            for task in self._tasks:
                task.cancel()
            if intake is not None:
                await close_quietly(intake)
            await close_quietly(connection)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._stop.set()

    async def stopped_within(self, seconds: float) -> bool:
        """Wait so long, unless it stops meanwhile; whether it does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return self._stop.is_set()

    def fail(self, error: BaseException) -> None:
        """End because of this; the first cause is what `run` raises."""
        self._failure = self._failure or error
        self._stop.set()

    async def _connect(self, name: str, on_reconnected: Callable[[], None]) -> Connection:
        key = KeyPair(read_private(self.home.creds / "steward.user").strip())
        return await connect(
            self.info.url,
            self.home.creds / "steward.creds",
            key.id,
            name=name,
            on_closed=self._on_closed,
            on_reconnected=on_reconnected,
        )

    def _on_closed(self) -> None:
        if not self._stop.is_set():
            self.fail(UnreachableError("the steward's connection to the broker was closed for good"))

    def _on_heard_again(self) -> None:
        log.warning("the connection on which agents are heard was cut and is back")

    def _on_reconnected(self) -> None:
        """The broker may have come back with an older store, or with another steward."""
        self.spawn(self._check_until_answered())

    async def _check_until_answered(self) -> None:
        while not self._stop.is_set():
            try:
                await self._check_after_reconnect()
                return
            except LeaseLost as error:
                self.fail(error)
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
        self.marks = Marks(self.home, self.info.id, self.js, self.subjects, self.tag)
        key = await self.signing_key.that_rules()
        self.lease = StewardLease(self.js, self.subjects, self.info.id, key, ttl=self.intervals.lease_ttl)
        self.gate = await close_if_full(self.js, self.subjects, self.disk.look())
        regression = await self._regression()
        await self.lease.take(after=after)
        await self.marks.settle_epoch(regression)
        await self._load(key)
        self.store = StoreWatch(self)
        await self._guarded(self.store.start)
        async with self.writer.lock:
            await self.signing_key.rotate_again()
            if regression is None:
                await self._write_first_settings()
            for owner in sorted(self.table.owners()):
                closed = await close_uncovered(self, owner)
                if closed:
                    log.warning("finished a narrowing of %s: closed %s", owner, ", ".join(closed))

    async def _write_first_settings(self) -> None:
        """A new space does without an archive until one is there: it would wait for one for ever."""
        if not self.table.owners() and self.subjects.space_record not in self.writer.last_op:
            record = Space(op=new_id(), at=now(), parts=Parts(archive="off"))
            await self.writer.write(self.subjects.space_record, record)

    async def _load(self, key: KeyPair) -> None:
        head = await self.log_head()
        floor = await claim_floor(self.state, self.lease.seq)
        self.table = Table(self.subjects, self.info.id, self.info.steward_key, floor=floor)
        self.writer = RulingWriter(self.js, self.lease, self.table, key)
        self.writer.on_unwritten = self.unwritten
        for record in await read_rulings(self.js, self.subjects, head):
            self.writer.learn(record)
        self.retention = Retention(self.js, self.table, self.state)
        self.roster = RosterService(self)
        self.dead_mail = DeadMail(self)
        await self.dead_mail.load()
        await self.roster.load()
        self.desk = TaskDesk(self)
        await self.desk.load()

    async def _regression(self) -> tuple[int, int] | None:
        """(was, agreed) if the log went backwards."""
        return await self.marks.newest_agreed(await self.log_head(), await read_floor(self.state))

    # --- what it does by itself ---

    async def _serve(self, connection: Connection) -> None:
        beats = self.intervals.lease_ttl / 3
        loops = [
            asyncio.create_task(self._every(beats, self._beat)),
            asyncio.create_task(self._every(self.intervals.shares, self.shares.run)),
            asyncio.create_task(self._every(self.intervals.gate, self._tend_gate)),
            asyncio.create_task(self._every(self.intervals.retention, self._retain)),
            asyncio.create_task(self._every(self.intervals.marks, self._note_mark)),
            asyncio.create_task(self._every(self.intervals.roster, self.roster.tick)),
            asyncio.create_task(self._every(self.intervals.mail, self.mail.run)),
            asyncio.create_task(self._every(min(1.0, self.intervals.task_ack_wait / 6), self.desk.tend)),
            asyncio.create_task(self._every(self.intervals.retention, self.desk.retain)),
            asyncio.create_task(self._every(self.intervals.retention, self.sides.run)),
            asyncio.create_task(self._every(self.intervals.quotas, self.floods.run)),
            asyncio.create_task(self._every(self.intervals.store, self.store.run)),
            asyncio.create_task(self._every(self.intervals.voids, self.voids.run)),
            asyncio.create_task(self._every(self.intervals.stuck, self.stuck.run)),
            asyncio.create_task(self._every(self.intervals.reading, self.store.read_all)),
        ]
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
            if self._stop.is_set() and not connection.is_connected and loops:
                log.warning("stopping without a broker: what was under way is given up")
                return

    async def _every(self, seconds: float, step: Callable[[], Awaitable[object]]) -> None:
        """Repeat a step until stopped. A broker that is away for a while is not a failure; a lost lease is.

        Stopping is a flag, not a cancellation: a step that began is done, or its outcome is known.
        """
        while not self._stop.is_set():
            try:
                await step()
            except LeaseLost as error:
                self.fail(error)
                return
            except TidingsError as error:
                log.warning("%s: %s", getattr(step, "__name__", "step"), error)
            await self.stopped_within(seconds)

    async def _tend_gate(self) -> None:
        self.gate = await tend_gate(self.js, self.subjects, self.disk.look())

    async def _beat(self) -> None:
        try:
            await self.lease.beat()
        except OutcomeUnknown as error:
            await self.unwritten(str(error))
            raise

    async def unwritten(self, why: str) -> None:
        """A write was not answered. If reads are, a stream keeps a write error, and the broker must start again."""
        with suppress(TidingsError):
            await self.lease.current()
            if self.tell_supervisor is not None and time.monotonic() - self._asked_for_restart > RESTART_EVERY:
                self._asked_for_restart = time.monotonic()
                log.error("the broker answers reads and stores nothing (%s): asking for its restart", why)
                self.tell_supervisor({"restart_broker": why})

    async def _retain(self) -> None:
        if self.gate is not None:
            self.removed += await self.retention.run(self.gate, self.lease.seq)

    async def _note_mark(self) -> None:
        await self.lease.prove()  # a stale holder would write its old memory over the new one's
        await self.marks.note(await self.log_head())

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """Work beside everything else; stopping waits for it a while, then ends it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except LeaseLost as error:
            self.fail(error)
        except TidingsError as error:
            log.warning("%s", error)

    async def _finish_requests(self, patience: float) -> None:
        self.receipts.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience)

    # --- what its parts ask of it ---

    async def log_head(self) -> int:
        return int((await self.js.info(self.subjects.log_stream))["state"]["last_seq"])

    @property
    def position(self) -> int:
        """The sequence as of which the table speaks of "now"."""
        return max(self.table.head, self.table.floor)

    def active_access(self, owner: str) -> Access | None:
        """The access record in force of an agent; None if it is not one, or was revoked."""
        access = self.table.access_at(owner, self.position)
        return None if access is None or access.revoked else access

    def tag(self, text: str) -> str:
        return tag(self._secret, text)

    def space_settings(self) -> dict[str, Any]:
        settings = msgspec.to_builtins(self.table.space_at(self.position))
        return {key: value for key, value in settings.items() if key not in ("op", "v", "at", "steward_key")}
