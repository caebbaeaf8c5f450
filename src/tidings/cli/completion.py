"""What a shell offers after TAB: names of spaces, agents, channels and links, from the files of this home alone.

Nobody is connected to and nothing is written; whatever goes wrong, there is nothing to offer. Channels are those that
access names without a wildcard: others exist, and may be typed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import typer

from tidings.admin.home import SpaceHome, list_spaces
from tidings.admin.settings import Settings

#: files read for one TAB, however many there are
FILES = 200


def _offered(find: Callable[[SpaceHome], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    def complete(context: typer.Context, incomplete: str) -> list[str]:
        try:
            given: dict[str, Any] = context.params
            settings = Settings({"space": given.get("space"), "home": given.get("home_dir")})
            names = find(SpaceHome(settings.home, settings["space"]))
            return sorted({name for name in names if name.startswith(incomplete)})
        except Exception:  # noqa: BLE001 - boundary: a TAB that fails offers nothing, and never prints a traceback
            return []

    return complete


def _channels(home: SpaceHome) -> Iterable[str]:
    yield "general"
    for path in islice(home.issued.glob("U*.json"), FILES):
        row = json.loads(path.read_text())
        yield from (name for key in ("read", "post") for name in row[key] if "*" not in name and ">" not in name)


def _roles(home: SpaceHome) -> Iterable[str]:
    for path in islice(home.issued.glob("U*.json"), FILES):
        yield from json.loads(path.read_text())["roles"]


def _links(home: SpaceHome) -> Iterable[str]:
    for path in islice(home.linked.glob("*.json"), FILES):
        row = json.loads(path.read_text())
        if row["state"] != "off":
            yield row["terms"].get("space") or row["link"]


spaces = _offered(lambda home: list_spaces(home.home))
agents = _offered(lambda home: (path.stem for path in home.agent_creds_dir.glob("*.creds")))
channels = _offered(_channels)
roles = _offered(_roles)
links = _offered(_links)


def among(*choices: str) -> Callable[[str], list[str]]:
    """One of a few words."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]
