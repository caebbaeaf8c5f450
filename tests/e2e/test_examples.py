"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

from terminal import Terminal

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_runs_on_an_open_space(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach", "--open").returncode == 0
    said = {}
    for path in sorted(EXAMPLES.glob("*.py")):
        done = subprocess.run([sys.executable, path], env=terminal.env, capture_output=True, text=True, timeout=40)
        assert done.returncode == 0, (path.name, done.stderr)
        said[path.name] = done.stdout
    assert "ada in #general: hello, bob" in said["hello.py"]
    assert "the build is green" in terminal.run("history", "builds").stdout
