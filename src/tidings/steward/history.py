"""History: pages of a channel for those who may read it, newest first.

The access record is checked for every page. The broker cannot read backwards, so the newest records are found by
windows that double from the end; the round trips that takes stay between steward and broker, and a client pays one
per page. A page never exceeds what one answer may carry, and says where the next one begins. How much of the past a
reader is shown, whichever way it asks, is one rule (`Replay`): what a channel replays, no further back than its
`replay_window`, and what was said while the reader was a member, because it was owed. What came over a link is shown
if the link record in force when it was stored let it in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from tidings.contract.channels import ConfirmAnswer, ConfirmRequest, HistoryAnswer, HistoryRequest, RawRecord
from tidings.contract.core import Caller, nanoseconds
from tidings.errors import DeniedError, UsageError
from tidings.model.membership import Interval
from tidings.nats.jetstream import StoredRecord
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext
from tidings.steward.fair_queue import ConcurrencyLimit
from tidings.steward.marks import Marks
from tidings.steward.requests import fitting
from tidings.wire.names import check_pattern, covers, covers_any, is_channel
from tidings.wire.records import record_time
from tidings.wire.subjects import Chat, Via

MAX_PAGE = 200
MAX_BYTES = 256 * 1024
FIRST_WINDOW = 512
#: what is read for one page, whatever the channel holds
MAX_SCAN = 2 * MAX_BYTES
#: pages one agent may have under way, and pages under way at all
PER_SENDER = 4
AT_ONCE = 8


class HistoryHandlers:
    def __init__(self, space: SpaceContext, marks: Marks) -> None:
        self.space, self.marks = space, marks
        refusal = f"{PER_SENDER} pages are under way for you already: wait for one of them"
        self.pages = ConcurrencyLimit(AT_ONCE, PER_SENDER, refusal)

    @handler(HistoryRequest)
    async def page(self, caller: Caller, request: HistoryRequest) -> HistoryAnswer:
        """`before`: newest first, below it. `after`: oldest first, above it, of one `sender` if it is named, and of
        what came from it over one `link` if that is named too.

        Both bounded by `limit` and by bytes. `channel` may be a pattern. `next`, given as `before` or `after`,
        continues: a page may be empty although there are `more`, if none of what was looked at is shown to the caller.
        """
        channel = check_pattern(request.channel)
        access = self.space.access_of(caller.id)
        if not covers_any(access.read, channel):
            raise DeniedError(
                f"{access.name} may not read {channel}; it may read {', '.join(access.read) or 'nothing'}"
            )
        if request.before is not None and request.after is not None:
            raise UsageError("history page: give either `before` or `after`, not both")
        async with self.pages.turn(caller.id):
            return await self._read_page(caller, request)

    async def _read_page(self, caller: Caller, request: HistoryRequest) -> HistoryAnswer:
        channel, after, limit = request.channel, request.after, min(request.limit, MAX_PAGE)
        # a caller that names an end has heard of a record there: it would take what is missing before it for gone
        head = await self.space.log_head(request.until or 0)
        since = nanoseconds(request.since)
        shown = Replays(self.space, caller.id)
        lowest, first = await self._bounds(channel, shown, head)
        if after is not None:
            until = min(head, request.until or head)
            filters = self._filters(channel, request.sender, request.link)
            found, complete = await self._sample(filters, max(after + 1, lowest), until, limit)
            found, complete, passed = found[:limit], complete and len(found) <= limit, after
        else:
            passed = min(head + 1, request.before or head + 1)
            found, complete = await self._backwards(channel, passed - 1, limit, lowest)
        recent = [record for record in found if record.time_ns >= since]
        # older than the time asked for: there is nothing more to show, however much there is
        complete = complete or (after is None and len(recent) < len(found))
        counting = [record for record in recent if shown.counts(record)]
        showable = [record for record in counting if shown.shows(record)]
        kept = fitting(showable, _encoded_size, MAX_BYTES)
        all_fit = len(kept) == len(showable)
        last = (found if all_fit else kept)[-1:]
        # a reader that has read everything up to the head remembers what was there
        return HistoryAnswer(
            records=tuple(raw_record(record) for record in kept),
            more=not all_fit or not complete,
            next=last[0].seq if last else passed,
            head=head,
            stamp=await self.marks.stamp(head) if all_fit and complete else None,
            floor=self.space.table.floor,
            links=self.space.table.rules.links_revised,
            void=len(recent) - len(counting),
            # something of what was asked for may be there and is not shown
            hidden=len(showable) < len(counting) or max(first, (after or 0) + 1) < lowest,
        )

    def _filters(self, channel: str, sender: str | None, link: str | None) -> tuple[str, ...]:
        s = self.space.subjects
        if sender is None:
            return self.space.channel_filters(channel)
        return (s.via(link, sender, channel) if link else s.chat(sender, channel),)

    async def _bounds(self, channel: str, shown: Replays, head: int) -> tuple[int, int]:
        """Nothing below the first is shown, so it is not read; the second is where the channel's records begin."""
        if not is_channel(channel) or shown.of(channel).since_ns == 0:
            return 1, 1
        replay, js, stream = shown.of(channel), self.space.js, self.space.subjects.log_stream
        lowest, oldest = min((interval.joined + 1 for interval in replay.intervals), default=head + 1), head + 1
        for each in self.space.channel_filters(channel):
            first = await js.following(stream, each, 1)
            oldest = min(oldest, first.seq if first else oldest)
            if replay.since_ns is not None and first is not None:
                when = datetime.fromtimestamp(replay.since_ns / 1e9, UTC)
                lowest = min(lowest, await js.first_after(stream, each, when) or lowest)
        return lowest, oldest

    async def _sample(
        self, filters: tuple[str, ...], start: int, end: int, limit: int
    ) -> tuple[list[StoredRecord], bool]:
        """Records of a range, oldest first, and whether those are all: reading ends soon after `limit` or MAX_SCAN."""
        found: list[StoredRecord] = []
        complete = True
        for each in filters:
            taken = size = 0
            async for records in self.space.js.read(
                self.space.subjects.log_stream, each, max(1, start), end, page=limit + 1, max_bytes=MAX_SCAN
            ):
                found += records
                taken += len(records)
                size += sum(len(record.payload) for record in records)
                if taken > limit or size > MAX_SCAN:
                    complete = False
                    break
        return sorted(found, key=lambda record: record.seq), complete

    async def _backwards(self, channel: str, end: int, limit: int, lowest: int) -> tuple[list[StoredRecord], bool]:
        """The newest `limit` records from `lowest` to `end`, newest first, and whether those are all."""
        window, upper, complete = FIRST_WINDOW, end, True
        found: list[StoredRecord] = []
        while upper >= lowest and complete and len(found) < limit and _size(found) <= MAX_SCAN:
            lower = max(lowest, upper - window + 1)
            older, complete = await self._newest(channel, lower, upper, limit - len(found))
            found = older + found
            upper, window = lower - 1, window * 2
        return list(reversed(found)), complete and upper < lowest

    async def _newest(self, channel: str, lower: int, upper: int, limit: int) -> tuple[list[StoredRecord], bool]:
        """The newest records of a window, oldest first, and whether those are all of it.

        A window that is too full to read is halved, the newer half first.
        """
        found, complete = await self._sample(self.space.channel_filters(channel), lower, upper, max(limit, MAX_PAGE))
        if complete or lower == upper:
            return found[-limit:], complete and len(found) <= limit
        middle = (lower + upper) // 2
        newer, complete = await self._newest(channel, middle + 1, upper, limit)
        if not complete or len(newer) >= limit or _size(newer) > MAX_SCAN:
            return newer, False
        older, complete = await self._newest(channel, lower, middle, limit - len(newer))
        return older + newer, complete

    @handler(ConfirmRequest)
    async def confirm(self, caller: Caller, request: ConfirmRequest) -> ConfirmAnswer:
        """Tells a sender whose publish was a `duplicate` whether the record is its own, and which message it is."""
        streams = {
            "log": self.space.subjects.log_stream,
            "dm": self.space.subjects.direct_stream,
            "task": self.space.subjects.task_stream,
        }
        stored = await self.space.js.at(streams[request.stream], request.seq)
        parsed = self.space.subjects.parse(stored.subject) if stored else None
        if stored is None or getattr(parsed, "sender", None) != caller.id:
            return ConfirmAnswer(yours=False)
        return ConfirmAnswer(yours=True, subject=stored.subject, payload=stored.payload)


