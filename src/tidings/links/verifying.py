"""Signatures of a page, checked in threads: the library that does it leaves the interpreter to others meanwhile.

`VerifiedAhead` has those of a page that came before its turn checked while the page before it is let in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tidings.links.ports import Verify
from tidings.links.validation import verified
from tidings.wire.links import LinkedRecord

THREADS = 2
#: fewer are not worth the way to a thread
WORTH = 8


class ThreadedVerify:
    """For all links of a worker; `close` ends the threads."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="verify")

    async def __call__(self, records: Sequence[LinkedRecord]) -> list[bool]:
        if len(records) < WORTH:
            return verified(records)
        loop, size = asyncio.get_running_loop(), -(-len(records) // self._threads)
        parts = [records[start : start + size] for start in range(0, len(records), size)]
        done = await asyncio.gather(*(loop.run_in_executor(self._pool, verified, part) for part in parts))
        return [each for part in done for each in part]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class VerifiedAhead:
    """For one link. A page that nobody prepared is checked when it is asked about."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        #: the records that were prepared last, and which of them are signed
        self._prepared: tuple[Sequence[LinkedRecord], Sequence[bool]] = (), ()

    async def prepare(self, records: Sequence[LinkedRecord]) -> None:
        self._prepared = records, await self._verify(records)

    async def __call__(self, records: Sequence[LinkedRecord]) -> Sequence[bool]:
        prepared, good = self._prepared
        return good if prepared is records else await self._verify(records)
