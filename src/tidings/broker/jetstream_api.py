"""JetStream without I/O: what is asked, what the answers mean, and what each failure leaves open.

A call is a generator (`Steps`): it yields `Ask`, `AskPage` or `Sleep`, is sent what came back, and returns its result.
`JetStream` (asyncio) and `BlockingJetStream` (sockets) run the same steps, so requests, error codes, records and the
rules of reading exist once. Nothing here keeps a connection, reads a clock or repeats a write.

`RangeReader` reads a range of a stream and is never shorter than the stream's leader says: direct get may be answered
by a replica that lags, so its word is taken neither for an end nor for a hole.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Generator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias, TypeVar

from tidings.broker.records import Missing, Page, StoredRecord
from tidings.errors import BrokerUnreachable, ConflictError, LogFull, LogGap, LogRegressed, OutcomeUnknown, TidingsError
from tidings.nats.core import status_of
from tidings.nats.errors import NatsError, NoResponders, NotConnected, PublishDenied, Unwritable
from tidings.wire.times import parse_time

EXPECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
EXPECT_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
WRONG_LAST_SEQUENCE = 10071
NO_ROOM = 10077
NO_MESSAGE = 10037
NO_STREAM = 10059
NO_CONSUMER = 10014
#: what a stream says of its life: another one, another stream, whatever its sequences
EPOCH_KEY = "td.epoch"
#: how often a replica may lag before a read gives up
LAGS = 50
#: a purge of much takes its time
PURGE_TIMEOUT = 30.0
_NOTHING_PENDING = b"\r\nNats-Num-Pending: 0\r\n"


class ApiError(TidingsError):
    """The broker answered, and its answer was no."""

    code = "broker_refused"

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        self.err_code = int(error.get("err_code", error.get("code", 0)))
        self.description = str(error.get("description", ""))
        super().__init__(f"{what}: {self.description} ({self.err_code})")


# --- what a driver is asked ---


class Ask(NamedTuple):
    """One request with one answer, which is sent back as (header block, payload); a 503 is raised as `NoResponders`."""

    subject: str
    payload: bytes = b""
    headers: Mapping[str, str] | None = None
    #: asking twice does no harm: a driver may do it on a new connection
    repeatable: bool = True
    #: seconds; None: as long as the driver usually waits
    timeout: float | None = None


class AskPage(NamedTuple):
    """One request with many answers: they go into `page` until it takes no more."""

    subject: str
    payload: bytes
    page: Page


class Sleep(NamedTuple):
    seconds: float


T = TypeVar("T")
Request: TypeAlias = Ask | AskPage | Sleep
Answer: TypeAlias = tuple[bytes, bytes]
Steps: TypeAlias = Generator[Request, Answer | None, T]


# --- requests ---


def ask(request: Ask) -> Steps[Answer]:
    try:
        answer = yield request
    except (NoResponders, PublishDenied, Unwritable):
        raise
    except NotConnected as error:
        raise BrokerUnreachable(f"there is no connection to ask {request.subject} on: {error}") from error
    except (TimeoutError, NatsError, OSError) as error:
        raise OutcomeUnknown(
            f"no answer to {request.subject} ({type(error).__name__}): it may have happened"
        ) from error
    assert answer is not None
    return answer


def api(
    operation: str, body: Mapping[str, Any] | None = None, *, repeatable: bool = True, timeout: float | None = None
) -> Steps[dict[str, Any]]:
    """One `$JS.API` request. `ApiError` for the server's errors, `OutcomeUnknown` if nothing came back."""
    subject, payload = f"$JS.API.{operation}", b"" if body is None else json.dumps(body).encode()
    try:
        _, said = yield from ask(Ask(subject, payload, None, repeatable, timeout))
    except NoResponders:
        raise BrokerUnreachable(f"JetStream does not answer {subject}") from None
    answer: dict[str, Any] = json.loads(said)
    if answer.get("error"):
        raise ApiError(operation, answer["error"])
    return answer


def publish(
    subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, timeout: float | None = None
) -> Steps[int]:
    """Publish and wait for the acknowledgement; the answer is the sequence."""
    try:
        _, said = yield from ask(Ask(subject, payload, headers, False, timeout))
    except NoResponders as error:
        raise LogFull(f"no stream takes {subject}: the log is full or the broker is starting") from error
    return stored_seq(subject, said)


