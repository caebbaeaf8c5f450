"""The command line answers with sentences and stable exit codes, and help alone is enough to start."""

import io
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest

from command_lines import commands, lines_in, parse
from pages import EXIT_CODES, PAGES, REMEDIES, tree
from terminal import Screen
from tidings.cli import output
from tidings.cli.main import main
from tidings.cli.output import age, size
from tidings.cli.people import life_of
from tidings.cli.spaces import parse_settings
from tidings.contract.catalogue import OPERATIONS, SERVED
from tidings.contract.mail import TraceAnswer
from tidings.errors import TidingsError, UsageError

DOCS = Path(__file__).parents[3] / "docs"
HUGE = "99999999999999999999999"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDINGS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["status"], 2, "there is no space 'main'"),
        (["status", "--space", "a b"], 2, "space name 'a b' is not allowed"),
        (["down", "--space", "lab"], 2, "tidings up --space lab"),
        (["logs", "nonsense"], 2, "there is no log 'nonsense'"),
        (["agent", "add"], 2, "name the agent, or give its file"),
        (["agent", "show", "ada"], 2, "there is no space 'main'"),
        (["inbox"], 2, "be an agent of one elsewhere: `tidings agent import FILE`"),
        (["agent", "add", "--file", "nowhere.md"], 2, "cannot read nowhere.md"),
        (["space", "set", "colour=red"], 2, "is not a setting"),
        (["space", "remove", "lab", "--yes"], 2, "`tidings space list` shows those there are"),
        (["agent", "forget", "ada"], 2, "no agent ada of a space main was imported"),
        (["agent", "forget", "../ada"], 2, "is not allowed"),
        (["up", "--port", "0"], 2, "not between 1 and 65535"),
        (["up", "--nats-server", "/nowhere/nats-server"], 1, "is not an executable file"),
        (["nonsense"], 2, "No such command"),
        (["inbox", "read", HUGE], 2, "99999999999999999999999 is out of range"),
        (["inbox", "delete", "1", HUGE], 2, "is out of range"),
        (["inbox", "-n", HUGE], 2, "is out of range"),
        (["history", "general", "--before", HUGE], 2, "is out of range"),
        (["history", "general", "-n", "0"], 2, "0 is out of range"),
        (["tail", "general", "--count", HUGE], 2, "is out of range"),
        (["outbox", "list", "--before", HUGE], 2, "is out of range"),
        (["agent", "import", "/etc/passwd"], 2, "/etc/passwd is not a bundle written by `tidings agent export`"),
        (["agent", "import", "/dev/null"], 2, "/dev/null is not a bundle written by `tidings agent export`"),
        (["inbox", "--wait", "nan"], 2, "nan is no number of seconds"),
        (["inbox", "--wait", "-1"], 2, "-1 is no number of seconds"),
        (["ask", "reviewer", "look", "--wait", "nan"], 2, "nan is no number of seconds"),
        (["ask", "reviewer", "look", "--deadline", "inf"], 2, "inf is no number of seconds"),
        (["result", "some-task", "--wait", "inf"], 2, "inf is no number of seconds"),
        (["dm", "bob", "hello", "--wait", "read", "--seconds", "nan"], 2, "nan is no number of seconds"),
        (["logs", "-n", HUGE], 2, "Invalid value for"),
        (["dead", "show", HUGE], 2, "names no dead letter"),
        (["dead", "drop", "../../etc/passwd"], 2, "'../../etc/passwd' names no dead letter"),
        (["dead", "drop", "direct-1\x1b[2J\n2"], 2, "'direct-1 [2J 2' names no dead letter"),
        (["channels", "remove", ""], 2, "channel '' is not allowed"),
        (["channels", "remove", "../../etc/passwd"], 2, "channel '../../etc/passwd' is not allowed"),
        (["channels", "remove", "a\x1b[2J\nb"], 2, r"channel 'a\x1b[2J\nb' is not allowed"),
    ],
)
def test_a_mistake_is_answered_by_a_sentence(
    words: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""
    assert "Traceback" not in said.err


#: what they print are words for people, or JSON already
WITHOUT_JSON = {
    "up",
    "down",
    "logs",
    "demo",
    "mcp",
    "agent export",
    "space acknowledge",
    "space rotate-key",
    "space remove",
    "pipeline run",
    "link run",
    "host up",
    "host down",
    "host install",
    "host uninstall",
    "space install",
    "space uninstall",
}
COMMANDS = dict(commands())


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_explains_itself_with_examples_that_parse(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "--help"]) == 0
    assert "Usage: tidings" in (shown := capsys.readouterr().out)
    assert "Example" in shown
    examples = lines_in(COMMANDS[words].help)
    assert words in [parse(line) for line in examples]
    options = {option for parameter in COMMANDS[words].params for option in parameter.opts}
    assert ("--json" in options) == (words not in WITHOUT_JSON)


