"""`HostTasks`: the tasks that a program holds through the host, as `client/tasks.py` is for a direct connection.

The host claims a task for the program's session. It beats for the task while the program reports that it lives, and
gives the task back when the session ends or falls silent. A `Job` calls `finish` and `give_up` here.
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

#: seconds between reports that a worker lives, and without one until the host gives its task back
REPORT_EVERY, SILENCE = 5.0, 30.0
#: seconds between reports for a claim without `silence`, which the host gives back after a quarter of an hour
SLOW_REPORT_EVERY = 120.0
LONGEST_SETTLING = 86_400.0
#: seconds that the host always allows the steward for an answer
CALL_PATIENCE = 5.0


class HostTasks:
    """The tasks that a program holds through the host."""

    def __init__(self, transport: HostTransport) -> None:
        self.transport = transport
        self._open: dict[str, Job] = {}
        #: number of calls that wait for a task
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
            # the host gives a task back if the program stopped waiting, unless the answer was already sent
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
        if job is not None:  # it was given back meanwhile, and is claimed for us a second time
            self._lose(job, f"task {job.message.id} was given back and claimed again")
        return self._begin(found, REPORT_EVERY if silence else SLOW_REPORT_EVERY)

    async def claimed(self, message_id: str) -> Job:
        """Returns a held task. Claims it again if an earlier program of a borrowed session claimed it."""
        job = self._open.get(message_id)
        if job is None:
            held = (await self.transport.call(contract.HeldTaskRequest())).held
            if held and held.mine and held.id == message_id:
                job = await self.claim(held.role, 0.0)
        if job is None or job.message.id != message_id:
            raise UnknownMessage(f"this session holds no task {message_id[:64]}: it ended or another session holds it")
        return job

    def _begin(self, found: contract.HeldTask, every: float) -> Job:
        asker = Sender(found.asker.id, found.asker.name)
        message = read_document(found.message)
        place = found.seq, found.role, found.attempt
        job = Job(*place, found.deadline, message, asker, self, found.origin_id)
        self._open[message.id] = job
        job._beating = asyncio.create_task(self._report_life(job, every))
        return job

    async def _report_life(self, job: Job, every: float) -> None:
        """Reports to a running host that this program lives. A task that the host no longer holds is lost."""
        while not job.settled:
            await asyncio.sleep(every)
            try:
                held = (await self.transport.call(contract.HeldTaskRequest(), starts=False)).held
            except UnreachableError:
                continue  # asked again; a host that stopped has given the task back
            except TidingsError as error:  # the session ended, and the host gave the task back
                self._lose(job, str(error))
                return
            if not held or not held.mine or held.id != job.message.id:
                self._lose(job, f"the host no longer holds task {job.message.id} for this program")
                return

    def _lose(self, job: Job, why: str) -> None:
        """Records that the job is no longer ours. The host refuses to finish it."""
        job.lost = why
        self._open.pop(job.message.id, None)
        if job._beating not in (None, asyncio.current_task()):
            job._beating.cancel()
        self.transport.events.emit("error", ConflictError(why))

    async def _give_back_unseen(self) -> None:
        """Gives back a task that the host claimed for a cancelled call. Keeps it if another call has returned it, or if
        another call waits for a task and will get this one."""
        with suppress(TidingsError):
            held = (await self.transport.call(contract.HeldTaskRequest(), starts=False)).held
            if held and held.mine and held.id not in self._open and not self._claiming:
                await self.transport.call(contract.GiveUpTaskRequest(held.id, "the call that claimed it was cancelled"))

    async def finish(self, job: Job, text: str | None, data: Any) -> None:
        check_said(text, more=True)
        data = None if data is None else json_value(data)
        await self._settle(job, contract.FinishTaskRequest(job.message.id, text, data))

    async def give_up(self, job: Job, reason: str, *, retry: bool, untouched: bool = False) -> str:
        request = contract.GiveUpTaskRequest(job.message.id, reason or "no reason was given", retry, untouched)
        return (await self._settle(job, request)).state

    async def _settle(self, job: Job, request: Request[contract.SettleTaskAnswer]) -> contract.SettleTaskAnswer:
        """Waits for an unreachable space until the deadline. The host continues to retry if we stop waiting."""
        if job.settled:
            raise UsageError(f"task {job.seq} has already been finished or given back")
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
        """Gives back held tasks, in bounded time. The end of the session gives back any that are left."""
        for job in list(self._open.values()):
            with suppress(TidingsError, TimeoutError):
                async with asyncio.timeout(2):
                    await self.give_up(job, "left unfinished", retry=True)
            self._end(job)
        await end_tasks(self._undoing)
