"""A stream as a Spark table: every record of it once, however it is cut, and never silence about what is gone."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from bare import BareServer
from tidings_testing.real_space import RealSpace

Load = Callable[..., DataFrame]


@pytest.fixture
def load(spark: SparkSession, bare: BareServer) -> Load:
    def load(stream: str, **options: object) -> DataFrame:
        reader = spark.read.format("nats").option("url", bare.url).option("stream", stream)
        return reader.options(**{key: str(value) for key, value in options.items()}).load()

    return load


def in_order(frame: DataFrame) -> list[Any]:
    """Its rows by sequence, sorted here: Spark would read the stream twice for it."""
    return sorted(frame.collect(), key=lambda row: row.seq)


class Query:
    """A streaming query into a list, run to the end of what is there with one checkpoint."""

    def __init__(self, spark: SparkSession, bare: BareServer, stream: str, checkpoint: Path, **options: object) -> None:
        self.batches: list[list[Any]] = []
        reader = spark.readStream.format("nats").option("url", bare.url).option("stream", stream)
        self.frame = reader.options(**{key: str(value) for key, value in options.items()}).load()
        self._checkpoint = checkpoint

    def run(self) -> list[int]:
        """Until everything there was at the start is read (`availableNow`); answers the sequences of this run."""
        self.batches = []

        def take(frame: DataFrame, _: int) -> None:
            self.batches.append(in_order(frame))

        query = (
            self.frame.writeStream.foreachBatch(take)
            .option("checkpointLocation", str(self._checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
        return [row.seq for batch in self.batches for row in batch]


def test_ranges_filters_and_partitions_hold_every_record_once(bare: BareServer, load: Load) -> None:
    bare.stream("batch", 25)
    for options, expected in (
        ({}, range(1, 26)),
        ({"start": 5, "end": 20, "partitionRecords": 4}, range(5, 21)),
        ({"start": 25, "partitionRecords": 1}, [25]),
        ({"end": 1_000, "partitionRecords": 7}, range(1, 26)),
        ({"start": 26}, []),
        ({"subject": "batch.c1", "partitionRecords": 6}, [s for s in range(1, 26) if s % 3 == 2]),
    ):
        rows = load("batch", **options).collect()
        assert sorted(row.seq for row in rows) == list(expected), options


def test_a_row_is_the_record_as_it_was_stored(bare: BareServer, load: Load) -> None:
    block = b"NATS/1.0\r\nTd-Sig: abc\r\nX: y\r\n\r\n"
    bare.stream("row")
    bare.publish([("row.a.b", block, b"\x00\xffpayload")])
    (row,) = load("row").collect()
    info = bare.api("STREAM.MSG.GET.row", {"seq": 1})["message"]
    assert (row.seq, row.subject, bytes(row.headers), bytes(row.data)) == (1, "row.a.b", block, b"\x00\xffpayload")
    assert (row.missing, row.time_ns // 1_000) == (None, int(row.time.timestamp() * 1e6 + 0.5))
    assert str(row.time_ns)[-9:].rstrip("0") in info["time"]


def test_missing_sequences_are_an_error_or_rows_or_skipped_as_asked(bare: BareServer, load: Load) -> None:
    bare.stream("gaps", 12)
    for seq in (1, 4, 5, 12):
        bare.api("STREAM.MSG.DELETE.gaps", {"seq": seq})
    present = [s for s in range(1, 12) if s not in (1, 4, 5)]
    with pytest.raises(PySparkException, match=r"LogGap: gaps has lost 4\.\.5"):
        load("gaps").collect()
    assert [row.seq for row in in_order(load("gaps", missing="skip"))] == present
    rows = in_order(load("gaps", missing="rows"))
    assert [(row.seq, row.missing) for row in rows if row.missing is not None] == [(4, 5), (12, 12)]
    assert [row.seq for row in rows if row.missing is None] == present


def test_wrong_options_are_said_before_anything_is_read(load: Load) -> None:
    with pytest.raises(PySparkException, match="option missing is 'perhaps'"):
        load("batch", missing="perhaps").collect()
    with pytest.raises(PySparkException, match="no stream 'nowhere'"):
        load("nowhere").collect()
    with pytest.raises(PySparkException, match=r"the nats source has no option maxbytes: it has .*maxBytesPerTrigger"):
        load("batch", maxBytes=1)


def test_a_query_continues_exactly_where_its_checkpoint_says(
    spark: SparkSession, bare: BareServer, tmp_path: Path
) -> None:
    bare.stream("going", 10)
    options = {"maxRecords": 4, "partitionRecords": 3}
    assert Query(spark, bare, "going", tmp_path, **options).run() == list(range(1, 11))
    bare.fill("going", 7)
    again = Query(spark, bare, "going", tmp_path, **options)
    assert again.run() == list(range(11, 18))
    assert [len(batch) for batch in again.batches] == [4, 3]  # admission control
    assert again.run() == []
    offset = json.loads((tmp_path / "offsets" / "4").read_text().splitlines()[-1])
    assert (offset["seq"], set(offset)) == (17, {"epoch", "seq", "mark"})


def test_a_query_starts_at_its_start_and_follows_its_filter(
    spark: SparkSession, bare: BareServer, tmp_path: Path
) -> None:
    bare.stream("begin", 12)
    assert Query(spark, bare, "begin", tmp_path, start=6, subject="begin.c0").run() == [7, 10]


def test_a_query_with_a_bound_in_bytes_takes_a_skewed_backlog_in_batches_below_it(
    spark: SparkSession, bare: BareServer, tmp_path: Path
) -> None:
    bare.stream("backlog", 400)
    bare.fill("backlog", 20, data=b"x" * 50_000)
    bare.fill("backlog", 3)
    options = {"maxBytesPerTrigger": "200k", "minPartitions": 2, "headersAs": "map", "startingOffsets": 101}
    query = Query(spark, bare, "backlog", tmp_path, **options)
    assert query.run() == list(range(101, 424))
    sizes = [sum(len(row.data) for row in batch) for batch in query.batches]
    assert max(sizes) <= 200 << 10
    assert len(sizes) >= 5
    assert query.batches[0][0].headers == {"Td-Sig": ["A" * 86]}


def test_a_query_begins_at_the_end_or_at_a_time_when_its_checkpoint_is_new_and_only_then(
    spark: SparkSession, bare: BareServer, tmp_path: Path
) -> None:
    bare.stream("late", 5)
    when = datetime.now(UTC).isoformat()
    latest = Query(spark, bare, "late", tmp_path / "latest", startingOffsets="latest")
    assert latest.run() == []
    bare.fill("late", 3)
    assert latest.run() == [6, 7, 8]
    timed = Query(spark, bare, "late", tmp_path / "timed", startingOffsets=when, subjects="late.c0,late.c2")
    assert timed.run() == [6, 8]


def test_what_is_purged_before_a_query_read_it_is_an_error_and_not_silence(
    spark: SparkSession, bare: BareServer, tmp_path: Path
) -> None:
    bare.stream("purged", 5)
    query = Query(spark, bare, "purged", tmp_path)
    assert query.run() == [1, 2, 3, 4, 5]
    bare.fill("purged", 5)
    bare.api("STREAM.PURGE.purged", {"seq": 9})
    with pytest.raises(PySparkException, match=r"LogGap: purged has lost 6\.\.8"):
        query.run()


def test_a_stream_made_anew_is_a_regression_and_not_silence(
    spark: SparkSession, bare: BareServer, tmp_path: Path
) -> None:
    bare.stream("anew", 5)
    query = Query(spark, bare, "anew", tmp_path)
    query.run()
    bare.api("STREAM.DELETE.anew")
    bare.stream("anew", 3)
    with pytest.raises(PySparkException, match="LogRegressed: anew went backwards: it ends at 3, 5 was read before"):
        query.run()
    bare.fill("anew", 4)  # longer than before: only the epoch tells
    with pytest.raises(PySparkException, match="LogRegressed: anew has another record at 5"):
        query.run()


async def test_the_log_of_a_space_is_read_with_a_credentials_file(
    spark: SparkSession, space: RealSpace, tmp_path: Path
) -> None:
    await space.add("ada")
    reader = spark.read.format("nats").option("url", space.info.url).option("stream", space.subjects.log_stream)
    with pytest.raises(PySparkException, match=r"AuthRevoked|Authorization"):
        reader.load().collect()
    rows = reader.option("creds", str(space.home.creds / "pipeline.creds")).option("missing", "skip").load().collect()
    async with space.core() as js:
        last = (await js.info(space.subjects.log_stream))["state"]["last_seq"]
    assert max(row.seq for row in rows) == last
    assert any(row.subject.startswith("td.main.acl.") for row in rows)
