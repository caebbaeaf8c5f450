"""An endpoint's own access: a change of it is noticed, fetched and used, without a restart.

The roster tells every agent the sequence of its access record. When that moves, the record is fetched, its credential
is kept where this identity keeps it, channels it no longer covers are dropped, the connection is rebuilt, and the
program hears `access` with the record and what was `dropped`. That fits into the time an administrator leaves between
writing a narrowing and cutting the old credential. An agent that was away longer needs `tidings agent export` again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tidings.broker.aio import end_tasks
from tidings.endpoint.channels import Channels
from tidings.endpoint.roster import Roster
from tidings.endpoint.supervision import Supervision
from tidings.errors import DeniedError, Reconnecting, TidingsError
from tidings.wire.patterns import covers_any
from tidings.wire.roster import Agent
from tidings.wire.subjects import Chat

RETRY_PAUSE = 0.2
REBUILT_WITHIN = 10.0


class AccessWatch:
    def __init__(
        self, link: Supervision, roster: Roster, channels: Channels, report: Callable[[str, Any], None]
    ) -> None:
        self.link = link
        self.channels = channels
        self._report = report
        #: sequence of the access record this connection stands on, and of the newest one heard of
        self._known: int | None = None if link.identity.is_bundle else 0
        self._heard = 0
        self._moved = asyncio.Event()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        roster.on_own_row.append(self._on_row)

    def _on_row(self, row: Agent) -> None:
        # A credential on a shared disk was new when we connected; one in a bundle may be older than its record.
        if self._known == 0:
            self._known = row.access
        self._heard = row.access
        if self._heard != self._known:
            self._moved.set()
            if self._task is None:
                self._task = asyncio.create_task(self._follow(), name=f"access of {self.link.identity.name}")

    async def _follow(self) -> None:
        """Fetch until what was heard of is known, for as long as it takes."""
        while True:
            await self._moved.wait()
            self._moved.clear()
            heard = self._heard
            try:
                await self.refresh()
                self._known = heard
            except TidingsError:
                self._moved.set()
                await asyncio.sleep(RETRY_PAUSE)

    async def record(self) -> dict[str, Any]:
        return dict((await self.link.call("access", "get"))["access"])

    async def refresh(self) -> bool:
        """Use the credential of the access record, if this connection does not. Answers whether it was rebuilt."""
        async with self._lock:
            access = await self.record()
            token = access.pop("jwt", None)
            if not token or token == self.link.token_used:
                return False
            if token != self.link.identity.token():
                self.link.identity.keep_token(token)
            held = {*self.channels.memberships, *self.channels.ended}
            self.channels.ended.clear()
            dropped = [each for each in held if not covers_any(access["read"], each)]
            for pattern in dropped:
                await self.channels.drop(pattern)
            self.link.reconnect()
            with suppress(Reconnecting):
                await self._rebuilt(token)
            self._report("access", {**access, "dropped": sorted(dropped)})
            return True

    async def _rebuilt(self, token: str) -> None:
        try:
            async with asyncio.timeout(REBUILT_WITHIN):
                while self.link.token_used != token or self.link.state != "ready":
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise Reconnecting(f"{self.link.identity.name} could not reconnect with its new access") from None

    async def renewed_since(self, token: str) -> bool:
        """Does this connection stand on another credential than `token`, or can it now?"""
        if self.link.token_used != token and self.link.state == "ready":
            return True
        return await self.refresh() or self.link.token_used != token

    async def explained(self, error: DeniedError, subject: str) -> DeniedError:
        """The same refusal, with its cause if posting is withheld, or with what may be posted to."""
        name = self.link.identity.name
        with suppress(TidingsError):
            access = await self.record()
            if withheld := access.get("withheld"):
                return DeniedError(
                    f"{name} may not post {withheld}; `tidings agent access {name} --post CHANNEL` restores it"
                )
            address = self.link.identity.subjects.parse(subject)
            if isinstance(address, Chat) and not covers_any(access["post"], address.channel):
                return DeniedError(
                    f"{name} may not post to {address.channel}: the broker refuses this agent; "
                    f"it may post to {', '.join(access['post']) or 'nothing'}"
                )
        return error

    async def close(self) -> None:
        await end_tasks([self._task])
