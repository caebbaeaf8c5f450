"""What a supervisor keeps running beside broker and steward: the pipeline, the link worker, the pushing of tokens.

A child that ends is started again with a growing pause. This module loads no Spark.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tidings.admin.home import SpaceHome
from tidings.admin.link_registry import LinkLedger
from tidings.admin.pushing import note_told, push_to_all, pushed_tokens, system_user
from tidings.errors import PrerequisiteMissing, TidingsError
from tidings.nats.client import Connection
from tidings.nats.errors import NatsError
from tidings.supervisor.processes import SpeakingProcess
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks

#: seconds between two looks at which links were agreed
LOOK_EVERY = 1.0
RESTART = Backoff(0.5, 30.0)
#: seconds between two pushes, for as long a server that is back may have the older token; and after one that failed
PUSH_EVERY, PUSH_AGAIN = 1.0, 2.0
log = logging.getLogger(__name__)


class PipelineProcess(SpeakingProcess):
    """One process of the pipeline; a JVM and Python workers belong to its group."""

    module = "tidings.delivery.process"
    errors = "spark.out"
    #: an orderly end: the batch at hand, the lease, the JVM
    grace = 30.0


class PipelineKeeper:
    """Keeps one pipeline running. `note` hears what became of it, `tell` what a person should know.

    Its death disturbs nobody: messages wait in the log. Only if this machine lacks what it needs (Spark, Java) is it
    left alone, with one sentence that says what to install.
    """

    def __init__(
        self,
        home: SpaceHome,
        options: Sequence[str],
        *,
        note: Callable[[dict[str, Any]], None],
        tell: Callable[[str], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._home, self._options = home, options
        self._note, self._tell, self._pause = note, tell, pause
        self._process: PipelineProcess | None = None
        self._facts: dict[str, Any] = {"wanted": True}
        self._why = ""

    def _say(self, phase: str, **facts: Any) -> None:
        if phase != self._facts.get("phase"):
            self._facts["since"] = time.time()
        self._facts |= {"phase": phase, **facts}
        self._note(dict(self._facts))

    def unavailable(self, why: str) -> None:
        """Leave it alone: trying again will not install anything."""
        log.warning("%s", why)
        self._tell(why)
        self._say("unavailable", why=why, pid=None)

    async def keep(self) -> None:
        """Until cancelled, or until it is known that this machine cannot run it."""
        backoff = Backoff(1.0, 60.0).delays(fresh_after=60)
        self._tell("starting durable delivery (Spark takes some seconds; everything else works meanwhile)")
        self._say("starting")
        while True:
            try:
                lacking = await self._live()
            except Exception as error:  # noqa: BLE001  boundary: whatever this is, broker and steward go on
                lacking, self._why = None, f"it cannot be started: {error}"
            if lacking:
                return self.unavailable(lacking)
            pause = next(backoff)
            log.error("the pipeline ended (%s); again in %.0f s", self._why, pause)
            gone = self._process.pid if self._process else None
            self._say("restarting", pid=None, why=self._why, step=None, gone=gone)
            await self._pause(pause)

    async def _live(self) -> str | None:
        """One life of the process. Answers what this machine lacks, if that was its end."""
        self._why, lacking = "", None
        self._process = await PipelineProcess.start(self._home, self._options)
        self._say(self._facts.get("phase", "starting"), pid=self._process.pid)
        async for said in self._process.lines():
            self._heed(said)
            error = said.get("error") or {}
            lacking = error["message"] if error.get("code") == PrerequisiteMissing.code else lacking
        code = await self._process.wait()
        self._why = self._why or f"exit code {code}"
        return lacking

    def _heed(self, said: dict[str, Any]) -> None:
        if said.get("ready"):
            self._tell("durable delivery runs")
            log.info("the pipeline delivers, pid %s", said.get("pid"))
            self._say("running", why=None, step=None)
        elif said.get("halted"):
            log.warning("the pipeline's query ended (%s); it is started again", said["halted"])
            self._say("restarting", why=said["halted"], step=None)
        elif said.get("phase"):
            log.info("pipeline: %s", said["phase"])
            self._say(self._facts["phase"], step=said["phase"])
            if self._facts.get("phase") == "starting":
                self._tell(f"durable delivery: {said['phase']}")
        elif said.get("error"):
            self._why = str(said["error"].get("message"))

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.end()
            self._say("stopped", pid=None, step=None)


class LinkProcess(SpeakingProcess):
    module = "tidings.links"
    errors = "links.out"
    #: a page at hand, and the ledger
    grace = 15.0


class LinkKeeper:
    """Keeps a link worker running while a link takes something in. `note` hears what became of it.

    Which links there are is on disk, in what was agreed; most spaces have none, and no process for it. Its death
    disturbs nobody: the ledger says where it was.
    """

    def __init__(
        self,
        home: SpaceHome,
        *,
        note: Callable[[dict[str, Any]], None],
        tell: Callable[[str], None],
        look_every: float = LOOK_EVERY,
        start: Callable[[SpaceHome], Any] = LinkProcess.start,
    ) -> None:
        self._home, self._note, self._tell, self._look_every, self._start = home, note, tell, look_every, start
        self._process: LinkProcess | None = None
        self._phase, self._why = "", ""
        self._said: tuple[str, str | None] = ("", None)

    def _say(self, phase: str, **facts: Any) -> None:
        if (phase, facts.get("why")) != self._said:
            self._phase, self._said = phase, (phase, facts.get("why"))
            pid = self._process.pid if self._process is not None else None
            self._note({"phase": phase, "pid": pid, "since": time.time(), "why": None, **facts})

    def is_needed(self) -> bool:
        """Is there a link that takes something in?"""
        links = LinkLedger.below(self._home, self._home.read_info().id)
        return any(row.takes(time.time()) for row in links.rows())

    async def keep(self) -> None:
        """Until cancelled."""
        pauses = RESTART.delays(fresh_after=60)
        while True:
            try:
                await self._until(needed=True)
                await self._live()
            except OSError as error:
                self._why = f"it cannot be started: {error}"
            if not self._why:  # nobody needs it any more
                self._say("not needed")
                continue
            pause = next(pauses)
            log.error("the worker of links ended (%s); again in %.1f s", self._why, pause)
            self._say("restarting", why=self._why)
            await asyncio.sleep(pause)

    async def _until(self, *, needed: bool) -> None:
        """What cannot be read changes nothing, and is noted."""
        while True:
            try:
                if self.is_needed() == needed:
                    return
            except TidingsError as error:
                self._say(self._phase or "unknown", why=str(error))
            await asyncio.sleep(self._look_every)

    async def _live(self) -> None:
        """One life of the process. `_why` says how it ended; empty: because nothing comes in over links any more."""
        self._why = ""
        process: LinkProcess = await self._start(self._home)
        self._process = process
        self._say("starting")
        heeding = asyncio.create_task(self._heed(process))
        waiting = asyncio.create_task(self._until(needed=False))
        try:
            await asyncio.wait({heeding, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if heeding.done():
                heeding.result()
                self._why = self._why or f"exit code {await process.wait()}"
            else:
                waiting.result()
                await process.end()
                self._why = ""
        finally:
            await end_tasks([heeding, waiting])
            await process.end()
            self._process = None

    async def _heed(self, process: LinkProcess) -> None:
        async for said in process.lines():
            if said.get("ready"):
                self._tell("what other spaces share is carried here (`tidings link list`)")
                self._say("running")
            elif said.get("error"):
                self._why = str(said["error"].get("message"))

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.end()
            self._process = None
            self._say("stopped")


class TokenKeeper:
    """Pushes current account tokens to NATS servers that others run, so that they learn of revocations.

    A server that was down while somebody was revoked comes back with the token it had, and would let that agent in. So
    the newest tokens of the accounts of agents and of the invited, which admin processes write and sign, are pushed
    every moment by a user of the system account that may do nothing else. A token that a server has changes nothing.
    """

    def __init__(self, home: SpaceHome) -> None:
        self._home = home
        #: ids of the server processes that have the newest token
        self.told: set[str] = set()
        self._tokens: dict[str, str] = {}

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with system_user(self._home, self._home.read_info()) as system:
                    while True:
                        await self._push(system)
                        await asyncio.sleep(PUSH_EVERY)
            except (TidingsError, NatsError, OSError, TimeoutError) as error:
                log.warning("tokens of accounts could not be pushed: %s", error or type(error).__name__)
            await asyncio.sleep(PUSH_AGAIN)

    async def _push(self, system: Connection) -> None:
        tokens = pushed_tokens(self._home)
        pushes = (push_to_all(system, account, token) for account, token in tokens.items())
        took = set.intersection(*await asyncio.gather(*pushes)) if tokens else set()
        told = {each.id for each in took}
        if tokens == self._tokens and (fresh := told - self.told) and self.told:
            log.warning("%d servers appeared and were told who is revoked", len(fresh))
        if (tokens, told) != (self._tokens, self.told):
            note_told(self._home, tokens, took)
        self._tokens, self.told = tokens, told
