"""Damage of the ledger's tables is told apart from what cannot be read now, and only damage is put aside."""

import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("deltalake")

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from tidings.delivery.deliverer import DeliverBatch
from tidings.delivery.delta_log import words_of
from tidings.delivery.delta_writer import FORGETS
from tidings.delivery.ledger import (
    DEBTS,
    DeltaLedger,
    LedgerPaths,
    events_of,
    open_debts,
    put_damaged_aside,
    quarantined,
    table_of,
)
from tidings.errors import ConfigError, ConflictError, StoreBroken, StoreError
from tidings.model.classify import Poison
from tidings.model.deferred import DebtEvent
from tidings.model.planning import Delivered

FLIPS = 120


@pytest.fixture
def paths(tmp_path: Path) -> LedgerPaths:
    return LedgerPaths.below(tmp_path / "checkpoint", tmp_path / "lake")


@pytest.fixture
def ledger(paths: LedgerPaths) -> DeltaLedger:
    """A ledger in which every table has rows."""
    made = opened(paths)
    for n in range(1, 3):
        write(made, n)
    made.write_quarantine(DeliverBatch(9, 20, 30, 30), [Poison(21, "td.s.chat.A.general", "no_json", "at 1")])
    return made


def opened(paths: LedgerPaths) -> DeltaLedger:
    ledger = DeltaLedger(paths, app="deliver:one", epoch="e")
    ledger.load_debts()
    return ledger


def write(ledger: DeltaLedger, n: int) -> None:
    row = Delivered("A", "first", n, "general", n * 10 + 1, n * 10 + 5, 5, n)
    ledger.write_deliveries(DeliverBatch(n, n * 10, n * 10 + 10, n * 10 + 10), [row])
    ledger.write_events([DebtEvent(ledger.next_order(), "owe", "A", "general", n, "no room")])


def read_everything(ledger: DeltaLedger) -> None:
    """All that delivery asks of a ledger."""
    ledger.load_debts()
    ledger.last_frames()
    ledger.frames()
    ledger.unread_since(0)
    ledger.everybody()
    ledger.owners()
    ledger.last_head()
    ledger.handed("A", above=0, since=0)


def data_file(table: str) -> Path:
    return min(Path(table).glob("*.parquet"))


def aside(paths: LedgerPaths) -> list[Path]:
    folders = {Path(uri).parent for uri, _ in paths.tables}
    return [path for folder in folders for path in folder.glob("*.damaged-*")]


@pytest.mark.parametrize("name", ["deliveries", "debts"])
def test_whatever_bit_flips_a_table_is_read_or_put_aside_and_the_ledger_opens_again(
    paths: LedgerPaths, ledger: DeltaLedger, name: str
) -> None:
    table = str(getattr(paths, name))
    file, chance = data_file(table), random.Random(7)
    sound, broken = file.read_bytes(), 0
    for _ in range(FLIPS):
        flipped = bytearray(sound)
        flipped[chance.randrange(len(sound))] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        try:
            read_everything(opened(paths))
        except StoreBroken:
            broken += 1
            assert put_damaged_aside(paths) == [table]
            read_everything(opened(paths))
            (kept,) = aside(paths)
            _put_back(kept, Path(table))
        file.write_bytes(sound)
    assert broken > FLIPS // 5, "most of a small file is what says where everything is"
    read_everything(opened(paths))


def _put_back(kept: Path, table: Path) -> None:
    for path in (*table.glob("_delta_log/*"), table / "_delta_log", table):
        path.unlink() if path.is_file() else path.rmdir()
    kept.rename(table)


