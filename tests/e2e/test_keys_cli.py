"""`tidings keys rotate` on a space that runs: everybody goes on, with new keys."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from terminal import Terminal, done, until


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.close()


@pytest.mark.timeout(180)
def test_the_steward_comes_back_with_new_keys_and_what_is_wrong_is_said(terminal: Terminal) -> None:
    done(terminal, "up", "--detach")
    done(terminal, "send", "general", "before")
    before = json.loads(done(terminal, "status", "--json"))["steward"]["steward"]
    rotated = json.loads(done(terminal, "keys", "rotate", "steward", "--json"))

    def is_another() -> bool:
        asked = terminal.run("status", "--json")
        return asked.returncode == 0 and json.loads(asked.stdout)["steward"]["steward"]["pid"] != before["pid"]

    until(is_another)
    done(terminal, "send", "general", "after")
    said = done(terminal, "history", "general")
    assert "after" in said
    assert rotated["steward_key"].startswith("U")
    assert "its old credential is void" in terminal.run("keys", "rotate", "pipeline").stderr
    for words, why in (
        (("keys", "rotate", "bob"), "steward, pipeline, authority; agents"),
        (("keys", "rotate", "pipeline", "--now"), "--finish and --now are for the authority"),
        (("keys", "rotate", "authority"), "not its own authority"),
    ):
        refused = terminal.run(*words)
        assert (refused.returncode, why in refused.stderr) == (2, True), refused


@pytest.mark.timeout(180)
def test_another_authority_is_taken_up_by_the_broker_that_runs(terminal: Terminal) -> None:
    done(terminal, "up", "--detach", "--listen", "127.0.0.2")
    first = json.loads(done(terminal, "keys", "rotate", "authority", "--json"))
    assert first["step"] == "announced"
    done(terminal, "send", "general", "both are trusted")
    last = json.loads(done(terminal, "keys", "rotate", "authority", "--finish", "--json"))
    assert (last["step"], last["authority"]) == ("finished", first["next"])
    until(lambda: terminal.run("send", "general", "with the other").returncode == 0)
    steps = json.loads(done(terminal, "doctor", "connection", "--as", "me", "--json"))
    assert last["authority"] in next(each["said"] for each in steps if each["what"] == "TLS")


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_durable_delivery_goes_on_with_its_new_credential(terminal: Terminal) -> None:
    terminal.env["TIDINGS_PIPELINE"] = "on"
    done(terminal, "up", "--detach")
    done(terminal, "agent", "add", "bob")
    done(terminal, "join", "general", "--as", "bob")

    def level() -> bool:
        facts = json.loads(terminal.run("pipeline", "status", "--json").stdout or "{}")
        return bool(facts.get("running") and facts.get("behind") == 0)

    done(terminal, "send", "general", "by the old one")
    until(level, 180)
    done(terminal, "keys", "rotate", "pipeline")
    done(terminal, "send", "general", "by the new one")
    until(level, 180)
    said = done(terminal, "inbox", "--as", "bob", "--wait", "30")
    assert ["by the old one" in said, "by the new one" in said] == [True, True]
