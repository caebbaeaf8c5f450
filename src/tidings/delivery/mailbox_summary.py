"""How far each mailbox was filled, folded from `deliveries`, so that a start reads what is new and not all that was.

`deliveries` says for ever who was handed what. Of all that, a pipeline that starts needs the last frame of each owner:
`mailboxes` has it, one row for each owner and epoch of the log, with the order through which rows of `deliveries` are
in it. What came after is folded in when it is asked for, and written down now and then (`tend`). It is made of nothing
but `deliveries`: if it is lost, or newer than a `deliveries` that was put back, it is made anew.
"""

from __future__ import annotations

import logging
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from tidings.delivery.delta_writer import DeltaWriter
from tidings.model.planning import Counter

log = logging.getLogger(__name__)
MAILBOXES: Final = pa.schema(
    [
        ("epoch", pa.string()),
        ("owner", pa.string()),
        ("at_ns", pa.int64()),
        ("dlv_seq", pa.int64()),
        ("series", pa.string()),
        ("number", pa.int64()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("count", pa.int64()),
        ("head", pa.int64()),
        ("through", pa.int64()),
    ]
)
#: rows of one frame have all of these in common
_FRAME: Final = ("epoch", "owner", "at_ns", "dlv_seq", "series", "number")
_PIECE: Final = (*_FRAME, "first", "last", "count", "head")
#: it is written down after so many commits to `deliveries`: about a megabyte of theirs for a few hundred owners
WRITE_EVERY: Final = 200


def newest_of(rows: pa.Table) -> pa.Table:
    """Of rows that are frames, or pieces of them: for each owner and epoch the newest frame, and the newest head.

    Of the rows of one commit, which share their order, that is the frame with the highest place.
    """
    frames = rows.group_by(list(_FRAME), use_threads=False).aggregate(
        [("first", "min"), ("last", "max"), ("count", "sum"), ("head", "max")]
    )
    frames = frames.rename_columns(list(_PIECE))
    whose = ["epoch", "owner"]
    latest = frames.sort_by([("at_ns", "descending"), ("dlv_seq", "descending")])
    newest = latest.group_by(whose, use_threads=False).aggregate(
        [("at_ns", "first"), ("dlv_seq", "first"), ("head", "max")]
    )
    keys = [*whose, "at_ns", "dlv_seq"]
    found = frames.drop_columns(["head"]).join(newest.rename_columns([*keys, "head"]), keys, join_type="inner")
    return found.select(list(_PIECE))


class MailboxSummary:
    """The last frame of every owner, as of the newest commit to `deliveries` that this process knows."""

    def __init__(self, table: DeltaWriter, deliveries: DeltaWriter) -> None:
        self._table = table
        self._deliveries = deliveries
        self._rows = MAILBOXES.empty_table().select(list(_PIECE))
        #: rows of `deliveries` up to this order are in `_rows`
        self._through = 0
        self._written = 0
        self._load()

    def _load(self) -> None:
        known, newest = self._table.read(), self._deliveries.greatest("at_ns")
        through = int(pc.max(known["through"]).as_py() or 0)
        if through > newest:
            # at once: rows that come now are newer than it is, and it would be believed again
            log.warning("%s is older than what was made of it, which is made anew", self._deliveries.uri)
            self._table.replace(lambda _: MAILBOXES.empty_table())
        else:
            self._rows, self._through = known.select(list(_PIECE)), through
        self._written = self._deliveries.table.version()

    @property
    def newest(self) -> int:
        """The newest order in `deliveries`."""
        return self._deliveries.greatest("at_ns")

    def rows(self) -> pa.Table:
        newest = self.newest
        if newest > self._through:
            later = [("at_ns", ">", self._through)]
            self._rows = self._deliveries.reduce(_fold, self._rows, _PIECE, later)
            self._through = newest
        return self._rows

    def tend(self) -> None:
        """Write it down, if it is time: a start then reads what came later."""
        version = self._deliveries.table.version()
        if version - self._written < WRITE_EVERY:
            return
        rows = self.rows()
        through = pa.array([self._through] * rows.num_rows, pa.int64())
        self._table.replace(lambda _: rows.append_column("through", through).cast(MAILBOXES))
        self._written = version
        self._table.tend()

    # --- what a start asks ---

    def last_frames(self, epoch: str) -> dict[str, tuple[Counter, int]]:
        """Owner -> the counter after its last frame, and the order of the rows that say so."""
        return {
            row["owner"]: (
                Counter(row["series"], row["number"], (row["first"], row["last"], row["count"])),
                row["at_ns"],
            )
            for row in self._of(epoch).to_pylist()
        }

    def owners(self, epoch: str | None = None) -> list[str]:
        """Who was ever handed a frame; of whatever log, without an epoch."""
        rows = self.rows() if epoch is None else self._of(epoch)
        return sorted(pc.unique(rows["owner"]).to_pylist())

    def last_head(self, epoch: str) -> int:
        return int(pc.max(self._of(epoch)["head"]).as_py() or 0)

    def _of(self, epoch: str) -> pa.Table:
        rows = self.rows()
        return rows.filter(pc.equal(rows["epoch"], epoch))


def _fold(known: pa.Table, part: pa.Table) -> pa.Table:
    return newest_of(pa.concat_tables([known, part.select(list(_PIECE))]))
