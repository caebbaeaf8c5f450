"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

from terminal import Terminal

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_runs_on_an_open_space(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach", "--open").returncode == 0
    assert terminal.run("agent", "add", "carol", "--role", "reviewer").returncode == 0, "as worker.py says"
    said = {}
    for path in sorted(EXAMPLES.glob("*.py")):
        done = subprocess.run([sys.executable, path], env=terminal.env, capture_output=True, text=True, timeout=40)
        assert (done.returncode, done.stderr) == (0, ""), (path.name, done.stderr)
        said[path.name] = done.stdout.splitlines()
    assert said.pop("hello.py")[1] == "ada in #general: hello, bob"
    assert said.pop("direct.py") == ["ada to bob: can you look at this?", "ada's message is read"]
    assert said.pop("worker.py") == ["carol reviews for ada: please review the change", "carol: looks good (done)"]
    assert said.pop("roster.py") == [
        "bob is working: reading the diff (focus)",
        "small talk: does not wake bob",
        "a question for you: wakes bob",
    ]
    (sent,) = said.pop("notify.py")
    assert sent in terminal.run("history", "builds", "--json").stdout
    assert said == {}, "what an example prints is held to what it should"