@pytest.mark.parametrize("column", ["order", "kind", "owner", "channel", "seq"])
def test_a_row_without_what_every_row_has_is_damage(paths: LedgerPaths, ledger: DeltaLedger, column: str) -> None:
    row = {"order": 1, "kind": "owe", "owner": "A", "channel": "general", "seq": 1} | {column: None}
    write_deltalake(paths.debts, pa.Table.from_pylist([row], schema=DEBTS), mode="append")
    with pytest.raises(StoreBroken, match=f"nothing in {column}"):
        opened(paths)
    with pytest.raises(StoreBroken, match=f"nothing in {column}"):
        open_debts(paths.debts)
    assert put_damaged_aside(paths) == [paths.debts]
    assert not opened(paths).load_debts().open


def test_a_file_that_is_gone_is_damage(paths: LedgerPaths, ledger: DeltaLedger) -> None:
    data_file(paths.deliveries).unlink()
    with pytest.raises(StoreBroken, match="is gone"):
        read_everything(ledger)
    assert put_damaged_aside(paths) == [paths.deliveries]


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_cannot_be_opened_now_is_not_damage_and_stays(paths: LedgerPaths, ledger: DeltaLedger) -> None:
    with no_descriptor_left():
        with pytest.raises(StoreError, match="Too many open files") as caught:
            ledger.everybody()
        assert put_damaged_aside(paths) == []
    assert not isinstance(caught.value, StoreBroken)
    assert not aside(paths)
    read_everything(ledger)


def test_a_damaged_file_that_cannot_be_read_either_waits_until_it_can(paths: LedgerPaths, ledger: DeltaLedger) -> None:
    """A disk that answers EIO: what it holds is not known."""
    file = data_file(paths.deliveries)
    file.unlink()
    file.symlink_to(f"/proc/{os.getpid()}/mem")  # whoever reads its beginning gets that error
    with pytest.raises(StoreError, match="cannot be read now"):
        ledger.everybody()
    assert put_damaged_aside(paths) == []


def test_a_table_with_a_setting_or_a_type_of_somebody_elses_is_refused_and_stays(paths: LedgerPaths) -> None:
    write_deltalake(paths.debts, pa.table({"order": ["text"]}))
    write_deltalake(
        paths.deliveries,
        pa.table({"owner": ["A"]}),
        configuration={FORGETS: "interval 1 days", "delta.appendOnly": "false"},
    )
    with pytest.raises(ConfigError, match=FORGETS):
        opened(paths)
    assert put_damaged_aside(paths) == []
    assert DeltaTable(paths.debts).to_pyarrow_table().num_rows == 1


def test_an_event_of_a_newer_version_is_a_conflict_and_its_table_stays(paths: LedgerPaths, ledger: DeltaLedger) -> None:
    newer = table_of([DebtEvent(5, "owe", "A", "general", 1)], writer="deliver:newer")
    newer = newer.set_column(1, "kind", pa.array(["forgive"]))
    write_deltalake(paths.debts, newer, mode="append")
    with pytest.raises(ConflictError, match="forgive"):
        opened(paths)
    assert put_damaged_aside(paths) == []
    assert len(events_of(ledger._debts.read())) == 2


def test_people_who_ask_for_a_damaged_table_get_a_sentence(paths: LedgerPaths, ledger: DeltaLedger) -> None:
    for table in (paths.debts, paths.quarantine):
        file = data_file(table)
        file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(StoreBroken, match=r"^[^\n]*debts cannot be read \([^\n]+\): `tidings pipeline status`[^\n]*$"):
        open_debts(paths.debts)
    with pytest.raises(StoreBroken, match=r"^[^\n]*quarantine cannot be read \([^\n]+\): `tidings pipeline status`"):
        quarantined(paths.quarantine, 10)


def test_an_error_of_a_store_is_one_sentence_without_colours_or_signed_addresses() -> None:
    error = OSError(
        "Generic error\n   \x1b[31m↳\x1b[0m GET https://a.example/t?sig=SECRET&x=1 in 2ms\n ↳ 403 Forbidden"
    )
    assert words_of(error) == "Generic error: GET https://a.example/t?.. in 2ms: 403 Forbidden"
