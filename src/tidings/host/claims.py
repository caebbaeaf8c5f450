"""Tasks in the hands of programs: each is held for the session that claimed it, and the host beats for it.

An agent holds one task at a time, whichever of its programs has it. A session that claims again gets the one it holds;
one that ends, or has not said a word for a quarter of an hour (or as long as its program said when it claimed), gives
it back: nobody beats for a program that is gone. A program that knows that another one of its agent is gone need not
wait for that: it may take over what that one held.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tidings.client.direct_transport import DirectAgent
from tidings.client.tasks import LONG_POLL, Job
from tidings.errors import TidingsError, UnknownMessage
from tidings.host.registry import Scope
from tidings.host.sessions import HostSession
from tidings.util.task_ends import end_tasks

#: a session that holds a task says something at least this often, unless it promised more
SILENCE = 900.0
SWEEP = 15.0
GIVE_BACK = 2.0
LEFT = "its program left while it waited"
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Claim:
    session: str
    program: str
    job: Job
    #: seconds without a word that end it
    silence: float


class Claims:
    """What is held. `heard` is told of every request of a session; `silence`: seconds without one that end a claim."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, silence: float = SILENCE) -> None:
        self._clock, self._silence = clock, silence
        self._held: dict[Scope, Claim] = {}
        self._heard: dict[str, float] = {}
        self._asking: dict[Scope, asyncio.Lock] = {}
        self._returning: dict[Scope, asyncio.Task[None]] = {}
        self._withdrawing: dict[Scope, asyncio.Task[None]] = {}
        #: who waits at a steward for a task, and as what
        self._polling: dict[Scope, tuple[DirectAgent, str]] = {}
        self._closed = False

    def heard(self, session: HostSession) -> None:
        self._heard[session.id] = self._clock()

    def held(self, scope: Scope) -> Claim | None:
        claim = self._held.get(scope)
        if claim is not None and claim.job.settled:
            del self._held[scope]
            return None
        return claim

    def silent(self, claim: Claim) -> float:
        """Seconds since its program was heard."""
        return self._clock() - self._heard.get(claim.session, -math.inf)

    async def claim(
        self,
        session: HostSession,
        endpoint: DirectAgent,
        role: str,
        wait: float,
        silence: float | None = None,
        *,
        take_over: bool = False,
    ) -> Job | None:
        """A task for this session; None if none came, or another session of the agent has one.

        `silence`: seconds without a word that end it, if other than usual. `take_over`: what another session of the
        agent holds is this session's, and the other one's no more.
        """
        silence = silence or self._silence
        until = self._clock() + wait
        if take_over and (claim := self.held(session.scope)) is not None:  # whoever waits meanwhile is not waited for
            claim.session, claim.program, claim.silence = session.id, session.program, silence
            return claim.job
        lock = self._asking.setdefault(session.scope, asyncio.Lock())
        try:
            async with asyncio.timeout(wait + 1.0):
                await lock.acquire()
        except TimeoutError:
            return None
        try:
            await end_tasks([self._withdrawing.pop(session.scope, None)])
            if (returning := self._returning.get(session.scope)) is not None:
                # the steward would hand out once more what is just being given back
                await asyncio.wait({returning})
            while (claim := self.held(session.scope)) is not None:
                if take_over:
                    claim.session, claim.program, claim.silence = session.id, session.program, silence
                if claim.session == session.id:
                    return claim.job
                if not await self._ended(claim, until - self._clock()):
                    return None
            job = await self._claim(session, endpoint, role, until)
            if job is not None:
                self._hold(session, Claim(session.id, session.program, job, silence))
            return job
        finally:
            lock.release()

    async def _claim(self, session: HostSession, endpoint: DirectAgent, role: str, until: float) -> Job | None:
        while session.id in self._heard and not self._closed:
            left = max(0.0, until - self._clock())
            self._polling[session.scope] = (endpoint, role)
            try:
                job = await endpoint.claim(role, min(LONG_POLL, left))
            except asyncio.CancelledError:
                self._start_withdrawing(session.scope, endpoint, role)
                raise
            finally:
                self._polling.pop(session.scope, None)
            if job is not None or self._clock() >= until:
                return job
        return None

    def _start_withdrawing(self, scope: Scope, endpoint: DirectAgent, role: str) -> None:
        self._withdrawing[scope] = asyncio.get_running_loop().create_task(self._withdraw(scope, endpoint, role))

    def _hold(self, session: HostSession, claim: Claim) -> None:
        self._held[session.scope] = claim
        if session.id in self._heard:
            self.heard(session)
        else:  # it ended while it waited
            self._return(session.scope, claim, "its session ended")

    async def _ended(self, claim: Claim, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await claim.job._ended.wait()
        return claim.job.settled

    def job(self, session: HostSession, message_id: str) -> Job:
        """The task of that id in the hands of this session."""
        claim = self.held(session.scope)
        if claim is None or claim.session != session.id or claim.job.message.id != message_id:
            raise UnknownMessage(f"this session holds no task {message_id[:64]}: it ended or another session holds it")
        return claim.job

    def left(self, session: HostSession, job: Job) -> None:
        """Its program was gone when this came."""
        claim = self.held(session.scope)
        if claim is not None and claim.job is job and claim.session == session.id:
            self._return(session.scope, claim, LEFT)

    def ended(self, session: HostSession) -> None:
        """A session is over: what it holds is another worker's."""
        self._heard.pop(session.id, None)
        claim = self.held(session.scope)
        if claim is not None and claim.session == session.id:
            self._return(session.scope, claim, "its session ended")

    def _return(self, scope: Scope, claim: Claim, why: str) -> None:
        log.info("task %s of %s in %s is given back: %s", claim.job.seq, scope.name, scope.space, why)
        self._held.pop(scope, None)
        self._start_returning(scope, claim.job, why)

    def _start_returning(self, scope: Scope, job: Job, why: str) -> None:
        task = asyncio.get_running_loop().create_task(self._give_back(job, why))
        self._returning[scope] = task
        task.add_done_callback(lambda ended: self._returned(scope, ended))

    def _returned(self, scope: Scope, ended: asyncio.Task[None]) -> None:
        if self._returning.get(scope) is ended:
            del self._returning[scope]

    async def _withdraw(self, scope: Scope, endpoint: DirectAgent, role: str) -> None:
        """Nobody waits here any more, and the steward would still hand out to us: a question without patience takes
        the place of the one it has, and what it hands out by then is given back. The next who asks ends this, and gets
        that itself."""
        with suppress(TidingsError, TimeoutError):
            async with asyncio.timeout(GIVE_BACK):
                job = await endpoint.claim(role, 0.0)
            if job is not None:
                self._start_returning(scope, job, LEFT)

    async def _give_back(self, job: Job, why: str) -> None:
        with suppress(TidingsError, TimeoutError):  # the steward notices the silence
            async with asyncio.timeout(GIVE_BACK):
                await job.fail(f"left unfinished: {why}")

    async def sweep(self) -> None:
        """For ever: give back what silent sessions hold."""
        while True:
            await asyncio.sleep(SWEEP)
            self.sweep_once()

    def sweep_once(self) -> None:
        for scope in list(self._held):
            claim = self.held(scope)
            if claim is not None and self.silent(claim) > claim.silence:
                self._return(scope, claim, f"its program said nothing for {claim.silence:.0f} s")

    async def close(self) -> None:
        """Give everything back, in bounded time. A steward that still waits to hand out to us is told, too."""
        self._closed = True
        for scope, (endpoint, role) in self._polling.items():
            self._start_withdrawing(scope, endpoint, role)
        withdrawing = list(self._withdrawing.values())
        if withdrawing:
            await asyncio.wait(withdrawing, timeout=GIVE_BACK)
        await end_tasks(withdrawing)
        for scope in list(self._held):
            claim = self.held(scope)
            if claim is not None:
                self._return(scope, claim, "the host stops")
        returning = list(self._returning.values())
        if returning:
            await asyncio.wait(returning, timeout=GIVE_BACK + 0.5)
        await end_tasks(returning)
