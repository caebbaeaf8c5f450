"""JetStream without I/O: what is asked, what the answers mean, and what each failure leaves open.

A call is a generator (`Steps`): it yields `Ask`, `AskPage` or `Sleep`, is sent what came back, and returns its result.
`JetStream` (asyncio) and `BlockingJetStream` (sockets) run the same steps, so requests, error codes, records and the
rules of reading exist once. Nothing here keeps a connection, reads a clock or repeats a write.

`RangeReader` reads a range of a stream and is never shorter than the stream's leader says: direct get may be answered
by a replica that lags, so its word is taken neither for an end nor for a hole.

Of a stream with replicas nobody can be asked for certain: whoever answers may lag, a former leader too. A record that
was read is true, for it never changes, and it proves that its replica has all before it. "There is none" is believed
(`replicated`) only of a replica that proves in the same answer how far it is, or if the records were removed, which
nothing undoes.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Generator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from tidings.errors import BrokerUnreachable, ConflictError, LogGap, LogRegressed, OutcomeUnknown
from tidings.nats.core import status_of
from tidings.nats.errors import (
    NO_CONSUMER,
    NO_MESSAGE,
    NO_QUORUM,
    NOT_LEADER,
    ApiError,
    NatsError,
    NoResponders,
    NotConnected,
    PublishDenied,
    Refusal,
    Unwritable,
)
from tidings.wire.records import Missing, Page, StoredRecord, parse_time

EXPECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
EXPECT_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
#: what a stream says of its life: another one, another stream, whatever its sequences
EPOCH_KEY = "td.epoch"
#: how often a replica may lag before a read gives up, and the pause before it is asked again
LAGS = 50
LAG_PAUSE = 0.1
#: how often a stream that says it ends before what is asked for is not believed
SHORT_LOOKS = 10
#: a purge of much takes its time
PURGE_TIMEOUT = 30.0
_TOO_MANY_SUBJECTS = 413
_UP_TO = re.compile(rb"\r\nNats-UpTo-Sequence: ([0-9]+)\r\n")
_NOTHING_PENDING = b"\r\nNats-Num-Pending: 0\r\n"


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
        refused = ApiError(operation, answer["error"])
        if refused.err_code in (NO_QUORUM, NOT_LEADER):
            raise BrokerUnreachable(f"JetStream cannot answer now: {refused}") from refused
        raise refused
    return answer


def publish(
    subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, timeout: float | None = None
) -> Steps[int]:
    """Publish and wait for the acknowledgement; the answer is the sequence."""
    try:
        block, said = yield from ask(Ask(subject, payload, headers, False, timeout))
    except NoResponders as error:
        raise BrokerUnreachable(
            f"no stream takes {subject} now: the broker is starting, or its replicas choose a leader"
        ) from error
    return read_ack(subject, block, said).seq


def publish_if(subject: str, payload: bytes, revision: int) -> Steps[int]:
    """Publish if the last record of the subject is the one at `revision` (0: there is none); else `ConflictError`."""
    try:
        return (yield from publish(subject, payload, {EXPECT_SEQUENCE: str(revision)}))
    except ApiError as error:
        if error.refusal in (Refusal.STALE, Refusal.BUSY):
            raise ConflictError(f"{subject} changed meanwhile: {error.description}") from error
        raise


class Ack(msgspec.Struct):
    """Where a message is stored. `duplicate`: the stream has had a record of this `Nats-Msg-Id`, whoever sent it."""

    seq: int = 0
    duplicate: bool = False
    error: dict[str, Any] | None = None


_ACKS = msgspec.json.Decoder(Ack)


def read_ack(subject: str, block: bytes, payload: bytes) -> Ack:
    """What the answer to a published message says. `ApiError` if it was not stored: its `refusal` says why."""
    if block and (status := status_of(block)) is not None and not payload:
        words = f"no stream takes {subject}" if status == 503 else "the broker has more to store than it buffers"
        raise ApiError(f"publish to {subject}", {"code": status, "description": words})
    try:
        ack = _ACKS.decode(payload)
    except msgspec.MsgspecError as error:
        raise OutcomeUnknown(f"the acknowledgement of {subject} cannot be read: it may be stored") from error
    if ack.error:
        raise ApiError(f"publish to {subject}", ack.error)
    return ack


def fence(subject: str, seq: int) -> dict[str, str]:
    """The headers that make the broker refuse a write once the lease in `subject` has a newer record."""
    return {EXPECT_SEQUENCE: str(seq), EXPECT_SUBJECT: subject}


def info(stream: str) -> Steps[dict[str, Any]]:
    return api(f"STREAM.INFO.{stream}")


def info_from(stream: str, at_least: int, *, replicated: bool) -> Steps[dict[str, Any]]:
    """The same of a stream that had a record at `at_least`: who says that it ends before may have been its leader."""
    for _ in range(LAGS if replicated else 0):
        answer = yield from info(stream)
        if int(answer["state"]["last_seq"]) >= at_least:
            return answer
        yield Sleep(LAG_PAUSE)
    return (yield from info(stream))


def counts_of(stream: str, subject_filter: str, at_least: int = 0) -> Steps[dict[str, int]]:
    """The subjects of a filter that have records now, and how many each has. `at_least`: a sequence the stream has; who
    says that it ends before is asked again."""
    found: dict[str, int] = {}
    lag = Lag(stream, at_least)
    while True:
        answer = yield from api(f"STREAM.INFO.{stream}", {"subjects_filter": subject_filter, "offset": len(found)})
        if int(answer["state"]["last_seq"]) < at_least:
            yield from lag.wait()
            continue
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
    """The newest record of one subject, read from the leader; with replicas there may be a newer one."""
    return _get(stream, {"last_by_subj": subject})


def at(stream: str, seq: int, *, replicated: bool = False, patient: bool = True) -> Steps[StoredRecord | None]:
    """The record at a sequence, read from the leader, or from a replica that has it.

    `patient`: it is known to have been there, so a stream with replicas that seems to end before it is asked for a
    while. Not for a number that anybody could have made up.
    """
    if not replicated:
        return (yield from _get(stream, {"seq": seq}))
    found = yield from following(stream, ">", seq, replicated=True, through=seq if patient else None)
    return found if found is not None and found.seq == seq else None


def following(
    stream: str, subject_filter: str, seq: int, *, replicated: bool = False, through: int | None = None
) -> Steps[StoredRecord | None]:
    """The first record of a filter at or after a sequence, read from the leader.

    With replicas "none" is proven as far as `through`, if that is given, or else as far as the stream was just now.
    """
    lag = Lag(stream, seq)
    while True:
        found = yield from _get(stream, {"seq": seq, "next_by_subj": subject_filter})
        if found is not None or not replicated:
            return found
        if (yield from is_absent(stream, subject_filter, seq, through, lag)):
            return None
        yield from lag.wait()


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


def first_after(stream: str, subject_filter: str, when: datetime, *, replicated: bool = False) -> Steps[int | None]:
    """The sequence of the first record of `subject_filter` at or after `when`."""
    lag = Lag(stream, 0)
    while True:
        found = yield from _first_since(stream, subject_filter, when)
        if found is not None or not replicated:
            return found
        if (yield from _is_none_since(stream, subject_filter, when, lag)):
            return None
        yield from lag.wait()


def _first_since(stream: str, subject_filter: str, when: datetime) -> Steps[int | None]:
    body = {"start_time": when.astimezone(UTC).isoformat(), "next_by_subj": subject_filter, "batch": 1}
    page = yield from page_of(stream, body)
    return page.seqs[0] if page.seqs else None


def _is_none_since(stream: str, subject_filter: str, when: datetime, lag: Lag) -> Steps[bool]:
    """Is it proven that a filter has no record at or after `when`?"""
    first = yield from _first_since(stream, ">", when)
    if first is not None:
        return (yield from is_absent(stream, subject_filter, first, None, lag))
    head = int((yield from info(stream))["state"]["last_seq"])
    newest = (yield from at(stream, head, replicated=True)) if head else None
    return newest is None or newest.time_ns < when.timestamp() * 1e9


# --- what a stream with replicas does not have ---


class Lag:
    """How often a replica was found to lag: one that never catches up is an error, and no end."""

    def __init__(self, stream: str, position: int) -> None:
        self.stream, self.position = stream, position
        self.count = 0

    def wait(self, pause: float = LAG_PAUSE) -> Steps[None]:
        self.count += 1
        if self.count > LAGS:
            raise BrokerUnreachable(f"{self.stream} answers short pages at {self.position}: its replicas lag")
        if pause:
            yield Sleep(pause)


def is_absent(stream: str, subject_filter: str, first: int, through: int | None, lag: Lag) -> Steps[bool]:
    """Is it proven that a filter has no record from `first` through `through` (the end of the stream, if None)?

    A stream that ends before that is not believed at once: whoever said so may have been its leader before.
    """
    state = (yield from info(stream))["state"]
    end = int(state["last_seq"])
    if through is None or (end < through and lag.count >= SHORT_LOOKS):
        through = end
    if end < through:
        return False
    if first > through or not int(state["messages"]):
        return True
    if subject_filter == ">":
        return (yield from is_removed(stream, first, through))
    try:
        return (yield from _has_none_newer(stream, subject_filter, first, through))
    except ApiError as error:
        if error.err_code != _TOO_MANY_SUBJECTS:
            raise
    return (yield from _is_none_among(stream, subject_filter, first, through))


def is_removed(stream: str, first: int, through: int) -> Steps[bool]:
    """Were all these records removed? Whoever says so is right, for it is never undone."""
    state = (yield from api(f"STREAM.INFO.{stream}", {"deleted_details": True}))["state"]
    kept = max(first, int(state["first_seq"]))
    if int(state["last_seq"]) < through:
        return False
    return kept > through or set(range(kept, through + 1)) <= set(state.get("deleted") or ())


def _has_none_newer(stream: str, subject_filter: str, first: int, through: int) -> Steps[bool]:
    """The newest record of every subject, from one replica that says how far it is: is each of them before `first`?

    One that finds nothing at all does not say how far it is, so it is also asked for a subject that has a record.
    """
    known = yield from _get(stream, {"seq": 1, "next_by_subj": ">"})
    if known is None:
        return False
    body = {"multi_last": [subject_filter, known.subject], "seq": first, "batch": 2}
    page = yield from page_of(stream, body)
    return _is_up_to(page, through) and not any(_matches(subject_filter, each) for each in page.subjects)


def _is_up_to(page: Page, through: int) -> bool:
    said = _UP_TO.search(page.status)
    return said is not None and int(said[1]) >= through


def _is_none_among(stream: str, subject_filter: str, first: int, through: int) -> Steps[bool]:
    """The same by reading everything from `first` on, for a filter of more subjects than the broker looks up."""
    reader = RangeReader(stream, ">", first, through, page=1_000, max_bytes=1 << 20, replicated=True)
    while not reader.done:
        for part in (yield from reader.next_parts()):
            if isinstance(part, Page) and any(_matches(subject_filter, each) for each in part.subjects):
                return False
    return True


def _matches(subject_filter: str, subject: str) -> bool:
    wanted, tokens = subject_filter.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, tokens = wanted[:-1], tokens[: len(wanted) - 1] if len(tokens) >= len(wanted) else []
    return len(wanted) == len(tokens) and all(a in ("*", b) for a, b in zip(wanted, tokens, strict=True))


def last_as_of(stream: str, subject: str, known: str, seq: int) -> Steps[StoredRecord | None]:
    """The newest record of a subject, from a replica that has at least the record of the subject `known` at `seq`.

    Whoever just wrote that one and knows that nobody else writes has the newest there is.
    """
    lag = Lag(stream, seq)
    while True:
        page = yield from page_of(stream, {"multi_last": [subject, known], "batch": 2})
        if any(name == known and at >= seq for name, at in zip(page.subjects, page.seqs, strict=True)):
            return next((record for record in page.records() if record.subject == subject), None)
        yield from lag.wait()


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
        replicated: bool = False,
        page_type: type[Page] = Page,
    ) -> None:
        self.stream, self.filter = stream, subject_filter
        self.position, self.last = first, last
        self._page, self._max_bytes, self._holes, self._page_type = page, max_bytes, holes, page_type
        self._replicated = replicated
        self._lag = Lag(stream, first)
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
            self._lag = Lag(self.stream, self.position)
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
            yield from self._lag.wait(LAG_PAUSE if self._replicated else 0)
            return []
        if ahead is None and self._replicated and not (yield from self._is_proven()):
            yield from self._lag.wait()
            return []
        self.done = True
        if not self._holes:
            return []
        if ahead is not None and self._replicated:
            return [Missing(self.position, self.last)]
        end = int((yield from info(self.stream))["state"]["last_seq"])
        if end < self.last:
            raise LogRegressed(f"{self.stream} ends at {end}, before {self.last}: it went backwards")
        return [Missing(self.position, self.last)]

    def _is_proven(self) -> Steps[bool]:
        return is_absent(self.stream, self.filter, self.position, self.last, self._lag)
