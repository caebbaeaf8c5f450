"""One stream of a broker, read by sequence over a connection of its own: what source, driver and status use.

A read is stateless, so a repeated read answers the same. The rules of reading are in `broker/jetstream_api.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidings.broker import jetstream_api as api
from tidings.broker.blocking import BlockingJetStream, WorkerConnection
from tidings.broker.jetstream_api import NO_STREAM, ApiError, records_of
from tidings.broker.records import Missing, Page, StoredRecord
from tidings.errors import UsageError


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


class StreamReader:
    """Reads one stream. A lost connection is made again once per question."""

    def __init__(self, location: StreamLocation) -> None:
        self.location = location
        self.js = BlockingJetStream(location.connect)

    def close(self) -> None:
        self.js.close()

    def state(self) -> StreamState:
        try:
            answer = self.js.run(api.info(self.location.stream))
        except ApiError as error:
            if error.err_code == NO_STREAM:
                raise UsageError(f"there is no stream {self.location.stream!r} at {self.location.url}") from error
            raise
        state = answer["state"]
        return StreamState(
            int(state["first_seq"]), int(state["last_seq"]), answer["config"].get("metadata") or {}, answer["created"]
        )

    def at(self, seq: int) -> StoredRecord | None:
        """The record at a sequence, from the leader."""
        return self.js.run(api.at(self.location.stream, seq)) if seq > 0 else None

    def following(self, subject: str, seq: int) -> StoredRecord | None:
        """The first record of `subject` at or after a sequence, from the leader."""
        return self.js.run(api.following(self.location.stream, subject, seq))

    def newest(self, subject: str) -> StoredRecord | None:
        """The last record of `subject`, from the leader."""
        return self.js.run(api.last(self.location.stream, subject))

    def read(self, first: int, last: int, subject: str = ">") -> Iterator[StoredRecord | Missing]:
        """Every record of `subject` with first <= seq <= last, in order; with ">" also what is missing between."""
        for part in self.pages(first, last, subject):
            yield from records_of(part)

    def pages(self, first: int, last: int, subject: str = ">") -> Iterator[Page | Missing]:
        """The same by pages: the records of one are consecutive as far as the leader knows."""
        return self.js.read(self.location.stream, first, last, subject)
