"""The one broker session of an agent on this host, shared by all its programs, from boot to shutdown.

    waiting -> open <-> reconnecting        superseded: open, but another session receives
    revoked: the credential is refused; tried again slowly, with whatever identity is on disk then

A session exists before its space can be reached and keeps trying for ever, with growing pauses; `wake` cuts a pause
short. Once open, the endpoint reconnects by itself. Health is the age of the last round trip to the broker, never
whether an object is there. Hooks hear that an endpoint is open (again, if it was replaced), that another broker process
answers, and that a newer session elsewhere receives. While that lives nobody takes it back without being told to
(`take_back`), nor does a host that starts: the number of the session is remembered on disk (`HeldNumber`), and an
endpoint goes on with it or finds a newer one. The steward is asked now and then, and once that ended this one receives
again.

`SessionPublisher` is the way of a row of the outbox to a broker: under its sender's identity, or the row waits. It
answers for one run of the broker at a time, and only once the outbox has met that run: what an earlier one confirmed is
verified before anything follows it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidings.client.direct_transport import DirectAgent
from tidings.client.publishing import Kind, Prepared, Stored
from tidings.errors import AuthRevoked, ConfigError, Reconnecting, TidingsError, UnreachableError
from tidings.util.backoff import Backoff
from tidings.util.private_files import read_private, write_private
from tidings.util.task_ends import end_tasks

SessionState = Literal["waiting", "open", "reconnecting", "superseded", "revoked", "stopped"]
OPEN: tuple[SessionState, ...] = ("open", "superseded")
RETRY = Backoff(0.2, 2.0, jitter=0.5)
#: between two tries of an agent that was revoked: only an operator changes that
REVOKED = Backoff(50.0, 50.0)
#: an endpoint that does not close in this time is abandoned
CLOSE_WITHIN = 5.0
#: whoever is not open for so long and was not told by its space why is stuck
STUCK_AFTER = 60.0
#: how often a superseded session asks whether the newer one ended
ASK_FOR_END = 5.0
#: a number is milliseconds of the steward's clock: one further ahead of ours is no number
CLOCK_SLACK = 86_400.0
log = logging.getLogger(__name__)


async def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Who wants to hear what. They run one at a time; `on_open` ends before anything else is told of that endpoint.

    If `on_open` raises, the endpoint is closed and opened anew later; what the others raise is logged.
    """

    on_open: Callable[[DirectAgent], Awaitable[None]] = _nothing
    #: the broker process before (None the first time) and now; compare with what was confirmed by whom
    on_incarnation: Callable[[str | None, str], Awaitable[None]] = _nothing
    on_superseded: Callable[[], Awaitable[None]] = _nothing
    #: the state it is in now, each time it is another; of an open endpoint after `on_incarnation`
    on_state: Callable[[SessionState], Awaitable[None]] = _nothing


@dataclass(frozen=True, slots=True)
class Health:
    """How a session is: `age` is seconds since the last round trip to the broker, None if there never was one."""

    state: SessionState
    age: float | None
    #: why it is not open, in a sentence
    error: str | None = None
    #: it is not open for long, and that its space cannot be reached, or revoked it, is not the reason
    stuck: bool = False


