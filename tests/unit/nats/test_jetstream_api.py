"""The steps of JetStream, answered from memory: what is asked, what answers mean, what a failure leaves open."""

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

from tidings.errors import BrokerUnreachable, ConflictError, LogGap, LogRegressed, OutcomeUnknown
from tidings.nats import jetstream_api as api
from tidings.nats.errors import (
    ID_UNDER_WAY,
    NO_MESSAGE,
    WRITE_UNDER_WAY,
    WRONG_LAST_SEQUENCE,
    ApiError,
    ConnectionGone,
    NoResponders,
    NotConnected,
    PublishDenied,
)
from tidings.nats.jetstream_api import NO_END, Ask, AskPage, RangeReader, Steps
from tidings.wire.records import Missing, Page

T = TypeVar("T")
TIME = "2026-01-02T03:04:05.123456789Z"


def run(steps: Steps[T], answer: Callable[[Any], Any]) -> T:
    """What the steps come to if each request is answered so; an exception is thrown in."""
    try:
        request = next(steps)
        while True:
            said = answer(request)
            request = steps.throw(said) if isinstance(said, Exception) else steps.send(said)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def says(**answer: Any) -> Callable[[Ask], tuple[bytes, bytes]]:
    return lambda _request: (b"", json.dumps(answer).encode())


def refuses(code: int) -> Callable[[Ask], tuple[bytes, bytes]]:
    return says(error={"code": 400, "err_code": code, "description": "no"})


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (NoResponders("x"), BrokerUnreachable),
        (NotConnected("x"), BrokerUnreachable),
        (PublishDenied("x"), PublishDenied),
        (ConnectionGone("x"), OutcomeUnknown),
        (TimeoutError(), OutcomeUnknown),
        (OSError(), OutcomeUnknown),
    ],
)
def test_what_a_driver_raises_says_whether_it_may_have_happened(error: Exception, becomes: type[Exception]) -> None:
    with pytest.raises(becomes):
        run(api.api("STREAM.INFO.S"), lambda _: error)


def test_nobody_who_takes_a_message_is_no_full_log_and_another_last_record_a_conflict() -> None:
    with pytest.raises(BrokerUnreachable, match="choose a leader"):
        run(api.publish("s", b""), lambda _: NoResponders("s"))
    for code in (WRONG_LAST_SEQUENCE, WRITE_UNDER_WAY, ID_UNDER_WAY):
        with pytest.raises(ConflictError):
            run(api.publish_if("s", b"", 3), refuses(code))
    with pytest.raises(ApiError):
        run(api.publish_if("s", b"", 3), refuses(7))
    assert run(api.publish_if("s", b"", 3), says(seq=4)) == 4


@pytest.mark.parametrize(
    ("code", "words", "again"),
    [
        (WRITE_UNDER_WAY, "wrong last sequence", True),
        (ID_UNDER_WAY, "duplicate message id is in process", True),
        (WRONG_LAST_SEQUENCE, "wrong last sequence: 8", False),
        (WRONG_LAST_SEQUENCE, "wrong last sequence: 6", True),
        (WRONG_LAST_SEQUENCE, "wrong last sequence", False),
        (10077, "maximum messages exceeded", False),
    ],
)
def test_a_refusal_proves_a_newer_record_only_if_it_is_by_one(code: int, words: str, again: bool) -> None:
    refused = ApiError("publish", {"err_code": code, "description": words})
    assert refused.proves_nothing(7) is again


def test_a_write_is_never_repeatable_and_a_read_always_is() -> None:
    asked: list[Ask] = []

    def answer(request: Ask) -> Any:
        asked.append(request)
        return says(seq=1, purged=1)(request)

    run(api.publish("s", b""), answer)
    run(api.purge("S", subject_filter="s", below=NO_END), answer)
    run(api.info("S"), answer)
    assert [each.repeatable for each in asked] == [False, False, True]


def test_a_purge_has_an_end() -> None:
    with pytest.raises(ValueError, match="needs an end"):
        run(api.purge("S", subject_filter="s"), says(purged=1))


def test_no_record_is_none_and_another_error_is_raised() -> None:
    assert run(api.last("S", "s"), refuses(NO_MESSAGE)) is None
    with pytest.raises(ApiError):
        run(api.last("S", "s"), refuses(NO_MESSAGE + 1))


