"""The command line answers with sentences and stable exit codes, and help alone is enough to start."""

import json
from pathlib import Path

import pytest

from tidings.cli.main import main
from tidings.cli.output import age, size
from tidings.cli.spaces import parse_settings
from tidings.errors import TidingsError, UsageError


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDINGS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["status"], 2, "there is no space 'main'"),
        (["status", "--space", "a b"], 2, "space name 'a b' is not allowed"),
        (["down", "--space", "lab"], 2, "tidings up --space lab"),
        (["logs", "nonsense"], 2, "there is no log 'nonsense'"),
        (["agent", "add"], 2, "name the agent, or give its file"),
        (["agent", "show", "ada"], 2, "there is no space 'main'"),
        (["agent", "add", "--file", "nowhere.md"], 2, "cannot read nowhere.md"),
        (["space", "set", "colour=red"], 2, "is not a setting"),
        (["space", "remove", "lab", "--yes"], 2, "there is no space 'lab'"),
        (["up", "--port", "0"], 2, "not between 1 and 65535"),
        (["up", "--nats-server", "/nowhere/nats-server"], 1, "is not an executable file"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_a_mistake_is_answered_by_a_sentence(
    words: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    "words",
    [
        "",
        "up",
        "down",
        "status",
        "logs",
        "config",
        "version",
        "demo",
        "agent",
        "agent add",
        "space set",
        "doctor",
        "ask",
        "work",
        "dead",
        "dead retry",
    ],
)
def test_every_command_explains_itself(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "--help"]) == 0
    assert "Usage:" in capsys.readouterr().out


def test_config_prints_each_value_with_its_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "--json", "--space", "lab"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["space"] == {"value": "lab", "source": "flag"}
    assert found["home"] == {"value": str(tmp_path / "home"), "source": "environment"}


def test_version_names_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    assert {"tidings", "python", "nats-server", "nats-py"} <= set(json.loads(capsys.readouterr().out))


def test_space_settings_are_read_from_words() -> None:
    assert parse_settings(["class=live", "replay=off", "deliver=off", "keep_age=7d", "keep_bytes=2G"]) == {
        "defaults": {"class": "live", "replay": False},
        "parts": {"deliver": "off"},
        "keep_age": 604_800,
        "keep_bytes": 2 * 10**9,
    }
    assert parse_settings(["class="]) == {"defaults": {"class": None}}
    for wrong in ("class=fast", "keep_age=soon", "deliver", "parts=off"):
        with pytest.raises(UsageError):
            parse_settings([wrong])


def test_every_error_has_a_code_of_its_own_and_a_stable_exit_code() -> None:
    def tree(cls: type[TidingsError]) -> list[type[TidingsError]]:
        return [cls, *(each for sub in cls.__subclasses__() for each in tree(sub))]

    classes = [cls for cls in tree(TidingsError) if cls.__module__ == "tidings.errors"]
    assert len({cls.code for cls in classes}) == len(classes)
    assert {cls.exit_code for cls in classes} == {1, 2, 3, 4, 5, 6}


def test_sizes_and_ages_are_short() -> None:
    assert [size(n) for n in (None, 5, 12_345, 8_600_000_000)] == ["-", "5 B", "12.3 KB", "8.6 GB"]
    assert [age(t, 100_000) for t in (None, 99_999.5, 99_960, 96_000, 0)] == ["-", "0.5 s", "40 s", "1 h", "1 d"]
