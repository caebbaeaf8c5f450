"""The way from a row of the outbox to a broker: the session of the agent that sent it, and no other.

A row leaves under its sender's identity or waits. A publisher answers for one run of the broker at a time, and only
once the outbox has met that run: what an earlier one confirmed is verified before anything follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidings.client.endpoint import Endpoint
from tidings.client.publishing import Kind, Prepared, Stored
from tidings.errors import AuthRevoked, Reconnecting, TidingsError
from tidings.host.agent_sessions import AgentSession


class SessionPublisher:
    """One agent's session as the drain sees it."""

    def __init__(self, session: AgentSession) -> None:
        self.session = session
        #: the run of the broker that the outbox has met
        self.met: str | None = None

    @property
    def endpoint(self) -> Endpoint:
        return self.session.endpoint

    @property
    def incarnation(self) -> str:
        found = self.endpoint.incarnation
        if found is None or found != self.met:
            raise Reconnecting(f"{self.session.agent} is connecting to {self.session.space}")
        return found

    async def publish(self, prepared: Prepared, incarnation: str, timeout: float) -> Stored:
        return await self.endpoint.publish(prepared, timeout=timeout, only=incarnation)

    async def is_stored(self, prepared: Prepared, seq: int) -> bool:
        return await self.endpoint.is_stored(prepared, seq)

    async def find_stored(self, prepared: Prepared, since: float) -> int | None:
        return await self.endpoint.find_stored(prepared, since=since)

    async def which_stored(self, kind: Kind, destination: str, ids: list[str], since: float) -> set[str]:
        return await self.endpoint.which_stored(kind, destination, ids, since=since)

    async def prove(self) -> str:
        return await self.endpoint.prove()


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
