"""When to try again, and what a failure makes wait: pure rules."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings import errors
from tidings.errors import TidingsError
from tidings.store.outcomes import Outcome, outcome_of
from tidings.store.retry import Backoff, has_come

backoffs = st.builds(Backoff, st.integers(1, 10_000), st.integers(10_000, 10**7), st.floats(0, 0.9))
luck = st.floats(0, 1, exclude_max=True)
moments = st.integers(-(2**50), 2**50)


@given(backoffs, st.integers(0, 10**9), luck)
def test_a_pause_is_never_longer_than_its_bound(backoff: Backoff, attempts: int, chance: float) -> None:
    assert 0 <= backoff.pause(attempts, chance) <= backoff.bound


@given(backoffs, st.integers(1, 60))
def test_pauses_grow_until_the_longest(backoff: Backoff, attempts: int) -> None:
    this, following = backoff.pause(attempts, 0.5), backoff.pause(attempts + 1, 0.5)
    assert following == min(2 * this, backoff.longest) or following == backoff.longest == this


def test_jitter_spreads_callers_to_both_sides() -> None:
    backoff = Backoff(first=1_000, longest=8_000, jitter=0.2)
    assert [backoff.pause(1, chance) for chance in (0.0, 0.5, 0.999)] == [800, 1_000, 1_200]
    assert [backoff.pause(n, 0.5) for n in range(1, 6)] == [1_000, 2_000, 4_000, 8_000, 8_000]


@given(moments, backoffs, st.integers(0, 10**9), luck)
def test_a_moment_comes_after_its_pause_and_not_before(
    now: int, backoff: Backoff, attempts: int, chance: float
) -> None:
    pause = backoff.pause(attempts, chance)
    assert has_come(now + pause, now + pause, backoff.bound)
    assert pause == 0 or not has_come(now + pause, now + pause - 1, backoff.bound)


@given(moments, backoffs, luck, st.integers(-(10**8), 10**8))
def test_no_jump_of_the_clock_makes_it_wait_longer_than_the_bound(
    now: int, backoff: Backoff, chance: float, jump: int
) -> None:
    due = now + backoff.pause(5, chance)
    assert has_come(due, now + jump, backoff.bound) or has_come(due, now + jump + backoff.bound, backoff.bound)


EVERY = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TidingsError)]


@pytest.mark.parametrize("cls", EVERY)
def test_every_error_has_an_outcome_with_its_own_word(cls: type[TidingsError]) -> None:
    outcome = outcome_of(cls("a sentence"))
    assert (outcome.code, outcome.words) == (cls.code, "a sentence")
    assert outcome.retryable == (outcome.blocks != "row")


@pytest.mark.parametrize(
    ("error", "blocks", "maybe_stored"),
    [
        (errors.DeniedError("x"), "row", False),
        (errors.TooLarge("x"), "row", False),
        (errors.UnknownPeer("x"), "row", False),
        (errors.IdBurned("x"), "row", False),
        (errors.AuthRevoked("x"), "sender", False),
        (errors.BrokerUnreachable("x"), "space", False),
        (errors.ConnectionLost("x"), "space", True),
        (errors.LogFull("x"), "space", False),
        (errors.MailboxFull("x"), "lane", False),
        (errors.NotLookedFor("x"), "lane", False),
        (errors.OutcomeUnknown("x"), "lane", True),
        (errors.TidingsError("a kind nobody thought of"), "lane", True),
        (RuntimeError("permission denied: invalid, unknown, forbidden"), "lane", True),
    ],
)
def test_what_waits_is_read_from_the_kind_of_error_and_never_from_its_text(
    error: Exception, blocks: str, maybe_stored: bool
) -> None:
    outcome = outcome_of(error)
    assert (outcome.blocks, outcome.maybe_stored) == (blocks, maybe_stored)


def test_an_outcome_that_is_retried_and_blocks_nothing_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="lane"):
        Outcome("odd", "odd", retryable=True, blocks="row")
    with pytest.raises(ValueError, match="lane"):
        Outcome("odd", "odd", retryable=False, blocks="space")
