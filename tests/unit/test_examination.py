"""The doctor finds what is wrong, says what to do, and changes nothing."""

import json
from pathlib import Path

import pytest

from tidings.cli.examination import examine
from tidings.cli.main import main


def test_a_sound_installation_has_nothing_to_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--home", str(tmp_path / "home"), "--json"]) == 0
    found = {each["what"]: each["verdict"] for each in json.loads(capsys.readouterr().out)}
    assert {"python", "packages", "nats-server", "home", "disk", "clock", "open files", "java"} == set(found)
    assert "problem" not in found.values()
    assert not (tmp_path / "home").exists()


def test_an_open_home_and_a_missing_broker_are_problems_with_a_remedy(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    found = {each.what: each for each in examine(home, str(tmp_path / "no-server"))}
    assert (found["home"].verdict, found["home"].do) == ("problem", f"chmod 700 {home}")
    assert found["nats-server"].verdict == "problem"


def test_a_damaged_space_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "spaces" / "lab"
    folder.mkdir(parents=True)
    tmp_path.chmod(0o700)
    (folder / "space.toml").write_text("name = ")
    assert main(["doctor", "--home", str(tmp_path)]) == 3
    said = capsys.readouterr()
    assert "space lab" in said.out
    assert "1 thing to mend" in said.err