def test_a_line_that_is_no_command_does_not_parse() -> None:
    for line in (
        "tidings sned general x",
        "tidings send general",
        "tidings send general x --nope",
        "tidings history general -n x",
    ):
        with pytest.raises(Exception, match=r"No such|Missing|is not a valid"):
            parse(line)


def test_config_prints_each_value_with_its_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "--json", "--space", "lab"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["space"] == {"value": "lab", "source": "flag"}
    assert found["home"] == {"value": str(tmp_path / "home"), "source": "environment"}


def test_version_names_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    assert {"tidings", "python", "nats-server", "platform"} <= set(json.loads(capsys.readouterr().out))


def test_space_settings_are_read_from_words() -> None:
    assert parse_settings(["class=live", "replay=off", "deliver=off", "keep_age=7d", "keep_bytes=2G"]) == {
        "defaults": {"class": "live", "replay": False},
        "parts": {"deliver": "off"},
        "keep_age": 604_800,
        "keep_bytes": 2 * 10**9,
    }
    assert parse_settings(["class="]) == {"defaults": {"class": None}}
    for wrong in ("class=fast", "keep_age=soon", "deliver", "parts=off"):
        with pytest.raises(UsageError):
            parse_settings([wrong])


def error_tree(cls: type[TidingsError] = TidingsError) -> list[type[TidingsError]]:
    found = [cls, *(each for sub in cls.__subclasses__() for each in error_tree(sub))]
    return [each for each in found if each.__module__ == "tidings.errors"]


