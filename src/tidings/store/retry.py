"""When to try again: exponential, jittered, bounded, and safe from a clock that jumps.

Times are milliseconds of the caller's clock. A moment further away than the longest pause was written before the clock
went back, so it counts as come; the same for a lease. Nothing here reads a clock, and attempts are never a reason to
give up: only age is, and that is decided where the row is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Pauses in milliseconds: `first`, doubled with each attempt up to `longest`, each times 1 ± `jitter`."""

    first: int = 500
    longest: int = 60_000
    jitter: float = 0.2

    @property
    def bound(self) -> int:
        """No pause is longer than this."""
        return round(self.longest * (1 + self.jitter))

    def pause(self, attempts: int, luck: float) -> int:
        """The pause after that many attempts (one or more); `luck` is uniform in [0, 1)."""
        doublings = min(max(attempts - 1, 0), 32)
        plain = min(self.first << doublings, self.longest)
        return round(plain * (1 + self.jitter * (2 * luck - 1)))


def has_come(moment: int, now: int, bound: int) -> bool:
    """Is `moment`, which was at most `bound` ahead when it was written, here or past?"""
    return moment <= now or moment > now + bound
