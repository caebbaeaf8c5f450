"""`df.write.format("nats")` and `writeStream`: rows become messages of a JetStream stream, each once per id.

Columns: `subject` (or the option `subject` for all), `id` (its `Nats-Msg-Id`: a repeated task or batch is recognised by
it while the stream's duplicate window lasts), `data`, and if you like `headers` (a map of names to a text, or to a list
of them). Options: `url` and those of `login.py`; `order`; and for a fence `leaseSubject` with `leaseSeq`: the broker
refuses every row once the lease has a newer record (`LeaseLost`).

`order`: "pipelined" (default), rows go out one after the other without waiting and are stored in that order unless one
is refused (`publish_rows`); "strict", a row waits until the one before it of the same subject is acknowledged, and
a subject that refused one gets no more (`publishing.py`). Under a fence a stream with replicas takes one write at a
time, so rows go in atomic batches then, whatever `order` says (`BatchPublisher`). Either way order is kept within a
partition, what is under way at a time is bounded, and a refusal fails the task; nothing is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from tidings.delivery.login import GivenOptions, Login, checked_url
from tidings.delivery.publishing import ROWS_IN_FLIGHT, Outgoing, batch_of, publish_in_order, publish_rows
from tidings.errors import UnhealthyError, UsageError
from tidings.nats.errors import NatsError
from tidings.nats.jetstream_api import EXPECT_SUBJECT, fence
from tidings.nats.jetstream_blocking import Message, WorkerConnection
from tidings.wire.records import encode_headers

KNOWN = ("url", "name", *Login.NAMES, "subject", "order", "maxInFlight", "leaseSubject", "leaseSeq")
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SinkOptions:
    """The options of one sink, checked."""

    url: str
    login: Login
    fence: dict[str, str]
    strict: bool
    in_flight: int
    #: of every row, if there is no such column
    subject: str | None
    name: str = "tidings-sink"

    @classmethod
    def of(cls, given: Mapping[str, str], columns: Sequence[str], *, overwrite: bool) -> SinkOptions:
        options = GivenOptions(given, KNOWN, "sink")
        subject = options.text("subject")
        if overwrite:
            raise UsageError("the nats sink only appends: a stream is not overwritten by a query")
        if lacking := [name for name in ("subject", "id", "data") if name not in columns]:
            if lacking != ["subject"] or not subject:
                raise UsageError(
                    f"the nats sink needs the columns subject, id and data: {', '.join(lacking)} is not there "
                    "(the option subject is one for all rows)"
                )
        elif subject:
            raise UsageError("there is a column subject and an option subject: which of them is meant?")
        return cls(
            checked_url(options.needed("url")),
            Login.of(options),
            _fence(options),
            options.choice("order", ("pipelined", "strict")) == "strict",
            options.number("maxInFlight") or ROWS_IN_FLIGHT,
            subject,
            options.text("name") or cls.name,
        )

    def connect(self) -> WorkerConnection:
        return self.login.connect(self.url, self.name)


def _fence(options: GivenOptions) -> dict[str, str]:
    subject, seq = options.text("leaseSubject"), options.number("leaseSeq", least=0)
    if subject is None and seq is None:
        return {}
    if subject is None or seq is None:
        raise UsageError("a fence needs both leaseSubject and leaseSeq, a sequence")
    return fence(subject, seq)


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
    try:
        size = _batch_size(connection, options)
        if options.strict or size is not None:
            return Written(sum(_publish_strictly(connection, options, batch, size) for batch in batches))
        rows = chain.from_iterable(_messages(options, batch) for batch in batches)
        return Written(publish_rows(connection, rows, options.in_flight))
    finally:
        connection.close()


def _batch_size(connection: WorkerConnection, options: SinkOptions) -> int | None:
    """How many rows go at a time under a lease; None if there is none, or the stream has no replicas.

    The stream is the one that holds the lease. Whoever may not ask for it publishes one row after the other.
    """
    if not options.fence or not connection.is_clustered:
        return None
    try:
        asked = json.dumps({"subject": options.fence[EXPECT_SUBJECT]}).encode()
        names = json.loads(connection.request("$JS.API.STREAM.NAMES", asked).payload).get("streams") or [""]
        found = json.loads(connection.request(f"$JS.API.STREAM.INFO.{names[0]}").payload)
    except (NatsError, ValueError):
        return 1
    return batch_of(found["config"]) if "config" in found else 1


def _publish_strictly(
    connection: WorkerConnection, options: SinkOptions, batch: pa.RecordBatch, size: int | None
) -> int:
    rows_of: dict[str, list[Outgoing]] = {}
    for subject, name, data, headers in _rows(options, batch):
        rows_of.setdefault(subject, []).append(Outgoing(subject, name, data, headers))
    for subject, sent in publish_in_order(connection, rows_of, options.fence, batch=size).items():
        if sent.refused is not None:
            raise UnhealthyError(f"{subject} took {len(sent.sequences)} rows and no more: {sent.refused}")
    return int(batch.num_rows)


def _messages(options: SinkOptions, batch: pa.RecordBatch) -> Iterator[Message]:
    same = tuple(options.fence.items())
    for subject, name, data, headers in _rows(options, batch):
        yield subject, encode_headers((("Nats-Msg-Id", name), *same, *headers)), data


def _rows(options: SinkOptions, batch: pa.RecordBatch) -> Iterator[tuple[str, str, bytes, Pairs]]:
    """Subject, id, payload and headers of every row."""
    names = batch.schema.names
    subjects = batch.column("subject").to_pylist() if options.subject is None else [options.subject] * batch.num_rows
    headers = batch.column("headers").to_pylist() if "headers" in names else [None] * batch.num_rows
    columns = (subjects, batch.column("id").to_pylist(), batch.column("data").to_pylist(), headers)
    for subject, name, data, fields in zip(*columns, strict=True):
        if not subject or not name:
            raise UsageError("a row for the nats sink has no subject or no id")
        yield subject, name, data.encode() if isinstance(data, str) else data or b"", _pairs(fields)


def _pairs(fields: Any) -> Pairs:
    """A map as Arrow has it, of texts or of lists of them."""
    if not fields:
        return ()
    pairs = fields.items() if isinstance(fields, dict) else fields
    return tuple((name, each) for name, value in pairs for each in (value if isinstance(value, list) else (value,)))
