"""The steward's lease: a record in the log it guards, enforced by the broker.

Taking it is a compare-and-set on its own subject. Every ruling states the lease's sequence, so a holder that was
paused past a takeover is refused by the broker, however sure of itself it is. The beat in the state bucket only
tells others when to try; it decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from tidings.broker.answers import EXPECT_SEQUENCE, EXPECT_SUBJECT, NO_ROOM, WRONG_LAST_SEQUENCE, ApiError
from tidings.broker.jetstream import JetStream
from tidings.broker.streams import set_gate
from tidings.errors import ConflictError, LeaseHeld, LeaseLost, LogFull, MalformedRecord, OutcomeUnknown
from tidings.space.state import StateBucket
from tidings.wire import rulings
from tidings.wire.ids import new_id
from tidings.wire.keys import KeyPair
from tidings.wire.rulings import Lease
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.subjects import Subjects

BEAT_KEY = "beat.steward"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the lease, as others see it."""

    seq: int
    lease: Lease | None

    def __str__(self) -> str:
        if self.lease is None:
            return "nobody" if not self.seq else f"an unreadable lease at {self.seq}"
        return f"steward {self.lease.holder} (pid {self.lease.pid} on {self.lease.host}, lease {self.seq})"


class StewardLease:
    """Take, keep and prove the lease of one space."""

    def __init__(self, js: JetStream, subjects: Subjects, space_id: str, key: KeyPair, *, ttl: float = 3.0) -> None:
        self.js = js
        self.subjects = subjects
        self.space_id = space_id
        self.key = key
        self.ttl = ttl
        self.holder_id = new_id()
        self.seq = 0
        self._state = StateBucket(js, subjects)
        self._beat_revision = 0
        self._beats = 0
        self._beaten = 0.0

    @property
    def is_fresh(self) -> bool:
        """Did we beat so recently that nobody can have taken over? Needs no round trip."""
        return time.monotonic() - self._beaten < 2 * self.ttl

    @property
    def fence(self) -> dict[str, str]:
        """The headers that make the broker refuse a write once somebody else took over."""
        return {EXPECT_SEQUENCE: str(self.seq), EXPECT_SUBJECT: self.subjects.steward_lease}

    async def current(self) -> Holder:
        """Who holds it now, read from the leader."""
        stored = await self.js.last(self.subjects.log_stream, self.subjects.steward_lease)
        if stored is None:
            return Holder(0, None)
        try:
            found = rulings.decode("lease", stored.payload)
        except MalformedRecord:
            return Holder(stored.seq, None)
        return Holder(stored.seq, found if isinstance(found, Lease) else None)

    async def take(self, *, after: str | None = None) -> int:
        """Take the lease. A silent holder is waited out; one that beats is named in LeaseHeld.

        `after` is the id of a holder known to be dead: its parent saw it end, so there is nothing to wait for.
        """
        holder = await self.current()
        if holder.seq and not (holder.lease and holder.lease.holder == after):
            await self._wait_for_silence(holder)
        self.seq = await self._write(holder.seq)
        await self._first_beat()
        return self.seq

    async def _wait_for_silence(self, holder: Holder) -> None:
        """Return once no beat came for twice the time to live. Measured here, so clocks need not agree."""
        first = await self._state.get(BEAT_KEY)
        if first is None or first.value.get("released") == holder.seq:
            return
        deadline = time.monotonic() + 2 * self.ttl
        while time.monotonic() < deadline:
            await asyncio.sleep(self.ttl / 5)
            seen = await self._state.get(BEAT_KEY)
            if seen is not None and seen.value.get("released") == holder.seq:
                return
            if seen is None or seen.revision != first.revision:
                raise LeaseHeld(
                    f"space {self.subjects.space} already has a steward: {holder}. "
                    "Stop it first; two would refuse each other's writes"
                )
        log.warning("took over from %s: no beat for %.1f s", holder, 2 * self.ttl)

    async def renew(self) -> int:
        """Write the lease again, so that every write of ours still in flight under the old one is refused."""
        try:
            self.seq = await self._write(self.seq)
        except LeaseHeld as error:
            raise LeaseLost(f"the lease could not be renewed: {error}") from error
        return self.seq

    async def _write(self, expected: int) -> int:
        record = Lease(op=new_id(), holder=self.holder_id, host=socket.gethostname(), pid=os.getpid(), key=self.key.id)
        payload = rulings.encode(record)
        tail = self.subjects.tail(self.subjects.steward_lease)
        headers = {
            SIGNATURE_HEADER: rulings.sign_ruling(self.key, self.space_id, tail, payload),
            EXPECT_SEQUENCE: str(expected),
        }
        closed = False
        while True:
            try:
                return await self.js.publish(self.subjects.steward_lease, payload, headers)
            except OutcomeUnknown:
                found = await self.current()
                if self._is_ours(found, expected):
                    return found.seq
                if found.seq != expected:
                    raise LeaseHeld(f"the lease went to {found} while its write was unanswered") from None
            except ApiError as error:
                if error.err_code == WRONG_LAST_SEQUENCE:
                    found = await self.current()
                    if self._is_ours(found, expected):
                        return found.seq  # an unanswered write of ours arrived late
                    raise LeaseHeld(f"another steward was quicker: {found}") from error
                if error.err_code != NO_ROOM:
                    raise
                # A full log must not lock its steward out: close the gate, which adds the reserve.
                if closed:
                    raise LogFull(
                        f"the log of {self.subjects.space} has used up its reserve: raise its budget"
                    ) from error
                await set_gate(self.js, self.subjects, gate_open=False)
                closed = True

    def _is_ours(self, found: Holder, after: int) -> bool:
        return found.seq > after and found.lease is not None and found.lease.holder == self.holder_id

    async def _first_beat(self) -> None:
        entry = await self._state.get(BEAT_KEY)
        self._beat_revision = entry.revision if entry else 0
        await self.beat()

    async def beat(self) -> None:
        """Say that this holder lives. Raises LeaseLost if another one said so since."""
        self._beats += 1
        started = time.monotonic()
        await self._put({"lease": self.seq, "holder": self.holder_id, "pid": os.getpid(), "beat": self._beats})
        self._beaten = started

    async def release(self) -> None:
        """Say that nobody need wait: the next steward may take over at once."""
        await self._put({"lease": self.seq, "holder": self.holder_id, "released": self.seq})

    async def _put(self, value: dict[str, Any]) -> None:
        try:
            self._beat_revision = await self._state.put(BEAT_KEY, value, self._beat_revision)
        except ConflictError as error:
            entry = await self._state.get(BEAT_KEY)
            if entry is not None and entry.value.get("holder") == self.holder_id:
                self._beat_revision = entry.revision  # an unanswered beat of ours had arrived
                return
            raise LeaseLost(f"another steward beats for space {self.subjects.space}") from error

    async def prove(self) -> Holder:
        """A real round trip: is the lease in the log still ours? Raises LeaseLost if not."""
        holder = await self.current()
        if holder.seq != self.seq and not self._is_ours(holder, self.seq):  # ours: a renewal is under way
            raise LeaseLost(f"space {self.subjects.space} is held by {holder} now")
        return holder
