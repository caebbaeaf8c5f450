"""A value that changes at sequences of the log, and what it was at any of them.

`History` only ever grows at its end, so a change costs O(1) and a question O(log n). A change counts from its own
sequence on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class History(Generic[T]):
    """Values by the sequence they came into force."""

    __slots__ = ("_seqs", "_values")

    def __init__(self) -> None:
        self._seqs: list[int] = []
        self._values: list[T] = []

    def put(self, seq: int, value: T) -> None:
        self._seqs.append(seq)
        self._values.append(value)

    def at(self, seq: int) -> T | None:
        """The value in force at `seq`."""
        index = bisect_right(self._seqs, seq)
        return self._values[index - 1] if index else None

    def since(self, seq: int) -> int | None:
        """The sequence from which the value in force at `seq` has been in force."""
        index = bisect_right(self._seqs, seq)
        return self._seqs[index - 1] if index else None

    def changes(self, after: int, through: int) -> Iterator[tuple[int, T | None, T]]:
        """(sequence, value before, value from then on) of every change in (after, through]."""
        for index in range(bisect_right(self._seqs, after), bisect_right(self._seqs, through)):
            yield self._seqs[index], self._values[index - 1] if index else None, self._values[index]

    def newest(self) -> T | None:
        return self._values[-1] if self._values else None
