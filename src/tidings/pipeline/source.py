"""`spark.read.format("nats")` and `spark.readStream.format("nats")`: a JetStream stream as a table of its records.

Options: `url` and `stream` are needed. `creds`: path of a credentials file, readable wherever tasks run. `subject`:
filter, default ">". `start`, `end`: sequences, both included; a streaming query starts at `start` when its checkpoint
is new. `missing`: "fail" (default), "rows" or "skip", what becomes of sequences the stream does not have between its
first record (in a running query: the last one read) and the end of the range; with a filter nobody can tell, so nothing
is missing. `maxRecords` per batch (50000), `partitionRecords` (25000), `waitMs` for news before an empty answer (1000),
`pollMs` (50), `keepAliveMs` (20000). docs/spark-source.md is for those who use it; the sink is in `pipeline/sink.py`.

Columns: `seq`, `time`, `time_ns`, `subject`, `headers` (the sender's own raw block), `data`, `missing` (null, or the
last of the sequences from `seq` on that are not there). Reads are by sequence, so a retried task returns the same rows.
An offset is {epoch, seq, mark}: a stream that went backwards is an error, never a silent skip.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from tidings.broker.jetstream_api import EPOCH_KEY
from tidings.broker.records import Missing, Page, StoredRecord
from tidings.errors import LogGap, LogRegressed, UsageError
from tidings.pipeline.sink import NatsStreamWriter, NatsWriter, SinkOptions
from tidings.pipeline.stream_reader import StreamLocation, StreamReader

SCHEMA = "seq bigint, time timestamp, time_ns bigint, subject string, headers binary, data binary, missing bigint"
_MICROSECONDS = pa.timestamp("us", tz="UTC")
ARROW = pa.schema(
    [
        ("seq", pa.int64()),
        ("time", _MICROSECONDS),
        ("time_ns", pa.int64()),
        ("subject", pa.string()),
        ("headers", pa.binary()),
        ("data", pa.binary()),
        ("missing", pa.int64()),
    ]
)


@dataclass(frozen=True)
class SourceOptions:
    """The options of one source, checked."""

    location: StreamLocation
    subject: str
    start: int | None
    end: int | None
    missing: str
    max_records: int
    partition_records: int
    wait: float
    poll: float
    keep_alive: float

    @classmethod
    def of(cls, given: Mapping[str, str]) -> SourceOptions:
        options = {key.lower(): value for key, value in given.items()}
        for needed in ("url", "stream"):
            if not options.get(needed):
                raise UsageError(f"the nats source needs the option {needed!r}")
        missing = options.get("missing", "fail")
        if missing not in ("fail", "rows", "skip"):
            raise UsageError(f"option missing is {missing!r}: one of fail, rows, skip")
        location = StreamLocation(
            options["url"], options.get("creds"), options["stream"], options.get("name", "tidings-source")
        )
        return cls(
            location=location,
            subject=options.get("subject", ">"),
            start=_number(options, "start"),
            end=_number(options, "end"),
            missing=missing,
            max_records=_number(options, "maxrecords") or 50_000,
            partition_records=_number(options, "partitionrecords") or 25_000,
            wait=(_number(options, "waitms", 1_000) or 0) / 1_000,
            poll=(_number(options, "pollms", 50) or 1) / 1_000,
            keep_alive=(_number(options, "keepalivems", 20_000) or 20_000) / 1_000,
        )


def _number(options: Mapping[str, str], key: str, default: int | None = None) -> int | None:
    text = options.get(key)
    if text is None:
        return default
    if not text.isdigit():
        raise UsageError(f"option {key} is {text!r}: a whole number is needed")
    return int(text)


@dataclass
class SeqRange(InputPartition):
    """One task's part: first..last. What is gone from `kept_from` on is missing; None: from the stream's first on."""

    first: int
    last: int
    kept_from: int | None = None


class NatsSource(DataSource):
    """Register with `spark.dataSource.register(NatsSource)`."""

    @classmethod
    def name(cls) -> str:
        return "nats"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: Any) -> NatsReader:  # noqa: ARG002  Spark's signature
        return NatsReader(SourceOptions.of(self.options))

    def writer(self, schema: Any, overwrite: bool) -> NatsWriter:
        return NatsWriter(SinkOptions.of(self.options, schema.fieldNames(), overwrite=overwrite))

    def streamWriter(self, schema: Any, overwrite: bool) -> NatsStreamWriter:  # noqa: N802
        return NatsStreamWriter(SinkOptions.of(self.options, schema.fieldNames(), overwrite=overwrite))

    def streamReader(self, schema: Any) -> NatsStreamReader:  # noqa: ARG002, N802  Spark's signature
        return NatsStreamReader(SourceOptions.of(self.options))


class NatsReader(DataSourceReader):
    """A range of a stream, once."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        reader = StreamReader(self.options.location)
        try:
            state = reader.state()
        finally:
            reader.close()
        last = state.last if self.options.end is None else min(self.options.end, state.last)
        return split(max(self.options.start or 1, 1), last, self.options.partition_records)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes one empty partition of none at all.
        return read_range(self.options, partition) if isinstance(partition, SeqRange) else iter(())


class NatsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream as it grows. Lives in the driver for hours; what it sends to tasks is only the options."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._reader: StreamReader | None = None
        self._checked = -1
        self._target: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_checked": -1}

    @property
    def reader(self) -> StreamReader:
        if self._reader is None:
            self._reader = StreamReader(self.options.location)
            self._reader.keep_alive(self.options.keep_alive)
        return self._reader

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        start = self.options.start
        return offset_at(self.reader, max((start or 1) - 1, 0))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.options.max_records)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self.reader.state().last

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch. Waits a while for news: an idle query costs a poll, not a batch."""
        deadline = time.monotonic() + self.options.wait
        while True:
            last = self._last_after_checking(start)
            if self._target is not None:
                last = min(last, self._target)
            if last > start["seq"]:
                break
            if self._target is not None or time.monotonic() >= deadline:
                return start
            time.sleep(self.options.poll)
        if not isinstance(limit, ReadAllAvailable):
            last = min(last, start["seq"] + int(getattr(limit, "max_rows", self.options.max_records)))
        return offset_at(self.reader, last)

    def _last_after_checking(self, start: Mapping[str, Any]) -> int:
        """The last sequence; after every new connection only once the record at `start` is known to be the same."""
        state = self.reader.state()
        if self._checked != self.reader.generation:
            if difference := regressed(self.reader, start):
                raise LogRegressed(difference)
            self._checked = self.reader.generation
            state = self.reader.state()
        if state.metadata.get(EPOCH_KEY, state.created) != start["epoch"] or state.last < start["seq"]:
            raise LogRegressed(
                f"{self.options.location.stream} went backwards or was made anew: it ends at {state.last}, "
                f"{start['seq']} was read before. Start with a new checkpoint where it still agrees."
            )
        return state.last

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        # A record was read at `start`, so the rest was promised: what is gone of it since is missing.
        kept_from = start["seq"] + 1 if start["mark"] else None
        return split(start["seq"] + 1, end["seq"], self.options.partition_records, kept_from)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SeqRange)
        return read_range(self.options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is held for us: retention waits for floors, not for this."""

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.close()


def offset_at(reader: StreamReader, seq: int) -> dict[str, Any]:
    """The offset after `seq`, with what proves later that the stream is still the same."""
    state = reader.state()
    return {"epoch": state.metadata.get(EPOCH_KEY, state.created), "seq": seq, "mark": mark_of(reader.at(seq))}


def mark_of(record: StoredRecord | None) -> str:
    """What tells a record from another at the same sequence. Empty for a record that is gone."""
    return "" if record is None else f"{record.time_ns}"


def regressed(reader: StreamReader, offset: Mapping[str, Any]) -> str | None:
    """How the stream differs from what it was at the offset; None if it does not, as far as anyone can tell.

    A record that is gone proves nothing: retention may have taken it.
    """
    stream, seq = reader.location.stream, int(offset["seq"])
    if not seq:
        return None
    found = mark_of(reader.at(seq))
    if found and offset["mark"] and found != offset["mark"]:
        return f"{stream} has another record at {seq} than when it was read"
    if not found and (last := reader.state().last) < seq:
        return f"{stream} went backwards: it ends at {last}, {seq} was read before"
    return None


def split(first: int, last: int, per: int, kept_from: int | None = None) -> list[InputPartition]:
    """Ranges of about the same size, of at most `per` sequences, that together are first..last."""
    count = last - first + 1
    if count <= 0:
        return []
    size = -(-count // -(-count // per))
    return [SeqRange(at, min(at + size - 1, last), kept_from) for at in range(first, last + 1, size)]


def read_range(options: SourceOptions, part: SeqRange) -> Iterator[pa.RecordBatch]:
    """The rows of one part, in Arrow. Runs in a worker: its connection is its own and ends with it."""
    reader = StreamReader(options.location)
    try:
        kept_from = part.kept_from
        for page in reader.pages(part.first, part.last, options.subject):
            if not isinstance(page, Missing):
                yield _arrow(page)
            elif options.missing != "skip":
                kept_from = reader.state().first if kept_from is None else kept_from
                if page.last >= kept_from:
                    yield _missing_row(options, Missing(max(page.first, kept_from), page.last))
    finally:
        reader.close()


def _missing_row(options: SourceOptions, hole: Missing) -> pa.RecordBatch:
    if options.missing == "fail":
        raise LogGap(f"{options.location.stream} has lost {hole.first}..{hole.last}: read with missing=rows to go on")
    row = {"seq": hole.first, "missing": hole.last}
    return pa.RecordBatch.from_pylist([row], schema=ARROW)


def _arrow(page: Page) -> pa.RecordBatch:
    times = pa.array(page.times, pa.int64())
    arrays = [
        pa.array(page.seqs, pa.int64()),
        pc.divide(times, 1_000).cast(_MICROSECONDS),
        times,
        pa.array(page.subjects, pa.string()),
        pa.array(page.own_blocks, pa.binary()),
        pa.array(page.payloads, pa.binary()),
        pa.nulls(len(page.seqs), pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW)
