"""A range of the log becomes blocks: by Spark's workers, or here if it is so small that a Spark job costs more.

Both ways run the same code over the same rows and give the same bytes. Which one is taken depends on the range alone,
so a batch that is repeated is encoded as it was before. What depends on the fold is taken from it when an encoding is
begun; finishing needs the fold no more, so a long one keeps nobody from advancing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

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
from tidings.delivery.sent_rules import SentRules
from tidings.delivery.source import rows_of
from tidings.delivery.source_options import SourceOptions
from tidings.delivery.stream_reader import StreamReader
from tidings.model.projection import Table

if TYPE_CHECKING:
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
