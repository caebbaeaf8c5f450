"""Commands and programs need nothing that an extra brings: `pip install tidings` alone is enough for them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: what makes a page of the documentation is no command
NO_COMMANDS = ("__init__", "__main__")
COMMANDS = sorted({path.stem for path in (ROOT / "src/tidings/cli").glob("*.py")} - {*NO_COMMANDS})
WITHOUT_EXTRAS = (
    "tidings",
    "tidings.client.connect",
    "tidings.client.host_transport",
    *(f"tidings.cli.{each}" for each in COMMANDS),
)
PROGRAM = """
import importlib, sys
foreign = set(sys.argv[1].split(","))

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in foreign:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def with_what_they_need(wanted: list[str]) -> set[str]:
    """Distributions, and those that they bring along without an extra."""
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue
        wanted += [name_of(each) for each in needs if "extra ==" not in each]
    return found


def test_without_any_extra_everything_that_commands_import_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = with_what_they_need([name_of(each) for each in project["dependencies"]])
    foreign = [
        module
        for module, owners in packages_distributions().items()
        if module != "tidings" and not {owner.lower().replace("_", "-") for owner in owners} & base
    ]
    assert {"starlette", "uvicorn", "pyspark", "mcp"} <= set(foreign)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(foreign), *WITHOUT_EXTRAS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
