"""The desk over the host's daemon: one session, renewed when the host forgot it or was started anew.

A call that finds no host asks for one (`find_host` may start it) and is made once more; every call here may be made
twice, because sends carry their ids. What nobody asked for (following events, signs of life) never starts a host:
somebody may have stopped it on purpose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from tidings.errors import HostUnreachable, NoSession, TidingsError
from tidings.host.client import HostClient, PastPage, Session
from tidings.mcp.desk import Event, Facts

T = TypeVar("T")
FindHost = Callable[[], HostClient]
OpenSession = Callable[[HostClient], Session]


class HostDesk:
    """`open_session` proves the agent's key, or resumes a session from a file; only what was opened here is ended."""

    def __init__(self, find_host: FindHost, open_session: OpenSession, *, borrowed: bool = False) -> None:
        self._find, self._open, self._borrowed = find_host, open_session, borrowed
        self._lock = threading.Lock()
        self._closed = False
        self._session = open_session(find_host())

    @property
    def space(self) -> str:
        return self._session.space

    @property
    def agent(self) -> str:
        return self._session.agent

    @property
    def name(self) -> str:
        return self._session.name

    # --- asking, whatever became of the host ---

    def _ask(self, act: Callable[[Session], T]) -> T:
        session = self._session
        try:
            return act(session)
        except HostUnreachable:
            self._find()
        except NoSession:
            return act(self._renewed(session))
        try:
            return act(session)
        except NoSession:
            return act(self._renewed(session))

    def _renewed(self, stale: Session) -> Session:
        with self._lock:
            if self._closed or self._borrowed:
                raise NoSession(
                    "the session of this server has ended on the host: start it again with a session that lasts"
                )
            if self._session is stale:
                self._session = self._open(self._find())
            return self._session

    def close(self) -> None:
        """End the session: what it has claimed goes back. One that was borrowed stays its owner's."""
        with self._lock:
            self._closed = True
            if not self._borrowed:
                with suppress(TidingsError):
                    self._session.end()

    # --- mail ---

    def reachable(self) -> bool:
        """Is it worth waiting for the space? False only if it is known to be away."""
        health = self._ask(lambda session: session.me())["health"]
        return not health["reason"] or health["state"] in ("open", "superseded")

    def send(self, request: Mapping[str, Any], wait: float) -> Facts:
        return asdict(self._ask(lambda session: session.send(**request, wait=wait)))

    def outbox(self, limit: int) -> list[Facts]:
        return self._ask(lambda session: session.outbox(limit=limit))

    def outbox_row(self, message_id: str) -> Facts:
        return self._ask(lambda session: session.outbox_show(message_id))

    def inbox(self, *, unread: bool, limit: int) -> list[Facts]:
        return self._ask(lambda session: session.inbox(unread=unread, limit=limit, direct_first=True))

    def unread(self) -> Mapping[str, int]:
        return self._ask(lambda session: session.unread())

    def mark_read(self, rows: Sequence[int]) -> int:
        return self._ask(lambda session: session.mark_read(rows))

    def thread(self, message_id: str) -> list[Facts]:
        return self._ask(lambda session: session.thread(message_id))

    def ending(self, ending: str) -> list[str]:
        return self._ask(lambda session: session.ending(ending))

    def newest_row(self) -> int:
        """Asked by whoever follows, for ever: no host is started for it."""
        session = self._session
        try:
            found = session.inbox(newest=True, limit=1)
        except NoSession:
            found = self._renewed(session).inbox(newest=True, limit=1)
        return int(found[-1]["row"]) if found else 0

    def events(self, after: int) -> Iterator[Event]:
        session = self._session
        try:
            for event in session.events(after, give_up=True):
                yield Event(event.kind, event.row, event.data)
        except NoSession:
            self._renewed(session)

    # --- the space ---

    def who(self) -> Facts:
        return self._ask(lambda session: session.who())

    def access(self) -> Facts:
        return self._ask(lambda session: session.access())

    def channels(self) -> list[Facts]:
        return self._ask(lambda session: session.channels())

    def memberships(self) -> list[str]:
        return self._ask(lambda session: session.memberships())

    def join(self, channel: str) -> Facts:
        return self._ask(lambda session: session.join(channel))

    def leave(self, channel: str) -> Facts:
        return self._ask(lambda session: session.leave(channel))

    def history(self, channel: str, limit: int, before: int | None) -> PastPage:
        return self._ask(lambda session: session.history(channel, limit=limit, before=before))

    def trace(self, message_id: str) -> Facts:
        return self._ask(lambda session: session.trace(message_id))

    def set_status(self, status: str, activity: str | None, model: str | None) -> None:
        self._ask(lambda session: session.set_status(status, activity, model))

    def set_attention(self, mode: str | None, channels: Mapping[str, str]) -> None:
        self._ask(lambda session: session.set_attention(mode, dict(channels) or None))

    # --- tasks ---

    def claim(self, role: str, wait: float, *, take_over: bool) -> Facts | None:
        return self._ask(lambda session: session.claim(role, wait=wait, take_over=take_over))

    def held(self) -> Facts | None:
        return self._ask(lambda session: session.held())

    def show_life(self) -> Facts | None:
        """Let the host hear that this program lives. What it holds; a host that stopped has given it back."""
        return self._session.held()

    def finish(self, task: str, text: str, data: Any) -> None:
        self._ask(lambda session: session.finish(task, text, data))

    def fail(self, task: str, reason: str, *, retry: bool) -> Facts:
        return self._ask(lambda session: session.fail(task, reason, retry=retry))

    def task(self, message_id: str, wait: float) -> Facts:
        return self._ask(lambda session: session.task(message_id, wait=wait))