def publish_if(subject: str, payload: bytes, revision: int) -> Steps[int]:
    """Publish if the last record of the subject is the one at `revision` (0: there is none); else `ConflictError`."""
    try:
        return (yield from publish(subject, payload, {EXPECT_SEQUENCE: str(revision)}))
    except ApiError as error:
        if error.err_code == WRONG_LAST_SEQUENCE:
            raise ConflictError(f"{subject} changed meanwhile: {error.description}") from error
        raise


def stored_seq(subject: str, said: bytes) -> int:
    """The sequence in an acknowledgement."""
    answer = json.loads(said)
    if answer.get("error"):
        raise ApiError(f"publish to {subject}", answer["error"])
    return int(answer["seq"])


def fence(subject: str, seq: int) -> dict[str, str]:
    """The headers that make the broker refuse a write once the lease in `subject` has a newer record."""
    return {EXPECT_SEQUENCE: str(seq), EXPECT_SUBJECT: subject}


def info(stream: str) -> Steps[dict[str, Any]]:
    return api(f"STREAM.INFO.{stream}")


def counts_of(stream: str, subject_filter: str) -> Steps[dict[str, int]]:
    """The subjects of a filter that have records now, and how many each has."""
    found: dict[str, int] = {}
    while True:
        answer = yield from api(f"STREAM.INFO.{stream}", {"subjects_filter": subject_filter, "offset": len(found)})
        page = answer["state"].get("subjects") or {}
        found |= page
        if not page or len(found) >= int(answer.get("total", 0)):
            return found


def consumer_info(stream: str, consumer: str) -> Steps[dict[str, Any] | None]:
    """What a consumer says of itself; None if there is none."""
    try:
        return (yield from api(f"CONSUMER.INFO.{stream}.{consumer}"))
    except ApiError as error:
        if error.err_code == NO_CONSUMER:
            return None
        raise


#: beyond every sequence: a purge of what is there and of what comes meanwhile, where nothing does
NO_END = 2**53


def purge(stream: str, *, subject_filter: str, below: int | None = None, keep: int | None = None) -> Steps[int]:
    """Remove records of a filter below a sequence, or all but the newest `keep`. Answers how many went.

    One of the two is needed: a purge without an end takes what was stored since it was decided.
    """
    if below is None and keep is None:
        raise ValueError(f"a purge of {subject_filter} needs an end")
    limits = {name: value for name, value in (("seq", below), ("keep", keep)) if value is not None}
    body = {"filter": subject_filter, **limits}
    answer = yield from api(f"STREAM.PURGE.{stream}", body, repeatable=False, timeout=PURGE_TIMEOUT)
    return int(answer["purged"])


# --- one record ---


def last(stream: str, subject: str) -> Steps[StoredRecord | None]:
    """The newest record of one subject, read from the leader."""
    return _get(stream, {"last_by_subj": subject})


def at(stream: str, seq: int) -> Steps[StoredRecord | None]:
    """The record at a sequence, read from the leader."""
    return _get(stream, {"seq": seq})


def following(stream: str, subject_filter: str, seq: int) -> Steps[StoredRecord | None]:
    """The first record of a filter at or after a sequence, read from the leader."""
    return _get(stream, {"seq": seq, "next_by_subj": subject_filter})


def _get(stream: str, body: Mapping[str, Any]) -> Steps[StoredRecord | None]:
    try:
        answer = yield from api(f"STREAM.MSG.GET.{stream}", body)
    except ApiError as error:
        if error.err_code == NO_MESSAGE:
            return None
        raise
    found = answer["message"]
    block, payload = (base64.b64decode(found.get(key, "")) for key in ("hdrs", "data"))
    return StoredRecord(found["seq"], parse_time(found["time"]), found["subject"], block, payload)


def direct_last(stream: str, subject: str) -> Steps[StoredRecord | None]:
    """The newest record of one subject, from whoever has it: for those who may not ask the leader."""
    page = Page()
    try:
        block, payload = yield from ask(Ask(f"$JS.API.DIRECT.GET.{stream}.{subject}"))
    except NoResponders:
        raise BrokerUnreachable(f"{stream} does not answer: no such stream, or the broker is starting") from None
    if page.take(block, payload):
        return next(page.records())
    if (status := status_of(block)) != 404:
        raise OutcomeUnknown(f"{subject} cannot be read: status {status}")
    return None


# --- many records ---


