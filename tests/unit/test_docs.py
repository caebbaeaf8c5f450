"""The documents name things that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def named_tests(document: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", document)


@pytest.mark.parametrize("name", ["guarantee-tests", "findings", "pains"])
def test_every_test_named_in_a_document_exists(name: str) -> None:
    named = set(named_tests((ROOT / "docs" / f"{name}.md").read_text()))
    assert len(named) > 10
    assert {each for each in named if f"def {each}(" not in TESTS} == set()


def test_every_finding_is_named_by_its_tests() -> None:
    rows = re.findall(r"^\| ([FN]\d+) .*$", text := (ROOT / "docs" / "findings.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    for line in re.findall(r"^\| [FN]\d+ .*$", text, re.MULTILINE):
        finding = line.split()[1]
        for name in named_tests(line):
            found = re.search(rf'def ({name}\(.*?-> None:\n(?: +""".*?""")?)', TESTS, re.DOTALL)
            assert found, name
            assert re.search(rf"(?:\b|_){finding}(?:\b|_)", found[1], re.IGNORECASE), f"{name} does not name {finding}"


def test_every_pain_has_a_row_or_is_said_to_be_ours_still() -> None:
    rows, ours = (ROOT / "docs" / "pains.md").read_text().split("## Still true of us")
    listed = re.findall(r"^\| (\d+) \|", rows, re.MULTILINE)
    assert {int(each) for each in (*listed, *re.findall(r"^- (\d+)", ours, re.MULTILINE))} == set(range(1, 26))


def headings(document: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)


def anchor(heading: str) -> str:
    """As the usual viewers of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_link_in_a_document_leads_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for path, place in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", document.read_text()):
            target = document.parent / path if path else document
            assert target.exists(), f"{document.name}: {path}"
            assert not place or place in map(anchor, headings(target)), f"{document.name}: {path}#{place}"


def test_guarantees_and_the_index_of_their_tests_have_the_same_headings_and_each_is_linked() -> None:
    page, index = (ROOT / "docs" / f"{name}.md" for name in ("guarantees", "guarantee-tests"))
    asked = headings(page)[1:]
    assert len(asked) > 10
    assert asked == headings(index)[1:]
    linked = re.findall(r"\]\(guarantee-tests\.md#([^)]+)\)", page.read_text())
    assert sorted(linked) == sorted(map(anchor, asked))


def test_the_guarantees_stay_readable() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    assert len(page.splitlines()) <= 130
    assert not named_tests(page), "tests are named in guarantee-tests.md"


def test_the_readme_stays_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60


ARCHITECTURE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()


def test_every_place_the_architecture_names_exists() -> None:
    """`file.py` `Class.method`, or `function`: people follow these pages through the code."""
    source = Path(__file__).parents[2] / "src" / "tidings"
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`(?: `([A-Za-z_.]+)`)?", ARCHITECTURE)
    assert len(named) > 40
    for file, place in named:
        root = source.parents[1] if file.startswith("tests/") else source
        assert (root / file).is_file(), file
        for name in place.split(".") if place else ():
            assert re.search(rf"^ *(?:class|(?:async )?def) {name}\b", (root / file).read_text(), re.MULTILINE), (
                f"{file} has no {name}"
            )


def test_a_life_has_at_most_twelve_steps_and_the_glossary_forty_words() -> None:
    lives = re.findall(r"^## The life of[^\n]*\n(.*?)(?=^## )", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    assert [len(re.findall(r"^\d+\. ", life, re.MULTILINE)) <= 12 for life in lives] == [True] * 5
    words = ARCHITECTURE.split("## Words")[1]
    assert len(re.findall(r"^\| (?!word |---)", words, re.MULTILINE)) <= 40


FOLDERS = ("src", "packages", "tests", "bench", "scripts", "examples", "docs")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if "__pycache__" not in path.parts]
CODE = [path for path in FILES if path.suffix == ".py"]
SHIPPED = [path for path in CODE if path.relative_to(ROOT).parts[0] in ("src", "packages")]
PLACES = [f"/{path.relative_to(ROOT)}" for path in FILES]
#: a file, a folder of the repository, a function that is called, a name with dots
NAMED = re.compile(
    r"[\w./-]+\.py|(?:src|tests|docs|bench|scripts|packages|tidings)/[\w./-]+|[\w.]+\(\)|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+"
)
#: in a docstring also a name that can only be code
NAMED_IN_CODE = re.compile(NAMED.pattern + r"|[a-z]\w*_\w+|[A-Z][a-z]+(?:[A-Z]\w*)+")
#: `host.db` is a file on the user's disk, although there is a module named host
DATA_FILES = (".db", ".toml", ".json", ".log", ".jsonl", ".lock", ".md")


def names_in_code(tree: ast.AST) -> Iterator[str]:
    documented = {id(node.body[0].value) for node in documented_nodes(tree) if isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield node.arg or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield from re.findall(r"\w+", node.value)


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented_nodes(tree: ast.AST) -> Iterator[Documented]:
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node):
            yield node


def is_there(named: str, modules: set[str], names: set[str]) -> bool:
    if "/" in named or named.endswith(".py"):
        return any(f"/{named}" in place for place in PLACES)
    *parents, last = named.removesuffix("()").split(".")
    if parents and (named.endswith(DATA_FILES) or parents[0] not in modules):
        return True  # a file of the user, or something of another project
    return last in names or last in modules


def test_every_module_function_and_file_named_in_a_document_or_a_docstring_exists() -> None:
    trees = {path: ast.parse(path.read_text()) for path in CODE}
    modules = {part for place in PLACES if place.endswith(".py") for part in Path(place).with_suffix("").parts}
    names = {name for tree in trees.values() for name in names_in_code(tree)}
    texts = {path: path.read_text() for path in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md"))}
    for path in SHIPPED:
        texts[path] = "\n".join(ast.get_docstring(node) or "" for node in documented_nodes(trees[path]))
    missing = [
        f"{path.relative_to(ROOT)}: {named}"
        for path, text in texts.items()
        for named in re.findall(r"`([^`\n]+)`", text)
        if (NAMED_IN_CODE if path in trees else NAMED).fullmatch(named) and not is_there(named, modules, names)
    ]
    assert sum(map(len, texts.values())) > 100_000
    assert not missing, "\n".join(missing)
