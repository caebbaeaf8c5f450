"""Rows become messages: in order per subject, once per id, and not at all under a lease that is gone."""

from collections import defaultdict
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from bare import BareServer
from tidings.delivery.stream_reader import StreamLocation, StreamReader
from tidings.wire.records import Headers, StoredRecord, encode_headers


def stored(bare: BareServer, stream: str) -> list[StoredRecord]:
    reader = StreamReader(StreamLocation(bare.url, None, stream))
    try:
        items = list(reader.read(1, reader.state().last))
    finally:
        reader.close()
    return [item for item in items if isinstance(item, StoredRecord)]


def rows(spark: SparkSession, stream: str, count: int) -> DataFrame:
    return spark.range(count, numPartitions=2).selectExpr(
        f"concat('{stream}.s', cast(id % 3 as string)) subject",
        "concat('id-', cast(id as string)) id",
        "cast(cast(id as string) as binary) data",
        "map('X-Row', cast(id as string)) headers",
    )


@pytest.mark.parametrize("order", ["pipelined", "strict"])
def test_every_row_is_stored_once_in_order_per_subject_and_a_repeat_is_recognised(
    spark: SparkSession, bare: BareServer, order: str
) -> None:
    stream = bare.stream(f"sink-{order}")
    for _ in range(2):  # the second time as a retry would
        rows(spark, stream, 60).write.format("nats").options(url=bare.url, order=order).mode("append").save()
    found = stored(bare, stream)
    assert sorted(int(record.payload) for record in found) == list(range(60))
    # Two partitions publish at the same time: the order holds within each.
    lanes: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for record in found:
        lanes[record.subject, int(record.payload) < 30].append(int(record.payload))
        fields = dict(Headers.parse(record.own_block).fields)
        assert fields == {"Nats-Msg-Id": f"id-{record.payload.decode()}", "X-Row": record.payload.decode()}
    assert all(lane == sorted(lane) for lane in lanes.values())
    assert len(lanes) == 6


def test_a_stale_fence_stores_nothing(spark: SparkSession, bare: BareServer) -> None:
    bare.stream("fenced")
    lease = ("fenced.lease", encode_headers([]), b"mine")
    bare.publish([lease])
    writer = rows(spark, "fenced", 6).write.format("nats").option("url", bare.url).option("leaseSubject", lease[0])
    writer.option("leaseSeq", "1").mode("append").save()
    assert len(stored(bare, "fenced")) == 7
    bare.publish([lease])
    fresh = rows(spark, "fenced", 6).selectExpr("subject", "concat('new-', id) id", "data")
    with pytest.raises(PySparkException, match="LeaseLost"):
        fresh.write.format("nats").option("url", bare.url).option("leaseSubject", lease[0]).option(
            "leaseSeq", "1"
        ).mode("append").save()
    assert len(stored(bare, "fenced")) == 8


def test_a_refusal_fails_the_query_and_is_not_skipped(spark: SparkSession, bare: BareServer) -> None:
    bare.stream("full", max_msgs=4, discard="new")
    with pytest.raises(PySparkException, match="and no more: maximum messages exceeded"):
        rows(spark, "full", 9).write.format("nats").option("url", bare.url).mode("append").save()
    assert len(stored(bare, "full")) == 4


def test_rows_without_what_a_message_needs_are_refused(spark: SparkSession, bare: BareServer) -> None:
    with pytest.raises(PySparkException, match="id is not there"):
        rows(spark, "sink", 1).drop("id").write.format("nats").option("url", bare.url).mode("append").save()
    with pytest.raises(PySparkException, match="only appends"):
        rows(spark, "sink", 1).write.format("nats").option("url", bare.url).mode("overwrite").save()
    with pytest.raises(PySparkException, match=r"the nats sink has no option stream: it has .*leaseSeq.*tlsKey"):
        rows(spark, "sink", 1).write.format("nats").options(url=bare.url, stream="sink").mode("append").save()


def test_what_was_read_is_written_with_its_headers_as_they_were(spark: SparkSession, bare: BareServer) -> None:
    bare.stream("original")
    bare.stream("copy")
    block = encode_headers([("A", "1"), ("B", "2"), ("A", "3")])
    bare.publish([("original.x", block, b"one")])
    frame = spark.read.format("nats").options(url=bare.url, stream="original", headersAs="map").load()
    copied = frame.selectExpr("cast(seq as string) id", "data", "headers")
    copied.write.format("nats").options(url=bare.url, subject="copy.x").mode("append").save()
    (record,) = stored(bare, "copy")
    assert (record.subject, record.payload) == ("copy.x", b"one")
    assert Headers.parse(record.own_block).fields == (("Nats-Msg-Id", "1"), ("A", "1"), ("A", "3"), ("B", "2"))


def test_a_query_copies_a_stream_into_another_once(spark: SparkSession, bare: BareServer, tmp_path: Path) -> None:
    bare.stream("from_", 9)
    bare.stream("to_")
    for checkpoint in ("one", "two"):  # a lost checkpoint publishes everything again
        frame = spark.readStream.format("nats").option("url", bare.url).option("stream", "from_").load()
        copied = frame.selectExpr("concat('to_.', seq % 2) subject", "cast(seq as string) id", "data")
        query = (
            copied.writeStream.format("nats")
            .option("url", bare.url)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
    found = stored(bare, "to_")
    assert sorted(dict(Headers.parse(r.own_block).fields)["Nats-Msg-Id"] for r in found) == [
        str(s) for s in range(1, 10)
    ]
