"""The worker: carries every link of a space that takes something in, and answers what operators ask about them.

    steward: which links are in force -> started, stopped or started anew, each by itself -> looked at again soon

It knows nothing but the ledger and what it is told: whoever kills it loses nothing. A steward that is away changes
nothing about links that are carried; each finds out by itself how its two ends are. One worker has a ledger at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from tidings.admin.home import SpaceHome
from tidings.admin.link_peers import LinkPeers, PeerAccess
from tidings.contract import link_worker as contract
from tidings.contract.core import EmptyAnswer
from tidings.contract.links import PeerProgress
from tidings.errors import StoreBusy, TidingsError, WorkerUnreachable
from tidings.links.definition import definition_of, secret_of, takes_something
from tidings.links.destination import LocalLinks
from tidings.links.events import Listener, Listeners, line_of
from tidings.links.link_store import BookedLink, milliseconds, opened
from tidings.links.operations import LinkOperations, WorkerState, no_access
from tidings.links.running_link import CarriedLink, NatsSpaces, Spaces, ThreadedVerify
from tidings.links.store_file import LedgerDatabase, open_store
from tidings.rpc.dispatch import handler, handlers_of
from tidings.rpc.local_socket import LocalServer, call
from tidings.wire.rulings import Link

#: seconds between two looks at the records
LOOK_EVERY = 2.0
#: seconds within which a command such as `tidings link list`, which opens the ledger while no worker runs, is done
COMMAND_ENDS = 5.0
#: seconds a link has to finish what it is at
DEADLINE = 8.0
#: seconds after which who follows a link is told how it is, if that changed; and events that wait for a slow one
TELL_EVERY, MOST_WAITING = 1.0, 1_000
log = logging.getLogger(__name__)


class LinkWorker:
    """`run` carries links until `stop`. `tell` hears sentences for people."""

    def __init__(
        self,
        home: SpaceHome,
        spaces: Spaces | None = None,
        *,
        every: float | None = None,
        tell: Callable[[str], None] = log.info,
        look_every: float = LOOK_EVERY,
        deadline: float = DEADLINE,
    ) -> None:
        self.home, self.every, self.deadline = home, every, deadline
        self.ready = asyncio.Event()
        self._spaces: Spaces = spaces or NatsSpaces(home)
        self._tell, self._look_every = tell, look_every
        self._peers = LinkPeers.below(home)
        self._listeners = Listeners()
        self._carried: dict[str, CarriedLink] = {}
        #: why a link that should be carried is not
        self._words: dict[str, str] = {}
        self._steward_words = ""
        #: how far the other spaces are with what is shared here
        self._pushes: dict[str, PeerProgress] = {}
        #: which channels are listed, and what a link may bring in a day
        self._rules = (0, 0)
        self._stopping, self._look_now = asyncio.Event(), asyncio.Event()
        self._changing = asyncio.Lock()
        self._verify = ThreadedVerify()
        self._database: LedgerDatabase | None = None

    # ------------------------------------------------------------------------------------------------ its life

    def stop(self) -> None:
        self._stopping.set()
        self._look_now.set()

    async def run(self) -> None:
        """`StoreBusy` if another worker has the ledger; `StoreBroken` once it cannot be used any more."""
        self._database = await self._open_store()
        state = WorkerState(
            running=self._carried.get,
            words=lambda link: self._words.get(link, ""),
            stopped=self._set_aside,
            push=self._pushes.get,
            steward=lambda: self._steward_words,
        )
        handlers = handlers_of("link worker", LinkOperations(self.home, self._database, state), self)
        server = LocalServer(self.home.link_socket, "link worker", handlers)
        try:
            await server.start()
            while not self._stopping.is_set():
                await self._database.check()
                await self.look()
                self.ready.set()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._look_now.wait(), self._look_every)
                self._look_now.clear()
        finally:
            await server.close()
            async with self._changing:
                await self._stop(tuple(self._carried))
            await self._spaces.here.close()
            self._verify.close()
            await asyncio.to_thread(self._database.close)

    async def _open_store(self) -> LedgerDatabase:
        """Opens the ledger. Waits for a command that holds it, but not for another worker, which would keep it."""
        deadline = time.monotonic() + COMMAND_ENDS
        while True:
            try:
                return await asyncio.to_thread(open_store, self.home)
            except StoreBusy:
                if self._stopping.is_set() or time.monotonic() >= deadline or await self._worker_answers():
                    raise
            await asyncio.sleep(0.05)

    async def _worker_answers(self) -> bool:
        try:
            await call(self.home.link_socket, contract.ListLinksRequest(), timeout=1.0)
        except WorkerUnreachable:
            return False
        return True

    # ---------------------------------------------------------------------------------------- which links it carries

    async def look(self) -> None:
        """Ask which links are in force, and carry those that take something in, as they are agreed now."""
        try:
            found = await self._spaces.here.links()
        except TidingsError as error:
            self._note_steward(str(error))
            return
        if self._steward_words:
            for each in self._carried.values():
                each.direction.back()
        self._note_steward("")
        self._note_pushes(found)
        async with self._changing:
            await self._settle(found)
        rules = found.facts.listing, found.facts.share
        if self._rules != rules:  # something may wait for a channel to be listed, or for more room
            self._rules = rules
            for each in self._carried.values():
                each.direction.ask()

    def _note_steward(self, words: str) -> None:
        if words and words != self._steward_words:
            self._tell(f"which links are in force is not known, and is asked again: {words}")
        self._steward_words = words

    def _note_pushes(self, found: LocalLinks) -> None:
        before, now = dict(self._pushes), time.time()
        self._pushes.clear()
        self._pushes |= {each.record.link: each.push for each in found.links if each.push is not None}
        for link, push in self._pushes.items():
            if link in before and push.handled > before[link].handled:
                self._heard(contract.PushAdvanced(link, now, push.handled, push.lag_records, push.lag_seconds(now)))

    async def _settle(self, found: LocalLinks) -> None:
        now = time.time()
        wanted = {each.record.link: each.record for each in found.links if takes_something(each.record, now)}
        self._words = {link: words for link, words in self._words.items() if link in wanted}
        ready = {link: agreed for link, record in wanted.items() if (agreed := self._agreed(record)) is not None}
        gone = [
            link
            for link, carried in self._carried.items()
            if link not in ready
            or carried.definition != definition_of(found.facts.space, ready[link][0])
            # it is told of another place, or another user, by being started anew
            or carried.access != ready[link][1]
        ]
        await self._stop(gone)
        for link, (record, access) in ready.items():
            if link not in self._carried:
                await self._start(found.facts.space, record, access)

    def _agreed(self, record: Link) -> tuple[Link, PeerAccess] | None:
        """With how its other space is reached, if that is known and is the space of the record."""
        try:
            access = self._peers.get(record.link)
        except TidingsError as error:
            self._refuse(record.link, str(error))
            return None
        if access is None:
            self._refuse(record.link, no_access(record.link))
        elif access.id != record.origin:
            self._refuse(record.link, f"it is with {record.origin}, and what is kept here leads to {access.id}")
        else:
            return record, access
        return None

    def _refuse(self, link: str, words: str) -> None:
        if self._words.get(link) != words:
            log.warning("link %s is not carried: %s", link, words)
        self._words[link] = words

    async def _start(self, space: str, record: Link, access: PeerAccess) -> None:
        assert self._database is not None
        definition = definition_of(space, record)
        try:
            secret = secret_of(self.home.link_creds)
            row = await self._database.write(lambda c: opened(c, definition, milliseconds(), secret))
            carried = CarriedLink(
                definition,
                access,
                self._peers.creds(record.link),
                BookedLink(self._database, row.row),
                self._spaces,
                record,
                verify=self._verify,
                every=self.every,
                listener=self._heard,
            )
        except TidingsError as error:
            self._refuse(record.link, str(error))
            return
        self._words.pop(record.link, None)
        self._carried[record.link] = carried
        carried.start()
        self._tell(f"link {record.link}: what {record.space or access.space} shares is carried here")

    async def _stop(self, links: Iterable[str]) -> None:
        stopped = {link: self._carried.pop(link) for link in links if link in self._carried}
        if stopped:
            await asyncio.gather(*(each.stop(self.deadline) for each in stopped.values()), return_exceptions=True)
        for link in stopped:
            self._tell(f"link {link} is carried no longer as it was")

    @asynccontextmanager
    async def _set_aside(self, link: str) -> AsyncIterator[None]:
        """Not carried while something is done to its ledger; looked at again at once."""
        async with self._changing:
            await self._stop([link])
            yield
        self._look_now.set()

    # ------------------------------------------------------------------------------------------- what it is asked

    def listen(self, listener: Listener) -> Callable[[], None]:
        """It hears every event of every link; what is returned ends that."""
        return self._listeners.add(listener)

    def _heard(self, event: contract.LinkEvent) -> None:
        log.info("%s", line_of(event))
        self._listeners.tell(event)

    @handler(contract.RefreshRequest)
    async def refresh(self, _request: contract.RefreshRequest) -> EmptyAnswer:
        await self.look()
        return EmptyAnswer()

    @handler(contract.StopWorkerRequest)
    async def stop_worker(self, _request: contract.StopWorkerRequest) -> EmptyAnswer:
        self.stop()
        return EmptyAnswer()

    @handler(contract.FollowLinkRequest)
    async def follow(self, request: contract.FollowLinkRequest) -> AsyncGenerator[contract.FollowedEvent]:
        return self._events_of(request.link)

    async def _events_of(self, link: str) -> AsyncGenerator[contract.FollowedEvent]:
        """Yields how a link is and its events, until the link worker does not run it any more."""
        heard: asyncio.Queue[Any] = asyncio.Queue(MOST_WAITING)

        def hear(event: contract.LinkEvent) -> None:
            if event.link == link and not heard.full():
                heard.put_nowait(event)

        remove, reported = self._listeners.add(hear), None
        try:
            while True:
                running, push = self._carried.get(link), self._pushes.get(link)
                if running is None and push is None:
                    yield contract.LinkNotRunning(link, time.time(), self._words.get(link, ""))
                    return
                found = running.direction.status() if running is not None else None, push
                if found != reported:
                    reported = found
                    yield contract.LinkReported(link, time.time(), *found)
                with suppress(TimeoutError):
                    yield await asyncio.wait_for(heard.get(), TELL_EVERY)
                while not heard.empty():
                    yield heard.get_nowait()
        finally:
            remove()
