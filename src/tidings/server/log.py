"""Reading the log of a space: its ruling records, merged and folded, up to a sequence.

The read is paged by subject filter, because `multi_last` answers 413 above 1,024 subjects. What the broker hands
over is turned into the fold's records here and nowhere else, so every reader sees the same bytes.
"""

from __future__ import annotations

from tidings.model.projection import LogRecord
from tidings.nats.jetstream import PAGE, PAGE_BYTES, JetStream
from tidings.nats.jetstream_api import RangeReader, Steps
from tidings.wire.records import Page, StoredRecord
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.subjects import Subjects


def log_record(stored: StoredRecord) -> LogRecord:
    """A stored record as the fold takes it. Headers that do not parse carry no signature, so they void it."""
    fields = stored.own_fields() or ()
    own = {name: value for name, value in fields if name == SIGNATURE_HEADER}
    return LogRecord(stored.seq, stored.time_ns, stored.subject, own, stored.payload)


def ruling_steps(subjects: Subjects, first: int, last: int, *, replicated: bool = False) -> Steps[list[LogRecord]]:
    """Every ruling record with first <= seq <= last, in order."""
    found: list[LogRecord] = []
    for each in subjects.ruling_filters():
        reader = RangeReader(
            *(subjects.log_stream, each, first, last), page=PAGE, max_bytes=PAGE_BYTES, replicated=replicated
        )
        while not reader.done:
            for part in (yield from reader.next_parts()):
                assert isinstance(part, Page)
                found += map(log_record, part.records())
    return sorted(found, key=lambda record: record.seq)


async def read_rulings(js: JetStream, subjects: Subjects, end: int) -> list[LogRecord]:
    """Every ruling record up to and including `end`, in order."""
    return await js.run(ruling_steps(subjects, 1, end, replicated=js.replicated))
