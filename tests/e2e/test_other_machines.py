"""A space that listens: agents on other machines, as people set them up. Another home stands for a machine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from terminal import Terminal, done, until

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


def exported(terminal: Terminal, name: str, bundle: Path) -> dict[str, str]:
    done(terminal, "agent", "add", name, "--read", "general", "--post", "general")
    done(terminal, "agent", "export", name, "--output", str(bundle))
    return dict(json.loads(bundle.read_text()))


@pytest.mark.timeout(240)
def test_an_agent_on_another_machine_talks_over_tls_directly_and_through_its_host(
    terminal: Terminal, elsewhere: Terminal, tmp_path: Path
) -> None:
    up = terminal.run("up", "--detach", "--listen", ADDRESS)
    assert (up.returncode, f"space main is up at tls://{ADDRESS}:" in up.stderr) == (0, True), up
    done(terminal, "host", "up")
    bundle = exported(terminal, "far", tmp_path / "far.json")
    assert bundle["url"].startswith(f"tls://{ADDRESS}:")
    assert "authority=" in bundle["url"]
    taken = elsewhere.run("agent", "import", str(tmp_path / "far.json"))
    assert (taken.returncode, "authority=" in taken.stderr) == (0, False), taken
    steps = json.loads(done(elsewhere, "doctor", "connection", "--as", "far", "--json"))
    assert [(step["what"], step["verdict"]) for step in steps[:3]] == [("name", "ok"), ("port", "ok"), ("TLS", "ok")]
    done(elsewhere, "send", "general", "from afar", "--as", "far")
    assert "far: from afar" in done(terminal, "history", "general")
    done(elsewhere, "host", "up")
    done(elsewhere, "send", "general", "through the host there", "--as", "far")
    done(terminal, "dm", "far", "welcome")
    assert "me: welcome" in done(elsewhere, "inbox", "--as", "far", "--wait", "20")
    status = json.loads(done(terminal, "status", "--json"))
    assert status["url"].startswith(f"tls://{ADDRESS}:")
    assert "authority" not in json.dumps(status)
    doctor = terminal.run("doctor")
    assert "runs at tls://" in doctor.stdout + doctor.stderr, doctor

    done(terminal, "down")
    asked = elsewhere.run("doctor", "connection", "--as", "far")
    assert (asked.returncode, "the step that fails is port" in asked.stderr) == (3, True), asked
    again = terminal.run("up", "--detach")
    assert (again.returncode, f"tls://{ADDRESS}:" in again.stderr) == (0, True), "it is kept, like a port"
    done(elsewhere, "send", "general", "after it came back", "--as", "far", "--direct")
    done(terminal, "down")
    off = terminal.run("up", "--detach", "--listen", "off")
    assert (off.returncode, "nats://127.0.0.1:" in off.stderr) == (0, True), off
    assert "far: after it came back" in done(terminal, "history", "general")
    done(terminal, "send", "general", "through the host here, which followed")
    until(lambda: "which followed" in terminal.run("history", "general").stdout)
    done(terminal, "host", "down")


@pytest.mark.timeout(240)
def test_an_agent_on_a_closed_network_goes_through_a_websocket(
    terminal: Terminal, elsewhere: Terminal, tmp_path: Path
) -> None:
    up = terminal.run("up", "--detach", "--listen", ADDRESS, "--ws", ADDRESS)
    assert (up.returncode, f" and wss://{ADDRESS}:" in up.stderr) == (0, True), up
    bundle = exported(terminal, "far", tmp_path / "far.json")
    tls, websocket = bundle["url"].split(",")
    assert (tls.startswith(f"tls://{ADDRESS}:"), websocket.startswith(f"wss://{ADDRESS}:")) == (True, True)
    status = json.loads(done(terminal, "status", "--json"))
    assert status["websocket"] == websocket.partition("?")[0]
    done(elsewhere, "agent", "import", str(tmp_path / "far.json"))
    done(elsewhere, "agent", "address", "far", "--url", "tls://127.0.0.9:1", "--url", status["websocket"])
    steps = json.loads(done(elsewhere, "doctor", "connection", "--as", "far", "--json"))
    assert [(step["what"], step["verdict"]) for step in steps if step["what"] in ("port", "websocket")] == [
        ("port", "note"),
        ("port", "ok"),
        ("websocket", "ok"),
    ]
    done(elsewhere, "send", "general", "through a websocket", "--as", "far", "--direct")
    assert "far: through a websocket" in done(terminal, "history", "general")
    done(elsewhere, "host", "up")
    done(elsewhere, "send", "general", "through the host and a websocket", "--as", "far")
    done(terminal, "dm", "far", "welcome")
    assert "me: welcome" in done(elsewhere, "inbox", "--as", "far", "--wait", "20")
    done(terminal, "down")
    again = terminal.run("up", "--detach")
    assert (again.returncode, status["websocket"] in again.stderr) == (0, True), "it is kept, like a port"
    done(terminal, "down")
    off = terminal.run("up", "--detach", "--ws", "off")
    assert (off.returncode, "wss://" in off.stderr) == (0, False), off


def test_the_address_of_an_imported_agent_is_changed_in_place(
    terminal: Terminal, elsewhere: Terminal, tmp_path: Path
) -> None:
    done(terminal, "up", "--detach", "--listen", ADDRESS)
    port = json.loads(done(terminal, "status", "--json"))["url"].rpartition(":")[2]
    done(terminal, "agent", "add", "far", "--read", "general", "--post", "general")
    wrong = ("--url", "tls://127.0.0.9:1", "--url", "tls://127.0.0.9:2,tls://127.0.0.9:3")
    done(terminal, "agent", "export", "far", *wrong, "--output", str(tmp_path / "far.json"))
    done(elsewhere, "agent", "import", str(tmp_path / "far.json"))
    assert done(elsewhere, "agent", "address", "far").strip() == ",".join(f"tls://127.0.0.9:{n}" for n in (1, 2, 3))
    lost = elsewhere.run("send", "general", "hello", "--as", "far", "--direct")
    assert lost.returncode == 5, lost
    for number in (1, 2, 3):
        assert f"tls://127.0.0.9:{number}: nothing listens there" in lost.stderr
    done(elsewhere, "agent", "address", "far", "--url", "127.0.0.9:1", "--url", f"{ADDRESS}:{port}")
    done(elsewhere, "send", "general", "found it", "--as", "far", "--direct")
    assert "far: found it" in done(terminal, "history", "general")
    mine = terminal.run("agent", "address", "far", "--url", ADDRESS)
    assert (mine.returncode, "follows it" in mine.stderr) == (2, True), mine
    nobody = elsewhere.run("agent", "address", "nobody")
    assert (nobody.returncode, "no agent nobody" in nobody.stderr) == (2, True), nobody


@pytest.mark.parametrize("address", ["broker.example", "192.0.2.7:0", "everywhere"])
def test_what_is_no_address_is_refused_with_examples(terminal: Terminal, address: str) -> None:
    for words in (("up", "--listen", address), ("up", "--detach", "--listen", address), ("up", "--ws", address)):
        refused = terminal.run(*words)
        assert refused.returncode == 2, refused
        assert "192.0.2.7" in refused.stderr or "between 1 and 65535" in refused.stderr
    assert not terminal.home.exists


def test_a_certificate_needs_its_key_and_somebody_to_be_shown_to(terminal: Terminal, tmp_path: Path) -> None:
    for words, said in (
        (("--listen", ADDRESS, "--cert", "a.pem"), "a certificate needs its key"),
        (("--cert", "a.pem", "--key", "a.key"), "a certificate is for other machines"),
        (("--listen", ADDRESS, "--cert", "a.pem", "--key", "a.key"), "cannot be read: No such file"),
    ):
        refused = terminal.run("up", "--detach", *words)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused


def test_an_address_that_this_machine_does_not_have_is_said(terminal: Terminal) -> None:
    refused = terminal.run("up", "--detach", "--listen", "192.0.2.7")
    assert refused.returncode == 1, refused
    assert "this machine has no address 192.0.2.7" in refused.stderr
    refused = terminal.run("up", "--detach", "--listen", f"{ADDRESS}:4333", "--ws", f"{ADDRESS}:4333")
    assert (refused.returncode, "websockets need another" in refused.stderr) == (2, True), refused
    again = terminal.run("up", "--detach")
    assert (again.returncode, "nats://127.0.0.1:" in again.stderr) == (0, True), "what was refused is not kept"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_durable_copies_come_over_tls_too(terminal: Terminal, elsewhere: Terminal, tmp_path: Path) -> None:
    terminal.env["TIDINGS_PIPELINE"] = "on"
    done(terminal, "up", "--detach", "--listen", ADDRESS)
    exported(terminal, "far", tmp_path / "far.json")
    done(elsewhere, "agent", "import", str(tmp_path / "far.json"))
    done(elsewhere, "join", "general", "--as", "far")
    for number in range(3):
        done(terminal, "send", "general", f"while it was away {number}")

    def level() -> bool:
        facts = json.loads(terminal.run("pipeline", "status", "--json").stdout)
        return bool(facts["running"] and facts["behind"] == 0)

    until(level, 180)
    said = done(elsewhere, "inbox", "--as", "far", "--wait", "30")
    assert [f"while it was away {number}" in said for number in range(3)] == [True] * 3
