"""The command `tidings`: its subcommands, `config` and `version`, and where errors become sentences and exit codes.

Only the module of the command that was typed is loaded; the others are when help or completion lists them all.
Exit codes: 0 ok, 1 failed, 2 usage, 3 unhealthy, 4 denied, 5 unreachable, 6 conflict.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option

from tidings.cli import output
from tidings.cli.context import Context, Group, OutputContext, SpaceContext
from tidings.errors import PrerequisiteMissing, TidingsError
from tidings.version import __version__

#: what can be typed, by what people do: the name of a command, its module (of this package unless it has a dot), and
#: the function or the group in it
COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Start here": {
        "demo": ("tidings.demo.command", "demo"),
        "up": ("running", "up"),
        "down": ("running", "down"),
        "status": ("running", "status"),
        "doctor": ("doctor", "app"),
    },
    "Talk": {
        "send": ("talk", "send"),
        "dm": ("people", "dm"),
        "inbox": ("inbox", "app"),
        "tail": ("talk", "tail"),
        "history": ("talk", "history"),
        "join": ("talk", "join"),
        "leave": ("talk", "leave"),
        "channels": ("channel", "app"),
        "trace": ("people", "trace"),
    },
    "See and be seen": {
        "who": ("people", "who"),
        "set-status": ("people", "set_status"),
        "attention": ("people", "attention"),
    },
    "Work": {
        "ask": ("tasks", "ask"),
        "result": ("tasks", "result"),
        "work": ("tasks", "work"),
        "dead": ("tasks", "app"),
    },
    "This machine: outbox, inbox, coding agents": {
        "host": ("host", "app"),
        "outbox": ("outbox", "app"),
        "mcp": ("mcp", "mcp"),
    },
    "Run a space": {
        "agent": ("agent", "app"),
        "invite": ("invitation", "invite"),
        "accept": ("invitation", "accept"),
        "invitation": ("invitation", "app"),
        "link": ("link", "app"),
        "keys": ("spaces", "keys"),
        "space": ("spaces", "app"),
        "pipeline": ("pipeline", "app"),
        "logs": ("running", "logs"),
        "config": ("main", "config"),
        "wire": ("wire", "app"),
        "version": ("main", "version"),
    },
}
ALL = tuple(name for group in COMMANDS.values() for name in group)


def print_version(wanted: bool) -> None:
    """`tidings --version`; `tidings version` tells more."""
    if wanted:
        output.line(f"tidings {__version__}")
        raise typer.Exit


def everything(
    show_version: Annotated[
        bool, Option("--version", help="Print the version and end.", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    pass


@functools.cache
def command(names: tuple[str, ...] = ALL) -> Any:
    """What can be typed, or some of it, built once: all of it takes longer than most commands."""
    app = Group(
        name="tidings",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="A durable message mesh for AI agents.",
        epilog="Start with `tidings up`, then `tidings agent add NAME`; `tidings demo` shows it all.",
        callback=everything,
    )
    for panel, group in COMMANDS.items():
        for name, (module, attribute) in group.items():
            if name in names:
                place = module if "." in module else f"tidings.cli.{module}"
                found = getattr(import_module(place), attribute)
                if isinstance(found, typer.Typer):
                    app.add_typer(found, name=name, rich_help_panel=panel)
                else:
                    app.command(name, rich_help_panel=panel)(found)
    return typer.main.get_command(app)


def config(ctx: SpaceContext) -> None:
    """Print every setting with its value and where it came from.

    Order: flag, then TIDINGS_<NAME> in the environment, then ./tidings.toml, then config.toml in the home, then the
    default. `home`, `nats_server`, `listen` and `ws` are ignored in ./tidings.toml. So is a file that another user owns
    or everybody may write. Every command reports what it ignored.

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
    output.table(("setting", "value", "source", "meaning"), rows)
    output.hint("tidings doctor")


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


def _meant(arguments: list[str]) -> tuple[str, ...]:
    """The command that was typed, else all there are: for help, for completion of its name, for what is unknown."""
    words = arguments
    if "_TIDINGS_COMPLETE" in os.environ:
        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
        words = line.split()[1:] if line.endswith(" ") else line.split()[1:-1]
    first = next((word for word in words if not word.startswith("-")), None)
    if first is None and "--version" in words:
        return ()
    return (first,) if first in ALL else ALL


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and answer its exit code; nothing escapes as a traceback that was meant as a sentence."""
    os.umask(0o077)
    typed = sys.argv[1:] if arguments is None else arguments
    output.forget_flags()
    try:
        command(_meant(typed))(typed, prog_name="tidings")
    except SystemExit as ended:  # the parser's own way to end: usage errors, `--help`, `typer.Exit`
        return ended.code if isinstance(ended.code, int) else 0
    except TidingsError as error:
        output.say(f"tidings: {error}")
        return error.exit_code
    except BrokenPipeError:
        return 0
    return 0