DOCUMENTED = {
    name: int(code)
    for name, code in re.findall(r"^\| [· ]*`(\w+)` \| \w+ \| (\d) \|", (DOCS / "errors.md").read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("error", error_tree())
def test_every_error_ends_a_command_with_its_documented_exit_code_and_a_sentence(
    error: type[TidingsError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise error("this is why; do that")

    monkeypatch.setattr("tidings.cli.main._server_version", fail)
    assert main(["version"]) == DOCUMENTED[error.__name__]
    assert capsys.readouterr().err == "tidings: this is why; do that\n"


def test_every_error_has_a_word_of_its_own_and_all_exit_codes_are_used() -> None:
    classes = error_tree()
    assert len({cls.code for cls in classes}) == len(classes)
    assert {0, *DOCUMENTED.values()} == set(EXIT_CODES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_written_from_the_code_is_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `make docs`"


def test_every_operation_says_what_it_is_for() -> None:
    assert [each.name for each in (*OPERATIONS.values(), *SERVED.values()) if not each.summary] == []


def test_the_drawing_of_the_errors_is_their_tree() -> None:
    assert [error for error, _, _ in tree()] == error_tree()
    assert set(REMEDIES) <= {error.__name__ for error in error_tree()}


def test_tables_and_colour_are_for_terminals_and_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(stream: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stdout", stream)
        output.table(("what", "verdict"), [("[/b] of others", "ok")], empty="")
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert drawn(io.StringIO()) == "what\tverdict\n[/b] of others\tok\n"
    assert "\x1b[32mok" in (coloured := drawn(Screen()))
    assert "[/b] of others" in coloured, "what others wrote is no markup"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in drawn(Screen())


def test_hints_and_spinners_are_for_people_and_data_stays_on_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for screen, seen in ((Screen(), True), (io.StringIO(), False)):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr(sys, "stdout", out)
        with output.working("counting"):
            output.line("data")
        output.hint("tidings who")
        assert out.getvalue() == "data\n"
        assert ("counting" in screen.getvalue(), "next: tidings who" in screen.getvalue()) == (seen, seen)


def test_commands_in_words_repeat_the_flags_that_lead_to_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    output.remember_flags(**{"as": "bob", "space": "lab", "home": "/a b"})
    try:
        output.hint("tidings history general")
        output.hint("tidings agent list")
        output.hint("tidings agent revoke --space lab -- -x")
        output.say("see `tidings trace 42` or `tidings agent add NAME`, or `no command of ours`")
    finally:
        output.forget_flags()
    output.hint("tidings who")
    said = [line for line in screen.getvalue().splitlines() if line]
    assert said == [
        "next: tidings history general --as bob --space lab --home '/a b'",
        "next: tidings agent list --space lab --home '/a b'",
        "next: tidings agent revoke --space lab --home '/a b' -- -x",
        "see `tidings trace 42 --as bob --space lab --home '/a b'` "
        "or `tidings agent add NAME --space lab --home '/a b'`, or `no command of ours`",
        "next: tidings who",
    ]
    for line in said[:3]:
        parse(line.removeprefix("next: "))


def test_a_long_text_is_cut_on_a_terminal_only_and_the_command_that_shows_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = "word " * 1_000
    assert output.cut(long, "tidings inbox --whole") == long, "a pipe gets everything"
    monkeypatch.setattr(sys, "stdout", Screen())
    shown = output.cut(long, "tidings inbox --whole")
    assert len(shown) < 2_100
    assert shown.endswith("…\n[5,000 characters in all: tidings inbox --whole]")
    assert output.cut("\n" * 10 + "x\n" * 100, "tidings inbox --whole").count("\n") == output.LINES
    assert output.cut("short\n", "tidings inbox --whole") == "short\n"
    output.show_whole(True)
    try:
        assert output.cut(long, "tidings inbox --whole") == long
    finally:
        output.forget_flags()


def test_the_life_of_a_message_is_told_in_words_with_names() -> None:
    ada, bob = "U" + "A" * 55, "U" + "B" * 55
    stored = {
        "stream": "DM_main",
        "seq": 7,
        "time": "2027-01-15T08:00:00.000000000Z",
        "kind": "dm",
        "sender": ada,
        "to": bob,
        "void": "a reason",
    }
    stages = {"read": "2027-01-15T08:00:02.000+00:00", "confirmed": "2027-01-15T08:00:00.000+00:00"}
    letter = {"kind": "dm", "sender": ada, "to": bob, "seq": 7, "stage": "read", "stages": stages}
    task = {"kind": "task", "sender": ada, "to": "reviewer", "seq": 9, "stage": "read", "stages": {}, "state": "dead"}
    task |= {"worker": bob, "attempt": 5, "cause": "failed", "reasons": ["attempt 5: no"]}
    void = {"kind": "chat", "sender": ada, "to": "general", "seq": 3, "stage": "void", "stages": {}, "why": "a header"}
    told = [letter, task, void]
    facts = {"id": "x", "stored": [stored], "receipts": told, "names": {ada: "ada", bob: "bob"}}
    lines = life_of(msgspec.convert(facts, TraceAnswer))
    assert lines[0].startswith("direct message from ada to bob, sequence 7, 2027-01-1")
    assert lines[1] == "  void: a reason"
    assert lines[2] == "direct message to bob is read"
    assert [line.split()[0] for line in lines[3:5]] == ["confirmed", "read"], "in the order of time"
    assert lines[5:] == [
        "task to the role reviewer is dead by bob, attempt 5 (failed)",
        "  attempt 5: no",
        "message to #general is void",
        "  why: a header",
    ]


def test_sizes_and_ages_are_short() -> None:
    assert [size(n) for n in (None, 5, 12_345, 8_600_000_000)] == ["-", "5 B", "12.3 KB", "8.6 GB"]
    assert [age(t, 100_000) for t in (None, 99_999.5, 99_960, 96_000, 0)] == ["-", "0.5 s", "40 s", "1 h", "1 d"]
