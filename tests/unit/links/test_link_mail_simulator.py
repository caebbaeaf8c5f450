"""Direct messages between linked spaces keep their promises through losses, kills and streams that are set back, on any
seed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from tidings.contract.core import Request
from tidings.contract.links import LinkMailRequest
from tidings.links import mail_store
from tidings.links.mail_sync import MailRound
from tidings.wire.records import Stamp
from tools.link_mails import OFTEN, MailViolation, simulate_mail

A = TypeVar("A")

CHUNK = 100
#: a broken rule is found within so many lives
FOUND_WITHIN = 400
#: on request: TIDINGS_LINK_SEEDS=5000
MANY = int(os.environ.get("TIDINGS_LINK_SEEDS", "5000"))


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_what_a_space_still_has_is_read_once_in_order_or_its_end_is_known(first: int) -> None:
    for seed in range(first, first + CHUNK):
        simulate_mail(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1_000, 1_000 + MANY, 500))
def test_it_is_on_thousands_of_seeds(first: int) -> None:
    for seed in range(first, min(first + 500, 1_000 + MANY)):
        simulate_mail(seed)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(8, id="what the steward was told of and has lost is looked for, not believed"),
        pytest.param(161, id="what both spaces forgot comes in once more, and its reader tells of it"),
        pytest.param(3314, id="what was let in before, and is refused now, is told of"),
        pytest.param(4205, id="receipts of a message that the ledger did not know yet are told when it does"),
    ],
)
def test_it_is_on_seeds_of_mail_that_once_found_something(seed: int) -> None:
    simulate_mail(seed)


def test_the_simulated_lives_of_mail_hold_what_they_are_meant_to() -> None:
    worlds = [simulate_mail(seed) for seed in range(60)]
    happened = sum((world.happened for world in worlds), Counter())
    assert all(happened[what] > 3 for what in OFTEN)
    failed = sum((world.failures for world in worlds), Counter())
    assert {"StewardUnreachable", "OutcomeUnknown", "ConflictError", "DeniedError"} <= failed.keys()
    assert sum(worker.deaths for world in worlds for worker in world.workers) > 20


def test_a_life_of_mail_is_the_same_whenever_its_seed_is() -> None:
    one, other = simulate_mail(7), simulate_mail(7)
    assert (one.happened, one.failures) == (other.happened, other.failures)
    assert [each.shown for each in one.spaces.values()] == [each.shown for each in other.spaces.values()]


@dataclass
class _WithoutMarks:
    peer: Any

    async def ask(self, request: Request[A]) -> A:
        if isinstance(request, LinkMailRequest):
            request.marks = ()
        found: A = await self.peer.ask(request)
        return found


async def _token_alone(_round: MailRound, look: Any) -> list[Stamp]:
    """As if every record up to the token were known to be there."""
    return [Stamp(look.through, "")] if look.through else []


def _by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token alone says how far the other space's mail was handled."""
    page = MailRound._page

    async def asked(self: MailRound, look: Any) -> Any:
        if not isinstance(self._peer, _WithoutMarks):
            self._peer = _WithoutMarks(self._peer)
        return await page(self, look)

    monkeypatch.setattr(MailRound, "_claims", _token_alone)
    monkeypatch.setattr(MailRound, "_page", asked)
    monkeypatch.setattr(mail_store, "look_anew", lambda *_where, **_how: None)


def _never_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was let in is believed to be here for ever."""
    monkeypatch.setattr(mail_store, "let_in", lambda *_where: [])


def _never_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_store, "tell_again", lambda *_where: None)


def _committed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the token is written down, and not what became of the messages before it."""
    commit = mail_store.commit
    monkeypatch.setattr(mail_store, "commit", lambda *where, **how: commit(*where, **(how | {"done": []})))


@pytest.mark.parametrize("broken", [_by_token, _never_looked_for, _never_told_again, _committed_late])
def test_a_rule_of_mail_that_is_broken_is_found(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    broken(monkeypatch)
    with pytest.raises(MailViolation):
        _lives(FOUND_WITHIN)


def _lives(count: int) -> None:
    for seed in range(count):
        simulate_mail(seed)