def page_of(stream: str, body: Mapping[str, Any], page_type: type[Page] = Page) -> Steps[Page]:
    """One page of a batched direct get, as the server sends it."""
    page = page_type()
    try:
        yield AskPage(f"$JS.API.DIRECT.GET.{stream}", json.dumps(body).encode(), page)
    except (PublishDenied, Unwritable):
        raise
    except (TimeoutError, NatsError, OSError) as error:
        raise BrokerUnreachable(f"{stream} stopped answering in the middle of a page") from error
    status = status_of(page.status)
    if status in (204, 404):
        return page
    if status == 503:
        raise BrokerUnreachable(f"{stream} cannot be read: no such stream, or it does not allow direct get")
    if status is None:
        raise LogGap(f"{stream} sent a record without saying where it is from")
    said = page.status[12:80].decode(errors="replace").partition("\r\n")[0].strip()
    raise ApiError(f"read {stream}", {"err_code": status, "description": said})


def first_after(stream: str, subject_filter: str, when: datetime) -> Steps[int | None]:
    """The sequence of the first record of `subject_filter` at or after `when`."""
    body = {"start_time": when.astimezone(UTC).isoformat(), "next_by_subj": subject_filter, "batch": 1}
    page = yield from page_of(stream, body)
    return page.seqs[0] if page.seqs else None


class RangeReader:
    """Reads the records of a filter with first <= seq <= last, in order, a page at a time.

    Ask for `next_parts` until it is `done`. With `holes` every sequence of the range is accounted for: what the stream
    does not have is `Missing`, once its leader confirmed it. That costs a question for each hole. `page_type` is what
    the records become: one that keeps less is quicker.
    """

    def __init__(
        self,
        stream: str,
        subject_filter: str,
        first: int,
        last: int,
        *,
        page: int,
        max_bytes: int,
        holes: bool = False,
        page_type: type[Page] = Page,
    ) -> None:
        self.stream, self.filter = stream, subject_filter
        self.position, self.last = first, last
        self._page, self._max_bytes, self._holes, self._page_type = page, max_bytes, holes, page_type
        self._lags = 0
        self.done = first > last

    def next_parts(self) -> Steps[list[Page | Missing]]:
        """What follows; it may be nothing although more is to come. The records of a part are consecutive."""
        first, last = self.position, self.last
        count = min(self._page, last - first + 1)
        body = {"seq": first, "next_by_subj": self.filter, "batch": count, "max_bytes": self._max_bytes}
        page = yield from page_of(self.stream, body, self._page_type)
        if not page.is_rising(first):
            raise LogGap(f"{self.stream} answered a page from {first} that is not in order")
        parts = yield from self._confirmed(page)
        if parts:
            self._lags = 0
        if self.position > last or (page.seqs and page.seqs[-1] > last and not self._holes):
            self.done = True
        elif not page.seqs or page.seqs[-1] >= self.position or _NOTHING_PENDING in page.status:
            parts += yield from self._end()
        return parts

    def _confirmed(self, page: Page) -> Steps[list[Page | Missing]]:
        """The parts of a page up to `last`, holes between them; up to where a replica that lags left something out."""
        parts: list[Page | Missing] = []
        while page.seqs:
            if self._holes and page.seqs[0] > self.position:
                ahead = yield from following(self.stream, ">", self.position)
                if ahead is None or ahead.seq < page.seqs[0]:
                    break
                hole = Missing(self.position, min(page.seqs[0] - 1, self.last))
                parts.append(hole)
                self.position = hole.last + 1
            count = page.leading(self.last, unbroken=self._holes)
            if not count:
                break
            parts.append(page.cut(0, count))
            self.position = page.seqs[count - 1] + 1
            page = page.cut(count, len(page.seqs))
        return parts

    def _end(self) -> Steps[list[Page | Missing]]:
        """Nothing more came: is that the end, or does the leader have more?"""
        ahead = yield from following(self.stream, self.filter, self.position)
        if ahead is not None and ahead.seq <= self.last:
            self._lags += 1
            if self._lags > LAGS:
                raise BrokerUnreachable(f"{self.stream} answers short pages at {self.position}: its replicas lag")
            return []
        self.done = True
        if not self._holes:
            return []
        end = int((yield from info(self.stream))["state"]["last_seq"])
        if end < self.last:
            raise LogRegressed(f"{self.stream} ends at {end}, before {self.last}: it went backwards")
        return [Missing(self.position, self.last)]
