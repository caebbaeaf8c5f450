"""`make release`: what it finds in the way, what it would do, and that it does nothing unless told to."""

import subprocess
from pathlib import Path

import pytest
import yaml

from release import look, main, section_of

ROOT = Path(__file__).parents[3]
CHANGELOG = """# Changelog

## Unreleased
- later

## 1.2.0 - 2026-11-17

### Added
- a thing

## 1.1.0 - 2026-01-01
- old
"""


def git(root: Path, *words: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    return subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A version that can be released."""
    (tmp_path / "src" / "tidings").mkdir(parents=True)
    (tmp_path / "src" / "tidings" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "README.md").write_text("pipx install tidings-1.2.0-py3-none-any.whl\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def test_a_release_is_shown_and_nothing_is_changed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(repository, []) == 0
    said = capsys.readouterr().out
    assert "Tidings 1.2.0, tag v1.2.0\n\n### Added\n- a thing\n" in said
    for step in ("make test", "make dist", "git tag -a v1.2.0"):
        assert f"would do: {step}" in said
    assert git(repository, "tag") == git(repository, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("file", "before", "after", "words"),
    [
        ("CHANGELOG.md", "## 1.2.0 - 2026-11-17", "## 1.2.0", "CHANGELOG.md has no dated section for 1.2.0: put"),
        ("src/tidings/__init__.py", "1.2.0", "1.1.0", "tidings.__version__ is not 1.2.0"),
        ("README.md", "1.2.0", "1.1.0", "README.md names the wheel of 1.1.0"),
    ],
)
def test_what_is_in_the_way_is_said_and_stops_it(
    repository: Path, capsys: pytest.CaptureFixture[str], file: str, before: str, after: str, words: str
) -> None:
    path = repository / file
    path.write_text(path.read_text().replace(before, after))
    git(repository, "commit", "-qam", "changed")
    assert main(repository, []) == 1
    assert "would do: make test" in capsys.readouterr().out
    assert main(repository, ["--do"]) == 1
    said = capsys.readouterr().out
    assert f"in the way: {words}" in said
    assert "make" not in said
    assert git(repository, "tag") == ""


def test_changes_and_a_tag_that_exists_are_in_the_way(repository: Path) -> None:
    git(repository, "tag", "v1.2.0")
    (repository / "new").touch()
    assert [problem.split(":")[0] for problem in look(repository).problems] == [
        "the work tree has changes",
        "the tag v1.2.0 exists",
    ]


def test_a_section_ends_where_the_next_begins() -> None:
    assert section_of(CHANGELOG, "1.2.0") == "### Added\n- a thing"
    assert section_of(CHANGELOG, "1.1.0") == "- old"
    assert section_of(CHANGELOG, "1.2") is None


def test_ci_and_the_hook_run_what_people_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in repo["hooks"]] == ["make check"]
