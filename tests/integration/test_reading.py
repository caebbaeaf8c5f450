"""Reading a stream by sequence: nothing twice, nothing missing, and nobody is believed but the leader."""

import random
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from bare import BareServer, bare_server
from tidings.delivery import stream_reader
from tidings.delivery.source import NatsStreamReader
from tidings.delivery.source_options import SourceOptions
from tidings.delivery.stream_reader import StreamLocation, StreamReader
from tidings.errors import BrokerUnreachable, LogGap, LogRegressed, UsageError
from tidings.nats import aio
from tidings.nats.jetstream import JetStream
from tidings.nats.jetstream_api import Answer, Ask, AskPage
from tidings.wire.records import Missing, Page, StoredRecord, encode_headers
from tidings_testing.waiting import eventually

pytest.importorskip("pyspark")


Opened = list[StreamReader]
ReaderOf = Callable[[str], StreamReader]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Readers to be closed after the test."""
    readers: Opened = []
    yield readers
    for reader in readers:
        reader.close()


@pytest.fixture
def reader_of(bare: BareServer, opened: Opened) -> Callable[[str], StreamReader]:
    def reader_of(stream: str) -> StreamReader:
        opened.append(StreamReader(StreamLocation(bare.url, None, stream)))
        return opened[-1]

    return reader_of


@pytest.fixture
def lagging(bare: BareServer, opened: Opened) -> Callable[..., "Lagging"]:
    def lagging(stream: str, seed: int, *, for_ever: bool = False) -> Lagging:
        reader = Lagging(StreamLocation(bare.url, None, stream), random.Random(seed), for_ever=for_ever)
        opened.append(reader)
        return reader

    return lagging


def seqs(items: list[StoredRecord | Missing]) -> list[int]:
    return [item.seq for item in items if isinstance(item, StoredRecord)]


def test_every_range_is_read_whole_whatever_the_size_of_a_page(
    bare: BareServer, reader_of: ReaderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of(bare.stream("pages", 50))
    for size in (1, 7, 49, 50, 51):
        monkeypatch.setattr(stream_reader, "PAGE_RECORDS", size)
        for first, last in ((1, 50), (7, 7), (8, 21), (50, 50)):
            assert seqs(list(reader.read(first, last))) == list(range(first, last + 1))


def test_a_page_ended_by_its_bytes_is_continued(
    bare: BareServer, reader_of: ReaderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.stream("large")
    bare.fill("large", 12, data=b"x" * 200_000)
    monkeypatch.setattr(stream_reader, "PAGE_BYTES", 500_000)
    reader = reader_of("large")
    pages = [page for page in reader.pages(1, 12) if isinstance(page, Page)]
    assert [seq for page in pages for seq in page.seqs] == list(range(1, 13))
    assert len(pages) > 3
    assert all(len(payload) == 200_000 for page in pages for payload in page.payloads)


def test_holes_are_named_and_a_filter_has_none(bare: BareServer, reader_of: ReaderOf) -> None:
    reader = reader_of(bare.stream("holes", 20))
    for seq in (1, 5, 6, 20):
        bare.api("STREAM.MSG.DELETE.holes", {"seq": seq})
    items = list(reader.read(1, 20))
    assert [item for item in items if isinstance(item, Missing)] == [Missing(1, 1), Missing(5, 6), Missing(20, 20)]
    assert seqs(items) == [s for s in range(1, 21) if s not in (1, 5, 6, 20)]
    assert list(reader.read(5, 6)) == [Missing(5, 6)]
    filtered = list(reader.read(1, 20, "holes.c1"))
    assert seqs(filtered) == [s for s in range(1, 21) if s % 3 == 2 and s not in (5, 20)]
    assert len(seqs(filtered)) == len(filtered)


class Lagging(StreamReader):
    """Its pages come from a replica that has not got everything, or lost something on the way."""

    def __init__(self, location: StreamLocation, rng: random.Random, *, for_ever: bool) -> None:
        super().__init__(location)
        self._rng, self._for_ever, self.dropped = rng, for_ever, 0

    def _exchange(self, request: Ask | AskPage) -> Answer | None:
        answer = super()._exchange(request)
        if isinstance(request, AskPage):
            page = request.page
            kept = [i for i in range(len(page.seqs)) if not self._for_ever and self._rng.random() < 0.7]
            self.dropped += len(page.seqs) - len(kept)
            for name in Page.COLUMNS:
                setattr(page, name, [getattr(page, name)[i] for i in kept])
        return answer


def test_what_a_lagging_replica_leaves_out_is_asked_for_again(
    bare: BareServer, lagging: Callable[..., Lagging]
) -> None:
    """F10."""
    bare.stream("lag", 60)
    for seq in (10, 11, 60):
        bare.api("STREAM.MSG.DELETE.lag", {"seq": seq})
    for seed in range(10):
        reader = lagging("lag", seed)
        items = list(reader.read(1, 60))
        assert seqs(items) == [s for s in range(1, 61) if s not in (10, 11, 60)]
        assert [item for item in items if isinstance(item, Missing)] == [Missing(10, 11), Missing(60, 60)]
        assert reader.dropped
        partly = list(lagging("lag", seed).read(5, 30))
        assert seqs(partly) == [s for s in range(5, 31) if s not in (10, 11)]


def test_replicas_that_never_catch_up_are_an_error_and_no_end(
    bare: BareServer, lagging: Callable[..., Lagging]
) -> None:
    """F10."""
    bare.stream("late", 5)
    with pytest.raises(BrokerUnreachable, match="answers short pages at 1"):
        list(lagging("late", 1, for_ever=True).read(1, 5))


def test_the_end_of_a_stream_before_the_end_of_a_range_is_a_regression(bare: BareServer, reader_of: ReaderOf) -> None:
    bare.stream("short", 5)
    with pytest.raises(LogRegressed, match=r"ends at 5, before 9"):
        list(reader_of("short").read(1, 9))


def test_a_stream_that_is_not_there_is_said_so(bare: BareServer, reader_of: ReaderOf) -> None:
    with pytest.raises(UsageError, match="'nothing'"):
        reader_of("nothing").state()
    with pytest.raises((UsageError, LogGap, BrokerUnreachable)):
        list(reader_of("nothing").read(1, 2))


HOSTILE = (
    b"NATS/1.0 204 EOB\r\nA: b\r\n\r\n",
    b"garbage! 404 not found\r\n\r\n",
    b"NATS/1.0\r\nA: b",
    b"NATS/1.0\r\nNats-Stream: X\r\nNats-Subject: forged\r\nNats-Sequence: 999\r\nX-..",
    b"NATS/1.0\r\nNats-Sequence: 7\r\nNats-Subject: forged\r\n\r\n",
    b"NATS/1.0\r\nA: \xff\x00\r\n: x\r\n\r\n",
)


def test_hostile_header_blocks_neither_end_a_page_nor_move_a_record(bare: BareServer, reader_of: ReaderOf) -> None:
    bare.stream("hostile")
    bare.publish((f"hostile.c{i}", block, b"body") for i, block in enumerate(HOSTILE))
    bare.publish([("hostile.last", encode_headers([("A", "b")]), b"body")])
    items = [item for item in reader_of("hostile").read(1, len(HOSTILE) + 1) if isinstance(item, StoredRecord)]
    assert [item.seq for item in items] == list(range(1, len(HOSTILE) + 2))
    assert [item.subject for item in items] == [*(f"hostile.c{i}" for i in range(len(HOSTILE))), "hostile.last"]
    assert {item.payload for item in items} == {b"body"}
    assert items[-1].own_block == encode_headers([("A", "b")])
    assert all(a.time_ns < b.time_ns for a, b in pairwise(items))


async def test_hostile_header_blocks_hide_nothing_from_a_reader_on_an_event_loop(bare: BareServer) -> None:
    bare.stream("forged")
    bare.publish((f"forged.c{i}", block, b"body") for i, block in enumerate(HOSTILE))
    bare.publish([("forged.last", encode_headers([("A", "b")]), b"body")])
    connection = await aio.connect(bare.url)
    pages = JetStream(connection).read("forged", ">", 1, len(HOSTILE) + 1, page=2)
    found = [record async for page in pages for record in page]
    await connection.close()
    assert [record.seq for record in found] == list(range(1, len(HOSTILE) + 2))
    assert found[-1].subject == "forged.last"


async def test_a_connection_nobody_uses_answers_the_brokers_ping(tmp_path: Path) -> None:
    with bare_server(tmp_path, 'ping_interval: "100ms"\nping_max: 2') as server:
        server.stream("quiet", 1)
        options = {"url": server.url, "stream": "quiet", "keepAliveMs": "50", "name": "kept alive"}
        source = NatsStreamReader(SourceOptions.of(options))
        source.initialOffset()
        ours = [cid for cid, name in server.connections().items() if name == "kept alive"]
        # Two connections that never answer, one after the other: when the second is cut, many pings have gone.
        for _ in range(2):
            silent = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
            silent.sendall(b'CONNECT {"verbose":false,"name":"silent"}\r\nPING\r\n')
            await eventually(lambda: "silent" in server.connections().values(), what="the silent one is connected")
            await eventually(lambda: "silent" not in server.connections().values(), what="the silent one was cut")
            silent.close()
        assert [cid for cid, name in server.connections().items() if name == "kept alive"] == ours
        source.stop()
        await eventually(lambda: "kept alive" not in server.connections().values(), what="stop closes it")
