"""What was handed out and what was settled since the state file was last written: a line each, beside it.

A state file is written now and then, because it is large and reaches the disk. What a program was killed in between
must not forget goes here at once, a few bytes that survive the process: which messages were handed out (`+`), so that
they say `redelivered` when they come again, and which were settled (`-`), so that they do not; and before that, where
an inbox keeps them (`=`). A power cut may lose the last lines; that costs a flag or a repetition, never a message. A
journal that cannot be written costs the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Handed(NamedTuple):
    """One message that was handed out, by its channel and its sequence in the log."""

    channel: str
    seq: int


class KeptAs(NamedTuple):
    """The newest row of an inbox that holds what was settled, and what is in it."""

    row: int
    sender: str
    id: str


class Journal:
    def __init__(self, state: Path | None) -> None:
        self.path = state.with_name(f"{state.name}.journal") if state is not None else None
        self._file: int | None = None

    def read(self) -> tuple[list[Handed], list[Handed]]:
        """What was handed out, and what of it was settled, as far as the lines are whole."""
        handed: list[Handed] = []
        settled: list[Handed] = []
        if self.path is None:
            return handed, settled
        with suppress(OSError):
            for line in self.path.read_text(errors="replace").splitlines():
                kind, (number, _, channel) = line[:1], line[1:].partition(" ")
                if kind in "+-" and number.isascii() and number.isdigit() and channel:
                    (handed if kind == "+" else settled).append(Handed(channel, int(number)))
        return handed, settled

    def read_kept(self) -> KeptAs | None:
        """Where the newest that was settled is kept, if a line says so."""
        found: KeptAs | None = None
        if self.path is None:
            return found
        with suppress(OSError):
            for line in self.path.read_text(errors="replace").splitlines():
                row, *rest = line[1:].split(" ")
                if line[:1] == "=" and row.isascii() and row.isdigit() and len(rest) == 3 and rest[2] == "=":
                    found = KeptAs(int(row), rest[0], rest[1])
        return found

    def note_kept(self, kept: KeptAs) -> None:
        self._append(f"={kept.row} {kept.sender} {kept.id} =\n")  # the end shows that it is whole

    def note_handed(self, channel: str, seq: int) -> None:
        self._append(f"+{seq} {channel}\n")

    def note_settled(self, channel: str, seq: int) -> None:
        self._append(f"-{seq} {channel}\n")

    def _append(self, line: str) -> None:
        if self.path is None:
            return
        with suppress(OSError):
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(self._file, line.encode())

    def restart(self, unsettled: Mapping[int, str]) -> None:
        """The state file has what was settled: only what is still in the application's hands stays."""
        if self.path is None:
            return
        self.close()
        lines = "".join(f"+{seq} {channel}\n" for seq, channel in unsettled.items())
        with suppress(OSError):
            if not lines:
                self.path.unlink(missing_ok=True)
                return
            beside = self.path.with_name(f"{self.path.name}.new")
            file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, lines.encode())
            finally:
                os.close(file)
            beside.replace(self.path)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
