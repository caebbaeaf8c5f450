"""Delivery on a real standalone cluster: a master and two workers as processes, and no file of ours on any node."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from crowd import Crowd, check, join, read_all, say_on
from standalone_spark import StandaloneSpark, command_lines, packed, secrets_of, standalone_spark
from tidings.delivery.status import look
from tidings.server.nats_server import free_port
from tidings_testing.processes import child
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]
MESSAGES = 400
#: what a worker may not do, and where the first of them stops in the middle of its range
NO_FILE = """
def _read(option, path):
    raise AssertionError("a worker opened " + path)
"""
HOLD = """
import os as _os, pathlib as _pathlib, time as _time
_encode_partition, _notes = encode_partition, _pathlib.Path(%r)

def _executor():
    parent = _pathlib.Path(f"/proc/{_os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    return int(parent)

def _held(rows):
    for batch in rows:
        yield batch
        try:
            (_notes / "hold").rename(_notes / f"held-{_executor()}")
        except FileNotFoundError:
            continue
        _time.sleep(120)

def encode_partition(rules, rows):
    (_notes / f"worked-{_executor()}").touch()
    yield from _encode_partition(rules, _held(rows))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneSpark]:
    with standalone_spark(tmp_path_factory.mktemp("cluster") / "spark") as running:
        yield running


async def test_an_executor_killed_in_the_middle_of_a_batch_loses_and_repeats_nothing_and_nobody_sees_the_credential(
    cluster: StandaloneSpark, space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    await say_on(ada, [f"team.{n % 4}" for n in range(MESSAGES)])
    notes, events = tmp_path / "notes", tmp_path / "events"
    for folder in (notes, events):
        folder.mkdir()
    (notes / "hold").touch()
    shipped = packed(
        tmp_path / "tidings.zip", {"delivery/login.py": NO_FILE, "delivery/encoding.py": HOLD % str(notes)}
    )
    page = free_port()
    settings = {
        "spark.submit.pyFiles": shipped,
        "spark.executorEnv.PYTHONPATH": "",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.ui.enabled": "true",
        "spark.ui.port": page,
        "spark.log.level": "INFO",
    }
    command = ["--home", str(space.home.home), "--space", space.home.name, "--master", cluster.master]
    command += ["--small-records", "0"]
    for key, value in settings.items():
        command += ["--conf", f"{key}={value}"]
    said: list[str] = []
    async with child("-m", "tidings.delivery.process", *command, more=cluster.environment) as job:
        while not (line := await job.line(120)).get("ready"):
            assert not {"error", "warning"} & set(line), line
        await eventually(lambda: list(notes.glob("held-*")), within=60, what="a worker is in the middle of a batch")
        (held,) = notes.glob("held-*")
        victim = int(held.name.partition("-")[2])
        assert victim in cluster.executors().values()
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: look(space.home).behind == 0, within=120, what="everything is delivered")
        await say_on(ada, ["team.0"] * 20)
        await eventually(lambda: look(space.home).behind == 0, within=60, what="and what came later")
        said += [" ".join(words) for words, _ in command_lines()]
        said += pages(page)
        job.signal(signal.SIGTERM)
        assert await job.ended(60) == 0
    boxes = await read_all({"bob": bob, "cal": cal})
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert [len(box.records) for box in boxes.values()] == [MESSAGES + 20] * 2
    assert [box.repeats for box in boxes.values()] == [0, 0]
    workers = {int(path.name.partition("-")[2]) for path in notes.glob("worked-*")}
    assert victim in workers
    assert workers - {victim}, "another one did what the killed one had begun"
    seen = files_below(events, cluster.logs, space.home.logs, space.home.run, space.home.checkpoint, space.home.lake)
    assert any("SparkListenerSQLExecutionStart" in text or "spark.ui.port" in text for text in seen), "there are events"
    for secret in (*secrets_of(space.home.pipeline_creds), cluster.secret):
        assert not [text[:200] for text in (*said, *seen) if secret in text and not text.startswith("spark.authentic")]


def files_below(*folders: Path) -> list[str]:
    return [
        path.read_bytes().decode(errors="replace")
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.suffix not in (".jsa", ".zip", ".jar")
    ]


def pages(port: int) -> list[str]:
    """What anybody reads who looks at the application's pages."""
    root = f"http://127.0.0.1:{port}"
    names = ("environment/", "jobs/", "stages/", "executors/", "SQL/", "StreamingQuery/", "api/v1/applications")
    found = {name: fetched(f"{root}/{name}") for name in names}
    links = set(re.findall(r'href="/?((?:SQL/exec|jobs/job|stages/stage|StreamingQuery/stat)[^"]*)"', str(found)))
    assert links, "there is something to look at"
    (application,) = set(re.findall(r'"id" : "(app-[^"]+)"', found["api/v1/applications"]))
    links |= {f"api/v1/applications/{application}/{name}" for name in ("environment", "sql", "jobs")}
    return [*found.values(), *(fetched(f"{root}/{link.replace('&amp;', '&')}") for link in sorted(links))]


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())
