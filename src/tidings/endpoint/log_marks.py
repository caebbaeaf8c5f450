"""What a reader remembers of the log itself: marks of records it saw, and stamps the steward gave it.

With each session the newest are held against the log before anything else is believed: a log that was set back shows by
a record that is another one now, whoever else noticed, and the marks below say up to where both agree. Until that was
answered, what comes is of a log not known to be the same, and waits here. Dense where they are new, sparser the older.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from tidings.wire.marks import Stamp

KEPT = 32


class LogMarks:
    def __init__(self, remembered: Iterable[Sequence[object]] = ()) -> None:
        found = msgspec.convert(list(remembered), list[Stamp])
        #: what was seen here, and what the steward said and can be held to; both oldest first
        self.own = [each for each in found if not each.proof]
        self.stamps = [each for each in found if each.proof]
        self._session = 0
        self._answered = -1
        self._waiting: deque[Stamp] = deque(maxlen=KEPT)

    @property
    def session(self) -> int:
        """Counts what made us doubt; an answer to what was asked before that says nothing."""
        return self._session

    @property
    def is_checked(self) -> bool:
        return self._answered == self._session or not (self.own or self.stamps)

    def doubt(self) -> None:
        """Another connection: the log behind it may be another one."""
        self._session += 1

    def checked(self, session: int) -> None:
        """The log was held against what was remembered when `session` asked; what waited is of the same log."""
        self._answered = session
        if self.is_checked:
            waiting, self._waiting = self._waiting, deque(maxlen=KEPT)
            for each in waiting:
                self.note(each)

    def note(self, stamp: Stamp) -> None:
        if not self.is_checked:
            self._waiting.append(stamp)
            return
        ladder = self.stamps if stamp.proof else self.own
        if ladder and ladder[-1].seq >= stamp.seq:
            return
        ladder.append(stamp)
        if len(ladder) > KEPT:
            del ladder[1 : KEPT // 2 : 2]

    def claims(self) -> list[Stamp]:
        """All of it, newest first."""
        return sorted([*self.own, *self.stamps], key=lambda each: -each.seq)

    def rewind(self, agreed: int) -> None:
        self.own = [each for each in self.own if each.seq <= agreed]
        self.stamps = [each for each in self.stamps if each.seq <= agreed]
