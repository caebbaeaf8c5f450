"""Digests of Spark are those of the pure form, bit by bit."""

import random

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from golden.digests import ITEMS
from tidings.delivery.digests import DIGESTS, MESSAGES, days, digests
from tidings.wire.digests import ChannelDigests, payload_hash
from tools.digest_sides import message_id, same_bucket, sender

Message = tuple[str, str, str, str, bytes]
MOMENTS = [
    "2025-11-15T23:59:59.999Z",
    "2025-11-16T00:00:00.000Z",
    "2024-02-29T12:00:00.000Z",
    "0001-01-01T00:00:00.000Z",
    "1582-10-10T00:00:00.000Z",
    "9999-12-31T23:59:59.999Z",
]


def pure(messages: list[Message]) -> ChannelDigests:
    return ChannelDigests.of((*message[:4], payload_hash(message[4])) for message in messages)


def assert_agree(spark: SparkSession, messages: list[Message], partitions: int = 3) -> None:
    found = digests(spark.createDataFrame(messages, MESSAGES).repartition(partitions)).cache()
    rows = [tuple(row) for row in found.collect()]
    by_day = [tuple(row) for row in days(found).collect()]
    found.unpersist()
    expected = pure(messages)
    assert sorted(rows) == [
        (channel, day, bucket, *each.encode())
        for channel, day, held in expected.days()
        for bucket, each in enumerate(held.buckets)
        if each
    ]
    assert sorted(by_day) == [(channel, day, *held.total.encode()) for channel, day, held in expected.days()]


def generated(rng: random.Random, count: int) -> list[Message]:
    return [
        (
            rng.choice(["general", "team.a", "ALERTS"]),
            sender(rng.randint(0, 20)),
            message_id(rng.randint(0, 10**9)),
            rng.choice(MOMENTS),
            rng.randbytes(rng.choice([0, 1, 31, 400])),
        )
        for _ in range(count)
    ]


def test_digests_of_nothing_are_no_rows_of_the_same_columns(spark: SparkSession) -> None:
    found = digests(spark.createDataFrame([], MESSAGES))
    assert found.collect() == []
    assert ", ".join(f"{each.name} {each.dataType.simpleString()}" for each in found.schema) == DIGESTS


def test_one_message_the_same_twice_and_the_vectors_count_alike(spark: SparkSession) -> None:
    one = generated(random.Random(1), 1)
    assert_agree(spark, one)
    assert_agree(spark, one * 2)
    assert_agree(spark, [(*each[:4], each[4].encode()) for each in ITEMS])


def test_ten_thousand_messages_with_repeats_count_alike(spark: SparkSession) -> None:
    rng = random.Random(2)
    made = generated(rng, 9_500)
    made += rng.choices(made, k=500)
    rng.shuffle(made)
    assert_agree(spark, made)


def test_a_full_bucket_goes_beyond_2_to_the_256_and_every_limb_carries(spark: SparkSession) -> None:
    """Items that begin with ff: two of them are above 2^256 already."""
    numbers = same_bucket(200, 255)
    made = [("general", sender(0), message_id(each), MOMENTS[0], f"message {each}".encode()) for each in numbers]
    (held,) = (found for _, _, found in pure(made).days())
    assert held.bucket(255).count == 200
    assert_agree(spark, made)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (("general", sender(0), message_id(1), "2025-02-30T00:00:00.000Z", b""), "not the time of a message"),
        (("general", sender(0), message_id(1), "2025-11-15T00:00:00Z", b""), "not the time of a message"),
        (("general", sender(0), message_id(1), None, b""), "not the time of a message"),
        (("general", None, message_id(1), MOMENTS[0], b""), "without sender"),
        (("general", sender(0), None, MOMENTS[0], b""), "without sender"),
        (("general", sender(0), message_id(1), MOMENTS[0], None), "without sender"),
    ],
)
def test_a_row_that_is_no_message_ends_the_job(spark: SparkSession, row: tuple[object, ...], words: str) -> None:
    with pytest.raises(PySparkException, match=words):
        digests(spark.createDataFrame([row], MESSAGES)).collect()
