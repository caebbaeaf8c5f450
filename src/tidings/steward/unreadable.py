"""Records that the broker counts and shows to nobody: a flipped bit is not found before somebody reads.

A sequence that was not read is deleted, below the first, or unreadable. Which of these is asked after the reading, so
that whatever was rightly removed meanwhile is not called lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidings.broker.jetstream import JetStream, StoredRecord

#: deleted sequences that are asked for, and runs of them that are remembered
MOST_DELETED = 50_000
Run = tuple[int, int]


class Gaps:
    """Runs of sequences that a reading in order did not meet."""

    def __init__(self, first: int) -> None:
        self.expected = first
        self.runs: list[Run] = []

    def note(self, page: Iterable[StoredRecord]) -> None:
        for record in page:
            self._reach(record.seq)
            self.expected = max(self.expected, record.seq + 1)

    def close(self, end: int) -> list[Run]:
        self._reach(end + 1)
        return self.runs

    def _reach(self, seq: int) -> None:
        if seq > self.expected:
            self.runs.append((self.expected, seq - 1))


async def unreadable(js: JetStream, stream: str, gaps: Sequence[Run]) -> list[Run] | None:
    """Of the sequences nobody met, those the broker says it has; None if there are too many to ask about."""
    if not gaps:
        return []
    state = (await js.info(stream))["state"]
    if max(len(gaps), state.get("num_deleted", 0)) > MOST_DELETED:
        return None
    answer = await js.api(f"STREAM.INFO.{stream}", {"deleted_details": True})
    deleted, first = sorted(answer["state"].get("deleted") or []), int(answer["state"]["first_seq"])
    return list(_without(gaps, deleted, first))


def _without(gaps: Iterable[Run], deleted: Sequence[int], first: int) -> Iterable[Run]:
    """The gaps from `first` on without what was deleted; both in order."""
    position = 0
    for start, last in gaps:
        start = max(start, first)
        while position < len(deleted) and deleted[position] < start:
            position += 1
        while position < len(deleted) and deleted[position] <= last:
            if deleted[position] > start:
                yield start, deleted[position] - 1
            start = deleted[position] + 1
            position += 1
        if start <= last:
            yield start, last
