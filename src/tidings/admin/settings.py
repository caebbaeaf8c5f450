"""Settings, each with where it came from: flag, environment, ./tidings.toml, the home's config.toml, default.

`tidings config` prints what this module resolved. A file that says something unknown is an error, because a
misspelt setting that is silently ignored is worse than a refusal. A file of another user says nothing, and
the folder one happens to stand in does not say which programs run or where secrets lie (`NOT_FROM_FOLDER`): both are
passed over with a sentence in `notes`.
"""

from __future__ import annotations

import getpass
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidings.errors import ConfigError
from tidings.wire.names import is_token, unfit_to_grant

#: name -> (default, what it means)
KNOWN: dict[str, tuple[str, str]] = {
    "home": ("", "directory of spaces, logs and locks"),
    "space": ("main", "space to talk to"),
    "as": ("", "agent to act as"),
    "nats_server": ("", "nats-server binary to run instead of the bundled one"),
    "budget": ("", "bytes the log of a new space may take (8 GiB or 40 % of the free disk)"),
    "listen": ("", "address of this machine on which others reach a space, with TLS; kept by `up` until it is `off`"),
    "ws": ("", "the same for websockets, on a port of their own"),
    "lease_ttl": ("3", "seconds without a beat after which a steward counts as silent; takeover after twice that"),
    "presence": ("25", "seconds without a beat after which an agent is shown as offline; read by `up`"),
    "inbox_rows": ("10000", "messages an inbox keeps of one sender on one channel, unread included"),
    "inbox_bytes": ("33554432", "bytes an inbox keeps of one sender on one channel, unread included"),
    "pipeline": ("on", "on or off: start durable delivery (Spark) with `up`"),
    "links": ("on", "on or off: carry what linked spaces share with `up`, if a link takes anything in"),
}

#: what a ./tidings.toml may not decide: whoever prepares a folder would run programs as whoever enters it
NOT_FROM_FOLDER = ("home", "nats_server", "listen", "ws")

#: more is no file of settings
MOST_BYTES = 65_536

#: what a switch may say; TOML's own words arrive as Python's
SWITCH = {"on": True, "off": False, "True": True, "False": False}


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    value: str
    source: str
    meaning: str


def default_home(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path(environ.get("HOME", "~")).expanduser() / ".local" / "share") / "tidings"


def person(environ: Mapping[str, str]) -> str:
    """The name of the person at the keyboard, as an agent name."""
    try:
        name = environ.get("USER") or getpass.getuser()
    except (KeyError, OSError):
        name = "me"
    return name if is_token(name) and not unfit_to_grant(name) else "me"


