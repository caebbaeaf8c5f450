"""What the documents tell people to type is typed here."""

import re
import shlex
from pathlib import Path

import pytest

from command_lines import lines_in, parse
from terminal import Terminal

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: words that stand for something in prose
STANDS_FOR = {"SEQ": "42"}
#: acts while it is parsed, so it is not
ACTS = "--install-completion"


def inline(text: str) -> list[str]:
    """Commands between backticks, but for those that only name several at once."""
    found = re.findall(r"`(tidings [^`]+)`", text)
    return [line for line in found if not re.search(r"[<|]|\.\.\.", line) and ACTS not in line]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_line_in_a_document_parses(document: Path) -> None:
    text = document.read_text()
    for line in lines_in(text):
        parse(line)
    for line in inline(text):
        try:
            parse(" ".join(STANDS_FOR.get(word, word) for word in line.split(" ")))
        except Exception as error:  # in prose a command may be named without its arguments
            if not str(error).startswith("Missing"):
                raise AssertionError(f"{document.name}: `{line}`: {error}") from error


def test_the_first_ten_minutes_are_as_the_guide_says(terminal: Terminal) -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    lines = lines_in(guide.partition("## The first ten minutes")[2].partition("\n## ")[0])
    assert len(lines) > 10
    said: dict[str, str] = {}
    terminal.watched = True
    for line in lines:
        done = terminal.run(*shlex.split(line)[1:])
        assert done.returncode == 0, (line, done)
        if not line.startswith("tidings up"):  # a process of its own, whose standard error is no terminal
            parse(done.stderr.splitlines()[-1].removeprefix("next: "))
        word = line.split()[1]
        said[word] = said.get(word, "") + done.stdout + done.stderr
    assert "ada: hello all" in said["history"]
    assert "ada: hello all" in said["inbox"]
    assert "me: can you look at this?" in said["inbox"]
    assert "is done" in said["work"]
    assert "default of the space" in said["channels"]
    assert terminal.processes() == []
