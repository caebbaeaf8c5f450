"""Cover is decided in one place, by the rules of NATS subjects."""

import re

import pytest

from tidings.wire.names import covers, covers_any, covers_pattern, may_meet, pattern_regex


@pytest.mark.parametrize(
    ("pattern", "channel", "expected"),
    [
        ("general", "general", True),
        ("general", "generals", False),
        ("team.>", "team", False),
        ("team.>", "team.backend", True),
        ("team.>", "team.backend.db", True),
        ("team.*", "team.backend", True),
        ("team.*", "team.backend.db", False),
        ("*.backend", "team.backend", True),
        (">", "anything.at.all", True),
        ("general", "general.", False),
        ("general..x", "general..x", False),
    ],
)
def test_a_pattern_covers_what_nats_would_match(pattern: str, channel: str, expected: bool) -> None:
    assert covers(pattern, channel) is expected
    assert (re.match(pattern_regex(pattern), channel) is not None) is expected


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (">", "team.>", True),
        ("team.>", "team.*", True),
        ("team.*", "team.>", False),
        ("team.*", "team.*", True),
        ("team.backend", "team.*", False),
        ("*.*", "team.*", True),
        ("*", ">", False),
    ],
)
def test_a_pattern_covers_a_narrower_pattern(wide: str, narrow: str, expected: bool) -> None:
    assert covers_pattern(wide, narrow) is expected


def test_nothing_is_covered_by_no_pattern() -> None:
    assert not covers_any([], "general")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("general", "general", True),
        ("general", "other", False),
        (">", "general", True),
        ("team.>", "team", False),
        ("team.>", "team.a.b", True),
        ("team.>", "*.a", True),
        ("team.*", "team.a.b", False),
        ("team.*.c", "team.a.>", True),
        ("team.*.c", "team.a.d", False),
        ("team.a", "team.a.>", False),
        ("team..a", "team.>", False),
    ],
)
def test_two_patterns_meet_if_a_channel_is_in_both(one: str, other: str, expected: bool) -> None:
    assert may_meet(one, other) is may_meet(other, one) is expected
