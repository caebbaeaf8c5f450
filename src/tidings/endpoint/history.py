"""History as an endpoint reads it: one request per page, every record verified here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from tidings.endpoint.records import LiveRecord, RecordOpener
from tidings.endpoint.supervision import Supervision
from tidings.errors import ConflictError, ConnectionLost
from tidings.wire.times import moment

PAGE = 100
#: pages in a row that show nothing, because a channel does not replay; then it is not looked any further
EMPTY_PAGES = 16
PATIENCE = 10.0
#: pages under way at a time; the steward refuses an agent more than four
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Reached:
    """What is not among the records of a reading, and why."""

    #: there are more beyond the last one
    more: bool = False
    #: what was said up to here has left the log, and was asked for; 0 if nothing was
    gone: int = 0
    #: there may be others that are not shown, because the channel does not replay them to this agent
    hidden: bool = False


class History:
    def __init__(self, link: Supervision, opener: RecordOpener) -> None:
        self.link = link
        self.opener = opener
        self._turns = asyncio.Semaphore(AT_ONCE)
        #: hears what the log was at its head when a page was read
        self.on_stamp: Callable[[Any], None] = lambda _stamp: None

    async def records(
        self, channel: str, limit: int, *, before: int | None = None, window: int | None = None
    ) -> list[LiveRecord]:
        """The newest `limit` messages, newest first; below `before`, no older than `window` seconds."""
        return (await self.newest(channel, limit, before=before, window=window))[0]

    async def newest(
        self, channel: str, limit: int, *, before: int | None = None, window: int | None = None
    ) -> tuple[list[LiveRecord], Reached]:
        """The same of a channel or pattern, and what is not among them."""
        since = moment(time.time() - window) if window else None
        found: list[LiveRecord] = []
        more, empty, reached = True, 0, Reached()
        while more and len(found) < limit and empty < EMPTY_PAGES:
            answer = await self._page(
                channel, limit=min(PAGE, limit - len(found)), since=since, **({"before": before} if before else {})
            )
            lines, more, before = answer["records"], answer["more"], int(answer["next"])
            found += [record for line in lines if (record := self.opener.stored(line)) is not None]
            empty = 0 if lines else empty + 1
            gone = int(answer["floor"]) - 1 if not (more or since) else 0
            reached = Reached(more, max(0, gone), reached.hidden or bool(answer["hidden"] and not more))
        return found, reached

    async def after(self, channel: str, start: int, limit: int) -> tuple[list[LiveRecord], bool, int]:
        """Messages above `start`, oldest first; whether that is all there are, and the head it was read at."""
        found, reached, head = await self.since(channel, start, limit)
        return found, not reached.more, head

    async def since(self, channel: str, start: int, limit: int) -> tuple[list[LiveRecord], Reached, int]:
        """The same, and what is not among them."""
        found: list[LiveRecord] = []
        position, taken, head, gone, hidden = start, 0, start, 0, False
        while taken < limit:
            answer = await self._page(channel, after=position, limit=min(PAGE, limit - taken))
            lines, head = answer["records"], max(head, int(answer["head"]))
            found += [record for line in lines if (record := self.opener.stored(line)) is not None]
            taken += len(lines)
            gone, hidden = max(gone, int(answer["floor"]) - 1), hidden or bool(answer["hidden"])
            reached = Reached(bool(answer["more"]), gone if gone > start else 0, hidden)
            if not reached.more:
                return found, reached, head
            position = int(answer["next"])
        return found, Reached(True, gone if gone > start else 0, hidden), head

    async def between(self, channel: str, after: int, until: int) -> AsyncIterator[LiveRecord]:
        """Every message above `after`, up to `until`, oldest first."""
        more = True
        while more:
            answer = await self._page(channel, after=after, until=until, limit=PAGE)
            lines = answer["records"]
            for line in lines:
                if (record := self.opener.stored(line)) is not None:
                    yield record
            more, after = answer["more"], int(answer["next"])

    async def of_sender(self, channel: str, sender: str, after: int, until: int) -> tuple[list[LiveRecord], int, bool]:
        """A page of one sender's messages, oldest first; the last sequence it holds, and whether there are more."""
        answer = await self._page(channel, sender=sender, after=after, until=until, limit=PAGE)
        lines = answer["records"]
        found = [record for line in lines if (record := self.opener.stored(line)) is not None]
        return found, int(lines[-1]["seq"]) if lines else after, bool(lines) and answer["more"]

    async def _page(self, channel: str, **arguments: Any) -> dict[str, Any]:
        """One page. Reading changes nothing, so a connection that goes meanwhile only costs time."""
        async with self._turns:
            return await self._page_now(channel, arguments)

    async def _page_now(self, channel: str, arguments: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                connection = await self.link.ready(max(0.1, deadline - time.monotonic()))
                answer = await self.link.call(
                    "history", "page", channel=channel, timeout=PATIENCE, connection=connection, **arguments
                )
                self.on_stamp(answer.get("stamp"))
                return answer
            except (ConnectionLost, ConflictError):  # the latter: another program of this agent reads too
                if time.monotonic() > deadline or self.link.state == "stopped":
                    raise
                await asyncio.sleep(0.05)
