"""The demonstration, as a user runs it."""

import tempfile
from pathlib import Path

import pytest

from terminal import Terminal


@pytest.mark.timeout(150)
def test_the_demonstration_tells_its_story_and_leaves_nothing_behind(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = terminal.run("demo")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for sentence in (
        "bob hears ada in #general: shall we start?",
        "bob hears ada directly: the password is swordfish",
        "ada asked a reviewer; bob answered, signed: looks good",
        "bob asks for #team.secret: bob may not read team.secret",
        "is killed: the process ended with -9",
        "nothing lost, nothing twice",
        "was dropped: {'sender_mismatch': 1}",
        "with his old credential: the broker at",
    ):
        assert sentence in done.stdout
    assert list(tmp_path.glob("tidings-demo-*")) == []
    assert len(done.stdout.splitlines()) < 70, "a short story"
