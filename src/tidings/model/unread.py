"""How far back the log is needed by what lies unread in mailboxes. Pure.

An unread frame holds its messages, but a mailbox may be emptied (access became narrower, mailboxes are crowded, a store
was set back), and then they are delivered again from the log. So the log keeps what is unread. A frame has a place in
the mailbox stream, and whatever lies below the oldest frame there was read: what is needed is the smallest log sequence
in any frame from there on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

#: entries kept; beyond them neighbours are merged, which makes the answer older, never newer
MOST_ENTRIES = 4_096


class UnreadWindow:
    """The minimum over a window that is filled at one end and read at the other."""

    def __init__(self, frames: Iterable[tuple[int, int]] = ()) -> None:
        #: (place of the newest frame of the entry, smallest log sequence in it), both growing
        self._entries: deque[tuple[int, int]] = deque()
        for place, first in sorted(frames):
            self.add(place, first)

    def add(self, place: int, first: int) -> None:
        """A frame at `place` of the mailbox stream holds log sequences from `first` on.

        Places grow, but for a frame that was there already when it was made again.
        """
        while self._entries and self._entries[-1][1] >= first:
            place = max(place, self._entries.pop()[0])
        place = max(place, self._entries[-1][0] if self._entries else 0)
        self._entries.append((place, first))
        if len(self._entries) > MOST_ENTRIES:
            self._merge()

    def read_below(self, place: int | None) -> None:
        """Every frame below `place` was read; None: every frame was."""
        while self._entries and (place is None or self._entries[0][0] < place):
            self._entries.popleft()

    @property
    def needed(self) -> int | None:
        """The first log sequence that something unread may be delivered from again; None if nothing is unread."""
        return self._entries[0][1] if self._entries else None

    def _merge(self) -> None:
        pairs = list(self._entries)
        merged = [(newer[0], older[1]) for older, newer in zip(pairs[::2], pairs[1::2], strict=False)]
        self._entries = deque(merged + pairs[len(merged) * 2 :])
