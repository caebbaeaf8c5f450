"""The last frame of every owner is known at a start without reading all that was ever delivered."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("deltalake")

import pyarrow as pa

from tidings.delivery import ledger as ledgers
from tidings.delivery.deliverer import DeliverBatch
from tidings.delivery.delta_log import TableFiles
from tidings.delivery.ledger import MAILBOXES, DeltaLedger, LedgerPaths, newest_of, put_damaged_aside
from tidings.errors import StoreBroken
from tidings.model.planning import Counter, Delivered

OWNERS = ("A", "B", "C", "D")
EPOCHS = ("one", "two")


@pytest.fixture
def paths(tmp_path: Path) -> LedgerPaths:
    return LedgerPaths.below(tmp_path / "checkpoint", tmp_path / "lake")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "SUMMARY_EVERY", 5)


def opened(paths: LedgerPaths, epoch: str = "one") -> DeltaLedger:
    ledger = DeltaLedger(paths, app="deliver:one", epoch=epoch)
    ledger.load_debts()
    return ledger


class Deliveries:
    """Batches of random frames, and what a naive reader says of all of them."""

    def __init__(self, paths: LedgerPaths, seed: int = 1) -> None:
        self.paths, self.random = paths, random.Random(seed)
        self.ledgers = {epoch: opened(paths, epoch) for epoch in EPOCHS}
        self.frames: dict[tuple[str, str], Counter] = {}
        self.heads: dict[str, int] = {}
        self.place = self.batches = 0

    def write(self, epoch: str = "one") -> None:
        rows = []
        for owner in self.random.sample(OWNERS, self.random.randint(0, 3)):
            for _ in range(self.random.randint(1, 2)):
                self.place += 1
                number = self.frames.get((epoch, owner), Counter("s", 0, (0, 0, 0))).number + 1
                pieces = [
                    (self.place * 10 + each, self.place * 10 + each + 3) for each in range(self.random.randint(1, 3))
                ]
                rows += [
                    Delivered(owner, "s", number, f"c{each}", first, last, 2, self.place)
                    for each, (first, last) in enumerate(pieces)
                ]
                self.frames[epoch, owner] = Counter("s", number, (pieces[0][0], pieces[-1][1], 2 * len(pieces)))
        self.batches += 1
        head = self.batches * 100
        ledger = self.ledgers[epoch]
        ledger.write_deliveries(DeliverBatch(None, head - 1, head, head), rows)
        if rows:
            self.heads[epoch] = head
        ledger.tend(ledger.load_debts())

    def check(self, ledger: DeltaLedger) -> None:
        found = {owner: counter for owner, (counter, _) in ledger.last_frames().items()}
        assert found == {owner: counter for (epoch, owner), counter in self.frames.items() if epoch == ledger.epoch}
        assert ledger.owners() == sorted(found)
        assert ledger.everybody() == sorted({owner for _, owner in self.frames})
        assert ledger.last_head() == self.heads.get(ledger.epoch, 0)


@pytest.mark.parametrize("seed", range(4))
def test_it_says_what_all_rows_together_say_whenever_it_is_asked(paths: LedgerPaths, seed: int) -> None:
    said = Deliveries(paths, seed)
    for _ in range(14):
        said.write(said.random.choice(EPOCHS))
        if said.random.random() < 0.3:
            for epoch in EPOCHS:
                said.check(opened(paths, epoch))
    for epoch in EPOCHS:
        said.check(said.ledgers[epoch])
        said.check(opened(paths, epoch))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each reading of a file gave."""
    counted: list[int] = []
    plain_rows, plain_parts = TableFiles.rows, TableFiles.parts

    def rows(self: TableFiles, *args: object) -> pa.Table:
        found = plain_rows(self, *args)  # type: ignore[arg-type]
        counted.append(found.num_rows)
        return found

    def parts(self: TableFiles, *args: object) -> Iterator[pa.Table]:
        for part in plain_parts(self, *args):  # type: ignore[arg-type]
            counted.append(part.num_rows)
            yield part

    monkeypatch.setattr(TableFiles, "rows", rows)
    monkeypatch.setattr(TableFiles, "parts", parts)
    return counted


def test_a_start_reads_what_is_new_however_much_there_was(paths: LedgerPaths, read: list[int]) -> None:
    said = Deliveries(paths)
    for _ in range(30):
        said.write()
    read.clear()
    said.check(opened(paths))
    rows = said.ledgers["one"]._deliveries.read().num_rows
    read.pop()
    assert sum(read) < rows / 2 < rows


def test_without_its_table_it_is_made_anew(paths: LedgerPaths) -> None:
    said = Deliveries(paths)
    for _ in range(8):
        said.write()
    shutil.rmtree(paths.mailboxes)
    said.check(opened(paths))


def test_an_older_copy_of_the_deliveries_is_believed_and_not_what_was_made_of_the_newer(
    paths: LedgerPaths, tmp_path: Path
) -> None:
    said = Deliveries(paths)
    for _ in range(3):
        said.write()
    shutil.copytree(paths.deliveries, tmp_path / "copy")
    before, mark = dict(said.frames), said.ledgers["one"].mark
    heads = dict(said.heads)
    for _ in range(8):
        said.write()
    assert opened(paths).mark > mark
    shutil.rmtree(paths.deliveries)
    (tmp_path / "copy").rename(paths.deliveries)
    said.frames, said.heads = before, heads
    again = opened(paths)
    assert again.mark[0] == mark[0], "an older copy is known by its mark"
    said.check(again)
    said.ledgers["one"] = again
    said.write()
    said.check(opened(paths))


def test_damage_in_it_is_put_aside_and_costs_nothing(paths: LedgerPaths) -> None:
    said = Deliveries(paths)
    for _ in range(12):
        said.write()
    files = sorted(Path(paths.mailboxes).glob("*.parquet"))
    assert files
    for file in files:
        file.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(StoreBroken, match="mailboxes"):
        opened(paths)
    assert put_damaged_aside(paths) == [paths.mailboxes]
    said.check(opened(paths))


def test_rows_of_an_older_version_know_no_head(paths: LedgerPaths) -> None:
    row = dict.fromkeys(MAILBOXES.names) | {
        "epoch": "one",
        "owner": "A",
        "at_ns": 5,
        "dlv_seq": 1,
        "series": "s",
        "number": 1,
        "first": 1,
        "last": 2,
        "count": 2,
    }
    rows = pa.Table.from_pylist([row], schema=MAILBOXES).drop_columns(["through"])
    (found,) = newest_of(rows).to_pylist()
    assert (found["owner"], found["head"], found["count"]) == ("A", None, 2)
