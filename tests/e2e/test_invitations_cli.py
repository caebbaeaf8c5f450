"""One line to paste: `tidings invite` here, `tidings accept` there, and everything works as that agent."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terminal import Terminal, done

ADDRESS = "127.0.0.2"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.close()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path / "elsewhere")
    yield found
    found.run("host", "down")
    found.close()


def accept(terminal: Terminal, line: str, *more: str) -> subprocess.CompletedProcess[str]:
    """As whoever keeps the line out of the list of processes."""
    words = [sys.executable, "-m", "tidings", "accept", *more]
    return subprocess.run(words, input=line, env=terminal.env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.timeout(240)
def test_from_the_line_to_an_agent_that_talks_works_and_is_cut(terminal: Terminal, elsewhere: Terminal) -> None:
    done(terminal, "up", "--detach", "--listen", ADDRESS)
    made = terminal.run("invite", "far", "--read", "general", "--post", "general", "--role", "reviewer")
    line = made.stdout.strip()
    assert (made.returncode, len(line) <= 300, len(made.stdout.splitlines())) == (0, True, 1), made
    listed = json.loads(done(terminal, "invitation", "list", "--json"))
    assert [(each["name"], each["state"], each["roles"]) for each in listed] == [("far", "open", ["reviewer"])]
    assert line.partition("#")[2] not in json.dumps(listed)

    taken = accept(elsewhere, line + "\n")
    assert (taken.returncode, "you are agent far of space main" in taken.stderr) == (0, True), taken
    done(elsewhere, "send", "general", "directly", "--as", "far", "--direct")
    done(elsewhere, "host", "up")
    done(elsewhere, "send", "general", "through the host there", "--as", "far")
    assert "far: through the host there" in done(terminal, "history", "general")
    done(terminal, "dm", "far", "welcome")
    assert "me: welcome" in done(elsewhere, "inbox", "--as", "far", "--wait", "20")

    again = accept(elsewhere, line, "--home", str(elsewhere.home.home.parent / "a thief"))
    assert (again.returncode, "used already, by another key" in again.stderr) == (4, True), again
    assert "its line is in other hands" in terminal.run("status").stderr
    for words in (("agent", "export", "far"), ("send", "general", "x", "--as", "far", "--direct")):
        refused = terminal.run(*words)
        assert (refused.returncode in (2, 4), "its key is where it accepted" in refused.stderr) == (True, True), refused

    assert "made far" in (log := (terminal.home.logs / "up.log").read_text())
    assert "could not be accepted" not in log

    done(terminal, "agent", "access", "far", "--post", "")
    done(terminal, "agent", "revoke", "far", "--yes")
    assert elsewhere.run("send", "general", "x", "--as", "far", "--direct").returncode == 4


@pytest.mark.timeout(120)
def test_what_cannot_be_promised_or_accepted_is_a_sentence(terminal: Terminal, elsewhere: Terminal) -> None:
    done(terminal, "up", "--detach")
    for words, said in (
        (("invite", "me"), "agent me exists"),
        (("invite", "ME"), "can be taken for me"),
        (("invite", "bob", "--expires", "soon"), "a time such as"),
        (("invite", "bob", "--expires", "1s"), "a minute to 30 days"),
        (("invite", "bob", "--uses", "3"), "leaves the name to each"),
        (("invite", "bob", "--uses", "0"), "1 to 1000 times"),
        (("invite", "bob", "--read", "a..b"), "a..b"),
        (("invitation", "revoke", "nobody"), "no invitation is meant"),
        (("accept", "hello"), "this is no invitation"),
        (("invite", "bob", "--url", "tls://127.0.0.1:1"), "does not listen with TLS"),
    ):
        refused = terminal.run(*words)
        assert (refused.returncode in (2, 6), said in refused.stderr) == (True, True), refused
    made = terminal.run("invite", "bob")
    assert "listens on this machine only" in made.stderr
    line = made.stdout.strip()
    assert re.match(r"tidings:main@127\.0\.0\.1:\d+#", line)
    cut_short = accept(elsewhere, line[:-3])
    assert (cut_short.returncode, "paste the whole line" in cut_short.stderr) == (2, True), cut_short
    named = accept(elsewhere, line, "--name", "carol")
    assert (named.returncode, "this invitation is for bob" in named.stderr) == (2, True), named
    assert accept(elsewhere, line).returncode == 0, "also on one machine, for another home"
    done(terminal, "invite", "dan")
    done(terminal, "invitation", "revoke", "dan")
    listed = json.loads(done(terminal, "invitation", "list", "--all", "--json"))
    assert {each["name"]: each["state"] for each in listed} == {"bob": "used", "dan": "revoked"}
    assert json.loads(done(terminal, "invitation", "list", "--json")) == []
