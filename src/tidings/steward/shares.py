"""What each agent holds of the streams all share: direct messages and tasks. Whoever holds too much loses it.

The broker bounds these streams by bytes for all together, and by records per pair or queue; neither is a bound for one
agent, who may write to any number of targets. So the fill of both is looked at four times a second, which costs two
questions. Only when a stream holds more than one agent may is it counted whose that is: records per sender exactly,
their size by a sample. Above its share an agent's posting is withheld and what it had put there is removed; it is told,
by receipts and by the reason, and so are those it was for.

At every look some of what is new is read too: a message id or a subject that is longer than any program of ours makes
costs the broker memory for as long as it is remembered, and the credential of whoever sent it.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tidings.broker.jetstream import StoredRecord
from tidings.steward.gate import WARN_AT
from tidings.steward.receipts import tell_senders
from tidings.steward.retention import stored_size
from tidings.steward.services import name_of
from tidings.steward.task_store import MSG_ID
from tidings.wire.headers import values_of
from tidings.wire.subjects import Direct

if TYPE_CHECKING:
    from tidings.steward.service import Steward

#: of a stream, for one agent; never less than so many bytes, unless the whole stream is not much more
SHARE, LEAST_SHARE, MOST_OF_SMALL = 1 / 16, 16 * 1024 * 1024, 0.75
FULL = 0.95
#: longer than anything we spell
LONGEST_ID, LONGEST_SUBJECT = 128, 512
SAMPLED, SAMPLED_BYTES = 8, 128 * 1024
POINTS = 4
#: what a sender hears of one by one when all it had put into the mailboxes is removed
MOST_TOLD, MOST_TARGETS = 200, 1_000
COUNT_AGAIN, LOG_AGAIN = 2.0, 10.0
log = logging.getLogger(__name__)


def share_of(limit: int) -> int:
    """Bytes of a stream with this limit that one agent may hold."""
    return int(max(SHARE * limit, min(LEAST_SHARE, MOST_OF_SMALL * limit)))


def too_long(record: StoredRecord) -> str | None:
    """What of a record is longer than any program of ours makes it, in words."""
    if len(record.subject) > LONGEST_SUBJECT:
        return f"a subject of {len(record.subject):,} bytes, where {LONGEST_SUBJECT} are the most"
    ids = values_of(record.own_fields() or (), MSG_ID)
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


class Shares:
    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        s = steward.subjects
        self._fills = {s.log_stream: _Fill(), s.direct_stream: _Fill(), s.task_stream: _Fill()}
        #: records removed because their sender held more than its share
        self.removed = 0
        #: (target, what it is told, how many, a name of this loss), the newest; another steward does not know them
        self._told: deque[tuple[str, str, int, str]] = deque(maxlen=MOST_TARGETS)

    async def run(self) -> None:
        """One look. Of the log, which has its own gate and quota, only what is too long, and whose it is."""
        s = self.steward.subjects
        for stream, fill in self._fills.items():
            info = await self.steward.js.info(stream)
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
        for record in await self._page(stream, f"{self.steward.subjects.root}.>", start, last):
            what = too_long(record)
            sender = self.steward.floods.sender_of(record.subject) if what else None
            if what and sender:
                self.steward.floods.bar(sender, f"since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {what}")

    async def _page(self, stream: str, subject_filter: str, start: int, last: int) -> list[StoredRecord]:
        reading = self.steward.js.read(stream, subject_filter, start, last, page=SAMPLED, max_bytes=SAMPLED_BYTES)
        return await anext(reading, [])

    async def _name_largest(self, stream: str, fill: _Fill, first: int) -> None:
        """Whose a log is that fills up, by a sample: for whoever has to decide about it."""
        moment = time.monotonic()
        if fill.used < WARN_AT * fill.limit or moment - fill.counted < LOG_AGAIN:
            return
        fill.counted = moment
        used = await self.steward.floods.usage(stream, first, fill.head)
        fill.held = tuple(sorted(((sender, each.size) for sender, each in used.items()), key=lambda item: -item[1]))

    # --- shares ---

    async def _count(self, stream: str, fill: _Fill, first: int) -> None:
        """Who holds how much; whoever holds too much loses it."""
        moment = time.monotonic()
        if moment - fill.counted < COUNT_AGAIN and fill.used < FULL * fill.limit:
            return
        fill.counted = moment
        s = self.steward.subjects
        kind = "dm" if stream == s.direct_stream else "task"
        records: Counter[str] = Counter()
        subjects = await self.steward.js.counts_of(stream, f"{s.root}.{kind}.>")
        for subject, count in subjects.items():
            records[subject.rpartition(".")[2]] += count
        most = share_of(fill.limit)
        held: dict[str, float] = {}
        for sender, count in records.most_common(16):
            mine = f"{s.root}.dm.*.*.{sender}" if kind == "dm" else f"{s.root}.task.*.{sender}"
            held[sender] = count * await self._mean_size(stream, mine, first, fill.head)
            if held[sender] > most:
                self._tell_targets(sender, {each: n for each, n in subjects.items() if each.endswith(f".{sender}")})
                await self._take_away(stream, kind, mine, sender, held[sender], most)
        fill.held = tuple(sorted(held.items(), key=lambda item: -item[1]))

    async def _mean_size(self, stream: str, subject_filter: str, first: int, last: int) -> float:
        sizes: list[int] = []
        for _ in range(POINTS):
            page = await self._page(stream, subject_filter, random.randint(first, max(first, last)), last)
            page = page or await self._page(stream, subject_filter, first, last)
            sizes += map(stored_size, page)
        return sum(sizes) / len(sizes) if sizes else 0.0

    async def _take_away(self, stream: str, kind: str, mine: str, sender: str, size: float, most: int) -> None:
        what = "direct messages" if kind == "dm" else "tasks"
        why = f"{size / 1e6:,.0f} MB of {what}, where {most / 1e6:,.0f} MB are its share; they were removed"
        self.steward.floods.withhold(sender, f"since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {why}")
        if kind == "dm":
            going: list[StoredRecord] = await anext(self.steward.js.read(stream, mine, 1, 2**62, page=MOST_TOLD), [])
            await tell_senders(self.steward, going, "undeliverable")
        removed = await self.steward.js.purge(stream, subject_filter=mine)
        self.removed += removed
        log.error("%s held %s: removed %d records of %s", sender, why, removed, stream)

    def _tell_targets(self, sender: str, subjects: Mapping[str, int]) -> None:
        """Note for agents, and for the sender, what they will not get: said when they next ask who is here."""
        at = datetime.now(UTC)
        whose = name_of(self.steward, sender) or sender
        for subject, count in subjects.items():
            parsed = self.steward.subjects.parse(subject)
            if isinstance(parsed, Direct) and self.steward.active_access(parsed.target) is not None:
                text = f"{count} direct messages of {whose} were removed: it held more than its share of the mail"
                self._told.append((parsed.target, text, count, f"share of {sender}, {at.isoformat()}, {parsed.target}"))

    def told_to(self, agent: str) -> list[dict[str, Any]]:
        """What was removed of what an agent was to get, in the words of a notice."""
        nowhere = {"channel": None, "first": None, "last": None}
        return [
            {"text": text, "cause": cause, "count": count, **nowhere}
            for target, text, count, cause in self._told
            if target == agent
        ]

    # --- health ---

    def problems(self) -> list[str]:
        """Shared streams that are full, and whose they are."""
        return [
            f"{stream} is full ({fill.used / fill.limit:.0%}): what is sent there is refused{self._whose(fill)}"
            for stream, fill in self._fills.items()
            if stream != self.steward.subjects.log_stream and fill.used >= FULL * fill.limit
        ]

    def whose_log(self) -> str:
        """Whose most of the log is, for the sentence that says it is full."""
        return self._whose(self._fills[self.steward.subjects.log_stream])

    def _whose(self, fill: _Fill) -> str:
        named = []
        for sender, size in fill.held[:3]:
            access = self.steward.table.access_at(sender, self.steward.position)
            named.append(f"{access.name if access else sender} {size / max(1, fill.used):.0%}")
        return f"; most of it is of {', '.join(named)}" if named else ""
