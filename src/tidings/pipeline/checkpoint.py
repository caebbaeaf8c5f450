"""The checkpoint of a query on disk: what Spark wrote down, whose it is, and whether it can be read at all.

A crash within a power cut can leave a file of it empty or torn, and Spark then refuses to start, for ever. Nothing is
lost with a checkpoint: the deliver floor and the ledger know how far delivery is. So one that cannot be read is put
aside, which is said, and a new one begins at the floor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidings.errors import UnhealthyError
from tidings.wire.ids import new_id

VERSION = "v1"
#: in this order a checkpoint is written: what a batch will be, then that it is done
LOGS = ("offsets", "commits")
ATTEMPTS = "tidings-attempts"


class Checkpoint:
    """The folder that Spark is given, and what we keep in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def offsets(self) -> list[dict[str, Any]]:
        """What Spark wrote down before each batch, oldest first: {epoch, seq, mark} of the last ones."""
        found = (self._offset(int(path.name)) for path in self._numbered("offsets"))
        return [offset for offset in found if offset is not None]

    def range_of(self, number: int) -> tuple[int | None, int]:
        """(after, through) of a batch as Spark wrote it down; after is None for the first one."""
        through = self._offset(number)
        if through is None:
            raise UnhealthyError(f"{self.folder} says nothing of batch {number}, which Spark runs")
        before = self._offset(number - 1)
        return (None if before is None else int(before["seq"])), int(through["seq"])

    def _offset(self, number: int) -> dict[str, Any] | None:
        path = self.folder / "offsets" / str(number)
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            return None
        return dict(json.loads(lines[2])) if len(lines) >= 3 and lines[2].startswith("{") else None

    def pending(self) -> int | None:
        """The batch that was begun and not committed; None if there is none."""
        begun, done = self._numbered("offsets"), self._numbered("commits")
        newest = int(begun[-1].name) if begun else -1
        return newest if newest > (int(done[-1].name) if done else -1) else None

    def count_attempt(self, number: int) -> int:
        """Write down that a batch is begun once more. Answers how often it was since `count_success`."""
        path = self.folder / ATTEMPTS
        known = path.read_text().split() if path.exists() else []
        before = int(known[1]) if len(known) == 2 and known[0] == str(number) and known[1].isdigit() else 0
        path.write_text(f"{number} {before + 1}")
        return before + 1

    def count_success(self) -> None:
        """Whatever ended the attempts before, the batch as it is cut now can be read and encoded."""
        (self.folder / ATTEMPTS).unlink(missing_ok=True)

    def identity(self) -> str:
        """Its own word: a new checkpoint counts batches from zero under another one."""
        path = self.folder / "tidings-id"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(new_id())
        return path.read_text().strip()

    def retire(self) -> None:
        """Put it aside; the next one is new."""
        if self.folder.exists():
            self.folder.rename(self.folder.with_name(f"{self.folder.name}.{new_id()}"))

    def damage(self) -> str | None:
        """Which file of it cannot be read, if any, and why."""
        for path in self._files():
            if why := _fault_of(path):
                return f"{path.relative_to(self.folder)} {why}"
        return None

    def _files(self) -> list[Path]:
        own = [path for name in ("metadata", "tidings-id") if (path := self.folder / name).exists()]
        return own + [path for name in LOGS for path in self._numbered(name)]

    def _numbered(self, name: str) -> list[Path]:
        numbered = (path for path in (self.folder / name).glob("*") if path.name.isdigit())
        return sorted(numbered, key=lambda path: int(path.name))


def _fault_of(path: Path) -> str | None:
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return "is not text"
    lines = text.splitlines()
    if not text.strip():
        return "is empty"
    if path.name == "tidings-id":
        return None
    if path.name.isdigit() and (lines.pop(0) != VERSION or not lines):
        return f"does not begin with {VERSION}, or ends there"
    try:
        for line in lines:
            json.loads(line)
    except ValueError:
        return "is torn, or holds what Spark did not write"
    return None
