"""What a worker does for a link beside its log: who is there, mail, and tasks; round after round, by itself.

It never keeps what is said in channels waiting, and what fails here is told and tried again later. A link that is
paused does nothing, and nobody at its other end is known here meanwhile; what was written to them before waits.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import msgspec

from tidings.errors import TidingsError
from tidings.links.directory_sync import PeopleRound
from tidings.links.link_store import BookedLink
from tidings.links.mail_sync import MailRound
from tidings.links.task_sync import TaskRound
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks

#: seconds between two rounds, unless something new is told of: receipts wait for the next one
EVERY = 2.0
#: and at least, however often it is woken
SPACING = 0.1
#: and after failures
AFTER_FAILURES = Backoff(1.0, 60.0)
log = logging.getLogger(__name__)


class Rounds:
    def __init__(
        self,
        link: str,
        ledger: BookedLink,
        people: PeopleRound,
        mail: MailRound | None = None,
        tasks: TaskRound | None = None,
        *,
        every: float | None = None,
    ) -> None:
        self.link, self._ledger, self._people, self._mail, self._tasks = link, ledger, people, mail, tasks
        self._every = every or EVERY
        self._woken, self._asked = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        #: why the last round failed
        self.words = ""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"people of link {self.link}")

    def wake(self) -> None:
        """There may be news."""
        self._woken.set()

    def ask(self) -> None:
        """An operator does not want to wait."""
        self._asked.set()
        self._woken.set()

    async def stop(self) -> None:
        """At once: what was not written down is done again."""
        await end_tasks([self._task])

    async def _run(self) -> None:
        pauses = AFTER_FAILURES.delays()
        while True:
            try:
                await self._round()
                self.words, pauses, pause = "", AFTER_FAILURES.delays(), self._every
            except TidingsError as error:
                self._note(str(error))
                pause = next(pauses)
            except Exception as error:  # boundary: a peer must not end the worker
                log.exception("a round of link %s failed", self.link)
                self._note(f"it failed ({type(error).__name__}); the log of the worker says more")
                pause = next(pauses)
            await self._rest(pause)

    async def _rest(self, pause: float) -> None:
        """Until the next round is due. A peer's wake ends it a little later, and not at all after a failure: it cannot
        make us hurry. An operator can."""
        heard = self._asked if self.words else self._woken
        with suppress(TimeoutError):
            await asyncio.wait_for(heard.wait(), pause)
        if not self._asked.is_set() and pause > SPACING:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), SPACING)
        self._woken.clear()
        self._asked.clear()

    async def _round(self) -> None:
        if (await self._ledger.link()).paused is not None:
            await self._people.withdraw()
            return
        failure: TidingsError | None = None
        try:
            await self._people.run()
        except TidingsError as error:  # mail and tasks of whoever is known go on
            failure = error
        passing = await self._people.passing()
        for each, passes in ((self._mail, passing.direct), (self._tasks, passing.tasks)):
            try:
                if each is not None and passes:  # else what lies there waits
                    await each.run()
            except TidingsError as error:  # the other goes on
                failure = failure or error
        if failure is not None:
            raise failure

    def _note(self, words: str) -> None:
        if words != self.words:
            log.warning("link %s: who is at its other end, mail or tasks from there are late: %s", self.link, words)
        self.words = words

    async def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(await self._people.facts())
        mail = await self._mail.facts() if self._mail is not None else None
        tasks = await self._tasks.facts() if self._tasks is not None else None
        passing = await self._people.passing()
        if mail is not None and not passing.direct:
            mail["waits"] = "the other space lets no direct messages pass now"
        if tasks is not None and not passing.tasks:
            tasks["waits"] = "the other space lets no tasks pass now"
        return {**found, "words": self.words, "mail": mail, "tasks": tasks}
