"""The ledger: debts, deliveries and quarantine as Delta tables, readable by anyone without Spark.

`deliveries` has one row for each range of a channel in a frame, `quarantine` one for each poisoned record; a batch is
written to each in one commit that carries its number, and a number already there is not written again. Delta does not
check that: we do, against the same snapshot.
`debts` only grows by events (`pipeline/debts.py`), so an operator can cancel one while the pipeline runs; it is folded
up now and then. The application id holds the identity of the checkpoint: a new checkpoint counts batches from zero.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError

from tidings.errors import ConflictError
from tidings.pipeline.classify import Poison
from tidings.pipeline.debts import DebtEvent, Debts, EventKind
from tidings.pipeline.deliverer import DeliverBatch
from tidings.pipeline.planning import Counter, Delivered

DELIVERIES = pa.schema(
    [
        ("owner", pa.string()),
        ("series", pa.string()),
        ("number", pa.int64()),
        ("channel", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("count", pa.int64()),
        ("dlv_seq", pa.int64()),
        ("batch", pa.int64()),
        ("after", pa.int64()),
        ("through", pa.int64()),
        ("head", pa.int64()),
        ("epoch", pa.string()),
        ("app", pa.string()),
        ("at_ns", pa.int64()),
    ]
)
DEBTS = pa.schema(
    [
        ("order", pa.int64()),
        ("kind", pa.string()),
        ("owner", pa.string()),
        ("channel", pa.string()),
        ("seq", pa.int64()),
        ("cause", pa.string()),
        ("first", pa.int64()),
        ("count", pa.int64()),
        ("writer", pa.string()),
    ]
)
QUARANTINE = pa.schema(
    [
        ("seq", pa.int64()),
        ("subject", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("epoch", pa.string()),
        ("at_ns", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class LedgerPaths:
    deliveries: str
    debts: str
    quarantine: str

    @classmethod
    def below(cls, checkpoint: Path, lake: Path) -> LedgerPaths:
        return cls(str(lake / "deliveries"), str(checkpoint / "debts"), str(lake / "quarantine"))


def open_table(path: str, schema: pa.Schema) -> DeltaTable:
    """The table at `path`, made if it is not there."""
    if not DeltaTable.is_deltatable(path):
        DeltaTable.create(path, schema, mode="ignore")
    return DeltaTable(path)


class DeltaLedger:
    """Written by the holder of the deliver lease only, except for an operator's `cancel`."""

    def __init__(self, paths: LedgerPaths, *, app: str, epoch: str) -> None:
        self.paths = paths
        self._app = app
        self.epoch = epoch
        self._deliveries = open_table(paths.deliveries, DELIVERIES)
        self._debts = open_table(paths.debts, DEBTS)
        self._quarantine = open_table(paths.quarantine, QUARANTINE)
        self._order = 0
        self._debts_version = -1
        #: orders of the events of others that were applied: each counts once
        self._known: set[int] = set()

    # --- what outlived the last process ---

    def load_debts(self) -> Debts:
        events = read_events(self._debts)
        self._known = {event.order for event in events}
        self._debts_version = self._debts.version()
        debts = Debts.of(events)
        self._order = debts.newest
        return debts

    def last_frames(self) -> dict[str, tuple[Counter, int]]:
        """Owner -> the counter after its last frame of this epoch, and the DLV sequence of that frame.

        Where the log went backwards, DLV may have too: older frames had higher sequences and say nothing of the newest.
        """
        rows = self._deliveries.to_pyarrow_table(
            columns=["owner", "series", "number", "first", "last", "count", "dlv_seq"],
            filters=[("epoch", "=", self.epoch)],
        )
        if not rows.num_rows:
            return {}
        newest = rows.group_by("owner").aggregate([("dlv_seq", "max")])
        joined = rows.join(newest.rename_columns(["owner", "dlv_seq"]), ["owner", "dlv_seq"], join_type="inner")
        keys = ["owner", "series", "number", "dlv_seq"]
        frames = joined.group_by(keys).aggregate([("first", "min"), ("last", "max"), ("count", "sum")])
        return {
            row["owner"]: (
                Counter(row["series"], row["number"], (row["first_min"], row["last_max"], row["count_sum"])),
                row["dlv_seq"],
            )
            for row in frames.to_pylist()
        }

    def owners(self) -> list[str]:
        """Everybody who was ever handed a frame."""
        rows = self._deliveries.to_pyarrow_table(columns=["owner"])
        return sorted(pc.unique(rows["owner"]).to_pylist())

    def reached(self) -> int:
        """`through` of the newest batch of this checkpoint that is done."""
        rows = self._deliveries.to_pyarrow_table(
            columns=["through"], filters=[("app", "=", self._app), ("batch", ">=", 0)]
        )
        return int(pc.max(rows["through"]).as_py() or 0)

    def last_head(self) -> int:
        """The newest head anything was delivered at in this epoch."""
        rows = self._deliveries.to_pyarrow_table(columns=["head"], filters=[("epoch", "=", self.epoch)])
        return int(pc.max(rows["head"]).as_py() or 0)

    # --- the port of the deliverer ---

    def is_done(self, batch: DeliverBatch) -> bool:
        return batch.number is not None and self._has(self._deliveries, batch.number)

    def _has(self, table: DeltaTable, number: int) -> bool:
        version = table.transaction_version(self._app)
        return version is not None and version >= number

    def next_order(self) -> int:
        self._order = max(self._order + 1, time.time_ns())
        return self._order

    def write_events(self, events: Sequence[DebtEvent]) -> None:
        append_events(self.paths.debts, events, writer=self._app)

    def foreign_events(self) -> Sequence[DebtEvent]:
        self._debts.update_incremental()
        if self._debts.version() == self._debts_version:
            return ()
        self._debts_version = self._debts.version()
        news = [event for event in read_events(self._debts, but=self._app) if event.order not in self._known]
        self._known |= {event.order for event in news}
        return news

    def write_deliveries(self, batch: DeliverBatch, rows: Sequence[Delivered]) -> None:
        stamp: dict[str, Any] = {
            "batch": -1 if batch.number is None else batch.number,
            "after": batch.after,
            "through": batch.through,
            "head": batch.head,
            "epoch": self.epoch,
            "app": self._app,
            "at_ns": time.time_ns(),
        }
        table = pa.Table.from_pylist([asdict(row) | stamp for row in rows], schema=DELIVERIES)
        self._append(self._deliveries, table, batch.number)

    def _append(self, to: DeltaTable, rows: pa.Table, number: int | None) -> None:
        """One commit that carries the number of its batch; whoever else writes meanwhile is one too many."""
        transactions = [] if number is None else [Transaction(self._app, number)]
        commit = CommitProperties(app_transactions=transactions, max_commit_retries=0)
        try:
            write_deltalake(to, rows, mode="append", commit_properties=commit)
        except CommitFailedError as error:
            raise ConflictError(f"somebody else writes {to.table_uri}: is another pipeline running?") from error
        to.update_incremental()

    def unread(self, owner: str, above: int) -> Mapping[str, int]:
        rows = self._deliveries.to_pyarrow_table(
            columns=["channel", "first"], filters=[("owner", "=", owner), ("dlv_seq", ">", above)]
        )
        found = rows.group_by("channel").aggregate([("first", "min")]).to_pylist()
        return {row["channel"]: row["first_min"] for row in found}

    def write_quarantine(self, number: int, poison: Iterable[Poison]) -> None:
        """Keep aside what batch `number` found, unless an earlier attempt of it did."""
        rows = [asdict(each) | {"epoch": self.epoch, "at_ns": time.time_ns()} for each in poison]
        if rows and not self._has(self._quarantine, number):
            self._append(self._quarantine, pa.Table.from_pylist(rows, schema=QUARANTINE), number)


