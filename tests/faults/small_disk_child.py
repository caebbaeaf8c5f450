"""A host's database on a disk of a little more than one megabyte, mounted by this process in a namespace of its own.

    unshare --mount --map-root-user python small_disk_child.py full|read-only DIRECTORY

Does what the test named by its first argument needs, on one and the same running `Database`, and says in one line of
JSON what it met.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hosted import NOW, draft
from tidings.errors import TidingsError
from tidings.host import outbox_transitions as moves
from tidings.host import outbox_views as views
from tidings.host.schema import SCHEMA
from tidings.util.database import Database

SIZE, BALLAST, MESSAGE = 1_310_720, 300_000, 20_000
UNTIL_FULL = 200


class Host:
    def __init__(self, path: Path) -> None:
        self.path, self.sent = path, 0
        self.database = Database(path, SCHEMA)

    def send(self) -> str:
        self.sent += 1
        one = draft(f"m{self.sent}", payload=bytes(MESSAGE))
        return self.database.write_blocking(lambda c: moves.accept(c, one, NOW), 30).row.id

    def stored(self) -> list[str]:
        return [row.id for row in self.database.read_blocking(views.listed, 30)]

    def sound(self) -> bool:
        (said,) = self.database.read_blocking(lambda c: c.execute("PRAGMA integrity_check").fetchone(), 30)
        return bool(said == "ok")


def refusal(ask: Callable[[], Any]) -> list[str]:
    """The name and the words of the refusal; an answer is no refusal."""
    try:
        return ["answered", str(ask())]
    except TidingsError as error:
        return [type(error).__name__, str(error)]


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as ballast:
        try:
            while ballast.write(bytes(4_096)):
                pass
        except OSError:
            return


def until_refused(host: Host) -> tuple[list[str], list[str]]:
    """Which were answered, and how the first that was not was refused."""
    answered: list[str] = []
    for _ in range(UNTIL_FULL):
        name, words = refusal(host.send)
        if name != "answered":
            return answered, [name, words]
        answered.append(words)
    raise SystemExit("the disk does not get full")


def full(disk: Path) -> dict[str, Any]:
    """Full while it runs; room is made and it goes on. Then full before it starts."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(BALLAST))
    host = Host(disk / "home" / "host.db")
    answered, first = until_refused(host)
    met: dict[str, Any] = {"first": first, "again": [refusal(host.send) for _ in range(3)]}
    met["read while full"] = host.stored() == answered
    met["tried while full"] = refusal(lambda: asyncio.run(host.database.try_to_write()))
    ballast.unlink()
    met["tried after"] = refusal(lambda: asyncio.run(host.database.try_to_write()))
    answered.append(host.send())
    met["read after"] = host.stored() == answered
    host.database.close()
    fill(ballast)
    met["opened while full"] = refusal(lambda: Host(host.path))
    met["made while full"] = refusal(lambda: Host(disk / "other" / "host.db"))
    ballast.unlink()
    return met | after(host.path, answered) | {"answered": len(answered)}


def read_only(disk: Path) -> dict[str, Any]:
    """Read-only before it starts; made writable, it starts."""
    host = Host(disk / "home" / "host.db")
    answered = [host.send() for _ in range(3)]
    host.database.close()
    mount("remount,ro", disk)
    met: dict[str, Any] = {"opened": refusal(lambda: Host(host.path))}
    met["made"] = refusal(lambda: Host(disk / "home" / "other.db"))
    mount("remount,rw", disk)
    return met | after(host.path, answered)


def after(path: Path, answered: list[str]) -> dict[str, Any]:
    host = Host(path)
    met = {"kept": host.stored() == answered, "sound": host.sound()}
    host.database.close()
    return met


def mount(options: str, disk: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tidings", str(disk)], check=True)


if __name__ == "__main__":
    directory = Path(sys.argv[2])
    mount(f"size={SIZE},mode=0700", directory)
    print(json.dumps({"full": full, "read-only": read_only}[sys.argv[1]](directory)))
