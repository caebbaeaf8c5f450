"""Delivery with its ledger in a real S3 store: on another machine than before, and on the store's bad days."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from crowd import Crowd, check, join, read_all, say
from object_store import SECRET, ObjectStore, object_store
from tidings.delivery.folders import HadoopFolder
from tidings.delivery.job import DeliverJob
from tidings.delivery.status import look
from tidings.delivery.stream_job import Checkpoint
from tidings.errors import PrerequisiteMissing
from tidings_testing.processes import child
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually
from tools.delivering import RunningJob, delivering, job_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(240)
#: a test does not wait as long as a driver does
HASTY = {"timeout": "2s", "max_retries": "1", "retry_timeout": "3s"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("store")) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@asynccontextmanager
async def delivering_to(
    store: ObjectStore, spark: SparkSession, space: RealSpace, machine: Path
) -> AsyncIterator[RunningJob]:
    """A driver with nothing of its own but a checkpoint; the tables of the space are in the store."""
    lake, storage = store.uri(space.info.id), store.options | HASTY
    async with delivering(spark, space, machine, lake=lake, storage=storage) as job:
        yield job


async def test_a_driver_on_another_machine_goes_on_with_what_the_store_knows(
    spark: SparkSession, space: RealSpace, crowd: Crowd, store: ObjectStore, tmp_path: Path
) -> None:
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    for n in range(6):
        await say(ada, f"team.{n % 2}", f"unread {n}")
    async with delivering_to(store, spark, space, tmp_path / "one") as job:
        await job.caught_up()
    boxes = await read_all({"bob": bob})
    await say(ada, "team.0", "while nobody delivers")
    async with delivering_to(store, spark, space, tmp_path / "two") as job:
        await say(ada, "team.1", "and on the other machine")
        await job.caught_up()
        assert job.job.tally.last_error is None, "there is nothing to tell anybody"
    assert not (tmp_path / "two" / "checkpoint" / "debts").exists()
    await read_all({"bob": bob}, boxes)
    boxes |= await read_all({"cal": cal})
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert [len(box.records) for box in boxes.values()] == [8, 8]
    assert [box.repeats for box in boxes.values()] == [0, 0]


@pytest.mark.parametrize("fault", ["403", *(pytest.param(each, marks=pytest.mark.slow) for each in ("503", "slow"))])
async def test_while_the_store_fails_delivery_halts_says_why_and_then_loses_and_repeats_nothing(
    spark: SparkSession, space: RealSpace, crowd: Crowd, store: ObjectStore, tmp_path: Path, fault: str
) -> None:
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    async with delivering_to(store, spark, space, tmp_path) as job:
        await say(ada, "team.0", "before")
        await job.caught_up()
        with store.failing(fault):
            await say(ada, "team.0", "meanwhile")
            await eventually(lambda: job.job.tally.last_error is not None, within=90, what="it halts")
            said = str(job.job.tally.last_error)
        await say(ada, "team.0", "afterwards")
        await job.caught_up(90)
    assert f"s3://lake/{space.info.id}/" in said
    assert ("cannot be" in said) or ("may be committed or not" in said)
    assert SECRET not in said
    boxes = await read_all({"bob": bob})
    await check(space, {"bob": bob}, boxes)
    assert (len(boxes["bob"].records), boxes["bob"].repeats) == (3, 0)


async def test_a_commit_that_the_store_made_and_denied_is_not_delivered_twice(
    spark: SparkSession, space: RealSpace, crowd: Crowd, store: ObjectStore, tmp_path: Path
) -> None:
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    async with delivering_to(store, spark, space, tmp_path) as job:
        with store.failing("done, and says 503", method="PUT", ending=".json"):
            await say(ada, "team.0", "once")
            await eventually(lambda: len(store.met()) > 1, within=60, what="a commit was denied, and tried again")
        await say(ada, "team.0", "and then")
        await job.caught_up(90)
    boxes = await read_all({"bob": bob})
    await check(space, {"bob": bob}, boxes)
    assert (len(boxes["bob"].records), boxes["bob"].repeats) == (2, 0)


@pytest.mark.slow
async def test_a_driver_that_starts_while_lists_lack_the_newest_commits_loses_nothing(
    spark: SparkSession, space: RealSpace, crowd: Crowd, store: ObjectStore, tmp_path: Path
) -> None:
    """Its ledger seems older than it is: what is unread may come again, and whoever has read it knows it."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    async with delivering_to(store, spark, space, tmp_path / "one") as job:
        for n in range(3):
            await say(ada, "team.0", f"before {n}")
            await job.caught_up()
    boxes = await read_all({"bob": bob})
    async with delivering_to(store, spark, space, tmp_path / "two") as job:
        with store.failing("lost list"):
            await say(ada, "team.0", "meanwhile")
            await eventually(lambda: len(store.met()) > 12, within=60, what="it met them")
        await say(ada, "team.0", "afterwards")
        await job.caught_up(90)
    await read_all({"bob": bob}, boxes)
    await check(space, {"bob": bob}, boxes)
    assert len(boxes["bob"].records) == 5


