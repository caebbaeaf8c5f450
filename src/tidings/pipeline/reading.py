"""Reading a stream by sequence: every record of a range, or the knowledge that one is missing.

A read is stateless, so a repeated read answers the same. Batched direct get may be answered by a replica that lags, so
its word is never taken for an end or a hole: what seems to be one is confirmed with the leader (`STREAM.MSG.GET`), and
if the leader has more the page is asked for again. What the broker appends to a record's headers is cut from the end of
the raw block, where no sender can write.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from tidings.broker.jetstream import NO_MESSAGE, NO_STREAM, ApiError, parse_time
from tidings.errors import BrokerUnreachable, LogGap, LogRegressed, UsageError
from tidings.pipeline.judging import Stored
from tidings.pipeline.plain import PlainConnection, PlainLost, Reply

T = TypeVar("T")
PAGE_RECORDS = 10_000
PAGE_BYTES = 8 * 1024 * 1024
#: how often a replica may lag before the read gives up
LAGS = 50
_APPENDED = b"Nats-Stream: "
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stream is, and who says so."""

    url: str
    creds: str | None
    stream: str
    name: str = "tidings"

    def connect(self) -> PlainConnection:
        return PlainConnection.connect(self.url, Path(self.creds) if self.creds else None, name=self.name)


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
        self._connection: PlainConnection | None = None
        #: how often the connection was made: a caller who sees it change must check its mark again
        self.generation = 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, question: Callable[[PlainConnection], T]) -> T:
        """Put a question that may be repeated."""
        if self._connection is not None:
            try:
                return question(self._connection)
            except PlainLost:
                self.close()
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
        position, lags = first, 0
        whole = subject == ">"
        while position <= last:
            page = self.ask(lambda connection, at=position: list(self._page(connection, at, last, subject)))  # type: ignore[misc]
            for record in page:
                if whole and record.seq > position:
                    ahead = self.following(subject, position)
                    if ahead is None or ahead.seq < record.seq:
                        break  # a replica that lags left it out; ask again from here
                    yield Missing(position, record.seq - 1)
                if record.seq > last:
                    return
                yield record
                position, lags = record.seq + 1, 0
            else:
                if page:
                    continue
                ahead = self.following(subject, position)
                if ahead is None or ahead.seq > last:
                    yield from self._missing_tail(position, last, whole=whole)
                    return
            lags += 1
            if lags > LAGS:
                raise BrokerUnreachable(f"{self.place.stream} answers short pages at {position}: its replicas lag")

    def _missing_tail(self, position: int, last: int, *, whole: bool) -> Iterator[Missing]:
        if whole:
            if self.state().last < last:
                raise LogRegressed(f"{self.place.stream} ends at {self.state().last}, before {last}: it went backwards")
            yield Missing(position, last)

    def _page(self, connection: PlainConnection, first: int, last: int, subject: str) -> Iterator[Stored]:
        count = min(PAGE_RECORDS, last - first + 1)
        body = {"seq": first, "next_by_subj": subject, "batch": count, "max_bytes": PAGE_BYTES}
        token = connection.send_request(f"$JS.API.DIRECT.GET.{self.place.stream}", json.dumps(body).encode())
        previous = first - 1
        for reply in connection.replies():
            if reply.token != token:
                continue
            if reply.status is not None:
                _check_status(self.place.stream, reply.status, reply.block)
                return
            record = stored_of(self.place.stream, reply)
            if record.seq <= previous:
                raise LogGap(f"{self.place.stream} answered {record.seq} after {previous}: the page is not in order")
            previous = record.seq
            yield record


def _check_status(stream: str, status: int, block: bytes) -> None:
    if status in (204, 404):
        return
    if status == 503:
        raise UsageError(f"{stream} cannot be read: no such stream, or it does not allow direct get")
    raise ApiError(f"read {stream}", {"err_code": status, "description": block[12:80].decode(errors="replace")})


def stored_of(stream: str, reply: Reply) -> Stored:
    """The record in an answer to a direct get: the broker's tail cut off, the sender's own block as it was."""
    block = reply.block
    cut = block.rfind(_APPENDED)
    if cut < 0:
        raise LogGap(f"{stream} sent a record without saying where it is from")
    broker = dict(line.split(b": ", 1) for line in block[cut : -len(_END)].split(b"\r\n"))
    own = block[:cut]
    if own:
        own += b"\r\n"
    try:
        seq, subject = int(broker[b"Nats-Sequence"]), broker[b"Nats-Subject"].decode("utf-8", "backslashreplace")
        when = parse_stamp(broker[b"Nats-Time-Stamp"])
    except KeyError as error:
        raise LogGap(f"{stream} sent a record without its {error}") from None
    return Stored(seq, when, subject, own, reply.payload)


def parse_stamp(stamp: bytes) -> int:
    """Like `parse_time`; the second is the same for many records in a row."""
    second, _, fraction = stamp.rstrip(b"Z").partition(b".")
    return _second(second) + int((fraction + b"000000000")[:9])


@lru_cache(maxsize=64)
def _second(second: bytes) -> int:
    return parse_time(second.decode())
