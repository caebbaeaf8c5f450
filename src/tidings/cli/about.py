"""`config` and `version`: what this installation is and where its settings come from."""

from __future__ import annotations

import platform
from typing import Any

import typer

from tidings.cli import output
from tidings.cli.context import Context, OutputContext, SpaceContext
from tidings.errors import PrerequisiteMissing
from tidings.version import __version__


def config(ctx: SpaceContext) -> None:
    """Print every setting with its value and where it came from.

    Order: flag, then TIDINGS_<NAME> in the environment, then ./tidings.toml, then config.toml in the home, then the
    default. `home` and `nats_server` are not taken from ./tidings.toml, and a file that another user owns or everybody
    may write is not read; what is ignored so is said here and by every command.

    Examples:
      tidings config
      tidings config --space lab --json
    """
    found = ctx.settings
    settings = found.all()
    ctx.end_if_json(
        {each.name: {"value": each.value, "source": each.source} for each in settings}
        | ({"ignored": found.notes} if found.notes else {})
    )
    rows = [(each.name, each.value, each.source, each.meaning) for each in settings]
    output.table(("setting", "value", "source", "meaning"), rows, empty="")
    output.hint("tidings doctor")


def print_version(wanted: bool) -> None:
    """`tidings --version`; `tidings version` tells more."""
    if wanted:
        output.line(f"tidings {__version__}")
        raise typer.Exit


def version(ctx: OutputContext) -> None:
    """Print the versions of Tidings and of what it stands on.

    Example:
      tidings version --json
    """
    facts: dict[str, Any] = {
        "tidings": __version__,
        "python": platform.python_version(),
        "nats-server": _server_version(),
        "platform": platform.platform(),
    }
    ctx.end_if_json(facts)
    for name, value in facts.items():
        output.line(f"{name} {value}")
    output.hint("tidings doctor")


def _server_version() -> str:
    from tidings.server.nats_server import binary_version, find_binary

    try:
        binary = find_binary(Context().settings["nats_server"] or None)
        return ".".join(map(str, binary_version(binary)))
    except PrerequisiteMissing as error:
        return f"missing ({error})"
