"""The host as a user meets it: a real process that is started, used while a space is away, restarted and stopped."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from terminal import Terminal
from tidings.cli import systemd
from tidings.host.client import HostClient
from tidings.host.session_file import SessionFile, own_file
from tidings.host.sockets import socket_path
from tidings.wire.ids import new_id


def until(condition: Callable[[], object], within: float = 30.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.05)


def facts(done: subprocess.CompletedProcess[str], code: int = 0) -> Any:
    assert done.returncode == code, done
    return json.loads(done.stdout)


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()]


def host_pid(terminal: Terminal) -> int:
    return int(facts(terminal.run("host", "status", "--json"))["pid"])


def test_what_is_sent_while_a_space_is_away_is_stored_and_arrives_when_it_is_back(terminal: Terminal) -> None:
    home = terminal.home.home
    up = terminal.run("host", "up")
    assert (up.returncode, "go through it from now on" in up.stderr) == (0, True), up
    assert stat.S_IMODE(socket_path(home).stat().st_mode) == 0o600
    assert "no agent uses this host yet" in terminal.run("host", "status").stderr, "it needs no space to run"
    assert terminal.run("up", "--detach", "--open").returncode == 0

    spoken = terminal.run("send", "general", "hello", "--as", "bob", "--json")
    assert (facts(spoken)["stage"], "through the host" in spoken.stderr) == ("confirmed", True)
    first = terminal.run("dm", "bob", "one", "--json")
    assert facts(first)["stage"] == "confirmed"
    assert stat.S_IMODE(own_file(home, "main", "me").stat().st_mode) == 0o600
    assert "confirmed at sequence" in terminal.run("send", "general", "again").stderr
    assert [(m["text"], m["read"]) for m in lines(terminal.run("inbox", "--as", "bob", "--json"))] == [("one", None)]
    assert terminal.run("down").returncode == 0

    client = HostClient.find(home)
    assert client is not None
    until(lambda: client.status()["spaces"][0]["agents"][0]["state"] != "open")
    stored = terminal.run("dm", "bob", "two", "--json")
    assert (facts(stored)["stage"], facts(stored)["seq"]) == ("stored", None)
    assert "cannot be reached now" in facts(stored)["warnings"][0]
    session = client.resume(SessionFile.read(own_file(home, "main", "me")))
    begun = time.monotonic()
    assert session.send(agent="bob", text="three").stage == "stored"
    assert time.monotonic() - begun < 0.5
    assert "leaves by itself" in terminal.run("send", "general", "four").stderr
    refused = terminal.run("dm", "nobody", "five")
    assert (refused.returncode, "no agent 'nobody'" in refused.stderr) == (2, True)
    waiting = facts(terminal.run("outbox", "list", "--state", "pending", "--json"))
    assert len(waiting) == 3
    direct = terminal.run("send", "general", "six", "--direct")
    assert (direct.returncode, "through the host" in direct.stderr) == (5, False)
    looked = terminal.run("host", "status", "--json")
    (seen,) = facts(looked, 3)["spaces"]
    assert seen["outbox"]["pending"] == 3
    assert all(agent["age"] > 0 and agent["state"] != "open" for agent in seen["agents"])
    assert "is not connected to main" in terminal.run("host", "status").stderr

    before = host_pid_of(looked)
    os.kill(before, signal.SIGKILL)
    until(lambda: HostClient.find(home) is None)
    assert terminal.run("host", "up").returncode == 0, "what a killed host left behind is no obstacle"
    assert terminal.run("up", "--detach").returncode == 0
    until(lambda: not facts(terminal.run("outbox", "list", "--state", "pending", "--json")))
    until(lambda: len(lines(terminal.run("inbox", "--as", "bob", "--json"))) == 3)
    got = lines(terminal.run("inbox", "--as", "bob", "--json"))
    assert [message["text"] for message in got] == ["one", "two", "three"], "once each, and in order"
    assert terminal.run("host", "status").returncode == 0
    shown = facts(terminal.run("status", "--json"))
    assert (shown["healthy"], shown["host"]["runs"]) == (True, True)
    assert "0 waiting, 6 sent" in terminal.run("status").stdout

    down = terminal.run("host", "down")
    assert (down.returncode, socket_path(home).exists()) == (0, False), down
    assert terminal.run("down").returncode == 0
    assert terminal.processes() == []
    assert "no host of" in terminal.run("host", "down").stderr
    gone = terminal.run("host", "status")
    assert (gone.returncode, "no host runs" in gone.stderr) == (5, True)


def host_pid_of(done: subprocess.CompletedProcess[str]) -> int:
    return int(json.loads(done.stdout)["pid"])


def test_mail_is_read_marked_followed_and_searched_and_the_outbox_is_steered(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach", "--open").returncode == 0
    assert terminal.run("host", "up").returncode == 0
    assert terminal.run("send", "general", "hi", "--as", "bob").returncode == 0
    following = terminal.start("inbox", "--follow", "--json", "--as", "bob")
    for text in ("a red apple", "a green pear"):
        assert terminal.run("dm", "bob", text).returncode == 0
    until(lambda: len(lines(terminal.run("inbox", "--as", "bob", "--json"))) == 2)
    red, green = lines(terminal.run("inbox", "--as", "bob", "--json"))
    assert f"{red['row']}* " in terminal.run("inbox", "--as", "bob").stdout
    found = lines(terminal.run("inbox", "--as", "bob", "--search", "pear", "--json"))
    assert [message["row"] for message in found] == [green["row"]]
    assert lines(terminal.run("inbox", "--as", "bob", "--from", "bob", "--wait", "0", "--json")) == []
    assert len(lines(terminal.run("inbox", "--as", "bob", "--from", "me", "--json"))) == 2
    marked = terminal.run("inbox", "read", str(red["row"]), "--as", "bob", "--json")
    assert facts(marked) == {"read": 1}
    assert [m["text"] for m in lines(terminal.run("inbox", "--unread", "--as", "bob", "--json"))] == ["a green pear"]
    waited = terminal.run("dm", "bob", "tell me", "--wait", "delivered", "--json")
    assert facts(waited)["stage"] in ("delivered", "read")
    assert facts(terminal.run("inbox", "read", "--all", "--as", "bob", "--json")) == {"read": 2}
    assert terminal.run("inbox", "read", "--as", "bob").returncode == 2
    assert following.stdout is not None
    streamed = [json.loads(following.stdout.readline())["text"] for _ in range(3)]
    assert streamed == ["a red apple", "a green pear", "tell me"]
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=10)
    assert "stopped" in said

    held = terminal.run("outbox", "pause", "--reason", "for a test")
    assert (held.returncode, "is held back" in held.stderr) == (0, True)
    sent = facts(terminal.run("send", "general", "later", "--json"))
    assert (sent["stage"], "paused here (for a test)" in sent["warnings"][0]) == ("stored", True)
    assert "PAUSED (for a test)" in terminal.run("host", "status").stdout
    assert "is cancelled" in terminal.run("outbox", "cancel", sent["id"]).stderr
    again = terminal.run("outbox", "requeue", sent["id"]).stdout.strip()
    assert again in terminal.run("outbox", "show", sent["id"]).stdout
    assert terminal.run("outbox", "resume").returncode == 0
    until(lambda: facts(terminal.run("outbox", "show", again, "--json"))["stage"] == "confirmed")
    unknown = terminal.run("outbox", "show", new_id())
    assert (unknown.returncode, "has no message" in unknown.stderr) == (2, True)

    chosen = new_id()
    for _ in range(2):
        assert facts(terminal.run("send", "general", "once", "--id", chosen, "--json"))["id"] == chosen
    assert facts(terminal.run("send", "general", "once", "--id", chosen, "--direct", "--json"))["id"] == chosen
    said_once = [m for m in lines(terminal.run("history", "general", "--json")) if m["text"] == "once"]
    assert len(said_once) == 1, "by whichever way, it is one message"
    other = terminal.run("send", "general", "another", "--id", chosen)
    assert (other.returncode, "accepted before" in other.stderr or "id" in other.stderr) == (6, True)

    assert terminal.run("agent", "add", "rev", "--role", "reviewer").returncode == 0
    working = terminal.start("work", "--role", "reviewer", "--exec", "echo fine", "--once", "--as", "rev")
    asked = terminal.run("ask", "reviewer", "is it?", "--wait", "30")
    assert (asked.stdout.strip(), "through the host" in asked.stderr) == ("fine", True), asked
    working.communicate(timeout=20)


def test_a_second_host_is_refused_and_signals_stop_the_first(terminal: Terminal) -> None:
    assert terminal.run("host", "up").returncode == 0
    pid = host_pid(terminal)
    second = terminal.run("host", "up")
    assert (second.returncode, f"runs already (pid {pid})" in second.stderr) == (6, True), second
    foreground = terminal.start("host", "up", "--foreground")
    said = foreground.communicate(timeout=20)[1]
    assert (foreground.returncode, f"pid {pid}" in said, said.count("\n")) == (6, True, 1)
    assert host_pid(terminal) == pid
    assert terminal.run("host", "down").returncode == 0
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        child = terminal.start("host", "up", "--foreground", "--home", str(terminal.home.home))
        until(lambda: HostClient.find(terminal.home.home) is not None)
        begun = time.monotonic()
        child.send_signal(number)
        _, said = child.communicate(timeout=20)
        assert (child.returncode, "the host is down" in said) == (0, True), (number, said)
        assert time.monotonic() - begun < 5
        assert not socket_path(terminal.home.home).exists()


def test_without_a_host_commands_go_direct_and_say_what_needs_one(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach", "--open").returncode == 0
    sent = terminal.run("send", "general", "hello", "--json")
    assert (facts(sent)["stage"], "through the host" in sent.stderr) == ("confirmed", False)
    for words in (("outbox", "list"), ("outbox", "pause"), ("inbox", "read", "1"), ("inbox", "--from", "me")):
        done = terminal.run(*words)
        assert (done.returncode, "tidings host up" in done.stderr) == (5, True), (words, done)
    assert terminal.run("send", "general", "x", "--id", "mine").returncode == 2


def test_a_unit_for_systemd_is_written_once_and_removed(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config % $dir"
    env = {"XDG_CONFIG_HOME": str(config), "PATH": "/nowhere"}
    first = terminal.run("host", "install", **env)
    assert (first.returncode, "was written" in first.stderr) == (0, True), first
    assert "systemd does not answer here" in first.stderr
    assert "enable-linger" in first.stderr
    (unit,) = (config / "systemd" / "user").glob("tidings-host-*.service")
    text = unit.read_text()
    assert "Restart=always" in text
    assert f'--home" "{terminal.home.home}"' in text
    assert text.count(systemd._word(sys.executable)) == 1
    assert "is as it should be" in terminal.run("host", "install", **env).stderr
    unit.write_text("something else")
    assert "was written" in terminal.run("host", "install", **env).stderr
    assert "was removed" in terminal.run("host", "uninstall", **env).stderr
    assert not unit.exists()
    assert "there is no" in terminal.run("host", "uninstall", **env).stderr
    assert systemd._word('a %h $HOME "q" \\') == '"a %%h $$HOME \\"q\\" \\\\"'
