"""What somebody else changes of this agent while it runs: its access, and its memberships.

The roster tells every agent the sequence of its access record and of the newest change of its memberships, and nothing
of what they are. When one moves, it is fetched, for as long as that takes.

A new access record: its credential is kept where this identity keeps it, channels it no longer covers are dropped, the
connection is rebuilt, and the program hears `access` with the record and what was `dropped`. That fits into the time an
administrator leaves between writing a narrowing and cutting the old credential. An agent that was away longer needs
`tidings agent export` again. A credential that ends by itself is fetched anew well before it does. With its access an
agent elsewhere learns whose certificates it is to trust, and keeps that in its bundle: so the authority of a space can
be another one some day. Memberships that another program of this agent opened or closed are taken over by
`channels.py`, and the program hears each as a `membership` event.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from tidings.client.channels import Channels
from tidings.client.connection import AgentConnection
from tidings.client.roster import Roster
from tidings.contract.agents import AccessRequest
from tidings.contract.channels import MembershipsRequest
from tidings.errors import ConfigError, DeniedError, Reconnecting, TidingsError
from tidings.nats.jwt import decode, expiry_of
from tidings.util.task_ends import end_tasks
from tidings.wire.names import covers_any
from tidings.wire.roster import AgentEntry
from tidings.wire.rulings import Access
from tidings.wire.subjects import Chat

RETRY_PAUSE = 0.2
#: the share of its life that a credential has left when it is renewed, and the pause if there is no newer one yet
RENEWED_AT = 0.6
RENEWAL_PAUSE = 20.0
REBUILT_WITHIN = 10.0
#: seconds after which an agent elsewhere asks again although nothing moved: whom to trust may have changed
ASK_AGAIN = 3_600.0

log = logging.getLogger(__name__)


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
        #: seconds after which it is fetched although it did not move
        self._again: float | None = None
        roster.on_own_row.append(self._on_row)

    @abstractmethod
    def _number(self, row: AgentEntry) -> int:
        """What is watched."""

    @abstractmethod
    async def _fetch(self) -> object:
        """Take over what moved."""

    def _on_row(self, row: AgentEntry) -> None:
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
            with suppress(TimeoutError):
                async with asyncio.timeout(self._again):
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

    def _number(self, row: AgentEntry) -> int:
        if self._since is None:
            self._since = row.moved
        return row.moved

    async def _fetch(self) -> None:
        answer = await self.connection.call(MembershipsRequest())
        stands = {each.pattern: each.joined for each in answer.memberships}
        await self.channels.follow(stands, answer.seq, self._since or 0, adopt=self._receives())


class AccessWatch(OwnRowWatch):
    """The access record of this agent, and the credential in it."""

    def __init__(
        self, connection: AgentConnection, roster: Roster, channels: Channels, report: Callable[[str, Any], None]
    ) -> None:
        super().__init__(connection, roster, channels)
        self._report = report
        self._lock = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        # A credential on a shared disk was new when we connected; one in a bundle may be older than its record.
        if connection.identity.is_bundle:
            self._known, self._again = -1, ASK_AGAIN * random.uniform(0.8, 1.2)

    def _number(self, row: AgentEntry) -> int:
        return row.access

    async def _fetch(self) -> None:
        await self.refresh()

    def begin(self) -> None:
        """From now on renew a credential that ends by itself."""
        if self._ends() is not None:
            self._renewing = asyncio.create_task(self._renew(), name=f"renewal of {self.connection.identity.name}")

    def _ends(self) -> int | None:
        return expiry_of(self.connection.token_used)

    async def _renew(self) -> None:
        used, since = "", 0.0
        while (ends := self._ends()) is not None:
            if used != self.connection.token_used:
                used, since = self.connection.token_used, time.monotonic()
            life = ends - int(decode(used)["iat"])
            # By this machine's clock, or by how long it was in use: a clock that is behind would wait beyond its end.
            left = min(ends - life * RENEWED_AT - time.time(), since + life * (1 - RENEWED_AT) - time.monotonic())
            if left > 0:
                await asyncio.sleep(left)
                continue
            with suppress(TidingsError):
                await self.refresh(quietly=True)
            await asyncio.sleep(min(RENEWAL_PAUSE, max(life / 20, 0.1)))

    async def close(self) -> None:
        await super().close()
        await end_tasks([self._renewing])

    async def record(self) -> Access:
        answer = await self.connection.call(AccessRequest())
        if self.connection.identity.is_bundle and answer.authority:
            self._keep_trust(answer.authority)
        return answer.access

    def _keep_trust(self, authority: bytes) -> None:
        """A bundle that cannot be written is as good as it was, until the authority is another one."""
        try:
            self.connection.identity.keep_trust(authority)
        except ConfigError as error:
            log.warning("whom to trust could not be written: %s", error)

    async def refresh(self, *, quietly: bool = False) -> bool:
        """Use the credential of the access record, if this connection does not. Answers whether it was rebuilt.

        `quietly`: the program hears of it only if channels were dropped.
        """
        async with self._lock:
            access = await self.record()
            token = access.jwt
            if not token or token == self.connection.token_used or self._is_older(token):
                return False
            if token != self.connection.identity.token():
                self.connection.identity.keep_token(token)
            held = {*self.channels.memberships, *self.channels.ended}
            self.channels.ended.clear()
            dropped = [each for each in held if not covers_any(access.read, each)]
            for pattern in dropped:
                await self.channels.drop(pattern)
            self.connection.reconnect()
            with suppress(Reconnecting):
                await self._rebuilt(token)
            if dropped or not quietly:
                record = plain(access)
                del record["jwt"]
                self._report("access", {**record, "dropped": sorted(dropped)})
            return True

    def _is_older(self, token: str) -> bool:
        """Was it made before ours? The one in the record is not written again when it is renewed."""
        return int(decode(token)["iat"]) < int(decode(self.connection.token_used)["iat"])

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
            if withheld := access.withheld:
                return DeniedError(
                    f"{name} may not post {withheld}; `tidings agent access {name} --post CHANNEL` restores it"
                )
            address = self.connection.identity.subjects.parse(subject)
            if isinstance(address, Chat) and not covers_any(access.post, address.channel):
                return DeniedError(
                    f"{name} may not post to {address.channel}: the broker refuses this agent; "
                    f"it may post to {', '.join(access.post) or 'nothing'}"
                )
        return error


def plain(access: Access) -> dict[str, Any]:
    """Returns the fields of an access record as plain JSON values."""
    return dict(msgspec.json.decode(msgspec.json.encode(access)))
