"""TAB offers names from local files, quickly, and never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidings.admin.agents import Issued, Ledger
from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.cli.main import main
from tidings.util.private_files import write_private
from tidings.wire.signing import KeyPair


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SpaceHome:
    monkeypatch.setenv("TIDINGS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("main", "lab"):
        made = SpaceHome(tmp_path / "home", name)
        made.make()
        made.write_info(SpaceInfo(name, "A", "B", "C", "D", 4222, 10**8, "e", False, "2026-01-01"))
    made = SpaceHome(tmp_path / "home", "main")
    for name in ("ada", "adam", "bob"):
        write_private(made.agent_creds(name), "secret")
        row = Issued(
            KeyPair.generate().id, name, "active", "op", ("general", "team.>", "gardening"), roles=("reviewer",)
        )
        Ledger(made.issued).put(row)
    return made


def offered(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash would offer at the end of a line."""
    monkeypatch.setenv("_TIDINGS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    main([])
    said = capsys.readouterr()
    assert said.err == ""
    return said.out.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("tidings send g", ["gardening", "general"]),
        ("tidings tail ga", ["gardening"]),
        ("tidings channels info ge", ["general"]),
        ("tidings dm a", ["ada", "adam"]),
        ("tidings who --as b", ["bob"]),
        ("tidings agent show ad", ["ada", "adam"]),
        ("tidings status --space l", ["lab"]),
        ("tidings space remove m", ["main"]),
        ("tidings dm --space lab a", []),
        ("tidings ask r", ["reviewer"]),
        ("tidings attention f", ["focus"]),
        ("tidings logs st", ["steward"]),
        ("tidings att", ["attention"]),
    ],
)
def test_names_are_completed_from_the_files_of_the_home(
    home: SpaceHome,
    line: str,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sorted(offered(line, monkeypatch, capsys)) == names


def test_damaged_files_and_impossible_settings_offer_nothing_and_say_nothing(
    home: SpaceHome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    next(home.issued.glob("U*.json")).write_text("{")
    assert offered("tidings ask r", monkeypatch, capsys) == []
    Path("tidings.toml").write_text("colour = 'red'")
    assert offered("tidings dm a", monkeypatch, capsys) == []
    Path("tidings.toml").unlink()
    monkeypatch.setenv("TIDINGS_SPACE", "no such space")
    assert offered("tidings dm a", monkeypatch, capsys) == []


def test_a_tab_loads_neither_the_client_nor_rich_tables(home: SpaceHome) -> None:
    """What makes a TAB slow is what it imports."""
    script = (
        "import sys; from tidings.cli.main import main; main([]); "
        "assert not {'nats', 'tidings.client.direct_transport', 'rich.table'} & set(sys.modules), 'loaded too much'"
    )
    words = {"_TIDINGS_COMPLETE": "complete_bash", "COMP_WORDS": "tidings dm a", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **words}, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout.split()) == (0, ["ada", "adam"]), done.stderr
