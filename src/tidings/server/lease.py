"""Leases: a record in the stream it guards, enforced by the broker. One for the steward, one for durable delivery.

Taking a lease is a compare-and-set on its own subject. Every guarded write states the lease's sequence (`fence`), so a
holder that was paused past a takeover is refused by the broker, however sure of itself it is. The beat in the state
bucket only tells others when to try; it decides nothing.

A stream with replicas is read from whoever answers, who may lag. There a write that was not answered is asked again
until the answer says which record is the newest, and a holder proves itself by a beat, which is a compare-and-set: so
whoever takes over takes the beat first (`replicated`).

`LeaseSteps` has the rules without I/O. `StewardLease` runs them on an event loop, `DeliverLease` over a blocking
connection; each says how its record is written and read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from tidings.errors import ConflictError, LeaseHeld, LeaseLost, LogFull, MalformedRecord, OutcomeUnknown
from tidings.nats import jetstream_api as api
from tidings.nats.errors import ApiError, Refusal
from tidings.nats.jetstream import JetStream
from tidings.nats.jetstream_api import EXPECT_SEQUENCE, Lag, Sleep, Steps
from tidings.nats.jetstream_blocking import BlockingJetStream
from tidings.server.state import Entry, StateApi
from tidings.server.streams import gate_steps
from tidings.wire import rulings
from tidings.wire.message import new_id
from tidings.wire.records import StoredRecord
from tidings.wire.signing import SIGNATURE_HEADER, KeyPair
from tidings.wire.subjects import StateKey, Subjects

#: looks at the beat of a holder within twice its time to live
LOOKS = 10
#: how often a lease is written without an answer before whoever asked for it hears so
UNANSWERED = 3
log = logging.getLogger(__name__)


class Holder(NamedTuple):
    """Who holds a lease, as others see it. Without an id: nobody, or a record that cannot be read."""

    seq: int
    kind: str = ""
    id: str = ""
    pid: int = 0
    host: str = ""

    def __str__(self) -> str:
        if not self.id:
            return "nobody" if not self.seq else f"an unreadable lease at {self.seq}"
        return f"{self.kind} {self.id} (pid {self.pid} on {self.host}, lease {self.seq})"


class LeaseSteps(ABC):
    """Take, keep and prove a lease, as steps."""

    #: whose lease it is, and why it cannot be taken, in sentences
    kind: str
    held: str
    beat_key: StateKey

    def __init__(
        self, stream: str, subject: str, state: StateApi, subjects: Subjects, ttl: float, *, replicated: bool
    ) -> None:
        self.stream, self.subject, self.subjects, self.ttl = stream, subject, subjects, ttl
        self.replicated = replicated
        self.holder_id = new_id()
        self.seq = 0
        #: who held it before us, as its stream says
        self.before = Holder(0)
        self._state = state
        self._beat_revision = 0
        self._beats = 0
        self._beaten = 0.0

    @abstractmethod
    def _record(self) -> tuple[bytes, dict[str, str]]:
        """The lease as it is stored: payload and headers."""

    @abstractmethod
    def _read(self, stored: StoredRecord) -> Holder:
        """Whose a lease is; `MalformedRecord` if it is none."""

    @abstractmethod
    def _about(self) -> dict[str, Any]:
        """What a beat says besides its number."""

    @abstractmethod
    def _make_room(self) -> Steps[object]:
        """The stream has no room for the lease."""

    @property
    def is_fresh(self) -> bool:
        """Did we beat so recently that nobody can have taken over? Needs no round trip."""
        return time.monotonic() - self._beaten < 2 * self.ttl

    @property
    def fence(self) -> dict[str, str]:
        """The headers that make the broker refuse a write once somebody else took over."""
        return api.fence(self.subject, self.seq)

    def current_steps(self) -> Steps[Holder]:
        """Who holds it now, read from the leader."""
        stored = yield from api.last(self.stream, self.subject)
        return self._read_any(stored) if stored is not None else Holder(0)

    def _read_any(self, stored: StoredRecord) -> Holder:
        try:
            return self._read(stored)
        except MalformedRecord:
            return Holder(stored.seq)

    def take_steps(self, *, after: str | None = None) -> Steps[int]:
        """Take the lease. A silent holder is waited out; one that beats is named in `LeaseHeld`.

        `after` is the id of a holder known to be dead: its parent saw it end, so there is nothing to wait for.
        """
        self.before = holder = yield from self.current_steps()
        if holder.seq and not (holder.id and holder.id == after):
            yield from self._wait_for_silence(holder)
        if self.replicated:
            yield from self._take_beat(holder, is_dead=bool(after) and holder.id == after)
        self.seq = yield from self._write(holder.seq)
        if not self.replicated:
            entry = yield from self._state.get(self.beat_key)
            self._beat_revision = entry.revision if entry else 0
        yield from self.beat_steps()
        return self.seq

    def _wait_for_silence(self, holder: Holder) -> Steps[None]:
        """Return once no beat came for twice the time to live. Measured here, so clocks need not agree."""
        first = yield from self._state.get(self.beat_key)
        if first is None or first.value.get("released") == holder.seq:
            return
        for _ in range(LOOKS):
            yield Sleep(2 * self.ttl / LOOKS)
            seen = yield from self._state.get(self.beat_key)
            if seen is not None and seen.value.get("released") == holder.seq:
                return
            if seen is None or seen.revision != first.revision:
                raise LeaseHeld(self.held.format(space=self.subjects.space, holder=holder))
        log.warning("took over from %s: no beat for %.1f s", holder, 2 * self.ttl)

    def _take_beat(self, holder: Holder, *, is_dead: bool) -> Steps[None]:
        """From now on the holder before us cannot prove that it holds the lease. `LeaseHeld` if somebody beats."""
        value = {"lease": holder.seq, "holder": self.holder_id, **self._about(), "takes": True}
        lag = Lag(self.stream, holder.seq)
        entry = yield from self._state.get(self.beat_key)
        while True:
            revision = entry.revision if entry else 0
            try:
                self._beat_revision = yield from self._state.put(self.beat_key, value, revision)
                return
            except ConflictError:
                yield from lag.wait()
            entry = yield from self._state.get(self.beat_key)
            if entry is not None and entry.revision != revision and not self._is_left(entry, holder, is_dead):
                raise LeaseHeld(self.held.format(space=self.subjects.space, holder=holder))

    def _is_left(self, entry: Entry, holder: Holder, is_dead: bool) -> bool:
        """Is a beat that came late one of a holder who is gone?"""
        of = entry.value.get("holder")
        return of == self.holder_id or (of == holder.id and (is_dead or "released" in entry.value))

    def renew_steps(self) -> Steps[int]:
        """Write the lease again, so that every write of ours still in flight under the old one is refused."""
        try:
            self.seq = yield from self._write(self.seq)
        except LeaseHeld as error:
            raise LeaseLost(f"the lease could not be renewed: {error}") from error
        return self.seq

    def _write(self, expected: int) -> Steps[int]:
        payload, headers = self._record()
        made_room, unanswered = False, 0
        lag = Lag(self.stream, expected)
        while True:
            try:
                return (yield from api.publish(self.subject, payload, {**headers, EXPECT_SEQUENCE: str(expected)}))
            except OutcomeUnknown:
                if self.replicated:
                    unanswered += 1
                    if unanswered == UNANSWERED:
                        raise
                    yield from lag.wait()
                    continue
                found = yield from self.current_steps()
                if self._is_ours(found, expected):
                    return found.seq
                if found.seq != expected:
                    raise LeaseHeld(f"the lease went to {found} while its write was unanswered") from None
            except ApiError as error:
                if self.replicated and error.proves_nothing(expected):
                    yield from lag.wait()  # nothing was stored, and nobody is known to be quicker
                    continue
                if error.refusal is Refusal.STALE:
                    found = yield from self._found(error)
                    if self._is_ours(found, expected):
                        return found.seq  # an unanswered write of ours arrived late
                    raise LeaseHeld(f"another {self.kind} was quicker: {found}") from error
                if not error.is_full:
                    raise
                if made_room:
                    raise LogFull(
                        f"{self.stream} has used up its reserve: raise the budget of space {self.subjects.space}"
                    ) from error
                yield from self._make_room()
                made_room = True

    def _found(self, refused: ApiError) -> Steps[Holder]:
        """Whose lease the broker found instead of the one that was expected."""
        if not self.replicated or refused.found is None:
            return (yield from self.current_steps())
        stored = yield from api.at(self.stream, refused.found, replicated=True)
        return self._read_any(stored) if stored else Holder(refused.found)

    def _is_ours(self, found: Holder, after: int) -> bool:
        return found.seq > after and found.id == self.holder_id

    def beat_steps(self) -> Steps[None]:
        """Say that this holder lives. `LeaseLost` if another one said so since."""
        self._beats += 1
        started = time.monotonic()
        yield from self._put({"beat": self._beats})
        self._beaten = started

    def release_steps(self) -> Steps[None]:
        """Say that nobody need wait: the next holder may take over at once."""
        return self._put({"released": self.seq})

    def _put(self, said: Mapping[str, Any]) -> Steps[None]:
        value = {"lease": self.seq, "holder": self.holder_id, **self._about(), **said}
        lag = Lag(self.stream, self.seq)
        while True:
            try:
                self._beat_revision = yield from self._state.put(self.beat_key, value, self._beat_revision)
                return
            except ConflictError as error:
                entry = yield from self._state.get(self.beat_key)
                if not self._is_stale(entry, error):
                    if entry is not None and entry.value.get("holder") == self.holder_id:
                        self._beat_revision = entry.revision  # an unanswered beat of ours had arrived
                        return
                    raise LeaseLost(f"another {self.kind} beats for space {self.subjects.space}") from error
            yield from lag.wait()

    def _is_stale(self, entry: Entry | None, refused: ConflictError) -> bool:
        """Of a state with replicas: was the beat refused, or read, by one that does not know the newest?"""
        if not self.replicated:
            return False
        cause = refused.__cause__
        newest = cause.found if isinstance(cause, ApiError) else None
        return newest is None or newest <= self._beat_revision or entry is None or entry.revision < newest

    def prove_steps(self) -> Steps[Holder]:
        """A real round trip: is the lease still ours? `LeaseLost` if not."""
        if self.replicated:
            yield from self.beat_steps()
            return Holder(self.seq, self.kind, self.holder_id, os.getpid(), socket.gethostname())
        known = self.seq  # a renewal may be answered while we read: what is read may be newer or older than it
        holder = yield from self.current_steps()
        if holder.seq != known and not self._is_ours(holder, known):
            raise LeaseLost(f"space {self.subjects.space} is held by {holder} now")
        return holder


class StewardLease(LeaseSteps):
    """The right to rule: a signed record in the log."""

    kind = "steward"
    held = "space {space} already has a steward: {holder}. Stop it first; two would refuse each other's writes"
    beat_key = StateKey.STEWARD_BEAT

    def __init__(
        self,
        js: JetStream,
        subjects: Subjects,
        space_id: str,
        key: KeyPair,
        *,
        ttl: float = 3.0,
        replicated: bool = False,
    ) -> None:
        where = (subjects.log_stream, subjects.steward_lease)
        super().__init__(*where, StateApi(subjects), subjects, ttl, replicated=replicated)
        self.js, self.space_id, self.key = js, space_id, key
        #: one beat at a time: each states the revision of the one before
        self._beating = asyncio.Lock()

    def _record(self) -> tuple[bytes, dict[str, str]]:
        said = rulings.Lease(
            op=new_id(), holder=self.holder_id, host=socket.gethostname(), pid=os.getpid(), key=self.key.id
        )
        payload = rulings.encode(said)
        signature = rulings.sign_ruling(self.key, self.space_id, self.subjects.tail(self.subject), payload)
        return payload, {SIGNATURE_HEADER: signature}

    def _read(self, stored: StoredRecord) -> Holder:
        found = rulings.decode("lease", stored.payload)
        assert isinstance(found, rulings.Lease)
        return Holder(stored.seq, self.kind, found.holder, found.pid, found.host)

    def _about(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def _make_room(self) -> Steps[object]:
        """A full log must not lock its steward out: close the gate, which adds the reserve."""
        return gate_steps(self.subjects, gate_open=False)

    async def current(self) -> Holder:
        return await self.js.run(self.current_steps())

    async def take(self, *, after: str | None = None) -> int:
        return await self.js.run(self.take_steps(after=after))

    async def renew(self) -> int:
        return await self.js.run(self.renew_steps())

    async def beat(self) -> None:
        async with self._beating:
            await self.js.run(self.beat_steps())

    async def release(self) -> None:
        async with self._beating:
            await self.js.run(self.release_steps())

    async def prove(self) -> Holder:
        if not self.replicated:
            return await self.js.run(self.prove_steps())
        async with self._beating:
            return await self.js.run(self.prove_steps())


class DeliverLease(LeaseSteps):
    """The right to deliver: a record in DLV. Older versions go at once, because DLV bounds records per subject."""

    kind = "pipeline"
    held = "another pipeline delivers for this space (pid {holder.pid} on {holder.host}): stop it first"
    beat_key = StateKey.DELIVER_BEAT

    def __init__(
        self, js: BlockingJetStream, subjects: Subjects, *, ttl: float = 3.0, replicated: bool = False
    ) -> None:
        where = (subjects.delivery_stream, subjects.delivery_lease)
        super().__init__(*where, StateApi(subjects, direct=True), subjects, ttl, replicated=replicated)
        self.js = js
        #: is there a query that delivers? Said with every beat, so that a holder without one does not count as running
        self.delivers = False

    def _record(self) -> tuple[bytes, dict[str, str]]:
        said = {"holder": self.holder_id, "host": socket.gethostname(), "pid": os.getpid()}
        return json.dumps(said).encode(), {}

    def _read(self, stored: StoredRecord) -> Holder:
        try:
            said = json.loads(stored.payload)
            return Holder(stored.seq, self.kind, str(said["holder"]), int(said["pid"]), str(said["host"]))
        except (ValueError, KeyError, TypeError):
            raise MalformedRecord("not a lease") from None

    def _about(self) -> dict[str, Any]:
        return {"host": socket.gethostname(), "pid": os.getpid(), "query": self.delivers}

    def _make_room(self) -> Steps[object]:
        return api.purge(self.stream, subject_filter=self.subject, keep=1)

    def _write(self, expected: int) -> Steps[int]:
        seq = yield from super()._write(expected)
        yield from self._make_room()
        return seq

    def take(self) -> int:
        return self.js.run(self.take_steps())

    def beat(self) -> None:
        self.js.run(self.beat_steps())

    def release(self) -> None:
        self.js.run(self.release_steps())
