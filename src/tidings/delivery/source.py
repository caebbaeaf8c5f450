"""`spark.read.format("nats")` and `spark.readStream.format("nats")`: a JetStream stream as a table of its records.

`pip install pyspark-nats` and nothing else is needed; without it, `spark.dataSource.register(NatsSource)`. Options are
in `source_options.py`, how much a batch takes in `batch_sizing.py`, the sink in `sink.py`; docs/spark-source.md is for
its users.

Columns: `seq`, `time`, `time_ns`, `subject`, `headers` (the sender's own raw block; with `headersAs=map` a map of it),
`data`, `missing` (null, or the last of the sequences from `seq` on that are not there). Reads are by sequence, so a
retried task returns the same rows. An offset is {epoch, seq, mark}: a stream that went backwards is an error, never a
silent skip. What a task yields at a time is one page of the broker's: at most `PAGE_BYTES` and one record.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from tidings.delivery.batch_sizing import BatchAdmission, SeqRange, split
from tidings.delivery.sink import NatsStreamWriter, NatsWriter, SinkOptions
from tidings.delivery.source_options import SourceOptions
from tidings.delivery.stream_reader import StreamReader, StreamState
from tidings.errors import LogGap, LogRegressed
from tidings.nats.jetstream_api import EPOCH_KEY
from tidings.wire.records import Missing, Page, StoredRecord, fields_of

_MICROSECONDS = pa.timestamp("us", tz="UTC")
_MAP = pa.map_(pa.string(), pa.list_(pa.string()))
#: column -> its type in Spark and in Arrow; `headers` is one of the two below
_COLUMNS: dict[str, tuple[str, Any]] = {
    "seq": ("bigint", pa.int64()),
    "time": ("timestamp", _MICROSECONDS),
    "time_ns": ("bigint", pa.int64()),
    "subject": ("string", pa.string()),
    "headers": ("binary", pa.binary()),
    "data": ("binary", pa.binary()),
    "missing": ("bigint", pa.int64()),
}
_HEADER_MAP = ("map<string,array<string>>", _MAP)


def _columns(headers_as: str) -> dict[str, tuple[str, Any]]:
    if headers_as == "map":
        return _COLUMNS | {"headers": _HEADER_MAP}
    return _COLUMNS | {"header_map": _HEADER_MAP} if headers_as == "both" else _COLUMNS


def arrow_schema(headers_as: str) -> pa.Schema:
    return pa.schema([(name, arrow) for name, (_, arrow) in _columns(headers_as).items()])


class NatsSource(DataSource):
    """Found by Spark itself if `pyspark-nats` is installed."""

    @classmethod
    def name(cls) -> str:
        return "nats"

    def schema(self) -> str:
        columns = _columns(SourceOptions.of(self.options).headers_as)
        return ", ".join(f"{name} {spark}" for name, (spark, _) in columns.items())

    def reader(self, schema: Any) -> NatsReader:  # noqa: ARG002  Spark's signature
        return NatsReader(SourceOptions.of(self.options))

    def writer(self, schema: Any, overwrite: bool) -> NatsWriter:
        return NatsWriter(SinkOptions.of(self.options, schema.fieldNames(), overwrite=overwrite))

    def streamWriter(self, schema: Any, overwrite: bool) -> NatsStreamWriter:  # noqa: N802
        return NatsStreamWriter(SinkOptions.of(self.options, schema.fieldNames(), overwrite=overwrite))

    def streamReader(self, schema: Any) -> NatsStreamReader:  # noqa: ARG002, N802  Spark's signature
        return NatsStreamReader(SourceOptions.of(self.options).must_have_no_end())


class NatsReader(DataSourceReader):
    """A range of a stream, once."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        options = self.options
        reader = StreamReader(options.location)
        try:
            state = reader.state()
            after = options.start.before(reader, state)
            last = state.last if options.end is None else options.end.through(reader, state)
        finally:
            reader.close()
        return [*split(after + 1, last, options.parts, guess=_mean(state))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes one empty partition of none at all.
        return read_range(self.options, partition) if isinstance(partition, SeqRange) else iter(())


def _mean(state: StreamState) -> float:
    """Bytes of a record, more or less: enough to choose how many tasks share a range."""
    return state.bytes / state.messages if state.messages else 0


class NatsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream as it grows. Lives in the driver for hours; what it sends to tasks is only the options."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._reader: StreamReader | None = None
        self._checked = -1
        self._target: int | None = None
        self._last_look: StreamState | None = None
        self._admission = BatchAdmission(options.location, options.subjects, options.max_records, options.max_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options}

    @property
    def reader(self) -> StreamReader:
        if self._reader is None:
            self._reader = StreamReader(self.options.location)
            self._reader.keep_alive(self.options.keep_alive)
        return self._reader

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return offset_at(self.reader, self.options.start.before(self.reader, self.reader.state()))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.options.max_records)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self.reader.state().last

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch. Waits a while for news: an idle query costs a poll, not a batch."""
        deadline = time.monotonic() + self.options.wait
        while True:
            state = self._state_after_checking(start)
            last = state.last if self._target is None else min(state.last, self._target)
            if last > start["seq"]:
                break
            if self._target is not None or time.monotonic() >= deadline:
                return start
            time.sleep(self.options.poll)
        if not isinstance(limit, ReadAllAvailable):
            last = min(last, start["seq"] + int(getattr(limit, "max_rows", self.options.max_records)))
            last = self._admission.end(self.reader, state, start["seq"], last)
        self._last_look = state
        return offset_at(self.reader, last)

    def _state_after_checking(self, start: Mapping[str, Any]) -> StreamState:
        """The stream as it is; after every new connection only once the record at `start` is known to be the same."""
        state = self.reader.state(start["seq"])
        if self._checked != self.reader.generation:
            if difference := regressed(self.reader, start):
                raise LogRegressed(difference)
            self._checked = self.reader.generation
            state = self.reader.state(start["seq"])
        if state.metadata.get(EPOCH_KEY, state.created) != start["epoch"] or state.last < start["seq"]:
            raise LogRegressed(
                f"{self.options.location.stream} went backwards or was made anew: it ends at {state.last}, "
                f"{start['seq']} was read before. Start with a new checkpoint where it still agrees."
            )
        return state

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        # A record was read at `start`, so the rest was promised: what is gone of it since is missing.
        kept_from = start["seq"] + 1 if start["mark"] else None
        measured = self._admission.sizes(start["seq"], end["seq"])
        guess = 0.0 if measured else _mean(self._last_look or self.reader.state())
        return [*split(start["seq"] + 1, end["seq"], self.options.parts, kept_from, guess=guess, of=measured)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SeqRange)
        return read_range(self.options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is held for us: retention waits for floors, not for this."""

    def stop(self) -> None:
        self._admission.close()
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
    if not found and (last := reader.state(seq).last) < seq:
        return f"{stream} went backwards: it ends at {last}, {seq} was read before"
    return None


