"""A range of the log becomes blocks: by Spark's workers, or here if it is so small that a Spark job costs more.

Both ways run the same code over the same rows and give the same bytes. Which one is taken depends on the range alone,
so a batch that is repeated is encoded as it was before. What depends on the fold is taken from it when an encoding is
begun; finishing needs the fold no more, so a long one keeps nobody from advancing it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from py4j.protocol import Py4JNetworkError

from tidings.delivery.batch_sizing import SeqRange
from tidings.delivery.encoding import ARROW as ENCODED
from tidings.delivery.encoding import (
    SCHEMA,
    Encoded,
    EncodingRules,
    OwnRules,
    RulesHolder,
    decode_rows,
    encode_partition,
)
from tidings.delivery.source import rows_of
from tidings.delivery.source_options import SourceOptions
from tidings.delivery.stream_reader import StreamReader
from tidings.model.projection import Table
from tidings.model.rulebook import Rulebook

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.core.broadcast import Broadcast
    from pyspark.sql import DataFrame, SparkSession

#: a range with at most so many records and bytes is small
SMALL_RECORDS, SMALL_BYTES = 1_000, 4 * 1024 * 1024
Channels = frozenset[str] | None


class RangeEncoder:
    """What one life of a query encodes. `close` when nothing of it runs any more.

    `options` say where the log is read and into which parts a range is cut; ranges of up to `small` records may be
    encoded here, over `reader`, which is the caller's.
    """

    def __init__(
        self,
        spark: SparkSession,
        space: str,
        options: Mapping[str, str],
        reader: StreamReader,
        table: Table,
        small: int = SMALL_RECORDS,
    ) -> None:
        self._spark, self._space, self._reader, self._table, self.small = spark, space, reader, table, small
        self._options = {**options, "missing": "rows"}
        self._sent_rules = SentRules(spark.sparkContext)

    def close(self) -> None:
        self._sent_rules.close()

    def encode(self, after: int, through: int, channels: Channels = None, frame: DataFrame | None = None) -> Encoded:
        """The range, of these channels or of all. The fold must stand still."""
        return self.begin(after, through, channels, frame)()

    def begin(
        self, after: int, through: int, channels: Channels = None, frame: DataFrame | None = None
    ) -> Callable[[], Encoded]:
        """The same, for later: the fold must stand still until this returns. The answer is called once.

        `frame` has the rows if Spark planned the range already.
        """
        here = self.encode_here(after, through, channels)
        if here is not None:
            return lambda: here
        return self.begin_there(after, self.read(after, through) if frame is None else frame, channels)

    def encode_here(self, after: int, through: int, channels: Channels = None) -> Encoded | None:
        """A range by this process; None if it is not small."""
        if through - after > self.small:
            return None
        part = SeqRange(after + 1, through, after + 1 if after else None)
        rows, size = list[pa.RecordBatch](), 0
        for batch in rows_of(self._reader, SourceOptions.of(self._options), part):
            rows.append(batch)
            size += batch.nbytes
            if size > SMALL_BYTES:
                return None
        rules = self._rules(OwnRules(self._table.rules), after, channels)
        return decode_rows(pa.Table.from_batches(encode_partition(rules, rows), ENCODED))

    def begin_there(self, after: int, frame: DataFrame, channels: Channels = None) -> Callable[[], Encoded]:
        """A range by Spark's workers."""
        lent = self._sent_rules.lend(self._table.rules, after)
        rules = self._rules(lent.book, after, channels)

        def finish() -> Encoded:
            with lent:
                return decode_rows(frame.mapInArrow(partial(encode_partition, rules), SCHEMA).toArrow())

        return finish

    def _rules(self, sent: RulesHolder, after: int, channels: Channels) -> EncodingRules:
        return EncodingRules(self._space, sent, self._table.cuts_within(after, self._table.head), channels)

    def read(self, after: int, through: int) -> DataFrame:
        ends = {"start": str(after + 1), "end": str(through)}
        return self._spark.read.format("nats").options(**self._options, **ends).load()


@dataclass
class _Sent:
    broadcast: Broadcast[Rulebook]
    revised: int
    floor: int
    borrowers: int = 0


class LentRules:
    """Rules that stay with the workers until this is given back. A context manager that gives it back."""

    def __init__(self, rules: SentRules, sent: _Sent) -> None:
        self._rules, self._sent = rules, sent
        self.book = sent.broadcast

    def __enter__(self) -> Broadcast[Rulebook]:
        return self.book

    def __exit__(self, *_: object) -> None:
        self._rules._give_back(self._sent)


class SentRules:
    """The rules as Spark's workers have them: broadcast once, sent again when a post may be judged otherwise.

    A batch borrows what was sent last (`lend`) if it still holds: nothing was revised since, and it reaches back to
    where the batch begins. Otherwise the rules are sent anew and the old ones are destroyed as soon as nobody works
    with them any more: a payment reads for long while batches go on. So there are never more broadcasts than borrowers
    and one, whatever happens; each is a file at the driver, and blocks in its JVM and in every executor. `close` when
    nothing of one life of a query runs any more.
    """

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._newest: _Sent | None = None
        #: how often rules were sent
        self.sendings = 0

    def lend(self, book: Rulebook, after: int) -> LentRules:
        """The rules for what comes after `after`. Nobody may change the book meanwhile."""
        with self._lock:
            sent = self._newest
            if sent is None or sent.revised != book.revised or after + 1 < sent.floor:
                self._newest = self._send(book, after + 1)
                if sent is not None and not sent.borrowers:
                    _destroy(sent)
                sent = self._newest
            sent.borrowers += 1
            return LentRules(self, sent)

    def close(self) -> None:
        with self._lock:
            sent, self._newest = self._newest, None
            if sent is not None and not sent.borrowers:
                _destroy(sent)

    def _send(self, book: Rulebook, floor: int) -> _Sent:
        self.sendings += 1
        return _Sent(self._context.broadcast(book.for_workers(floor)), book.revised, floor)

    def _give_back(self, sent: _Sent) -> None:
        with self._lock:
            sent.borrowers -= 1
            if sent is not self._newest and not sent.borrowers:
                _destroy(sent)


def _destroy(sent: _Sent) -> None:
    with suppress(Py4JNetworkError, OSError):  # a JVM that is gone took it along
        sent.broadcast.destroy()
