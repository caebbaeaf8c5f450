"""One stream of a broker, read by sequence over a connection of its own: what source, driver and status use.

A read is stateless, so a repeated read answers the same. The rules of reading are in `nats/jetstream_api.py`; who we
are to the broker is in `login.py`. Several filters are several reads, merged: the broker takes one at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from tidings.delivery.login import Login
from tidings.errors import BrokerUnreachable, UsageError
from tidings.nats import jetstream_api as api
from tidings.nats.address import shown
from tidings.nats.errors import NO_STREAM, ApiError
from tidings.nats.jetstream_api import Answer, Ask, AskPage, RangeReader
from tidings.nats.jetstream_blocking import BlockingJetStream, WorkerConnection
from tidings.wire.records import Missing, Page, StoredRecord

PAGE_RECORDS = 10_000
PAGE_BYTES = 4 * 1024 * 1024
API = "$JS.API"


@dataclass(frozen=True, slots=True)
class StreamLocation:
    """Where a stream is, and who says so."""

    url: str
    creds: str | None
    stream: str
    name: str = "tidings"
    #: how to log in, if not by `creds`
    login: Login | None = None
    #: what JetStream listens on: another for a domain, or for an account that imports it
    api: str = API

    def connect(self) -> WorkerConnection:
        return (self.login or Login(creds=self.creds)).connect(self.url, self.name)


@dataclass(frozen=True, slots=True)
class StreamState:
    first: int
    last: int
    metadata: dict[str, str]
    created: str
    messages: int
    #: as stored: every record with its subject, headers and what the broker adds, uncompressed
    bytes: int


class StreamReader(BlockingJetStream):
    """JetStream over a connection of its own, and one stream of it."""

    def __init__(self, location: StreamLocation) -> None:
        super().__init__(location.connect)
        self.location, self.stream = location, location.stream

    def state(self, at_least: int = 0) -> StreamState:
        """`at_least`: a sequence it had, so that one of several servers which says less is asked again."""
        try:
            answer = self.run(api.info_from(self.stream, at_least, replicated=bool(at_least) and self.replicated))
        except ApiError as error:
            if error.err_code == NO_STREAM:
                raise UsageError(f"there is no stream {self.stream!r} at {shown(self.location.url)}") from error
            raise
        except BrokerUnreachable as error:
            if self.location.api == API:
                raise
            raise BrokerUnreachable(
                f"nothing answers at {self.location.api}: is that domain or prefix right?"
            ) from error
        state = answer["state"]
        return StreamState(
            int(state["first_seq"]),
            int(state["last_seq"]),
            answer["config"].get("metadata") or {},
            answer["created"],
            int(state["messages"]),
            int(state["bytes"]),
        )

    def at(self, seq: int) -> StoredRecord | None:
        """The record at a sequence."""
        return self.run(api.at(self.stream, seq, replicated=self.replicated)) if seq > 0 else None

    def following(self, subject: str, seq: int) -> StoredRecord | None:
        """The first record of `subject` at or after a sequence."""
        return self.run(api.following(self.stream, subject, seq, replicated=self.replicated))

    def read(self, first: int, last: int, subject: str = ">") -> Iterator[StoredRecord | Missing]:
        """Every record of `subject` with first <= seq <= last, in order; with ">" also what is missing between."""
        for part in self.pages(first, last, subject):
            yield from (part,) if isinstance(part, Missing) else part.records()

    def pages(self, first: int, last: int, subject: str = ">") -> Iterator[Page | Missing]:
        """The same by pages: the records of one are consecutive as far as the leader knows."""
        return self._pages(first, last, subject, PAGE_BYTES, holes=subject == ">")

    def merged(
        self,
        first: int,
        last: int,
        subjects: Sequence[str],
        *,
        max_bytes: int | None = None,
        page_type: type[Page] = Page,
    ) -> Iterator[Page]:
        """The records of any of these filters, each once and in order, by pages; not what is missing.

        A page has at most `max_bytes` (and never more than `PAGE_BYTES`), and one record of each filter.
        """
        share = max(min(max_bytes or PAGE_BYTES, PAGE_BYTES) // len(subjects), 1)
        lanes = [_Lane(self._pages(first, last, each, share, holes=False, page_type=page_type)) for each in subjects]
        while lanes := [lane for lane in lanes if lane.fill()]:
            # beyond the nearest end of a page, another filter may have a record that was not read yet
            end = min(lane.page.seqs[-1] for lane in lanes)
            yield _in_order([lane.take(end) for lane in lanes])

    def _pages(
        self, first: int, last: int, subject: str, max_bytes: int, *, holes: bool, page_type: type[Page] = Page
    ) -> Iterator[Page | Missing]:
        reader = RangeReader(
            *(self.stream, subject, first, last),
            page=PAGE_RECORDS,
            max_bytes=max_bytes,
            holes=holes,
            replicated=self.replicated,
            page_type=page_type,
        )
        while not reader.done:
            yield from self.run(reader.next_parts())

    def _exchange(self, request: Ask | AskPage) -> Answer | None:
        if self.location.api != API and request.subject.startswith(f"{API}."):
            request = request._replace(subject=self.location.api + request.subject[len(API) :])
        return super()._exchange(request)


class _Lane:
    """What one filter of several has next."""

    def __init__(self, pages: Iterator[Page | Missing]) -> None:
        self._pages = (page for page in pages if isinstance(page, Page) and page.seqs)
        self.page = Page()

    def fill(self) -> bool:
        """Is there anything (more)?"""
        if not self.page.seqs:
            self.page = next(self._pages, self.page)
        return bool(self.page.seqs)

    def take(self, end: int) -> Page:
        count = bisect_right(self.page.seqs, end)
        taken, self.page = self.page.cut(0, count), self.page.cut(count, len(self.page.seqs))
        return taken


def _in_order(pages: Sequence[Page]) -> Page:
    """One page of several, in order; what more than one has is the same record, and counts once."""
    pages = [page for page in pages if page.seqs]
    if len(pages) == 1:
        return pages[0]
    found = {seq: index for index, seq in enumerate(chain.from_iterable(page.seqs for page in pages))}
    order = [found[seq] for seq in sorted(found)]
    whole = type(pages[0])()
    for name in whole.COLUMNS:
        column = list(chain.from_iterable(getattr(page, name) for page in pages))
        setattr(whole, name, [column[index] for index in order])
    return whole
