"""Reading a stream by sequence: every record of a range, or the knowledge that one is missing.

A read is stateless, so a repeated read answers the same. Batched direct get may be answered by a replica that lags, so
its word is never taken for an end or a hole: what seems to be one is confirmed with the leader (`STREAM.MSG.GET`), and
if the leader has more the page is asked for again. What the broker appends to a record's headers is cut from the end of
the raw block, where no sender can write.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import lt
from pathlib import Path
from typing import Any, TypeVar

from tidings.broker.answers import NO_MESSAGE, NO_STREAM, ApiError
from tidings.broker.blocking import WorkerConnection
from tidings.errors import BrokerUnreachable, LogGap, LogRegressed, TidingsError, UsageError
from tidings.nats.core import status_of
from tidings.nats.errors import ConnectionGone
from tidings.pipeline.judging import Stored
from tidings.wire.headers import DIRECT_GET_HEADERS, split_block
from tidings.wire.times import parse_time

T = TypeVar("T")
PAGE_RECORDS = 10_000
PAGE_BYTES = 4 * 1024 * 1024
#: how often a replica may lag before the read gives up
LAGS = 50
_APPENDED = b"\r\nNats-Stream: "
_END = b"\r\n\r\n"
#: what the broker appends to a record, exactly; anything else is left to `split_block`
_TAIL = re.compile(
    rb"\r\nNats-Stream: [!-~]+\r\nNats-Subject: ([!-~]+)\r\nNats-Sequence: ([0-9]+)"
    rb"\r\nNats-Time-Stamp: ([0-9T:-]+)(?:\.([0-9]{1,9}))?Z"
    rb"(?:\r\nNats-Num-Pending: [0-9]+)?(?:\r\nNats-Last-Sequence: [0-9]+)?\r\n\r\n\Z"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stream is, and who says so."""

    url: str
    creds: str | None
    stream: str
    name: str = "tidings"

    def connect(self) -> WorkerConnection:
        return WorkerConnection.open(self.url, Path(self.creds) if self.creds else None, name=self.name)


