"""A command starts quickly: what it loads decides that, so that is what is tested. `bench/cli.py` measures it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given
from hypothesis import strategies as st

import tidings
from tidings.cli.main import ALL, COMMANDS, command, main
from tidings.cli.plain_values import PlainValue, use_plain_values

SOURCES = {"PYTHONPATH": str(Path(tidings.__file__).parents[1])}
HEAVY = {"mcp", "msgspec", "nats", "pydantic", "pyspark", "rich", "starlette", "yaml"}


@pytest.mark.parametrize("line", ["--version", "config --json", "space list --json"])
def test_a_command_that_needs_no_broker_loads_no_client_no_validators_and_no_other_command(
    line: str, tmp_path: Path
) -> None:
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


def parameter(annotation: Any) -> Any:
    app = typer.Typer()

    def run(value: Any) -> None:
        raise NotImplementedError

    run.__annotations__ = {"value": annotation}
    app.command()(run)
    return next(each for each in typer.main.get_command(app).params if each.name == "value")


def outcome(coerce: Callable[..., Any], value: Any, param: Any) -> Any:
    try:
        return coerce(value, param=param, ctx=None)
    except typer.BadParameter as error:
        return str(error)


@pytest.mark.parametrize("annotation", [str, int, float, list[str], Path])
@given(text=st.one_of(st.text(max_size=12), st.integers().map(str), st.floats().map(str)))
@example(text="１２")
@example(text="1_000")
@example(text=" 7")
@example(text="-0")
@example(text="1e5")
def test_a_plain_value_is_what_typer_makes_of_it(annotation: Any, text: str) -> None:
    from typer._coercion import build_runtime_param

    param = parameter(annotation)
    value = [text] if annotation == list[str] else text
    theirs = build_runtime_param(param.type_descriptor)
    ours = outcome(PlainValue(lambda: theirs).coerce, value, param)
    expected = outcome(theirs.coerce, value, param)
    assert (type(ours), repr(ours)) == (type(expected), repr(expected))


def test_a_value_with_bounds_is_held_to_them() -> None:
    use_plain_values()
    app = typer.Typer()

    def run(count: int = typer.Option(1, min=1, max=3)) -> None:
        print(count)

    app.command()(run)
    with pytest.raises(SystemExit) as ended:
        typer.main.get_command(app)(["--count", "9"])
    assert ended.value.code == 2
