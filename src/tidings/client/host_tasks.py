"""Tasks of an agent at the host: asked through its outbox, claimed and held by the host for this program's session.

It is what a `Job` and a `TaskTicket` stand on there, as `client/tasks.py` is for a direct connection. The host beats
for what is held while this program says that it lives, and gives it back when the session ends or falls silent.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tidings.client.host_http import json_value
from tidings.client.message_json import read_document
from tidings.client.tasks import Job
from tidings.contract import host as contract
from tidings.contract.core import Request
from tidings.errors import (
    ConflictError,
    DeniedError,
    TidingsError,
    UnknownMessage,
    UnreachableError,
    UsageError,
)
from tidings.util.task_ends import end_tasks
from tidings.wire.message import Sender, check_said

if TYPE_CHECKING:
    from tidings.client.host_transport import HostTransport

#: how often the host hears that a program lives which holds a task, and after how long without that it gives it back
SIGN_EVERY, SILENCE = 5.0, 30.0
#: the same for what was claimed without saying so: the host gives it back after a quarter of an hour
QUIET_SIGN_EVERY = 120.0
LONGEST_SETTLING = 86_400.0
#: seconds that the host waits for a steward in any case
CALL_PATIENCE = 5.0


class HostTasks:
    """The tasks that a program holds through the host: what a `Job` needs to go on."""

    def __init__(self, transport: HostTransport) -> None:
        self.transport = transport
        self._open: dict[str, Job] = {}
        #: how many calls wait for a task
        self._claiming = 0
        self._undoing: set[asyncio.Task[None]] = set()

    async def claim(
        self, role: str, wait: float, *, take_over: bool = False, silence: float | None = None
    ) -> Job | None:
        request = contract.ClaimTaskRequest(role, wait, take_over, silence)
        self._claiming += 1
        try:
            found = (await self.transport.call(request)).task
        except asyncio.CancelledError:
            # the host gives back what its program did not wait for, unless the answer was on its way already
            self._undoing.add(undoing := asyncio.create_task(self._give_back_unseen()))
            undoing.add_done_callback(self._undoing.discard)
            raise
        finally:
            self._claiming -= 1
        if found is None:
            return None
        job = self._open.get(found.id)
        if job is not None and job.attempt == found.attempt:
            return job
        if job is not None:  # it was given back meanwhile, and came to us once more
            self._lose(job, f"task {job.message.id} was given back and claimed anew")
        return self._begin(found, SIGN_EVERY if silence else QUIET_SIGN_EVERY)

    async def claimed(self, message_id: str) -> Job:
        """One that an earlier program of a borrowed session claimed is claimed again, which changes nothing."""
        job = self._open.get(message_id)
        if job is None:
            held = (await self.transport.call(contract.HeldTaskRequest())).held
            if held and held.mine and held.id == message_id:
                job = await self.claim(held.role, 0.0)
        if job is None or job.message.id != message_id:
            raise UnknownMessage(f"this session holds no task {message_id[:64]}: it was given back, or is another's")
        return job

    def _begin(self, found: contract.HeldTask, every: float) -> Job:
        asker = Sender(found.asker.id, found.asker.name)
        message = read_document(found.message)
        place = found.seq, found.role, found.attempt
        job = Job(*place, found.deadline, message, asker, self, found.origin_id)
        self._open[message.id] = job
        job._beating = asyncio.create_task(self._show_life(job, every))
        return job

    async def _show_life(self, job: Job, every: float) -> None:
        """Let the host hear that this program lives, which never starts one. What it does not hold any more is lost."""
        while not job.settled:
            await asyncio.sleep(every)
            try:
                held = (await self.transport.call(contract.HeldTaskRequest(), starts=False)).held
            except UnreachableError:
                continue  # it is asked again; one that stopped has given back what it held
            except TidingsError as error:  # the session ended, and with it what it held
                self._lose(job, str(error))
                return
            if not held or not held.mine or held.id != job.message.id:
                self._lose(job, f"the host does not hold task {job.message.id} for this program any more")
                return

    def _lose(self, job: Job, why: str) -> None:
        """It is not ours any more. Whoever settles it hears so from the host."""
        job.lost = why
        self._open.pop(job.message.id, None)
        if job._beating not in (None, asyncio.current_task()):
            job._beating.cancel()
        self.transport.events.emit("error", ConflictError(why))

    async def _give_back_unseen(self) -> None:
        """What came for a call that was given up. One that is held already came by another call, which was not; and
        whoever else waits for a task gets this one."""
        with suppress(TidingsError):
            held = (await self.transport.call(contract.HeldTaskRequest(), starts=False)).held
            if held and held.mine and held.id not in self._open and not self._claiming:
                await self.transport.call(contract.GiveUpTaskRequest(held.id, "the call that claimed it was given up"))

    async def finish(self, job: Job, text: str | None, data: Any) -> None:
        check_said(text, more=True)
        data = None if data is None else json_value(data)
        await self._settle(job, contract.FinishTaskRequest(job.message.id, text, data))

    async def give_up(self, job: Job, reason: str, *, retry: bool, untouched: bool = False) -> str:
        request = contract.GiveUpTaskRequest(job.message.id, reason or "no reason was given", retry, untouched)
        return (await self._settle(job, request)).state

    async def _settle(self, job: Job, request: Request[contract.SettleTaskAnswer]) -> contract.SettleTaskAnswer:
        """A space that is away is waited for, until the deadline; the host goes on trying when we do not."""
        if job.settled:
            raise UsageError(f"task {job.seq} is settled already")
        try:
            patience = min(LONGEST_SETTLING, max(0.0, job.deadline - time.time()))
            answer = await self.transport.call(request, timeout=CALL_PATIENCE + patience)
        except (ConflictError, DeniedError, UnknownMessage) as error:
            job.lost = str(error)
            self._end(job)
            raise
        self._end(job)
        return answer

    def _end(self, job: Job) -> None:
        job._ended.set()
        self._open.pop(job.message.id, None)
        if job._beating is not None:
            job._beating.cancel()

    async def close(self) -> None:
        """Give back what is still held, in bounded time; what cannot be said now the end of the session says."""
        for job in list(self._open.values()):
            with suppress(TidingsError, TimeoutError):
                async with asyncio.timeout(2):
                    await self.give_up(job, "left unfinished", retry=True)
            self._end(job)
        await end_tasks(self._undoing)
