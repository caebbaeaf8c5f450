"""Commands people type every day, on one running space: results, answers, the past, and an agent from elsewhere."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terminal import TIDINGS, Terminal
from tidings import __version__
from tidings.admin.creation import create_space
from tidings.host.mailbox import held_mail
from tidings.util.private_files import write_private
from tidings.wire.message import new_id


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """An open space without durable delivery; the tests of this module share it and use channels of their own."""
    shell = Terminal(tmp_path_factory.mktemp("running"))
    assert shell.run("up", "--detach", "--open").returncode == 0
    yield shell
    shell.close()


def test_the_version_is_told_without_a_space_and_by_the_module_itself(tmp_path: Path) -> None:
    asked = subprocess.run([sys.executable, "-m", "tidings", "--version"], capture_output=True, text=True, check=True)
    assert asked.stdout == f"tidings {__version__}\n"


def test_a_channel_may_be_written_with_its_mark_wherever_one_is_named(running: Terminal) -> None:
    assert running.run("join", "#marked").returncode == 0
    assert running.run("send", "#marked", "hello", "--as", "ada").returncode == 0
    assert running.run("channels", "set", "#marked", "--description", "x").returncode == 0
    for words in (("history", "#marked"), ("history", "marked")):
        assert "#marked ada: hello" in running.run(*words).stdout
    assert json.loads(running.run("channels", "info", "#marked", "--json").stdout)["channel"] == "marked"
    assert running.run("agent", "add", "reader", "--read", "#marked", "--post", "marked").returncode == 0
    assert json.loads(running.run("agent", "access", "reader", "--json").stdout)["read"] == ["marked"]
    assert running.run("leave", "#marked").returncode == 0


def test_the_past_is_shown_since_a_time_and_a_time_that_is_none_is_refused(running: Terminal) -> None:
    for text in ("one", "two"):
        assert running.run("send", "past", text).returncode == 0
    told = [json.loads(line) for line in running.run("history", "past", "--json").stdout.splitlines()]
    later = running.run("history", "past", "--since", told[1]["time"], "--json").stdout.splitlines()
    assert [json.loads(line)["text"] for line in later] == ["two"]
    assert len(running.run("history", "past", "--since", "1h").stdout.splitlines()) == 2
    assert running.run("history", "past", "--since", "yesterday").returncode == 2


def test_the_status_of_a_space_asked_for_as_an_agent_there_is_not_is_a_mistake_of_who_asks(running: Terminal) -> None:
    asked = running.run("status", "--as", "nobodyhere")
    assert (asked.returncode, "there is no agent nobodyhere of space main here" in asked.stderr) == (2, True)
    assert (asked.stdout, "HEALTHY" in asked.stderr) == ("", False)


def test_whoever_narrows_an_agent_is_told_which_memberships_that_closes_for_good(running: Terminal) -> None:
    assert running.run("agent", "add", "nora", "--read", "wide", "--read", "side").returncode == 0
    assert running.run("join", "side", "--as", "nora").returncode == 0
    said = running.run("agent", "access", "nora", "--read", "wide").stderr
    assert "it is no longer in side: " in said
    assert "giving access again does not open it" in said


def test_a_direct_message_answers_another_one(running: Terminal) -> None:
    assert running.run("send", "past", "hi", "--as", "rae").returncode == 0
    first = json.loads(running.run("dm", "rae", "well?", "--json").stdout)["id"]
    assert running.run("dm", "me", "well", "--as", "rae", "--reply-to", first).returncode == 0
    (heard,) = running.run("inbox", "--json", "--wait", "10", "-n", "1").stdout.splitlines()
    assert json.loads(heard)["reply_to"] == first
    assert running.run("dm", "me", "x", "--reply-to", "that one").returncode == 2
    told = running.run("trace", first).stdout
    assert "direct message from me to rae, sequence " in told
    assert not set("{[']}") & set(told), "words, not Python"


def test_a_channel_that_is_removed_has_no_settings_and_is_listed_no_more(running: Terminal) -> None:
    assert running.run("channels", "set", "old", "--class", "live", "--description", "gone soon").returncode == 0
    assert running.run("channels", "remove", "old", "--yes").returncode == 0
    listed = json.loads(running.run("channels", "list", "--json").stdout)
    assert "old" not in {each["channel"] for each in listed}
    info = json.loads(running.run("channels", "info", "old", "--json").stdout)
    assert (info["class"], info["own"], info["description"]) == ("durable", [], "")
    assert running.run("channels", "set", "old", "--description", "back").returncode == 0
    listed = json.loads(running.run("channels", "list", "--json").stdout)
    assert "old" in {each["channel"] for each in listed}


def test_waiting_in_vain_ends_with_1_and_prints_nothing_that_could_pass_for_the_answer(running: Terminal) -> None:
    assert running.run("agent", "add", "wes", "--role", "tester").returncode == 0
    waited = running.run("ask", "tester", "is it right?", "--wait", "0.2")
    assert (waited.returncode, waited.stdout) == (1, "")
    task = waited.stderr.split("`tidings result ")[1].split("`")[0]
    early = running.run("result", task)
    assert (early.returncode, early.stdout, "queued" in early.stderr) == (1, "", True)
    as_json = running.run("result", task, "--json")
    assert (as_json.returncode, json.loads(as_json.stdout)["state"]) == (1, "queued")
    worked = running.run("work", "--role", "tester", "--exec", "echo it is, $TIDINGS_ASKER", "--once", "--as", "wes")
    assert worked.returncode == 0
    done = running.run("result", task, "--wait", "10")
    assert (done.returncode, done.stdout) == (0, "it is, me\n")
    assert running.run("result", new_id()).returncode == 2
    assert running.run("result", "that one").returncode == 2

    assert running.run("send", "past", "hi", "--as", "away").returncode == 0
    unread = running.run("dm", "away", "are you there?", "--wait", "read", "--seconds", "0.2")
    assert (unread.returncode, unread.stdout) == (1, "")
    assert "`tidings trace " in unread.stderr


def test_what_a_command_says_to_do_next_runs_as_it_stands(running: Terminal) -> None:
    flags = ("--as", "hal", "--space", "main", "--home", running.env["TIDINGS_HOME"])
    nowhere = {"TIDINGS_HOME": "/nonexistent", "TIDINGS_AS": "nobody"}
    running.watched = True
    try:
        for words in (("send", "past", "hello"), ("who",), ("dm", "me", "hi"), ("channels", "list"), ("leave", "past")):
            done = running.run(*words, *flags, **nowhere)
            assert done.returncode == 0, done
            *_, said = done.stderr.splitlines()
            again = running.run(*shlex.split(said.removeprefix("next: tidings ")), **nowhere)
            assert again.returncode == 0, (said, again)
        mistaken = running.run("send", "past", "x", "--as", "hal", "--mention", "nobody-there", *flags[2:], **nowhere)
        assert mistaken.returncode == 2
    finally:
        running.watched = False


def test_an_agent_of_another_home_is_imported_and_is_itself_on_the_command_line_and_through_the_host(
    running: Terminal, tmp_path: Path
) -> None:
    bundle = tmp_path / "far.json"
    assert running.run("agent", "add", "far", "--read", "past", "--post", "past").returncode == 0
    assert running.run("agent", "export", "far", "--output", str(bundle)).returncode == 0
    elsewhere = Terminal(tmp_path)
    try:
        taken = elsewhere.run("agent", "import", str(bundle), "--json")
        assert (taken.returncode, json.loads(taken.stdout)["name"]) == (0, "far")
        nobody = elsewhere.run("who", "--as", "other")
        assert (nobody.returncode, "there is no space 'main'" in nobody.stderr) == (2, True)
        asked = elsewhere.run("status")
        assert (asked.returncode, "(far), and it runs elsewhere. Ask there" in asked.stderr) == (2, True), asked
        for words in (("up",), ("up", "--detach")):
            refused = elsewhere.run(*words)
            assert (refused.returncode, "tidings agent forget far --space main" in refused.stderr) == (6, True), refused
        assert elsewhere.run("send", "past", "from afar", "--as", "far").returncode == 0
        assert "far: from afar" in running.run("history", "past").stdout
        assert elsewhere.run("host", "up").returncode == 0
        through = elsewhere.run("send", "past", "through the host", "--as", "far", "--json")
        assert (json.loads(through.stdout)["stage"], "through the host" in through.stderr) == ("confirmed", True)
        assert elsewhere.run("set-status", "working", "far away", "--as", "far").returncode == 0
        assert elsewhere.run("set-status", "asleep", "--as", "far").returncode == 2
        served = subprocess.run(
            [*TIDINGS, "mcp", "--bundle", str(bundle)], env=elsewhere.env, input="", capture_output=True, text=True
        )
        assert (served.returncode, "tidings mcp: far in main" in served.stderr) == (0, True)
        assert running.run("dm", "far", "welcome").returncode == 0
        assert "me: welcome" in elsewhere.run("inbox", "--as", "far", "--wait", "10").stdout
        assert elsewhere.run("host", "down").returncode == 0
        # what a host kept for a bundle is the imported agent's, and read without the host, too
        assert elsewhere.run("inbox", "quarantine", "--as", "far", "--json").stdout.strip() == "[]"
        with held_mail(elsewhere.home.home):
            assert running.run("dm", "far", "welcome again").returncode == 0
            looked = elsewhere.run("inbox", "--as", "far", "--json")
            assert (looked.returncode, "nothing is received" in looked.stderr) == (0, True), looked
        assert "me: welcome again" in elsewhere.run("inbox", "--as", "far", "--wait", "10").stdout
        assert elsewhere.run("agent", "forget", "far").returncode == 0
        create_space(elsewhere.home, port=None, open_space=True, budget=None)
        refused = elsewhere.run("agent", "import", str(bundle))
        assert (refused.returncode, "another space main of its own" in refused.stderr) == (6, True), refused
        # a home from before that was refused
        write_private(elsewhere.home.imported("far"), bundle.read_text())
        lost = elsewhere.run("who", "--as", "far")
        assert (lost.returncode, "tidings agent forget far --space main" in lost.stderr) == (6, True), lost
    finally:
        elsewhere.run("host", "down")
        elsewhere.close()
