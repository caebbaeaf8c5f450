"""Reading from the log what did not arrive live: before a join, during a lost connection, in the hole of one sender.

Each is read once, on request, and surfaced; False says that the application has no room for all of it, and that it goes
on from there when asked again. What was recovered, and what had left the log before it could be read, is counted and
reported as a gap. When to read, and what to do while nobody answers, is `channels.py`'s part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidings.endpoint.dedup import Dedup
from tidings.endpoint.gaps import Gap, Hole
from tidings.endpoint.history import History
from tidings.endpoint.membership import Membership
from tidings.endpoint.read_state import ReadState
from tidings.endpoint.records import LiveRecord

FILL_LIMIT = 1_000


class Backfill:
    def __init__(
        self, history: History, read_state: ReadState, dedup: Dedup, report: Callable[[str, Any], None]
    ) -> None:
        self.history = history
        self.read_state = read_state
        self.dedup = dedup
        #: live copies that were lost on the way and were read from the log; and holes whose messages had left it
        self.recovered = self.gone = 0
        self._report = report

    # --- before the join ---

    async def said_before(self, membership: Membership, limit: int) -> list[LiveRecord]:
        """What was said before the join, as far as it replays, oldest first."""
        return (await self.history.records(membership.pattern, limit, before=membership.joined))[::-1]

    async def backfill(self, membership: Membership, limit: int) -> tuple[int, list[LiveRecord]]:
        """Surface what was said before the join, marked historical; answers how much, and what found no room."""
        assert membership.joined is not None
        epoch = self.read_state.epoch
        records = await self.said_before(membership, limit)
        rest: list[LiveRecord] = []
        for number, record in enumerate(records):
            if not self.dedup.offer(record, historical=True, contiguous=False):
                rest = records[number:]
                break
        if self.read_state.epoch == epoch:
            for channel in self.read_state.covered_by(membership.pattern):
                self.read_state.channel(channel).close_hole(membership.joined)
        return len(records) - len(rest), rest

    # --- since the last contiguous copy ---

    async def fill(self, membership: Membership) -> bool:
        """Read what lies between what was seen and now, on every channel of this membership seen before."""
        assert membership.joined is not None
        for channel in self.read_state.covered_by(membership.pattern):
            seen = self.read_state.channel(channel)
            start = max(seen.through, membership.joined)
            epoch = self.read_state.epoch
            records, complete, head = await self.history.after(channel, start, FILL_LIMIT)
            if epoch != self.read_state.epoch:  # `start` was a place in another log
                return False
            fresh = 0
            for record in records:
                new = seen.is_new(record.seq) and not self.dedup.is_own(record)
                redelivered = record.seq <= membership.forgotten
                if not self.dedup.offer(record, contiguous=True, redelivered=redelivered):
                    return False
                fresh += new
            if fresh and membership.cause is not None:
                self._report("gap", Gap(channel, None, start, records[-1].seq, fresh, membership.cause))
            if not complete:
                return await self.fill(membership)
            seen.close_hole(max(head, start))
        return True

    # --- holes of single senders ---

    async def fill_holes(self, membership: Membership) -> bool:
        """Read what single senders said in holes, surface it, and say so."""
        while membership.holes:
            if not await self._fill_hole(membership, next(iter(membership.holes))):
                return False
        return True

    async def _fill_hole(self, membership: Membership, subject: str) -> bool:
        hole = membership.holes[subject]
        more = True
        while more:
            asked = hole.through
            records, last, more = await self.history.of_sender(hole.channel, hole.sender, hole.position, asked)
            if membership.holes.get(subject) is not hole:  # it was in another log
                return True
            for record in records:
                if not self._offer(record, hole):
                    return False
            hole.position = last
            more = more or hole.through > asked  # it grew meanwhile
        gone = hole.position < hole.through  # the record that was there when a copy named it is no longer
        self.gone += gone
        if hole.recovered or gone:
            self._report("gap", hole.told(gone=gone))
        membership.close_hole(subject, self.read_state)
        return True

    def _offer(self, record: LiveRecord, hole: Hole) -> bool:
        """A record of a hole: no copy of it arrived, whatever came after it."""
        if record.received.sender != hole.sender or record.seq in self.read_state.known:
            return True
        if not self.dedup.offer_missed(record, historical=False):
            return False
        hole.recovered += 1
        self.recovered += 1
        return True
