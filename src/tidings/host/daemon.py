"""The host as a process: one per home, from before the network until it is told to stop.

Start: locks, database and agents (nobody waits for a broker), sessions, socket, requests. Stop, in bounded time:

    1. the socket is gone and nothing new is taken      3. tasks that programs hold are given back
    2. streams end, requests get three seconds          4. agents disconnect, the database closes, the lock ends

What was answered is on disk before it was answered, so a kill at any point loses nothing that was promised; stopping
well only means that others need not wait to notice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidings.client.host_http import socket_path
from tidings.errors import DeniedError, HostRuns, SpaceBusy, TidingsError
from tidings.host import mail_handlers, operator_handlers, space_handlers
from tidings.host.claims import Claims
from tidings.host.host import Host
from tidings.host.http_api import AppState, HostApi
from tidings.host.mailbox import HOST_PATIENCE, held_mail
from tidings.host.sessions import Sessions
from tidings.rpc.dispatch import handlers_of
from tidings.server.config import LOG_FILE_BYTES, LOG_FILES
from tidings.util.private_files import lock_holder, lock_pid, locked, private_dir
from tidings.util.private_sockets import bind, peer_uid
from tidings.util.task_ends import end_tasks
from tidings.version import __version__

# --- the HTTP server ---
#
# uvicorn shows the transport to its protocol and not to the application, so the protocol decides: a connection whose
# peer is not this user, or of which the kernel does not say, is answered 403 and closed before a request is read.
# uvicorn never binds (`--uds` would make the socket 0666) and never sees a signal: `Daemon` says when to stop.

#: seconds for requests that are being answered when the host stops
GRACE = 3
MOST_CONNECTIONS = 512
KEEP_ALIVE = 30
#: seconds in which a request is there, whole: connections are few, and half a request holds one
REQUEST_WITHIN = 20.0
#: where a connection finds in the server's state whether that stops
STOPPING = "stopping"


def is_ours(connection: socket.socket | None) -> bool:
    """Is the other end this user? Whoever cannot be named is not."""
    return connection is not None and peer_uid(connection) == os.geteuid()


class PeerChecked(H11Protocol):
    """One connection. `admits` is asked once, when it is made."""

    admits: Callable[[socket.socket | None], bool] = staticmethod(is_ours)
    refused = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.app_state[STOPPING].is_set():
            self.refused = True
            transport.abort()
            return
        if not self.admits(transport.get_extra_info("socket")):
            self.refused = True
            transport.write(_REFUSAL)
            transport.close()
            return
        # each request gets a copy of this state: who cuts a reader off needs the transport
        self.app_state = {**self.app_state, "transport": transport}
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if not self.refused:
            super().data_received(data)
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        if not self.refused:
            super().connection_lost(exc)

    def _watch(self) -> None:
        """uvicorn waits for ever for the rest of a request. What trickles in does not put the end off."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_WITHIN, self._too_slow)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.abort()


def _refusal() -> bytes:
    words = "this host belongs to another user: every user runs their own"
    body = json.dumps({"error": {"code": DeniedError.code, "message": words, "retryable": False}}).encode()
    head = f"HTTP/1.1 403 Forbidden\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


_REFUSAL = _refusal()


class HostServer(uvicorn.Server):
    """Serves until `stopping` is set, then ends in bounded time whatever its clients do."""

    def __init__(self, app: Any, stopping: asyncio.Event, protocol: type[PeerChecked] = PeerChecked) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                proxy_headers=False,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=GRACE,
                limit_concurrency=MOST_CONNECTIONS,
            )
        )
        self._stopping = stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.state[STOPPING] = self._stopping
        await super().startup(sockets)

    async def main_loop(self) -> None:
        # uvicorn looks ten times a second whether it should stop; an idle host sleeps
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # A connection that the loop has accepted and not yet set up when its server closes is never closed by asyncio
        # (its transport fails to attach, without a word). So accepting ends first, and what was accepted is set up.
        for listener in sockets or []:
            asyncio.get_running_loop().remove_reader(listener)
        await asyncio.sleep(0)
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


# --- the process ---

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: whoever looks whether a host runs holds its lock for a moment
LOCK_PATIENCE = 0.2
#: seconds for agents to disconnect and the database to close
CLOSE_WITHIN = 20.0
log = logging.getLogger(__name__)


