"""Whose request is worked on next: nobody's many keep another's few from their turn.

Requests wait in a line of their sender's own. A bounded number is worked on at once, of one sender only so many, and
free places go round the senders that wait. A line that is full takes no more, and whoever sent it is told at once.
Pure: no tasks, no clock; `dispatch.py` starts the work.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    def __init__(self, most: int, each: int, waiting: int) -> None:
        self.most = most
        self.each = each
        self.waiting = waiting
        self.running: Counter[str] = Counter()
        #: senders in the order in which they are looked at next
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()

    def offer(self, sender: str, work: T) -> bool:
        """Put it at the end of its sender's line; False if that is full."""
        line = self._lines.setdefault(sender, deque())
        if len(line) >= self.waiting:
            return False
        line.append(work)
        return True

    def take(self) -> T | None:
        """The next one to begin, or None if nothing waits that may. It counts until it is released."""
        if self.running.total() >= self.most:
            return None
        for sender, line in self._lines.items():
            if self.running[sender] < self.each:
                work = line.popleft()
                self.running[sender] += 1
                self._lines.move_to_end(sender)
                if not line:
                    del self._lines[sender]
                return work
        return None

    def release(self, sender: str) -> None:
        self.running[sender] -= 1
        if not self.running[sender]:
            del self.running[sender]

    def reclaim(self, sender: str) -> None:
        """Go on after a pause. Nobody waits for that: what is left of such a request is little."""
        self.running[sender] += 1
