"""What somebody else changes of this agent while it runs: its access, and its memberships.

The roster tells every agent the sequence of its access record and of the newest change of its memberships, and nothing
of what they are. When one moves, it is fetched, for as long as that takes.

A new access record: its credential is kept where this identity keeps it, channels it no longer covers are dropped, the
connection is rebuilt, and the program hears `access` with the record and what was `dropped`. That fits into the time an
administrator leaves between writing a narrowing and cutting the old credential. An agent that was away longer needs
`tidings agent export` again. Memberships that another program of this agent opened or closed are taken over by
`channels.py`, and the program hears each as a `membership` event.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tidings.broker.aio import end_tasks
from tidings.endpoint.channels import Channels
from tidings.endpoint.connection import AgentConnection
from tidings.endpoint.roster import Roster
from tidings.errors import DeniedError, Reconnecting, TidingsError
from tidings.wire.patterns import covers_any
from tidings.wire.roster import Agent
from tidings.wire.subjects import Chat

RETRY_PAUSE = 0.2
REBUILT_WITHIN = 10.0


class OwnRowWatch:
    """A number in this agent's own row: whenever it moves, `_fetch` is called until it succeeds."""

    def __init__(self, connection: AgentConnection, roster: Roster, channels: Channels) -> None:
        self.connection = connection
        self.channels = channels
        #: the number of what was fetched, and the newest one heard of
        self._known: int | None = None
        self._heard = 0
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        roster.on_own_row.append(self._on_row)

    @abstractmethod
    def _number(self, row: Agent) -> int:
        """What is watched."""

    @abstractmethod
    async def _fetch(self) -> object:
        """Take over what moved."""

    def _on_row(self, row: Agent) -> None:
        self._heard = self._number(row)
        if self._known is None:
            self._known = self._heard
        if self._heard != self._known and not self._closed:
            self._moved.set()
            if self._task is None:
                name = f"{type(self).__name__} of {self.connection.identity.name}"
                self._task = asyncio.create_task(self._follow(), name=name)

    async def _follow(self) -> None:
        while True:
            await self._moved.wait()
            self._moved.clear()
            heard = self._heard
            try:
                await self._fetch()
                self._known = heard
            except TidingsError:
                self._moved.set()
                await asyncio.sleep(RETRY_PAUSE)

    async def close(self) -> None:
        self._closed = True
        await end_tasks([self._task])


class MembershipWatch(OwnRowWatch):
    """`receives`: does this program take over what others join?"""

    def __init__(
        self, connection: AgentConnection, roster: Roster, channels: Channels, receives: Callable[[], bool]
    ) -> None:
        super().__init__(connection, roster, channels)
        self._receives = receives
        #: where memberships stood when this program came: it joins what it was told to, not what was there before
        self._since: int | None = None

    def _number(self, row: Agent) -> int:
        if self._since is None:
            self._since = row.moved
        return row.moved

    async def _fetch(self) -> None:
        answer = await self.connection.call("member", "list")
        stands = {str(each["pattern"]): int(each["joined"]) for each in answer["memberships"]}
        await self.channels.follow(stands, int(answer["seq"]), self._since or 0, adopt=self._receives())


class AccessWatch(OwnRowWatch):
    """The access record of this agent, and the credential in it."""

    def __init__(
        self, connection: AgentConnection, roster: Roster, channels: Channels, report: Callable[[str, Any], None]
    ) -> None:
        super().__init__(connection, roster, channels)
        self._report = report
        self._lock = asyncio.Lock()
        # A credential on a shared disk was new when we connected; one in a bundle may be older than its record.
        if connection.identity.is_bundle:
            self._known = -1

    def _number(self, row: Agent) -> int:
        return row.access

    async def _fetch(self) -> None:
        await self.refresh()

    async def record(self) -> dict[str, Any]:
        return dict((await self.connection.call("access", "get"))["access"])

    async def refresh(self) -> bool:
        """Use the credential of the access record, if this connection does not. Answers whether it was rebuilt."""
        async with self._lock:
            access = await self.record()
            token = access.pop("jwt", None)
            if not token or token == self.connection.token_used:
                return False
            if token != self.connection.identity.token():
                self.connection.identity.keep_token(token)
            held = {*self.channels.memberships, *self.channels.ended}
            self.channels.ended.clear()
            dropped = [each for each in held if not covers_any(access["read"], each)]
            for pattern in dropped:
                await self.channels.drop(pattern)
            self.connection.reconnect()
            with suppress(Reconnecting):
                await self._rebuilt(token)
            self._report("access", {**access, "dropped": sorted(dropped)})
            return True

    async def _rebuilt(self, token: str) -> None:
        try:
            async with asyncio.timeout(REBUILT_WITHIN):
                while self.connection.token_used != token or self.connection.state != "ready":
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise Reconnecting(f"{self.connection.identity.name} could not reconnect with its new access") from None

    async def renewed_since(self, token: str) -> bool:
        """Does this connection stand on another credential than `token`, or can it now?"""
        if self.connection.token_used != token and self.connection.state == "ready":
            return True
        return await self.refresh() or self.connection.token_used != token

    async def explained(self, error: DeniedError, subject: str) -> DeniedError:
        """The same refusal, with its cause if posting is withheld, or with what may be posted to."""
        name = self.connection.identity.name
        with suppress(TidingsError):
            access = await self.record()
            if withheld := access.get("withheld"):
                return DeniedError(
                    f"{name} may not post {withheld}; `tidings agent access {name} --post CHANNEL` restores it"
                )
            address = self.connection.identity.subjects.parse(subject)
            if isinstance(address, Chat) and not covers_any(access["post"], address.channel):
                return DeniedError(
                    f"{name} may not post to {address.channel}: the broker refuses this agent; "
                    f"it may post to {', '.join(access['post']) or 'nothing'}"
                )
        return error
