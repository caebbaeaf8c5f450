"""S1: a session of Spark as the pipeline starts it gives nothing to another user of the machine."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tidings.delivery.session import unguarded
from tidings_testing.security.machine import attack, surface_of
from tidings_testing.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]


def open_files(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if stat.S_IMODE(path.lstat().st_mode) & 0o077]


async def test_every_port_of_a_running_query_refuses_another_user_and_a_guessable_object_would_be_found(
    spark: "SparkSession", tmp_path: Path
) -> None:
    gateway: Any = spark.sparkContext._gateway
    seen: list[int] = []
    query = (
        spark.readStream.format("rate")
        .load()
        .writeStream.foreachBatch(lambda frame, _number: seen.append(frame.count()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        await eventually(lambda: seen, within=60, what="Java calls the function of a batch")
        jvm = gateway.proc.pid
        found = surface_of([os.getpid(), jvm])
        assert {os.getpid(), jvm} == set(found.ports.values()), "the gateway, the driver, its blocks, the callbacks"
        told = await attack(found, [str(tmp_path)])
        assert told["found"] == []
        assert told["uid"] != 0, "as somebody else where this may be"
        assert unguarded(spark) is None

        gateway.gateway_property.pool.put(object(), force_id="p0")
        weak = await attack(found, [])
        assert len(weak["found"]) == 1
        assert "p0 is called by anybody" in weak["found"][0]
    finally:
        query.stop()
        assert open_files(tmp_path / "checkpoint") == [], "whatever the umask, Hadoop sets modes of its own"
        pool = gateway.gateway_property.pool
        pool.dict.pop("p0", None)
    assert all(len(name) > 30 for name in pool.dict)
