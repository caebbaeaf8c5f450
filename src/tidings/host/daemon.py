"""The host as a process: one per home, from before the network until it is told to stop.

Start: locks, database and agents (nobody waits for a broker), sessions, socket, requests. Stop, in bounded time:

    1. the socket is gone and nothing new is taken      3. tasks that programs hold are given back
    2. streams end, requests get three seconds          4. agents disconnect, the database closes, the lock ends

What was answered is on disk before it was answered, so a kill at any point loses nothing that was promised; stopping
well only means that others need not wait to notice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

from tidings.client.host_http import socket_path
from tidings.errors import HostRuns, SpaceBusy, TidingsError
from tidings.host.claims import Claims
from tidings.host.host import Host
from tidings.host.http_api import AppState, application
from tidings.host.http_server import HostServer, PeerChecked
from tidings.host.mailbox import HOST_PATIENCE, held_mail
from tidings.host.sessions import Sessions
from tidings.server.config import LOG_FILE_BYTES, LOG_FILES
from tidings.util.private_files import lock_holder, lock_pid, locked, private_dir
from tidings.util.private_sockets import bind
from tidings.util.task_ends import end_tasks
from tidings.version import __version__

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
        server = HostServer(application(app), self.stopping, self._protocol)
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
