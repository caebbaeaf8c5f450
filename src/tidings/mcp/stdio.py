"""Standard input as the SDK reads it, with the one thing mended that it drops without an answer.

Programs in JavaScript write half of a character (an emoji that was cut) into JSON as an escape. Such a line is JSON but
no text; the SDK passes over it, and its client waits for ever. Here the half becomes U+FFFD, as bytes do that are no
UTF-8. What is no JSON at all is still the SDK's to pass over.
"""

from __future__ import annotations

import re
import sys
from io import TextIOWrapper

import anyio

#: escapes of JSON: both halves of a character, one without its other, and every other kind, so that `\\\\ud800` is none
_ESCAPES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def whole(line: str) -> str:
    """The line without halves of characters."""
    return _ESCAPES.sub(lambda found: r"\ufffd" if found[1] else found[0], line) if r"\u" in line else line


class _WholeLines(TextIOWrapper):
    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return whole(super().readline(size))


def standard_input() -> anyio.AsyncFile[str]:
    """Lines of this process's standard input."""
    return anyio.wrap_file(_WholeLines(sys.stdin.buffer, encoding="utf-8", errors="replace"))
