"""What a failure makes wait: pure rules."""

import inspect

import pytest

from tidings import errors
from tidings.errors import TidingsError
from tidings.host.outcomes import Outcome, outcome_of

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
