"""Rows as messages, published as a task publishes: without a JVM, to a real server."""

import base64
import time
from pathlib import Path

import pytest

from bare import BareServer, bare_server
from tidings.errors import LeaseLost, UnhealthyError, UsageError
from tidings.nats import jetstream_blocking
from tidings.nats.errors import ApiError
from tidings.nats.jetstream_api import Ack
from tidings.nats.jetstream_blocking import Message, Window
from tidings.wire.records import encode_headers

pytest.importorskip("pyspark")

import pyarrow as pa

from tidings.delivery.sink import SinkOptions, publish_batches

COLUMNS = ("subject", "id", "data")


def batch(stream: str, count: int, *, start: int = 0, subjects: int = 1, data: bytes = b"") -> pa.RecordBatch:
    numbers = range(start, start + count)
    return pa.record_batch(
        {
            "subject": [f"{stream}.{n % subjects}" for n in numbers],
            "id": [f"{stream}-{n}" for n in numbers],
            "data": [data or b"%d" % n for n in numbers],
        }
    )


def publish(bare: BareServer, *batches: pa.RecordBatch, **options: str) -> int:
    given = {"url": bare.url, **options}
    return publish_batches(SinkOptions.of(given, COLUMNS, overwrite=False), batches).rows


def payloads(bare: BareServer, stream: str) -> list[bytes]:
    last = bare.api(f"STREAM.INFO.{stream}")["state"]["last_seq"]
    found = (bare.api(f"STREAM.MSG.GET.{stream}", {"seq": seq})["message"] for seq in range(1, last + 1))
    return [base64.b64decode(message["data"]) for message in found]


@pytest.mark.parametrize("order", ["pipelined", "strict"])
def test_rows_of_one_subject_are_stored_in_their_order_over_many_windows(bare: BareServer, order: str) -> None:
    stream = bare.stream(f"ordered-{order}")
    first, second = batch(stream, 50), batch(stream, 30, start=50)
    assert publish(bare, first, second, order=order, maxInFlight="16") == 80
    assert publish(bare, first, second, order=order, maxInFlight="1") == 80, "a repeat is acknowledged"
    assert payloads(bare, stream) == [b"%d" % n for n in range(80)]


def test_what_is_under_way_is_bounded_in_rows_and_bytes(bare: BareServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetstream_blocking, "MAX_BYTES_IN_FLIGHT", 100_000)
    seen: list[tuple[int, int]] = []
    answer = Window.answer

    def noted(self: Window[None]) -> tuple[None, Message, Ack | ApiError]:
        seen.append((self.under_way, self._bytes))
        return answer(self)

    monkeypatch.setattr(Window, "answer", noted)
    bare.stream("bounded")
    publish(bare, batch("bounded", 60, data=b"x" * 10_000))
    publish(bare, batch("bounded", 5_000, start=100), maxInFlight="300")
    assert max(size for _, size in seen) < 100_000 + 50_000
    assert max(rows for rows, _ in seen) <= 300
    assert len(seen) == 5_060


def test_after_a_refusal_strict_order_stores_nothing_more_of_that_subject(bare: BareServer) -> None:
    """Pipelined, what was on its way behind it may be stored: that is the difference."""
    for order in ("strict", "pipelined"):
        stream = bare.stream(f"refusing-{order}", max_msg_size=1_000)
        small = batch(stream, 6)
        data = small.column("data").to_pylist()
        data[3] = b"x" * 5_000
        with pytest.raises(UnhealthyError, match=r"and no more: message size exceeds maximum"):
            publish(bare, small.set_column(2, "data", pa.array(data)), order=order)
        stored = payloads(bare, stream)
        assert stored[:3] == [b"0", b"1", b"2"]
        assert stored[3:] == [] if order == "strict" else set(stored[3:]) <= {b"4", b"5"}


@pytest.mark.parametrize("order", ["pipelined", "strict"])
def test_nothing_is_stored_under_a_lease_that_is_gone(bare: BareServer, order: str) -> None:
    stream = bare.stream(f"leased-{order}")
    lease = f"{stream}.lease"
    bare.publish([(lease, encode_headers([]), b"mine")])
    assert publish(bare, batch(stream, 3), leaseSubject=lease, leaseSeq="1", order=order) == 3
    bare.publish([(lease, encode_headers([]), b"theirs")])
    with pytest.raises(LeaseLost):
        publish(bare, batch(stream, 3, start=10), leaseSubject=lease, leaseSeq="1", order=order)
    assert payloads(bare, stream) == [b"mine", b"0", b"1", b"2", b"theirs"]


@pytest.mark.parametrize("order", ["pipelined", "strict"])
def test_a_subject_no_stream_takes_is_an_error_and_no_silence(bare: BareServer, order: str) -> None:
    with pytest.raises(UnhealthyError, match=r"no stream takes nobodys\.0"):
        publish(bare, batch("nobodys", 2), order=order)


def until_stored(server: BareServer, stream: str) -> None:
    """Until the broker has nothing more to store: its count stands still."""
    before = -1
    while (now := server.api(f"STREAM.INFO.{stream}")["state"]["messages"]) != before:
        before = now
        time.sleep(0.3)


def test_a_broker_with_too_much_to_store_says_so_and_less_at_a_time_helps(tmp_path: Path) -> None:
    with bare_server(tmp_path, jetstream="max_buffered_msgs: 2") as server:
        server.stream("busy")
        with pytest.raises(UnhealthyError, match="less maxInFlight, or fewer tasks"):
            publish(server, batch("busy", 5_000))
        until_stored(server, "busy")  # what was under way then still fills its buffer
        assert publish(server, batch("busy", 500, start=10_000), maxInFlight="1") == 500


@pytest.mark.parametrize(
    ("options", "columns", "words"),
    [
        ({"maxBytes": "1"}, COLUMNS, "the nats sink has no option maxBytes: it has creds, .*order, .*user"),
        ({"order": "none"}, COLUMNS, "option order is 'none': one of pipelined, strict"),
        ({"subject": "a.b"}, COLUMNS, "which of them is meant"),
        ({}, ("id", "data"), r"subject is not there \(the option subject"),
        ({"subject": "a.b"}, ("data",), "subject, id is not there"),
        ({"leaseSubject": "a"}, COLUMNS, "needs both leaseSubject and leaseSeq"),
        ({"leaseSubject": "a", "leaseSeq": "x"}, COLUMNS, "option leaseSeq is 'x'"),
        ({"url": ""}, COLUMNS, "needs the option 'url'"),
    ],
)
def test_an_option_of_the_sink_that_cannot_be_meant_is_refused(
    options: dict[str, str], columns: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        SinkOptions.of({"url": "nats://localhost"} | options, columns, overwrite=False)
    SinkOptions.of({"url": "nats://localhost", "subject": "a"}, ("id", "data"), overwrite=False)
