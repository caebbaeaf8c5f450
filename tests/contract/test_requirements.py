"""The list of requirements and the tests that prove them are held together, both ways."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
TAG = re.compile(r'mark\.requirement\("([A-Z]\d+)"\)')


def test_every_requirement_has_a_test_and_every_test_a_requirement() -> None:
    listed = re.findall(r"^\| ([A-Z]\d+) \|", DOCUMENT.read_text(), re.MULTILINE)
    tests = Path(__file__).parents[1]
    tagged = {tag for path in tests.rglob("test_*.py") for tag in TAG.findall(path.read_text())}
    assert len(listed) == len(set(listed)), "an id is one sentence"
    assert sorted(listed) == sorted(tagged), "listed and tagged are the same"


def test_every_test_of_the_contract_names_its_requirement() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        for decorators, name in re.findall(r"((?:^@.*\n)*)^async def (test_\w+)", path.read_text(), re.MULTILINE):
            assert TAG.search(decorators), f"{path.name}: {name}"
