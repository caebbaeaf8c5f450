"""The distributions of this repository belong together."""

import tomllib
from pathlib import Path

import tidings

ROOT = Path(__file__).parents[2]


def test_pyspark_nats_has_the_version_of_tidings_and_needs_exactly_that() -> None:
    project = tomllib.loads((ROOT / "packages" / "pyspark-nats" / "pyproject.toml").read_text())["project"]
    assert project["version"] == tidings.__version__
    assert f"tidings=={tidings.__version__}" in project["dependencies"]
