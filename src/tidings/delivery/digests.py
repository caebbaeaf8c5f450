"""Digests in Spark: the same numbers as `wire/digests.py`, for whole tables, without Python per row.

    messages   channel, sender, id, ts, payload (binary)
    digests    channel, day, bucket, count, sum       `sum` is 64 hex digits; buckets that hold nothing have no row

Spark has no numbers of 256 bits, and its decimals end at 38 digits. So a hash is eight numbers of 32 bits, each is
summed as a long, and the carries are taken from the right when everything is summed. A long has room for 2^31 of
them: a bucket of more messages ends the job (Spark's own check of overflows) and is never wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  how Spark's own documentation calls it

from tidings.wire.message import TIMESTAMP_PATTERN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MESSAGES = "channel string, sender string, id string, ts string, payload binary"
DIGESTS = "channel string, day string, bucket int, count bigint, sum string"
_LIMBS = 8
_DIGITS = 8
_BITS = 32


def digests(messages: DataFrame) -> DataFrame:
    """One row for each channel, day and bucket that holds something. A row that is no message ends the job."""
    items = messages.select("channel", _day(F.col("ts")).alias("day"), _item().alias("item"))
    summed = items.groupBy("channel", "day", _number(F.col("item"), 0, 2).cast("int").alias("bucket")).agg(
        F.count("item").alias("count"),
        *(F.sum(_number(F.col("item"), _DIGITS * limb, _DIGITS)).alias(f"limb{limb}") for limb in range(_LIMBS)),
    )
    return summed.select("channel", "day", "bucket", "count", _carried().alias("sum"))


def days(found: DataFrame) -> DataFrame:
    """Of `digests`: the sum of the buckets of each channel and day, `channel, day, count, sum`."""
    summed = found.groupBy("channel", "day").agg(
        F.sum("count").alias("count"),
        *(F.sum(_number(F.col("sum"), _DIGITS * limb, _DIGITS)).alias(f"limb{limb}") for limb in range(_LIMBS)),
    )
    return summed.select("channel", "day", "count", _carried().alias("sum"))


def _item() -> Column:
    """What a message counts as, in hex."""
    named = F.encode(F.concat("sender", F.lit("\n"), "id", F.lit("\n")), "UTF-8")
    item = F.sha2(F.concat(named, F.unhex(F.sha2("payload", 256))), 256)
    return F.coalesce(item, F.raise_error(F.lit("a message without sender, id or payload")))


def _day(ts: Column) -> Column:
    wrong = F.raise_error(F.concat(F.lit("not the time of a message: "), F.coalesce(ts, F.lit("null"))))
    return F.when(ts.rlike(TIMESTAMP_PATTERN), F.substring(ts, 1, 10)).otherwise(wrong)


def _number(digits: Column, start: int, length: int) -> Column:
    return F.conv(F.substring(digits, start + 1, length), 16, 10).cast("long")


def _carried() -> Column:
    """The sums of the limbs as one number in hex; what goes beyond 256 bits is dropped."""
    parts: list[Column] = []
    carry: Column = F.lit(0).cast("long")
    for limb in reversed(range(_LIMBS)):
        value = F.col(f"limb{limb}") + carry
        digits = F.hex(value.bitwiseAND(F.lit(2**_BITS - 1)))
        parts.insert(0, F.lpad(F.lower(digits), _DIGITS, "0"))
        carry = F.shiftright(value, _BITS)
    return F.concat(*parts)