class Stream:
    """A stream in memory with a leader, and a replica that answers pages and may lack the newest or some between."""

    def __init__(self, seqs: Iterable[int], *, end: int, lacks: dict[int, int] | None = None) -> None:
        self.seqs, self.end = list(seqs), end
        #: sequence -> how many more pages leave it out
        self.lacks = dict(lacks or {})
        self.asked: list[str] = []

    def __call__(self, request: Any) -> Any:
        self.asked.append(request.subject.removeprefix("$JS.API.").removesuffix(".S"))
        body = json.loads(request.payload or b"{}")
        if isinstance(request, AskPage):
            return self._page(request.page, body)
        if "INFO" in request.subject:
            return says(state={"last_seq": self.end})(request)
        ahead = next((seq for seq in self.seqs if seq >= body["seq"]), None)
        if ahead is None:
            return refuses(NO_MESSAGE)(request)
        return says(message={"seq": ahead, "time": TIME, "subject": "s", "data": ""})(request)

    def _page(self, page: Page, body: dict[str, Any]) -> None:
        rest = [seq for seq in self.seqs if seq >= body["seq"] and not self.lacks.get(seq)]
        for seq in self.lacks:
            self.lacks[seq] -= 1
        for seq in rest[: body["batch"]]:
            tail = f"Nats-Stream: S\r\nNats-Subject: s\r\nNats-Sequence: {seq}\r\nNats-Time-Stamp: {TIME}\r\n\r\n"
            assert page.take(b"NATS/1.0\r\n" + tail.encode(), b"")
        pending = max(0, len(rest) - body["batch"])
        assert not page.take(f"NATS/1.0 204 EOB\r\nNats-Num-Pending: {pending}\r\n\r\n".encode(), b"")


def read(stream: Stream, first: int, last: int, *, holes: bool, page: int = 3) -> list[int | Missing]:
    reader = RangeReader("S", ">", first, last, page=page, max_bytes=1000, holes=holes)
    found: list[int | Missing] = []
    while not reader.done:
        for part in run(reader.next_parts(), stream):
            found += [part] if isinstance(part, Missing) else part.seqs
    return found


def test_every_sequence_of_a_range_is_a_record_or_missing() -> None:
    stream = Stream([2, 3, 6, 9], end=10)
    assert read(stream, 1, 10, holes=True) == [
        Missing(1, 1), 2, 3, Missing(4, 5), 6, Missing(7, 8), 9, Missing(10, 10),
    ]  # fmt: skip
    assert read(stream, 4, 5, holes=True) == [Missing(4, 5)]
    assert read(stream, 1, 10, holes=False) == [2, 3, 6, 9]
    assert read(stream, 1, 8, holes=False) == [2, 3, 6]


@pytest.mark.parametrize("holes", [True, False])
def test_what_a_replica_left_out_at_the_end_is_asked_for_again(holes: bool) -> None:
    stream = Stream(range(1, 8), end=7, lacks={5: 3, 6: 3, 7: 3})
    assert read(stream, 1, 7, holes=holes) == list(range(1, 8))


def test_what_a_replica_left_out_between_is_no_hole() -> None:
    stream = Stream([1, 2, 4, 5], end=5, lacks={2: 4})
    assert read(stream, 1, 5, holes=True) == [1, 2, Missing(3, 3), 4, 5]


def test_a_replica_that_never_catches_up_is_an_error_and_no_end() -> None:
    with pytest.raises(BrokerUnreachable, match="answers short pages at 1"):
        read(Stream([1], end=1, lacks={1: 1_000}), 1, 1, holes=False)


def test_an_end_before_the_end_of_the_range_is_a_regression() -> None:
    with pytest.raises(LogRegressed, match="ends at 3, before 9"):
        read(Stream([1, 2, 3], end=3), 1, 9, holes=True)
    assert read(Stream([1, 2, 3], end=3), 1, 9, holes=False) == [1, 2, 3]


def test_a_read_whose_last_page_says_so_asks_the_leader_once_and_for_no_empty_page() -> None:
    stream = Stream([1, 2], end=9)
    read(stream, 1, 9, holes=False)
    assert stream.asked == ["DIRECT.GET", "STREAM.MSG.GET"]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (b"NATS/1.0 503\r\n\r\n", BrokerUnreachable),
        (b"NATS/1.0 408 Bad Request\r\n\r\n", ApiError),
        (b"NATS/1.0\r\n\r\n", LogGap),
        (TimeoutError(), BrokerUnreachable),
    ],
)
def test_a_page_that_does_not_end_well_is_not_taken_for_a_short_one(
    end: bytes | Exception, error: type[Exception]
) -> None:
    def answer(request: AskPage) -> Exception | None:
        if isinstance(end, Exception):
            return end
        request.page.take(end, b"")
        return None

    with pytest.raises(error):
        run(api.page_of("S", {}), answer)


def test_a_page_out_of_order_is_refused() -> None:
    with pytest.raises(LogGap, match="not in order"):
        read(Stream([2, 1], end=2), 1, 2, holes=False)
