"""`tidings demo`: a space in a temporary directory, the story of `story.py` on it, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tidings.cli import output
from tidings.errors import TidingsError

START_TIMEOUT = 60.0


def demo() -> None:
    """Start a space in a temporary directory, use it, attack it, and show that every attack is refused.

    Agents talk to a channel, to one agent and to a role; one is killed and comes back; one tries what it may not do;
    one pretends to be another. Ends with 0 if everything went as promised.

    Example:

      tidings demo
    """
    from tidings.cli.story import heading, tell

    root = Path(tempfile.mkdtemp(prefix="tidings-demo-"))
    child: subprocess.Popen[bytes] | None = None
    started = time.monotonic()
    try:
        heading("A space starts")
        child = _start(root)
        asyncio.run(tell(root))
    finally:
        if child is not None:
            _stop(child)
        shutil.rmtree(root, ignore_errors=True)
    output.line(f"\nDone in {time.monotonic() - started:.0f} s. The space is stopped and its files are gone.")
    output.line("Your own: `tidings up`, then `tidings agent add NAME`.")
    output.hint("tidings up --detach")


def _start(root: Path) -> subprocess.Popen[bytes]:
    """The same program a user runs, in a directory of its own."""
    from tidings.space.home import SpaceHome

    home = SpaceHome(root / "home", "demo")
    said = root / "up.out"
    with said.open("w") as file:
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tidings.cli",
                "up",
                "--space",
                "demo",
                "--home",
                str(root / "home"),
                "--no-pipeline",
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ | {"TIDINGS_AS": "you"},
        )
    deadline = time.monotonic() + START_TIMEOUT
    with output.working("starting"):
        while (state := home.read_state()).get("phase") != "ready":
            if child.poll() is not None or time.monotonic() > deadline:
                _stop(child)
                raise TidingsError(f"the demonstration's space did not start: {said.read_text().strip() or state}")
            time.sleep(0.05)
    output.line(
        f"  nats-server {state['nats_server']} on loopback, a steward under lease {state['lease']}; you are `you`"
    )
    return child


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
