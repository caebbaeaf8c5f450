"""The ledger: debts, deliveries and quarantine as Delta tables, readable by anyone without Spark.

`deliveries` has one row for each range of a channel in a frame, `quarantine` one for each poisoned record. A batch is
written to each in one commit whose application transaction is the log sequence it reaches, so `reached` says how far
delivery is, whatever numbers Spark gives its batches; its range is in the commit's metadata. The application id holds
the identity of the checkpoint: a log that went backwards gets a new one, and with it a new reach.
Rows of one commit share `at_ns`, an order that only grows, also over restarts and clocks that go back: the events of
`debts` have the same orders, so that a reset of an owner ends what its earlier rows say, whatever their places in DLV.
`debts` only grows by events (`pipeline/debts.py`), so an operator can cancel one while the pipeline runs.
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
from tidings.pipeline.deliverer import NEVER, DeliverBatch, Handed
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
        #: what lies below in the log was read by everybody long ago, and may be gone
        self.needed = 0
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
        newest = pc.max(self._deliveries.to_pyarrow_table(columns=["at_ns"])["at_ns"]).as_py()
        self._order = max(debts.newest, newest or 0)
        return debts

    def last_frames(self) -> dict[str, tuple[Counter, int]]:
        """Owner -> the counter after its last frame of this epoch, and the order of the row that says so."""
        rows = self._rows(["owner", "series", "number", "first", "last", "count", "dlv_seq", "at_ns"])
        if not rows.num_rows:
            return {}
        # of the rows of one commit, which share their order, the frame with the highest place
        latest = rows.sort_by([("at_ns", "descending"), ("dlv_seq", "descending")])
        newest = latest.group_by("owner", use_threads=False).aggregate([("at_ns", "first"), ("dlv_seq", "first")])
        keys = ["owner", "at_ns", "dlv_seq"]
        joined = rows.join(newest.rename_columns(keys), keys, join_type="inner")
        frames = joined.group_by([*keys, "series", "number"]).aggregate(
            [("first", "min"), ("last", "max"), ("count", "sum")]
        )
        return {
            row["owner"]: (
                Counter(row["series"], row["number"], (row["first_min"], row["last_max"], row["count_sum"])),
                row["at_ns"],
            )
            for row in frames.to_pylist()
        }

    def owners(self) -> list[str]:
        """Everybody who was ever handed a frame."""
        rows = self._deliveries.to_pyarrow_table(columns=["owner"])
        return sorted(pc.unique(rows["owner"]).to_pylist())

    def reached(self) -> int:
        """Everything of the log through this was delivered or is a debt, as far as this checkpoint knows."""
        return self._deliveries.transaction_version(self._app) or 0

    def last_head(self) -> int:
        """The newest head anything was delivered at in this epoch."""
        rows = self._rows(["head"])
        return int(pc.max(rows["head"]).as_py() or 0)

    def unread_since(self, place: int) -> list[tuple[int, int]]:
        """(DLV sequence, first log sequence) of what was handed out at or above a place, not below `needed`."""
        rows = self._rows(["dlv_seq", "first", "last"], [("dlv_seq", ">=", place), ("last", ">=", self.needed)])
        found = rows.group_by("dlv_seq").aggregate([("first", "min")])
        return list(zip(found["dlv_seq"].to_pylist(), found["first_min"].to_pylist(), strict=True))

    def _rows(self, columns: list[str], filters: Sequence[tuple[str, str, Any]] = ()) -> pa.Table:
        """Of this epoch: where the log went backwards, sequences say nothing of those before."""
        return self._deliveries.to_pyarrow_table(columns=columns, filters=[("epoch", "=", self.epoch), *filters])

    # --- the port of the deliverer ---

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
            "at_ns": self.next_order(),
        }
        table = pa.Table.from_pylist([asdict(row) | stamp for row in rows], schema=DELIVERIES)
        self._append(self._deliveries, table, batch)

    def _append(self, to: DeltaTable, rows: pa.Table, batch: DeliverBatch) -> None:
        """One commit that says how far its batch reaches; whoever else writes meanwhile is one too many."""
        transactions = [] if batch.number is None else [Transaction(self._app, batch.through)]
        said = {"after": str(batch.after), "through": str(batch.through), "head": str(batch.head)}
        commit = CommitProperties(custom_metadata=said, app_transactions=transactions, max_commit_retries=0)
        try:
            write_deltalake(to, rows, mode="append", commit_properties=commit)
        except CommitFailedError as error:
            raise ConflictError(f"somebody else writes {to.table_uri}: is another pipeline running?") from error
        to.update_incremental()

    def handed(self, owner: str, *, above: int, since: int, through: int = NEVER) -> Sequence[Handed]:
        places = [("dlv_seq", ">", above), ("dlv_seq", "<=", through), ("at_ns", ">", since)]
        rows = self._rows(["channel", "first", "last", "count"], [("owner", "=", owner), *places])
        pieces = {Handed(row["channel"], row["first"], row["last"], row["count"]) for row in rows.to_pylist()}
        return sorted((piece for piece in pieces if piece.last >= self.needed), key=lambda piece: piece.first)

    def frames(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        rows = self._rows(["owner", "dlv_seq", "at_ns"], [("last", ">=", self.needed)])
        found: dict[str, set[tuple[int, int]]] = {}
        for row in rows.to_pylist():
            found.setdefault(row["owner"], set()).add((row["at_ns"], row["dlv_seq"]))
        return {owner: sorted(frames) for owner, frames in found.items()}

    def write_quarantine(self, batch: DeliverBatch, poison: Iterable[Poison]) -> None:
        """Keep aside what a batch found, unless an earlier attempt of it did."""
        rows = [asdict(each) | {"epoch": self.epoch, "at_ns": time.time_ns()} for each in poison]
        if rows and (self._quarantine.transaction_version(self._app) or 0) < batch.through:
            self._append(self._quarantine, pa.Table.from_pylist(rows, schema=QUARANTINE), batch)


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
