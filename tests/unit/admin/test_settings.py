"""Settings come from the nearest place that says something, and a misspelt one is refused."""

import json
import os
from pathlib import Path

import pytest

from tidings.admin.settings import Settings, person
from tidings.cli.main import main
from tidings.errors import ConfigError


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


BROKEN = {
    b"as = 'a'\nspcae = 'x'": "unknown setting 'spcae' (at line 2)",
    b"as = 'a'\n\n[ 'servers' ]\nx = 1": "unknown setting 'servers' (at line 3)",
    b"as = 'a'\nspace = ['b']": "space is not one value (at line 2)",
    b"as = 'a'\nspace = ": "(at line 2, the last one)",
    b"\x00": "(at line 1",
    b"as = 'a'\n\x7fELF\xff\xfe": "line 2 is not UTF-8 text",
    b"#" * 70_000: "it is larger than",
}


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_a_file_that_makes_no_sense_is_refused_with_its_line_and_a_way_on(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tidings.toml").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDINGS_HOME", str(tmp_path / "home"))
    for words in (["config"], ["send", "general", "hello"], ["status"], ["host", "status"], ["agent", "list"]):
        assert main(words) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1), words
        assert f"tidings: {tmp_path}/tidings.toml cannot be read as settings: " in said.err
        assert BROKEN[data] in said.err
        assert said.err.endswith("; mend it, remove it, or go to another directory\n")
    (tmp_path / "tidings.toml").rename(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"config\.toml .*; mend it or remove it$"):
        Settings({"home": str(tmp_path)}, {}, tmp_path)


def test_what_is_no_plain_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tidings.toml"
    for target in (file, tmp_path, Path("/dev/null"), Path("/dev/zero")):
        file.symlink_to(target)
        (note,) = Settings({}, {"HOME": str(tmp_path)}, tmp_path).notes
        assert note.startswith(f"{file} is ignored: it is not a plain file")
        file.unlink()


def test_a_folder_that_chooses_whom_one_acts_as_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, environ = tmp_path / "tidings.toml", {"HOME": str(tmp_path)}
    file.write_text('as = "mal"\n')
    said = f"because {file} says so; `--as NAME` acts as another"
    assert Settings({}, environ, tmp_path).chosen_by_folder == f"acting as mal, {said}"
    assert Settings({"as": "ada"}, environ, tmp_path).chosen_by_folder == ""
    assert Settings({}, environ | {"TIDINGS_AS": "ada"}, tmp_path).chosen_by_folder == ""
    file.write_text('as = "mal"\nspace = "lab"\n')
    assert Settings({}, environ, tmp_path).chosen_by_folder == f"acting as mal in space lab, {said}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDINGS_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TIDINGS_AS", raising=False)
    assert main(["send", "general", "hello"]) == 2
    assert capsys.readouterr().err.count(f"note: acting as mal in space lab, {said}\n") == 1
    assert main(["send", "general", "hello", "--as", "ada"]) == 2
    assert main(["agent", "list"]) == 2
    assert "acting as" not in capsys.readouterr().err, "nobody is acted as"
    file.write_text('space = "lab"\n')
    assert Settings({}, environ, tmp_path).chosen_by_folder == ""
    file.write_text('as = "mal"\n')
    file.chmod(0o666)
    assert Settings({}, environ, tmp_path).chosen_by_folder == "", "a file that is ignored chooses nobody"


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
