"""Memberships that another program of the same agent opened or closed reach this one while it runs.

The roster tells every agent the sequence of the newest change of its memberships, and nothing of what it was. When that
moves, the steward is asked which stand, and `channels.py` takes them over: what is over is dropped, and what another
program joined is heard here too, if this program receives. The program hears each as a `membership` event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidings.broker.aio import end_tasks
from tidings.endpoint.channels import Channels
from tidings.endpoint.roster import Roster
from tidings.endpoint.supervision import Supervision
from tidings.errors import TidingsError
from tidings.wire.roster import Agent

RETRY_PAUSE = 0.2


class MembershipWatch:
    def __init__(self, link: Supervision, roster: Roster, channels: Channels, receives: Callable[[], bool]) -> None:
        self.link = link
        self.channels = channels
        self._receives = receives
        #: where memberships stood when this program came: it joins what it was told to, not what was there before
        self._since: int | None = None
        self._heard = 0
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        roster.on_own_row.append(self._on_row)

    def _on_row(self, row: Agent) -> None:
        if self._since is None:
            self._since = self._heard = row.moved
        if row.moved != self._heard and not self._closed:
            self._heard = row.moved
            self._moved.set()
            if self._task is None:
                self._task = asyncio.create_task(self._follow(), name=f"memberships of {self.link.identity.name}")

    async def _follow(self) -> None:
        while True:
            await self._moved.wait()
            self._moved.clear()
            try:
                answer = await self.link.call("member", "list")
                stands = {str(each["pattern"]): int(each["joined"]) for each in answer["memberships"]}
                await self.channels.follow(stands, int(answer["seq"]), self._since or 0, adopt=self._receives())
            except TidingsError:
                self._moved.set()
                await asyncio.sleep(RETRY_PAUSE)

    async def close(self) -> None:
        self._closed = True
        await end_tasks([self._task])
