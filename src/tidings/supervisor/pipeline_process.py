"""The pipeline as a child: started, followed line by line, started again, ended with everything it started.

Its death disturbs nobody: messages wait in the log. It is started again with a growing pause; only if this machine
lacks what it needs (Spark, Java) is it left alone, with one sentence that says what to install. This module loads no
Spark.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tidings.admin.home import SpaceHome
from tidings.errors import PrerequisiteMissing
from tidings.supervisor.json_lines_process import SpeakingProcess
from tidings.util.backoff import Backoff

#: an orderly end: the batch at hand, the lease, the JVM
GRACE = 30.0
log = logging.getLogger(__name__)


class PipelineProcess(SpeakingProcess):
    """One process of the pipeline; a JVM and Python workers belong to its group."""

    module = "tidings.delivery.process"
    errors = "spark.out"
    grace = GRACE


class PipelineKeeper:
    """Keeps one pipeline running for a supervisor. `note` hears what became of it, `tell` what a person should know."""

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
