"""The distributions of this repository belong together."""

import tomllib
from pathlib import Path

import pytest

import tidings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "packages").iterdir()))
def test_a_package_has_the_version_of_tidings_and_needs_exactly_that(name: str) -> None:
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    assert project["version"] == tidings.__version__
    assert f"tidings=={tidings.__version__}" in project["dependencies"]


def test_the_extra_doctor_brings_the_package_of_this_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["doctor"] == [f"tidings-testing=={tidings.__version__}"]
