"""One supervisor owns the connection: it opens it, watches it, and rebuilds it when it is gone.

    starting -> ready <-> reconnecting -> stopped

The connection's own reconnect is not used: whoever holds pulls and subscriptions must know of every new one. A client
that misses two heartbeats is abandoned, credentials are read from disk for every attempt, and every wait on the old
client ends at once with `ConnectionLost`. One rebuild runs at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal, TypeVar

from tidings.admin.identity import Identity
from tidings.contract.core import Request
from tidings.errors import AuthRevoked, ConnectionLost, Reconnecting, StewardUnreachable, TidingsError, UntrustedServer
from tidings.nats.client import Connection, connect
from tidings.nats.errors import NatsError, NoResponders
from tidings.nats.jwt import split_credentials
from tidings.rpc.control import decode_answer, encode_request
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks

State = Literal["starting", "ready", "reconnecting", "stopped"]
#: a broker that answers again is found within five seconds, the attempt itself included
RECONNECT = Backoff(0.1, 2.0, jitter=0.5)
REVOKED = Backoff(8.0, 8.0)
A = TypeVar("A")
log = logging.getLogger(__name__)

OnSession = Callable[[Connection], Awaitable[None]]
OnState = Callable[[State, BaseException | None], None]


class AgentConnection:
    """The connection of one identity. `on_session` hooks run, in order, every time one is open."""

    def __init__(
        self, identity: Identity, *, ping_interval: float = 5.0, on_state: OnState = lambda _s, _e: None
    ) -> None:
        self.identity = identity
        self.ping_interval = ping_interval
        self.state: State = "starting"
        self.rebuilds = 0
        #: the credential this connection was opened with
        self.token_used = ""
        self.last_round_trip = 0.0
        #: of the log, as the steward last said it
        self.epoch = ""
        self._on_state = on_state
        self._hooks: list[OnSession] = []
        self._connection: Connection | None = None
        self._lost = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    def on_session(self, hook: OnSession) -> None:
        self._hooks.append(hook)

    # --- life ---

    async def start(self) -> None:
        """Connect for the first time; whoever cannot hears it here. From then on it reconnects by itself."""
        await self._open()
        self._task = asyncio.create_task(self._watch(), name=f"supervision of {self.identity.name}")

    async def stop(self) -> None:
        self._stopping = True
        self._set("stopped")
        self._ready.set()  # whoever waits for a connection hears now that none comes
        self._lost.set()
        self._hurry.set()
        await end_tasks([self._task])
        await self._drop()

    def reconnect(self) -> None:
        """Rebuild now; a pause between attempts is cut short."""
        self._hurry.set()
        self._lost.set()

    def hurry(self) -> None:
        """Cut a pause between attempts short; a connection that works is left alone."""
        self._hurry.set()

    @property
    def _ended(self) -> bool:
        return self._stopping

    def _set(self, state: State, error: BaseException | None = None) -> None:
        changed = self.state != state
        self.state = state
        (self._ready.set if state == "ready" else self._ready.clear)()
        if changed:
            self._on_state(state, error)

    async def _open(self) -> None:
        self._lost = asyncio.Event()
        lost = self._lost

        identity = self.identity
        if not identity.path.exists():
            raise AuthRevoked(f"the credential of {identity.name} is gone ({identity.path}): revoked, or moved")
        credentials = identity.credentials()
        self.token_used = split_credentials(credentials)[0]
        self._connection = connection = await connect(
            identity.url_now(),
            credentials,
            identity.id,
            name=identity.name,
            reconnect=False,
            on_closed=lost.set,
        )
        for hook in self._hooks:
            await hook(connection)
        self.last_round_trip = time.monotonic()
        self._set("ready")

    async def _watch(self) -> None:
        while not self._stopping:
            await self._until_lost()
            if self._ended:
                return
            self._set("reconnecting")
            await self._drop()
            await self._rebuild()

    async def _until_lost(self) -> None:
        """Heartbeats: a round trip every interval; two misses in a row and the client is given up.

        The second is tried at once, so that a connection which went deaf is noticed within three intervals.
        """
        misses = 0
        while misses < 2:
            if not misses:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.ping_interval):
                        await self._lost.wait()
            if self._lost.is_set():
                return
            connection = self._connection
            assert connection is not None
            try:
                await connection.flush(timeout=self.ping_interval)
            except (NatsError, OSError, TimeoutError):
                misses += 1
            else:
                misses = 0
                self.last_round_trip = time.monotonic()

    async def _drop(self) -> None:
        """Abandon a client: wake its waiters, and do not wait for a socket that may never close."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        connection.fail_pending(ConnectionLost(f"{self.identity.name} lost its connection to the broker"))
        with suppress(Exception):
            async with asyncio.timeout(1):
                await connection.close()

    async def _rebuild(self) -> None:
        delays, revoked, refused, untrusted = RECONNECT.delays(), REVOKED.delays(), 0, False
        while not self._stopping:
            self._hurry.clear()
            delay = next(delays)
            try:
                await self._open()
            except AuthRevoked as error:
                refused += 1
                if refused == 3:
                    self._on_state("reconnecting", error)
                delay = next(revoked) if refused >= 3 else delay
            except UntrustedServer as error:  # it does not mend itself, and whoever waits should know
                if not untrusted:
                    self._on_state("reconnecting", error)
                untrusted = True
            except (TidingsError, NatsError, OSError, TimeoutError) as error:
                log.debug("%s cannot reconnect yet: %s", self.identity.name, error)
            else:
                self.rebuilds += 1
                return
            await self._drop()
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._hurry.wait()

    # --- use ---

    @property
    def _is_about_to(self) -> bool:
        """Did the connection go a moment ago, so that whoever rebuilds it does not know yet?"""
        return self.state == "ready" and self._connection is not None and not self._connection.is_connected

    @property
    def current(self) -> Connection:
        if self.state == "stopped":
            raise ConnectionLost(f"this endpoint of {self.identity.name} is closed: open another one")
        if self._connection is None or self.state != "ready":
            raise Reconnecting(f"{self.identity.name} is {self.state}: wait for it, or try again")
        return self._connection

    async def ready(self, within: float) -> Connection:
        """The connection, waiting for a rebuild if one is under way."""
        connection = self._connection
        if self.state == "ready" and connection is not None and connection.is_connected:
            return connection
        try:
            async with asyncio.timeout(within):
                await self._ready.wait()
                while self.state == "reconnecting" or self._is_about_to:  # a closed one stays so
                    await (asyncio.sleep(0.005) if self._is_about_to else self._ready.wait())
        except TimeoutError:
            raise Reconnecting(f"{self.identity.name} could not reconnect within {within:.0f} s") from None
        return self.current

    def incarnation_of(self, connection: Connection) -> str:
        """What a confirmation on this connection holds with: one run of a broker.

        Of a cluster it is the epoch of its log: a node that starts again lost nothing that others confirmed with it.
        """
        return f"cluster:{self.epoch}" if connection.is_clustered else connection.incarnation

    def follow_epoch(self, epoch: str) -> None:
        """The steward speaks of a log of this epoch."""
        if not epoch or epoch == self.epoch:
            return
        self.epoch = epoch
        if self._connection is not None and self._connection.is_clustered and self.state == "ready":
            self._on_state(self.state, None)

    async def prove(self, timeout: float = 5.0) -> str:
        """A round trip on the connection there is; the run of the broker that answered."""
        connection = self.current
        try:
            await connection.flush(timeout=timeout)
        except (NatsError, OSError, TimeoutError) as error:
            raise ConnectionLost(f"the broker does not answer {self.identity.name} ({error})") from error
        self.last_round_trip = time.monotonic()
        return self.incarnation_of(connection)

    async def call(
        self,
        request: Request[A],
        /,
        *,
        op: str | None = None,
        timeout: float = 5.0,
        connection: Connection | None = None,
    ) -> A:
        """Ask the steward. `connection` is for hooks, which run before the state is ready."""
        asked, name = connection or self.current, request.operation.name
        subject = self.identity.subjects.control(request.operation.service, self.identity.id)
        try:
            message = await asked.request(subject, encode_request(request, op), timeout=timeout)
        except NoResponders as error:
            raise StewardUnreachable(f"the steward of {self.identity.subjects.space} does not answer") from error
        except TimeoutError as error:
            raise StewardUnreachable(f"the steward does not answer ({name}, {timeout:.0f} s)") from error
        except (NatsError, OSError) as error:
            raise ConnectionLost(f"the connection went while asking {name} ({error})") from error
        return decode_answer(request, message.data)
