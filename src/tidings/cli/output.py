"""What the command line prints, and where: data to standard output, words to standard error.

Rich is imported only when a table is drawn on a terminal; a script that reads `--json` never pays for it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any


def say(text: str) -> None:
    """Words for a person."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def hint(text: str) -> None:
    """The next command worth typing."""
    if sys.stderr.isatty():
        say(f"\nnext: {text}")


def data(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=False, default=str) + "\n")


def line(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Rows for people: drawn on a terminal, tab-separated in a pipe."""
    found = [[_cell(value) for value in row] for row in rows]
    if not found:
        say(empty)
        return
    if not sys.stdout.isatty():
        line("\t".join(columns))
        for row in found:
            line("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in found:
        drawn.add_row(*row)
    Console().print(drawn)


def _cell(value: object) -> str:
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


def age(moment: float | None, now: float | None = None) -> str:
    """How long ago, in words short enough for a table."""
    if moment is None:
        return "-"
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