def lock_path(home: Path) -> Path:
    return home / "run" / "host.lock"


def log_path(home: Path) -> Path:
    return home / "logs" / "host.log"


def running_pid(home: Path) -> int | None:
    """The process that holds the lock of the host, whether or not it answers."""
    return lock_pid(lock_path(home))


class Daemon:
    """The host of one home. `ready` is set once it answers."""

    def __init__(self, home: Path, *, protocol: type[PeerChecked] = PeerChecked, claims: Claims | None = None) -> None:
        self.home = home
        self.claims = claims or Claims()
        self.ready = asyncio.Event()
        self.stopping = asyncio.Event()
        self.host = Host(home)
        self._protocol = protocol
        #: what its requests are answered with, while it runs
        self.app: AppState | None = None

    async def run(self) -> None:
        """Until `stopping` is set. HostRuns if another one runs."""
        for folder in (self.home, self.home / "run", self.home / "logs"):
            private_dir(folder)
        lock = lock_path(self.home)
        try:
            with locked(lock, f"run the host of {self.home}", wait=LOCK_PATIENCE), held_mail(self.home, HOST_PATIENCE):
                await self._run_locked()
        except SpaceBusy as error:
            holder = lock_holder(lock) or "another process"
            raise HostRuns(
                f"a host of {self.home} runs already ({holder.split(' (')[0]}): `tidings host status` shows it"
            ) from error

    async def _run_locked(self) -> None:
        await self.host.open()
        try:
            sessions = await Sessions.open(self.host.database)
            sessions.on_end(self.claims.ended)
            path = socket_path(self.home)
            self.app = app = AppState(self.host, sessions, self.claims, path, self.stopping, time.time())
            listener = bind(path)
            try:
                await self._serve(app, path, listener)
            finally:
                listener.close()
                path.unlink(missing_ok=True)
                await self.claims.close()
        finally:
            await self._close()

    async def _serve(self, app: AppState, path: Path, listener: socket.socket) -> None:
        handlers = handlers_of("host", mail_handlers, space_handlers, operator_handlers)
        api = HostApi(app, handlers, space_handlers.forward, mail_handlers.events)
        server = HostServer(api, self.stopping, self._protocol)
        sweeping = [
            asyncio.create_task(app.claims.sweep(), name="claims"),
            asyncio.create_task(app.sessions.sweep(), name="sessions"),
            asyncio.create_task(app.presence.sweep(), name="presence"),
        ]
        unlinking = asyncio.create_task(self._unlink_when_stopping(path), name="socket")
        log.info("host %s of %s answers at %s (pid %d)", __version__, self.home, path, os.getpid())
        self.ready.set()  # the socket listens: who connects now is answered as soon as the server looks
        try:
            await server.serve(sockets=[listener])
        finally:
            log.info("host of %s stops", self.home)
            await end_tasks([*sweeping, unlinking])
            await app.sessions.forget_ended()

    async def _unlink_when_stopping(self, path: Path) -> None:
        await self.stopping.wait()
        path.unlink(missing_ok=True)
        self.host.answer_now()

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_WITHIN):
                await self.host.close()
        except TimeoutError:
            log.error("the host did not close within %.0f s and is left; nothing that was stored is lost", CLOSE_WITHIN)


def log_to(path: Path) -> None:
    """Everything this process logs, into a file that rotates: it never grows beyond its cap."""
    handler = RotatingFileHandler(path, maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("uvicorn", "uvicorn.error", "sse_starlette.sse"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


async def run_until_told(home: Path, on_ready: Callable[[Daemon], object]) -> None:
    """The process of `tidings host up --foreground`: runs until a signal, or a request, says stop."""
    private_dir(home)
    private_dir(home / "logs")
    log_to(log_path(home))
    daemon = Daemon(home)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, daemon.stopping.set)
    announcing = asyncio.create_task(_announce(daemon, on_ready))
    try:
        await daemon.run()
    except TidingsError as error:
        log.error("%s", error)
        raise
    finally:
        await end_tasks([announcing])


async def _announce(daemon: Daemon, on_ready: Callable[[Daemon], object]) -> None:
    await daemon.ready.wait()
    on_ready(daemon)
