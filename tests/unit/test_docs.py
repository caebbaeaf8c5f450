"""The documents name things that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_named_in_the_guarantees_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "guarantees.md").read_text()))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 10
    assert {name for name in named if f"def {name}(" not in sources} == set()


def test_every_link_in_a_document_leads_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_readme_stays_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60
