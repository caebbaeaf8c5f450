"""One stream of a broker, read by sequence over a connection of its own: what source, driver and status use.

A read is stateless, so a repeated read answers the same. The rules of reading are in `broker/jetstream_api.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidings.broker import jetstream_api as api
from tidings.broker.blocking import BlockingJetStream, WorkerConnection
from tidings.broker.jetstream_api import NO_STREAM, ApiError, RangeReader
from tidings.broker.records import Missing, Page, StoredRecord
from tidings.errors import UsageError

PAGE_RECORDS = 10_000
PAGE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StreamLocation:
    """Where a stream is, and who says so."""

    url: str
    creds: str | None
    stream: str
    name: str = "tidings"

    def connect(self) -> WorkerConnection:
        return WorkerConnection.open(self.url, Path(self.creds) if self.creds else None, name=self.name)


@dataclass(frozen=True, slots=True)
class StreamState:
    first: int
    last: int
    metadata: dict[str, str]
    created: str


class StreamReader(BlockingJetStream):
    """JetStream over a connection of its own, and one stream of it."""

    def __init__(self, location: StreamLocation) -> None:
        super().__init__(location.connect)
        self.location, self.stream = location, location.stream

    def state(self) -> StreamState:
        try:
            answer = self.run(api.info(self.stream))
        except ApiError as error:
            if error.err_code == NO_STREAM:
                raise UsageError(f"there is no stream {self.stream!r} at {self.location.url}") from error
            raise
        state = answer["state"]
        return StreamState(
            int(state["first_seq"]), int(state["last_seq"]), answer["config"].get("metadata") or {}, answer["created"]
        )

    def at(self, seq: int) -> StoredRecord | None:
        """The record at a sequence, from the leader."""
        return self.run(api.at(self.stream, seq)) if seq > 0 else None

    def following(self, subject: str, seq: int) -> StoredRecord | None:
        """The first record of `subject` at or after a sequence, from the leader."""
        return self.run(api.following(self.stream, subject, seq))

    def read(self, first: int, last: int, subject: str = ">") -> Iterator[StoredRecord | Missing]:
        """Every record of `subject` with first <= seq <= last, in order; with ">" also what is missing between."""
        for part in self.pages(first, last, subject):
            yield from (part,) if isinstance(part, Missing) else part.records()

    def pages(self, first: int, last: int, subject: str = ">") -> Iterator[Page | Missing]:
        """The same by pages: the records of one are consecutive as far as the leader knows."""
        reader = RangeReader(
            self.stream, subject, first, last, page=PAGE_RECORDS, max_bytes=PAGE_BYTES, holes=subject == ">"
        )
        while not reader.done:
            yield from self.run(reader.next_parts())
