"""Settings come from the nearest place that says something, and a misspelt one is refused."""

import json
import os
from pathlib import Path

import pytest

from tidings.cli.main import main
from tidings.errors import ConfigError
from tidings.space.settings import Settings, person


def sources(settings: Settings) -> dict[str, str]:
    return {each.name: each.source for each in settings.all()}


def test_flag_beats_environment_beats_folder_beats_home_beats_default(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    (home / "config.toml").write_text('space = "from-home"\n')
    environ = {"TIDINGS_HOME": str(home), "USER": "ada"}
    assert Settings({}, environ, folder)["space"] == "from-home"
    (folder / "tidings.toml").write_text('space = "from-folder"\n')
    assert Settings({}, environ, folder)["space"] == "from-folder"
    environ["TIDINGS_SPACE"] = "from-environment"
    assert Settings({}, environ, folder)["space"] == "from-environment"
    flagged = Settings({"space": "from-flag", "as": None}, environ, folder)
    assert (flagged["space"], flagged["as"]) == ("from-flag", "ada")
    assert sources(flagged)["space"] == "flag"
    assert sources(flagged)["lease_ttl"] == "default"


def test_the_default_home_follows_xdg(tmp_path: Path) -> None:
    assert Settings({}, {"HOME": "/h"}, tmp_path)["home"] == "/h/.local/share/tidings"
    assert Settings({}, {"HOME": "/h", "XDG_DATA_HOME": "/x"}, tmp_path)["home"] == "/x/tidings"


@pytest.mark.parametrize("text", ["spcae = 'x'", "space = ", "\x00"])
def test_a_file_that_makes_no_sense_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "tidings.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"tidings\.toml"):
        Settings({}, {"HOME": str(tmp_path)}, tmp_path)


def test_a_folder_decides_neither_which_server_runs_nor_where_the_home_is(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    (folder / "tidings.toml").write_text(
        'nats_server = "/proc/self/cwd/x.sh"\nhome = "/tmp/elsewhere"\nspace = "lab"\n'
    )
    environ = {"HOME": str(tmp_path), "TIDINGS_HOME": str(home)}
    found = Settings({}, environ, folder)
    assert (found["nats_server"], found["home"], found["space"]) == ("", str(home), "lab")
    assert [note.split(" in ")[0] for note in found.notes] == ["home", "nats_server"]
    assert all("is ignored: it is taken only from" in note for note in found.notes)
    (home / "config.toml").write_text('nats_server = "/opt/nats-server"\n')
    assert Settings({}, environ, folder)["nats_server"] == "/opt/nats-server"
    assert Settings({}, environ | {"TIDINGS_NATS_SERVER": "/x"}, folder)["nats_server"] == "/x"


def test_a_file_of_another_user_or_one_that_everybody_may_write_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, environ = tmp_path / "tidings.toml", {"HOME": str(tmp_path)}
    file.write_text('space = "theirs"\nthis is not TOML')
    file.chmod(0o666)
    found = Settings({}, environ, tmp_path)
    assert (found["space"], found.notes) == ("main", [f"{file} is ignored: everybody may write it; `chmod o-w {file}`"])
    file.chmod(0o644)
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # what root wrote is everybody's to read
        os.chown(file, 4242, -1)
    found = Settings({}, environ, tmp_path)
    assert (found["space"], found.notes) == ("main", [f"{file} is ignored: it belongs to another user"])
    file.unlink()
    os.mkfifo(file)
    monkeypatch.undo()
    assert Settings({}, environ, tmp_path).notes == [f"{file} is ignored: it is not a plain file"]


def test_config_tells_what_was_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDINGS_HOME", str(tmp_path / "home"))
    (tmp_path / "tidings.toml").write_text('nats_server = "./x.sh"\n')
    assert main(["config", "--json"]) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert (facts["nats_server"]["value"], facts["nats_server"]["source"]) == ("", "default")
    assert len(facts["ignored"]) == 1
    assert f"note: nats_server in {tmp_path}/tidings.toml is ignored" in shown.err


def test_a_number_must_be_one(tmp_path: Path) -> None:
    settings = Settings({"budget": "lots"}, {"HOME": str(tmp_path)}, tmp_path)
    with pytest.raises(ConfigError, match="budget = 'lots' \\(from flag\\)"):
        settings.number("budget")
    assert settings.number("lease_ttl") == 3.0


def test_a_switch_is_on_or_off_and_says_where_a_wrong_word_came_from(tmp_path: Path) -> None:
    assert Settings({}, {"HOME": str(tmp_path)}, tmp_path).switch("pipeline")
    assert not Settings({}, {"HOME": str(tmp_path), "TIDINGS_PIPELINE": "off"}, tmp_path).switch("pipeline")
    (tmp_path / "tidings.toml").write_text("pipeline = false\n")
    assert not Settings({}, {"HOME": str(tmp_path)}, tmp_path).switch("pipeline")
    with pytest.raises(ConfigError, match="pipeline = 'maybe' \\(from flag\\)"):
        Settings({"pipeline": "maybe"}, {"HOME": str(tmp_path)}, tmp_path).switch("pipeline")


def test_a_person_whose_name_does_not_fit_is_me() -> None:
    assert person({"USER": "ada"}) == "ada"
    assert person({"USER": "ada lovelace"}) == "me"
