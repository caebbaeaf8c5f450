"""Which sequences a reading did not meet are lost, and which were rightly removed."""

from hypothesis import given
from hypothesis import strategies as st

from tidings.nats.jetstream import StoredRecord
from tidings.steward.damage import ABOVE_FLOOR, ENDS_EARLIER, Damage, Gaps, _without, without_known
from tidings.steward.store_reading import Defect, StoreReport


def record(seq: int) -> StoredRecord:
    return StoredRecord(seq, 0, "td.main.dm", b"", b"")


@given(
    read=st.sets(st.integers(1, 30)),
    deleted=st.sets(st.integers(1, 30)),
    first=st.integers(1, 31),
    end=st.integers(0, 30),
)
def test_what_is_lost_is_what_was_neither_read_nor_deleted_nor_is_below_the_first(
    read: set[int], deleted: set[int], first: int, end: int
) -> None:
    gaps = Gaps(1)
    gaps.note(record(seq) for seq in sorted(read) if seq <= end)
    lost = {seq for run in _without(gaps.close(end), sorted(deleted), first) for seq in range(run[0], run[1] + 1)}
    assert lost == {seq for seq in range(first, end + 1) if seq not in read and seq not in deleted}


@given(runs=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), max_size=4), first=st.integers(1, 20))
def test_what_was_found_before_is_not_found_again(runs: list[tuple[int, int]], first: int) -> None:
    known = [Damage("LOG_main", start, start + more, more + 1, ABOVE_FLOOR, "then") for start, more in runs]
    fresh = without_known(Damage("LOG_main", first, first + 8, 9, ABOVE_FLOOR, "now"), known)
    told = {seq for start, more in runs for seq in range(start, start + more + 1)}
    assert [seq for each in fresh for seq in range(each.first, each.last + 1)] == [
        seq for seq in range(first, first + 9) if seq not in told
    ]
    assert all(each.count == each.last - each.first + 1 for each in fresh)
    again = Damage("LOG_main", first, first + 8, 9, ENDS_EARLIER, "now")
    assert without_known(again, [*known, again]) == [again], "what was compared with a newer look is another loss"


def test_status_is_named_only_for_what_it_says() -> None:
    report = StoreReport()
    report.name(Defect("LOG_main", 3, 3, "malformed: no message"))
    assert "status" not in report.advice
    report.name(Defect("DM_main", 2, 2, "gone", is_missing=True))
    assert report.advice.startswith("`tidings status` says so once the steward has read everything")
    report.said = 1
    assert report.advice == "`tidings status` says what was lost"
