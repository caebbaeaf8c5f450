"""The receiving session of an identity: the newest one receives, the older one is told.

    await lease.ensure()             # before receiving anything; Superseded if a newer session does
    lease.superseded                 # an event: set once, for ever

Only receiving takes it; sending, history and `who` need none. If the steward is away it is taken when it is back.
While it is held the steward hears so now and then, and hears when it ends: a superseded session may ask for that
(`ended`), so that whoever has a program's mail while that is away has it again.
Rows of the roster carry the number of the session that receives, so a superseded one learns it from any row of its
own; a steward that forgot the number is told it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tidings.client.connection import AgentConnection
from tidings.client.roster import Roster
from tidings.contract.agents import EndedSessionRequest, ReleaseSessionRequest, TakeSessionRequest
from tidings.errors import OutcomeUnknown, Superseded, TidingsError, UnreachableError
from tidings.nats.errors import NatsError
from tidings.rpc.control import encode_request
from tidings.util.task_ends import end_tasks
from tidings.wire.message import new_id
from tidings.wire.roster import AgentEntry

#: how often the steward hears that a session is held, per time to live of presence
RENEWALS_PER_TTL = 2.5
#: the first time soon: of who never said that it lives silence proves nothing
FIRST_RENEWAL = 1.0


class SessionLease:
    """`after`: take it only in the place of the session of this number, which ended; None takes it from anybody.

    `resumes`: the number of the session before this one, of the same program: it goes on, unless there is a newer one.
    """

    def __init__(
        self,
        connection: AgentConnection,
        roster: Roster,
        report: Callable[[str, Any], None],
        *,
        after: int | None = None,
        resumes: int | None = None,
    ) -> None:
        self.connection, self.roster = connection, roster
        self.session = new_id()
        self.number: int | None = None
        self.superseded = asyncio.Event()
        #: hear how many frames the session before this one had in hand and did not settle
        self.on_taken: Callable[[int], None] | None = None
        #: hear the number whenever it is another one
        self.on_number: Callable[[int], None] | None = None
        self._report = report
        self._wanted = False
        self._after, self._resumes = after, resumes
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        roster.on_own_row.append(self._saw)

    async def ensure(self) -> int | None:
        """Receive from now on. None if the steward is away: then the number comes later."""
        if not self._wanted:
            self._wanted = True
            self._renewing = asyncio.create_task(
                self._renew(), name=f"receiving session of {self.connection.identity.name}"
            )
            try:
                await self._take()
            except (UnreachableError, OutcomeUnknown):
                return None
        self.check()
        return self.number

    def check(self) -> None:
        if self.superseded.is_set():
            raise Superseded(
                f"a newer session of {self.connection.identity.name} receives now; this one can still send"
            )

    async def _take(self) -> None:
        async with self._lock:
            if self.superseded.is_set():
                return
            before = self.number
            number = self._resumes if before is None else before
            ended = self._after if number is None else None
            answer = await self.connection.call(TakeSessionRequest(self.session, number, ended))
            if answer.superseded:
                self._lose()
            else:
                self.number = answer.number
                if self.on_number is not None and self.number != before:
                    self.on_number(self.number)
                if self.on_taken is not None and before is None:
                    self.on_taken(answer.unsettled)

    def _saw(self, row: AgentEntry) -> None:
        """Our own row: does it name our session?"""
        if not self._wanted or self.superseded.is_set():
            return
        if self.number is not None and row.session == self.number:
            return
        if self.number is not None and row.session is not None and row.session > self.number:
            self._lose()
        elif self._task is None or self._task.done():
            self._task = asyncio.create_task(self._take_again())

    async def _take_again(self) -> None:
        try:
            await self._take()
        except (UnreachableError, OutcomeUnknown):
            return  # the next row of ours, at the latest of the next snapshot, tries again
        except TidingsError as error:
            self._report("error", error)

    def _lose(self) -> None:
        self.superseded.set()
        self._report("superseded", self.number)

    async def _renew(self) -> None:
        pause = FIRST_RENEWAL
        while not self.superseded.is_set():
            await asyncio.sleep(min(pause, self.roster.ttl / RENEWALS_PER_TTL))
            with suppress(TidingsError):  # boundary: whoever refuses says so where it is asked for
                await self._take()
            pause = self.roster.ttl

    async def ended(self) -> int | None:
        """The number of the session that received last, if that ended; None while it may live."""
        return (await self.connection.call(EndedSessionRequest())).ended

    async def close(self) -> None:
        """Release the session, also if `take` was not answered yet: the steward may have granted it."""
        wanted, self._wanted = self._wanted, False  # a row of ours that comes from now on takes nothing again
        await end_tasks([self._task, self._renewing])
        if not wanted or self.superseded.is_set():
            return
        subject = self.connection.identity.subjects.control("session", self.connection.identity.id)
        with suppress(TidingsError, NatsError, OSError, TimeoutError):
            connection = self.connection.current
            await connection.publish(subject, encode_request(ReleaseSessionRequest(self.session), None))
            await connection.flush(timeout=1)