def _size(records: list[StoredRecord]) -> int:
    return sum(len(record.payload) for record in records)


def _encoded_size(record: StoredRecord) -> int:
    return (len(record.payload) + len(record.own_block)) * 4 // 3 + len(record.subject) + 96


def raw_record(record: StoredRecord) -> RawRecord:
    """Returns the record as it was stored: nothing is re-encoded, so the reader can verify it."""
    time_text = record_time(record.time_ns)
    return RawRecord(record.seq, time_text, record.subject, record.own_block, record.payload)


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


def replay_of(space: SpaceContext, reader: str, channel: str) -> Replay:
    facts = space.channel_facts(channel)
    window = facts["replay_window"]
    intervals = tuple(i for i in space.table.intervals(reader) if covers(i.pattern, channel))
    if not facts["replay"]:
        return Replay(None, intervals)
    since = 0 if window is None else max(0, time.time_ns() - int(window) * 1_000_000_000)
    return Replay(since, intervals)


class Replays:
    """Which records one reader is shown, of any number of channels."""

    def __init__(self, space: SpaceContext, reader: str) -> None:
        self._space = space
        self._reader = reader
        self._replays: dict[str, Replay] = {}

    def of(self, channel: str) -> Replay:
        if channel not in self._replays:
            self._replays[channel] = replay_of(self._space, self._reader, channel)
        return self._replays[channel]

    def shows(self, record: StoredRecord) -> bool:
        parsed = self._space.subjects.parse(record.subject)
        return isinstance(parsed, Chat | Via) and self.of(parsed.channel).shows(record.seq, record.time_ns)

    def counts(self, record: StoredRecord) -> bool:
        """Was it said here by who might, or let in by a link? What was not is nobody's to see: a broker that learns
        late of a narrowing may have taken it."""
        parsed, table = self._space.subjects.parse(record.subject), self._space.table
        if isinstance(parsed, Chat):
            return table.post_allowed(parsed.sender, parsed.channel, max(record.seq, table.floor))
        return not isinstance(parsed, Via) or self._space.admitted(record)
