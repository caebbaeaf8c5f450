"""A host that answers on its socket, and programs that speak to it: the words of its tests."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from blocking_host import Event, HostClient, Session
from tidings.admin.identity import local_identity
from tidings.client.host_sockets import socket_path
from tidings.host.daemon import Daemon, PeerChecked
from tidings.util.private_sockets import connect
from tidings_testing.real_space import RealSpace

P = ParamSpec("P")
T = TypeVar("T")


@asynccontextmanager
async def daemon_in(home: Path, protocol: type[PeerChecked] = PeerChecked) -> AsyncIterator[Daemon]:
    """The host of a home, in this process; it ended well when the block is over."""
    daemon = Daemon(home, protocol=protocol)
    running = asyncio.create_task(daemon.run())
    ready = asyncio.create_task(daemon.ready.wait())
    await asyncio.wait({running, ready}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    try:
        if running.done():
            running.result()
        yield daemon
    finally:
        daemon.stopping.set()
        async with asyncio.timeout(30):
            await running


async def ask(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """A blocking call, as a program of its own would make it."""
    return await asyncio.to_thread(call, *args, **kwargs)


async def session_of(space: RealSpace, name: str, *, receive: bool = False, program: str = "test") -> Session:
    """Opened like the real client does: by the key in the agent's file."""
    identity = await local_identity(space.home, name)
    client = HostClient(space.home.home)
    return await ask(client.session, identity, receive=receive, program=program)


class Follower:
    """A program that follows an inbox, in a thread; ends when its host does, unless it waits for it."""

    def __init__(self, session: Session, after: int | None = None, *, give_up: bool = True) -> None:
        self.session, self.after, self.give_up = session, after, give_up
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for event in self.session.events(self.after, states=True, give_up=self.give_up):
                self.events.append(event)
                if self._stop:
                    return
        except BaseException as error:
            self.error = error

    @property
    def texts(self) -> list[str]:
        return [event.data["text"] for event in self.events if event.kind == "message"]

    @property
    def rows(self) -> list[int]:
        return [event.row for event in self.events if event.kind == "message" and event.row is not None]

    def leave(self) -> None:
        self._stop = True


def raw(
    home: Path, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """A request as somebody else's program might write it."""
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = connect(socket_path(home), 10)
    try:
        with suppress(BrokenPipeError):  # answered before everything was read
            connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        said = response.read()
        return response.status, json.loads(said) if said else {}
    finally:
        connection.close()


def bearer(token: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **more}
