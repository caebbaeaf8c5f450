"""Who speaks to the host: sessions, each of exactly one agent of one space, opened by proving that agent's key.

    challenge -> proof by the agent's key (`client/host_session.py`) -> token -> every request states it

A nonce is good once and for 30 seconds. Of a token only its hash is kept, in the database, so a session outlives a
restart of the host; it ends when it is told to, or after 30 days without use. What it may see is its scope and nothing
else. A request without a session is refused.

`ProgramPresence` knows who is here: an agent whose program is attached to this host, and not one whose mail the host
merely keeps. A program is attached while it follows its inbox, holds a task, or waits for an answer, and for a minute
after its last question. A CLI command is not attached: it exits before anybody could answer it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tidings.errors import HostBusy, NoSession
from tidings.host.registry import Scope
from tidings.util.database import Database
from tidings.wire.message import new_id

CHALLENGE_SECONDS = 30.0
MOST_SESSIONS = 10_000
UNUSED_MS = 30 * 86_400_000
#: a use is written down at most this often
NOTED_MS = 3_600_000
TOKEN_BYTES = 32
MAX_PROGRAM = 100
#: the program of a session that a command of the command line opened, and left for the next one
COMMAND = "tidings"
#: an end that could not be written is tried again so often
SWEEP = 15.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostSession:
    """An authenticated session of one agent. Times are milliseconds since 1970."""

    id: str
    scope: Scope
    receive: bool
    program: str
    opened_at: int
    used_at: int


class Challenges:
    """Nonces, good once and for a while. `clock` never jumps.

    What was given out is not kept: a nonce shows by itself that this run made it, and when. So nobody who asks for
    many and answers none can keep others from a session. Only what was used is kept, until it would end anyway.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(TOKEN_BYTES)
        self._used: dict[str, float] = {}

    def issue(self) -> str:
        made = f"{int((self._clock() + CHALLENGE_SECONDS) * 1000):x}.{secrets.token_urlsafe(TOKEN_BYTES)}"
        return f"{made}.{self._mark(made)}"

    def spend(self, nonce: str) -> bool:
        """Was it given out, not long ago, and not used? From now on it is."""
        now, until = self._clock(), self._end_of(nonce)
        while self._used and next(iter(self._used.values())) <= now:
            del self._used[next(iter(self._used))]
        if now >= until or nonce in self._used:
            return False
        self._used[nonce] = until
        return True

    def _end_of(self, nonce: str) -> float:
        """When it ends; never begun if it is not ours."""
        made, _, mark = nonce.rpartition(".")
        if not hmac.compare_digest(mark.encode("utf-8", "replace"), self._mark(made).encode()):
            return -math.inf
        return int(made.partition(".")[0], 16) / 1000

    def _mark(self, made: str) -> str:
        return hmac.new(self._secret, made.encode("utf-8", "replace"), "sha256").hexdigest()


_OVER = asyncio.Event()
_OVER.set()


