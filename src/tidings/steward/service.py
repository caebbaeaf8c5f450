"""The steward of a space: one lease, one writer, every request answered.

    connect -> was the log ever further? -> take the lease -> fold the log -> finish what was interrupted -> serve

It writes the ruling records, closes and opens the gate, executes retention and beats. It holds no key that can mint
a credential. If the lease is lost it stops at once: whatever it still believes, the broker no longer takes it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec
from nats.errors import Error as NatsError

from tidings.broker.answers import EPOCH_KEY, NO_STREAM, ApiError
from tidings.broker.client import Connection, close_quietly, connect
from tidings.broker.jetstream import JetStream
from tidings.broker.private_files import read_private, write_private
from tidings.broker.streams import GateState, gate_of, set_epoch, set_gate
from tidings.errors import (
    ConflictError,
    LeaseLost,
    OutcomeUnknown,
    TidingsError,
    TooLarge,
    UnreachableError,
    UsageError,
)
from tidings.space.fold import Table
from tidings.space.home import SpaceHome, SpaceInfo
from tidings.space.log import log_record, read_rulings
from tidings.space.state import StateBucket
from tidings.steward.finding import FINDING_HANDLERS
from tidings.steward.governance import ADMIN_HANDLERS, close_uncovered
from tidings.steward.history import HISTORY_HANDLERS, PageTurns
from tidings.steward.lease import StewardLease
from tidings.steward.mail import Mail
from tidings.steward.marks import Marks, Regression
from tidings.steward.quotas import FloodWatch
from tidings.steward.receipt_services import RECEIPT_HANDLERS
from tidings.steward.receipts import Receipts
from tidings.steward.requests import Request, answer, parse_request, refusal
from tidings.steward.retention import Retention, SideStreams, claim_floor, read_floor
from tidings.steward.roster import ROSTER_HANDLERS, RosterService
from tidings.steward.services import AGENT_HANDLERS, Handler, JoinPace, now
from tidings.steward.task_services import TASK_HANDLERS
from tidings.steward.tasks import TaskDesk
from tidings.steward.trace import TRACE_HANDLERS, Traces
from tidings.steward.turns import Turns
from tidings.steward.writer import RulingWriter
from tidings.wire.ids import new_id
from tidings.wire.keys import KeyPair
from tidings.wire.rulings import Parts, Space
from tidings.wire.subjects import Subjects
from tidings.wire.tags import tag

CLOSE_AT = 0.95
OPEN_BELOW = 0.90
WARN_AT = 0.70
#: requests worked on at once, of one sender, and how many more of it may wait
IN_FLIGHT, IN_FLIGHT_EACH, WAITING_EACH = 64, 16, 1_000
MAX_ANSWER = 1_000_000
HANDLERS: dict[tuple[str, str], Handler] = {
    **AGENT_HANDLERS,
    **HISTORY_HANDLERS,
    **ROSTER_HANDLERS,
    **RECEIPT_HANDLERS,
    **TRACE_HANDLERS,
    **FINDING_HANDLERS,
    **TASK_HANDLERS,
    **ADMIN_HANDLERS,
}
log = logging.getLogger(__name__)
#: whose request a task works on
_asking: ContextVar[str] = ContextVar("asking")


@dataclass(frozen=True, slots=True)
class Pace:
    """How often the steward does what it does by itself, in seconds."""

    lease_ttl: float = 3.0
    gate: float = 1.0
    retention: float = 10.0
    marks: float = 2.0
    #: how often it looks for senders that flood
    quotas: float = 5.0
    #: deltas of the roster are at least this far apart
    roster: float = 0.25
    #: and at most this far, while anyone is online
    roster_heartbeat: float = 5.0
    #: an agent that did not beat for so long is offline
    presence: float = 25.0
    mail: float = 10.0
    #: unread direct messages are given back to their sender's knowledge after this long
    mail_ttl: float = 30 * 24 * 3600.0
    #: how long a direct message to nobody is kept, should its target just be on its way in
    mail_grace: float = 60.0
    #: a worker that does not beat for so long has died
    task_silence: float = 30.0
    task_ack_wait: float = 30.0
    #: before a failed task is tried again; doubles with each try
    task_backoff: float = 2.0
    #: settled tasks are kept longer than the broker remembers message ids, so that a repeat is known as one
    task_keep: float = 900.0


class Steward:
    def __init__(
        self,
        home: SpaceHome,
        *,
        pace: Pace | None = None,
        tell_supervisor: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`tell_supervisor`: how to ask for what needs a key we do not hold; None if nobody could do it."""
        self.home = home
        self.info: SpaceInfo = home.read_info()
        self.subjects: Subjects = self.info.subjects
        self.pace = pace or Pace()
        self.tell_supervisor = tell_supervisor
        self.started = time.time()
        self.counts = {"requests": 0, "refused": 0, "failed": 0}
        self.gate: GateState | None = None
        self.ready = asyncio.Event()
        self._secret = bytes.fromhex(read_private(home.creds / "space.secret").strip())
        self._key_path = home.creds / "steward.key"
        self._next_key_path = home.creds / "steward.key.next"
        self._retired_path = home.creds / "steward.keys.retired"
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self.turns: Turns[tuple[Any, Request, Handler]] = Turns(IN_FLIGHT, IN_FLIGHT_EACH, WAITING_EACH)
        self.pages = PageTurns()
        self.join_pace = JoinPace()
        self._tasks: set[asyncio.Task[None]] = set()
        self._removed = 0
        self.receipts = Receipts(self)
        self.traces = Traces()
        self.mail = Mail(self)
        self.floods = FloodWatch(self)
        self.sides = SideStreams(self)

    # --- life ---

    async def run(self, *, after: str | None = None) -> None:
        """Serve until `stop` or until the lease is lost. `after`: a holder known to be dead."""
        connection = await self._connect()
        try:
            await self._take_over(connection, after)
            subscription = await connection.subscribe(
                f"{self.subjects.root}.ctl.>", cb=self._on_message, pending_bytes_limit=512 * 1024 * 1024
            )
            await connection.flush()
            self.ready.set()
            log.info("steward of %s serves under lease %d", self.info.name, self.lease.seq)
            await self._serve()
            self.desk.close()
            if not connection.is_closed:
                await subscription.unsubscribe()
            await self._finish_requests()
            if self._failure is None and connection.is_connected:
                await self._guarded(self._note_mark)
                await self._guarded(self.roster.save)
                await self.lease.release()
        finally:
            for task in self._tasks:
                task.cancel()
            await close_quietly(connection)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._stop.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stop.set()

    async def _connect(self) -> Connection:
        key = KeyPair(read_private(self.home.creds / "steward.user").strip())
        return await connect(
            self.info.url,
            self.home.creds / "steward.creds",
            key.id,
            name=f"steward of {self.info.name}",
            on_closed=self._on_closed,
            on_reconnected=self._on_reconnected,
        )

    async def _on_closed(self) -> None:
        if not self._stop.is_set():
            self._fail(UnreachableError("the steward's connection to the broker was closed for good"))

    async def _on_reconnected(self) -> None:
        """The broker may have come back with an older store, or with another steward."""
        self._spawn(self._check_until_answered())

    async def _check_until_answered(self) -> None:
        while not self._stop.is_set():
            try:
                await self._check_after_reconnect()
                return
            except LeaseLost as error:
                self._fail(error)
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

    async def _take_over(self, connection: Connection, after: str | None) -> None:
        self.js = JetStream(connection)
        self.state = StateBucket(self.js, self.subjects)
        self.marks = Marks(self.home.marks, self.js, self.subjects)
        key = await self._ruling_key()
        self.lease = StewardLease(self.js, self.subjects, self.info.id, key, ttl=self.pace.lease_ttl)
        await self._check_room()
        regression = await self._regression()
        await self.lease.take(after=after)
        await self._settle_epoch(regression)
        await self._load(key)
        async with self.writer.lock:
            await self._rotate_again()
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

    async def _check_room(self) -> None:
        self.gate = gate_of(self.subjects, await self.js.info(self.subjects.log_stream))
        if self.gate.open and self.gate.share >= CLOSE_AT:
            self.gate = await set_gate(self.js, self.subjects, gate_open=False)

    async def _load(self, key: KeyPair) -> None:
        head = await self.log_head()
        floor = await claim_floor(self.state, self.lease.seq)
        self.table = Table(self.subjects, self.info.id, self.info.steward_key, floor=floor)
        self.writer = RulingWriter(self.js, self.lease, self.table, key)
        for record in await read_rulings(self.js, self.subjects, head):
            self.writer.learn(record)
        self.retention = Retention(self.js, self.table, self.state)
        self.roster = RosterService(self)
        await self.roster.load()
        self.desk = TaskDesk(self)
        await self.desk.load()

    async def log_head(self) -> int:
        return int((await self.js.info(self.subjects.log_stream))["state"]["last_seq"])

    # --- signing key ---

    async def _ruling_key(self) -> KeyPair:
        """The key that rules by the word of the log: ours, or the next one if a rotation was interrupted after its
        record, or a retired one if the log went back to before a rotation."""
        rotations = Table(self.subjects, self.info.id, self.info.steward_key)
        async for page in self.js.read(self.subjects.log_stream, self.subjects.space_record, 1, await self.log_head()):
            rotations.apply_all(map(log_record, page))
        key = KeyPair(read_private(self._key_path).strip())
        if key.id == rotations.steward_key:
            return key
        if self._next_key_path.exists():
            following = KeyPair(read_private(self._next_key_path).strip())
            if following.id == rotations.steward_key:
                self._keep_key(following)
                return following
        for retired in self._retired_keys():
            if retired.id == rotations.steward_key:
                return retired
        raise TidingsError(
            f"the log of {self.info.name} is ruled by {rotations.steward_key}, but {self._key_path.name} is {key.id}: "
            "restore the steward's key from a backup"
        )

    def _retired_keys(self) -> list[KeyPair]:
        if not self._retired_path.exists():
            return []
        return [KeyPair(seed) for seed in read_private(self._retired_path).split()]

    def _keep_key(self, key: KeyPair) -> None:
        """Make `key` ours. The one before signs nothing that counts, unless the log goes back; then it must."""
        retired = dict.fromkeys([*(each.seed for each in self._retired_keys()), read_private(self._key_path).strip()])
        write_private(self._retired_path, "\n".join(seed for seed in retired if seed != key.seed) + "\n")
        write_private(self._key_path, key.seed + "\n")
        self._next_key_path.unlink(missing_ok=True)

    async def _rotate_again(self) -> None:
        """The log went back to before a rotation: a retired key rules once, to name the one in use."""
        current = KeyPair(read_private(self._key_path).strip())
        if current.id != self.writer.key.id:
            log.warning("the log had lost the rotation to %s; writing it again", current.id)
            await self._hand_over_to(current, new_id())

    async def rotate_signing_key(self, op: str) -> int:
        """Write the record that names the key in `steward.key.next`, and rule with it from then on."""
        if not self._next_key_path.exists():
            raise UsageError("there is no steward.key.next to rotate to: `tidings space rotate-key` makes one")
        following = KeyPair(read_private(self._next_key_path).strip())
        seq = await self._hand_over_to(following, op)
        self._keep_key(following)
        return seq

    async def _hand_over_to(self, following: KeyPair, op: str) -> int:
        current = self.table.space_at(self.position)
        record = msgspec.structs.replace(current, op=op, at=now(), steward_key=following.id)
        seq = await self.writer.write(self.subjects.space_record, record)
        self.writer.key = self.lease.key = following
        return seq

    # --- regression ---

    async def _regression(self) -> tuple[int, int] | None:
        return await self.marks.newest_agreed(await self.log_head(), await read_floor(self.state))

    async def _settle_epoch(self, regression: tuple[int, int] | None) -> None:
        config = (await self.js.info(self.subjects.log_stream))["config"]
        epoch = config["metadata"][EPOCH_KEY]
        if regression is None:
            self.marks.file.epoch = epoch
            return
        was, agreed = regression
        fresh = str(uuid.uuid4())
        await set_epoch(self.js, self.subjects, fresh)
        found = Regression(was=was, agreed=agreed, epoch_before=epoch, epoch_after=fresh, noticed=now())
        self.marks.forget_after(agreed, found)
        log.error("the log went backwards: it was at %d and agrees with the past only up to %d", was, agreed)

    def acknowledge_regressions(self) -> int:
        pending = [r for r in self.marks.file.regressions if not r.acknowledged]
        self.marks.file.regressions = [
            msgspec.structs.replace(each, acknowledged=True) for each in self.marks.file.regressions
        ]
        self.marks.save()
        return len(pending)

    # --- what it does by itself ---

    async def _serve(self) -> None:
        beats = self.pace.lease_ttl / 3
        loops = [
            asyncio.create_task(self._every(beats, self.lease.beat, fatal=LeaseLost)),
            asyncio.create_task(self._every(self.pace.gate, self._tend_gate)),
            asyncio.create_task(self._every(self.pace.retention, self._retain)),
            asyncio.create_task(self._every(self.pace.marks, self._note_mark)),
            asyncio.create_task(self._every(self.pace.roster, self.roster.tick)),
            asyncio.create_task(self._every(self.pace.mail, self.mail.run)),
            asyncio.create_task(self._every(min(1.0, self.pace.task_ack_wait / 6), self.desk.tend)),
            asyncio.create_task(self._every(self.pace.retention, self.desk.retain)),
            asyncio.create_task(self._every(self.pace.retention, self.sides.run)),
            asyncio.create_task(self._every(self.pace.quotas, self.floods.run)),
        ]
        try:
            await asyncio.gather(*loops)
        finally:
            for loop in loops:
                loop.cancel()

    async def _every(
        self, seconds: float, step: Callable[[], Awaitable[object]], *, fatal: type[BaseException] = LeaseLost
    ) -> None:
        """Repeat a step until stopped. A broker that is away for a while is not a failure; a lost lease is.

        Stopping is a flag, not a cancellation: `asyncio.wait_for` of Python 3.11, which nats-py uses, swallows a
        cancellation that arrives together with the answer.
        """
        while not self._stop.is_set():
            try:
                await step()
            except fatal as error:
                self._fail(error)
                return
            except TidingsError as error:
                log.warning("%s: %s", getattr(step, "__name__", "step"), error)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stop.wait()

    async def _tend_gate(self) -> None:
        state = gate_of(self.subjects, await self.js.info(self.subjects.log_stream))
        if state.open and state.share >= CLOSE_AT:
            state = await set_gate(self.js, self.subjects, gate_open=False)
            log.error("the log is at %.0f %% of its budget: the gate is closed", state.share * 100)
        elif not state.open and state.share < OPEN_BELOW:
            state = await set_gate(self.js, self.subjects, gate_open=True)
            log.warning("the log is at %.0f %% of its budget: the gate is open again", state.share * 100)
        self.gate = state

    async def _retain(self) -> None:
        if self.gate is not None:
            self._removed += await self.retention.run(self.gate, self.lease.seq)

    async def _note_mark(self) -> None:
        await self.lease.prove()  # a stale holder would write its old memory over the new one's
        await self.marks.note(await self.log_head())

    # --- requests ---

    @property
    def position(self) -> int:
        """The sequence as of which the table speaks of "now"."""
        return max(self.table.head, self.table.floor)

    def tag(self, text: str) -> str:
        return tag(self._secret, text)

    def space_settings(self) -> dict[str, Any]:
        settings = msgspec.to_builtins(self.table.space_at(self.position))
        return {key: value for key, value in settings.items() if key not in ("op", "v", "at", "steward_key")}

    async def _on_message(self, message: Any) -> None:
        """Junk is answered and beats are taken here; work gets a task, so that one slow request delays nobody."""
        self.counts["requests"] += 1
        try:
            request = parse_request(self.subjects, message.subject, message.data)
            if request.service == "presence":
                beaten = self.roster.beat(request)
                await self._reply(message, answer(beaten))
                return
            handler = HANDLERS.get((request.service, request.do))
            if handler is None:
                raise UsageError(f"this steward has no {request.service} {request.do!r}")
        except TidingsError as error:
            self.counts["refused"] += 1
            await self._reply(message, refusal(error))
            return
        if self.turns.offer(request.sender, (message, request, handler)):
            self._begin_work()
            return
        self.counts["refused"] += 1
        busy = f"{WAITING_EACH:,} requests of yours wait already: wait for their answers, then ask again"
        await self._reply(message, refusal(ConflictError(busy)))

    def _begin_work(self) -> None:
        while (turn := self.turns.take()) is not None:
            self._spawn(self._handle(*turn))

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """A request that only waits gives its slot to one that works."""
        sender = _asking.get()
        self.turns.release(sender)
        self._begin_work()
        try:
            yield
        finally:
            self.turns.reclaim(sender)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, message: Any, request: Request, handler: Handler) -> None:
        _asking.set(request.sender)
        try:
            if not self.lease.is_fresh:
                await self.lease.prove()  # paused past a takeover, our table speaks of the past
            reply = answer(await handler(self, request))
        except LeaseLost as error:
            self._fail(error)
            reply = refusal(OutcomeUnknown(f"this steward was replaced ({error}): ask again with the same op"))
        except TidingsError as error:
            self.counts["refused"] += 1
            reply = refusal(error)
        except Exception as error:  # boundary: every request is answered, our own bugs included
            self.counts["failed"] += 1
            log.exception("%s %s failed", request.service, request.do)
            reply = refusal(error)
        finally:
            self.turns.release(request.sender)
            self._begin_work()
        await self._reply(message, reply)

    @staticmethod
    async def _reply(message: Any, payload: bytes) -> None:
        if not message.reply:
            return
        if len(payload) > MAX_ANSWER:  # the broker would close the connection over it
            payload = refusal(TooLarge(f"the answer has {len(payload)} bytes, more than a message holds: ask for less"))
        with suppress(NatsError, OSError):  # the broker is gone, and whoever asked hears of that
            await message._client.publish(message.reply, payload)

    async def _guarded(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except LeaseLost as error:
            self._fail(error)
        except TidingsError as error:
            log.warning("%s", error)

    async def _finish_requests(self) -> None:
        self.receipts.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    # --- health ---

    async def health(self) -> dict[str, Any]:
        """Facts, each as fresh as this call unless it says its age."""
        started = time.monotonic()
        holder = await self.lease.prove()
        rtt = time.monotonic() - started
        s = self.subjects
        streams = {}
        for stream in (s.log_stream, s.direct_stream, s.task_stream, s.delivery_stream, s.audit_stream, s.dead_stream):
            info = await self.js.info(stream)
            streams[stream] = {
                "messages": info["state"]["messages"],
                "bytes": info["state"]["bytes"],
                "limit": info["config"]["max_bytes"],
                "last_seq": info["state"]["last_seq"],
                "consumers": info["state"]["consumer_count"],
            }
            if stream == s.log_stream:
                self.gate = gate_of(s, info)
        problems = self._problems()
        await self.roster.backstop.look()
        return {
            "healthy": not problems,
            "problems": problems,
            "steward": {"lease": holder.seq, "holder": str(holder), "pid": os.getpid(), "since": self.started},
            "broker_rtt_ms": round(rtt * 1000, 3),
            "log_head": streams[s.log_stream]["last_seq"],
            "floor": self.table.floor,
            "backstop": self.roster.backstop.health(streams[s.log_stream]["last_seq"]),
            "floor_held_by": self.retention.last.held_by if self.retention.last else None,
            "epoch": self.marks.file.epoch,
            "gate": {"open": self.gate.open, "used": self.gate.used, "budget": self.gate.budget} if self.gate else None,
            "streams": streams,
            "free_disk": shutil.disk_usage(self.home.root).free,
            "agents": sum(1 for owner in self.table.owners() if self._is_active(owner)),
            "void_records": sum(self.table.void.values()),
            "counts": self.counts,
            "mail": {
                "removed": self.mail.removed,
                "invented": self.mail.invented,
                "receipts_unrecorded": self.receipts.unrecorded,
            },
            "tasks": {**await self.desk.lookup.figures(), "invented": self.floods.invented_tasks},
            "removed": {"log": self._removed, **self.sides.removed},
            "withheld": self.floods.withheld(),
            "regressions": [msgspec.to_builtins(each) for each in self.marks.file.regressions],
            "at": time.time(),
        }

    def _is_active(self, owner: str) -> bool:
        access = self.table.access_at(owner, self.position)
        return access is not None and not access.revoked

    def _problems(self) -> list[str]:
        found = []
        if self.gate is not None and not self.gate.open:
            found.append("the log is full: the gate is closed and new messages are refused until room is made")
        elif self.gate is not None and self.gate.share >= WARN_AT:
            waiting = self.retention.last.held_by if self.retention.last else None
            cause = f"; retention waits for {waiting}" if waiting else ""
            found.append(f"the log is at {self.gate.share:.0%} of its budget{cause}")
        found += self.sides.problems()
        found += self.floods.problems()
        found += [
            f"the log went backwards: it was at {each.was} and agrees with the past only up to {each.agreed} "
            f"(noticed {each.noticed}); `tidings space acknowledge` once you have seen to it"
            for each in self.marks.file.regressions
            if not each.acknowledged
        ]
        return found
