"""Two spaces in one Spark application: a query each, and what happens to one does not reach the other."""

from __future__ import annotations

import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from crowd import check, clients, gathered, join, read_all, say
from tidings.delivery.job import DeliverJob
from tidings.delivery.several import POOL, SeveralJobs
from tidings.delivery.status import look
from tidings_testing.processes import child
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually
from tools.delivering import job_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
async def test_while_the_broker_of_one_space_is_gone_the_other_is_delivered_and_then_both_are(tmp_path: Path) -> None:
    root = tmp_path / "home"
    async with real_space(root, "main") as main, real_space(root, "lab") as lab, gathered(main) as mains:
        async with gathered(lab) as labs:
            for crowd in (mains, labs):
                await join(crowd["bob"], "team.>")
                await say(crowd["ada"], "team.0", "first")
        command = ["--home", str(root), "--space", "main", "--also", "lab", "--master", "local[2]"]
        command += ["--small-records", "0", "--lake", str(tmp_path / "lake")]
        async with child("-m", "tidings.delivery.process", *command) as job:
            ready: set[str] = set()
            while len(ready) < 2:
                said = await job.line(120)
                assert "error" not in said, said
                ready |= {said["space"]} if said.get("ready") else set()
            assert ready == {"main", "lab"}
            await delivered(main, lab)
            await lab.stop_steward()
            lab.broker.stop()
            while (said := await job.line(60)).get("space") != "lab" or "halted" not in said:
                assert "halted" not in said, said
            await say(mains["ada"], "team.0", "while the other is gone")
            await delivered(main)
            lab.broker.start()
            await lab.start_steward()
            async with clients(lab, ("ada", "bob")) as labs:
                await say(labs["ada"], "team.0", "back again")
                await delivered(main, lab)
                job.signal(signal.SIGTERM)
                assert await job.ended(60) == 0
                for space, crowd, count in ((main, mains, 2), (lab, labs, 2)):
                    boxes = await read_all({"bob": crowd["bob"]})
                    await check(space, {"bob": crowd["bob"]}, boxes)
                    assert (len(boxes["bob"].records), boxes["bob"].repeats) == (count, 0)
    assert sorted(path.name for path in (tmp_path / "lake").iterdir()) == ["lab", "main"]


async def delivered(*spaces: RealSpace) -> None:
    for space in spaces:
        await eventually(partial(is_done, space), within=60, what=f"{space.home.name} is delivered")


def is_done(space: RealSpace) -> bool:
    return look(space.home).behind == 0


async def test_the_batches_of_a_space_run_in_its_own_pool(
    spark: SparkSession, space: RealSpace, crowd: Any, tmp_path: Path
) -> None:
    pools: list[str | None] = []

    class Noting(DeliverJob):
        def _deliver(self, frame: DataFrame, number: int) -> None:
            pools.append(self.spark.sparkContext.getLocalProperty(POOL))
            super()._deliver(frame, number)

    await join(crowd["bob"], "team.>")
    await say(crowd["ada"], "team.0", "hello")
    jobs = SeveralJobs(spark, {"space-a": lambda: Noting(spark, job_settings(space, tmp_path))})
    thread = threading.Thread(target=jobs.run)
    thread.start()
    try:
        await eventually(lambda: jobs.has_worked, within=60, what="a batch is done")
    finally:
        jobs.stop()
        thread.join(60)
    assert set(pools) == {"space-a"}
