"""History as an endpoint reads it: one request per page, every record verified here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from tidings.endpoint.records import LiveRecord, RecordOpener
from tidings.endpoint.supervision import Supervision
from tidings.errors import ConflictError, ConnectionLost

PAGE = 100
PATIENCE = 10.0
#: pages under way at a time; the steward refuses an agent more than four
AT_ONCE = 4


class History:
    def __init__(self, link: Supervision, opener: RecordOpener) -> None:
        self.link = link
        self.opener = opener
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def records(
        self, channel: str, limit: int, *, before: int | None = None, window: int | None = None
    ) -> list[LiveRecord]:
        """The newest `limit` messages, newest first; below `before`, no older than `window` seconds."""
        since = time.time_ns() - window * 1_000_000_000 if window else 0
        found: list[LiveRecord] = []
        more = True
        while more and len(found) < limit:
            answer = await self._page(
                channel, limit=min(PAGE, limit - len(found)), since_ns=since, **({"before": before} if before else {})
            )
            lines = answer["records"]
            found += [record for line in lines if (record := self.opener.stored(line)) is not None]
            more = bool(lines) and answer["more"]
            before = lines[-1]["seq"] if lines else before
        return found

    async def after(self, channel: str, start: int, limit: int) -> tuple[list[LiveRecord], bool, int]:
        """Messages above `start`, oldest first; whether that is all there are, and the head it was read at."""
        found: list[LiveRecord] = []
        position, taken, head = start, 0, start
        while taken < limit:
            answer = await self._page(channel, after=position, limit=min(PAGE, limit - taken))
            lines, head = answer["records"], max(head, int(answer["head"]))
            found += [record for line in lines if (record := self.opener.stored(line)) is not None]
            taken += len(lines)
            if not lines or not answer["more"]:
                return found, True, head
            position = lines[-1]["seq"]
        return found, False, head

    async def between(self, channel: str, after: int, until: int) -> AsyncIterator[LiveRecord]:
        """Every message above `after`, up to `until`, oldest first."""
        more = True
        while more:
            answer = await self._page(channel, after=after, until=until, limit=PAGE)
            lines = answer["records"]
            for line in lines:
                if (record := self.opener.stored(line)) is not None:
                    yield record
            more = bool(lines) and answer["more"]
            after = lines[-1]["seq"] if lines else after

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
                return await self.link.call(
                    "history", "page", channel=channel, timeout=PATIENCE, connection=connection, **arguments
                )
            except (ConnectionLost, ConflictError):  # the latter: another program of this agent reads too
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)
