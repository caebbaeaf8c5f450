"""From the host's events to the subscriptions of a client: which resources changed when a message came.

A thread reads the events, beginning behind the newest message there was, and goes on behind the last one it saw
whenever the stream broke: nothing is skipped. What a subscriber gets is a hint to read again; a hint that is lost
costs time, never mail. A message that the agent's attention does not let wake it rings for nobody, and is in the inbox
all the same.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote

from mcp.server.subscriptions import ResourceUpdated, ServerEvent

from tidings.errors import TidingsError
from tidings.mcp.desk import Desk, Event
from tidings.mcp.ids import short

INBOX = "tidings://inbox"
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
#: seconds in which changes of one resource are one
GATHER = 0.05
log = logging.getLogger(__name__)
Listener = Callable[[ServerEvent], None]


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

    async def publish(self, event: ServerEvent) -> None:
        self.ring(event)
        await asyncio.sleep(0)

    def ring(self, event: ServerEvent) -> None:
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
    """Reads the events of a desk until it is stopped. `news` hears of every message."""

    def __init__(self, desk: Desk, bell: Bell, news: News) -> None:
        self.desk, self.bell, self.news = desk, bell, news
        self._stopped = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._pending: set[str] = set()

    def start(self) -> None:
        threading.Thread(target=self._follow, daemon=True, name="events").start()

    def stop(self) -> None:
        self._stopped.set()

    def _follow(self) -> None:
        after: int | None = None
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            try:
                after = self.desk.newest_row() if after is None else after
                for event in self.desk.events(after):
                    after, pause = event.row or after, FIRST_PAUSE
                    self._tell(event)
            except TidingsError as error:
                log.info("events of the host are interrupted: %s", error)
            self._stopped.wait(pause)
            pause = min(LONGEST_PAUSE, pause * 2)

    def _tell(self, event: Event) -> None:
        rings = event.kind == "notice" or (event.kind == "message" and event.facts["wakes"])
        if not rings or self._stopped.is_set():
            return
        changed = self._changed(event)
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._note, changed)

    def _changed(self, event: Event) -> set[str]:
        """The resources a message belongs to: the inbox, its channel, and its thread by each message in it."""
        facts = event.facts
        changed = {INBOX, *thread_uris(str(facts["id"]))}
        if facts.get("channel"):
            changed.add(channel_uri(facts["channel"]))
        if self.bell.heard and (facts.get("reply_to") or facts.get("context")):
            changed |= {uri for each in self._thread(str(facts["id"])) for uri in thread_uris(each)}
        return changed

    def _thread(self, message_id: str) -> set[str]:
        try:
            rows = self.desk.thread(message_id)
        except TidingsError:
            return set()
        answered = {str(row["reply_to"]) for row in rows if row.get("reply_to")}
        return {str(row["id"]) for row in rows} | answered

    def _note(self, changed: set[str]) -> None:
        """Ring once for many messages that come together."""
        self.news.came()
        if not self._pending:
            self._loop.call_later(GATHER, self._ring)
        self._pending |= changed

    def _ring(self) -> None:
        changed, self._pending = self._pending, set()
        for uri in sorted(changed):
            self.bell.ring(ResourceUpdated(uri))
