"""What keeps a space up elsewhere: a unit for systemd, and a container file that runs as nobody with one volume."""

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from terminal import Terminal, done, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.close()


@pytest.mark.timeout(120)
def test_the_unit_of_a_space_keeps_it_up_as_it_was_started(terminal: Terminal, tmp_path: Path) -> None:
    config = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    missing = terminal.run("space", "install", **config)
    assert (missing.returncode, "there is no space" in missing.stderr) == (2, True), missing
    done(terminal, "up", "--detach", "--listen", "127.0.0.2")
    done(terminal, "down")
    first = terminal.run("space", "install", **config)
    assert (first.returncode, "was written" in first.stderr) == (0, True), first
    assert "systemd does not answer here" in first.stderr
    assert "is as it should be" in terminal.run("space", "install", **config).stderr
    (unit,) = (tmp_path / "config" / "systemd" / "user").glob("tidings-space-main-*.service")
    lines = dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line)
    assert (lines["Restart"], lines["RestartPreventExitStatus"]) == ("on-failure", "6")
    command = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(lines["ExecStart"])]
    running = subprocess.Popen(command, env=terminal.env, stderr=subprocess.DEVNULL)
    try:
        until(lambda: terminal.run("status").returncode == 0)
        assert "tls://127.0.0.2:" in terminal.run("status", "--json").stdout
        assert subprocess.run(command, env=terminal.env, capture_output=True, check=False).returncode == 6
        done(terminal, "down")
        assert running.wait(60) == 0, "told to end, it is not started again"
    finally:
        if running.poll() is None:
            running.terminate()
            running.wait(60)
    assert "was removed" in terminal.run("space", "uninstall", **config).stderr
    assert not unit.exists()
    assert "there is no" in terminal.run("space", "uninstall", **config).stderr


def test_the_container_runs_as_nobody_with_one_volume_and_copies_what_is_there() -> None:
    lines = [line.split("#")[0].split() for line in (ROOT / "Containerfile").read_text().splitlines()]
    said = [words for words in lines if words]
    assert [words[1] for words in said if words[0] == "USER"] == ["65534:65534"]
    assert [words[1:] for words in said if words[0] == "VOLUME"] == [["/data"]]
    copied = [source for words in said if words[0] == "COPY" and "--from=build" not in words for source in words[1:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert [words for words in said if words[0] == "ADD"] == []
    assert os.access(ROOT / "Containerfile", os.R_OK)
