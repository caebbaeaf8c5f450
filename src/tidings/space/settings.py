"""Settings, each with where it came from: flag, environment, ./tidings.toml, the home's config.toml, default.

`tidings config` prints what this module resolved. A file that says something unknown is an error, because a
misspelt setting that is silently ignored is worse than a refusal.
"""

from __future__ import annotations

import getpass
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidings.errors import ConfigError
from tidings.wire.names import is_token

#: name -> (default, what it means)
KNOWN: dict[str, tuple[str, str]] = {
    "home": ("", "directory of spaces, logs and locks"),
    "space": ("main", "space to talk to"),
    "as": ("", "agent to act as"),
    "nats_server": ("", "nats-server binary to run instead of the bundled one"),
    "budget": ("", "bytes the log of a new space may take (8 GiB or 40 % of the free disk)"),
    "lease_ttl": ("3", "seconds without a beat after which a steward counts as silent; takeover after twice that"),
    "pipeline": ("on", "on or off: start durable delivery (Spark) with `up`"),
}

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
    return name if is_token(name) else "me"


class Settings:
    """All settings, resolved once."""

    def __init__(
        self,
        flags: Mapping[str, str | None] | None = None,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        local = _read(Path.cwd() / "tidings.toml" if folder is None else folder / "tidings.toml")
        layers = [("flag", {k: v for k, v in (flags or {}).items() if v is not None}), self._from_environ(), local]
        home = _first("home", layers) or ("default", str(default_home(self._environ)))
        layers.append(_read(Path(home[1]).expanduser() / "config.toml"))
        self._found = {name: self._resolve(name, layers) for name in KNOWN}

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


def _read(path: Path) -> tuple[str, dict[str, str]]:
    try:
        found = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return str(path), {}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    unknown = sorted(set(found) - set(KNOWN))
    if unknown:
        raise ConfigError(f"{path} has unknown settings: {', '.join(unknown)}; known are {', '.join(KNOWN)}")
    return str(path), {name: str(value) for name, value in found.items()}
