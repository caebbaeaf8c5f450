"""What makes Spark start in half the time: only the jars that are used, and an archive of their classes.

Spark comes with everything it can do. Of the jars in the package the pipeline uses two thirds; one of the others
(machine learning) puts functions of its own into every session, and that alone takes a third of a start. So a Spark
that runs in this process's JVM gets a home of links to what it needs. A Spark that somebody chose (`SPARK_HOME`) and
one that starts other processes are left as they are. The copy of its Python part that Spark brings as a zip is left out
too: workers would read and compile it at each start, and the package they have is the same.

The JVM reads, checks and links some 8,000 classes at each start. The first start writes down which; when it has
delivered, another JVM makes an archive of them in the background, which later ones map. It is in the private folder of
the session, because who can write it runs code here. Its name is made of all that it depends on: another Java or
another Spark makes another one. An archive is never needed: the JVM checks the sums in it and goes on without one that
is damaged, and a start that fails with one is tried again without (`session.py`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidings.server.nats_server import die_at_once_with_parent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
#: beginnings of the names of jars that the pipeline does not use: learning, Hive, clusters, Connect, other systems
LEFT_OUT = (
    *("spark-mllib", "spark-graphx", "breeze", "spire", "algebra_", "cats-", "arpack", "blas-", "lapack-"),
    *("JLargeArrays", "JTransforms", "spark-hive", "hive-", "derby", "datanucleus", "libthrift", "libfb303"),
    *("spark-kubernetes", "kubernetes-", "volcano-", "vertx-", "spark-yarn", "zookeeper", "curator"),
    *("spark-connect", "spark-pipelines", "spark-repl", "scala-compiler", "hk2", "jersey", "rocksdbjni"),
)
#: seconds after the query runs, so that whoever starts a space has the machine for itself
ARCHIVE_AFTER = 30.0
#: seconds that making one may take on a busy machine; it is the least urgent thing there
ARCHIVE_WITHIN = 900.0


def lean_home(work: Path) -> Path | None:
    """A home of Spark with the jars that are needed; None if somebody else chose one."""
    home, package = work / "home", _package()
    if package is None or os.environ.get("SPARK_HOME", str(home)) != str(home):
        return None
    wanted = dict(_links(package))
    if _found(home) != wanted:  # otherwise it stays: the order of the jars is that of the folder, and in the archive
        shutil.rmtree(home, ignore_errors=True)
        for name, target in wanted.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).symlink_to(target)
    return home


def _package() -> Path | None:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / "jars").is_dir():
        return None
    return Path(spec.origin).parent


def _links(package: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(package.iterdir()):
        if path.name not in ("jars", "python"):
            yield path.name, str(path)
    for jar in sorted((package / "jars").iterdir()):
        if not jar.name.startswith(LEFT_OUT):
            yield f"jars/{jar.name}", str(jar)


def _found(home: Path) -> dict[str, str]:
    try:
        paths = [path for path in (*home.iterdir(), *(home / "jars").iterdir()) if path != home / "jars"]
        return {str(path.relative_to(home)): str(path.readlink()) for path in paths}
    except OSError:
        return {}


def find_no_sources(session: SparkSession) -> None:
    """Before it uses a source Spark asks new processes which ones other packages have. Here all are registered."""
    jvm: Any = session._jvm
    manager = jvm.java.lang.Class.forName("org.apache.spark.sql.execution.datasources.DataSourceManager$")
    found = getattr(manager.getField("MODULE$").get(None), "dataSourceBuilders_$eq")
    found(jvm.scala.Some(jvm.PythonUtils.toScalaMap({})))


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """An archive for one Java, one Spark and one way to start them; `folder` is private."""

    folder: Path
    key: str

    @classmethod
    def of(cls, folder: Path, java: Path, spark: Path, options: str) -> ClassArchive:
        told = hashlib.sha256()
        for part in (*_java_facts(java), *_jar_facts(spark), options):
            told.update(f"{part}\0".encode())
        return cls(folder, told.hexdigest()[:16])

    @property
    def path(self) -> Path:
        return self.folder / f"classes-{self.key}.jsa"

    @property
    def seen(self) -> Path:
        """The list of classes that a start without an archive writes."""
        return self.folder / f"classes-{self.key}.list"

    def options(self) -> str:
        """For the JVM. It compares the sums of what it maps: a damaged archive is as good as none."""
        if self.path.is_file():
            return f'"-XX:SharedArchiveFile={self.path}" -XX:+VerifySharedSpaces'
        return f'"-XX:DumpLoadedClassList={self.seen}"'

    def discard(self) -> bool:
        """Was there one? There is none now."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True

    @property
    def unfinished(self) -> Path:
        return self.path.with_suffix(".new")

    def command(self, java: str, arguments: list[str], classpath: str) -> list[str]:
        """What makes it, told by a JVM that runs what it is for."""
        kept = [each for each in arguments if not each.startswith(("-XX:DumpLoadedClassList", "-XX:SharedArchiveFile"))]
        made = [
            "-Xshare:dump",
            "-XX:TieredStopAtLevel=1",
            f"-XX:SharedClassListFile={self.seen}",
            f"-XX:SharedArchiveFile={self.unfinished}",
        ]
        return [java, *kept, *made, "-cp", classpath]

    def finish(self) -> None:
        """From now on starts use it. Those of other versions are not used any more."""
        self.unfinished.replace(self.path)
        for each in self.folder.glob("classes-*"):
            if each != self.path:
                each.unlink(missing_ok=True)


