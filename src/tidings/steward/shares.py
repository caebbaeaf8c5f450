"""What each agent holds of the streams all share: direct messages and tasks. Whoever holds too much loses it.

The broker bounds these streams by bytes for all together, and by records per pair or queue; neither is a bound for one
agent, who may write to any number of targets. So the fill of both is looked at four times a second, which costs two
questions. Only when a stream holds more than one agent may is it read, once and in order, whose what is new is: that
is what each put there. Of whoever put in more than its share, what waits there now is summed up record by record; what
its target is done with and only the archive still needs does not count. Above its share an agent's posting is withheld
and what it had put there is removed; it is told, by receipts and by the reason, and so are those it was for.

At every look some of what is new is read too: a message id or a subject that is longer than any program of ours makes
costs the broker memory for as long as it is remembered, and the credential of whoever sent it.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tidings.nats.jetstream import StoredRecord
from tidings.server.grants import MAX_MESSAGE
from tidings.steward.context import SpaceContext
from tidings.steward.damage import Removed
from tidings.steward.gate import WARN_AT
from tidings.steward.quotas import FloodWatch
from tidings.steward.receipts import ReceiptStore
from tidings.steward.retention import stored_size
from tidings.steward.store_watch import StoreWatch
from tidings.wire.records import values_of
from tidings.wire.states import ReceiptStage
from tidings.wire.subjects import Direct, Task

#: of a stream, for one agent; never less than so many bytes, unless the whole stream is not much more
SHARE, LEAST_SHARE, MOST_OF_SMALL = 1 / 16, 16 * 1024 * 1024, 0.75
FULL = 0.95
#: longer than anything we spell
LONGEST_ID, LONGEST_SUBJECT = 128, 512
SAMPLED, SAMPLED_BYTES = 8, 128 * 1024
#: pages (1 MiB each) that one look reads of what is new, and that summing up one agent reads at most
PAGES_OF_NEW, PAGES_OF_ONE = 32, 192
#: above every record: its subject and the broker's own bytes come on top of a message
LARGEST_RECORD = MAX_MESSAGE + 1024
#: what a sender hears of one by one when all it had put into the mailboxes is removed
MOST_TOLD = 200
COUNT_AGAIN, LOG_AGAIN = 2.0, 10.0
log = logging.getLogger(__name__)


def share_of(limit: int, *, of_small: float = MOST_OF_SMALL) -> int:
    """Bytes of a stream with this limit that one agent may hold."""
    return int(max(SHARE * limit, min(LEAST_SHARE, of_small * limit)))


def sender_of(subject: str) -> str:
    """Who put a record of a mailbox or queue there: the broker lets nobody write another's name."""
    return subject.rpartition(".")[2]


def suspects(put: Mapping[str, int], records: Mapping[str, int], most: int) -> list[str]:
    """Of whom it must be summed up what waits: who put in more than it may hold, and can still hold so much."""
    over = [sender for sender, size in put.items() if min(size, records.get(sender, 0) * LARGEST_RECORD) > most]
    return sorted(over, key=lambda sender: -put[sender])


def too_long(record: StoredRecord) -> str | None:
    """What of a record is longer than any program of ours makes it, in words."""
    if len(record.subject) > LONGEST_SUBJECT:
        return f"a subject of {len(record.subject):,} bytes, where {LONGEST_SUBJECT} are the most"
    ids = values_of(record.own_fields() or (), "Nats-Msg-Id")
    longest = max(map(len, ids), default=0)
    if longest > LONGEST_ID or (not ids and len(record.own_block) > 8 * 1024):
        longest = longest or len(record.own_block)
        return f"a message id of {longest:,} bytes, where {LONGEST_ID} are the most"
    return None


