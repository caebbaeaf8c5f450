"""What `scripts/count.py` counts: from the text of a small tree, and from traces."""

from pathlib import Path
from textwrap import dedent

import pytest

from count import (
    RUN,
    SOURCES,
    Step,
    classes_used_twice,
    compare,
    duplicated_runs,
    files_of_operation,
    improved,
    lines_by_package,
    returns_of,
    way_of,
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    def write(path: str, text: str) -> None:
        file = tmp_path / "tidings" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))

    write("__init__.py", "")
    write("errors.py", "class Gone(Exception): ...\n")
    write("a/one.py", "class Twice:\n    class Once: ...\n")
    write("a/two.py", "def make():\n    class Twice: ...\n")
    return tmp_path


def test_lines_are_counted_by_package(sources: Path) -> None:
    assert lines_by_package(sources) == {"a": 4, "tidings": 1}


def test_a_class_name_is_used_twice_wherever_its_classes_stand(sources: Path) -> None:
    assert classes_used_twice(sources) == {"Twice": ["tidings/a/one.py", "tidings/a/two.py"]}


def test_a_class_name_exists_once_in_this_repository() -> None:
    assert classes_used_twice(SOURCES) == {}


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("def recall(): ...", True),
        ("async def _recall(): ...", True),
        ("class Steward:\n    def recall(self): ...", True),
        ("answer = steward.recall(1)", True),
        ("recall(1)", True),
        ("ask('recall')", True),
        ("Route('/v1/{space}/recall', None)", True),
        ("get(f'/v1/channels/{name}/recall?limit=1')", True),
        ("'''recall'''", False),
        ("def other():\n    'recall'", False),
        ("# recall\nx = 1", False),
        ("import recall", False),
        ("recall = 1", False),
        ("print('what recall does')", False),
        ("recalled()", False),
    ],
)
def test_a_file_spells_an_operation_if_its_code_has_the_name(sources: Path, text: str, spelled: bool) -> None:
    (sources / "tidings" / "a" / "three.py").write_text(text)
    assert files_of_operation(sources, "recall") == (["tidings/a/three.py"] if spelled else [])


def test_what_is_not_touched_for_an_operation_is_not_counted(sources: Path) -> None:
    (sources / "tidings" / "demo").mkdir()
    (sources / "tidings" / "demo" / "story.py").write_text("recall()")
    assert files_of_operation(sources, "recall") == []


def steps(*modules: str) -> list[Step]:
    return [(module, f"f{number}") for number, module in enumerate(modules)]


def test_a_return_is_a_step_into_another_module_that_was_left_before() -> None:
    assert returns_of(steps("a", "a", "b", "c")) == 0
    assert returns_of(steps("a", "b", "a", "a", "b", "c")) == 2
    assert returns_of([]) == 0


def test_what_not_every_message_enters_is_not_on_the_way() -> None:
    way, beat = steps("a", "b", "a"), ("beats", "beat")
    found = way_of([way, [way[0], beat, *way[1:]], way])
    assert found == {"modules": 2, "functions": 3, "returns": 1, "way": ["a:f0", "b:f1", "a:f2"]}


def test_a_function_that_two_programs_enter_is_on_the_way_once() -> None:
    sent, received = steps("a", "b"), [("b", "f1"), ("c", "f3")]
    assert way_of([[*sent, *received]])["way"] == ["a:f0", "b:f1", "c:f3"]


def test_a_run_of_equal_lines_in_two_files_is_one_pair(sources: Path) -> None:
    run = "".join(f"x{number} = {number}\n" for number in range(RUN))
    for name in ("three", "four", "five"):
        (sources / "tidings" / "a" / f"{name}.py").write_text(run)
    (sources / "tidings" / "a" / "five.py").write_text(run.replace("x1 =", "y1 ="))
    assert duplicated_runs(sources) == [("tidings/a/four.py", "tidings/a/three.py")]


def test_what_is_worse_fails_and_what_is_better_becomes_the_record() -> None:
    record = {"host message, modules": 9, "lines in a": 10, "lines in gone": 4, "words": 7}
    now = {"lines in a": 11, "lines in new": 3, "words": 6}
    assert compare(now, record) == ["lines in a: 11, recorded 10", "lines in new: 3, recorded 0"]
    assert improved(now, record, static=False) == {"lines in a": 10, "lines in new": 0, "words": 6}
    assert improved(now, record, static=True)["host message, modules"] == 9
