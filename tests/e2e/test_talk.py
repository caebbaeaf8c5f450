"""Talking from a terminal: every command with its data on standard output and its words beside it."""

import json
import subprocess
import time

from terminal import TIDINGS, Terminal
from tidings.wire.message import new_id


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_channels_are_joined_spoken_in_watched_read_and_left(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach", "--open").returncode == 0

    joined = json.loads(terminal.run("join", "general", "--json").stdout)
    assert (joined["state"], joined["durable"]) == ("opened", False)
    assert "durable delivery is not running" in joined["reason"]
    sent = json.loads(terminal.run("send", "general", "hello", "--as", "ada", "--json").stdout)
    assert sent["stage"] == "confirmed"
    assert sent["seq"] > joined["seq"]

    with subprocess.Popen(
        [*TIDINGS, "tail", "general", "--count", "1", "--json"], env=terminal.env, stdout=subprocess.PIPE, text=True
    ) as watching:
        deadline, said = time.monotonic() + 30, 1
        while watching.poll() is None and time.monotonic() < deadline:
            assert terminal.run("send", "general", "again", "--as", "ada").returncode == 0
            said += 1
        assert watching.stdout is not None
        assert [each["text"] for each in lines(watching.stdout.read())] == ["again"]

    first, *rest = lines(terminal.run("history", "general", "--json", "-n", str(said)).stdout)
    assert [each["text"] for each in rest] == ["again"] * (said - 1)
    assert (first["text"], first["seq"], first["from"]["name"]) == ("hello", sent["seq"], "ada")  # type: ignore[index]
    assert "#general ada: hello" in terminal.run("history", "general", "-n", str(said)).stdout

    assert terminal.run("channels", "set", "general", "--class", "live", "--description", "talk").returncode == 0
    info = json.loads(terminal.run("channels", "info", "general", "--json").stdout)
    assert (info["class"], info["description"], info["by_name"], info["members"]) == ("live", "talk", "me", 1)
    shown = terminal.run("channels", "info", "general").stdout
    assert "talk (set by me at 20" in shown
    assert "yes (default of the space)" in shown
    (listed,) = json.loads(terminal.run("channels", "list", "--json").stdout)
    assert (listed["channel"], listed["members"], listed["last"]["seq"]) == ("general", 1, info["last"]["seq"])
    assert [m["name"] for m in json.loads(terminal.run("channels", "members", "general", "--json").stdout)] == ["me"]

    left = json.loads(terminal.run("leave", "general", "--json").stdout)
    assert (left["state"], left["still_covered_by"]) == ("left", [])
    assert json.loads(terminal.run("channels", "members", "general", "--json").stdout) == []


def test_one_agent_writes_to_another_and_can_tell_what_became_of_it(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach", "--open").returncode == 0
    assert terminal.run("send", "general", "hi", "--as", "bob").returncode == 0
    unknown = terminal.run("dm", "nobody", "hello")
    assert unknown.returncode == 2
    sent = json.loads(terminal.run("dm", "bob", "hello", "--json").stdout)
    assert sent["stage"] == "confirmed"
    read = lines(terminal.run("inbox", "--as", "bob", "--json").stdout)
    assert [(each["kind"], each["text"]) for each in read] == [("direct", "hello")]
    waited = terminal.run("dm", "bob", "again", "--wait", "read", "--seconds", "0.2")
    assert (waited.returncode, waited.stdout, "not read, after 0.2 s" in waited.stderr) == (1, "", True)
    assert lines(terminal.run("inbox", "--as", "bob", "--json").stdout)
    assert "is empty" in terminal.run("inbox", "--as", "bob", "--wait", "0.5").stderr
    trace = json.loads(terminal.run("trace", sent["id"], "--json").stdout)
    assert "read" in {each["stage"] for each in trace["receipts"]}, "which implies delivered"
    people = {each["name"] for each in json.loads(terminal.run("who", "--json").stdout)}
    assert people == {"bob", "me"}


def test_mistakes_are_sentences_with_stable_exit_codes(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    assert terminal.run("agent", "add", "ada").returncode == 0
    for words, code, sentence in (
        (
            ("send", "secret", "hello", "--as", "ada"),
            4,
            "ada may not post to secret: the broker refuses",
        ),
        (("channels", "set", "general", "--class", "weird"), 2, "--class is durable or live"),
        (("send", "general", "\udcff"), 2, "not text in UTF-8"),
        (("send", "general", "x", "--reply-to", "that"), 2, "--reply-to is the id of a message"),
        (("ask", "reviewer", " "), 2, "there is nothing to say"),
        (("trace", new_id()), 0, "nothing is known of"),
        (("send", "general", "x" * 300_000), 1, "the limit is 262144"),
        (("join", "secret", "--as", "ada"), 4, "may not read secret"),
        (("history", "secret", "--as", "ada"), 4, "may not read secret"),
        (("channels", "set", "general", "--class", "live", "--as", "ada"), 4, "may not change settings"),
        (("channels", "set", "general"), 2, "name at least one setting"),
        (("send", "general", "  "), 2, "there is nothing to say"),
        (("send", "general", "x", "--priority", "urgent"), 2, "priority is one of"),
        (("send", "general", "x", "--as", "nobody"), 4, "there is no agent nobody"),
        (("tail",), 2, "name the channels to watch"),
    ):
        refused = terminal.run(*words)
        assert (refused.returncode, refused.stdout) == (code, ""), (words, refused)
        assert sentence in refused.stderr
    terminal.run("down")
    gone = terminal.run("send", "general", "hello")
    assert gone.returncode == 5
    assert "is the space running?" in gone.stderr
