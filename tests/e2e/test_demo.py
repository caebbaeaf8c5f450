"""The demonstration, as a user runs it."""

import signal
import tempfile
from itertools import takewhile
from pathlib import Path

import pytest
from test_pipeline import descendants, lives, starting_with, until

from terminal import Terminal


@pytest.mark.timeout(150)
def test_the_demonstration_tells_its_story_and_leaves_nothing_behind(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lacking = starting_with(tmp_path / "first", "import sys\nsys.modules['pyspark'] = None\n")
    done = terminal.run("demo", **lacking, TIDINGS_PIPELINE="on")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for sentence in (
        "bob hears ada in #general: shall we start?",
        "came only when he asked, marked as history: nobody but me is here yet",
        "bob hears ada directly: the password is swordfish",
        "ada asked a reviewer; bob answered, signed: looks good",
        "bob asks for #team.secret: bob may not read team.secret",
        "is killed: the process ended with -9",
        "nothing lost, nothing twice",
        "and a notice: 2 messages of bob in #general between",
        "he writes ada's id into a message: stored under his own key, shown to nobody",
        'ada hears bob (claims to be "ada"): it is me, ada',
        "to #general is void and shown to nobody",
        "with his old credential: the broker at",
        "left out: agents that are away. durable copies need pyspark: `pip install 'tidings[spark]'`",
    ):
        assert sentence in done.stdout
    assert list(tmp_path.glob("tidings-demo-*")) == []
    assert len(done.stdout.splitlines()) < 70, "a short story"


@pytest.mark.timeout(150)
def test_two_linked_spaces_that_were_cut_apart_hold_the_same_again_and_nothing_is_left(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.env |= {"TMPDIR": str(tmp_path)}
    running = terminal.start("demo", "links")
    assert running.stdout is not None
    told = ""
    while "both go on talking" not in told:
        line = running.stdout.readline()
        assert line, (told, running.communicate())
        told += line
    family = descendants(running.pid)
    assert len(family) >= 8, "two of each: supervisor, broker, steward, worker of links"
    rest, complaints = running.communicate(timeout=120)
    assert (running.returncode, complaints) == (0, ""), told + rest
    for sentence in (
        "a worker of east takes over what west shares: live",
        "bob in east hears ada@west: good morning from the west",
        "ada in west hears bob@east: and a good day from the east",
        "west holds 5 messages and east 5; 2 are in both",
        "both hold all 8",
        "what one of them said is in the same order in both",
        "west: equal: every record that east shares",
        "east: equal: every record that west shares",
        "Both spaces are stopped and their files are gone",
    ):
        assert sentence in told + rest
    assert _held_by("east", rest) == [
        "ada@west: good morning from the west",
        "bob@east: and a good day from the east",
        "bob@east: the west is silent",
        "bob@east: we decided: the blue one",
        "bob@east: it is night here",
        "ada@west: can you hear me?",
        "ada@west: we go on without you",
        "ada@west: it is noon here",
    ]
    assert sorted(_held_by("west", rest)) == sorted(_held_by("east", rest))
    assert [pid for pid in family if lives(pid)] == []
    assert list(tmp_path.glob("tidings-demo-*")) == []


def _held_by(space: str, told: str) -> list[str]:
    """What a space is said to hold, line by line."""
    lines = told.partition(f"  {space} holds, in its order:\n")[2].splitlines()
    return [line.strip() for line in takewhile(lambda line: line.startswith("    "), lines)]


@pytest.mark.timeout(150)
def test_a_demonstration_of_links_that_is_told_to_stop_leaves_no_process_and_no_file(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.env |= {"TMPDIR": str(tmp_path)}
    running = terminal.start("demo", "links")
    assert running.stdout is not None
    while "takes over what west shares" not in (line := running.stdout.readline()):
        assert line, running.communicate()
    family = descendants(running.pid)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=90)
    assert running.returncode != 0
    assert [pid for pid in family if lives(pid)] == []
    assert list(tmp_path.glob("tidings-demo-*")) == []


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_demonstration_shows_who_was_away_who_left_and_who_was_narrowed(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = terminal.run("demo", TIDINGS_PIPELINE="on")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for sentence in (
        "[durable delivery: starting Spark,",
        "[durable delivery: taking over delivery,",
        "[durable delivery: running,",
        "dora, who was away, gets all 4 once and in order",
        "eve, who left, gets the 2 she was owed and no other",
        "finn, whose access was narrowed, gets nothing more of #plans",
    ):
        assert sentence in done.stdout
    assert terminal.processes() == []
    assert list(tmp_path.glob("tidings-demo-*")) == []


@pytest.mark.slow
def test_a_demonstration_that_is_told_to_stop_leaves_no_process_and_no_file(terminal: Terminal, tmp_path: Path) -> None:
    terminal.env |= {"TIDINGS_PIPELINE": "on", "TMPDIR": str(tmp_path)}
    running = terminal.start("demo", "--no-pipeline")
    assert running.stdout is not None
    said = ""
    while "Two agents are added" not in said:
        line = running.stdout.readline()
        assert line, said
        said += line
    assert "durable" not in said, "it was left out"
    family = descendants(running.pid)
    assert len(family) >= 3, "supervisor, broker, steward"
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=50)
    assert running.returncode != 0
    assert [pid for pid in family if lives(pid)] == []
    assert list(tmp_path.glob("tidings-demo-*")) == []


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_an_interrupted_demonstration_leaves_no_process_and_no_jvm(
    terminal: Terminal, tmp_path: Path, number: signal.Signals
) -> None:
    terminal.env |= {"TIDINGS_PIPELINE": "on", "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    running = terminal.start("demo")
    assert running.stdout is not None
    while "starting Spark" not in (line := running.stdout.readline()):
        assert line, "it ended before Spark started"
    until(lambda: any("java" in Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(running.pid)))
    family = descendants(running.pid)
    running.send_signal(number)
    running.communicate(timeout=90)
    assert running.returncode != 0
    until(lambda: not any(map(lives, family)), within=60)
    left = list(tmp_path.glob("tidings-demo-*"))
    assert bool(left) is (number is signal.SIGKILL), "only a kill -9 leaves files"
