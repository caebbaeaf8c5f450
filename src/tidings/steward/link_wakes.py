"""Telling linked spaces that there is something new for them: a word without content, soon and not too often.

While a link shares something, the live copies of its channels are heard, on a connection of their own: what is said
there never keeps agents' requests waiting. A space that did not hear it finds what is new when it next asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tidings.nats.aio import Subscription
from tidings.nats.client import Connection, close_quietly
from tidings.nats.core import Msg
from tidings.nats.errors import NatsError
from tidings.steward.context import SpaceContext
from tidings.steward.link_records import links_on
from tidings.steward.link_scope import minimal
from tidings.wire.names import covers_any
from tidings.wire.rulings import Link
from tidings.wire.subjects import Chat, Via

#: seconds between two wakes of one link
APART = 0.1
log = logging.getLogger(__name__)


class LinkWakes:
    def __init__(self, space: SpaceContext, connect: Callable[[], Awaitable[Connection]]) -> None:
        """`connect`: opens a connection of the steward's."""
        self.space = space
        self._connect = connect
        self._connection: Connection | None = None
        self._heard: dict[str, Subscription] = {}
        self._links: dict[str, Link] = {}
        #: subject of a live copy -> links that are told of it
        self._told: dict[str, tuple[str, ...]] = {}
        #: links that wait for their wake -> its timer; one that had a wake just now waits too
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._due: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent = 0

    async def run(self) -> None:
        """Hear what links share now, and no more than that."""
        on = {link: record for link, _, record in links_on(self.space) if record.shares and record.peer}
        if self._connection is not None and self._connection.is_closed:
            self._connection, self._heard, self._links = None, {}, {}
        if on == self._links and bool(on) == (self._connection is not None):
            return
        changed = [link for link, record in on.items() if self._links.get(link) not in (None, record)]
        self._links, self._told = on, {}
        if not on:
            await self.close()
            return
        if self._connection is None:
            self._connection = await self._connect()
        wanted = self._wanted()
        for subject in wanted - self._heard.keys():
            self._heard[subject] = await self._connection.listen(subject, self._hear)
        for subject in self._heard.keys() - wanted:
            await self._heard.pop(subject).unsubscribe()
        await self._connection.flush()
        for link in changed:  # perhaps more is shared of what was said long ago
            if link not in self._timers:
                self._wake(link)

    def _wanted(self) -> set[str]:
        patterns = minimal(tuple(pattern for record in self._links.values() for pattern in record.shares))
        wanted = {self.space.subjects.live_chat(each) for each in patterns}
        if any(record.hops > 1 for record in self._links.values()):
            wanted |= {self.space.subjects.live_via(each) for each in patterns}
        return wanted

    def _hear(self, message: Msg) -> None:
        """Where it is read, so it must be quick."""
        told = self._told.get(message.subject)
        if told is None:
            if len(self._told) > 10_000:
                self._told.clear()
            told = self._told[message.subject] = self._concerned(message.subject)
        for link in told:
            if link in self._timers:
                self._due.add(link)
            else:
                self._wake(link)

    def _concerned(self, subject: str) -> tuple[str, ...]:
        parsed = self.space.subjects.parse_live(subject)
        if not isinstance(parsed, Chat | Via):
            return ()
        return tuple(
            link
            for link, record in self._links.items()
            if covers_any(record.shares, parsed.channel)
            and (isinstance(parsed, Chat) or (record.hops > 1 and parsed.link != link))
        )

    def _wake(self, link: str) -> None:
        self._due.discard(link)
        self._timers[link] = asyncio.get_running_loop().call_later(APART, self._rested, link)
        record, connection = self._links.get(link), self._connection
        if record is not None and record.peer is not None and connection is not None:
            task = asyncio.create_task(self._send(connection, self.space.subjects.live_link(record.peer)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _rested(self, link: str) -> None:
        self._timers.pop(link, None)
        if link in self._due:
            self._wake(link)

    async def _send(self, connection: Connection, subject: str) -> None:
        try:
            await connection.publish(subject)
            self.sent += 1
        except (NatsError, OSError) as error:  # it is found by asking, too
            log.info("a linked space was not told of something new: %s", error)

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._due.clear()
        connection, self._connection, self._heard = self._connection, None, {}
        if connection is not None:
            await close_quietly(connection)