def read_events(table: DeltaTable, *, but: str | None = None) -> list[DebtEvent]:
    rows = table.to_pyarrow_table().to_pylist()
    return [
        DebtEvent(r["order"], _kind(r["kind"]), r["owner"], r["channel"], r["seq"], r["cause"], r["first"], r["count"])
        for r in rows
        if r["writer"] != but
    ]


def _kind(text: str) -> EventKind:
    for kind in get_args(EventKind):
        if kind == text:
            return kind  # type: ignore[no-any-return]
    raise ConflictError(f"the table of debts has an event {text!r}, which this version does not know")


def append_events(path: str, events: Sequence[DebtEvent], *, writer: str) -> None:
    rows = [asdict(event) | {"writer": writer} for event in events]
    write_deltalake(path, pa.Table.from_pylist(rows, schema=DEBTS), mode="append")


def open_debts(path: str) -> Debts:
    """The debts as the table has them, for people; none if there is no table yet."""
    return Debts.of(read_events(DeltaTable(path)) if DeltaTable.is_deltatable(path) else [])


def quarantined(path: str, count: int) -> list[dict[str, Any]]:
    """The newest poisoned records. A lost checkpoint may have made a batch write its rows again: each counts once."""
    if not DeltaTable.is_deltatable(path):
        return []
    rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    once = {(row["epoch"], row["seq"]): row for row in sorted(rows, key=lambda row: -int(row["at_ns"]))}
    newest = sorted(once.values(), key=lambda row: (row["at_ns"], row["seq"]), reverse=True)[:count]
    return [{**{k: v for k, v in row.items() if k != "at_ns"}, "at": row["at_ns"] / 1e9} for row in newest]
