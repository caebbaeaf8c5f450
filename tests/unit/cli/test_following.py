"""`tidings logs -f` loses no line when the file rotates."""

from collections.abc import Callable
from pathlib import Path

from tidings.cli.running import follow_lines, last_lines


class Writer:
    """Does one thing each time the reader has nothing to read."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)

    def __call__(self) -> None:
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.pop(0)()


def heard(path: Path, count: int, *steps: Callable[[], object]) -> list[str]:
    found: list[str] = []
    try:
        for line in follow_lines(path, count, Writer(*steps)):
            found.append(line)  # noqa: PERF402 - what was heard before the interruption counts
    except KeyboardInterrupt:
        pass
    return found


def append(path: Path, text: str) -> Callable[[], object]:
    def write() -> None:
        with path.open("a") as file:
            file.write(text)

    return write


def test_lines_before_and_after_a_rotation_are_all_shown_once(tmp_path: Path) -> None:
    path, old = tmp_path / "steward.log", tmp_path / "steward.log.1"
    path.write_text("1\n2\n3\n")

    def rotate() -> None:
        append(path, "5\n")()
        path.rename(old)
        append(old, "6\n")()
        append(path, "7\n")()

    said = heard(path, 2, append(path, "4\n"), rotate, append(path, "8\n"), path.unlink, append(path, "9\n"))
    assert said == ["2", "3", "4", "5", "6", "7", "8", "9"]


def test_a_line_is_shown_when_it_is_whole_and_a_file_cut_short_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "up.log"
    path.write_text("a long first line\n")
    said = heard(path, 0, append(path, "half"), append(path, " and half\n"), lambda: path.write_text("new\n"))
    assert said == ["half and half", "new"]


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "admin.log"
    assert last_lines(path, 5) == []
    assert heard(path, 5, append(path, "first\n"), append(path, "second\n")) == ["first", "second"]
