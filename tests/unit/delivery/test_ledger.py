"""The ledger: one holder writes it, what is done is a range, and the table of debts is written anew."""

from pathlib import Path

import pytest

pytest.importorskip("deltalake")

from tidings.delivery import ledger as ledgers
from tidings.delivery.deliverer import DeliverBatch, HandedRange
from tidings.delivery.ledger import DeltaLedger, LedgerPaths, append_events, events_of, open_debts
from tidings.errors import ConflictError, StoreBroken
from tidings.model.deferred import DebtEvent, Debts
from tidings.model.planning import Counter, Delivered
from tools.delivery import simulate


@pytest.fixture
def paths(tmp_path: Path) -> LedgerPaths:
    return LedgerPaths.below(tmp_path / "checkpoint", tmp_path / "lake")


def opened(paths: LedgerPaths, app: str = "deliver:one") -> DeltaLedger:
    ledger = DeltaLedger(paths, app=app, epoch="e")
    ledger.load_debts()
    return ledger


def row(number: int, first: int, last: int, dlv_seq: int, owner: str = "A", series: str = "first") -> Delivered:
    return Delivered(owner, series, number, "general", first, last, last - first + 1, dlv_seq)


def owe(ledger: DeltaLedger, seq: int) -> DebtEvent:
    return DebtEvent(ledger.next_order(), "owe", "A", "general", seq, "no room")


def test_what_a_batch_reaches_is_done_whatever_its_number_and_survives_the_process(paths: LedgerPaths) -> None:
    ledger = opened(paths)
    assert ledger.reached() == 0
    ledger.write_deliveries(DeliverBatch(7, 0, 20, 20), [row(1, 3, 9, 1)])
    ledger.write_deliveries(DeliverBatch(None, 0, 90, 90), [row(2, 10, 11, 2)])
    ledger.write_deliveries(DeliverBatch(0, 20, 35, 40), [row(3, 21, 30, 3)])
    assert (ledger.reached(), opened(paths).reached(), opened(paths, "deliver:other").reached()) == (35, 35, 0)
    assert opened(paths).last_head() == 90
    counter, _ = opened(paths).last_frames()["A"]
    assert counter == Counter("first", 3, (21, 30, 10))


def test_a_reset_ends_what_older_rows_say_although_their_places_are_higher(paths: LedgerPaths) -> None:
    ledger = opened(paths)
    ledger.write_deliveries(DeliverBatch(0, 0, 20, 20), [row(1, 3, 9, 100)])
    reset = DebtEvent(ledger.next_order(), "reset", "A", "", 4, "lost@4")
    ledger.write_events([reset])
    ledger.write_deliveries(DeliverBatch(1, 20, 35, 40), [row(1, 21, 30, 5, series="lost@4")])
    again = opened(paths)
    debts = again.load_debts()
    assert again.handed("A", above=0, since=debts.reset_at("A")) == [HandedRange("general", 21, 30, 10)]
    assert again.last_frames()["A"][0] == Counter("lost@4", 1, (21, 30, 10))
    assert [place for order, place in again.frames()["A"] if order > debts.reset_at("A")] == [5]
    again.needed = 31
    assert (again.handed("A", above=0, since=0), again.frames(), again.unread_since(0)) == ([], {}, [])


def test_one_that_was_replaced_writes_no_debt_any_more_and_an_operator_disturbs_nobody(paths: LedgerPaths) -> None:
    old = opened(paths)
    old.write_events([owe(old, 1)])
    append_events(paths.debts, [DebtEvent(old.next_order(), "cancel", "A", "general", 2, "enough")], writer="operator")
    assert [event.kind for event in old.foreign_events()] == ["cancel"]
    assert list(old.foreign_events()) == []
    old.write_events([owe(old, 3)])
    new = opened(paths, "deliver:two")
    new.write_events([DebtEvent(new.next_order(), "held", "", "", 9, "new")])
    with pytest.raises(ConflictError, match="somebody else writes"):
        old.write_events([owe(old, 5)])
    new.write_events([owe(new, 6)])
    assert sorted(event.seq for event in events_of(new._debts.read()) if event.kind == "owe") == [1, 3, 6]


def test_the_same_debts_in_fewer_events() -> None:
    for seed in range(12):
        events = simulate(seed).books.events
        for end in range(0, len(events), 9):
            debts = Debts.of(events[:end])
            folded = Debts.of(debts.events())
            assert (folded.open, folded.series, folded.holder) == (debts.open, debts.series, debts.holder)
            assert (folded.untold, folded.newest) == (debts.untold, debts.newest)
            told = {owner: sorted(each, key=str) for owner, each in debts.told.items() if each}
            assert {owner: sorted(each, key=str) for owner, each in folded.told.items()} == told
            for event in events[end:]:
                debts.apply(event)
                folded.apply(event)
            assert (folded.open, folded.series) == (debts.open, debts.series)


def test_the_table_of_debts_is_written_anew_and_an_operator_who_wrote_meanwhile_is_heard(
    paths: LedgerPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "FOLD_FROM", 20)
    ledger = opened(paths)
    debts = ledger.load_debts()
    for seq in range(30):
        events = [owe(ledger, 100 - seq), DebtEvent(ledger.next_order(), "settled", "A", "general", 1_000)]
        ledger.write_events(events)
        for event in events:
            debts.apply(event)
    last = owe(ledger, 5)
    ledger.write_events([last])
    debts.apply(last)
    cancel = DebtEvent(ledger.next_order(), "cancel", "A", "general", 8, "enough")
    append_events(paths.debts, [cancel], writer="operator")
    debts = ledger.tend(debts)
    assert (debts.open["A", "general"].after, len(debts.untold["A"])) == (8, 1)
    assert len(events_of(ledger._debts.read())) < 8
    assert list(ledger.foreign_events()) == []
    ledger.write_events([owe(ledger, 2)])
    assert open_debts(paths.debts).open["A", "general"].after == 2
    assert opened(paths).load_debts().open["A", "general"].after == 2


def test_a_table_of_debts_that_cannot_be_read_is_said_in_a_sentence(paths: LedgerPaths) -> None:
    opened(paths)
    (entry,) = Path(paths.debts, "_delta_log").glob("*.json")
    entry.write_bytes(entry.read_bytes()[:50])
    with pytest.raises(StoreBroken, match="cannot be read"):
        open_debts(paths.debts)
