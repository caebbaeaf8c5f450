"""Machines of their own, with a real network between them: what people type at each, and what bad cables do to it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from machines import Lan, MachineTerminal, why_not
from terminal import done, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "never"),
]


@pytest.fixture
def lan() -> Iterator[Lan]:
    with Lan("server", "laptop") as found:
        yield found


@pytest.fixture
def server(lan: Lan, tmp_path: Path) -> Iterator[MachineTerminal]:
    found = lan["server"].terminal(tmp_path)
    yield found
    found.close()


@pytest.fixture
def laptop(lan: Lan, tmp_path: Path) -> Iterator[MachineTerminal]:
    found = lan["laptop"].terminal(tmp_path)
    yield found
    found.run("host", "down")
    found.close()


def invited(server: MachineTerminal, laptop: MachineTerminal, name: str) -> None:
    line = done(server, "invite", name, "--read", "general", "--post", "general")
    taken = laptop.typed("accept", text=line)
    assert taken.returncode == 0, taken


def said_in(terminal: MachineTerminal, channel: str) -> list[str]:
    found = terminal.run("history", channel, "--json", "-n", "500")
    return [json.loads(line)["text"] for line in found.stdout.splitlines()] if found.returncode == 0 else []


def heard(terminal: MachineTerminal, name: str) -> list[str]:
    """What its inbox has, the oldest first."""
    found = terminal.run("inbox", "--as", name, "--json")
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    return [row["text"] for row in sorted(rows, key=lambda row: int(row["row"])) if row["kind"] != "notice"]


def test_a_laptop_keeps_what_it_says_while_its_cable_is_out_and_hears_what_was_said(
    server: MachineTerminal, laptop: MachineTerminal
) -> None:
    address = server.machine.address
    up = server.run("up", "--detach", "--listen", address)
    assert (up.returncode, f"tls://{address}:" in up.stderr) == (0, True), up
    invited(server, laptop, "far")
    done(laptop, "host", "up")
    done(laptop, "join", "general", "--as", "far")
    done(laptop, "send", "general", "before", "--as", "far")
    until(lambda: said_in(server, "general") == ["before"])

    laptop.machine.pull_cable()
    kept = [f"kept {number}" for number in range(5)]
    for text in kept:
        done(laptop, "send", "general", text, "--as", "far")
    missed = [f"missed {number}" for number in range(5)]
    for text in missed:
        done(server, "send", "general", text)
    looked = laptop.run("doctor", "connection", "--as", "far")
    assert (looked.returncode, "the step that fails is port" in looked.stderr) == (3, True), looked
    assert said_in(server, "general") == ["before", *missed]

    laptop.machine.plug_in()
    until(lambda: said_in(server, "general") == ["before", *missed, *kept], within=120)
    until(lambda: len(heard(laptop, "far")) >= len(missed), within=120)
    assert heard(laptop, "far") == missed, "each once, in order"


def test_a_server_that_moved_is_found_where_its_agents_are_told_it_is(
    server: MachineTerminal, laptop: MachineTerminal
) -> None:
    done(server, "up", "--detach", "--listen", server.machine.address)
    invited(server, laptop, "far")
    done(laptop, "host", "up")
    done(laptop, "send", "general", "before", "--as", "far")
    until(lambda: said_in(server, "general") == ["before"])
    done(server, "down")
    server.machine.moves_to(77)
    done(laptop, "send", "general", "kept", "--as", "far")
    again = server.run("up", "--detach", "--listen", server.machine.address)
    assert again.returncode == 0, again
    url = json.loads(done(server, "status", "--json"))["url"]
    done(laptop, "agent", "address", "far", "--url", url)
    until(lambda: said_in(server, "general") == ["before", "kept"], within=120)


def test_spaces_on_two_machines_are_linked_by_a_line_and_converge_after_the_cable_was_out(
    server: MachineTerminal, laptop: MachineTerminal
) -> None:
    done(server, "up", "--detach", "--listen", server.machine.address)
    done(laptop, "up", "--detach", "--listen", laptop.machine.address, "--space", "lab")
    line = done(server, "link", "invite", "--both", "general")
    accepted = laptop.typed("link", "accept", "--space", "lab", "--yes", text=line)
    assert accepted.returncode == 0, accepted
    done(server, "send", "general", "from main")
    until(lambda: "from main" in laptop.run("history", "general", "--space", "lab").stdout, within=90)
    laptop.machine.pull_cable()
    for number in range(5):
        done(server, "send", "general", f"main {number}")
        done(laptop, "send", "general", f"lab {number}", "--space", "lab")
    assert "lab 0" not in server.run("history", "general").stdout
    laptop.machine.plug_in()
    everything = {"from main", *(f"{name} {number}" for name in ("main", "lab") for number in range(5))}
    until(lambda: set(said_in(server, "general")) == everything, within=180)

    def in_lab() -> list[str]:
        found = laptop.run("history", "general", "--space", "lab", "--json", "-n", "500")
        return [json.loads(each)["text"] for each in found.stdout.splitlines()]

    until(lambda: set(in_lab()) == everything, within=180)
    assert sorted(in_lab()) == sorted(said_in(server, "general")), "each once on both sides"
