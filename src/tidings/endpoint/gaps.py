"""Which live copies were lost on the way, told from the copies that did arrive.

Every live copy carries the sequence of the record before it on its subject, which is one sender on one channel. If that
record is newer than anything of the subject that arrived here, its copy was lost. This module remembers what arrived,
for a bounded number of subjects, and describes holes; reading them from the log is `backfill.py`'s part. It cannot know
of a copy after which its sender said nothing more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

SUBJECTS_KEPT = 4_096

Cause = Literal["live", "connection"]


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages of a channel that did not arrive live and were read from the log instead.

    `cause` is `live` if single copies were lost on the way, `connection` if the connection was. `gone` says that they
    left the log before they could be read: then `recovered` is not all of them.
    """

    channel: str
    #: None when the hole is not of one sender
    sender: str | None
    #: what was missed lies above `after`, up to and including `through`
    after: int
    through: int
    recovered: int
    cause: Cause
    gone: bool = False


@dataclass(frozen=True, slots=True)
class FrameGap:
    """Frames that were numbered and never came. What they held was looked for in the log, as far as it is known where.

    `count` is how many messages the frames held, None if more than one is missing: a frame names only the one before.
    """

    series: str
    #: numbers of the frames that are missing
    first: int
    last: int
    #: what they held lies above `after`, up to and including `through`
    after: int
    through: int
    count: int | None
    recovered: int


@dataclass(slots=True)
class Hole:
    """A part of one subject that did not arrive: above `after`, up to `through`."""

    channel: str
    sender: str
    after: int
    through: int
    #: how far it was read
    position: int
    recovered: int = 0

    def told(self, *, gone: bool) -> Gap:
        return Gap(self.channel, self.sender, self.after, self.through, self.recovered, "live", gone)


class Arrivals:
    """The newest sequence that arrived on each subject; the subjects heard longest ago are forgotten first."""

    def __init__(self, kept: int = SUBJECTS_KEPT) -> None:
        self.kept = kept
        self._last: OrderedDict[str, int] = OrderedDict()
        #: a subject that is not known may have arrived up to here
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._last)

    def last(self, subject: str) -> int:
        return self._last.get(subject, 0)

    def covers(self, subject: str, seq: int) -> bool:
        """Has `seq` of this subject arrived, as far as anybody remembers? 0 is "there is none before this"."""
        known = self._last.get(subject)
        return seq <= (self.forgotten if known is None else known)

    def rewind(self, agreed: int) -> None:
        """The log went backwards: above `agreed` its sequences are other records."""
        self.forgotten = min(self.forgotten, agreed)
        for subject, seq in self._last.items():
            self._last[subject] = min(seq, agreed)

    def note(self, subject: str, seq: int) -> None:
        known = self._last
        if subject in known:
            known.move_to_end(subject)
            if known[subject] < seq:
                known[subject] = seq
            return
        known[subject] = seq
        if len(known) > self.kept:
            self.forgotten = max(self.forgotten, known.popitem(last=False)[1])
