"""The systemd units of a host and of a space: what they say, where they lie, and telling systemd if it is there.

One unit per home and host or space; those of the default home have plain names. The interpreter is named by its
absolute path, so the unit runs the Tidings that wrote it. A user's units end at logout unless the user lingers, which
is said.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidings.admin.settings import default_home
from tidings.errors import ConfigError, TidingsError
from tidings.util.private_files import write_atomic

SYSTEMCTL_SECONDS = 30.0
RESTART_SECONDS = 3


@dataclass(frozen=True, slots=True)
class Unit:
    path: Path
    text: str
    #: what it runs, as people call it, and the command that stops it by hand
    what: str
    stopped_by: str

    @property
    def name(self) -> str:
        return self.path.name


def host_unit(home: Path) -> Unit:
    """The unit of the host of a home, as it should be."""
    command = ["host", "up", "--foreground", "--home", str(home)]
    return _unit(home, "host", command, "host", "tidings host down")


def space_unit(home: Path, space: str) -> Unit:
    """The unit of a space."""
    stop = f"tidings down --space {space}"
    return _unit(home, f"space-{space}", ["up", "--space", space, "--home", str(home)], "space", stop)


def _unit(home: Path, name: str, words: list[str], kind: str, stop: str) -> Unit:
    base = os.environ.get("XDG_CONFIG_HOME")
    folder = (Path(base) if base else Path.home() / ".config") / "systemd" / "user"
    plain = home == default_home(os.environ).expanduser().absolute()
    mark = "" if plain else f"-{hashlib.sha256(os.fsencode(home)).hexdigest()[:8]}"
    command = [sys.executable, "-m", "tidings.cli", *words]
    text = "\n".join(
        (
            f"# written by `tidings {kind} install`; `tidings {kind} uninstall` removes it",
            "[Unit]",
            f"Description=Tidings {_literal(name.replace('-', ' ', 1))} of {_literal(str(home))}",
            "",
            "[Service]",
            f"ExecStart={' '.join(map(_word, command))}",
            # also after a kill; not after it was told to end, which means what it says
            "Restart=on-failure",
            f"RestartSec={RESTART_SECONDS}",
            # another one of this home runs: starting again and again would not change it
            "RestartPreventExitStatus=6",
            "TimeoutStopSec=60",
            "UMask=0077",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        )
    )
    return Unit(folder / f"tidings-{name}{mark}.service", text, kind, stop)


def _literal(text: str) -> str:
    """Text in which systemd sees nothing of its own."""
    return text.replace("%", "%%")


def _word(text: str) -> str:
    """A word of a command line as systemd reads it."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{_literal(quoted)}"'


def install(unit: Unit, running: int | None) -> Iterator[str]:
    """Write and enable it, and start it unless a host runs already; every step is said, and what is left to type."""
    changed = _write(unit)
    yield f"{unit.path} {'was written' if changed else 'is as it should be'}"
    linger = "to keep it running after logout: `loginctl enable-linger`"
    if not _answers():
        yield f"systemd does not answer here. Where it does: `systemctl --user enable --now {unit.name}`; {linger}"
        return
    if changed:
        yield from _tell("daemon-reload")
    yield from _tell("enable", unit.name)
    if running is None or _systemctl("is-active", unit.name).stdout.strip() == "active":
        yield from _tell("restart" if changed else "start", unit.name)
        yield f"{unit.name} runs; {linger}"
    else:
        yield (
            f"a {unit.what} runs already (pid {running}), not by systemd: `{unit.stopped_by}`, then "
            f"`systemctl --user start {unit.name}`; {linger}"
        )


def _write(unit: Unit) -> bool:
    """Whether it had to be written."""
    try:
        unit.path.parent.mkdir(parents=True, exist_ok=True)
        if unit.path.exists() and unit.path.read_text() == unit.text:
            return False
    except OSError as error:
        raise ConfigError(f"cannot write {unit.path}: {error.strerror}") from error
    write_atomic(unit.path, unit.text)
    return True


def uninstall(unit: Unit) -> Iterator[str]:
    if not unit.path.exists():
        yield f"there is no {unit.path}"
        return
    if _answers():
        yield from _tell("disable", "--now", unit.name)
    else:
        yield f"systemd does not answer here, so nothing was stopped: `{unit.stopped_by}` stops a {unit.what} that runs"
    unit.path.unlink()
    if _answers():
        yield from _tell("daemon-reload")
    yield f"{unit.path} was removed"


def takes(unit: Unit) -> bool:
    """Is it for systemd to start and stop this host?"""
    return unit.path.exists() and _answers()


def start_installed(unit: Unit) -> None:
    done = _systemctl("start", unit.name)
    if done.returncode:
        raise TidingsError(
            f"{_failure(done)}; `tidings {unit.what} uninstall` removes the unit, `tidings {unit.what} install` writes "
            "it anew"
        )


def is_up(unit: Unit) -> bool:
    """Also while systemd is about to start it again."""
    return _systemctl("is-active", unit.name).stdout.strip() in ("active", "activating", "reloading")


def stop(unit: Unit) -> Iterator[str]:
    yield f"systemd runs this {unit.what}: stopping {unit.name}; at the next login it starts again, unless uninstalled"
    yield from _tell("stop", unit.name)


def _answers() -> bool:
    silent = ("", "offline", "unknown")
    return shutil.which("systemctl") is not None and _systemctl("is-system-running").stdout.strip() not in silent


def _tell(*words: str) -> Iterator[str]:
    done = _systemctl(*words)
    if done.returncode:
        yield _failure(done)


def _failure(done: subprocess.CompletedProcess[str]) -> str:
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return f"`{' '.join(done.args)}` failed: {said[-1] if said else done.returncode}"


def _systemctl(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["systemctl", "--user", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SYSTEMCTL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
