"""A program of somebody who has `pyspark-nats` and registers nothing: reads, streams and writes with a password.

python plain_spark.py URL PASSWORD WORK

It writes as much as Spark can be made to say (every level of its log, its event log, plans, progress) below WORK, and
ends with one line of JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tidings.delivery.session import SessionSettings, start_session, stop_session

url, password, work = sys.argv[1], sys.argv[2], Path(sys.argv[3])
events = work / "events"
events.mkdir(parents=True)
spark = start_session(
    SessionSettings(
        work,
        master="local[1]",
        java="-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        more={"spark.eventLog.enabled": "true", "spark.eventLog.dir": f"file:{events}"},
    )
)
spark.sparkContext.setLogLevel("DEBUG")
login = {"url": url, "user": "ada", "password": password}
said: dict[str, Any] = {}
try:
    rows = spark.read.format("nats").options(**login, stream="logged").load()
    said["read"] = sorted(row.seq for row in rows.collect())
    rows.explain("extended")
    rows.createOrReplaceTempView("rows")
    spark.sql("explain formatted select * from rows").show(truncate=False)

    copies = rows.selectExpr("concat('logged.copy') subject", "concat('copy', seq) id", "data")
    copies.write.format("nats").options(**login).mode("append").save()

    batches: list[int] = []
    query = (
        spark.readStream.format("nats")
        .options(**login, stream="logged", maxRecordsPerTrigger="4")
        .load()
        .writeStream.foreachBatch(lambda frame, _number: batches.append(frame.count()))
        .option("checkpointLocation", str(work / "checkpoint"))
        .queryName("plain")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    query.explain(True)
    print(*(progress.json for progress in query.recentProgress))
    said["batches"] = batches

    from tidings.delivery.source import NatsSource  # as the pipeline of Tidings does, where both are installed

    spark.dataSource.register(NatsSource)
    again = spark.read.format("nats").options(**login, stream="logged").load()
    said["registered"] = again.count()
    wrong = login | {"password": f"{password}-wrong"}
    try:
        spark.read.format("nats").options(**wrong, stream="logged").load().collect()
    except Exception as error:
        said["refused"] = "AuthRevoked" in str(error)
        print(error)
finally:
    stop_session(spark)
print(json.dumps(said))
