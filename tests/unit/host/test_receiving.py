"""The receiving side of an agent of a host, without a broker; with one: tests/integration/test_host.py."""

from __future__ import annotations

import asyncio
import gc
import warnings
from types import SimpleNamespace
from typing import cast

import pytest

from tidings.client.direct_transport import DirectAgent
from tidings.client.notices import Notice
from tidings.errors import StoreBroken, StoreError, StoreFull
from tidings.host.inbox import InboxStore
from tidings.host.receiver import Receiver
from tidings.host.registry import Scope
from tidings.util.backoff import Backoff


async def test_a_receiver_that_ends_as_it_begins_leaves_nothing_behind() -> None:
    receiver = Receiver(
        Scope("main", "id of main", "id of bob", "bob"),
        cast("InboxStore", SimpleNamespace()),
        on_kept=lambda: None,
        on_failed=lambda: None,
    )
    with warnings.catch_warnings(record=True) as told:
        await receiver.begin(cast("DirectAgent", SimpleNamespace(transport=SimpleNamespace(intake=SimpleNamespace()))))
        await receiver.end()
        gc.collect()
    assert not told
    assert not receiver.receiving


class Failing:
    """An inbox that keeps no notice as long as `error` is set."""

    def __init__(self, error: StoreError | None) -> None:
        self.error = error
        self.tries = 0

    async def keep_notice(self, *_: object) -> SimpleNamespace:
        self.tries += 1
        if self.error is not None:
            raise self.error
        return SimpleNamespace(row=1, new=True)


def receiver_into(inbox: Failing, patience: float | None = None) -> Receiver:
    scope = Scope("main", "id of main", "id of bob", "bob")
    return Receiver(scope, cast("InboxStore", inbox), lambda: None, lambda: None, patience)


async def test_what_cannot_be_kept_is_a_fact_with_its_cause_and_beginning_until_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidings.host.receiver.RETRY", Backoff(0.01, 15.0))
    inbox = Failing(StoreBroken("no such function"))
    receiver = receiver_into(inbox)
    keeping = asyncio.create_task(receiver.keep_notice(Notice("lost", "something")))
    async with asyncio.timeout(10):
        while inbox.tries < 2:
            await asyncio.sleep(0.01)
        assert receiver.unkept is not None
        assert receiver.unkept.cause == "no such function"
        since = receiver.unkept.since
        while inbox.tries < 4:
            await asyncio.sleep(0.01)
        assert receiver.unkept.since == since
        inbox.error = None
        await keeping
    assert not receiver.unkept


@pytest.mark.parametrize(("error", "tries"), [(StoreBroken("damaged"), 1), (StoreFull("no room"), 3)])
async def test_who_has_patience_gives_up_what_keeps_failing_and_at_once_what_is_damaged(
    monkeypatch: pytest.MonkeyPatch, error: StoreError, tries: int
) -> None:
    monkeypatch.setattr("tidings.host.receiver.RETRY", Backoff(0.02, 15.0, jitter=0))
    inbox = Failing(error)
    receiver = receiver_into(inbox, patience=0.05)
    with pytest.raises(type(error)):
        async with asyncio.timeout(10):
            await receiver.keep_notice(Notice("lost", "something"))
    assert inbox.tries == tries
    assert receiver.unkept is not None
