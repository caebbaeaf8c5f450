"""The worker of links as a child: there while a link takes something in, started again with a growing pause.

Which links there are is on disk, in what was agreed; most spaces have none, and no process for it. Its death disturbs
nobody: the ledger says where it was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from tidings.admin.home import SpaceHome
from tidings.admin.link_registry import LinkLedger
from tidings.errors import TidingsError
from tidings.supervisor.json_lines_process import SpeakingProcess
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks

#: seconds between two looks at what was agreed
LOOK_EVERY = 1.0
RESTART = Backoff(0.5, 30.0)
log = logging.getLogger(__name__)


class LinkProcess(SpeakingProcess):
    module = "tidings.links"
    errors = "links.out"
    #: a page at hand, and the ledger
    grace = 15.0


class LinkKeeper:
    """Keeps a worker running for a supervisor while one is needed. `note` hears what became of it."""

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
