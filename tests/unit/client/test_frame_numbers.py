"""What an endpoint remembers of sequences and of frames."""

import itertools
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tidings.client.frame_mailbox import FrameNumbers
from tidings.client.read_state import ReadState, Sequences

RANGES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 6)), max_size=40)


@given(RANGES, st.sets(st.integers(1, 70)))
def test_a_memory_of_sequences_is_exactly_a_set(added: list[tuple[int, int]], holes: set[int]) -> None:
    known, truth = Sequences(), set[int]()
    for first, more in added:
        known.add(first, first + more)
        truth |= set(range(first, first + more + 1))
    assert {seq for seq in range(80) if seq in known} == truth
    runs = known.runs()
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(runs))
    kept = Sequences(known.without(holes))
    assert {seq for seq in range(80) if seq in kept} == truth - holes
    for seq in range(1, 75):
        below = [each for each in truth if each < seq]
        assert known.last_before(seq) == max(below, default=0)
        assert all(each in truth for each in range(seq, known.run_from(seq) + 1))
        assert known.run_from(seq) + 1 not in truth
        assert known.run_to(seq) - 1 not in truth


@given(RANGES)
def test_a_memory_that_is_full_forgets_the_oldest_and_invents_nothing(added: list[tuple[int, int]]) -> None:
    known, truth = Sequences(kept=3), set[int]()
    for first, more in added:
        known.add(first, first + more)
        truth |= set(range(first, first + more + 1))
    assert len(known) <= 3
    assert {seq for seq in range(80) if seq in known} <= truth
    assert not truth or max(truth) in known


def test_of_the_first_series_a_process_meets_it_does_not_know_the_beginning() -> None:
    numbers = FrameNumbers({})
    assert numbers.hear("first", 7) is None
    assert numbers.hear("first", 3) is None, "older than where it came in: from another session, and no gap"
    assert numbers.hear("first", 10) == (8, 9)
    assert numbers.hear("access:188@4", 3) == (1, 2), "a later series is met from its start"
    assert FrameNumbers({"first": 7}).hear("access:188@4", 1) is None


def test_a_number_that_came_after_all_is_missing_no_more() -> None:
    numbers = FrameNumbers({"first": 1})
    assert numbers.hear("first", 6) == (2, 5)
    assert numbers.hear("first", 2) is None
    assert numbers.hear("first", 5) == (3, 4)
    assert numbers.missing("first", 2, 5) == (3, 4)
    assert numbers.hear("first", 5) is None, "a repeat"
    for number in (3, 4):
        numbers.hear("first", number)
    assert numbers.missing("first", 2, 5) is None


def test_what_is_kept_ends_before_the_first_frame_that_was_not_settled() -> None:
    numbers = FrameNumbers({"first": 4})
    for number in (5, 6, 7):
        numbers.hear("first", number)
    numbers.settle("first", 5)
    numbers.settle("first", 7)
    assert numbers.settled_through() == {"first": 5}
    assert (numbers.is_whole("first", 5), numbers.is_whole("first", 7)) == (True, False)
    numbers.settle("first", 6)
    assert FrameNumbers(numbers.settled_through()).hear("first", 8) is None


def test_a_state_file_knows_what_was_settled_and_not_what_was_in_hand(tmp_path: Path) -> None:
    seen = ReadState(tmp_path / "state")
    assert not seen.remembers
    for seq in range(10, 20):
        seen.deliver(seen.channel("general"), seq, ("ada", str(seq)), "")
        if seq != 15:
            seen.settle("general", seq, ("ada", str(seq)))
    seen.note_frames({"first": 3})
    seen.save()
    later = ReadState(tmp_path / "state")
    assert (later.remembers, later.numbers) == (True, {"first": 3})
    assert [seq for seq in range(8, 22) if seq in later.known] == [10, 11, 12, 13, 14, 16, 17, 18, 19]


def test_a_state_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "state").write_text(json.dumps({"channels": {"general": 7}, "identities": [["ada", "1"]]}))
    seen = ReadState(tmp_path / "state")
    assert (seen.channel("general").through, seen.numbers, len(seen.known)) == (7, {}, 0)


def test_what_frames_bring_lowers_what_may_be_skipped_until_they_have(tmp_path: Path) -> None:
    memory = ReadState(tmp_path / "state")
    seen = memory.channel("general")
    seen.leave_to_frames(start=100, head=150)
    memory.deliver(seen, 160, ("ada", "160"), "", contiguous=True)
    seen.settle(160)
    assert seen.settled_through == 100, "a live copy above says nothing of what frames still bring"
    seen.frames_reached(140)
    assert seen.settled_through == 140
    seen.frames_reached(155)
    assert seen.settled_through == 160
