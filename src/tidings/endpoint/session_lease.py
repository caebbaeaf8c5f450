"""The receiving session of an identity: the newest one receives, the older one is told.

    await lease.ensure()             # before receiving anything; Superseded if a newer session does
    lease.superseded                 # an event: set once, for ever

Only receiving takes it; sending, history and `who` need none. If the steward is away it is taken when it is back.
Rows of the roster carry the number of the session that receives, so a superseded one learns it from any row of its
own; a steward that forgot the number is told it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tidings.broker.ending import end_tasks
from tidings.endpoint.roster import Roster
from tidings.endpoint.supervision import Supervision
from tidings.errors import OutcomeUnknown, Superseded, TidingsError, UnreachableError
from tidings.wire.ids import new_id
from tidings.wire.roster import Agent


class SessionLease:
    def __init__(self, link: Supervision, roster: Roster, report: Callable[[str, Any], None]) -> None:
        self.link = link
        self.session = new_id()
        self.number: int | None = None
        self.superseded = asyncio.Event()
        #: hear how many frames the session before this one had in hand and did not settle
        self.on_taken: Callable[[int], None] | None = None
        self._report = report
        self._wanted = False
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        roster.on_own_row.append(self._saw)

    async def ensure(self) -> int | None:
        """Receive from now on. None if the steward is away: then the number comes later."""
        if not self._wanted:
            self._wanted = True
            try:
                await self._take()
            except (UnreachableError, OutcomeUnknown):
                return None
        self.check()
        return self.number

    def check(self) -> None:
        if self.superseded.is_set():
            raise Superseded(f"a newer session of {self.link.identity.name} receives now; this one can still send")

    async def _take(self) -> None:
        async with self._lock:
            if self.superseded.is_set():
                return
            held: dict[str, Any] = {} if self.number is None else {"held": self.number}
            answer = await self.link.call("session", "take", session=self.session, **held)
            if answer["superseded"]:
                self._lose()
            else:
                self.number = int(answer["number"])
                if self.on_taken is not None and not held:
                    self.on_taken(int(answer.get("unsettled", 0)))

    def _saw(self, row: Agent) -> None:
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

    async def close(self) -> None:
        await end_tasks([self._task])
