"""When to try again: pure rules, and what a loop makes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.util.backoff import Backoff

backoffs = st.builds(Backoff, st.integers(1, 10_000), st.integers(10_000, 10**7), st.floats(0, 0.9))
luck = st.floats(0, 1, exclude_max=True)
moments = st.integers(-(2**50), 2**50)


def has_come(moment: int, now: int, bound: int) -> bool:
    """How the outbox reads a moment that was at most `bound` ahead when it was written: later than that it is from
    before the clock went back."""
    return moment <= now or moment > now + bound


@given(backoffs, st.integers(0, 10**9), luck)
def test_a_delay_is_never_longer_than_its_bound(backoff: Backoff, attempts: int, chance: float) -> None:
    assert 0 <= backoff.delay(attempts, chance) <= backoff.bound


@given(backoffs, st.integers(1, 60))
def test_delays_grow_until_the_longest(backoff: Backoff, attempts: int) -> None:
    this, following = backoff.delay(attempts, 0.5), backoff.delay(attempts + 1, 0.5)
    assert following == min(2 * this, backoff.longest) or following == backoff.longest == this


def test_jitter_spreads_callers_to_both_sides() -> None:
    backoff = Backoff(first=1_000, longest=8_000, jitter=0.2)
    assert [round(backoff.delay(1, chance)) for chance in (0.0, 0.5, 0.999)] == [800, 1_000, 1_200]
    assert [backoff.delay(n, 0.5) for n in range(1, 6)] == [1_000, 2_000, 4_000, 8_000, 8_000]


@given(moments, backoffs, st.integers(0, 10**9), luck)
def test_a_moment_comes_after_its_delay_and_not_before(
    now: int, backoff: Backoff, attempts: int, chance: float
) -> None:
    delay = round(backoff.delay(attempts, chance))
    assert has_come(now + delay, now + delay, backoff.bound)
    assert delay == 0 or not has_come(now + delay, now + delay - 1, backoff.bound)


@given(moments, backoffs, luck, st.integers(-(10**8), 10**8))
def test_no_jump_of_the_clock_makes_it_wait_longer_than_the_bound(
    now: int, backoff: Backoff, chance: float, jump: int
) -> None:
    due = now + round(backoff.delay(5, chance))
    assert has_come(due, now + jump, backoff.bound) or has_come(due, now + jump + backoff.bound, backoff.bound)


def test_a_loop_gets_growing_delays_each_with_its_own_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", iter((0.0, 0.5, 0.999, 0.5)).__next__)
    delays = Backoff(1.0, 4.0, jitter=0.5).delays()
    assert [round(next(delays), 1) for _ in range(4)] == [0.5, 2.0, 6.0, 4.0]


def test_what_ran_well_for_long_enough_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    delays = Backoff(1.0, 8.0, jitter=0).delays(fresh_after=60)
    assert [next(delays), next(delays), next(delays)] == [1.0, 2.0, 4.0]
    now[0] += 4 + 60
    assert next(delays) == 8.0, "the delay itself is no time that went well"
    now[0] += 8 + 61
    assert next(delays) == 1.0
