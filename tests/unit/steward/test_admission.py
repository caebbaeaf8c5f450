"""How many control requests are worked on, decided without a steward."""

from tidings.steward.fair_queue import (
    BYTES_AHEAD,
    MOST_BYTES_AHEAD,
    MOST_REQUESTS_AHEAD,
    REMEMBERED,
    REQUESTS,
    REQUESTS_AHEAD,
    SILENT,
    Admission,
)


def test_a_burst_is_worked_on_and_what_is_beyond_it_is_told_to_come_later() -> None:
    admission = Admission()
    said = [admission.judge("ada", 10, 0.0) for _ in range(REQUESTS_AHEAD + 1)]
    assert said == ["yes"] * REQUESTS_AHEAD + ["later"]
    assert admission.judge("ada", 100, 1.0) == "yes"
    assert admission.judge("bob", 100, 0.0) == "yes"


def test_bytes_count_as_requests_do() -> None:
    admission = Admission()
    assert admission.judge("ada", BYTES_AHEAD, 0.0) == "yes"
    assert admission.judge("ada", 1, 0.0) == "later"
    assert admission.judge("ada", 1, 0.1) == "yes"


def test_who_asks_steadily_below_the_rate_is_never_refused() -> None:
    admission = Admission()
    assert {admission.judge("ada", 200, n / (REQUESTS - 1)) for n in range(20_000)} == {"yes"}


def test_who_floods_is_cut_and_not_only_refused() -> None:
    admission = Admission()
    said = [admission.judge("mal", 100, n / 12_000) for n in range(12_000)]
    assert "never" in said
    assert said.index("never") > MOST_REQUESTS_AHEAD
    assert Admission().judge("mal", 2 * MOST_BYTES_AHEAD, 0.0) == "never"
    assert said[: REQUESTS_AHEAD // 2] == ["yes"] * (REQUESTS_AHEAD // 2)


def test_many_senders_are_looked_through_a_few_times_and_not_once_for_each_that_is_new() -> None:
    admission, looks = Admission(), 0
    before = admission._levels
    for n in range(8 * REMEMBERED):
        admission.judge(f"agent{n}", 100, n / 100_000)
        looks, before = looks + (admission._levels is not before), admission._levels
    assert 0 < looks <= 4
    for n in range(9 * REMEMBERED):
        admission.judge(f"later{n}", 100, 2 * SILENT)
    assert not any(sender.startswith("agent") for sender in admission._levels), "who is silent is forgotten"
