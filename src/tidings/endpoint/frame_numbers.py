"""Which frames came and which were settled, by their numbers; pure.

A series counts from 1 without holes. A number that was heard is a repeat; one that is skipped may still come, because a
frame in the hands of a session that died comes again after the broker's patience: whoever asks judges it later. What
was settled without a hole is what a later process goes on from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidings.endpoint.sequences import Sequences

SERIES_KEPT = 4


@dataclass(slots=True)
class Series:
    #: the number before the first one that counts here
    base: int
    heard: Sequences = field(default_factory=Sequences)
    settled: Sequences = field(default_factory=Sequences)

    @property
    def settled_through(self) -> int:
        return self.settled.run_from(self.base + 1)


class FrameNumbers:
    def __init__(self, known: Mapping[str, int]) -> None:
        self._series: OrderedDict[str, Series] = OrderedDict()
        for name, number in known.items():
            self._series[name] = Series(number)

    def hear(self, name: str, number: int) -> tuple[int, int] | None:
        """Note a frame. Answers the numbers just before it that did not come, if there are any."""
        series = self._series.get(name)
        if series is None:
            # Of the first series ever met nobody knows where this process came in; any later one is met from its start.
            series = self._series[name] = Series(0 if self._series else number - 1)
            while len(self._series) > SERIES_KEPT:
                self._series.popitem(last=False)
        self._series.move_to_end(name)
        if number <= series.base or number in series.heard:
            return None
        reached = max(series.base, series.heard.last_before(number))
        series.heard.add(number)
        return (reached + 1, number - 1) if reached + 1 < number else None

    def missing(self, name: str, first: int, last: int) -> tuple[int, int] | None:
        """What of a range did not come until now: its first and its last."""
        series = self._series.get(name)
        if series is None:
            return None
        while first <= last and first in series.heard:
            first = series.heard.run_from(first) + 1
        while last >= first and last in series.heard:
            last = series.heard.run_to(last) - 1
        return (first, last) if first <= last else None

    def settle(self, name: str, first: int, last: int | None = None) -> None:
        """These frames were settled, or given up and told."""
        series = self._series.get(name)
        if series is not None:
            series.heard.add(first, last)
            series.settled.add(first, last)

    def is_whole(self, name: str, number: int) -> bool:
        """Was every frame up to this one settled?"""
        series = self._series.get(name)
        return series is not None and number <= series.settled_through

    def settled_through(self) -> dict[str, int]:
        return {name: series.settled_through for name, series in self._series.items()}
