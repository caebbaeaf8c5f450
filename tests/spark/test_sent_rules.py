"""The rules at Spark's workers: sent when they changed, destroyed when nobody needs them, and without a token."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from tidings.delivery.encoding import SCHEMA, Encoded, EncodingRules, RulesHolder, decode_rows, encode_partition
from tidings.delivery.range_encoder import SentRules
from tidings.delivery.source import arrow_schema
from tidings.model.rulebook import Rulebook
from tidings.wire.message import Sender, compose
from tidings.wire.records import encode_headers
from tidings.wire.rulings import Access
from tidings.wire.subjects import Subjects

pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]
SUBJECTS = Subjects("main")
ADA, BOB = "U" + "A" * 55, "U" + "B" * 55
TOKEN = "a-token-that-nobody-may-see"


def access(name: str, *post: str, token: str = TOKEN) -> Access:
    return Access(op="1", name=name, post=post, jwt=token)


@pytest.fixture
def book() -> Rulebook:
    made = Rulebook(SUBJECTS.log_stream)
    made.put_access(ADA, 1, access("ada", ">"))
    made.put_access(BOB, 2, access("bob"))
    return made


@pytest.fixture
def sent(spark: SparkSession) -> Iterator[SentRules]:
    made = SentRules(spark.sparkContext)
    yield made
    made.close()


def broadcasts(spark: SparkSession) -> set[Path]:
    """What broadcasts of this process lie at the driver."""
    return {path for path in Path(spark.sparkContext._temp_dir).iterdir() if path.is_file()}


def encode(spark: SparkSession, rules: RulesHolder, first: int) -> Encoded:
    """A message of each of the two, from `first` on."""
    rows = [
        {
            "seq": first + at,
            "time_ns": 1,
            "subject": SUBJECTS.chat(sender, "general"),
            "headers": encode_headers([("Td-Sig", "s"), ("Nats-Msg-Id", "i")]),
            "data": compose(Sender(sender, "x"), text="hi").raw,
            "missing": None,
        }
        for at, sender in enumerate((ADA, BOB))
    ]
    schema = "seq long, time_ns long, subject string, headers binary, data binary, missing long"
    frame = spark.createDataFrame([tuple(row.values()) for row in rows], schema).coalesce(1)
    encoding = EncodingRules("main", rules, ())
    return decode_rows(frame.mapInArrow(partial(encode_partition, encoding), SCHEMA).toArrow())


def senders(found: Encoded) -> set[str]:
    return {sender for block in found.blocks for sender, _ in block.info.senders}


def test_rules_are_sent_once_and_again_when_a_post_may_be_judged_otherwise(
    spark: SparkSession, sent: SentRules, book: Rulebook
) -> None:
    for first in (10, 20, 30):
        with sent.lend(book, first - 1) as rules:
            found = encode(spark, rules, first)
        assert (senders(found), found.void) == ({ADA}, 1)
    book.put_access(ADA, 40, access("ada", ">", token="another token"))
    with sent.lend(book, 49) as rules:
        assert senders(encode(spark, rules, 50)) == {ADA}
    assert sent.sendings == 1
    book.put_access(BOB, 60, access("bob", "general"))
    with sent.lend(book, 58) as rules:
        assert senders(encode(spark, rules, 59)) == {ADA, BOB}, "from 60 on"
    assert sent.sendings == 2
    with sent.lend(book, 69) as rules:
        assert senders(encode(spark, rules, 70)) == {ADA, BOB}
    assert sent.sendings == 2


def test_an_older_range_is_judged_by_the_rules_of_its_time(
    spark: SparkSession, sent: SentRules, book: Rulebook
) -> None:
    book.put_access(BOB, 60, access("bob", "general"))
    with sent.lend(book, 69) as rules:
        assert senders(encode(spark, rules, 70)) == {ADA, BOB}
    with sent.lend(book, 9) as rules:
        assert senders(encode(spark, rules, 10)) == {ADA}
    with sent.lend(book, 69) as rules:
        assert senders(encode(spark, rules, 70)) == {ADA, BOB}
    assert sent.sendings == 2, "what reaches further back serves both"


def test_nothing_is_left_of_rules_that_nobody_works_with(spark: SparkSession, sent: SentRules, book: Rulebook) -> None:
    before = broadcasts(spark)
    with sent.lend(book, 9) as old:
        for seq in range(10, 30):
            book.put_access(BOB, seq, access("bob", f"team.{seq}"))
            with sent.lend(book, seq):
                assert len(broadcasts(spark) - before) == 2, "the newest, and the one that is lent"
        assert senders(encode(spark, old, 10)) == {ADA}, "a payment that reads for long goes on"
    (left,) = broadcasts(spark) - before
    assert TOKEN.encode() not in left.read_bytes()
    sent.close()
    assert broadcasts(spark) == before


def test_rows_are_handed_over_in_few_batches_whatever_they_are(book: Rulebook) -> None:
    class Here:
        value = book

    page = pa.RecordBatch.from_pylist(
        [
            {
                "seq": seq,
                "time_ns": 1,
                "subject": SUBJECTS.chat(ADA, f"c{seq % 5}") if seq % 7 else "nonsense",
                "headers": encode_headers([("Td-Sig", "s"), ("Nats-Msg-Id", "i")]),
                "data": compose(Sender(ADA, "x"), text="hi").raw,
                "missing": None,
            }
            for seq in range(10, 80)
        ]
        + [{"seq": 80, "missing": 90}],
        schema=arrow_schema("raw"),
    )
    (made,) = encode_partition(EncodingRules("main", Here(), ()), [page])
    found = decode_rows(pa.Table.from_batches([made]))
    assert sum(block.info.count for block in found.blocks) == 60
    assert [block.info.first for block in found.blocks] == sorted(block.info.first for block in found.blocks)
    assert [poison.seq for poison in found.poison] == list(range(14, 80, 7))
    assert (found.missing, found.first, found.last) == ([(80, 90)], 10, 90)
