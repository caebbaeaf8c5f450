"""What the options of the `nats` source do, read as a task reads: without a JVM, from a real server."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bare import BareServer, bare_server
from tidings.errors import BrokerUnreachable, UsageError
from tidings.wire.records import encode_headers
from tidings_testing.waiting import eventually

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable

from tidings.delivery import stream_reader
from tidings.delivery.batch_sizing import Measured, PartSizes, SeqRange, measure, split
from tidings.delivery.source import NatsReader, NatsSource, NatsStreamReader
from tidings.delivery.source_options import KNOWN, SourceOptions
from tidings.delivery.stream_reader import StreamLocation, StreamReader

SMALL, LARGE = b"small", b"x" * 20_000


def batches(bare: BareServer, stream: str, **options: object) -> list[Any]:
    """What the tasks of a batch read yield, in Arrow."""
    given = {"url": bare.url, "stream": stream} | {key: str(value) for key, value in options.items()}
    reader = NatsReader(SourceOptions.of(given))
    return [batch for part in reader.partitions() for batch in reader.read(part)]


def rows(bare: BareServer, stream: str, **options: object) -> list[dict[str, Any]]:
    return [row for batch in batches(bare, stream, **options) for row in batch.to_pylist()]


def seqs(bare: BareServer, stream: str, **options: object) -> list[int]:
    return [row["seq"] for row in rows(bare, stream, **options)]


class Driven:
    """A streaming query as Spark drives it: one batch after the other."""

    def __init__(self, bare: BareServer, stream: str, **options: object) -> None:
        given = {"url": bare.url, "stream": stream, "waitMs": "0"} | {k: str(v) for k, v in options.items()}
        self.source = NatsStreamReader(SourceOptions.of(given))
        self.offset = self.source.initialOffset()

    def batch(self) -> list[SeqRange]:
        """The parts of the next batch; empty if nothing is there."""
        end = self.source.latestOffset(self.offset, self.source.getDefaultReadLimit())
        parts = self.source.partitions(self.offset, end) if end != self.offset else []
        self.offset = end
        return [part for part in parts if isinstance(part, SeqRange)]

    def all(self) -> Iterator[list[SeqRange]]:
        while parts := self.batch():
            yield parts

    def bytes_of(self, part: SeqRange) -> int:
        return sum(
            len(row["data"]) + len(row["headers"]) + len(row["subject"])
            for batch in self.source.read(part)
            for row in batch.to_pylist()
        )


@pytest.fixture
def drive(bare: BareServer) -> Iterator[Callable[..., Driven]]:
    driven: list[Driven] = []

    def drive(stream: str, **options: object) -> Driven:
        driven.append(Driven(bare, stream, **options))
        return driven[-1]

    yield drive
    for each in driven:
        each.source.stop()


def skewed(bare: BareServer, stream: str, small: int, large: int) -> None:
    bare.stream(stream)
    bare.fill(stream, small, data=SMALL)
    bare.fill(stream, large, data=LARGE)


# --- where a read starts and ends ---


def test_a_read_starts_and_ends_at_a_word_a_sequence_or_a_time(bare: BareServer, drive: Callable[..., Driven]) -> None:
    bare.stream("place", 10)
    bare.api("STREAM.PURGE.place", {"seq": 3})
    time.sleep(0.01)
    between = datetime.now(UTC).isoformat()
    time.sleep(0.01)
    bare.fill("place", 5)
    everything = list(range(3, 16))
    for options, expected in (
        ({"startingOffsets": "earliest"}, everything),
        ({"startingOffsets": "latest"}, []),
        ({"startingOffsets": 7}, everything[4:]),
        ({"startingOffsets": between}, list(range(11, 16))),
        ({"startingOffsets": "2001-01-01T00:00:00Z"}, everything),
        ({"startingOffsets": "2999-01-01T00:00:00+02:00"}, []),
        ({"endingOffsets": "latest"}, everything),
        ({"endingOffsets": 5}, [3, 4, 5]),
        ({"endingOffsets": between}, list(range(3, 11))),
        ({"startingOffsets": between, "endingOffsets": 12}, [11, 12]),
    ):
        assert seqs(bare, "place", **options) == expected, options
    for options, after in (
        ({}, 0),
        ({"startingOffsets": "earliest"}, 2),
        ({"startingOffsets": "latest"}, 15),
        ({"startingOffsets": 7}, 6),
        ({"startingOffsets": between}, 10),
    ):
        assert drive("place", **options).offset["seq"] == after, options


def test_a_time_is_found_among_records_of_which_many_are_gone(bare: BareServer) -> None:
    bare.stream("sparse", 40)
    for seq in (*range(2, 12), *range(20, 25), 40):
        bare.api("STREAM.MSG.DELETE.sparse", {"seq": seq})
    kept = rows(bare, "sparse", missing="skip")
    for row in kept:
        nanoseconds = row["time_ns"]
        moment = f"{datetime.fromtimestamp(nanoseconds // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds % 10**9:09d}Z"
        found = seqs(bare, "sparse", missing="skip", startingOffsets=moment)
        assert found == [each["seq"] for each in kept if each["seq"] >= row["seq"]]


# --- several filters, headers ---


def test_several_filters_are_read_in_order_and_each_record_once(
    bare: BareServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.stream("many")
    subjects = ("many.a.x", "many.b.x", "many.a.y", "many.c.x", "many.c.y")
    bare.publish((subjects[i % 5], b"", b"%d" % i) for i in range(100))
    for size in (3, 10_000):  # pages of one filter end where those of another do not
        monkeypatch.setattr(stream_reader, "PAGE_RECORDS", size)
        for text, wanted in (
            ("many.a.x,many.b.x", {0, 1}),
            ("many.a.*, many.*.x", {0, 1, 2, 3}),  # many.a.x matches both
            ("many.c.y", {4}),
            ("many.a.x,many.nothing", {0}),
            ("many.a.x,>", {0, 1, 2, 3, 4}),
        ):
            expected = [i + 1 for i in range(100) if i % 5 in wanted]
            for name in ("subjects", "subject"):
                found = rows(bare, "many", **{name: text, "partitionRecords": 30})
                assert [row["seq"] for row in found] == expected, text
                assert all(row["data"] == b"%d" % (row["seq"] - 1) for row in found)
                assert all(row["subject"] == subjects[(row["seq"] - 1) % 5] for row in found)


def test_headers_come_raw_or_as_a_map_or_both(bare: BareServer) -> None:
    bare.stream("heads")
    block = b"NATS/1.0\r\nA: 1\r\nB: 2\r\nA: 3\r\n\r\n"
    bare.publish([("heads.x", block, b""), ("heads.x", b"", b""), ("heads.x", b"garbage\r\n\r\n", b"")])
    named = [("A", ["1", "3"]), ("B", ["2"])]
    assert rows(bare, "heads")[0]["headers"] == block
    assert [row["headers"] for row in rows(bare, "heads", headersAs="map")] == [named, [], None]
    both = rows(bare, "heads", headersAs="both")
    assert [row["header_map"] for row in both] == [named, [], None]
    assert [row["headers"] for row in both] == [row["headers"] for row in rows(bare, "heads", headersAs="raw")]
    bare.api("STREAM.MSG.DELETE.heads", {"seq": 2})
    assert [row["missing"] for row in rows(bare, "heads", headersAs="map", missing="rows")] == [None, 2, None]


def test_the_columns_are_those_of_the_option_and_the_default_is_what_it_was(bare: BareServer) -> None:
    plain = "seq bigint, time timestamp, time_ns bigint, subject string, headers binary, data binary, missing bigint"
    given = {"url": bare.url, "stream": "x"}
    assert NatsSource(given).schema() == plain
    assert "headers map<string,array<string>>" in NatsSource(given | {"headersAs": "map"}).schema()
    assert NatsSource(given | {"headersAs": "both"}).schema() == f"{plain}, header_map map<string,array<string>>"


# --- how much a batch takes ---


def test_a_batch_ends_at_its_records_or_at_its_bytes_whichever_comes_first(
    bare: BareServer, drive: Callable[..., Driven]
) -> None:
    skewed(bare, "skewed", 300, 40)
    bound = 100_000
    for name in ("maxRecords", "maxRecordsPerTrigger"):
        query = drive("skewed", **{name: 90, "maxBytesPerTrigger": bound})
        found = list(query.all())
        assert found[0][0].first == 1
        assert found[-1][-1].last == 340
        taken = [(parts[-1].last - parts[0].first + 1, sum(map(query.bytes_of, parts))) for parts in found]
        assert [records for records, _ in taken[:3]] == [90, 90, 90]
        assert all(records <= 90 and size <= bound for records, size in taken)
        assert all(size > bound - 2 * len(LARGE) for _, size in taken[4:-1]), "batches of large ones are full"
    everything = list(drive("skewed").all())
    assert len(everything) == 1, "without bounds it is one batch"


def test_a_bound_in_bytes_holds_with_filters_and_counts_only_what_they_let_through(
    bare: BareServer, drive: Callable[..., Driven]
) -> None:
    skewed(bare, "sieve", 30, 30)
    query = drive("sieve", subjects="sieve.c0,sieve.c1", maxBytesPerTrigger=90_000)
    sizes = [sum(map(query.bytes_of, parts)) for parts in query.all()]
    assert query.offset["seq"] == 60
    assert len(sizes) > 3
    assert all(size <= 90_000 for size in sizes)
    nothing = drive("sieve", subjects="sieve.none,sieve.neither", maxBytesPerTrigger=1_000)
    assert [(parts[0].first, parts[-1].last) for parts in nothing.all()] == [(1, 60)]


def test_a_record_larger_than_the_bound_is_a_batch_of_its_own(bare: BareServer, drive: Callable[..., Driven]) -> None:
    bare.stream("giant")
    bare.publish([("giant.a", b"", SMALL), ("giant.a", b"", LARGE), ("giant.a", b"", SMALL), ("giant.a", b"", LARGE)])
    query = drive("giant", maxBytesPerTrigger=1_000)
    assert [(parts[0].first, parts[-1].last) for parts in query.all()] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_query_that_keeps_up_measures_nothing(
    bare: BareServer, drive: Callable[..., Driven], monkeypatch: pytest.MonkeyPatch
) -> None:
    skewed(bare, "live", 50, 20)
    query = drive("live", maxBytesPerTrigger=200_000)
    assert len(list(query.all())) > 2
    measured: list[int] = []

    def counted(reader: StreamReader, subjects: tuple[str, ...], first: int, *rest: Any) -> Measured:
        measured.append(first)
        return measure(reader, subjects, first, *rest)

    monkeypatch.setattr("tidings.delivery.batch_sizing.measure", counted)
    for _ in range(3):
        bare.fill("live", 5, data=LARGE)
        assert len(query.batch()) == 1
    assert measured == []
    bare.fill("live", 15, data=LARGE)  # more than the bound came at once
    assert len(list(query.all())) == 2
    assert measured == [86, 95]
    bare.fill("live", 2)
    bare.api("STREAM.MSG.DELETE.live", {"seq": 1})  # what came is no longer the difference
    assert len(query.batch()) == 1
    assert measured == [86, 95, 101]


@pytest.mark.parametrize("fails", [False, True])
async def test_the_next_batch_of_a_backlog_is_measured_while_this_one_is_worked_on(
    bare: BareServer, drive: Callable[..., Driven], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    stream = f"ahead-{fails}"
    skewed(bare, stream, 10, 30)
    measured: list[tuple[bool, int]] = []
    held = threading.Event()

    def noted(reader: StreamReader, subjects: tuple[str, ...], first: int, *rest: Any) -> Measured:
        beside = threading.current_thread() is not threading.main_thread()
        measured.append((beside, first))
        if held.is_set():
            assert rest[-1].wait(20), "whoever stops does not wait for the end of it"
        if beside and fails:
            raise BrokerUnreachable("gone for a moment")
        return measure(reader, subjects, first, *rest)

    monkeypatch.setattr("tidings.delivery.batch_sizing.measure", noted)
    query = drive(stream, maxBytesPerTrigger=210_000, name=stream)
    ends = [parts[-1].last for parts in query.all()]
    assert ends == [20, 30, 40]
    beside = [(True, 21), (True, 31)]
    itself = [(False, 1), (False, 21), (False, 31)]
    assert sorted(measured) == sorted(beside + (itself if fails else itself[:1]))
    bare.fill(stream, 10, data=LARGE)
    query.batch()
    bare.fill(stream, 30, data=LARGE)
    held.set()
    query.source._admission._ahead.start(51, 80)
    query.source.stop()  # in the middle of measuring
    assert not any(thread.name == "measure" for thread in threading.enumerate())
    await eventually(lambda: stream not in bare.connections().values(), what="both connections are closed")


def test_everything_available_is_everything_whatever_the_bounds(bare: BareServer, drive: Callable[..., Driven]) -> None:
    skewed(bare, "whole", 20, 20)
    query = drive("whole", maxRecordsPerTrigger=3, maxBytesPerTrigger=1_000)
    assert query.source.latestOffset(query.offset, ReadAllAvailable())["seq"] == 40


def test_tasks_share_a_batch_by_its_bytes_where_they_are_known(bare: BareServer, drive: Callable[..., Driven]) -> None:
    skewed(bare, "shared", 200, 20)
    bare.fill("shared", 20, data=LARGE)  # beyond the bound, so that the batch is measured
    query = drive("shared", maxBytesPerTrigger=420_000, minPartitions=4)
    parts = query.batch()
    assert (parts[0].first, len(parts)) == (1, 4)
    sizes = [query.bytes_of(part) for part in parts]
    assert max(sizes) <= 2 * min(sizes), sizes
    assert parts[0].last > 200, "all the small ones are a small part of it"
    unknown = drive("shared", minPartitions=4).batch()
    assert [part.last - part.first + 1 for part in unknown] == [60, 60, 60, 60]
    assert len(drive("shared", partitionBytes=200_000).batch()) > 2, "so many as a mean record asks for"
    assert len(batches(bare, "shared", minPartitions=6)) == 6


@pytest.mark.parametrize("of", [None, "even", "skewed"])
@pytest.mark.parametrize("parts", [1, 2, 7, 50])
def test_parts_are_the_whole_range_once_and_none_is_too_long(of: str | None, parts: int) -> None:
    sizes = {"even": [10] * 100, "skewed": [1] * 90 + [10_000] * 10}.get(of or "", [])
    sums = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    measured = Measured(range(11, 111), sums) if sizes else None
    found = split(11, 110, PartSizes(30, 1 << 20, parts), of=measured)
    assert [seq for part in found for seq in range(part.first, part.last + 1)] == list(range(11, 111))
    assert max(part.last - part.first + 1 for part in found) <= 30
    if of != "skewed":
        assert len(found) >= max(parts, 4)
    assert split(5, 4, PartSizes(30, 1 << 20)) == []


def test_what_a_task_yields_at_a_time_is_bounded_in_bytes(bare: BareServer, monkeypatch: pytest.MonkeyPatch) -> None:
    skewed(bare, "arrow", 50, 50)
    monkeypatch.setattr(stream_reader, "PAGE_BYTES", 100_000)
    for options in ({}, {"subjects": "arrow.c0,arrow.c1,arrow.c2"}):
        found = batches(bare, "arrow", **options)
        assert sum(batch.num_rows for batch in found) == 100
        largest = max(sum(len(row["data"]) for row in batch.to_pylist()) for batch in found)
        assert largest <= 100_000 + 3 * len(LARGE)
        assert len(found) > 6


# --- servers and domains ---


def test_the_first_server_of_a_list_that_answers_is_read(bare: BareServer) -> None:
    bare.stream("listed", 3)
    both = f"nats://127.0.0.1:1, {bare.url}"
    assert seqs(BareServer(both, bare.monitor), "listed") == [1, 2, 3]
    with pytest.raises(BrokerUnreachable, match=r"no broker answers at nats://127\.0\.0\.1:1: "):
        seqs(BareServer("nats://127.0.0.1:1", bare.monitor), "listed")


def test_a_stream_is_read_through_its_domain_or_another_prefix(tmp_path: Path) -> None:
    with bare_server(tmp_path) as plain:
        plain.stream("dom", 3)
        with pytest.raises(BrokerUnreachable, match=r"nothing answers at \$JS\.hub\.API"):
            seqs(plain, "dom", domain="hub")
    domain = tmp_path / "hub"
    domain.mkdir()
    config = "accounts: {A: {jetstream: enabled, users: [{user: a, password: a}]}}\nno_auth_user: a"
    with bare_server(domain, config, jetstream="domain: hub") as hub:
        hub.stream("dom", 4)
        for options in ({}, {"domain": "hub"}, {"apiPrefix": "$JS.hub.API"}, {"apiPrefix": "$JS.hub.API."}):
            assert seqs(hub, "dom", **options) == [1, 2, 3, 4], options
        for options in ({"domain": "moon"}, {"apiPrefix": "JS.elsewhere"}):
            with pytest.raises(BrokerUnreachable, match="nothing answers at"):
                seqs(hub, "dom", **options)


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"maxBytes": "1"}, r"the nats source has no option maxBytes: it has .*maxBytesPerTrigger, maxRecords"),
        ({"startingOffsets": "yesterday"}, "earliest, latest, a sequence, or a time such as"),
        ({"startingOffsets": "2026-11-17T09:00:00"}, "a time such as 2026-11-17T09:00:00Z"),
        ({"startingOffsets": "-3"}, "option startingOffsets is '-3'"),
        ({"endingOffsets": "earliest"}, "nothing would be read"),
        ({"start": "1", "startingOffsets": "2"}, "startingOffsets and start say the same thing"),
        ({"maxRecords": "1", "maxRecordsPerTrigger": "1"}, "say the same thing"),
        ({"maxRecordsPerTrigger": "0"}, "a whole number from 1 on"),
        ({"minPartitions": "two"}, "option minPartitions is 'two'"),
        ({"maxBytesPerTrigger": "64mb"}, "such as 67108864 or 64m"),
        ({"maxBytesPerTrigger": "m"}, "bytes are needed"),
        ({"subjects": "a..b"}, r"option subjects has 'a\.\.b'"),
        ({"subjects": "a,"}, "option subjects has ''"),
        ({"subject": "a.>.b"}, "filters such as"),
        ({"headersAs": "list"}, "option headersAs is 'list': one of raw, map, both"),
        ({"missing": "perhaps"}, "option missing is 'perhaps': one of fail, rows, skip"),
        ({"domain": "a.b"}, "option domain is 'a.b'"),
        ({"domain": "a", "apiPrefix": "b"}, "domain and apiPrefix say the same"),
        ({"apiPrefix": "a..b"}, "option apiPrefix"),
        ({"stream": "a.b"}, "the name of one stream"),
        ({"stream": ""}, "needs the option 'stream'"),
        ({"url": "http://somewhere"}, "option url: 'http://somewhere' is not an address"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_with_what_can(options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SourceOptions.of({"url": "nats://localhost", "stream": "s"} | options)


def test_a_refusal_lists_every_option_and_an_end_is_refused_to_a_query() -> None:
    given = {"url": "nats://localhost", "stream": "s"}
    with pytest.raises(UsageError) as refused:
        SourceOptions.of(given | {"nonsense": "1"})
    assert all(f" {name}" in str(refused.value) for name in KNOWN)
    SourceOptions.of(given | {"MAXRECORDS": "5", "path": "x", "checkpointLocation": "x"})  # Spark's own, any case
    for name in ("end", "endingOffsets"):
        with pytest.raises(UsageError, match="a streaming query has no end"):
            NatsSource(given | {name: "3"}).streamReader(None)


def test_sizes_are_bytes_or_have_a_unit() -> None:
    given = {"url": "nats://localhost", "stream": "s"}
    for text, size in (("1000", 1000), ("2k", 2048), ("64m", 64 << 20), ("1G", 1 << 30)):
        assert SourceOptions.of(given | {"maxBytesPerTrigger": text}).max_bytes == size


def test_hostile_header_blocks_do_not_change_what_is_measured(bare: BareServer) -> None:
    bare.stream("liars")
    blocks = (
        b"NATS/1.0 204 EOB\r\nA: b\r\n\r\n",
        b"NATS/1.0\r\nNats-Sequence: 7\r\nNats-Subject: forged\r\n\r\n",
        b"garbage\r\nNats-Sequence: 99999\r\n\r\n",
        encode_headers([("A", "b")]),
        b"",
    )
    bare.publish(("liars.x", block, LARGE) for block in blocks)
    reader = StreamReader(StreamLocation(bare.url, None, "liars"))
    try:
        measured = measure(reader, (">",), 1, 5, 1 << 30)
        assert list(measured.seqs) == [1, 2, 3, 4, 5]
        assert measured.total > 5 * len(LARGE)
        assert list(measure(reader, (">",), 2, 5, 25_000).seqs) == [2, 3], "no further than needed"
    finally:
        reader.close()
