"""The receiving side of an agent of a host, without a broker; with one: tests/integration/test_host.py."""

from __future__ import annotations

import gc
import warnings
from types import SimpleNamespace
from typing import cast

from tidings.endpoint.endpoint import Endpoint
from tidings.host.inbox import InboxStore
from tidings.host.receiving import Receiver
from tidings.host.registry import Scope


async def test_a_receiver_that_ends_as_it_begins_leaves_nothing_behind() -> None:
    receiver = Receiver(
        Scope("main", "id of main", "id of bob", "bob"),
        cast("InboxStore", SimpleNamespace()),
        on_kept=lambda: None,
        on_failed=lambda: None,
    )
    with warnings.catch_warnings(record=True) as told:
        await receiver.begin(cast("Endpoint", SimpleNamespace()))
        await receiver.end()
        gc.collect()
    assert not told
    assert not receiver.receiving
