"""Every command of `tidings`, and whether a line somebody wrote down is one of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from tidings.cli.main import command as every_command


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that can be typed, with its words; a group counts if it does something by itself."""

    def walk(words: tuple[str, ...], command: Any) -> Iterator[tuple[str, Any]]:
        children = getattr(command, "commands", {})
        if not children or command.invoke_without_command:
            yield " ".join(words), command
        for name, child in children.items():
            yield from walk((*words, name), child)

    yield from ((words, each) for words, each in walk((), every_command()) if words)


def lines_in(text: str) -> list[str]:
    """The indented lines that call `tidings`, without what explains them."""
    found = [line.strip() for line in text.splitlines() if re.match(r"\s+(\S.*\| )?tidings ", line)]
    return [re.split(r"\s{3,}|\s+# ", line)[0] for line in found]


def parse(line: str) -> str:
    """Parse a command line as far as it can be without running it; answers the words of its command.

    Options that act while they are parsed (`--help`, `--install-completion`) are refused: parsing changes nothing.
    """
    words = shlex.split(line.rpartition(" | ")[2] if " | tidings " in line else line)
    assert words[0] == "tidings", line
    assert not {"-h", "--help", "--install-completion", "--show-completion"} & set(words), f"{line} acts when parsed"
    command: Any = every_command()
    arguments, path, context = words[1:], list[str](), None
    while True:
        context = command.make_context(path[-1] if path else "tidings", list(arguments), parent=context)
        rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
        if not getattr(command, "commands", None) or not rest:
            return " ".join(path)
        name, command, arguments = command.resolve_command(context, rest)
        path.append(name)
