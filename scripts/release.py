"""What a release of this version would do, and whether it can: `make release`. `make release RELEASE=1` does it.

Nothing is changed unless `--do` is given. A release needs one version everywhere (`pyproject.toml`, README and
`tidings.__version__`), a section `## VERSION - YYYY-MM-DD` in the changelog, a work tree without changes, and a tag
that is not there yet. It runs everything CI runs, builds the wheel and the source archive into `dist/`, and makes the
tag `vVERSION` with the section as its message. It uploads and pushes nothing: the last line says how. Ends with 1 if
something is in the way.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Release:
    version: str
    #: what the changelog says of it; empty if it says nothing
    notes: str
    #: what is in the way, as sentences
    problems: tuple[str, ...]

    @property
    def tag(self) -> str:
        return f"v{self.version}"

    @property
    def steps(self) -> list[list[str]]:
        return [["make", "test"], ["make", "dist"], ["git", "tag", "-a", self.tag, "-m", f"{self.tag}\n\n{self.notes}"]]


def section_of(changelog: str, version: str) -> str | None:
    """The dated section of a version, its heading left out."""
    dated = re.search(
        rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE
    )
    return dated[1].strip() if dated else None


def look(root: Path) -> Release:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    notes = section_of((root / "CHANGELOG.md").read_text(), version)
    problems = []
    if not notes:
        problems.append(
            f"CHANGELOG.md has no dated section for {version}: put its lines below `## {version} - YYYY-MM-DD`"
        )
    said = re.search(r'__version__ = "(.*)"', (root / "src" / "tidings" / "__init__.py").read_text())
    if said is None or said[1] != version:
        problems.append(f"tidings.__version__ is not {version}, which pyproject.toml has")
    wheels = set(re.findall(r"tidings-([0-9.]+)-py3", (root / "README.md").read_text()))
    problems += [f"README.md names the wheel of {other}, not that of {version}" for other in sorted(wheels - {version})]
    if git(root, "status", "--porcelain"):
        problems.append("the work tree has changes: commit them first")
    if git(root, "tag", "--list", f"v{version}"):
        problems.append(f"the tag v{version} exists: choose another version in pyproject.toml")
    return Release(version, notes or "", tuple(problems))


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def main(root: Path = ROOT, arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--do", action="store_true", help="do it, if nothing is in the way")
    chosen = parser.parse_args(arguments)
    release = look(root)
    print(f"Tidings {release.version}, tag {release.tag}\n\n{release.notes or '(nothing in the changelog)'}\n")
    for problem in release.problems:
        print(f"in the way: {problem}")
    if release.problems and chosen.do:
        return 1
    for step in release.steps:
        print(f"{'does' if chosen.do else 'would do'}: {' '.join(step).splitlines()[0]}", flush=True)
        if chosen.do:
            subprocess.run(step, cwd=root, check=True)
    print(f"then, by hand: git push origin {release.tag}; upload dist/* where people get it")
    return 1 if release.problems else 0


if __name__ == "__main__":
    sys.exit(main())
