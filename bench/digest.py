"""What digests cost, against hashing alone.

digest_ratio     seconds of `ChannelDigests.of` over 1,000,000 ids / of SHA-256 of the same bytes and nothing else;
                 20 channels, 30 days, 200 senders, the hashes of the payloads given, as a ledger has them
digest_s         those seconds
compare_ms       a comparison of two such sides that differ in 100 messages, from digests that are there: the questions,
                 the buckets and the ids of what differs, without a network
compare_questions   how many questions that took, and `compare_ids` how many ids were handed over
spark_ratio      seconds of `delivery/digests.py` over 1,000,000 messages of 400 bytes from Parquet, local[2], warm
                 / of the same table with SHA-256 of each payload and each item and nothing else

Medians of interleaved pairs.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  how Spark's own documentation calls it

from measuring import median_ratio, note, options, pairs, report
from tidings.delivery.digests import digests
from tidings.delivery.session import SessionSettings, start_session, stop_session
from tidings.links.compare import MOST_IDS, Comparison
from tidings.wire.digests import (
    BucketsAnswer,
    ChannelDigests,
    DigestAnswer,
    IdsAnswer,
    RecordIdentity,
    bucket_of,
    day_of,
    item_hash,
)

IDS, CHANNELS, DAYS, SENDERS, APART = 1_000_000, 20, 30, 200, 100
Said = tuple[str, str, str, str, bytes]
TABLE = [
    f"concat('team.', id % {CHANNELS}) channel",
    f"concat('U', rpad(cast(id % {SENDERS} as string), 55, 'A')) sender",
    "concat('019a8a3c-5c00-7abc-8def-', lpad(lower(hex(id)), 12, '0')) id",
    f"concat('2025-11-', lpad(cast(1 + id div 7 % {DAYS} as string), 2, '0'), 'T12:00:00.000Z') ts",
    "encode(concat(repeat('what was said of it, ', 19), cast(id as string)), 'UTF-8') payload",
]
ITEM = "sha2(concat(encode(concat(sender, '\n', id, '\n'), 'UTF-8'), unhex(sha2(payload, 256))), 256) item"


def messages(rng: random.Random) -> list[Said]:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
    senders = ["U" + "".join(rng.choices(letters, k=55)) for _ in range(SENDERS)]
    channels = [f"team.{number}" for number in range(CHANNELS)]
    moments = [f"2025-11-{day:02}T12:00:00.000Z" for day in range(1, DAYS + 1)]
    return [
        (
            rng.choice(channels),
            rng.choice(senders),
            f"019a8a3c-5c00-7abc-8def-{number:012x}",
            rng.choice(moments),
            rng.randbytes(32),
        )
        for number in range(IDS)
    ]


@dataclass
class Side:
    """A side that has its digests, and its rows by channel and day."""

    said: Sequence[Said]
    #: messages that are not here
    without: frozenset[int] = frozenset()
    questions: int = 0
    handed: int = 0
    digests: ChannelDigests = field(default_factory=ChannelDigests)
    rows: dict[tuple[str, str], list[tuple[int, RecordIdentity]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for seq, (channel, sender, message_id, ts, hashed) in enumerate(self.said, 1):
            if seq not in self.without:
                self.digests.add(channel, sender, message_id, ts, hashed)
                bucket = bucket_of(item_hash(sender, message_id, hashed))
                self.rows[channel, day_of(ts)].append((bucket, RecordIdentity(seq, sender, message_id, hashed)))

    async def digest(self, through: int, *, floor: int = 1) -> DigestAnswer:
        self.questions += 1
        return DigestAnswer(floor, through, self.digests.totals())

    async def buckets(self, channel: str, day: str, through: int, *, floor: int = 1) -> BucketsAnswer:
        self.questions += 1
        return BucketsAnswer(floor, through, self.digests.day(channel, day).buckets)

    async def ids(
        self, channel: str, day: str, buckets: Sequence[int], through: int, after: int, *, floor: int = 1
    ) -> IdsAnswer:
        self.questions += 1
        asked = set(buckets)
        found = [each for bucket, each in self.rows[channel, day] if bucket in asked and each.seq > after]
        self.handed += len(found[:MOST_IDS])
        return IdsAnswer(floor, through, found[:MOST_IDS], len(found) > MOST_IDS)


async def compared(said: Sequence[Said], rng: random.Random) -> tuple[float, Side]:
    """Milliseconds of a comparison, and the peer that was asked."""
    apart = rng.sample(range(1, IDS + 1), APART)
    ours, peer = (Side(said, frozenset(half)) for half in (apart[: APART // 2], apart[APART // 2 :]))
    start = time.perf_counter()
    found = [each async for each in Comparison(ours, peer).differences(IDS)]
    spent = time.perf_counter() - start
    assert sum(len(each.lacking) + len(each.extra) for each in found) == APART
    return spent * 1000, peer


def seconds_of(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


async def in_python(said: Sequence[Said], count: int) -> tuple[list[float], list[float]]:
    spelled = [f"{sender}\n{message_id}\n".encode() + hashed for _, sender, message_id, _, hashed in said]

    def bare() -> None:
        for each in spelled:
            hashlib.sha256(each).digest()

    async def ours_run() -> float:
        return seconds_of(lambda: ChannelDigests.of(said))

    async def bare_run() -> float:
        return seconds_of(bare)

    return await pairs(ours_run, bare_run, count)


async def in_spark(spark: SparkSession, folder: Path, count: int) -> tuple[list[float], list[float]]:
    spark.range(IDS).selectExpr(*TABLE).write.parquet(str(folder / "messages"))
    table: DataFrame = spark.read.parquet(str(folder / "messages"))

    async def ours_run() -> float:
        return seconds_of(lambda: digests(table).write.format("noop").mode("overwrite").save())

    async def bare_run() -> float:
        return seconds_of(lambda: table.selectExpr(ITEM).agg(F.max("item")).collect())

    await pairs(ours_run, bare_run, 1)  # warm
    return await pairs(ours_run, bare_run, count)


async def main() -> None:
    chosen = options(__doc__ or "")
    load = os.getloadavg()[0]
    rng = random.Random(7)
    note(f"{IDS:,} ids are made")
    said = messages(rng)
    ours, bare = await in_python(said, chosen.pairs)
    note("two sides are compared")
    spent, peer = await compared(said, rng)
    note("Spark starts")
    with tempfile.TemporaryDirectory() as folder:
        spark = start_session(SessionSettings(Path(folder) / "spark", master="local[2]"))
        try:
            spark_ours, spark_bare = await in_spark(spark, Path(folder), chosen.pairs)
        finally:
            stop_session(spark)
    figures = {
        "digest_ratio": round(median_ratio(ours, bare), 2),
        "digest_s": round(median(ours), 2),
        "bare_s": round(median(bare), 2),
        "compare_ms": round(spent),
        "compare_questions": peer.questions,
        "compare_ids": peer.handed,
        "spark_ratio": round(median_ratio(spark_ours, spark_bare), 2),
        "spark_s": round(median(spark_ours), 2),
        "spark_bare_s": round(median(spark_bare), 2),
        "pairs": chosen.pairs,
        "load": round(load, 1),
    }
    rows = [
        (f"digests of {IDS:,} ids (s)", f"{figures['digest_s']}, SHA-256 alone {figures['bare_s']}"),
        ("digest_ratio", f"{figures['digest_ratio']}"),
        (f"comparing two sides that differ in {APART} (ms)", f"{figures['compare_ms']}"),
        ("questions, ids handed over", f"{peer.questions}, {peer.handed}"),
        (f"Spark: {IDS:,} messages (s)", f"{figures['spark_s']}, SHA-256 alone {figures['spark_bare_s']}"),
        ("spark_ratio", f"{figures['spark_ratio']}"),
    ]
    report("digest: what two spaces compare", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