@pytest.mark.slow
async def test_the_process_takes_the_place_and_the_environment_and_writes_the_secret_nowhere(
    space: RealSpace, crowd: Crowd, store: ObjectStore
) -> None:
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    await say(ada, "team.0", "hello")
    lake = store.uri(f"process-{space.info.id}")
    command = ["--home", str(space.home.home), "--space", space.home.name, "--master", "local[1]", "--lake", lake]
    for key, value in (store.options | HASTY).items():
        command += ["--storage", f"{key}={value}"]
    async with child("-m", "tidings.delivery.process", *command, more=store.environment) as job:
        while not (said := await job.line(120)).get("ready"):
            assert "error" not in said, said
        await eventually(lambda: look(space.home).behind == 0, within=60, what="it is delivered")
        with store.failing("403"):
            await say(ada, "team.0", "while it refuses")
            while "halted" not in (said := await job.line(60)):
                pass
        assert "403" in said["halted"]
        await eventually(lambda: look(space.home).behind == 0, within=60, what="it is delivered")
        job.signal(signal.SIGTERM)
        assert await job.ended(60) == 0
    boxes = await read_all({"bob": bob})
    await check(space, {"bob": bob}, boxes)
    assert (len(boxes["bob"].records), boxes["bob"].repeats) == (2, 0)
    written = [path for path in (*space.home.logs.rglob("*"), *space.home.run.rglob("*.log")) if path.is_file()]
    assert any("403" in path.read_text(errors="replace") for path in written)
    assert not [path for path in written if SECRET in path.read_text(errors="replace")]


# --- the checkpoint ---


def test_a_checkpoint_that_this_spark_cannot_open_is_said_before_anything_starts(
    spark: SparkSession, space: RealSpace, tmp_path: Path
) -> None:
    settings = replace(job_settings(space, tmp_path), checkpoint="s3://team/cp")

    with pytest.raises(PrerequisiteMissing, match=r"cannot open the checkpoint s3a://team/cp/spark .*hadoop-aws"):
        DeliverJob(spark, settings)


def test_a_folder_through_hadoop_does_what_one_on_this_machine_does(spark: SparkSession, tmp_path: Path) -> None:
    """`tests/unit/delivery/test_checkpoint.py` has the same for a folder of this machine."""
    place = tmp_path / "checkpoint" / "spark"
    checkpoint = Checkpoint(HadoopFolder(spark, f"file://{place}"))
    assert (checkpoint.damage(), checkpoint.offsets(), checkpoint.pending()) == (None, [], None)
    checkpoint.retire()
    identity = checkpoint.identity()
    assert checkpoint.identity() == identity == (place / "tidings-id").read_text()
    (place / "offsets").mkdir()
    (place / "offsets" / "0").write_text('v1\n{}\n{"epoch":"e","seq":7,"mark":"m"}')
    assert (checkpoint.range_of(0), checkpoint.pending()) == ((None, 7), 0)
    assert [checkpoint.count_attempt(0) for _ in range(2)] == [1, 2]
    checkpoint.count_success()
    checkpoint.count_success()
    assert checkpoint.count_attempt(0) == 1
    (place / "offsets" / "1").write_bytes(b"\xff")
    assert checkpoint.damage() == "offsets/1 is not text"
    checkpoint.retire()
    assert checkpoint.identity() != identity
    assert len([path for path in place.parent.iterdir() if path.name.startswith("spark.")]) == 1
