"""The intervals of one membership subject: when its owner was a member of its pattern.

One `MembershipIntervals` per subject `td.S.member.<owner>.<tag>`: overlapping patterns of one owner (`team.>` beside
`team.backend`) are separate memberships, so leaving one closes only that one. Opening and closing are the two
transitions; whether a record may cause one is judged by the fold.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


def within(joined: int, left: int | None, seq: int) -> bool:
    """The rule of the design, in its only place: joined < seq < left."""
    return joined < seq and (left is None or seq < left)


@dataclass(frozen=True, slots=True)
class Interval:
    """`owner` was a member of `pattern` at every sequence strictly between `joined` and `left`."""

    owner: str
    pattern: str
    joined: int
    left: int | None

    def holds(self, seq: int) -> bool:
        return within(self.joined, self.left, seq)


class MembershipIntervals:
    """Alternating openings and closings of one owner's membership of one pattern."""

    __slots__ = ("joined", "left", "owner", "pattern")

    def __init__(self, owner: str, pattern: str) -> None:
        self.owner = owner
        self.pattern = pattern
        self.joined: list[int] = []
        self.left: list[int] = []

    @property
    def is_open(self) -> bool:
        return len(self.joined) > len(self.left)

    def holds(self, seq: int) -> bool:
        index = bisect_right(self.joined, seq) - 1
        return index >= 0 and within(self.joined[index], self._left(index), seq)

    def intervals(self) -> list[Interval]:
        return [self._interval(index) for index in range(len(self.joined))]

    def _interval(self, index: int) -> Interval:
        return Interval(self.owner, self.pattern, self.joined[index], self._left(index))

    def _left(self, index: int) -> int | None:
        return self.left[index] if index < len(self.left) else None
