"""`tidings up --server` as its user meets it: refused with what is missing, then up, used and down again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from administrator import Administrator, administered
from terminal import Terminal, until
from tidings.admin.home import SpaceHome
from tidings.server.keyring import Keyring

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Administrator]:
    with administered(tmp_path / "theirs", 1) as administrator:
        yield administrator


def test_a_space_on_servers_of_others_is_refused_until_all_is_there_and_then_works(
    terminal: Terminal, one: Administrator
) -> None:
    home = SpaceHome(terminal.home.home, "ops")
    refused = terminal.run("up", "--space", "ops", "--server", one.url, "--budget", "64M", "--detach")
    assert refused.returncode == 2, refused.stderr
    assert "lacks account CORE_ops" in refused.stderr
    assert str(home.external / "README.txt") in refused.stderr

    keyring = Keyring.load(home.keys)
    key, creds = one.keys_for(home.read_info().agents_account, keyring.invite.id, keyring.link.id)
    again = terminal.run("up", "--space", "ops", "--operator-key", key, "--system-creds", creds, "--detach")
    assert "lacks account CORE_ops" in again.stderr
    one.put_all(home.external)
    up = terminal.run("up", "--space", "ops", "--detach")
    assert up.returncode == 0, up.stderr
    status = json.loads(terminal.run("status", "--space", "ops", "--json").stdout)
    assert (status["healthy"], status["broker"]["answers"]) == (True, True), status["problems"]
    assert terminal.run("agent", "add", "ada", "--space", "ops").returncode == 0
    assert terminal.run("send", "general", "hello", "--space", "ops", "--as", "ada").returncode == 0
    assert terminal.run("agent", "revoke", "ada", "--yes", "--space", "ops").returncode == 0
    assert terminal.run("down", "--space", "ops").returncode == 0
    assert one.cluster.nodes[0].alive, "what others run is theirs to stop"


def test_without_a_signing_key_nobody_is_said_to_be_cut_and_nobody_is_sent_to_a_broker_that_is_not_here(
    terminal: Terminal, one: Administrator
) -> None:
    home = SpaceHome(terminal.home.home, "ops")
    terminal.run("up", "--space", "ops", "--server", one.url, "--budget", "64M", "--detach")
    for path in home.external.glob("*.json"):
        one.sign(path)
    up = terminal.run("up", "--space", "ops", "--detach")
    assert up.returncode == 0, up.stderr
    assert terminal.run("agent", "add", "ada", "--space", "ops").returncode == 0
    revoked = terminal.run("agent", "revoke", "ada", "--yes", "--space", "ops")
    assert (revoked.returncode, revoked.stderr.count("cut")) == (0, 1), revoked.stderr
    assert "agent ada is revoked, but nobody is cut" in revoked.stderr
    assert "ends by itself within 15 minutes" in revoked.stderr
    rotated = terminal.run("keys", "rotate", "authority", "--space", "ops")
    assert (rotated.returncode, "others run" in rotated.stderr, "--listen" in rotated.stderr) == (2, True, False)
    one.cluster.nodes[0].kill()
    for words in (("status",), ("send", "general", "hello"), ("doctor",)):
        done = terminal.run(*words, *(() if words == ("doctor",) else ("--space", "ops")))
        said = done.stdout + done.stderr
        assert done.returncode in (3, 5), said
        assert "thers run" in said, words
        assert "logs broker" not in said, words


def test_a_space_with_replicas_is_started_with_a_word_about_what_may_stop_it(
    terminal: Terminal, tmp_path: Path
) -> None:
    with administered(tmp_path / "theirs") as three:
        home = SpaceHome(terminal.home.home, "ops")
        terminal.run("up", "--space", "ops", "--server", three.url, "--budget", "64M", "--detach")
        for path in home.external.glob("*.json"):
            three.sign(path)
        said: list[str] = []

        def comes_up() -> bool:
            """A cluster that just started has nobody yet who leads."""
            up = terminal.run("up", "--space", "ops", "--detach")
            said.append(up.stderr)
            return up.returncode == 0

        until(comes_up)
        assert "any agent that may post can stop the space for good, by one header" in said[-1]
        assert terminal.run("down", "--space", "ops").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--server", "http://x"], "is not an address of a NATS server"),
        (["--server", "nats://127.0.0.1:1", "--replicas", "2"], "1, 3 or 5"),
        (["--server", "nats://127.0.0.1:1", "--operator-key", "x"], "--system-creds"),
        (["--server", "nats://127.0.0.1:1", "--listen", "0.0.0.0"], "theirs to say"),
        (["--replicas", "3"], "--server URL"),
        (["--server", "nats://127.0.0.1:1"], "no NATS server answers at nats://127.0.0.1:1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(terminal: Terminal, words: list[str], said: str) -> None:
    refused = terminal.run("up", "--space", "ops", *words)
    assert refused.returncode != 0
    assert said in refused.stderr
    assert not SpaceHome(terminal.home.home, "ops").exists, "nothing was made that stands in the way of another try"
