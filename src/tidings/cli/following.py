"""The lines of a log file, and of the file that takes its place when it rotates."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

PAUSE = 0.2


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a file; none if there is no file."""
    try:
        with path.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=max(0, count))]
    except FileNotFoundError:
        return []


def follow(path: Path, count: int, pause: Callable[[], None] = lambda: time.sleep(PAUSE)) -> Iterator[str]:
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
