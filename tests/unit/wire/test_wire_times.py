"""Moments of the control plane: one spelling, exact to the nanosecond."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.wire.records import moment, parse_time, record_time, seconds_of

#: 0001-01-01 and 9999-12-31 in nanoseconds since 1970
FIRST, LAST = -62_135_596_800 * 10**9, 253_402_300_799 * 10**9


@given(st.integers(0, LAST))
def test_the_time_of_a_record_is_read_back_to_the_nanosecond(time_ns: int) -> None:
    text = record_time(time_ns)
    assert len(text) == 30
    assert parse_time(text) == time_ns


@given(st.integers(0, LAST), st.integers(0, LAST))
def test_times_of_records_sort_as_text(one: int, other: int) -> None:
    assert (record_time(one) < record_time(other)) is (one < other)


def test_a_moment_has_three_decimals_as_the_time_of_a_message_does() -> None:
    assert moment(1_763_208_000.1234) == "2025-11-15T12:00:00.123Z"
    assert seconds_of("2025-11-15T12:00:00.123Z") == pytest.approx(1_763_208_000.123, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        ("2025-11-15T12:00:00Z", 1_763_208_000_000_000_000),
        ("2025-11-15T12:00:00.1Z", 1_763_208_000_100_000_000),
        ("2025-11-15T12:00:00.000000001Z", 1_763_208_000_000_000_001),
        ("2025-11-15T12:00:00.123+00:00", 1_763_208_000_123_000_000),
        ("2025-11-15T13:00:00.123+01:00", 1_763_208_000_123_000_000),
    ],
)
def test_what_the_broker_and_older_stewards_wrote_is_read(text: str, time_ns: int) -> None:
    assert parse_time(text) == time_ns


@pytest.mark.parametrize(
    "text", ["", "Z", "yesterday", "2025-02-30T12:00:00Z", "2025-11-15T12:00:00.xZ", "0000-01-01T00:00:00Z"]
)
def test_what_is_no_time_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_time(text)
