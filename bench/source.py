"""How quickly Spark reads and writes a stream, against the same reader and publisher in a bare loop.

ratio          records per second: `spark.read.format("nats")`, warm, local[2], every payload in the JVM
               (`sum(length(data))`) / `StreamReader.read` in this process over one connection, adding up the lengths.
               200,000 records of about 400 bytes with signature headers, read whole each time
measure_ratio  records per second: `admission.measure`, what a bound in bytes costs the driver when it must look / the
               same bare reader
sink_ratio     rows per second: `df.write.format("nats")`, pipelined, one partition, one subject, 100,000 rows of 400
               bytes / `publish_all` in this process with as many under way, every acknowledgement looked at
sink_strict_per_s   the same with `order=strict`, 10,000 rows, once: each waits for the one before

Medians of interleaved pairs.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path

from pyspark.sql import SparkSession

from measuring import bare_server, bare_stream, median_ratio, options, pairs, report
from tidings.delivery.batch_sizing import measure
from tidings.delivery.session import SessionSettings, start_session
from tidings.delivery.source import NatsSource
from tidings.delivery.stream_reader import StreamLocation, StreamReader
from tidings.nats.core import header_block
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.server.streams import MINUTE_NS
from tidings.wire.message import new_id
from tidings.wire.records import Missing, encode_headers

RECORDS = 200_000
PAYLOAD = b"x" * 400
WINDOW = 2_000
ROWS = 100_000
STRICT_ROWS = 10_000


def publish(url: str, messages: Iterable[tuple[str, bytes, bytes]]) -> None:
    """Publish messages, so many under way at a time."""
    connection = WorkerConnection.open(url, timeout=30)
    answers = connection.replies()
    messages = iter(messages)
    while window := list(islice(messages, WINDOW)):
        connection.publish_all(window)
        for _ in window:
            if b'"error"' in next(answers).payload:
                raise RuntimeError("the bare stream refused a record")
    connection.close()


def fill(url: str) -> None:
    publish(
        url,
        (
            (f"bare.ada.channel{index % 7}", encode_headers((("Td-Sig", "A" * 86), ("Nats-Msg-Id", new_id()))), PAYLOAD)
            for index in range(RECORDS)
        ),
    )


def sink_stream(url: str) -> None:
    """Another stream beside the one that is read: subjects `sink.>`."""
    connection = WorkerConnection.open(url, timeout=30)
    config = {"name": "SINK", "subjects": ["sink.>"], "duplicate_window": 10 * MINUTE_NS}
    reply = connection.request("$JS.API.STREAM.CREATE.SINK", json.dumps(config).encode())
    connection.close()
    if b'"error"' in reply.payload:
        raise RuntimeError(reply.payload.decode())


def bare_publish_rate(url: str) -> float:
    run = new_id()
    started = time.perf_counter()
    publish(url, (("sink.one", header_block([("Nats-Msg-Id", f"{run}{n}")]), PAYLOAD) for n in range(ROWS)))
    return ROWS / (time.perf_counter() - started)


def sink_rate(spark: SparkSession, url: str, rows: int = ROWS, order: str = "pipelined") -> float:
    frame = spark.range(rows, numPartitions=1).selectExpr(
        "'sink.one' subject", f"concat('{new_id()}', id) id", f"cast(repeat('x', {len(PAYLOAD)}) as binary) data"
    )
    started = time.perf_counter()
    frame.write.format("nats").options(url=url, order=order).mode("append").save()
    return rows / (time.perf_counter() - started)


def measure_rate(url: str) -> float:
    reader = StreamReader(StreamLocation(url, None, "BARE"))
    started = time.perf_counter()
    found = measure(reader, (">",), 1, RECORDS, 1 << 40)
    seconds = time.perf_counter() - started
    reader.close()
    assert len(found.seqs) == RECORDS
    return RECORDS / seconds


def bare_rate(url: str) -> float:
    reader = StreamReader(StreamLocation(url, None, "BARE"))
    started = time.perf_counter()
    total = sum(len(r.payload) for r in reader.read(1, RECORDS) if not isinstance(r, Missing))
    seconds = time.perf_counter() - started
    reader.close()
    assert total == RECORDS * len(PAYLOAD)
    return RECORDS / seconds


def spark_rate(spark: SparkSession, url: str) -> float:
    frame = spark.read.format("nats").option("url", url).option("stream", "BARE").load()
    started = time.perf_counter()
    count, total = frame.selectExpr("count(*)", "sum(length(data))").collect()[0]
    seconds = time.perf_counter() - started
    assert (count, total) == (RECORDS, RECORDS * len(PAYLOAD))
    return RECORDS / seconds


async def main() -> None:
    chosen = options(__doc__ or "")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = await stack.enter_async_context(bare_server())
        await bare_stream(url)
        fill(url)
        spark = start_session(SessionSettings(folder, master="local[2]"))
        stack.callback(spark.stop)
        spark.dataSource.register(NatsSource)
        sink_stream(url)
        for _ in range(2):
            spark_rate(spark, url)
            sink_rate(spark, url)
        load = os.getloadavg()[0]

        async def in_turn(measured: Callable[[], float], bare: Callable[[], float]) -> tuple[list[float], list[float]]:
            async def ours() -> float:
                return measured()

            async def theirs() -> float:
                return bare()

            return await pairs(ours, theirs, chosen.pairs)

        reads = await in_turn(lambda: spark_rate(spark, url), lambda: bare_rate(url))
        measures = await in_turn(lambda: measure_rate(url), lambda: bare_rate(url))
        writes = await in_turn(lambda: sink_rate(spark, url), lambda: bare_publish_rate(url))
        strict = sink_rate(spark, url, STRICT_ROWS, "strict")
    figures = {
        "ratio": round(median_ratio(*reads), 3),
        "spark_per_s": round(statistics.median(reads[0])),
        "bare_per_s": round(statistics.median(reads[1])),
        "ratios": [round(a / b, 3) for a, b in zip(*reads, strict=True)],
        "measure_ratio": round(median_ratio(*measures), 3),
        "measure_per_s": round(statistics.median(measures[0])),
        "sink_ratio": round(median_ratio(*writes), 3),
        "sink_per_s": round(statistics.median(writes[0])),
        "sink_bare_per_s": round(statistics.median(writes[1])),
        "sink_ratios": [round(a / b, 3) for a, b in zip(*writes, strict=True)],
        "sink_strict_per_s": round(strict),
        "records": RECORDS,
        "rows": ROWS,
        "pairs": chosen.pairs,
        "load": round(load, 1),
    }
    rows = [
        ("Spark reads, local[2]", f"{figures['spark_per_s']:,}/s"),
        ("bare reader loop", f"{figures['bare_per_s']:,}/s"),
        ("ratio (aim >= 0.7)", f"{figures['ratio']}   each: {json.dumps(figures['ratios'])}"),
        ("a range is measured", f"{figures['measure_per_s']:,}/s, {figures['measure_ratio']} of the bare reader"),
        ("Spark writes one subject", f"{figures['sink_per_s']:,}/s (aim 50,000)"),
        ("bare publisher loop", f"{figures['sink_bare_per_s']:,}/s"),
        ("sink ratio", f"{figures['sink_ratio']}   each: {json.dumps(figures['sink_ratios'])}"),
        ("Spark writes it strictly", f"{figures['sink_strict_per_s']:,}/s"),
    ]
    report("source: what Spark costs a reader and a writer", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