@dataclass(slots=True)
class _Fill:
    """A stream at the last look."""

    used: int = 0
    limit: int = 1
    head: int = 0
    counted: float = float("-inf")
    #: agents by what they hold, the largest first, when it was last counted
    held: tuple[tuple[str, float], ...] = ()
    #: how far it was read, and what each agent put there since it was last summed up: no less than it holds
    read: int = 0
    put: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Sum:
    """What waits of one agent, and of what was read on the way to that."""

    size: int = 0
    #: the first that wait, as many as are told of one by one
    waiting: list[StoredRecord] = field(default_factory=list)
    #: by subject, those its target is done with
    done: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Shares:
    space: SpaceContext
    floods: FloodWatch
    receipts: ReceiptStore
    store: StoreWatch
    #: is the task of a record over? Of what goes to another space the broker does not know it
    has_ended: Callable[[StoredRecord], bool] = lambda _record: False

    def __post_init__(self) -> None:
        s = self.space.subjects
        self._fills = {s.log_stream: _Fill(), s.direct_stream: _Fill(), s.task_stream: _Fill()}
        #: records removed because their sender held more than its share
        self.removed = 0

    async def run(self) -> None:
        """One look. Of the log, which has its own gate and quota, only what is too long, and whose it is."""
        s = self.space.subjects
        for stream, fill in self._fills.items():
            info = await self.space.js.info(stream)
            state = info["state"]
            before, fill.head = fill.head, int(state["last_seq"])
            fill.used, fill.limit = int(state["bytes"]), int(info["config"]["max_bytes"])
            if before and fill.head > before:
                await self._look_at_new(stream, before + 1, fill.head)
            if stream == s.log_stream:
                await self._name_largest(stream, fill, int(state["first_seq"]))
            elif fill.used > share_of(fill.limit):
                await self._count(stream, fill, int(state["first_seq"]))

    async def _look_at_new(self, stream: str, first: int, last: int) -> None:
        start = random.randint(first, max(first, last - SAMPLED + 1))
        everything = f"{self.space.subjects.root}.>"
        reading = self.space.js.read(stream, everything, start, last, page=SAMPLED, max_bytes=SAMPLED_BYTES)
        page: list[StoredRecord] = await anext(reading, [])
        for record in page:
            what = too_long(record)
            sender = self.floods.sender_of(record.subject) if what else None
            if what and sender:
                self.floods.bar(sender, f"since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {what}")

    async def _name_largest(self, stream: str, fill: _Fill, first: int) -> None:
        """Whose a log is that fills up, by a sample: for whoever has to decide about it."""
        moment = time.monotonic()
        if fill.used < WARN_AT * fill.limit or moment - fill.counted < LOG_AGAIN:
            return
        fill.counted = moment
        used = await self.floods.usage(stream, first, fill.head)
        fill.held = tuple(sorted(((sender, each.size) for sender, each in used.items()), key=lambda item: -item[1]))

    # --- shares ---

    async def _count(self, stream: str, fill: _Fill, first: int) -> None:
        """Who holds how much; whoever holds too much loses it."""
        moment = time.monotonic()
        if moment - fill.counted < COUNT_AGAIN and fill.used < FULL * fill.limit:
            return
        fill.counted = moment
        s = self.space.subjects
        kind = "dm" if stream == s.direct_stream else "task"
        subjects = await self.space.js.counts_of(stream, f"{s.root}.{kind}.>")
        records: Counter[str] = Counter()
        for subject, count in subjects.items():
            records[sender_of(subject)] += count
        await self._read_new(stream, f"{s.root}.{kind}.>", fill, first)
        most = share_of(fill.limit)
        for sender in suspects(fill.put, records, most):
            mine = f"{s.root}.dm.*.*.{sender}" if kind == "dm" else f"{s.root}.task.*.{sender}"
            found = await self._sum(stream, kind, mine, first, fill.read, most)
            fill.put[sender] = found.size
            if found.size > most:
                left = {each: n - found.done[each] for each, n in subjects.items() if sender_of(each) == sender}
                await self._tell_targets(sender, left)
                await self._take_away(stream, kind, mine, sender, found, most)
                del fill.put[sender]
        fill.put = Counter({sender: size for sender, size in fill.put.items() if records[sender]})
        fill.held = tuple((sender, float(min(size, fill.used))) for sender, size in fill.put.most_common(16))

    async def _read_new(self, stream: str, everything: str, fill: _Fill, first: int) -> None:
        """Note whose the next records are, as far as one look reads."""
        if fill.read > fill.head:  # an older store was put back
            fill.read, fill.put = 0, Counter()
        pages = 0
        async for page in self.space.js.read(stream, everything, max(first, fill.read + 1), fill.head):
            for record in page:
                fill.put[sender_of(record.subject)] += stored_size(record)
            fill.read, pages = page[-1].seq, pages + 1
            if pages >= PAGES_OF_NEW:
                return
        fill.read = fill.head

    async def _sum(self, stream: str, kind: str, mine: str, first: int, last: int, most: int) -> _Sum:
        """What waits of one agent, exactly, or until it is more than it may be."""
        found, floors, pages = _Sum(), dict[str, int](), 0
        async for page in self.space.js.read(stream, mine, first, last):
            for record in page:
                if record.subject not in floors:
                    floors[record.subject] = await self._done_through(stream, kind, record.subject)
                if record.seq <= floors[record.subject] or self.has_ended(record):
                    found.done[record.subject] += 1
                    continue
                found.size += stored_size(record)
                if len(found.waiting) < MOST_TOLD:
                    found.waiting.append(record)
            pages += 1
            if found.size > most or pages >= PAGES_OF_ONE:
                break
        return found

    async def _done_through(self, stream: str, kind: str, subject: str) -> int:
        """The last sequence up to which the target of a subject is done with what was sent there."""
        parsed = self.space.subjects.parse(subject)
        if isinstance(parsed, Direct):
            whose = parsed.target if self.space.active_access(parsed.target) is not None else None
        else:
            whose = parsed.role if isinstance(parsed, Task) else None
        if whose is None:
            return 0
        return await self.space.ack_floor(stream, f"{kind}_{whose}")

    async def _take_away(self, stream: str, kind: str, mine: str, sender: str, found: _Sum, most: int) -> None:
        what = "direct messages" if kind == "dm" else "tasks"
        why = f"more than {most / 1e6:,.0f} MB of {what}, which are its share; they were removed"
        self.floods.withhold(sender, f"since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {why}")
        if kind == "dm":
            await self.receipts.tell_senders(found.waiting, ReceiptStage.UNDELIVERABLE)
        removed = await self.space.js.purge(stream, subject_filter=mine, below=self._fills[stream].head + 1)
        self.removed += removed
        log.error("%s held %s: removed %d records of %s", sender, why, removed, stream)

    async def _tell_targets(self, sender: str, subjects: Mapping[str, int]) -> None:
        """Note for agents what they will not get: their row of the roster says that there is something to hear."""
        at = datetime.now(UTC)
        whose = self.space.name_of(sender) or sender
        removed: list[Removed] = []
        for subject, count in subjects.items():
            parsed = self.space.subjects.parse(subject)
            if count > 0 and isinstance(parsed, Direct) and self.space.active_access(parsed.target) is not None:
                text = f"{count} direct messages of {whose} were removed: it held more than its share of the mail"
                cause = f"share of {sender}, {at.isoformat()}, {parsed.target}"
                removed.append(Removed(parsed.target, text, count, cause))
        await self.store.note_removed(removed)

    # --- health ---

    def problems(self) -> list[str]:
        """Shared streams that are full, and whose they are."""
        return [
            f"{stream} is full ({fill.used / fill.limit:.0%}): what is sent there is refused{self._whose(fill)}"
            for stream, fill in self._fills.items()
            if stream != self.space.subjects.log_stream and fill.used >= FULL * fill.limit
        ]

    def whose_log(self) -> str:
        """Whose most of the log is, for the sentence that says it is full."""
        return self._whose(self._fills[self.space.subjects.log_stream])

    def _whose(self, fill: _Fill) -> str:
        named = []
        for sender, size in fill.held[:3]:
            access = self.space.access(sender)
            named.append(f"{access.name if access else sender} {size / max(1, fill.used):.0%}")
        return f"; most of it is of {', '.join(named)}" if named else ""
