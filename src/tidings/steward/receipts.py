"""The memory of receipts: what became of direct messages, written to AUD, told to whoever waits for it.

    confirmed -> delivered -> read          or, said by the steward:  expired, undeliverable, void

A receipt is written to AUD before it is answered, so a reader that hears nothing tells again; once per (reader,
sender, id, stage) as far as memory goes. A wait holds no place among the requests being worked on, is bounded in
number, and is always answered. What AUD says is read back when the steward starts, and its sequence is the cursor of
those who watch. Who may say and ask what is in `receipt_services.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tidings.broker.answers import NO_ROOM, ApiError
from tidings.broker.jetstream import StoredRecord
from tidings.errors import ConflictError, TidingsError
from tidings.steward.agent_handlers import now
from tidings.wire.envelope import Received, open_record

if TYPE_CHECKING:
    from tidings.steward.service import Steward

#: how far each stage is; the last three end a life without its being read
RANK = {"unknown": -1, "confirmed": 0, "delivered": 1, "read": 2, "expired": 3, "undeliverable": 3, "void": 4}
#: in place of a reader, in the key of a channel message that no reader shows
NOBODY = "void"
KEPT = 50_000
READ_BACK = 20_000
MOST_WAITS, MOST_WAITS_EACH, MOST_WATCHES_EACH = 2_000, 32, 4
#: batches of one reader being looked up at the same time: each may cost hundreds of reads
MOST_TELLING = 4
#: newest receipts kept for each sender that watches or may watch, and for how many senders
NEWS_EACH, NEWS_SENDERS = 256, 1_024
log = logging.getLogger(__name__)

Key = tuple[str, str, str]


@dataclass(slots=True)
class Life:
    """What is known of one direct message."""

    seq: int
    stages: dict[str, str] = field(default_factory=dict)
    #: why no reader shows it
    why: str = ""
    #: of a channel message, of which nothing but that it is void is ever known
    channel: str | None = None

    @property
    def stage(self) -> str:
        return max(self.stages, key=lambda stage: RANK[stage], default="confirmed")


@dataclass(frozen=True, slots=True)
class News:
    """One stage one message of a sender reached. `n` is its sequence in AUD."""

    n: int
    key: Key
    seq: int
    stage: str
    at: str
    why: str = ""
    channel: str | None = None


class Receipts:
    """The memory of receipts, over AUD."""

    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        self.lives: OrderedDict[Key, Life] = OrderedDict()
        self.by_seq: OrderedDict[int, Key] = OrderedDict()
        self.waits: Counter[str] = Counter()
        self.unrecorded = 0
        self.newest = 0
        self._telling: Counter[str] = Counter()
        self._news: OrderedDict[str, deque[News]] = OrderedDict()
        self._watching: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._changed: defaultdict[Key, set[asyncio.Event]] = defaultdict(set)
        self._reading = asyncio.Lock()
        self._read_back = False
        self._closed = False

    # --- memory ---

    async def ready(self) -> None:
        """Read back what AUD has, once."""
        async with self._reading:
            if self._read_back:
                return
            s = self.steward.subjects
            last = int((await self.steward.js.info(s.audit_stream))["state"]["last_seq"])
            start = max(1, last - READ_BACK)
            async for page in self.steward.js.read(s.audit_stream, s.audit("receipt") + ".*", start, last):
                for record in page:
                    self._remember_stored(record)
            self._read_back = True

    def _remember_stored(self, record: StoredRecord) -> None:
        with suppress(ValueError, KeyError, TypeError):  # boundary: written by another version of us
            said = json.loads(record.payload)
            reader = record.subject.rpartition(".")[2]
            key = (said["of"]["sender"], said["of"]["id"], reader)
            void = {"why": str(said.get("why", "")), "channel": said.get("channel")}
            self.note(key, said["seq"], said["stage"], said["at"], record.seq, **void)

    def note(
        self,
        key: Key,
        seq: int,
        stage: str,
        at: str,
        n: int | None = None,
        *,
        why: str = "",
        channel: str | None = None,
    ) -> None:
        """`n`: where AUD has it; None if AUD had no room."""
        life = self.lives.setdefault(key, Life(seq, why=why, channel=channel))
        if stage not in life.stages:
            life.why = life.why or why
            self._spread(News(0, key, seq, stage, at, why, channel), n)
        life.stages.setdefault(stage, at)
        self.lives.move_to_end(key)
        if channel is None:
            self.by_seq[seq] = key
        while len(self.lives) > KEPT:
            self.lives.popitem(last=False)
        while len(self.by_seq) > KEPT:
            self.by_seq.popitem(last=False)
        for event in self._changed.get(key, ()):
            event.set()

    def _spread(self, said: News, n: int | None) -> None:
        self.newest = max(self.newest + 1, n or 0)
        key = said.key
        news = self._news.setdefault(key[0], deque(maxlen=NEWS_EACH))
        news.append(replace(said, n=self.newest))
        self._news.move_to_end(key[0])
        while len(self._news) > NEWS_SENDERS:
            self._news.popitem(last=False)
        for event in self._watching.get(key[0], ()):
            event.set()

    def news_since(self, sender: str, n: int) -> list[News]:
        """What the newest receipts of a sender's messages say that is newer than `n`."""
        return [each for each in self._news.get(sender, ()) if each.n > n]

    def stage_of(self, key: Key) -> str | None:
        life = self.lives.get(key)
        return life.stage if life else None

    # --- writing ---

    @contextmanager
    def telling(self, reader: str) -> Iterator[None]:
        """A batch of a reader's, being looked up. An endpoint has one under way; who has many is refused."""
        if self._telling[reader] >= MOST_TELLING:
            raise ConflictError("too many batches of receipts at once: wait for the answers, then tell the rest")
        self._telling[reader] += 1
        try:
            yield
        finally:
            self._telling[reader] -= 1
            if not self._telling[reader]:
                del self._telling[reader]

    async def write(self, told: list[tuple[Key, int, str]]) -> int:
        """Record what is new in AUD, all at once, and remember it. Answers how much was new."""
        await self.ready()
        fresh = [each for each in dict.fromkeys(told) if not self._knows(each)]
        at = now()
        await asyncio.gather(*(self._record(key, seq, stage, at) for key, seq, stage in fresh))
        return len(fresh)

    def _knows(self, told: tuple[Key, int, str]) -> bool:
        life = self.lives.get(told[0])
        return life is not None and told[2] in life.stages

    async def tell_void(
        self, sender: str, mid: str, seq: int, why: str, *, channel: str | None = None, target: str | None = None
    ) -> None:
        """Say to a sender that no reader shows a message of its own, to a channel or to a target."""
        await self.ready()
        key = (sender, mid, target or NOBODY)
        if not self._knows((key, seq, "void")):
            await self._record(key, seq, "void", now(), why=why, channel=channel)

    async def _record(
        self, key: Key, seq: int, stage: str, at: str, *, why: str = "", channel: str | None = None
    ) -> None:
        sender, mid, reader = key
        body: dict[str, Any] = {"of": {"sender": sender, "id": mid}, "stage": stage, "seq": seq, "at": at}
        if why:
            body |= {"why": why, "channel": channel}
        n: int | None
        try:
            subject = self.steward.subjects.audit("receipt", reader)
            n = await self.steward.js.publish(subject, json.dumps(body).encode())
        except ApiError as error:
            if error.err_code != NO_ROOM:
                raise
            n = None
            self.unrecorded += 1  # AUD is full: the sender is told while we live, and health counts it
        self.note(key, seq, stage, at, n, why=why, channel=channel)

    # --- waiting ---

    async def wait(self, key: Key, stage: str, seconds: float) -> str | None:
        """Until the message is at `stage` or beyond, or time is over; the stage it is at then."""
        await self._until(lambda: reached(self.stage_of(key), stage), self._changed, key, key[0], seconds)
        return self.stage_of(key)

    async def watch(self, sender: str, n: int, seconds: float) -> tuple[list[News], bool]:
        """What is newer than `n`, waiting for it; and whether there was room to wait."""
        waited = await self._until(
            lambda: bool(self.news_since(sender, n)), self._watching, sender, sender, seconds, MOST_WATCHES_EACH
        )
        return self.news_since(sender, n), waited

    async def _until(
        self,
        is_so: Callable[[], bool],
        events: defaultdict[Any, set[asyncio.Event]],
        key: Any,
        sender: str,
        seconds: float,
        most: int = MOST_WAITS_EACH,
    ) -> bool:
        """Wait for something to become so. False if too many wait already: then nobody waited."""
        if is_so():
            return True
        if self._closed or self.waits[sender] >= MOST_WAITS_EACH or self.waits.total() >= MOST_WAITS:
            return False
        if len(events.get(key, ())) >= most:
            return False
        self.waits[sender] += 1
        changed = asyncio.Event()
        events[key].add(changed)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds), self.steward.answering.idle():
                    while not self._closed and not is_so():
                        await changed.wait()
                        changed.clear()
        finally:
            self.waits[sender] -= 1
            events[key].discard(changed)
            if not events[key]:
                del events[key]
            if not self.waits[sender]:
                del self.waits[sender]
        return True

    def close(self) -> None:
        """Wake everybody who waits: the steward is going."""
        self._closed = True
        for waiting in (*self._changed.values(), *self._watching.values()):
            for event in waiting:
                event.set()

    # --- records ---

    async def addressed(self, seq: int) -> Key | None:
        """(sender, id, target) of the direct message at a sequence, from memory or from the stream."""
        if seq in self.by_seq:
            return self.by_seq[seq]
        stored = await self.steward.js.at(self.steward.subjects.direct_stream, seq)
        return self.key_of(stored) if stored else None

    def remember(self, stored: StoredRecord) -> None:
        """A record is about to go; what is said of it afterwards still counts."""
        key = self.key_of(stored)
        if key is not None:
            self.by_seq[stored.seq] = key

    def key_of(self, stored: StoredRecord) -> Key | None:
        """What a record says, if it says it properly."""
        s = self.steward
        fields = stored.own_fields()
        if fields is None:
            return None
        opened = open_record(s.subjects, s.info.id, stored.subject, fields, stored.payload)
        if not isinstance(opened, Received) or opened.kind != "dm":
            return None
        return opened.sender, opened.message.id, opened.destination


def reached(current: str | None, wanted: str) -> bool:
    return current is not None and RANK[current] >= RANK[wanted]


async def tell_senders(steward: Steward, records: list[StoredRecord], stage: str) -> None:
    """Say for each of these records that it ended unread. Before they are removed, so that it is said at least once."""
    told = []
    for record in records:
        key = steward.receipts.key_of(record)
        if key is not None and steward.receipts.stage_of(key) != "read":
            told.append((key, record.seq, stage))
    try:
        await steward.receipts.write(told)
    except TidingsError as error:
        log.warning("%d senders could not be told %s yet: %s", len(told), stage, error)
        raise
