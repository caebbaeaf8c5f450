"""Does the broker store what it is sent? Asked by writing where we may, and by purging nothing where we may not.

A stream that met a full disk answers no write until the broker is started again, and says nothing of it in its state.
Something is written to the state bucket and read back; into a log that does not grow the lease is written again. The
other streams are asked to remove what nobody could have written: one that keeps an error refuses even that, one that is
well costs less than a millisecond. What is found is a problem in `status`, and the supervisor is asked to start the
broker again once the disk has room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tidings.errors import LeaseLost, OutcomeUnknown, TidingsError
from tidings.nats.errors import NO_STREAM, ApiError
from tidings.server.disk import DiskReserve
from tidings.steward.context import Lifecycle, SpaceContext
from tidings.steward.writer import RulingWriter
from tidings.wire.message import new_id

LOOK_EVERY, PATIENCE = 1.0, 1.5
#: one token behind the kind: every subject of ours has more, so nobody can write it and no consumer reads it
NOTHING = "probe"
UNWRITABLE = (
    "it met a full disk and is started again by `tidings up`, or its store cannot be written: `tidings logs broker`"
)
log = logging.getLogger(__name__)


class WriteProbe:
    def __init__(
        self,
        space: SpaceContext,
        writer: RulingWriter,
        disk: DiskReserve,
        life: Lifecycle,
        unwritten: Callable[[str], Awaitable[None]],
    ) -> None:
        """`unwritten`: hears that a write was not answered."""
        self.space = space
        self.writer = writer
        self.disk = disk
        self.life = life
        self._unwritten = unwritten
        s = space.subjects
        self._kinds = {
            s.direct_stream: "dm",
            s.task_stream: "task",
            s.delivery_stream: "dlv",
            s.audit_stream: "aud",
            s.dead_stream: "dead",
        }
        self._looked = float("-inf")
        #: stream -> the error it keeps
        self._stuck: dict[str, str] = {}
        #: when something was written and read back for the last time, and what was wrong with it
        self._written: tuple[float, str | None] | None = None
        self._log_head = 0
        self._log_grew = time.monotonic()
        self._renewal: asyncio.Task[None] | None = None

    async def look(self, log_head: int) -> str | None:
        """What is wrong with writing now, for whoever asks how the space is; each part at most once a second."""
        problem = await self._write() or await self._write_log(log_head)
        if time.monotonic() - self._looked >= LOOK_EVERY:
            with suppress(OutcomeUnknown):  # a stream that is busy is not called stuck
                await self.run()
        return problem

    async def run(self) -> None:
        """Look for streams that keep a write error."""
        self._looked = time.monotonic()
        self._stuck = {s: why for s, kind in self._kinds.items() if (why := await self._error_of(s, kind))}
        if self._stuck and self.disk.look().can_start:
            await self._unwritten(", ".join(f"{stream}: {why}" for stream, why in self._stuck.items()))

    async def _error_of(self, stream: str, kind: str) -> str | None:
        nothing = {"filter": f"{self.space.subjects.root}.{kind}.{NOTHING}"}
        try:
            await self.space.js.api(f"STREAM.PURGE.{stream}", nothing, timeout=PATIENCE)
        except ApiError as error:
            if error.err_code == NO_STREAM:
                raise
            return error.description.rpartition(": ")[2] or "it does not say which"  # without paths of this machine
        return None

    async def _write(self) -> str | None:
        """Write something to the state bucket and read it back."""
        if self._written is not None and time.monotonic() - self._written[0] < LOOK_EVERY:
            return self._written[1]
        bucket, said = self.space.subjects.state_bucket, new_id().encode()
        problem = None
        try:
            await self.space.js.publish(f"$KV.{bucket}.probe", said, timeout=PATIENCE)
            stored = await self.space.js.last(f"KV_{bucket}", f"$KV.{bucket}.probe")
            if stored is None or stored.payload != said:
                problem = "the broker acknowledged a write and does not have it: `tidings logs broker`"
        except TidingsError as error:
            problem = f"the broker answers and stores nothing ({error}): {self._likely_cause()}"
        self._written = time.monotonic(), problem
        return problem

    async def _write_log(self, head: int) -> str | None:
        """A log that grows does store; into one that does not grow the lease is written again."""
        if head > self._log_head:
            self._log_head, self._log_grew = head, time.monotonic()
        if self._renewal is None and time.monotonic() - self._log_grew < self.space.intervals.log_write:
            return None
        self._renewal = self._renewal or self.life.spawn(self._renew())
        # never cancelled: a lease of unknown outcome would be a lost one
        done, _ = await asyncio.wait({self._renewal}, timeout=PATIENCE)
        if not done:
            await self._unwritten("the lease could not be written again")
            return f"the broker answers and the log stores nothing: {self._likely_cause()}"
        self._renewal, self._log_grew = None, time.monotonic()
        return None

    async def _renew(self) -> None:
        try:
            async with self.writer.lock:
                await self.writer.lease.renew()
        except LeaseLost as error:
            self.life.fail(error)
        except TidingsError as error:
            log.warning("the lease could not be written again: %s", error)

    def _likely_cause(self) -> str:
        room = self.disk.look()
        return str(room) if room.is_short else UNWRITABLE

    def problems(self) -> list[str]:
        return [
            f"{stream} keeps an error of its disk and stores nothing ({why}): `tidings up` starts the broker again "
            "once there is room"
            for stream, why in self._stuck.items()
        ]
