"""Two operators and one line: `tidings link invite` here, `tidings link accept` there, and messages go both ways."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terminal import Terminal, done, until
from tidings.admin.link_peers import LinkPeers

HERE, THERE = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.close()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path / "elsewhere")
    yield found
    found.close()


def accept(terminal: Terminal, line: str, *more: str) -> subprocess.CompletedProcess[str]:
    """As whoever keeps the line out of the list of processes."""
    words = [sys.executable, "-m", "tidings", "link", "accept", *more]
    return subprocess.run(words, input=line, env=terminal.env, capture_output=True, text=True, timeout=120, check=False)


def links(terminal: Terminal) -> dict[str, str]:
    """What is called how, and its state."""
    return {each["space"]: each["state"] for each in json.loads(done(terminal, "link", "list", "--all", "--json"))}


@pytest.mark.timeout(240)
def test_from_the_line_to_messages_in_both_directions(terminal: Terminal, elsewhere: Terminal) -> None:
    done(terminal, "up", "--detach", "--listen", HERE)
    done(elsewhere, "up", "--detach", "--listen", THERE)
    made = terminal.run("link", "invite", "acme", "--share", "general", "--take", "news=acme.news", "--until", "90d")
    line = made.stdout.strip()
    assert (made.returncode, len(line) <= 300, len(made.stdout.splitlines())) == (0, True, 1), made
    (listed,) = json.loads(done(terminal, "invitation", "list", "--json"))
    assert (listed["name"], listed["state"], listed["read"], listed["takes"]) == (
        "acme",
        "open",
        ["general"],
        {"news": "acme.news"},
    )
    assert line.partition("#")[2] not in json.dumps(listed)

    unnamed = accept(elsewhere, line, "--yes")
    assert (unnamed.returncode, "--as NAME" in unnamed.stderr) == (2, True), unnamed
    taken = accept(elsewhere, line + "\n", "--as", "head", "--take", "general=head.general", "--yes")
    assert (taken.returncode, len(taken.stdout.splitlines())) == (0, 1), taken
    for words in ("you take general as head.general", "they may read news of yours", "which calls it acme"):
        assert words in taken.stderr, taken.stderr
    link = taken.stdout.strip()
    assert (links(terminal), links(elsewhere)) == ({"acme": "on"}, {"head": "on"})
    for here in (terminal, elsewhere):
        assert LinkPeers.below(here.home).get(link) is not None

    done(terminal, "send", "general", "from here", "--direct")
    done(elsewhere, "send", "news", "from there", "--direct")
    until(lambda: "from here" in done(elsewhere, "history", "head.general"))
    until(lambda: "from there" in done(terminal, "history", "acme.news"))

    again = accept(elsewhere, line, "--yes", "--json")
    assert (again.returncode, json.loads(again.stdout)["link"]) == (0, link), again
    assert "made link" in (log := (terminal.home.logs / "up.log").read_text())
    assert "could not be accepted" not in log


@pytest.mark.timeout(120)
def test_what_cannot_be_offered_or_accepted_is_a_sentence(terminal: Terminal, elsewhere: Terminal) -> None:
    done(terminal, "up", "--detach")
    for words, said in (
        (("link", "invite"), "say what is to pass"),
        (("link", "invite", "main", "--both", "general"), "choose another name"),
        (("link", "invite", "a b", "--both", "general"), "space name"),
        (("link", "invite", "--share", "team.*"), "has no place in one"),
        (("link", "invite", "--share", "a..b"), "a..b"),
        (("link", "invite", "--take", "news="), "THEIRS=OURS"),
        (("link", "invite", "--take", "a=x", "--take", "b=x"), "two channels would have one name"),
        (("link", "invite", "--both", "a", "--take", "a=x"), "one name here"),
        (("link", "invite", "--both", "a", "--hops", "9"), "1 to 8 links"),
        (("link", "invite", "--both", "a", "--until", "soon"), "a time such as"),
        (("link", "invite", "--both", "a", "--expires", "1s"), "a minute to 30 days"),
        (("link", "accept", "hello", "--yes"), "this is no invitation"),
        (("link", "accept", "hello", "--json"), "--yes"),
    ):
        refused = terminal.run(*words)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused
    made = terminal.run("link", "invite", "acme", "--both", "general")
    assert "listens on this machine only" in made.stderr
    line = made.stdout.strip()
    assert (
        "choose another name, or `tidings invitation revoke"
        in terminal.run("link", "invite", "acme", "--both", "x").stderr
    )
    for words, said in (
        (("accept", line), "`tidings link accept LINE"),
        (("link", "accept", done(terminal, "invite", "bob").strip(), "--yes"), "`tidings accept LINE"),
        (("link", "accept", line, "--yes"), "of this very space"),
    ):
        refused = terminal.run(*words)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused
    nowhere = accept(elsewhere, line, "--yes")
    assert (nowhere.returncode, "there is no space 'main'" in nowhere.stderr) == (2, True), nowhere

    done(elsewhere, "up", "--detach")
    declined = subprocess.run(
        [sys.executable, "-m", "tidings", "link", "accept", line, "--as", "head"],
        input="n\n",
        env=elsewhere.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (declined.returncode, "Link the two?" in declined.stderr) == (1, True), declined
    assert (links(terminal), links(elsewhere)) == ({}, {})
    done(terminal, "invitation", "revoke", "acme")
    revoked = accept(elsewhere, line, "--as", "head", "--yes")
    assert (revoked.returncode, "it was revoked" in revoked.stderr) == (4, True), revoked
