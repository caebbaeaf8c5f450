"""Reading the log: its pages, and what did not arrive otherwise.

`LogReader` reads pages of a channel, one request each, and verifies every record. `Backfill` surfaces what it reads:
what was said before a join, what was missed while the connection was lost, the hole that one sender's lost copies
left, and what frames should have brought. Each is read once, on request; False says that the application has no room
for all of it, and that it goes on from there when asked again. What was recovered, and what had left the log before it
could be read, is reported as a gap. When to read, and what to do while nobody answers, is `channels.py`'s part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from tidings.client.connection import AgentConnection
from tidings.client.intake import UNDECIDED, Intake, LiveRecord, RecordOpener
from tidings.client.live import Hole, LocalMembership
from tidings.client.notices import Gap
from tidings.contract.channels import (
    ChannelsRequest,
    HistoryAnswer,
    HistoryRequest,
    MembershipsRequest,
    RawRecord,
)
from tidings.errors import ConflictError, ConnectionLost, DeniedError, OutcomeUnknown, TidingsError, UnreachableError
from tidings.rpc.control import pages
from tidings.wire.names import covers, is_channel
from tidings.wire.records import Stamp

log = logging.getLogger(__name__)

PAGE = 100
#: pages in a row that show nothing, because a channel does not replay; then it is not looked any further
EMPTY_PAGES = 16
PATIENCE = 10.0
RETRY_PAUSE = 1.0
#: pages under way at a time; the steward refuses an agent more than four
AT_ONCE = 4
FILL_LIMIT = 1_000


@dataclass(frozen=True, slots=True)
class Reached:
    """What is not among the records of a reading, and why."""

    #: there are more beyond the last one
    more: bool = False
    #: what was said up to here has left the log, and was asked for; 0 if nothing was
    gone: int = 0
    #: there may be others that are not shown, because the channel does not replay them to this agent
    hidden: bool = False


class LogReader:
    """Pages of the log, for one endpoint."""

    def __init__(self, connection: AgentConnection, opener: RecordOpener) -> None:
        self.connection = connection
        self.opener = opener
        self._under_way = asyncio.Semaphore(AT_ONCE)
        #: hears what the log was at its head when a page was read
        self.on_stamp: Callable[[Stamp | None], None] = lambda _stamp: None

    async def newest(self, channel: str, limit: int, *, before: int | None = None) -> tuple[list[LiveRecord], Reached]:
        """The newest messages of a channel or pattern, newest first, below `before`; and what is not among them."""
        found: list[LiveRecord] = []
        more, empty, reached = True, 0, Reached()
        while more and len(found) < limit and empty < EMPTY_PAGES:
            page = await self._page(HistoryRequest(channel, min(PAGE, limit - len(found)), before=before or None))
            more, before = page.more, page.next
            found += await self._opened(page.records)
            empty = 0 if page.records else empty + 1
            gone = 0 if more else page.floor - 1
            reached = Reached(more, max(0, gone), reached.hidden or (page.hidden and not more))
        return found, reached

    async def since(self, channel: str, start: int, limit: int) -> tuple[list[LiveRecord], Reached, int]:
        """Messages above `start`, oldest first; what is not among them, and how far that is all there is."""
        found: list[LiveRecord] = []
        position, taken, head, gone, hidden = start, 0, start, 0, False
        while taken < limit:
            page = await self._page(HistoryRequest(channel, min(PAGE, limit - taken), after=position))
            head = max(head, page.head)
            found += await self._opened(page.records)
            taken += len(page.records)
            gone, hidden = max(gone, page.floor - 1), hidden or page.hidden
            if not page.more:
                return found, Reached(False, gone if gone > start else 0, hidden), head
            position = page.next
        return found, Reached(True, gone if gone > start else 0, hidden), position

    async def between(self, channel: str, after: int, until: int) -> AsyncIterator[LiveRecord]:
        """Every message above `after`, up to `until`, oldest first."""
        more = True
        while more:
            page = await self._page(HistoryRequest(channel, PAGE, after=after, until=until))
            for record in await self._opened(page.records):
                yield record
            more, after = page.more, page.next

    async def of_sender(
        self, channel: str, sender: str, after: int, until: int, link: str = ""
    ) -> tuple[list[LiveRecord], int, bool]:
        """A page of one sender's messages, those over a link if one is named, oldest first; the last sequence it holds,
        and whether there are more."""
        request = HistoryRequest(channel, PAGE, after=after, until=until, sender=sender, link=link or None)
        page = await self._page(request)
        last = page.records[-1].seq if page.records else after
        if page.void and not page.more:
            last = until  # records that are not shown were rejected or never imported: none of them is gone
        return await self._opened(page.records), last, bool(page.records) and page.more

    async def page_between(
        self, channel: str, after: int, until: int
    ) -> tuple[list[tuple[int, LiveRecord | None]], int, bool]:
        """A page of what is above `after`, up to `until`: each with its sequence; where to go on, and whether to."""
        page = await self._page(HistoryRequest(channel, PAGE, after=after, until=until))
        found = [(record.seq, await self._open(record)) for record in page.records]
        return found, page.next, page.more

    async def _opened(self, records: Iterable[RawRecord]) -> list[LiveRecord]:
        return [opened for record in records if (opened := await self._open(record)) is not None]

    async def _open(self, record: RawRecord) -> LiveRecord | None:
        """Opens a record of a page. Raises UnreachableError or OutcomeUnknown if its link cannot be looked up now."""
        while (opened := self.opener.stored(record)) is UNDECIDED:
            await self.opener.learn_links(record.seq)
        return opened

    async def _page(self, request: HistoryRequest) -> HistoryAnswer:
        """One page. Reading changes nothing, so a connection that goes meanwhile only costs time."""
        async with self._under_way:
            deadline = time.monotonic() + PATIENCE
            while True:
                try:
                    connection = await self.connection.ready(max(0.1, deadline - time.monotonic()))
                    page = await self.connection.call(request, timeout=PATIENCE, connection=connection)
                    self.on_stamp(page.stamp)
                    if self.opener.links is not None:
                        self.opener.links.hear(page.links, page.head)
                    return page
                except (ConnectionLost, ConflictError):  # the latter: another program of this agent reads too
                    if time.monotonic() > deadline or self.connection.state == "stopped":
                        raise
                    await asyncio.sleep(0.05)


class Backfill:
    """What one endpoint reads from the log because it did not arrive otherwise."""

    def __init__(self, log: LogReader, intake: Intake) -> None:
        self.log = log
        self.read_state = intake.read_state
        self.intake = intake
        #: live copies that were lost on the way and were read from the log; and holes whose messages had left it
        self.recovered = self.gone = 0
        self._report = intake.events.emit

    # --- before the join ---

    async def said_before(self, membership: LocalMembership, limit: int) -> list[LiveRecord]:
        """What was said before the join, as far as it replays, oldest first."""
        return (await self.log.newest(membership.pattern, limit, before=membership.joined))[0][::-1]

    async def before_join(self, membership: LocalMembership, limit: int) -> tuple[int, list[LiveRecord]]:
        """Surface what was said before the join, marked historical; answers how much, and what found no room."""
        assert membership.joined is not None
        epoch = self.read_state.epoch
        records = await self.said_before(membership, limit)
        rest: list[LiveRecord] = []
        for number, record in enumerate(records):
            if not self.intake.offer(record, historical=True, contiguous=False):
                rest = records[number:]
                break
        if self.read_state.epoch == epoch:
            for channel in self.read_state.covered_by(membership.pattern):
                self.read_state.channel(channel).close_hole(membership.joined)
        return len(records) - len(rest), rest

    # --- since the last contiguous copy ---

    async def fill(self, membership: LocalMembership) -> bool:
        """Read what lies between what was seen and now, on every channel of this membership seen before."""
        assert membership.joined is not None
        for channel in self.read_state.covered_by(membership.pattern):
            state = self.read_state.channel(channel)
            start = max(state.through, membership.joined)
            epoch = self.read_state.epoch
            records, reached, through = await self.log.since(channel, start, FILL_LIMIT)
            if epoch != self.read_state.epoch:  # `start` was a place in another log
                return False
            fresh = 0
            for record in records:
                new = state.is_new(record.seq) and record.sender != self.intake.own_id
                redelivered = record.seq <= membership.forgotten
                if not self.intake.offer(record, contiguous=True, redelivered=redelivered):
                    return False
                fresh += new
            if fresh and membership.cause is not None:
                self._report("gap", Gap(channel, None, start, records[-1].seq, fresh, membership.cause))
            # so far by what was read, and not by what of it was new: all of it may have come live before
            state.close_hole(max(through, start))
            if reached.more:
                return await self.fill(membership)
        return True

    # --- holes of single senders ---

    async def fill_holes(self, membership: LocalMembership) -> bool:
        """Read what single senders said in holes, surface it, and say so."""
        while membership.holes:
            if not await self._fill_hole(membership, next(iter(membership.holes))):
                return False
        return True

    async def _fill_hole(self, membership: LocalMembership, subject: str) -> bool:
        hole = membership.holes[subject]
        more = True
        while more:
            asked = hole.through
            records, last, more = await self.log.of_sender(hole.channel, hole.sender, hole.position, asked, hole.link)
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
            self._report("gap", hole.as_gap(gone=gone))
        membership.close_hole(subject, self.read_state)
        return True

    def _offer(self, record: LiveRecord, hole: Hole) -> bool:
        """A record of a hole: no copy of it arrived, whatever came after it."""
        if record.sender != hole.sender or record.seq in self.read_state.known:
            return True
        if not self.intake.offer_backfilled(record, historical=False):
            return False
        hole.recovered += 1
        self.recovered += 1
        return True

    # --- what frames should have brought ---

    async def exactly(self, channel: str, seqs: Sequence[int]) -> AsyncIterator[tuple[int, LiveRecord | None]]:
        """Each of these records of a channel that the log has, in order; None for one that does not verify.

        Tries for as long as nobody answers. DeniedError: this agent may not read the channel any more.
        """
        wanted, after, more = frozenset(seqs), seqs[0] - 1, True
        while more:
            try:
                found, after, more = await self.log.page_between(channel, after, seqs[-1])
            except DeniedError:
                raise
            except TidingsError as error:  # nobody answers, there are too many pages at a time, or a read failed
                await self._pause(error)
                continue
            for seq, record in found:
                if seq in wanted:
                    yield seq, record

    async def owed_between(self, after: int, through: int) -> list[LiveRecord]:
        """Every message above `after`, up to `through`, in the channels this agent is a member of.

        What of it is new, whoever asked decides. Tries for as long as nobody answers.
        """
        while after < through:
            try:
                found: list[LiveRecord] = []
                for channel, joined in (await self._owed_channels()).items():
                    if max(after, joined) < through:
                        found += await self._all_of(channel, max(after, joined), through)
                return sorted(found, key=lambda record: record.seq)
            except DeniedError:
                raise
            except TidingsError as error:
                await self._pause(error)
        return []

    async def _pause(self, error: TidingsError) -> None:
        if not isinstance(error, UnreachableError | OutcomeUnknown | ConflictError):
            log.warning("reading the log again, because it could not be read: %s", error)
        await asyncio.sleep(RETRY_PAUSE)

    async def _owed_channels(self) -> dict[str, int]:
        """Each channel of a membership, with the earliest sequence from which it is owed.

        The steward is asked, because a process may receive for memberships it never joined itself. Under a pattern the
        channels are those that were seen here or that the steward lists.
        """
        call = self.log.connection.call
        held = (await call(MembershipsRequest())).memberships
        names = {each.pattern for each in held if is_channel(each.pattern)}
        if len(names) < len(held):
            names |= set(self.read_state.channels)
            names |= {row.channel async for page in pages(call, ChannelsRequest()) for row in page.channels}
        covering = {name: [each.joined for each in held if covers(each.pattern, name)] for name in names}
        return {name: min(joins) for name, joins in covering.items() if joins}

    async def _all_of(self, channel: str, after: int, through: int) -> list[LiveRecord]:
        try:
            return [each async for each in self.log.between(channel, after, through)]
        except DeniedError:  # narrowed meanwhile: it is owed no more
            return []
