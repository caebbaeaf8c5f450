"""The ledger: debts, deliveries and quarantine as Delta tables, readable by anyone without Spark.

`deliveries` has one row for each range of a channel in a frame, `quarantine` one for each poisoned record. A batch is
written to each in one commit whose application transaction is the log sequence it reaches, so `reached` says how far
delivery is, whatever numbers Spark gives its batches; its range is in the commit's metadata. The application id holds
the identity of the checkpoint: a log that went backwards gets a new one, and with it a new reach.
Rows of one commit share `at_ns`, an order that only grows, also over restarts and clocks that go back: the events of
`debts` have the same orders, so that a reset of an owner ends what its earlier rows say, whatever their places in DLV.
`debts` only grows by events (`model/deferred.py`), so an operator can cancel one while the pipeline runs; now and then
it is written anew with what is in force (`tend`). `mailboxes` is what a start has to know of `deliveries`
(`MailboxSummary`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from tidings.delivery.deliverer import NEVER, DeliverBatch, HandedRange
from tidings.delivery.delta_log import TableFiles, fault_of, local_folder, words_of
from tidings.delivery.delta_writer import UNREAD, DeltaWriter
from tidings.delivery.storage import below, for_table, is_folder
from tidings.errors import ConflictError, StoreBroken, StoreError, TidingsError
from tidings.model.classify import Poison
from tidings.model.deferred import DebtEvent, Debts, EventKind
from tidings.model.planning import Counter, Delivered
from tidings.wire.message import new_id

log = logging.getLogger(__name__)
#: events that the holder of the deliver lease writes: a commit of one who was replaced is refused
HOLDER = "deliver"
#: the table of events is written anew when it has so many, and so many for each that is in force
FOLD_FROM, FOLD_AT = 2_000, 4

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
MAILBOXES = pa.schema(
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
_FRAME = ("epoch", "owner", "at_ns", "dlv_seq", "series", "number")
_PIECE = (*_FRAME, "first", "last", "count", "head")
#: it is written down after so many commits to `deliveries`: about a megabyte of theirs for a few hundred owners
SUMMARY_EVERY = 200
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
class LedgerTable:
    """What one of the tables is: in `needed` every row has something, whichever version wrote it."""

    schema: pa.Schema
    indexed: tuple[str, ...]
    needed: tuple[str, ...]

    def open(self, uri: str, storage: Mapping[str, str]) -> DeltaWriter:
        return DeltaWriter(uri, self.schema, storage_options=storage, indexed=self.indexed, needed=self.needed)


DELIVERY_TABLE = LedgerTable(
    DELIVERIES,
    ("owner", "dlv_seq", "last", "at_ns"),
    ("owner", "series", "number", "channel", "first", "last", "count", "dlv_seq", "epoch", "at_ns"),
)
DEBT_TABLE = LedgerTable(DEBTS, ("order",), ("order", "kind", "owner", "channel", "seq"))
MAILBOX_TABLE = LedgerTable(MAILBOXES, (), tuple(name for name in MAILBOXES.names if name != "head"))
QUARANTINE_TABLE = LedgerTable(QUARANTINE, ("seq",), ("seq", "epoch", "at_ns"))


@dataclass(frozen=True, slots=True)
class LedgerPaths:
    """Where the tables are. `storage`: what deltalake needs to open them, which may be secret."""

    deliveries: str
    debts: str
    quarantine: str
    mailboxes: str
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def below(cls, checkpoint: str | Path, lake: str | Path, storage: Mapping[str, str] | None = None) -> LedgerPaths:
        """Debts lie beside the checkpoint; with a lake in a store they lie there, so that a checkpoint may be lost."""
        debts = checkpoint if is_folder(str(checkpoint)) and is_folder(str(lake)) else lake
        in_lake = {name: below(lake, name) for name in ("deliveries", "quarantine", "mailboxes")}
        return cls(**in_lake, debts=below(debts, "debts"), storage=storage or {})

    @property
    def tables(self) -> tuple[tuple[str, LedgerTable], ...]:
        uris = (self.deliveries, self.debts, self.quarantine, self.mailboxes)
        return tuple(zip(uris, (DELIVERY_TABLE, DEBT_TABLE, QUARANTINE_TABLE, MAILBOX_TABLE), strict=True))


class DeltaLedger:
    """Written by the holder of the deliver lease only, except for an operator's `cancel`."""

    def __init__(self, paths: LedgerPaths, *, app: str, epoch: str) -> None:
        self.paths = paths
        #: what lies below in the log was read by everybody long ago, and may be gone
        self.needed = 0
        self._app = app
        self.epoch = epoch
        self._deliveries, self._debts, self._quarantine, mailboxes = (
            table.open(uri, paths.storage) for uri, table in paths.tables
        )
        self._mailboxes = MailboxSummary(mailboxes, self._deliveries)
        self._order = 0
        #: the newest order in `deliveries` and in `debts`
        self._newest = [0, 0]
        self._events = 0
        self._debts_version = -1
        #: orders of the events of others that were applied: each counts once
        self._known: set[int] = set()

    # --- what outlived the last process ---

    def load_debts(self) -> Debts:
        events = events_of(self._debts.read())
        self._events = len(events)
        self._known = {event.order for event in events}
        self._debts_version = self._debts.table.version()
        debts = Debts.of(events)
        self._newest = [self._mailboxes.newest, debts.newest]
        self._order = max(self._newest)
        return debts

    @property
    def mark(self) -> tuple[int, int]:
        """How new the tables are: a ledger whose mark is lower than one that was kept elsewhere is an older copy."""
        return self._newest[0], self._newest[1]

    def last_frames(self) -> dict[str, tuple[Counter, int]]:
        """Owner -> the counter after its last frame of this epoch, and the order of the row that says so."""
        return self._mailboxes.last_frames(self.epoch)

    def everybody(self) -> list[str]:
        """Who was ever handed a frame, of whatever log."""
        return self._mailboxes.owners()

    def owners(self) -> list[str]:
        return self._mailboxes.owners(self.epoch)

    def reached(self) -> int:
        """Everything of the log through this was delivered or is a debt, as far as this checkpoint knows."""
        return self._deliveries.reached(self._app) or 0

    def last_head(self) -> int:
        """The newest head anything was delivered at in this epoch."""
        return self._mailboxes.last_head(self.epoch)

    def unread_since(self, place: int) -> list[tuple[int, int]]:
        """(DLV sequence, first log sequence) of what was handed out at or above a place, not below `needed`."""
        rows = self._rows(["dlv_seq", "first", "last"], [("dlv_seq", ">=", place), ("last", ">=", self.needed)])
        found = rows.group_by("dlv_seq").aggregate([("first", "min")])
        return list(zip(found["dlv_seq"].to_pylist(), found["first_min"].to_pylist(), strict=True))

    def _rows(self, columns: list[str], filters: Sequence[tuple[str, str, Any]] = ()) -> pa.Table:
        """Of this epoch: where the log went backwards, sequences say nothing of those before."""
        return self._deliveries.read(columns, [("epoch", "=", self.epoch), *filters])

    # --- the port of the deliverer ---

    def next_order(self) -> int:
        self._order = max(self._order + 1, time.time_ns())
        return self._order

    def write_events(self, events: Sequence[DebtEvent]) -> None:
        """One commit, refused to a holder that was replaced: the next one wrote that it took over."""
        before = self._debts.table.version()
        self._debts.append(table_of(events, writer=self._app), app=HOLDER, version=events[-1].order)
        self._events += len(events)
        self._newest[1] = max(self._newest[1], events[-1].order)
        if self._debts_version == before and self._debts.table.version() == before + 1:
            self._debts_version += 1  # nobody else wrote

    def foreign_events(self) -> Sequence[DebtEvent]:
        self._debts.refresh()
        if self._debts.table.version() == self._debts_version:
            return ()
        self._debts_version = self._debts.table.version()
        foreign = events_of(self._debts.read(filters=[("writer", "!=", self._app)]))
        news = [event for event in foreign if event.order not in self._known]
        self._known |= {event.order for event in news}
        self._events += len(news)
        return news

    def tend(self, debts: Debts) -> Debts:
        """Keep the tables small, a step at a time. Answers the debts, which may have been written anew."""
        for table in (self._deliveries, self._debts, self._quarantine, self._mailboxes):
            table.tend()
        if self._events < FOLD_FROM or self._events < FOLD_AT * len(debts.events()):
            return debts
        self._debts.replace(lambda rows: table_of(Debts.of(events_of(rows)).events(), writer=self._app))
        return self.load_debts()

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
        if self._append(self._deliveries, table, batch):
            self._newest[0] = max(self._newest[0], stamp["at_ns"])

    def _append(self, to: DeltaWriter, rows: pa.Table, batch: DeliverBatch) -> bool:
        """One commit that says how far its batch reaches; False, and nothing, if an earlier attempt of it did."""
        said = {"after": str(batch.after), "through": str(batch.through), "head": str(batch.head)}
        if batch.number is None:
            return to.append(rows, metadata=said)
        return to.append(rows, app=self._app, version=batch.through, metadata=said)

    def handed(self, owner: str, *, above: int, since: int, through: int = NEVER) -> Sequence[HandedRange]:
        places = [("dlv_seq", ">", above), ("dlv_seq", "<=", through), ("at_ns", ">", since)]
        rows = self._rows(["channel", "first", "last", "count"], [("owner", "=", owner), *places])
        pieces = {HandedRange(row["channel"], row["first"], row["last"], row["count"]) for row in rows.to_pylist()}
        return sorted((piece for piece in pieces if piece.last >= self.needed), key=lambda piece: piece.first)

    def frames(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        columns, may_be_unread = (
            ("owner", "dlv_seq", "at_ns"),
            [("epoch", "=", self.epoch), ("last", ">=", self.needed)],
        )
        rows = self._deliveries.reduce(_each_once, DELIVERIES.empty_table().select(columns), columns, may_be_unread)
        found: dict[str, set[tuple[int, int]]] = {}
        for row in rows.to_pylist():
            found.setdefault(row["owner"], set()).add((row["at_ns"], row["dlv_seq"]))
        return {owner: sorted(frames) for owner, frames in found.items()}

    def write_quarantine(self, batch: DeliverBatch, poison: Iterable[Poison]) -> None:
        """Keep aside what a batch found, unless an earlier attempt of it did."""
        rows = [asdict(each) | {"epoch": self.epoch, "at_ns": time.time_ns()} for each in poison]
        if rows:
            self._append(self._quarantine, pa.Table.from_pylist(rows, schema=QUARANTINE), batch)


def _each_once(known: pa.Table, part: pa.Table) -> pa.Table:
    return pa.concat_tables([known, part.group_by(part.column_names).aggregate([])])


def events_of(rows: pa.Table) -> list[DebtEvent]:
    return [
        DebtEvent(r["order"], _kind(r["kind"]), r["owner"], r["channel"], r["seq"], r["cause"], r["first"], r["count"])
        for r in rows.to_pylist()
    ]


def table_of(events: Sequence[DebtEvent], *, writer: str) -> pa.Table:
    return pa.Table.from_pylist([asdict(event) | {"writer": writer} for event in events], schema=DEBTS)


def _kind(text: str) -> EventKind:
    for kind in get_args(EventKind):
        if kind == text:
            return kind  # type: ignore[no-any-return]
    raise ConflictError(f"the table of debts has an event {text!r}, which this version does not know")


def append_events(
    path: str, events: Sequence[DebtEvent], *, writer: str, storage: Mapping[str, str] | None = None
) -> None:
    """What an operator says beside a pipeline that may be running."""
    options = for_table(path, storage or {})
    try:
        write_deltalake(path, table_of(events, writer=writer), mode="append", storage_options=options)
    except (DeltaError, OSError) as error:
        raise StoreError(f"{path} cannot be written: {words_of(error)}") from error


def open_debts(path: str, storage: Mapping[str, str] | None = None) -> Debts:
    """The debts as the table has them, for people; none if there is no table yet."""
    return Debts.of(events_of(_rows_for_people(path, DEBT_TABLE, storage or {})))


def put_damaged_aside(paths: LedgerPaths) -> list[str]:
    """Rename the tables that are damaged, on this machine; their names. The next ledger begins without.

    One that cannot be read now, is another one's or was written by a newer version stays where it is. So does one in a
    store, which cannot rename a table at once, and whose lists may lack something: its operator moves it.
    """
    aside = []
    for path, kind in paths.tables:
        folder = local_folder(path)
        if folder is None or not Path(folder).exists():
            continue
        try:
            kind.open(path, paths.storage).read()
        except StoreBroken:
            Path(folder).rename(f"{folder}.damaged-{new_id()}")
            aside.append(folder)
        except TidingsError as error:
            log.warning("%s stays as it is: %s", path, error)
    return aside


def _rows_for_people(path: str, kind: LedgerTable, storage: Mapping[str, str]) -> pa.Table:
    """What the table holds now; nothing if there is none yet. Nothing of it is mended or made."""
    options = for_table(path, storage)
    try:
        if not DeltaTable.is_deltatable(path, storage_options=options):
            return kind.schema.empty_table()
        rows = TableFiles(path, options).rows(DeltaTable(path, storage_options=options))
        why = fault_of(rows, kind.needed)
    except UNREAD as error:
        why = words_of(error)
    if why:
        raise StoreBroken(f"{path} cannot be read ({why}): `tidings pipeline status` says what delivery does")
    return rows


def quarantined(path: str, count: int, storage: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The newest poisoned records. A lost checkpoint may have made a batch write its rows again: each counts once."""
    rows = _rows_for_people(path, QUARANTINE_TABLE, storage or {}).to_pylist()
    once = {(row["epoch"], row["seq"]): row for row in sorted(rows, key=lambda row: -int(row["at_ns"]))}
    newest = sorted(once.values(), key=lambda row: (row["at_ns"], row["seq"]), reverse=True)[:count]
    return [{**{k: v for k, v in row.items() if k != "at_ns"}, "at": row["at_ns"] / 1e9} for row in newest]


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
    """The last frame of every owner, as of the newest commit to `deliveries` that this process knows.

    `deliveries` says for ever who was handed what. Of all that, a pipeline that starts needs the last frame of each
    owner: `mailboxes` has it, one row for each owner and epoch of the log, with the order through which rows of
    `deliveries` are in it. What came after is folded in when it is asked for, and written down now and then (`tend`).
    It is made of nothing but `deliveries`: if it is lost, or newer than a `deliveries` that was put back, it is made
    anew.
    """

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
        if version - self._written < SUMMARY_EVERY:
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
