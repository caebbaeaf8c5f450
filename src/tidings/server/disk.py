"""Room on the disk of a space, and a reserve that is given up when other programs have taken the rest.

A stream of nats-server that meets a full disk answers no write any more, not even when there is room again, until the
server is started anew (measured with 2.15.1). So messages are refused while there is room for rulings (`is_short`), the
reserve is given up before the disk is empty (`is_low`), and a broker that may have met an empty one (`is_empty`) is
started again once there is room to (`can_start`). Nothing here writes but the reserve; who acts is the supervisor.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tidings.errors import ConfigError

MEBIBYTE = 1024 * 1024
SMALLEST, LARGEST = MEBIBYTE, 64 * MEBIBYTE
#: the largest write of the broker at once, and some
ONE_WRITE = MEBIBYTE


@dataclass(frozen=True, slots=True)
class Room:
    """How much there was when somebody looked. `size` is the reserve's; `reserved`: it is there."""

    folder: Path
    free: int
    size: int
    reserved: bool

    @property
    def is_short(self) -> bool:
        """Messages are refused, so that rulings have what is left."""
        return self.free < self.size

    @property
    def is_ample(self) -> bool:
        """Messages are taken again; more than `is_short` asks for, so that it does not flap."""
        return self.free >= 2 * self.size

    @property
    def is_low(self) -> bool:
        return self.free < max(self.size // 4, ONE_WRITE // 2)

    @property
    def is_empty(self) -> bool:
        """A write may have failed."""
        return self.free < min(ONE_WRITE, self.size // 4)

    @property
    def can_start(self) -> bool:
        return self.free >= self.size // 2

    def __str__(self) -> str:
        spare = "" if self.reserved else ", its reserve was given up"
        return f"the disk of {self.folder} is full: {self.free / MEBIBYTE:.1f} MB are free{spare}"


class DiskReserve:
    """The reserve beside a store: a file whose room becomes free when it is removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "reserve"

    def look(self) -> Room:
        at = next(each for each in (self.folder, *self.folder.parents) if each.exists())
        found = shutil.disk_usage(at)
        size = min(LARGEST, max(SMALLEST, found.total // 32))
        return Room(self.folder, found.free, size, self.path.exists())

    def make(self) -> bool:
        """Set the reserve aside if there is ample room for it; whether it was made."""
        room = self.look()
        if room.reserved or room.free < 3 * room.size:
            return False
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(handle, 0, room.size)
            finally:
                os.close(handle)
        except OSError as error:
            self.give_up()
            raise ConfigError(f"cannot set {room.size} bytes aside in {self.path}: {error.strerror}") from error
        return True

    def give_up(self) -> None:
        with suppress(FileNotFoundError):
            self.path.unlink()
