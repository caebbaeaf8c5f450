"""Settings come from the nearest place that says something, and a misspelt one is refused."""

from pathlib import Path

import pytest

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
