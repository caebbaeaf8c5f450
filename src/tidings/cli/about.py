"""`config`, `version` and `logs`: what this installation is, where its settings come from, what it wrote down."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from typer import Argument, Option

from tidings.cli import completion, output
from tidings.cli.context import Context, OutputContext, PlainSpaceContext, SpaceContext
from tidings.errors import PrerequisiteMissing, UsageError
from tidings.version import __version__

LOG_NAMES = ("broker", "steward", "pipeline", "spark", "links", "admin", "up")


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
    output.table(("setting", "value", "source", "meaning"), rows)
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


def logs(
    ctx: PlainSpaceContext,
    which: Annotated[
        str, Argument(help=f"One of {', '.join(LOG_NAMES)}.", autocompletion=completion.among(*LOG_NAMES))
    ] = "steward",
    lines: Annotated[int, Option("-n", "--lines", help="How many lines from the end.", min=0, max=1_000_000)] = 50,
    follow: Annotated[bool, Option("-f", "--follow", help="Go on as lines are written.")] = False,
) -> None:
    """Show a log file of a space: broker, steward, pipeline, spark, links, admin or up. `-f` goes on when it
    rotates.

    Examples:
      tidings logs
      tidings logs broker -n 200
      tidings logs steward -f
    """
    if which not in LOG_NAMES:
        raise UsageError(f"there is no log {which!r}; one of {', '.join(LOG_NAMES)}")
    ctx.home.read_info()
    path = ctx.home.logs / f"{which}.log"
    if not path.exists():
        output.say(f"{path} was not written yet")
    try:
        for text in follow_lines(path, lines) if follow else last_lines(path, lines):
            output.line(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        output.say("stopped")
    output.hint("tidings status")


PAUSE = 0.2


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a file; none if there is no file."""
    try:
        with path.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=max(0, count))]
    except FileNotFoundError:
        return []


def follow_lines(path: Path, count: int, pause: Callable[[], None] = lambda: time.sleep(PAUSE)) -> Iterator[str]:
    """The last `count` lines, then each line as it is written, for ever.

    A file that was renamed is read to its end before the new one is opened; one that was cut short is read from its
    start; one that is not there is waited for. `pause` is called whenever there is nothing to read.
    """
    fresh = False
    while True:
        try:
            file = path.open(errors="replace")
        except FileNotFoundError:
            fresh = True
            pause()
            continue
        with file:
            if not fresh:
                yield from (line.rstrip("\n") for line in deque(file, maxlen=max(0, count)))
            yield from _until_replaced(path, file, pause)
        fresh = True


def _until_replaced(path: Path, file: IO[str], pause: Callable[[], None]) -> Iterator[str]:
    partial = ""
    while True:
        replaced = _is_replaced(path, file)  # looked at before reading: what was written until then is still read
        while text := file.readline():
            partial += text
            if partial.endswith("\n"):
                yield partial.rstrip("\n")
                partial = ""
        if replaced:
            if partial:
                yield partial
            return
        pause()


def _is_replaced(path: Path, file: IO[str]) -> bool:
    held = os.fstat(file.fileno())
    try:
        named = path.stat()
    except FileNotFoundError:
        return True
    return (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino) or held.st_size < file.tell()
