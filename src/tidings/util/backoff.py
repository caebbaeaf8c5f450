"""When to try again: exponential, jittered and bounded. The one backoff of every loop that waits for something.

    delays = Backoff(0.1, 3.0).delays()
    ...                                  # it failed
    await asyncio.sleep(next(delays))    # it worked: ask for new `delays`

Times are in the unit of `first`. Attempts are never a reason to give up: who waits decides that by age or number.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first`, doubled with each attempt up to `longest`, each times 1 ± `jitter`."""

    first: float
    longest: float
    jitter: float = 0.2

    @property
    def bound(self) -> int:
        """No delay is longer than this, also if it is rounded."""
        return math.ceil(self.longest * (1 + self.jitter))

    def delay(self, attempt: int, luck: float) -> float:
        """The delay after that many attempts (one or more); `luck` is uniform in [0, 1)."""
        doubled: float = self.first * 2 ** min(max(attempt - 1, 0), 32)
        return min(doubled, self.longest) * (1 + self.jitter * (2 * luck - 1))

    def delays(self, *, fresh_after: float | None = None) -> Iterator[float]:
        """One delay after the other, without end. In seconds: they begin anew if it then went well for `fresh_after`
        seconds, which is for those who keep something running."""
        attempt, due = 0, time.monotonic()
        while True:
            if fresh_after is not None and time.monotonic() - due > fresh_after:
                attempt = 0
            attempt += 1
            delay = self.delay(attempt, random.random())
            due = time.monotonic() + delay
            yield delay
