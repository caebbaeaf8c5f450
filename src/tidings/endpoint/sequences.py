"""A set of sequences kept as runs, exact and small: `[[from, to], ...]`.

Sequences of a busy log lie close together, so a long memory is a few runs. Beyond a number of runs the lowest are
forgotten: whoever asks is then told "not known", which costs a repetition and never a message.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

RUNS_KEPT = 16_384


class Sequences:
    def __init__(self, runs: Iterable[Iterable[int]] = (), kept: int = RUNS_KEPT) -> None:
        self.kept = kept
        #: first and last of each run, in order; runs neither overlap nor touch
        self._first: list[int] = []
        self._last: list[int] = []
        for first, last in runs:
            self.add(first, last)

    def __contains__(self, seq: int) -> bool:
        at = bisect_right(self._first, seq) - 1
        return at >= 0 and seq <= self._last[at]

    def __len__(self) -> int:
        """How many runs."""
        return len(self._first)

    def add(self, first: int, last: int | None = None) -> None:
        """Everything from `first` to `last`, or `first` alone."""
        last = first if last is None else last
        if last < first:
            return
        low = bisect_right(self._last, first - 2)  # runs before `low` end too early even to touch
        high = bisect_right(self._first, last + 1)  # runs from `high` on begin too late
        if low < high:
            first, last = min(first, self._first[low]), max(last, self._last[high - 1])
        self._first[low:high], self._last[low:high] = [first], [last]
        if len(self._first) > self.kept:
            del self._first[0], self._last[0]

    def cut(self, last: int) -> None:
        """Forget everything above `last`."""
        keep = bisect_right(self._first, last)
        del self._first[keep:], self._last[keep:]
        if keep:
            self._last[-1] = min(self._last[-1], last)

    def run_from(self, seq: int) -> int:
        """The last sequence of the run that holds `seq`; one below `seq` if none does."""
        at = bisect_right(self._first, seq) - 1
        return self._last[at] if at >= 0 and seq <= self._last[at] else seq - 1

    def run_to(self, seq: int) -> int:
        """The first sequence of the run that holds `seq`; one above `seq` if none does."""
        at = bisect_right(self._first, seq) - 1
        return self._first[at] if at >= 0 and seq <= self._last[at] else seq + 1

    def last_before(self, seq: int) -> int:
        """The highest one below `seq`; 0 if there is none."""
        at = bisect_left(self._first, seq) - 1
        return min(self._last[at], seq - 1) if at >= 0 else 0

    def without(self, seqs: Iterable[int]) -> list[list[int]]:
        """The runs with single sequences cut out."""
        holes, found = sorted(set(seqs)), []
        for start, end in self.runs():
            for hole in holes[bisect_left(holes, start) : bisect_right(holes, end)]:
                if hole > start:
                    found.append([start, hole - 1])
                start = hole + 1
            if start <= end:
                found.append([start, end])
        return found

    def runs(self) -> list[tuple[int, int]]:
        return list(zip(self._first, self._last, strict=True))
