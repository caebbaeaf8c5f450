"""The home of links and the archive of classes: what they are made of, and when they are made anew."""

import os
import shlex
import subprocess
import zipfile
from pathlib import Path

import pytest

from tidings.delivery import spark_home
from tidings.delivery.session import look_for_java
from tidings.delivery.spark_home import ArchiveMaker, ClassArchive, lean_home
from tidings_testing.waiting import eventually


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the package of Spark looks like."""
    folder = tmp_path / "pyspark"
    for name in ("jars/spark-core.jar", "jars/spark-mllib_2.13.jar", "bin/spark-submit", "python/lib/pyspark.zip"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setattr(spark_home, "_package", lambda: folder)
    return folder


def test_a_lean_home_links_to_what_is_used_and_follows_the_package(package: Path, tmp_path: Path) -> None:
    home = lean_home(tmp_path / "work")
    assert home is not None
    assert sorted(path.name for path in home.iterdir()) == ["bin", "jars"]
    assert [path.name for path in (home / "jars").iterdir()] == ["spark-core.jar"]
    assert (home / "bin" / "spark-submit").read_text() == "bin/spark-submit"
    made = (home / "jars").stat().st_ino
    assert lean_home(tmp_path / "work") == home
    assert (home / "jars").stat().st_ino == made, "the order of jars is that of the folder: it stays as it is"
    (package / "jars" / "spark-core.jar").rename(package / "jars" / "spark-core-2.jar")
    lean_home(tmp_path / "work")
    assert [path.name for path in (home / "jars").iterdir()] == ["spark-core-2.jar"]


def test_a_spark_that_somebody_chose_is_left_as_it_is_and_our_own_is_not_somebodys(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del package
    home = lean_home(tmp_path / "work")
    monkeypatch.setenv("SPARK_HOME", str(home))
    assert lean_home(tmp_path / "work") == home
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert lean_home(tmp_path / "work") is None


def test_another_java_another_jar_and_other_options_make_another_archive(package: Path, tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.mkdir()
    (java / "release").write_text("17")

    def key(options: str = "-XX:+UseSerialGC") -> str:
        return ClassArchive.of(tmp_path, java, package, options).key

    first = key()
    assert key() == first
    keys = {first, key("-XX:+UseG1GC")}
    (java / "release").write_text("25.0.2")
    keys.add(key())
    os.utime(package / "jars" / "spark-core.jar", (1, 1))
    keys.add(key())
    assert len(keys) == 4


def test_the_first_start_lists_classes_and_later_ones_map_the_checked_archive(tmp_path: Path) -> None:
    archive, old = ClassArchive(tmp_path, "new"), ClassArchive(tmp_path, "old")
    assert archive.options() == f'"-XX:DumpLoadedClassList={archive.seen}"'
    for path in (old.path, archive.seen, archive.unfinished):
        path.touch()
    archive.finish()
    assert [path.name for path in tmp_path.iterdir()] == [archive.path.name], "those of other versions are gone"
    assert archive.options() == f'"-XX:SharedArchiveFile={archive.path}" -XX:+VerifySharedSpaces'
    assert (archive.discard(), archive.discard(), archive.path.exists()) == (True, False, False)


def test_an_archive_is_made_with_the_options_of_the_jvm_that_it_is_for(tmp_path: Path) -> None:
    archive = ClassArchive(tmp_path, "k")
    told = ["-Xmx700m", f"-XX:DumpLoadedClassList={archive.seen}", "--add-opens=java.base/java.lang=ALL-UNNAMED"]
    command = archive.command("/j/bin/java", told, "a.jar:b.jar")
    assert command[:3] == ["/j/bin/java", "-Xmx700m", "--add-opens=java.base/java.lang=ALL-UNNAMED"]
    assert command[-2:] == ["-cp", "a.jar:b.jar"]
    assert {"-Xshare:dump", f"-XX:SharedClassListFile={archive.seen}"} < set(command)


def maker(folder: Path, script: str) -> ArchiveMaker:
    """One whose JVM is a script."""
    archive = ClassArchive(folder, "k")
    return ArchiveMaker(archive, ["/bin/sh", "-c", script.format(target=archive.unfinished)], has_worked=lambda: True)


def test_an_archive_that_could_not_be_made_leaves_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    maker(tmp_path, "touch {target}; exit 3")._make()
    assert list(tmp_path.iterdir()) == []
    assert "code 3" in caplog.text
    maker(tmp_path, "touch {target}")._make()
    assert [path.name for path in tmp_path.iterdir()] == ["classes-k.jsa"]


async def test_making_an_archive_ends_when_the_session_does(tmp_path: Path) -> None:
    one = maker(tmp_path, "touch {target}; exec sleep 600")
    one.start(after=0.0)
    await eventually(lambda: list(tmp_path.iterdir()), within=20, what="it is being made")
    one.stop(within=20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["none", "truncated", "flipped", "empty"])
def test_java_starts_with_a_damaged_archive_and_knows_that_it_is(tmp_path: Path, damage: str) -> None:
    java = look_for_java()
    if java is None:
        pytest.skip("needs Java")
    program, archive = str(java.home / "bin" / "java"), ClassArchive(tmp_path, "k")
    archive.seen.write_text("".join(f"java/{name}\n" for name in ("lang/Object", "lang/String", "util/ArrayList")))
    jar = tmp_path / "empty.jar"
    with zipfile.ZipFile(jar, "w") as empty:
        empty.writestr("x", "")
    subprocess.run(archive.command(program, [], str(jar)), check=True, capture_output=True, timeout=120)
    archive.finish()
    content = bytearray(archive.path.read_bytes())
    content[len(content) // 2] ^= 1 if damage == "flipped" else 0
    archive.path.chmod(0o600)
    archive.path.write_bytes(content[: {"truncated": len(content) // 2, "empty": 0}.get(damage)])
    options = [*shlex.split(archive.options()), "-cp", str(jar)]
    started = subprocess.run([program, *options, "-version"], check=False, capture_output=True, timeout=60)
    assert started.returncode == 0
    insisting = subprocess.run([program, "-Xshare:on", *options, "-version"], capture_output=True, timeout=60)
    assert (insisting.returncode == 0) == (damage == "none"), insisting.stdout + insisting.stderr
