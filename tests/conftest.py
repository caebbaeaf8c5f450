"""Hypothesis profiles, and the fixture every integration test stands on.

`ci` repeats itself exactly, `deep` (TIDINGS_DEEP=1) searches further.
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from terminal import Terminal
from tidings.testing.real_space import RealSpace, real_space

settings.register_profile("ci", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=1000, deadline=None)
settings.load_profile("deep" if os.environ.get("TIDINGS_DEEP") else "ci")

NEEDS_BROKER = ("contract", "integration", "faults", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(part in NEEDS_BROKER for part in item.path.parts):
            item.add_marker(pytest.mark.broker)
        if "faults" in item.path.parts:
            item.add_marker(pytest.mark.faults)


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    """A fresh space on a real broker, with its steward."""
    async with real_space(tmp_path / "home") as running:
        yield running


@pytest.fixture
async def pair(space: RealSpace) -> RealSpace:
    """The same with ada and bob in it, who may talk in general."""
    await space.add("ada")
    await space.add("bob")
    return space


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A shell with a home of its own; whatever it left running is stopped."""
    shell = Terminal(tmp_path)
    yield shell
    shell.close()
