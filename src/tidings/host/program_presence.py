"""Who is here: an agent whose program is attached to this host, and not one whose mail the host merely keeps.

A program is attached while it follows its inbox, holds a task, or waits for an answer, and for a minute after its last
question. A command of the command line is none by asking: it is over before anybody could answer it. What is found
here is told to the agent's endpoint, which beats or does not; whoever ended otherwise is found by the next look.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidings.host.registry import Scope
from tidings.host.sessions import COMMAND, HostSession

#: after its last question a program counts as attached so long
LATELY = 60.0
LOOK_EVERY = 1.0


class ProgramPresence:
    """`holds`: does a program of this agent hold a task? `tell`: whether an agent is here, each time that changes."""

    def __init__(
        self,
        holds: Callable[[Scope], bool],
        tell: Callable[[Scope, bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holds, self._tell, self._clock = holds, tell, clock
        self._following: Counter[Scope] = Counter()
        self._waiting: Counter[str] = Counter()
        self._asked: dict[str, tuple[Scope, float]] = {}
        self._told: set[Scope] = set()

    @contextmanager
    def asking(self, session: HostSession) -> Iterator[None]:
        """A request of this session is being answered."""
        if session.program == COMMAND:
            yield
            return
        self._waiting[session.id] += 1
        self._asked[session.id] = session.scope, self._clock()
        if session.scope not in self._told:  # a session that asks is attached; `look` scans all of them
            self.look(session.scope)
        try:
            yield
        finally:
            self._waiting[session.id] -= 1
            if session.id in self._asked:
                self._asked[session.id] = session.scope, self._clock()

    def follow(self, scope: Scope, change: int) -> None:
        """A stream of events began (1) or ended (-1)."""
        self._following[scope] += change
        self.look(scope)

    def ended(self, session: HostSession) -> None:
        self._asked.pop(session.id, None)
        self._waiting.pop(session.id, None)
        self.look(session.scope)

    def is_attached(self, scope: Scope) -> bool:
        if self._following[scope] > 0 or self._holds(scope):
            return True
        since = self._clock() - LATELY
        return any(
            its_scope == scope and (self._waiting[session] > 0 or when > since)
            for session, (its_scope, when) in self._asked.items()
        )

    def look(self, scope: Scope) -> None:
        attached = self.is_attached(scope)
        if attached != (scope in self._told):
            (self._told.add if attached else self._told.discard)(scope)
            self._tell(scope, attached)

    async def sweep(self) -> None:
        """Find those who fell silent, and who holds a task although it asks nothing."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            since = self._clock() - LATELY
            silent = [s for s, (_, when) in self._asked.items() if when < since and not self._waiting[s]]
            scopes = self._told | {scope for scope, _ in self._asked.values()}
            for session in silent:
                del self._asked[session]
                self._waiting.pop(session, None)
            for scope in scopes:
                self.look(scope)
