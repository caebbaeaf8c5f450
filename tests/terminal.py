"""The command line as a user meets it, with a home of its own."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from tidings.admin.home import SpaceHome, list_spaces
from tidings.cli.main import main
from tidings.util.private_files import lock_pid

TIDINGS = (sys.executable, "-m", "tidings.cli")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Terminal:
    """Runs `tidings` commands below `root`; `close` stops whatever they left running."""

    def __init__(self, root: Path) -> None:
        self.home = SpaceHome(root / "home", "main")
        #: does a person look at standard error?
        self.watched = False
        #: Spark takes as long to start as everything else together; the tests that need it switch it on
        self.env = {
            **os.environ,
            "TIDINGS_HOME": str(root / "home"),
            "TIDINGS_AS": "me",
            "TIDINGS_LEASE_TTL": "1",
            "TIDINGS_PIPELINE": "off",
        }

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end: `up` as a process of its own, others in this one, which is quicker."""
        if words[0] == "up" or words[:2] == ("host", "up"):
            child = self.start(*words, **env)
            said = child.communicate(timeout=50)
            return subprocess.CompletedProcess(words, child.returncode, *said)
        out, err = io.StringIO(), Screen() if self.watched else io.StringIO()
        with patch.dict(os.environ, self.env | env, clear=True), redirect_stdout(out), redirect_stderr(err):
            code = main(list(words))
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*TIDINGS, *words], env=self.env | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def processes(self) -> list[int]:
        """Every process that names this home on its command line, whoever started it."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes()
            except OSError:
                continue
            if str(self.home.home).encode() in words:
                found.append(int(path.parent.name))
        return found

    def close(self) -> None:
        for space in list_spaces(self.home.home):
            if lock_pid(SpaceHome(self.home.home, space).up_lock) is not None:
                self.run("down", "--space", space)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.2)


def done(terminal: Terminal, *words: str) -> str:
    found = terminal.run(*words)
    assert found.returncode == 0, (words, found.stderr)
    return found.stdout
