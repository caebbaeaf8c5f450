"""Ids sort by time and have one spelling."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.wire.message import id_time_ms, is_message_id, new_id


def test_new_ids_are_message_ids_that_differ_and_carry_the_time() -> None:
    before = time.time_ns() // 1_000_000
    made = [new_id() for _ in range(100)]
    after = time.time_ns() // 1_000_000
    assert len(set(made)) == 100
    assert all(is_message_id(one) for one in made)
    times = [id_time_ms(one) for one in made]
    assert all(when is not None and before <= when <= after for when in times)


def test_ids_made_later_sort_later() -> None:
    made = [new_id() for _ in range(1000)]
    assert made == sorted(made)


@pytest.mark.parametrize(
    "change", [str.upper, lambda t: t + "\n", lambda t: t.replace("-", ""), lambda t: "{" + t + "}"]
)
def test_another_spelling_of_an_id_is_not_an_id(change: object) -> None:
    assert callable(change)
    spelled = change("019a8a3c-5c00-7abc-8def-0123456789ab")
    assert not is_message_id(spelled)
    assert id_time_ms(spelled) is None


@given(st.uuids(version=4).map(str) | st.text(max_size=40))
def test_what_is_not_version_7_has_no_time(text: str) -> None:
    assert id_time_ms(text) is None