def _java_facts(java: Path) -> Iterator[str]:
    yield str(java)
    for name in ("release", "lib/modules", "lib/server/libjvm.so"):
        with suppress(FileNotFoundError):
            facts = (java / name).stat()
            yield f"{name} {facts.st_size} {facts.st_mtime_ns}"


def _jar_facts(spark: Path) -> Iterator[str]:
    for jar in sorted((spark / "jars").iterdir()):
        facts = jar.stat()
        yield f"{jar} {facts.st_size} {facts.st_mtime_ns}"


class ArchiveMaker:
    """Makes an archive in the background, once Spark has done what its classes are for."""

    def __init__(self, archive: ClassArchive, command: list[str], has_worked: Callable[[], bool]) -> None:
        self._archive, self._has_worked = archive, has_worked
        self._command = command
        self._ended = threading.Event()
        self._not_before = 0.0
        self._thread = threading.Thread(target=self._run, name="class-archive", daemon=True)

    @classmethod
    def of(cls, session: SparkSession, archive: ClassArchive, has_worked: Callable[[], bool]) -> ArchiveMaker:
        jvm: Any = session._jvm
        told = [str(each) for each in jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()]
        properties = jvm.java.lang.System.getProperties()
        java = f"{properties.getProperty('java.home')}/bin/java"
        return cls(archive, archive.command(java, told, str(properties.getProperty("java.class.path"))), has_worked)

    def start(self, after: float = ARCHIVE_AFTER) -> None:
        """Whoever is ready again after a halt says so again."""
        if not self._not_before:
            self._not_before = time.monotonic() + after
            self._thread.start()

    def stop(self, within: float = 5.0) -> None:
        self._ended.set()
        if self._not_before:
            self._thread.join(within)

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            if time.monotonic() >= self._not_before and self._has_worked():
                try:
                    self._make()
                except OSError as error:
                    log.warning("no archive of classes, so the next start is as slow as this one: %s", error)
                return

    def _make(self) -> None:
        started = time.monotonic()
        with subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            preexec_fn=_yield_to_all,
        ) as process:
            try:
                while process.poll() is None and not self._ended.wait(0.2):
                    if time.monotonic() - started > ARCHIVE_WITHIN:
                        break
            finally:
                process.kill()
        if process.returncode == 0 and self._archive.unfinished.is_file():
            self._archive.finish()
            log.info("the next start is faster: its classes are in %s", self._archive.path.name)
        elif not self._ended.is_set():
            log.warning("no archive of classes, so the next start is as slow as this one: code %s", process.returncode)
        self._archive.unfinished.unlink(missing_ok=True)


def _yield_to_all() -> None:
    die_at_once_with_parent()
    os.nice(19)
