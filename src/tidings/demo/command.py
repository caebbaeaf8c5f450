"""`tidings demo`: a space in a temporary directory, the story of `story.py` on it, and nothing left behind; with
`links` two of them, and the story of `links.py`.

A space runs as a user runs it, in a process of its own. However the demonstration ends, interrupted or killed, that
process ends in order and takes its broker, its steward and its JVM along; only after a kill -9 do files stay.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tidings.admin.home import SpaceHome
from tidings.cli import output
from tidings.cli.context import Context
from tidings.cli.doctor import require_testing
from tidings.errors import TidingsError, UsageError

START_TIMEOUT = 60.0
#: pipeline, steward and broker each have some time to end in order
STOP_TIMEOUT = 75.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def demo(
    what: Annotated[
        str | None, typer.Argument(help="`links`: two spaces that are linked and cut apart.", metavar="[links]")
    ] = None,
    no_pipeline: Annotated[
        bool, typer.Option("--no-pipeline", help="Skip the scenes that need Spark: agents that are offline.")
    ] = False,
) -> None:
    """Start a space in a temporary directory, use it, attack it, and show that no attack succeeds.

    Agents talk to a channel, to one agent and to a role; one is killed and comes back; three are away, and get what
    they were owed and may read, once; one tries what it may not do; one pretends to be another, and is told what became
    of it. Exits with 0 if every check passes. Needs the extra `tidings[doctor]`.

    `tidings demo links` starts two spaces and links them, cuts them apart while both talk, and shows that both
    converge after the connection is restored.

    Examples:

      tidings demo

      tidings demo --no-pipeline         quicker: without Spark, and without those who are away

      tidings demo links
    """
    require_testing()
    if what not in (None, "links"):
        raise UsageError(f"there is no demonstration {what!r}: `tidings demo` or `tidings demo links`")
    root = Path(tempfile.mkdtemp(prefix="tidings-demo-"))
    started = time.monotonic()
    with _interruptible():
        try:
            if what == "links":
                ended = _show_links(root)
            else:
                ended = _show_space(root, pipeline=not no_pipeline and Context().settings.switch("pipeline"))
        finally:
            shutil.rmtree(root, ignore_errors=True)
    output.line(f"\nDone in {time.monotonic() - started:.0f} s. {ended}")


def _show_space(root: Path, *, pipeline: bool) -> str:
    from tidings.demo.story import heading, tell

    home = SpaceHome(root / "home", "demo")
    heading("A space starts")
    with _running(home, root / "up.out", pipeline=pipeline) as state:
        asyncio.run(tell(home, durable=_is_coming(state)))
    return (
        "The space is stopped and its files are gone.\nYour own: `tidings up --detach`, then `tidings agent add NAME`."
    )


def _show_links(root: Path) -> str:
    from tidings.demo.links import tell
    from tidings.demo.story import heading

    west, east = SpaceHome(root / "home", "west"), SpaceHome(root / "home", "east")
    heading("Two spaces start, west and east")
    with _running(west, root / "west.out", pipeline=False), _running(east, root / "east.out", pipeline=False):
        asyncio.run(tell(west, east))
    return (
        "Both spaces are stopped and their files are gone.\n"
        "Your own: `tidings link invite --both general`, and `tidings link accept LINE` in the other space."
    )


def _is_coming(state: dict[str, Any]) -> bool:
    """Will there be durable delivery? If this machine lacks something for it, one sentence says what."""
    pipeline = state["pipeline"]
    if pipeline["phase"] == "unavailable":
        output.line(f"  left out: agents that are away. {pipeline['why']}")
    return bool(pipeline["wanted"]) and pipeline["phase"] != "unavailable"


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP are heard as Ctrl-C is: everything is put away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS[1:]:
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _running(home: SpaceHome, said: Path, *, pipeline: bool) -> Iterator[dict[str, Any]]:
    """The same program a user runs, in a directory of its own."""
    from tidings.server.nats_server import die_with_parent

    command = [sys.executable, "-m", "tidings.cli", "up", "--space", home.name, "--home", str(home.home)]
    with said.open("w") as file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env=os.environ | {"TIDINGS_AS": "you", "TIDINGS_PIPELINE": "on" if pipeline else "off"},
        )
    try:
        state = _until_ready(home, child, said)
        output.line(
            f"  nats-server {state['nats_server']} on loopback, a steward under lease {state['lease']}; you are `you`"
        )
        yield state
    finally:
        _stop(child)


def _until_ready(home: SpaceHome, child: subprocess.Popen[bytes], said: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_TIMEOUT
    with output.working("starting"):
        while (state := home.read_state()).get("phase") != "ready":
            if child.poll() is not None or time.monotonic() > deadline:
                raise TidingsError(f"the demonstration's space did not start: {said.read_text().strip() or state}")
            time.sleep(0.05)
    return state


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Whoever interrupts again waits all the same: it would leave processes behind."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    if child.poll() is None:
        child.terminate()
        try:
            with output.working("stopping"):
                child.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
