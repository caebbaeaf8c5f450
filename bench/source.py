"""How quickly Spark reads a stream, against the same reader in a bare loop.

ratio   records per second: `spark.read.format("nats")`, warm, local[2], every payload in the JVM (`sum(length(data))`)
        / `StreamReader.read` in this process over one connection, adding up the lengths. 200,000 records of about 400
        bytes with signature headers, read whole each time; median of interleaved pairs.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from pyspark.sql import SparkSession

from measuring import bare_server, bare_stream, median_ratio, options, pairs, report
from tidings.broker.blocking import WorkerConnection
from tidings.broker.records import Missing
from tidings.pipeline.session import SessionSettings, start_session
from tidings.pipeline.source import NatsSource
from tidings.pipeline.stream_reader import StreamLocation, StreamReader
from tidings.wire.headers import encode_headers
from tidings.wire.ids import new_id

RECORDS = 200_000
PAYLOAD = b"x" * 400
WINDOW = 2_000


def fill(url: str) -> None:
    """Publish the records, so many under way at a time."""
    connection = WorkerConnection.open(url, timeout=30)
    answers = connection.replies()
    for done in range(0, RECORDS, WINDOW):
        connection.publish_all(
            (f"bare.ada.channel{index % 7}", encode_headers((("Td-Sig", "A" * 86), ("Nats-Msg-Id", new_id()))), PAYLOAD)
            for index in range(done, done + WINDOW)
        )
        for _ in range(WINDOW):
            if b'"error"' in next(answers).payload:
                raise RuntimeError("the bare stream refused a record")
    connection.close()


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
        for _ in range(2):
            spark_rate(spark, url)
        load = os.getloadavg()[0]

        async def ours() -> float:
            return spark_rate(spark, url)

        async def bare() -> float:
            return bare_rate(url)

        rates = await pairs(ours, bare, chosen.pairs)
    figures = {
        "ratio": round(median_ratio(*rates), 3),
        "spark_per_s": round(statistics.median(rates[0])),
        "bare_per_s": round(statistics.median(rates[1])),
        "ratios": [round(a / b, 3) for a, b in zip(*rates, strict=True)],
        "records": RECORDS,
        "pairs": chosen.pairs,
        "load": round(load, 1),
    }
    rows = [
        ("Spark, local[2]", f"{figures['spark_per_s']:,}/s"),
        ("bare reader loop", f"{figures['bare_per_s']:,}/s"),
        ("ratio (aim >= 0.7)", f"{figures['ratio']}   each: {json.dumps(figures['ratios'])}"),
    ]
    report("source: what Spark costs a reader", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
