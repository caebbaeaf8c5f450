"""How many control requests one agent may make: refused in words above that, cut far above it.

Pure, and cheap enough to be asked for every request before it is parsed: a flood must cost the steward less than it
costs the flooder. Levels rise with what comes and fall with time. An agent that is above the first bound is answered
with a refusal that was written once; one that is above the second is not answered any more and loses its credential.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: requests and bytes each second, and how far an agent may be ahead of that
REQUESTS, REQUESTS_AHEAD = 1_000, 1_000
BYTES, BYTES_AHEAD = 4_000_000, 8_000_000
#: Nobody sends so many who waits for answers. Time is measured where they are read, so a steward that reads slowly sees
#: a flood as fewer a second than it is: these are not far above the first.
MOST_REQUESTS, MOST_REQUESTS_AHEAD = 1_500, 2_000
MOST_BYTES, MOST_BYTES_AHEAD = 8_000_000, 16_000_000
Admitted = Literal["yes", "later", "never"]
#: senders remembered before those are forgotten who were silent for long
REMEMBERED = 10_000


@dataclass(slots=True)
class _Level:
    at: float
    requests: float = 0.0
    size: float = 0.0
    all_requests: float = 0.0
    all_size: float = 0.0


class Admission:
    def __init__(self) -> None:
        self._levels: dict[str, _Level] = {}

    def judge(self, sender: str, size: int, now: float) -> Admitted:
        """May this request, of so many bytes, be worked on?"""
        level = self._levels.get(sender)
        if level is None:
            self._forget(now)
            level = self._levels[sender] = _Level(now)
        past = max(0.0, now - level.at)
        level.at = now
        level.all_requests = max(0.0, level.all_requests - past * MOST_REQUESTS) + 1
        level.all_size = max(0.0, level.all_size - past * MOST_BYTES) + size
        level.requests = max(0.0, level.requests - past * REQUESTS)
        level.size = max(0.0, level.size - past * BYTES)
        if level.all_requests > MOST_REQUESTS_AHEAD or level.all_size > MOST_BYTES_AHEAD:
            return "never"
        if level.requests + 1 > REQUESTS_AHEAD or level.size + size > BYTES_AHEAD:
            return "later"
        level.requests += 1
        level.size += size
        return "yes"

    def _forget(self, now: float) -> None:
        if len(self._levels) >= REMEMBERED:
            self._levels = {sender: level for sender, level in self._levels.items() if now - level.at < 60}
