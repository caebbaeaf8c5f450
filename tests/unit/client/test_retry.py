"""How often, and after which pauses, a message that was given back is handed out again."""

import pytest

import tidings
from tidings.errors import UsageError


def test_pauses_double_up_to_a_bound_and_tries_come_to_an_end() -> None:
    retry = tidings.Retry(attempts=4, first=1.0, longest=5.0)
    assert [retry.pause(attempt) for attempt in (1, 2, 3, 4, 9_999)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert [retry.is_over(attempt) for attempt in (1, 2, 3, 4, 5)] == [False, False, False, True, True]


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first": -1}, {"longest": -1}])
def test_what_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        tidings.Retry(**wrong)
