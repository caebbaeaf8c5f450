"""The doctor finds what is wrong, says what to do, and changes nothing."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from tidings.admin.agents import Issued, Ledger
from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.cli import doctor
from tidings.cli.doctor import Finding, examine
from tidings.cli.main import main
from tidings.util.private_files import private_dir, write_private
from tidings.wire.signing import KeyPair


@pytest.fixture
def lab(tmp_path: Path) -> SpaceHome:
    """A space that was created and does not run, on a port that is free."""
    home = SpaceHome(tmp_path / "home", "lab")
    home.make()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    home.write_info(SpaceInfo("lab", "A", "B", "C", "D", port, 10**8, "e", False, "2026-01-01"))
    return home


def findings(home: SpaceHome) -> dict[str, Finding]:
    """What is wrong, by what it is about; a later finding on the same thing is the graver one."""
    return {each.what: each for each in examine(home.home, None)}


def test_a_port_that_another_program_holds_is_named(lab: SpaceHome) -> None:
    assert findings(lab)["space lab"].verdict == "note"
    with socket.create_server(("127.0.0.1", lab.read_info().port)):
        found = findings(lab)["space lab"]
    assert (found.verdict, "taken by another program" in found.said) == ("problem", True)
    assert "--port" in found.do


def test_a_clock_that_was_set_back_is_noticed(lab: SpaceHome) -> None:
    assert findings(lab)["clock"].verdict == "ok"
    later = time.time() + 3600
    os.utime(lab.info_path, (later, later))
    found = findings(lab)["clock"]
    assert (found.verdict, "set back" in found.said, "NTP" in found.do) == ("problem", True, True)


def test_a_secret_of_an_agent_that_others_can_read_is_found_with_its_remedy(lab: SpaceHome) -> None:
    creds = lab.agent_creds("ada")
    private_dir(creds.parent)
    write_private(creds, "secret")
    creds.chmod(0o640)
    assert findings(lab)["space lab"].do == f"chmod 600 {creds}"


def test_a_package_of_another_version_and_an_old_java_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(doctor.PACKAGES, "msgspec", "9.9.")
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("tidings.delivery.session._wheel_java", lambda: None)
    monkeypatch.setattr("shutil.which", lambda name: str(java) if name == "java" else None)
    found = {each.what: each for each in examine(tmp_path / "home", None)}
    assert (found["packages"].verdict, "9.9." in found["packages"].do) == ("problem", True)
    assert (found["java"].verdict, "Java 17" in found["java"].do) == ("note", True)
    assert "activate" in found["installation"].do


def test_a_sound_installation_has_nothing_to_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--home", str(tmp_path / "home"), "--json"]) == 0
    found = {each["what"]: each["verdict"] for each in json.loads(capsys.readouterr().out)}
    wanted = {
        "installation",
        "python",
        "packages",
        "nats-server",
        "home",
        "disk",
        "ports",
        "clock",
        "open files",
        "java",
        "spark",
        "host",
    }
    assert set(found) == wanted
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


def test_agents_whose_names_are_refused_today_are_named(lab: SpaceHome) -> None:
    ledger = Ledger(lab.issued)
    for name in ("root", "R00T", "-x", "ada", "8ob", "bob-", "tidings"):
        ledger.put(Issued(KeyPair.generate().id, name, "active", "op"))
    ledger.put(Issued(KeyPair.generate().id, "Ada", "revoked", "op"))
    said = [each.said for each in examine(lab.home, None) if each.what == "space lab" and each.verdict == "note"]
    assert sum("taken for each other" in each for each in said) == 2
    assert any("agents 8ob, bob- can be taken for each other" in each for each in said)
    assert any("agent 'tidings' has a name that is refused today" in each for each in said)
    assert any("agents R00T, root can be taken for each other" in each for each in said)
    assert any("agent '-x' has a name that is refused today" in each for each in said)
