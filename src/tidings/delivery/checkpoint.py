"""The checkpoint of a query: what Spark wrote down, whose it is, and whether it can be read at all.

A crash within a power cut can leave a file of it empty or torn, and Spark then refuses to start, for ever. Nothing is
lost with a checkpoint: the deliver floor and the ledger know how far delivery is. So one that cannot be read is put
aside, which is said, and a new one begins at the floor.
"""

from __future__ import annotations

import json
from typing import Any

from tidings.delivery.folders import CheckpointFolder
from tidings.errors import UnhealthyError
from tidings.wire.message import new_id

VERSION = "v1"
#: in this order a checkpoint is written: what a batch will be, then that it is done
LOGS = ("offsets", "commits")
ATTEMPTS, IDENTITY = "tidings-attempts", "tidings-id"


class Checkpoint:
    """The folder that Spark is given, and what we keep in it."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder

    def offsets(self) -> list[dict[str, Any]]:
        """What Spark wrote down before each batch, oldest first: {epoch, seq, mark} of the last ones."""
        found = (self._offset(number) for number in self._numbers("offsets"))
        return [offset for offset in found if offset is not None]

    def range_of(self, number: int) -> tuple[int | None, int]:
        """(after, through) of a batch as Spark wrote it down; after is None for the first one."""
        through = self._offset(number)
        if through is None:
            raise UnhealthyError(f"{self.folder.place} says nothing of batch {number}, which Spark runs")
        before = self._offset(number - 1)
        return (None if before is None else int(before["seq"])), int(through["seq"])

    def _offset(self, number: int) -> dict[str, Any] | None:
        lines = self._text(f"offsets/{number}").splitlines()
        return dict(json.loads(lines[2])) if len(lines) >= 3 and lines[2].startswith("{") else None

    def _text(self, name: str) -> str:
        return (self.folder.read(name) or b"").decode()

    def pending(self) -> int | None:
        """The batch that was begun and not committed; None if there is none."""
        newest, done = ((self._numbers(name) or [-1])[-1] for name in LOGS)
        return newest if newest > done else None

    def count_attempt(self, number: int) -> int:
        """Write down that a batch is begun once more. Answers how often it was since `count_success`."""
        known = self._text(ATTEMPTS).split()
        before = int(known[1]) if len(known) == 2 and known[0] == str(number) and known[1].isdigit() else 0
        self.folder.write(ATTEMPTS, f"{number} {before + 1}".encode())
        return before + 1

    def count_success(self) -> None:
        """Whatever ended the attempts before, the batch as it is cut now can be read and encoded."""
        self.folder.remove(ATTEMPTS)

    def identity(self) -> str:
        """Its own word: a new checkpoint counts batches from zero under another one."""
        if self.folder.read(IDENTITY) is None:
            self.folder.write(IDENTITY, new_id().encode())
        return self._text(IDENTITY).strip()

    def retire(self) -> None:
        """Put it aside; the next one is new."""
        self.folder.put_aside(new_id())

    def damage(self) -> str | None:
        """Which file of it cannot be read, if any, and why."""
        for name in ("metadata", IDENTITY, *(f"{log}/{number}" for log in LOGS for number in self._numbers(log))):
            content = self.folder.read(name)
            if content is not None and (why := _fault_of(name, content)):
                return f"{name} {why}"
        return None

    def _numbers(self, name: str) -> list[int]:
        return sorted(int(each) for each in self.folder.names(name) if each.isdigit())


def _fault_of(name: str, content: bytes) -> str | None:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return "is not text"
    lines = text.splitlines()
    if not text.strip():
        return "is empty"
    if name == IDENTITY:
        return None
    if "/" in name and (lines.pop(0) != VERSION or not lines):
        return f"does not begin with {VERSION}, or ends there"
    try:
        for line in lines:
            json.loads(line)
    except ValueError:
        return "is torn, or holds what Spark did not write"
    return None