@dataclass(frozen=True, slots=True)
class Missing:
    """Sequences the stream does not have, confirmed with its leader."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class StreamState:
    first: int
    last: int
    metadata: dict[str, str]
    created: str


class StreamReader:
    """Reads one stream. A lost connection is made again once per question; every question may be repeated."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._connection: WorkerConnection | None = None
        #: how often the connection was made: a caller who sees it change must check its mark again
        self.generation = 0
        self._turn = threading.RLock()
        self._closed = threading.Event()

    def close(self) -> None:
        """For good, if it is the last call; a question opens it again."""
        self._closed.set()
        with self._turn:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def keep_alive(self, every: float) -> None:
        """Answer the broker's PING while nobody asks anything: it cuts whoever is silent for long."""
        threading.Thread(target=self._breathe, args=(every,), name="nats keep alive", daemon=True).start()

    def _breathe(self, every: float) -> None:
        while not self._closed.wait(every):
            with self._turn, suppress(TidingsError):  # the next question makes a new connection and checks the mark
                if self._connection is not None:
                    self._connection.ping()

    def ask(self, question: Callable[[WorkerConnection], T]) -> T:
        """Put a question that may be repeated."""
        with self._turn:
            if self._connection is not None:
                try:
                    return question(self._connection)
                except ConnectionGone:
                    self._hang_up()
            self._connection = self.place.connect()
            self.generation += 1
            return question(self._connection)

    def state(self) -> StreamState:
        answer = self._api(f"STREAM.INFO.{self.place.stream}", {})
        state = answer["state"]
        return StreamState(
            int(state["first_seq"]), int(state["last_seq"]), answer["config"].get("metadata") or {}, answer["created"]
        )

    def at(self, seq: int) -> Stored | None:
        """The record at a sequence, from the leader."""
        return self._get({"seq": seq}) if seq > 0 else None

    def following(self, subject: str, seq: int) -> Stored | None:
        """The first record of `subject` at or after a sequence, from the leader."""
        return self._get({"seq": seq, "next_by_subj": subject})

    def newest(self, subject: str) -> Stored | None:
        """The last record of `subject`, from the leader."""
        return self._get({"last_by_subj": subject})

    def _get(self, body: dict[str, Any]) -> Stored | None:
        try:
            found = self._api(f"STREAM.MSG.GET.{self.place.stream}", body)["message"]
        except ApiError as error:
            if error.err_code == NO_MESSAGE:
                return None
            raise
        data, block = (base64.b64decode(found.get(key, "")) for key in ("data", "hdrs"))
        return Stored(found["seq"], parse_time(found["time"]), found["subject"], block, data)

    def _api(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.ask(lambda connection: connection.api(operation, body))
        if answer.get("error"):
            error = ApiError(operation, answer["error"])
            if error.err_code == NO_STREAM:
                raise UsageError(f"there is no stream {self.place.stream!r} at {self.place.url}") from error
            raise error
        return answer

    # --- ranges ---

    def read(self, first: int, last: int, subject: str = ">") -> Iterator[Stored | Missing]:
        """Every record of `subject` with first <= seq <= last, in order; with ">" also what is missing between."""
        for page in self.pages(first, last, subject):
            if isinstance(page, Missing):
                yield page
            else:
                yield from page.records()

    def pages(self, first: int, last: int, subject: str = ">") -> Iterator[Page | Missing]:
        """The same by pages: the records of one are consecutive as far as the leader knows."""
        position, lags, whole = first, 0, subject == ">"
        while position <= last:
            page = self.ask(lambda connection, at=position: self._page(connection, at, last, subject))  # type: ignore[misc]
            for part in self._confirmed(page, position, last, whole=whole):
                yield part
                position, lags = (part.last if isinstance(part, Missing) else part.seqs[-1]) + 1, 0
            end = page.seqs[-1] if page.seqs else position
            if end < position:
                continue
            if position > last or (end > last and not whole):
                return
            ahead = self.following(subject, position)
            if ahead is None or ahead.seq > last:
                yield from self._missing_tail(position, last, whole=whole)
                return
            lags += 1
            if lags > LAGS:
                raise BrokerUnreachable(f"{self.place.stream} answers short pages at {position}: its replicas lag")

    def _confirmed(self, page: Page, position: int, last: int, *, whole: bool) -> Iterator[Page | Missing]:
        """The parts of a page up to `last`, holes between them; up to where a replica that lags left something out."""
        while page.seqs:
            if whole and page.seqs[0] > position:
                ahead = self.following(">", position)
                if ahead is None or ahead.seq < page.seqs[0]:
                    return
                yield Missing(position, min(page.seqs[0] - 1, last))
            count = page.leading(last, unbroken=whole)
            if not count:
                return
            yield page.cut(0, count)
            position = page.seqs[count - 1] + 1
            page = page.cut(count, len(page.seqs))

    def _missing_tail(self, position: int, last: int, *, whole: bool) -> Iterator[Missing]:
        if whole:
            if (end := self.state().last) < last:
                raise LogRegressed(f"{self.place.stream} ends at {end}, before {last}: it went backwards")
            yield Missing(position, last)

    def _page(self, connection: WorkerConnection, first: int, last: int, subject: str) -> Page:
        count = min(PAGE_RECORDS, last - first + 1)
        body = {"seq": first, "next_by_subj": subject, "batch": count, "max_bytes": PAGE_BYTES}
        token = connection.send_request(f"$JS.API.DIRECT.GET.{self.place.stream}", json.dumps(body).encode())
        page = Page()
        for block, payload in connection.parts(token):
            if not page.take(block, payload):
                _check_status(self.place.stream, block)
                break
        if not page.is_rising(first):
            raise LogGap(f"{self.place.stream} answered a page from {first} that is not in order")
        return page


class Page:
    """Consecutive records of a stream, by columns: most of them never become objects."""

    __slots__ = ("headers", "payloads", "seqs", "subjects", "times")

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.times: list[int] = []
        self.subjects: list[str] = []
        self.headers: list[bytes] = []
        self.payloads: list[bytes] = []

    def take(self, block: bytes, payload: bytes) -> bool:
        """Add an answer to a direct get, the broker's tail cut off; False if it is no record."""
        cut = block.rfind(_APPENDED)
        found = _TAIL.match(block, cut) if cut >= 0 else None
        if found is None:
            return self._take_strange(block, payload)
        subject, seq, second, fraction = found.groups()
        self.seqs.append(int(seq))
        self.times.append(_second(second) + int((fraction or b"").ljust(9, b"0")))
        self.subjects.append(subject.decode())
        self.headers.append(block[:cut] + _END)
        self.payloads.append(payload)
        return True

    def _take_strange(self, block: bytes, payload: bytes) -> bool:
        """A status, or a record whose sender's block or whose subject is not what one expects."""
        own, said = split_block(block, DIRECT_GET_HEADERS)
        if not {"Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"} <= said.keys():
            return False
        self.seqs.append(int(said["Nats-Sequence"]))
        self.times.append(parse_time(said["Nats-Time-Stamp"]))
        self.subjects.append(said["Nats-Subject"])
        self.headers.append(own)
        self.payloads.append(payload)
        return True

    def is_rising(self, first: int) -> bool:
        seqs = self.seqs
        if not seqs:
            return True
        return seqs[0] >= first and all(map(lt, seqs, seqs[1:]))

    def leading(self, last: int, *, unbroken: bool) -> int:
        """How many records from the start are not beyond `last` (and, if asked, without a hole)."""
        seqs = self.seqs
        count = bisect_right(seqs, last)
        if not unbroken or not count or seqs[count - 1] - seqs[0] == count - 1:
            return count
        return next(index for index in range(1, count) if seqs[index] != seqs[index - 1] + 1)

    def cut(self, start: int, end: int) -> Page:
        if start == 0 and end == len(self.seqs):
            return self
        part = Page()
        for name in Page.__slots__:
            setattr(part, name, getattr(self, name)[start:end])
        return part

    def records(self) -> Iterator[Stored]:
        return map(Stored, self.seqs, self.times, self.subjects, self.headers, self.payloads)


def _check_status(stream: str, block: bytes) -> None:
    status = status_of(block)
    if status in (204, 404):
        return
    if status == 503:
        raise UsageError(f"{stream} cannot be read: no such stream, or it does not allow direct get")
    if status is None:
        raise LogGap(f"{stream} sent a record without saying where it is from")
    raise ApiError(f"read {stream}", {"err_code": status, "description": block[12:80].decode(errors="replace")})


@lru_cache(maxsize=64)
def _second(second: bytes) -> int:
    """Many records in a row are of the same second."""
    return parse_time(second.decode())
