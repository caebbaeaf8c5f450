"""What the command line prints, and where: data to standard output, words to standard error.

Rich is imported only when something is drawn on a terminal; a script that reads `--json` never pays for it. Colour only
on a terminal, and not if NO_COLOR is set. What others wrote is never read as markup.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeAlias

from tidings.errors import UsageError

#: words that a terminal may colour, wherever they stand alone in a cell
COLOURS = {
    **dict.fromkeys(("ok", "healthy", "refused", "held", "open", "idle", "working", "done"), "green"),
    **dict.fromkeys(("note", "known", "waiting", "dnd", "focus", "quiet", "muted", "queued"), "yellow"),
    **dict.fromkeys(("problem", "NOT HEALTHY", "BROKEN", "CLOSED", "dead"), "red"),
    "offline": "dim",
}


Row: TypeAlias = Sequence[object] | Mapping[str, object]

#: the flags of this command line that say where and as whom; commands that are named in words repeat them
_given: dict[str, str] = {}


def remember_flags(**flags: str | None) -> None:
    _given.update({f"--{name}": value for name, value in flags.items() if value is not None})


def forget_flags() -> None:
    _given.clear()
    show_whole(False)


#: what a terminal shows of one text, unless `--whole` was said
CHARACTERS, LINES = 2_000, 40
_whole = False


def show_whole(wanted: bool) -> None:
    global _whole
    _whole = wanted


def cut(text: str, way: str) -> str:
    """A text, or on a terminal the beginning of a long one, with the command that shows all of it."""
    short = "\n".join(text[:CHARACTERS].splitlines()[:LINES])
    if _whole or not sys.stdout.isatty() or len(short) >= len(text.rstrip("\n")):
        return text
    return f"{short}…\n[{len(text):,} characters in all: {as_typed(way)}]"


def confirm(yes: bool, question: str) -> None:
    """Ask on the terminal, unless --yes did; "no" ends the command with exit code 1. A script gets a UsageError."""
    import typer

    try:
        if not yes and not typer.confirm(question, err=True):
            raise typer.Exit(1)
    except typer.Abort:
        if sys.stdin.isatty():  # Ctrl-C
            raise
        raise UsageError("nobody is there to be asked, and nothing was done: --yes says it in advance") from None


def say(text: str) -> None:
    """Words for a person. A command in them can be run as it stands."""
    if _given and "`tidings " in text:
        text = re.sub("`(tidings [^`]+)`", lambda named: f"`{as_typed(named[1])}`", text)
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def hint(text: str) -> None:
    """The next command worth typing."""
    if sys.stderr.isatty():
        say(f"\nnext: {as_typed(text)}")


def as_typed(command: str) -> str:
    """A command with the flags of this one that it takes and does not have: it leads to the same place."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    known = _options(words[1:]) if _given and words[:1] == ["tidings"] else set()
    flags = [f"{flag} {shlex.quote(value)}" for flag, value in _given.items() if flag in known and flag not in words]
    before, ends, after = command.partition(" -- ")
    return f"{' '.join([before, *flags])}{ends}{after}"


def _options(words: list[str]) -> set[str]:
    """The options of a command, found by its words."""
    from tidings.cli.main import ALL, command

    if not words or words[0] not in ALL:
        return set()
    found = command((words[0],))
    for word in words:
        found, last = getattr(found, "commands", {}).get(word), found
        if found is None:
            found = last
            break
    return {option for parameter in found.params for option in parameter.opts}


def data(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=False, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    """Returns the fields of a struct, and anything else as text."""
    import msgspec

    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else str(value)


def line(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[object] | Mapping[str, object]], *, empty: str = "") -> None:
    """Rows for people: drawn on a terminal, tab-separated in a pipe. Of a mapping the values named like the columns."""
    named = ([row[name] for name in columns] if isinstance(row, Mapping) else row for row in rows)
    found = [[_cell(value) for value in row] for row in named]
    if not found:
        if empty:
            say(empty)
        return
    if not sys.stdout.isatty():
        line("\t".join(columns))
        for row in found:
            line("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in found:
        drawn.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
    Console().print(drawn)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Something slow: a spinner on standard error while it lasts, if a person is looking; else nothing."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    # rich would send standard output through this console, which is standard error: data stays where it belongs
    shown = Live(
        Spinner("dots", text=text),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with shown:
        yield


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in (None, "") else str(value)


def size(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "KB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def moment(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if seconds else "-"


def age(moment: float | str | None, now: float | None = None) -> str:
    """How long ago, in words short enough for a table."""
    if moment is None:
        return "-"
    if isinstance(moment, str):
        from tidings.wire.records import seconds_of  # loads msgspec, which most commands do without

        moment = seconds_of(moment)
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