class Sessions:
    """All sessions of this host, in memory and in the database, which agree. Made by `open`."""

    def __init__(self, database: Database, known: dict[bytes, HostSession]) -> None:
        self._database = database
        self._known = known
        #: of each session that lasts; set when it ends
        self._ends = {session.id: asyncio.Event() for session in known.values()}
        self._ended: list[Callable[[HostSession], Any]] = []
        #: sessions that are over and still in the database
        self._unforgotten: set[str] = set()
        self.challenges = Challenges()

    @classmethod
    async def open(cls, database: Database) -> Sessions:
        now = database.now()
        return cls(database, await database.write(lambda connection: _load(connection, now)))

    def __len__(self) -> int:
        return len(self._known)

    def on_end(self, callback: Callable[[HostSession], Any]) -> None:
        self._ended.append(callback)

    async def begin(self, scope: Scope, *, receive: bool, program: str) -> tuple[HostSession, str]:
        """A new session of this scope, and its token, which is not kept."""
        if len(self._known) >= MOST_SESSIONS:
            await self._make_room(scope)
        token, now = secrets.token_urlsafe(TOKEN_BYTES), self._database.now()
        session = HostSession(new_id(), scope, receive, program[:MAX_PROGRAM], now, now)
        await self._database.write(lambda connection: _insert(connection, _digest(token), session))
        self._known[_digest(token)] = session
        self._ends[session.id] = asyncio.Event()
        return session, token

    async def _make_room(self, scope: Scope) -> None:
        """Programs that were killed leave sessions behind, which nobody else can end: the longest unused one goes."""
        theirs = [each for each in self._known.values() if each.scope == scope]
        if len(theirs) <= MOST_SESSIONS // 2:
            theirs = list(self._known.values())
        oldest = min(theirs, key=lambda each: each.used_at)
        if self._database.now() - oldest.used_at < NOTED_MS:
            raise HostBusy(f"this host has {MOST_SESSIONS} sessions, all used within the hour: end some")
        await self.end(oldest)

    async def find(self, token: str) -> HostSession:
        """Whose token this is; NoSession if nobody's."""
        digest = _digest(token)
        session, now = self._known.get(digest), self._database.now()
        if session is None:
            raise NoSession("the host does not know this token: the session ended, or it was another host's; open one")
        if now - session.used_at > UNUSED_MS:
            await self.end(session)
            raise NoSession(f"session {session.id} was not used for 30 days and has ended: open another")
        if abs(now - session.used_at) > NOTED_MS:
            session = self._known[digest] = replace(session, used_at=now)
            await self._note_use(session)
        return session

    async def _note_use(self, session: HostSession) -> None:
        try:
            await self._database.write(lambda c: c.execute(_USED, (session.used_at, session.id)).rowcount)
        except Exception as error:  # noqa: BLE001  boundary: a disk that is full keeps nobody from reading
            log.warning("the use of session %s is not noted: %s", session.id, error)

    def ending(self, session: HostSession) -> asyncio.Event:
        """Set once it has ended. For who answers a session over a long time: nothing is told to one that is over."""
        return self._ends.get(session.id, _OVER)

    async def end(self, session: HostSession) -> bool:
        """Its token is worth nothing from now on. False: that is not on disk yet, and is tried again."""
        if (ending := self._ends.pop(session.id, None)) is not None:
            ending.set()
        self._known = {digest: each for digest, each in self._known.items() if each.id != session.id}
        self._unforgotten.add(session.id)
        for callback in self._ended:
            callback(session)
        await self.forget_ended()
        return session.id not in self._unforgotten

    async def forget_ended(self) -> None:
        """Remove from disk what ended; what cannot be removed now is for the next time."""
        over = sorted(self._unforgotten)
        if not over:
            return
        try:
            await self._database.write(lambda c: c.executemany(_FORGET, [(each,) for each in over]).rowcount)
        except Exception as error:  # noqa: BLE001  boundary: whatever it was, they are over and are tried again
            log.warning("%d sessions ended, which cannot be written now: %s", len(over), error)
        else:
            self._unforgotten.difference_update(over)

    async def sweep(self) -> None:
        """For ever: write down the ends that could not be written at once."""
        while True:
            await asyncio.sleep(SWEEP)
            await self.forget_ended()


_FORGET = "DELETE FROM session WHERE id = ?"
_USED = "UPDATE session SET used_at = ? WHERE id = ?"
_COLUMNS = "digest, id, space, space_id, agent, name, receive, program, opened_at, used_at"


def _digest(token: str) -> bytes:
    return hashlib.sha256(b"tidings host token\n" + token.encode("utf-8", "replace")).digest()


def _insert(connection: sqlite3.Connection, digest: bytes, session: HostSession) -> None:
    scope = session.scope
    connection.execute(
        f"INSERT INTO session ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(digest, session.id, scope.space, scope.space_id, scope.agent, scope.name),
            *(int(session.receive), session.program, session.opened_at, session.used_at),
        ),
    )


def _load(connection: sqlite3.Connection, now: int) -> dict[bytes, HostSession]:
    connection.execute("DELETE FROM session WHERE used_at < ?", (now - UNUSED_MS,))
    return {
        digest: HostSession(session, Scope(space, space_id, agent, name), bool(receive), program, opened, used)
        for digest, session, space, space_id, agent, name, receive, program, opened, used in connection.execute(
            f"SELECT {_COLUMNS} FROM session"
        )
    }


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
