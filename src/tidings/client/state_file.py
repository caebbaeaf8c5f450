"""What an endpoint remembers on disk: a state file, and a journal beside it.

The state file is written now and then, because it is large and reaches the disk. What a program that is killed in
between must not forget goes to the journal at once, a few bytes that survive the process: which messages were handed
out (`+`), so that they say `redelivered` when they come again, and which were settled (`-`), so that they do not; and
before that, where an inbox keeps them (`=`). A power cut may lose the last lines; that costs a flag or a repetition,
never a message. A journal that cannot be written costs the same. What it all means is `read_state.py`'s part.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidings.errors import ConfigError
from tidings.util.private_files import write_private
from tidings.wire.marks import Stamp


class Handed(NamedTuple):
    """One message that was handed out, by its channel and its sequence in the log."""

    channel: str
    seq: int


class KeptAs(NamedTuple):
    """The newest row of an inbox that holds what was settled, and what is in it."""

    row: int
    sender: str
    id: str


class SavedState(msgspec.Struct, kw_only=True):
    """The state file. What was surfaced and not settled is not in it: it must come again."""

    #: channel -> everything up to here was surfaced and settled
    channels: dict[str, int]
    epoch: str = ""
    forgotten: int = 0
    #: (sender, id) of what was settled last
    identities: list[tuple[str, str]] = []
    #: channel -> the newest that was surfaced, where it is newer than what was settled
    newest: dict[str, int] = {}
    sequences: list[tuple[int, int]] = []
    #: series -> number of the last frame up to which all were settled
    frames: dict[str, int] = {}
    kept_as: KeptAs | None = None
    reads_again: bool = False
    marks: list[Stamp] = []

    @classmethod
    def read(cls, path: Path) -> SavedState:
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError) as error:  # msgspec's own are ValueErrors
            raise ConfigError(f"{path} is not a state file of an endpoint ({error}): move it away") from error

    def write(self, path: Path) -> None:
        write_private(path, msgspec.json.encode(self).decode())


class JournalLines(NamedTuple):
    handed: list[Handed]
    settled: list[Handed]
    kept: KeptAs | None


class Journal:
    def __init__(self, state: Path | None) -> None:
        self.path = state.with_name(f"{state.name}.journal") if state is not None else None
        self._file: int | None = None

    def read(self) -> JournalLines:
        """What was handed out, what of it was settled, and where that is kept, as far as the lines are whole."""
        found = JournalLines([], [], None)
        if self.path is None:
            return found
        with suppress(OSError):
            for line in self.path.read_text(errors="replace").splitlines():
                kind, (number, _, rest) = line[:1], line[1:].partition(" ")
                if not (number.isascii() and number.isdigit() and rest):
                    continue
                if kind in ("+", "-"):
                    (found.handed if kind == "+" else found.settled).append(Handed(rest, int(number)))
                elif kind == "=" and len(words := rest.split(" ")) == 3 and words[2] == "=":
                    found = found._replace(kept=KeptAs(int(number), words[0], words[1]))
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
