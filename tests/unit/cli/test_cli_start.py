"""A command starts quickly: what it loads decides that, so that is what is tested. `bench/cli.py` measures it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tidings
from tidings.cli.main import ALL, COMMANDS, command, main

SOURCES = {"PYTHONPATH": str(Path(tidings.__file__).parents[1])}
HEAVY = {"mcp", "msgspec", "nats", "pydantic", "pyspark", "rich", "starlette", "yaml"}


@pytest.mark.parametrize("line", ["--version", "config --json", "space list --json"])
def test_a_command_that_needs_no_broker_loads_no_client_and_no_other_command(line: str, tmp_path: Path) -> None:
    program = (
        "import sys; from tidings.cli.main import main; code = main(sys.argv[1:]); "
        "print(*sorted(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *line.split()],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | SOURCES | {"TIDINGS_HOME": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stderr
    loaded = set(ran.stderr.split())
    assert not loaded & HEAVY
    assert not loaded & {f"tidings.cli.{name}" for name in ("talk", "people", "running", "host", "inbox")}


def test_help_lists_every_command_once_under_what_people_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert len(ALL) == len(set(ALL)) == len(command().commands)
    for panel, group in COMMANDS.items():
        assert panel in said
        for name in group:
            assert f"│ {name} " in said


def test_a_command_nobody_knows_is_answered_with_what_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sned", "general", "x"]) == 2
    assert "No such command 'sned'" in capsys.readouterr().err
