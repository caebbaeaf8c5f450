"""The options of the `nats` source, checked; docs/spark-source.md tells them one by one.

Where a read starts and ends is a `StreamPlace`: the earliest record, the latest, a sequence or a moment. A moment is
looked up with the stream's leader when it is needed, once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tidings.delivery.batch_sizing import PartSizes
from tidings.delivery.login import GivenOptions, Login, checked_url
from tidings.delivery.stream_reader import API, StreamLocation, StreamReader, StreamState
from tidings.errors import UsageError
from tidings.wire.records import parse_time

EARLIEST, LATEST = "earliest", "latest"
KNOWN = (
    *("url", "stream", "name", *Login.NAMES, "domain", "apiPrefix"),
    *("subject", "subjects", "headersAs", "missing"),
    *("start", "end", "startingOffsets", "endingOffsets"),
    *(
        "maxRecords",
        "maxRecordsPerTrigger",
        "maxBytesPerTrigger",
        "partitionRecords",
        "partitionBytes",
        "minPartitions",
    ),
    *("waitMs", "pollMs", "keepAliveMs"),
)
_FILTER = re.compile(r"(?:(?:\*|[^\s.*>][^\s.]*)\.)*(?:>|\*|[^\s.*>][^\s.]*)").fullmatch
_WORD = re.compile(r"[^\s.*>]+").fullmatch


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """Between two records of a stream: at a moment (nanoseconds), before or after a sequence, or at an end of it."""

    word: str | None = None
    seq: int = 0
    time_ns: int | None = None

    @classmethod
    def of(cls, option: str, text: str) -> StreamPlace:
        if text.lower() in (EARLIEST, LATEST):
            return cls(text.lower())
        if text.isascii() and text.isdigit():
            return cls(seq=int(text))
        try:
            moment = text if text.endswith("Z") else datetime.fromisoformat(text).isoformat()
            if text.endswith("Z") or datetime.fromisoformat(text).tzinfo is not None:
                return cls(time_ns=parse_time(moment))
        except ValueError:
            pass
        raise UsageError(
            f"option {option} is {text!r}: earliest, latest, a sequence, or a time such as 2026-11-17T09:00:00Z"
        )

    def before(self, reader: StreamReader, state: StreamState) -> int:
        """The last sequence before this place; a sequence is the first after it."""
        if self.time_ns is not None:
            return first_since(reader, state, self.time_ns) - 1
        if self.word is not None:
            return state.last if self.word == LATEST else max(state.first - 1, 0)
        return max(self.seq - 1, 0)

    def through(self, reader: StreamReader, state: StreamState) -> int:
        """The last sequence of a read that ends here; a sequence is the last itself."""
        return min(self.seq, state.last) if self.word is None and self.time_ns is None else self.before(reader, state)


def first_since(reader: StreamReader, state: StreamState, time_ns: int) -> int:
    """The sequence of the first record stored at that time or later; the one after the last if there is none.

    The leader is asked, some twenty times for a million records: its times rise with its sequences. Where they do not
    (records that were sourced from elsewhere) it is a place where they cross that time.
    """
    low, high = state.first, state.last + 1
    while low < high:
        middle = (low + high) // 2
        record = reader.following(">", middle)
        if record is None or record.seq >= high or record.time_ns >= time_ns:
            high = middle
        else:
            low = record.seq + 1
    return low


@dataclass(frozen=True)
class SourceOptions:
    """The options of one source, checked."""

    location: StreamLocation
    subjects: tuple[str, ...]
    headers_as: str
    start: StreamPlace
    end: StreamPlace | None
    missing: str
    max_records: int
    max_bytes: int | None
    parts: PartSizes
    wait: float
    poll: float
    keep_alive: float

    @classmethod
    def of(cls, given: Mapping[str, str]) -> SourceOptions:
        options = GivenOptions(given, KNOWN, "source")
        return cls(
            location=_location(options),
            subjects=_subjects(options.text("subjects", "subject") or ">"),
            headers_as=options.choice("headersAs", ("raw", "map", "both")),
            start=_start(options),
            end=_end(options),
            missing=options.choice("missing", ("fail", "rows", "skip")),
            max_records=options.number("maxRecordsPerTrigger", "maxRecords") or 50_000,
            max_bytes=options.size("maxBytesPerTrigger"),
            parts=PartSizes(
                options.number("partitionRecords") or 25_000,
                options.size("partitionBytes") or 32 << 20,
                options.number("minPartitions") or 1,
            ),
            wait=_seconds(options, "waitMs", 1_000, least=0),
            poll=_seconds(options, "pollMs", 50),
            keep_alive=_seconds(options, "keepAliveMs", 20_000),
        )

    def must_have_no_end(self) -> SourceOptions:
        """The same, for a streaming query."""
        if self.end is not None:
            raise UsageError("the options end and endingOffsets are for batch reads: a streaming query has no end")
        return self


def _location(options: GivenOptions) -> StreamLocation:
    stream = options.needed("stream")
    if not _WORD(stream):
        raise UsageError(f"option stream is {stream!r}: the name of one stream is needed")
    domain, api = options.text("domain"), options.text("apiPrefix")
    if domain and api:
        raise UsageError("the options domain and apiPrefix say the same thing: give one of them")
    if domain and not _WORD(domain):
        raise UsageError(f"option domain is {domain!r}: the name of a JetStream domain is one word")
    if api and not all(map(_WORD, api.removesuffix(".").split("."))):
        raise UsageError(f"option apiPrefix is {api!r}: a subject such as JS.hub.API is needed")
    login = Login.of(options)
    return StreamLocation(
        checked_url(options.needed("url")),
        login.creds,
        stream,
        options.text("name") or "tidings-source",
        login,
        f"$JS.{domain}.API" if domain else (api or API).removesuffix("."),
    )


def _subjects(text: str) -> tuple[str, ...]:
    subjects = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for subject in subjects:
        if not _FILTER(subject):
            raise UsageError(
                f"option subjects has {subject!r}: filters such as orders.*, orders.> are needed, commas between them"
            )
    return (">",) if ">" in subjects else subjects


def _start(options: GivenOptions) -> StreamPlace:
    text = options.text("startingOffsets", "start")
    return StreamPlace.of("startingOffsets", text) if text is not None else StreamPlace(seq=1)


def _end(options: GivenOptions) -> StreamPlace | None:
    text = options.text("endingOffsets", "end")
    end = StreamPlace.of("endingOffsets", text) if text is not None else None
    if end is not None and end.word == EARLIEST:
        raise UsageError("option endingOffsets is 'earliest': nothing would be read; latest, a sequence or a time")
    return end


def _seconds(options: GivenOptions, name: str, default: int, *, least: int = 1) -> float:
    number = options.number(name, least=least)
    return (default if number is None else number) / 1_000
