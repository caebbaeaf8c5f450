"""A space on a disk of 64 megabytes, mounted by this process in a mount namespace of its own, and filled by others.

    unshare --mount --map-root-user python full_disk_child.py DIRECTORY

Does what a user would do, by the command line, and says in one line of JSON what was met.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from terminal import Terminal

SIZE = 64 * 1024 * 1024


def until(condition: Callable[[], bool], within: float = 60.0) -> bool:
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def status(terminal: Terminal) -> tuple[int, list[str]]:
    done = terminal.run("status", "--json")
    return done.returncode, json.loads(done.stdout)["problems"]


def life(disk: Path) -> dict[str, Any]:
    terminal, ballast = Terminal(disk), disk / "ballast"
    met: dict[str, Any] = {}
    try:
        up = terminal.run("up", "--detach")
        met["up"] = up.returncode, up.stderr
        for name in ("ada", "bob"):
            terminal.run("agent", "add", name, "--read", "general", "--read", "side")
            terminal.run("join", "general", "--as", name)
        terminal.run("send", "general", "before")
        met["before"] = status(terminal)
        broker = terminal.home.read_state()["broker_pid"]
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free))  # all there is, but the reserve
        lost = terminal.run("send", "general", "x" * 200_000)
        met["sent into it"] = lost.returncode, lost.stderr
        met["broker started again"] = until(
            lambda: terminal.home.read_state().get("broker_pid") not in (None, broker)
        ) and until(lambda: terminal.home.read_state().get("phase") == "ready")
        met["full"] = until(lambda: status(terminal)[0] == 3 and "disk" in status(terminal)[1][0]), status(terminal)
        until(lambda: terminal.run("send", "general", "in time").returncode != 0)  # the gate closes within a second
        refused = terminal.run("send", "general", "refused")
        met["sent while full"] = refused.returncode, refused.stderr
        met["left"] = terminal.run("leave", "general", "--as", "ada").returncode
        narrowed = terminal.run("agent", "access", "bob", "--read", "side")
        met["narrowed"] = narrowed.returncode, narrowed.stderr
        steward = terminal.home.read_state()["steward_pid"]
        os.kill(steward, signal.SIGKILL)
        met["taken over"] = until(
            lambda: terminal.home.read_state().get("steward_pid") not in (None, steward)
        ) and until(lambda: terminal.home.read_state().get("phase") == "ready")
        met["still full"] = status(terminal)
        ballast.unlink()
        met["healthy again"] = until(lambda: status(terminal) == (0, [])), status(terminal)
        met["sent again"] = terminal.run("send", "general", "after").returncode
        met["reserve again"] = (terminal.home.store / "reserve").exists()
        met |= unseen(terminal, ballast)
        history = terminal.run("history", "general", "--json").stdout.splitlines()
        texts = [json.loads(line)["text"] for line in history]
        met["history"] = [text for text in texts if text != "in time" and len(text) < 100]
        met["members"] = terminal.run("channels", "members", "general", "--json").stdout
        met["down"] = terminal.run("down").returncode
        met["reserve after down"] = (terminal.home.store / "reserve").exists()
        met["started on a full disk"] = started_full(terminal, ballast)
    finally:
        terminal.close()
    return met


def started_full(terminal: Terminal, ballast: Path) -> list[Any]:
    """Nothing is free at all: not even for what a process that fails has to say."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(65_536)):
            pass
    up = terminal.run("up", "--detach")
    met = [up.returncode, up.stderr, *status(terminal)]
    ballast.unlink()
    return met


def unseen(terminal: Terminal, ballast: Path) -> dict[str, Any]:
    """Full and empty again while the supervisor did not look: a stream keeps its error, and a ruling finds out."""
    supervisor, broker = (terminal.home.read_state()[each] for each in ("pid", "broker_pid"))
    os.kill(supervisor, signal.SIGSTOP)
    ballast.write_bytes(bytes(shutil.disk_usage(ballast.parent).free))
    lost = terminal.run("send", "general", "x" * 200_000)
    ballast.unlink()
    os.kill(supervisor, signal.SIGCONT)
    terminal.run("join", "general")
    started = until(lambda: terminal.home.read_state().get("broker_pid") not in (None, broker))
    healthy = until(lambda: status(terminal) == (0, []))
    joined = terminal.run("join", "general").returncode
    return {"unseen": [lost.returncode != 0, started, healthy, joined]}


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "tidings", str(directory)],
        check=True,
    )
    print(json.dumps(life(directory)))