class HeldNumber:
    """The number of the receiving session that this home last held of an agent, in a file that outlives a process.

    Without one, or if it cannot be read, a session is taken from anybody.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> int | None:
        try:
            number = int(read_private(self.path))
        except (ConfigError, OSError, ValueError):
            return None
        return number if 0 < number <= (time.time() + CLOCK_SLACK) * 1000 else None

    def write(self, number: int) -> None:
        try:
            write_private(self.path, f"{number}\n")
        except (ConfigError, OSError) as error:
            log.warning("%s cannot be written: %s", self.path, error)


class AgentSession:
    """One agent of one space. `make_endpoint` gives a new endpoint each time, not opened: `tidings.connect(...)`."""

    def __init__(
        self,
        space: str,
        agent: str,
        make_endpoint: Callable[[], DirectAgent],
        hooks: Hooks | None = None,
        held: HeldNumber | None = None,
    ) -> None:
        self.space, self.agent = space, agent
        self._state: SessionState = "waiting"
        #: since when it is open, or is not
        self._since = time.monotonic()
        self.error: TidingsError | None = None
        #: the broker process that was last connected to
        self.incarnation: str | None = None
        self._make = make_endpoint
        self._hooks = hooks or Hooks()
        self._held = held
        #: somebody wants this one to receive, whoever does now, and it does not yet
        self._insists = False
        self._endpoint: DirectAgent | None = None
        self._last_round_trip: float | None = None
        self._news = asyncio.Event()
        self._hurry = asyncio.Event()
        self._replace = False
        self._told_superseded = False
        #: what the open endpoint said of an agent that was revoked
        self._refusal: AuthRevoked | None = None
        #: the number of the session that superseded this one and ended: the next endpoint takes the place of no other
        self._after: int | None = None
        self._told_state: SessionState | None = None
        self._task: asyncio.Task[None] | None = None

    # --- questions ---

    @property
    def state(self) -> SessionState:
        return self._state

    @state.setter
    def state(self, state: SessionState) -> None:
        if (state in OPEN) != (self._state in OPEN):
            self._since = time.monotonic()
        self._state = state

    @property
    def endpoint(self) -> DirectAgent:
        """The open endpoint. It may be reconnecting; Reconnecting, with the reason, if there is none."""
        if self._endpoint is None:
            why = f": {self.error}" if self.error else ""
            raise Reconnecting(f"{self.agent} is not connected to {self.space} yet{why}")
        return self._endpoint

    @property
    def is_connected(self) -> bool:
        """Would something sent now go out? The broker's answer is the only proof: see `health`."""
        return self._endpoint is not None and self._endpoint.transport.state == "ready"

    @property
    def is_away(self) -> bool:
        """Is it known that the space cannot be reached now? Not while the first connection is being made."""
        return self.state == "reconnecting" or (self.state in ("waiting", "revoked") and self.error is not None)

    @property
    def health(self) -> Health:
        last = self._newest_round_trip()
        age = None if last is None else max(0.0, time.monotonic() - last)
        is_late = self.state == "waiting" and time.monotonic() - self._since > STUCK_AFTER
        stuck = is_late and not isinstance(self.error, UnreachableError)
        return Health(self.state, age, str(self.error) if self.error else None, stuck)

    def _newest_round_trip(self) -> float | None:
        """Of this endpoint or the one before it."""
        if self._endpoint is not None and self._endpoint.transport.connection.last_round_trip:
            self._last_round_trip = self._endpoint.transport.connection.last_round_trip
        return self._last_round_trip

    # --- life ---

    def start(self) -> None:
        """Begin trying. Returns at once, whether or not anything can be reached."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"session of {self.agent} in {self.space}")

    def wake(self) -> None:
        """Somebody wants to send, or the network came back: try now."""
        self._hurry.set()
        if self._endpoint is not None:
            self._endpoint.transport.connection.hurry()

    def take_back(self) -> None:
        """Receive here again: the session that superseded this one is superseded in turn."""
        if self._told_superseded:
            self._replace, self._after = True, None
            self._news.set()
        if self._told_superseded or self._endpoint is None or self._endpoint.transport.session.number is None:
            self._insists = True

    def renew(self, *, takes: bool = False) -> None:
        """Open another endpoint in the place of this one: what it is made of changed. `takes`: it receives whoever
        does now."""
        self._insists = self._insists or takes
        if self._endpoint is not None:
            self.state = "waiting"
        self._replace = True
        self._news.set()
        self._hurry.set()

    async def stop(self) -> None:
        """End in bounded time, whatever the broker does."""
        await end_tasks([self._task])
        await self._close()
        self.state = "stopped"

    async def _run(self) -> None:
        delays, revoked, refusals = RETRY.delays(), REVOKED.delays(), 0
        while True:
            self._hurry.clear()
            try:
                await self._open()
            except Exception as error:  # noqa: BLE001  boundary: hooks are others' code, and a session never gives up
                self._failed(error)
                await self._close()
                await self._tell_state()
                await self._pause(next(revoked if isinstance(error, AuthRevoked) else delays))
                continue
            delays = RETRY.delays()
            await self._follow()
            self.state = "waiting"  # before it closes: nobody is to use it meanwhile
            await self._close()
            refusals = 0 if self._refusal is None else refusals + 1
            if self._refusal is not None and refusals > 1:  # the broker takes it, and the steward does not
                self._failed(self._refusal)
                await self._tell_state()
                await self._pause(next(revoked))
            else:
                await self._tell_state()

    async def _open(self) -> None:
        endpoint = self._make()
        endpoint.on("connection", lambda _state: self._news.set())
        endpoint.on("superseded", lambda _number: self._news.set())
        endpoint.on("error", self._heard)
        self._replace = self._told_superseded = False
        self._refusal = None
        self._news.clear()
        endpoint.transport.receives_after = self._after
        endpoint.transport.on_session_number = self._received
        if self._held is not None and self._after is None and not self._insists:
            endpoint.transport.resumes_session = self._held.read()
        await endpoint.open()
        self._endpoint, self._after = endpoint, None
        self.state, self.error = "open", None
        await self._hooks.on_open(endpoint)

    def _received(self, number: int) -> None:
        self._insists = False
        if self._held is not None:
            self._held.write(number)

    async def _follow(self) -> None:
        """Tell what happens to the open endpoint, until it is to be replaced."""
        while not self._replace:
            self._news.clear()
            endpoint = self.endpoint
            superseded, now = endpoint.transport.session.superseded.is_set(), endpoint.transport.incarnation
            if superseded and self._insists:  # asked for while this one found out that another receives
                self._replace, self._after = True, None
                return
            self.state = "reconnecting" if now is None else "superseded" if superseded else "open"
            if now is not None and now != self.incarnation:
                before, self.incarnation = self.incarnation, now
                await self._tell(self._hooks.on_incarnation, before, now)
            if superseded and not self._told_superseded:
                self._told_superseded = True
                await self._tell(self._hooks.on_superseded)
            await self._tell_state()
            if self.state == "superseded":
                await self._news_or_end(endpoint)
            else:
                await self._news.wait()

    async def _news_or_end(self, endpoint: DirectAgent) -> None:
        """Until there is news, or the session that superseded this one ended: then it is replaced."""
        # who never held it met a session that may be over for long
        pause = 0.0 if endpoint.transport.session.number is None else ASK_FOR_END
        while not self._news.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(pause / 2, pause)):
                    await self._news.wait()
                    return
            pause = ASK_FOR_END
            try:
                ended = await endpoint.transport.session.ended()
            except TidingsError as error:
                log.debug("%s in %s: nobody says whether the newer session ended: %s", self.agent, self.space, error)
                continue
            if ended is not None and not self._replace:
                log.info("the newer session of %s in %s ended: this one receives again", self.agent, self.space)
                self._replace, self._after = True, ended
                return

    async def _tell_state(self) -> None:
        if self.state != self._told_state:
            self._told_state = self.state
            await self._tell(self._hooks.on_state, self.state)

    def _heard(self, error: BaseException) -> None:
        """After a few refusals an endpoint says that its credential is not taken, and at once that its steward knows it
        no more. The name may come back with another key, which is another identity and so another endpoint."""
        if isinstance(error, AuthRevoked):
            self._replace, self._refusal = True, error
            self._news.set()

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, TidingsError):
            log.error("the session of %s in %s failed", self.agent, self.space, exc_info=error)
        self.state = "revoked" if isinstance(error, AuthRevoked) else "waiting"
        self.error = error if isinstance(error, TidingsError) else TidingsError(f"{type(error).__name__}: {error}")

    async def _tell(self, hook: Callable[..., Awaitable[None]], *facts: object) -> None:
        try:
            await hook(*facts)
        except Exception:  # boundary: others' code
            log.exception("a hook of the session of %s in %s failed", self.agent, self.space)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def _close(self) -> None:
        self._newest_round_trip()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            return
        try:
            async with asyncio.timeout(CLOSE_WITHIN):
                await endpoint.close()
        except TimeoutError:
            log.warning("%s in %s did not close in %.0f s and is abandoned", self.agent, self.space, CLOSE_WITHIN)
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_WITHIN):
                    await endpoint.transport.connection.stop()


class SessionPublisher:
    """One agent's session as the drain sees it."""

    def __init__(self, session: AgentSession) -> None:
        self.session = session
        #: the run of the broker that the outbox has met
        self.met: str | None = None

    @property
    def endpoint(self) -> DirectAgent:
        return self.session.endpoint

    @property
    def incarnation(self) -> str:
        found = self.endpoint.transport.incarnation
        if found is None or found != self.met:
            raise Reconnecting(f"{self.session.agent} is connecting to {self.session.space}")
        return found

    async def publish(self, prepared: Prepared, incarnation: str, timeout: float) -> Stored:
        return await self.endpoint.transport.publish(prepared, timeout=timeout, only=incarnation)

    async def is_stored(self, prepared: Prepared, seq: int) -> bool:
        return await self.endpoint.transport.publisher.is_stored(prepared, seq)

    async def find_stored(self, prepared: Prepared, since: float) -> int | None:
        return await self.endpoint.transport.publisher.find(prepared, since)

    async def which_stored(self, kind: Kind, destination: str, ids: list[str], since: float) -> set[str]:
        return await self.endpoint.transport.publisher.which(kind, destination, ids, since)

    async def prove(self) -> str:
        return await self.endpoint.transport.connection.prove()


class SessionPublishers:
    """Those of all agents of this host: `find` gives one by (space, sender), `all_of` those of a space."""

    def __init__(
        self, find: Callable[[str, str], SessionPublisher | None], all_of: Callable[[str], Iterable[SessionPublisher]]
    ) -> None:
        self._find, self._all_of = find, all_of

    def of(self, space: str, sender: str) -> SessionPublisher:
        found = self._find(space, sender)
        if found is None:
            raise AuthRevoked(f"this host does not work for {sender}: open a session of that agent here")
        return found

    def any_of(self, space: str) -> SessionPublisher:
        for publisher in self._all_of(space):
            try:
                _ = publisher.incarnation
            except TidingsError:
                continue
            return publisher
        raise Reconnecting(f"no agent of this host is connected to {space}")
