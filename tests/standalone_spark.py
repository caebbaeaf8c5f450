"""A real standalone cluster of Spark on loopback: a master and workers, each a process, with a secret of their own."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import tidings
from tidings.delivery.session import find_java
from tidings.server.nats_server import die_with_parent, free_port

START_SECONDS = 60.0
DAEMON = "org.apache.spark.deploy"
EXECUTOR = "CoarseGrainedExecutorBackend"


@dataclass
class StandaloneSpark:
    """`environment` is what a driver needs to know of the cluster; `secret` is what nobody may see."""

    master: str
    home: Path
    environment: dict[str, str]
    secret: str
    #: what the processes and their executors wrote
    logs: Path
    #: for whoever starts a JVM without Tidings
    java: dict[str, str]

    def executors(self) -> dict[str, int]:
        """Of whatever application, the ids of executors that run, and their processes."""
        found = {}
        for words, pid in command_lines():
            if any(EXECUTOR in word for word in words) and "--executor-id" in words:
                found[words[words.index("--executor-id") + 1]] = pid
        return found


def command_lines() -> Iterator[tuple[list[str], int]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_text(errors="replace").split("\0"), int(path.parent.name)


@contextmanager
def standalone_spark(folder: Path, workers: int = 2) -> Iterator[StandaloneSpark]:
    folder.mkdir(parents=True)
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    home, secret = Path(spec.origin).parent, secrets.token_hex(16)
    environment = {
        # a session of other tests in this process has set another one, with fewer jars
        "SPARK_HOME": str(home),
        "SPARK_CONF_DIR": str(_settings(folder / "conf", secret)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
    }
    java = {"JAVA_HOME": str(find_java(folder)), "SPARK_HOME": str(home)}
    port, page = free_port(), free_port()
    master = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        words = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(page)]
        stack.enter_context(_daemon(home, folder / "master.log", environment | java, "master.Master", words))
        _await_workers(page, 0)
        for number in range(workers):
            words = ["--host", "127.0.0.1", "--cores", "1", "--memory", "700m", "--webui-port", "0"]
            words += ["--work-dir", str(folder / f"worker-{number}"), master]
            log = folder / f"worker-{number}.log"
            stack.enter_context(_daemon(home, log, environment | java, "worker.Worker", words))
        _await_workers(page, workers)
        yield StandaloneSpark(master, home, environment, secret, folder, java)


def _settings(folder: Path, secret: str) -> Path:
    folder.mkdir()
    settings = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secret,
        "spark.network.crypto.enabled": "true",
        "spark.master.rest.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
    }
    path = folder / "spark-defaults.conf"
    path.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    path.chmod(0o600)
    return folder


@contextmanager
def _daemon(home: Path, log: Path, environment: Mapping[str, str], name: str, words: list[str]) -> Iterator[None]:
    command = [str(home / "bin" / "spark-class"), f"{DAEMON}.{name}", *words]
    known = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command, stdout=out, stderr=out, env={**known, **environment}, preexec_fn=die_with_parent
        ) as process,
    ):
        try:
            yield
        finally:
            process.terminate()  # a worker takes its executors along
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_workers(page: int, count: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{page}/json/", timeout=5) as answer:
            if json.load(answer)["aliveworkers"] >= count:
                return
        assert time.monotonic() < deadline, "the cluster does not start"
        time.sleep(0.2)


def packed(path: Path, additions: Mapping[str, str]) -> Path:
    """Tidings as one file to ship, with some words added to the end of some of its files."""
    package = Path(tidings.__file__).parent
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(package.rglob("*.py")):
            name = str(file.relative_to(package))
            archive.writestr(f"tidings/{name}", file.read_text() + additions.get(name, ""))
    return path


def secrets_of(creds: Path) -> list[str]:
    """The seed, and the token without which it is of no use."""
    found = [line for line in creds.read_text().splitlines() if re.fullmatch(r"SU[A-Z2-7]{56}|ey[\w.-]+", line)]
    assert len(found) == 2
    return found
