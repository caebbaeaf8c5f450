"""What arrived on each subject, remembered within bounds."""

from tidings.client.live import Arrivals


def test_a_copy_that_follows_what_arrived_shows_no_hole() -> None:
    arrivals = Arrivals()
    assert arrivals.covers("a", 0), "the first record of a subject has none before it"
    assert not arrivals.covers("a", 3)
    arrivals.note("a", 5)
    assert arrivals.covers("a", 5)
    assert not arrivals.covers("a", 6)
    arrivals.note("a", 4)
    assert arrivals.covers("a", 5), "an older copy takes nothing back"


def test_memory_is_bounded_and_what_was_forgotten_is_never_called_lost() -> None:
    arrivals = Arrivals(kept=3)
    for seq, subject in enumerate("abcd", start=1):
        arrivals.note(subject, seq)
    assert len(arrivals) == 3
    assert arrivals.covers("a", 1), "forgotten: it may have arrived"
    assert not arrivals.covers("a", 2), "newer than anything that was forgotten"
    arrivals.note("b", 9)
    arrivals.note("e", 10)
    assert arrivals.last("b") == 9, "heard lately, so kept"
    assert arrivals.last("c") == 0
