"""From the host's events to the subscriptions of a client: which resources changed when a message came.

It reads the events, beginning behind the newest message there was, and goes on behind the last one it saw whenever the
stream broke: nothing is skipped. What a subscriber gets is a hint to read again; a hint that is lost
costs time, never mail. A message that the agent's attention does not let wake it rings for nobody, and is in the inbox
all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from urllib.parse import quote

from mcp.server.subscriptions import ResourceUpdated
from mcp.server.subscriptions import ServerEvent as Change

from tidings.client.host_http import ServerEvent
from tidings.client.host_transport import HostAgent
from tidings.errors import TidingsError
from tidings.mcp.ids import short
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks

INBOX = "tidings://inbox"
RETRY = Backoff(0.1, 5.0)
#: seconds in which changes of one resource are one
GATHER = 0.05
log = logging.getLogger(__name__)
Listener = Callable[[Change], None]


def channel_uri(name: str) -> str:
    return f"tidings://channel/{quote(name, safe='')}"


def thread_uris(message_id: str) -> set[str]:
    """By its whole id and by the end of it, which is what is shown."""
    return {f"tidings://thread/{quote(each, safe='')}" for each in (message_id, short(message_id))}


class Bell:
    """The SDK's subscription bus, within this process; it knows whether anybody listens."""

    def __init__(self) -> None:
        self._listeners: dict[object, Listener] = {}

    @property
    def heard(self) -> bool:
        return bool(self._listeners)

    async def publish(self, event: Change) -> None:
        self.ring(event)
        await asyncio.sleep(0)

    def ring(self, event: Change) -> None:
        for listener in list(self._listeners.values()):
            listener(event)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        token = object()
        self._listeners[token] = listener
        return lambda: self._listeners.pop(token, None) and None


class News:
    """Wakes everybody who waits for mail: an event is set once and then replaced, so nobody takes it from another."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Set by the first message from now on: to be asked for before looking whether there is one already."""
        return self._next

    def came(self) -> None:
        self._next.set()
        self._next = asyncio.Event()


class Follower:
    """Reads the events of an agent until it is stopped. `news` hears of every message that may wake it."""

    def __init__(self, agent: HostAgent, bell: Bell, news: News) -> None:
        self.agent, self.bell, self.news = agent, bell, news
        self._following: asyncio.Task[None] | None = None
        self._pending: set[str] = set()

    def start(self) -> None:
        self._following = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        await end_tasks([self._following])

    async def _follow(self) -> None:
        after: int | None = None
        delays = RETRY.delays()
        while True:
            try:
                after = await self.agent.transport.newest_row() if after is None else after
                async with aclosing(self.agent.transport.follow(after)) as events:  # type: ignore[type-var]
                    async for event in events:
                        after, delays = event.row or after, RETRY.delays()
                        if event.kind == "notice" or (event.kind == "message" and event.data["wakes"]):
                            self._note(await self._changed(event))
            except TidingsError as error:
                log.info("events of the host are interrupted: %s", error)
            await asyncio.sleep(next(delays))

    async def _changed(self, event: ServerEvent) -> set[str]:
        """The resources a message belongs to: the inbox, its channel, and its thread by each message in it."""
        row = event.data
        changed = {INBOX, *thread_uris(str(row["id"]))}
        if row["channel"]:
            changed.add(channel_uri(row["channel"]))
        if self.bell.heard and (row["reply_to"] or row["context"]):
            changed |= {uri for each in await self._thread(str(row["id"])) for uri in thread_uris(each)}
        return changed

    async def _thread(self, message_id: str) -> set[str]:
        try:
            rows = await self.agent.transport.thread(message_id, starts=False)
        except TidingsError:
            return set()
        answered = {str(row["reply_to"]) for row in rows if row["reply_to"]}
        return {str(row["id"]) for row in rows} | answered

    def _note(self, changed: set[str]) -> None:
        """Ring once for many messages that come together."""
        self.news.came()
        if not self._pending:
            asyncio.get_running_loop().call_later(GATHER, self._ring)
        self._pending |= changed

    def _ring(self) -> None:
        changed, self._pending = self._pending, set()
        for uri in sorted(changed):
            self.bell.ring(ResourceUpdated(uri))
