"""The same delivery by `spark-submit`, with an archive of everything, on machines whose Python has nothing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tarfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crowd import Crowd, check, join, read_all, say_on
from standalone_spark import StandaloneSpark, secrets_of, standalone_spark
from tidings.delivery.package import FOLDER, build_package
from tidings.delivery.status import look
from tidings.server.nats_server import die_with_parent
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]


def bare_python(folder: Path) -> Path:
    """A Python without any package."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    lacks = subprocess.run([python, "-c", "import pyarrow"], capture_output=True, check=False, env={})
    assert lacks.returncode != 0
    return python


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneSpark]:
    with standalone_spark(tmp_path_factory.mktemp("cluster") / "spark") as running:
        yield running


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It is made before there is a space: that takes long, and a steward would miss its beats."""
    folder = tmp_path_factory.mktemp("package")
    path = build_package(folder / "tidings.tar.gz").path
    with tarfile.open(path) as packed:
        packed.extractall(folder / FOLDER, filter="data")
    return path


async def test_spark_submit_with_the_archive_delivers_where_no_machine_has_tidings(
    cluster: StandaloneSpark, archive: Path, space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    await say_on(ada, [f"team.{n % 4}" for n in range(100)])
    python = bare_python(tmp_path / "python")
    submitted = await submit(cluster, space, archive, python)
    try:
        driver = await ready(submitted)
        await eventually(lambda: look(space.home).behind == 0, within=90, what="everything is delivered")
        await say_on(ada, ["team.0"] * 5)
        await eventually(lambda: look(space.home).behind == 0, within=60, what="and what came later")
        assert str(python) in Path(f"/proc/{driver}/cmdline").read_text(), "the driver has nothing but the archive"
        submitted.terminate()
        await asyncio.wait_for(submitted.wait(), 60)
        await eventually(lambda: not Path(f"/proc/{driver}").exists(), within=60, what="the driver ends with it")
    finally:
        if submitted.returncode is None:
            submitted.kill()
            await submitted.wait()
    boxes = await read_all({"bob": bob, "cal": cal})
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert [(len(box.records), box.repeats) for box in boxes.values()] == [(105, 0)] * 2
    words = (archive.parent / "submit.log").read_text()
    assert "INFO MicroBatchExecution" in words, "Spark says what it does"
    assert not [secret for secret in secrets_of(space.home.pipeline_creds) if secret in words]


async def submit(cluster: StandaloneSpark, space: RealSpace, archive: Path, python: Path) -> asyncio.subprocess.Process:
    """From the folder where the archive is unpacked."""
    folder = archive.parent
    command: list[str | Path] = [
        cluster.home / "bin" / "spark-submit",
        "--master",
        cluster.master,
        "--archives",
        f"{archive}#{FOLDER}",
    ]
    command += ["--conf", f"spark.executorEnv.PYTHONPATH={FOLDER}", f"{FOLDER}/tidings/delivery/submit.py"]
    command += ["--home", space.home.home, "--space", space.home.name, "--small-records", "0"]
    chosen = {
        "PYTHONPATH": FOLDER,
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        **cluster.environment,
        **cluster.java,
    }
    with (folder / "submit.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env={**os.environ, **chosen},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            preexec_fn=die_with_parent,
        )


async def ready(submitted: asyncio.subprocess.Process) -> int:
    """The process of the driver, once it delivers. It found a Spark that is guarded."""
    assert submitted.stdout is not None
    while True:
        line = await asyncio.wait_for(submitted.stdout.readline(), 120)
        assert line, "spark-submit ended"
        if not line.startswith(b"{"):
            continue
        said: dict[str, Any] = json.loads(line)
        assert not {"error", "warning", "halted"} & set(said), said
        if said.get("ready"):
            return int(said["pid"])
