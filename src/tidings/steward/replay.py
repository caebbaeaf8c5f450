"""How much of a channel's past a reader is shown, whichever way it asks: backfill, history, recall.

A channel that replays shows what was said before a reader came, no further back than its `replay_window`. What was
said while the reader was a member is shown in any case: it was owed. The rule is one predicate over sequence and time;
`history.py` reads no further back than it can hold.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidings.space.membership import Interval
from tidings.steward.agent_handlers import channel_facts
from tidings.wire.patterns import covers

if TYPE_CHECKING:
    from tidings.steward.service import Steward


@dataclass(frozen=True, slots=True)
class Replay:
    """What one reader is shown of one channel."""

    #: records stored from this time on are shown to everybody who may read; None: none are
    since_ns: int | None
    #: and these, because the reader was in
    intervals: tuple[Interval, ...]

    def shows(self, seq: int, time_ns: int) -> bool:
        if self.since_ns is not None and time_ns >= self.since_ns:
            return True
        return any(interval.holds(seq) for interval in self.intervals)

    @property
    def shows_all(self) -> bool:
        return self.since_ns == 0


def replay_of(steward: Steward, reader: str, channel: str) -> Replay:
    facts = channel_facts(steward, channel)
    window = facts["replay_window"]
    intervals = tuple(i for i in steward.table.intervals(reader) if covers(i.pattern, channel))
    if not facts["replay"]:
        return Replay(None, intervals)
    since = 0 if window is None else max(0, time.time_ns() - int(window) * 1_000_000_000)
    return Replay(since, intervals)
