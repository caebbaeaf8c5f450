"""Who floods, who is next, and what is too much invention: the rules, without a broker."""

from collections import Counter
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from tidings.steward.fair_queue import FairQueue
from tidings.steward.quotas import (
    DEFAULT_BYTES,
    DEFAULT_RECORDS,
    FloodRules,
    Limits,
    Usage,
    excess,
    reason,
    strata,
    usage_of,
)
from tidings.wire.rulings import Space

LIMITS = Limits(records=100, size=10_000)
OVER, UNDER = Usage(501, 600), Usage(500, 50_000)
BUDGET = 10**9


def test_quotas_are_generous_unless_the_space_says_otherwise_and_zero_is_none() -> None:
    assert Limits.of(Space(op="1")) == Limits(DEFAULT_RECORDS, DEFAULT_BYTES)
    assert Limits.of(Space(op="1", quota_records=5, quota_bytes=0)) == Limits(5, None)
    assert not Limits(None, None).exceeded(Usage(10**9, 10**12), 0.001)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_only_a_run_of_windows_over_quota_is_a_flood(windows: list[bool], needed: int) -> None:
    rules = FloodRules(needed, share=1.0)
    run = 0
    for over in windows:
        run = run + 1 if over else 0
        assert rules.note({"ada": OVER if over else UNDER}, 5, LIMITS, BUDGET) == (["ada"] if run == needed else [])
        run = 0 if run == needed else run


def test_a_window_without_a_word_from_a_sender_ends_its_run() -> None:
    rules = FloodRules(2)
    assert rules.note({"ada": OVER}, 5, LIMITS, BUDGET) == []
    assert rules.note({}, 5, LIMITS, BUDGET) == []
    assert rules.note({"ada": OVER}, 5, LIMITS, BUDGET) == []


def test_bytes_are_a_quota_of_their_own() -> None:
    assert FloodRules(1).note({"ada": Usage(1, 50_001)}, 5, LIMITS, BUDGET) == ["ada"]
    assert FloodRules(1).note({"ada": UNDER}, 5, LIMITS, BUDGET) == []


def test_whoever_is_over_quota_and_fills_the_log_is_not_watched_any_longer() -> None:
    large = Usage(501, 300)
    assert FloodRules(3, share=0.2).note({"ada": large}, 5, LIMITS, 1_500) == ["ada"]
    assert FloodRules(3, share=0.2).note({"ada": large}, 5, LIMITS, 1_501) == []


@given(st.lists(st.tuples(st.sampled_from(["ada", "bob", None]), st.integers(1, 10_000)), min_size=1, max_size=100))
def test_a_complete_sample_is_exact(records: list[tuple[str | None, int]]) -> None:
    used = usage_of(records, len(records))
    for sender in ("ada", "bob"):
        own = [size for who, size in records if who == sender]
        assert used.get(sender, Usage()) == Usage(len(own), sum(own))


@given(st.integers(1, 100), st.integers(1, 1_000))
def test_a_sample_stands_for_everything_and_nobody_is_given_more_than_there_was(seen: int, times: int) -> None:
    used = usage_of([("ada", 10), ("bob", 30)] * seen, 2 * seen * times)
    assert used == {"ada": Usage(seen * times, 10 * seen * times), "bob": Usage(seen * times, 30 * seen * times)}
    assert usage_of([], 1_000) == {}


@given(st.integers(1, 10**6), st.integers(0, 10**5), st.integers(1, 20))
def test_strata_cover_every_sequence_once_and_are_nearly_equal(start: int, total: int, most: int) -> None:
    found = strata(start, start + total - 1, most)
    assert len(found) == min(total, most)
    assert [last + 1 for _, last in found[:-1]] == [first for first, _ in found[1:]]
    assert (found[0][0], found[-1][1]) == (start, start + total - 1) if found else total == 0
    widths = [last - first + 1 for first, last in found]
    assert max(widths, default=0) - min(widths, default=0) <= 1
    assert sum(widths) == total


pairs = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["x", "y"])), max_size=40)


@given(pairs, st.integers(0, 4))
def test_of_invented_names_each_sender_keeps_the_same_few(found: list[tuple[str, str]], most: int) -> None:
    gone = excess(found, most)
    assert excess(reversed(found), most) == gone
    left = set(found) - set(gone)
    had = Counter(sender for _, sender in set(found))
    kept = Counter(sender for _, sender in left)
    assert all(kept[sender] == min(had[sender], most) for sender in had)
    assert excess(left, most) == []


def test_the_reason_says_since_when_how_much_and_what_would_have_been_right() -> None:
    noon = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
    told = reason(Usage(9_000, 1), 5.02, Limits(1_000, None), noon)
    assert told == "since 2026-01-02 12:00 UTC: 9,000 records in 5 s, where 1,000 a second are its quota"
    told = reason(Usage(9, 120_000_000), 5, Limits(1_000, 16_000_000), noon)
    assert told == "since 2026-01-02 12:00 UTC: 120.0 MB in 5 s, where 16.0 MB a second are its quota"


# --- turns ---


def test_one_senders_many_do_not_keep_another_from_its_turn() -> None:
    turns: FairQueue[str] = FairQueue(most=8, each=2, waiting=100)
    assert all(turns.offer("mal", f"mal {n}") for n in range(100))
    assert turns.offer("ada", "ada 0")
    assert [turns.take() for _ in range(4)] == ["mal 0", "ada 0", "mal 1", None]
    turns.release("mal")
    assert turns.take() == "mal 2"


def test_a_line_that_is_full_takes_no_more_and_only_that_line() -> None:
    turns: FairQueue[int] = FairQueue(most=1, each=1, waiting=2)
    assert [turns.offer("mal", n) for n in range(3)] == [True, True, False]
    assert turns.offer("ada", 1)


@given(st.lists(st.tuples(st.sampled_from(["offer", "take", "release"]), st.sampled_from("abc")), max_size=200))
def test_turns_never_run_more_than_they_may_and_lose_nothing(steps: list[tuple[str, str]]) -> None:
    turns: FairQueue[tuple[str, int]] = FairQueue(most=3, each=2, waiting=5)
    offered: list[tuple[str, int]] = []
    taken: list[tuple[str, int]] = []
    running: Counter[str] = Counter()
    for number, (what, sender) in enumerate(steps):
        if what == "offer" and turns.offer(sender, (sender, number)):
            offered.append((sender, number))
        elif what == "take" and (work := turns.take()) is not None:
            taken.append(work)
            running[work[0]] += 1
        elif what == "release" and running[sender]:
            running[sender] -= 1
            turns.release(sender)
        assert +turns.running == +running
        assert running.total() <= 3
        assert all(count <= 2 for count in running.values())
    while running.total() or len(taken) < len(offered):
        for sender in list(+running):
            running[sender] -= 1
            turns.release(sender)
        while (work := turns.take()) is not None:
            taken.append(work)
            running[work[0]] += 1
    assert sorted(taken) == sorted(offered)
    assert all([w for w in taken if w[0] == s] == [w for w in offered if w[0] == s] for s in "abc"), (
        "each line in order"
    )
