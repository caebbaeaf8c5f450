"""One link while a worker carries it: its connection to the peer, its direction as a task of an event loop, its rounds
about people, mail and tasks, and the credential it stays with. A link is between two spaces (`Spaces`): `NatsSpaces`
reaches both over their brokers.

The rounds (`Rounds`) go on by themselves. They never keep what is said in channels waiting, and what fails there is
told and tried again later. A link that is paused does nothing, and nobody at its other end is known here meanwhile;
what was written to them before waits.

Signatures of a page are checked in threads (`ThreadedVerify`): the library that does it leaves the interpreter to
others meanwhile. Those of a page that came before its turn are checked while the page before it is let in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from tidings.admin.home import SpaceHome
from tidings.admin.link_peers import PeerAccess
from tidings.contract.link_worker import DirectoryStatus
from tidings.errors import TidingsError
from tidings.links.compare import Comparison, PeerSide
from tidings.links.definition import LinkDefinition
from tidings.links.destination import LocalDestination, LocalLinks, LocalSpace
from tidings.links.directory_sync import AskedPeer, PeopleRound
from tidings.links.events import Listener
from tidings.links.held import HeldRecords
from tidings.links.link_store import BookedLink
from tidings.links.mail_sync import LocalPost, MailRound
from tidings.links.ports import Destination, Prepare, Source, Verify
from tidings.links.replicator import Direction
from tidings.links.source import PeerSource
from tidings.links.task_sync import LocalQueue, TaskRound
from tidings.links.validation import verified
from tidings.nats import jwt
from tidings.util.backoff import Backoff
from tidings.util.private_files import read_private
from tidings.util.task_ends import end_tasks
from tidings.wire.links import LinkedRecord
from tidings.wire.rulings import Link

#: seconds between two rounds, unless something new is told of: receipts wait for the next one
EVERY = 2.0
#: and at least, however often it is woken
SPACING = 0.1
#: and after failures
AFTER_FAILURES = Backoff(1.0, 60.0)
#: seconds between two looks whether the credential ends before long
LOOK_AT_CREDENTIAL = 30.0
#: seconds after which the other space is told that its last records were handled
TELL_AFTER = 1.0
#: threads that check signatures; fewer signatures than these are not worth the way to a thread
THREADS, WORTH = 2, 8
log = logging.getLogger(__name__)


class SharedLog(Source, PeerSide, AskedPeer, Protocol):
    """The log of another space, on a connection that is closed when the link ends."""

    async def close(self) -> None: ...


class WorkersSpace(LocalPost, LocalQueue, Protocol):
    """This space, as its steward answers its worker, and takes mail and tasks from it."""

    async def links(self) -> LocalLinks:
        """The link records in force here."""
        ...

    async def close(self) -> None: ...


class Spaces(Protocol):
    def source(self, access: PeerAccess, creds: Path, on_wake: Callable[[], None], prepare: Prepare) -> SharedLog: ...

    def destination(self, link: str) -> Destination: ...

    @property
    def here(self) -> WorkersSpace: ...


class NatsSpaces:
    def __init__(self, home: SpaceHome) -> None:
        self.here = LocalSpace(lambda: home.read_info().url, home.link_creds, home.name)

    def source(self, access: PeerAccess, creds: Path, on_wake: Callable[[], None], prepare: Prepare) -> SharedLog:
        return PeerSource(access.url, creds, access.space, on_wake=on_wake, prepare=prepare)

    def destination(self, link: str) -> Destination:
        return LocalDestination(self.here, link)


class ThreadedVerify:
    """For all links of a worker; `close` ends the threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="verify")

    async def __call__(self, records: Sequence[LinkedRecord]) -> list[bool]:
        if len(records) < WORTH:
            return verified(records)
        loop, size = asyncio.get_running_loop(), -(-len(records) // THREADS)
        parts = [records[start : start + size] for start in range(0, len(records), size)]
        done = await asyncio.gather(*(loop.run_in_executor(self._pool, verified, part) for part in parts))
        return [each for part in done for each in part]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class VerifiedAhead:
    """For one link. A page that nobody prepared is checked when it is asked about."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        #: the records that were prepared last, and which of them are signed
        self._prepared: tuple[Sequence[LinkedRecord], Sequence[bool]] = (), ()

    async def prepare(self, records: Sequence[LinkedRecord]) -> None:
        self._prepared = records, await self._verify(records)

    async def __call__(self, records: Sequence[LinkedRecord]) -> Sequence[bool]:
        prepared, good = self._prepared
        return good if prepared is records else await self._verify(records)


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

    async def facts(self) -> DirectoryStatus:
        mail = await self._mail.facts() if self._mail is not None else None
        tasks = await self._tasks.facts() if self._tasks is not None else None
        passing = await self._people.passing()
        if mail is not None and not passing.direct:
            mail.waits = "the other space lets no direct messages pass now"
        if tasks is not None and not passing.tasks:
            tasks.waits = "the other space lets no tasks pass now"
        return msgspec.structs.replace(await self._people.facts(), words=self.words, mail=mail, tasks=tasks)


class LoopClock:
    """Waits in an event loop. One for each direction: a wake is for it alone."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()

    def now(self) -> float:
        return time.time()

    def tick(self) -> float:
        return time.monotonic()

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()


class CarriedLink:
    """`listener` hears everything its direction tells. It begins with `start`, and begins once."""

    def __init__(
        self,
        definition: LinkDefinition,
        access: PeerAccess,
        creds: Path,
        ledger: BookedLink,
        spaces: Spaces,
        record: Link,
        *,
        verify: Verify,
        every: float | None = None,
        listener: Listener = lambda _event: None,
    ) -> None:
        self.definition, self.access, self.ledger = definition, access, ledger
        self._creds = creds
        # who looks every so often does not want to be woken
        self._wake: Callable[[], None] = self._woken if every is None else (lambda: None)
        verified = VerifiedAhead(verify)
        self.source: SharedLog = spaces.source(access, creds, lambda: self._wake(), verified.prepare)
        destination = spaces.destination(definition.link)
        self.direction = Direction(
            definition,
            ledger,
            self.source,
            destination,
            LoopClock(),
            verify=verified,
            comparison=Comparison(HeldRecords(ledger, self.source), self.source),
            every=every,
            tell_after=TELL_AFTER,
        )
        self.direction.listen(listener)
        if every is None and isinstance(self.source, PeerSource):
            self.source.on_back = self.direction.back
        self._here = destination.space if every is None and isinstance(destination, LocalDestination) else None
        if self._here is not None:
            self._here.on_back.append(self.direction.back)
        self.rounds: Rounds | None = None
        if record.roster == "on":
            people = PeopleRound(definition.space, record, ledger, self.source, spaces.here)
            mail = MailRound(definition.space, record, ledger, self.source, spaces.here) if record.passes_mail else None
            tasks = (
                TaskRound(definition.space, record, ledger, self.source, spaces.here) if record.passes_tasks else None
            )
            self.rounds = Rounds(definition.link, ledger, people, mail, tasks, every=every)
        self._keeping: asyncio.Task[None] | None = None

    def _woken(self) -> None:
        self.direction.wake()
        if self.rounds is not None:
            self.rounds.wake()

    def ask(self) -> None:
        """An operator does not want to wait."""
        self.direction.ask()
        if self.rounds is not None:
            self.rounds.ask()

    def start(self) -> None:
        self.direction.start()
        if self.rounds is not None:
            self.rounds.start()
        self._keeping = asyncio.create_task(self._keep_credential(), name=f"credential of {self.definition.link}")

    def peer_shares(self) -> tuple[str, ...] | None:
        """What the other space shares with us, as it last said; None if it was not asked yet."""
        said = self.source.said if isinstance(self.source, PeerSource) else None
        return said.shares if said is not None else None

    async def stop(self, deadline: float) -> None:
        """It finishes what it is at, for at most `deadline` seconds. Others go on meanwhile."""
        self._wake = lambda: None
        if self._here is not None:
            self._here.on_back.remove(self.direction.back)
            self._here = None
        if self._keeping is not None:
            await end_tasks([self._keeping])
        if self.rounds is not None:
            await self.rounds.stop()
        try:
            if not await self.direction.stop(deadline):
                log.warning("link %s was broken off after %.0f s", self.definition.link, deadline)
        finally:
            await self.source.close()

    async def _keep_credential(self) -> None:
        """The peer answers a newer token when it is greeted. One that ends before long is fetched while it holds."""
        while True:
            await asyncio.sleep(LOOK_AT_CREDENTIAL)
            try:
                if half_is_over(read_private(self._creds), time.time()):
                    await self.source.hello()
            except (TidingsError, OSError) as error:
                log.warning("the credential of link %s could not be renewed: %s", self.definition.link, error)


def half_is_over(creds: str, now: float) -> bool:
    """Of the time a credential holds for; one that does not end is never due."""
    with suppress(TidingsError, ValueError, KeyError, TypeError):
        claims = jwt.decode(jwt.split_credentials(creds)[0])
        begun, ends = int(claims["iat"]), int(claims.get("exp") or 0)
        return bool(ends) and now >= begun + (ends - begun) / 2
    return False