class Settings:
    """All settings, resolved once."""

    def __init__(
        self,
        flags: Mapping[str, str | None] | None = None,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        #: what was passed over, in sentences
        self.notes: list[str] = []
        local = self._from_folder(Path.cwd() if folder is None else folder)
        layers = [("flag", {k: v for k, v in (flags or {}).items() if v is not None}), self._from_environ(), local]
        home = _first("home", layers) or ("default", str(default_home(self._environ)))
        layers.append(self._read(Path(home[1]).expanduser() / "config.toml"))
        self._found = {name: self._resolve(name, layers) for name in KNOWN}

    def _from_folder(self, folder: Path) -> tuple[str, dict[str, str]]:
        source, values = self._read(folder / "tidings.toml", "mend it, remove it, or go to another directory")
        self._folder = source
        for name in NOT_FROM_FOLDER:
            if values.pop(name, None) is not None:
                self.notes.append(
                    f"{name} in {source} is ignored: it is taken only from a flag, TIDINGS_{name.upper()} "
                    "or config.toml in the home"
                )
        return source, values

    def _read(self, path: Path, way_on: str = "mend it or remove it") -> tuple[str, dict[str, str]]:
        """`way_on`: what to do about a file that makes no sense, which is refused with it."""
        try:
            text, why_not = _own_text(path)
            if why_not:
                self.notes.append(f"{path} is ignored: {why_not}")
            return str(path), _parsed(text) if text else {}
        except ValueError as error:
            raise ConfigError(f"{path} cannot be read as settings: {error}; {way_on}") from error

    def _from_environ(self) -> tuple[str, dict[str, str]]:
        named = {name: self._environ.get(f"TIDINGS_{name.upper()}") for name in KNOWN}
        return "environment", {name: value for name, value in named.items() if value}

    def _resolve(self, name: str, layers: list[tuple[str, dict[str, str]]]) -> Setting:
        default, meaning = KNOWN[name]
        if name == "home":
            default = str(default_home(self._environ))
        elif name == "as":
            default = person(self._environ)
        source, value = _first(name, layers) or ("default", default)
        return Setting(name, value, source, meaning)

    def __getitem__(self, name: str) -> str:
        return self._found[name].value

    def all(self) -> list[Setting]:
        return list(self._found.values())

    @property
    def chosen_by_folder(self) -> str:
        """A sentence if the folder one stands in decides whom one acts as; else empty."""
        names = [name for name in ("as", "space") if self._found[name].source == self._folder]
        if "as" not in names:
            return ""
        where = f" in space {self['space']}" if "space" in names else ""
        return f"acting as {self['as']}{where}, because {self._folder} says so; `--as NAME` acts as another"

    @property
    def home(self) -> Path:
        return Path(self["home"]).expanduser().absolute()

    def switch(self, name: str) -> bool:
        text = self[name]
        if text not in SWITCH:
            raise ConfigError(f"{name} = {text!r} (from {self._found[name].source}) is neither on nor off")
        return SWITCH[text]

    def number(self, name: str) -> float | None:
        text = self[name]
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1
        if value <= 0:
            setting = self._found[name]
            raise ConfigError(f"{name} = {text!r} (from {setting.source}) is not a positive number")
        return value


def _first(name: str, layers: list[tuple[str, dict[str, str]]]) -> tuple[str, str] | None:
    return next(((source, values[name]) for source, values in layers if name in values), None)


def _own_text(path: Path) -> tuple[str, str]:
    """The text of a file of this user (or root's), and why it is not read if it is another's. ValueError: no text."""
    try:
        # what somebody put there may be a pipe, and opening one waits
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return "", ""
    except PermissionError:
        return "", "this user may not read it"
    except OSError as error:  # a socket, a link to itself
        return "", f"it is not a plain file ({error.strerror})"
    try:
        for found in (os.lstat(path), os.fstat(file)):
            if found.st_uid not in (os.geteuid(), 0):
                return "", "it belongs to another user"
        if not stat.S_ISREG(found.st_mode):
            return "", "it is not a plain file"
        if found.st_mode & stat.S_IWOTH:
            return "", f"everybody may write it; `chmod o-w {path}`"
        return _decoded(os.read(file, MOST_BYTES + 1)), ""
    except OSError as error:
        raise ValueError(error.strerror) from error
    finally:
        os.close(file)


def _decoded(data: bytes) -> str:
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES} bytes")
    try:
        # as a file that is opened as text
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8 text") from error


def _parsed(text: str) -> dict[str, str]:
    """ValueError says what is wrong, and on which line."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # it names the line, but for the last one
        last = f"at line {len(text.splitlines())}, the last one"
        raise ValueError(str(error).replace("at end of document", last)) from error
    for name, value in found.items():
        if name not in KNOWN:
            raise ValueError(f"unknown setting {name!r} (at line {_line_of(name, text)}); known are {', '.join(KNOWN)}")
        if not isinstance(value, str | int | float):
            raise ValueError(f"{name} is not one value (at line {_line_of(name, text)})")
    return {name: str(value) for name, value in found.items()}


def _line_of(name: str, text: str) -> int:
    """Where a key, or the table of this name, first stands."""
    key = re.compile(rf"""[\s\["']*{re.escape(name)}\b""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if key.match(line)), 1)