def read_range(options: SourceOptions, part: SeqRange) -> Iterator[pa.RecordBatch]:
    """The rows of one part, in Arrow. Runs in a worker: its connection is its own and ends with it."""
    reader = StreamReader(options.location)
    try:
        yield from rows_of(reader, options, part)
    finally:
        reader.close()


def rows_of(reader: StreamReader, options: SourceOptions, part: SeqRange) -> Iterator[pa.RecordBatch]:
    """The same, over a connection that is there."""
    kept_from = part.kept_from
    for page in _pages(reader, options, part):
        if not isinstance(page, Missing):
            yield _arrow(page, options.headers_as)
        elif options.missing != "skip":
            kept_from = reader.state().first if kept_from is None else kept_from
            if page.last >= kept_from:
                yield _missing_row(options, Missing(max(page.first, kept_from), page.last))


def _pages(reader: StreamReader, options: SourceOptions, part: SeqRange) -> Iterator[Page | Missing]:
    if len(options.subjects) == 1:
        return reader.pages(part.first, part.last, options.subjects[0])
    return reader.merged(part.first, part.last, options.subjects)


def _missing_row(options: SourceOptions, hole: Missing) -> pa.RecordBatch:
    if options.missing == "fail":
        raise LogGap(f"{options.location.stream} has lost {hole.first}..{hole.last}: read with missing=rows to go on")
    row = {"seq": hole.first, "missing": hole.last}
    return pa.RecordBatch.from_pylist([row], schema=arrow_schema(options.headers_as))


def _arrow(page: Page, headers_as: str) -> pa.RecordBatch:
    times = pa.array(page.times, pa.int64())
    arrays = [
        pa.array(page.seqs, pa.int64()),
        pc.divide(times, 1_000).cast(_MICROSECONDS),
        times,
        pa.array(page.subjects, pa.string()),
        _header_maps(page) if headers_as == "map" else pa.array(page.own_blocks, pa.binary()),
        pa.array(page.payloads, pa.binary()),
        pa.nulls(len(page.seqs), pa.int64()),
        *([_header_maps(page)] if headers_as == "both" else []),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(headers_as))


def _header_maps(page: Page) -> pa.Array:
    """Every name with its values in order; null for a block that is none."""
    return pa.array([_header_map(block) for block in page.own_blocks], _MAP)


def _header_map(block: bytes) -> list[tuple[str, list[str]]] | None:
    fields = fields_of(block)
    if fields is None:
        return None
    values: dict[str, list[str]] = {}
    for name, value in fields:
        values.setdefault(name, []).append(value)
    return list(values.items())
