"""`df.write.format("nats")` and `writeStream`: rows become messages of a JetStream stream, each once per id.

Columns: `subject`, `id` (its `Nats-Msg-Id`: a repeated task or batch is recognised by it while the stream's duplicate
window lasts), `data`, and if you like `headers` (a map of strings). Options: `url`, `creds`, and for a fence
`leaseSubject` with `leaseSeq`: the broker refuses every row once the lease has a newer record (`LeaseLost`). Rows of
one subject are published in their order within a partition, each after the one before was acknowledged; what is under
way at a time is bounded (`publishing.py`). A refusal fails the task; nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from tidings.broker.blocking import WorkerConnection
from tidings.broker.jetstream_api import fence
from tidings.errors import UnhealthyError, UsageError
from tidings.pipeline.publishing import Outgoing, publish_in_order

NEEDED = ("subject", "id", "data")


@dataclass(frozen=True)
class SinkOptions:
    """The options of one sink, checked."""

    url: str
    creds: str | None
    fence: dict[str, str]
    name: str = "tidings-sink"

    @classmethod
    def of(cls, given: Mapping[str, str], columns: Sequence[str], *, overwrite: bool) -> SinkOptions:
        options = {key.lower(): value for key, value in given.items()}
        if not options.get("url"):
            raise UsageError("the nats sink needs the option 'url'")
        if overwrite:
            raise UsageError("the nats sink only appends: a stream is not overwritten by a query")
        if lacking := [column for column in NEEDED if column not in columns]:
            raise UsageError(f"the nats sink needs the columns subject, id and data: {', '.join(lacking)} is not there")
        return cls(options["url"], options.get("creds"), _fence(options), options.get("name", cls.name))

    def connect(self) -> WorkerConnection:
        return WorkerConnection.open(self.url, Path(self.creds) if self.creds else None, name=self.name)


def _fence(options: Mapping[str, str]) -> dict[str, str]:
    subject, seq = options.get("leasesubject"), options.get("leaseseq")
    if subject is None and seq is None:
        return {}
    if not subject or not seq or not seq.isdigit():
        raise UsageError("a fence needs both leaseSubject and leaseSeq, a sequence")
    return fence(subject, int(seq))


@dataclass
class Written(WriterCommitMessage):
    """How many rows a task had stored."""

    rows: int


class NatsWriter(DataSourceArrowWriter):
    """A DataFrame, once."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return publish_batches(self.options, iterator)


class NatsStreamWriter(DataSourceStreamArrowWriter):
    """Every batch of a query. A batch that is repeated publishes the same ids again."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return publish_batches(self.options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's signature
        """What the broker acknowledged stays; there is nothing left to do."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What was stored stays and is recognised by its ids when the batch comes again."""


def publish_batches(options: SinkOptions, batches: Iterable[pa.RecordBatch]) -> Written:
    """Publish the rows of one partition, in a worker, over a connection of its own."""
    connection = options.connect()
    rows = 0
    try:
        for batch in batches:
            results = publish_in_order(connection, _by_subject(batch), options.fence)
            for subject, sent in results.items():
                if sent.refused is not None:
                    raise UnhealthyError(f"{subject} took {len(sent.sequences)} rows and no more: {sent.refused}")
            rows += batch.num_rows
    finally:
        connection.close()
    return Written(rows)


def _by_subject(batch: pa.RecordBatch) -> dict[str, list[Outgoing]]:
    columns: list[list[Any]] = [batch.column(name).to_pylist() for name in NEEDED]
    columns.append(batch.column("headers").to_pylist() if "headers" in batch.schema.names else [None] * batch.num_rows)
    rows_of: dict[str, list[Outgoing]] = {}
    for subject, name, data, headers in zip(*columns, strict=True):
        if not subject or not name:
            raise UsageError("a row for the nats sink has no subject or no id")
        pairs = tuple(headers.items() if isinstance(headers, dict) else headers or ())
        rows_of.setdefault(subject, []).append(Outgoing(subject, name, _bytes(data), pairs))
    return rows_of


def _bytes(data: bytes | str | None) -> bytes:
    return data.encode() if isinstance(data, str) else data or b""
