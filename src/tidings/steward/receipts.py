"""The memory of receipts: what became of direct messages, written to AUD, told to whoever waits for it.

    confirmed -> delivered -> read          or, said by the steward:  expired, undeliverable, void

A receipt is written to AUD before it is answered, so a reader that hears nothing tells again; once per (reader,
sender, id, stage) as far as memory goes. A wait holds no place among the requests being worked on, is bounded in
number, and is always answered. What AUD says is read back when the steward starts, and its sequence is the cursor of
those who watch. `ReceiptHandlers` decides who may
say and ask what.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET

from tidings.contract.core import Caller
from tidings.contract.mail import (
    MAX_RECEIPTS,
    RECEIPT_WAIT,
    ReaderReceipt,
    ReceiptRow,
    ReportReceiptsAnswer,
    ReportReceiptsRequest,
    WaitForReceiptAnswer,
    WaitForReceiptRequest,
    WatchReceiptsAnswer,
    WatchReceiptsRequest,
)
from tidings.errors import DeniedError, TidingsError, UsageError
from tidings.nats.errors import ApiError
from tidings.nats.jetstream import StoredRecord
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext, now
from tidings.steward.fair_queue import ConcurrencyLimit
from tidings.steward.requests import Idle
from tidings.wire.message import check_message_id
from tidings.wire.names import check_agent_id
from tidings.wire.records import moment, seconds_of
from tidings.wire.states import ReceiptStage, has_reached

#: in place of a reader, in the key of a channel message that no reader shows
NOBODY = "void"
KEPT = 50_000
#: records looked up at the same time for one request
AT_ONCE = 32
READ_BACK = 20_000
MOST_WAITS, MOST_WAITS_EACH, MOST_WATCHES_EACH = 2_000, 32, 4
#: batches of one reader being looked up at the same time: each may cost hundreds of reads
MOST_TELLING, MOST_TELLING_AT_ONCE = 4, 1_000
#: newest receipts kept for each sender that watches or may watch, and for how many senders
NEWS_EACH, NEWS_SENDERS = 256, 1_024
log = logging.getLogger(__name__)

Key = tuple[str, str, str]


@dataclass(slots=True)
class Life:
    """What is known of one direct message."""

    seq: int
    stages: dict[ReceiptStage, str] = field(default_factory=dict)
    #: why no reader shows it
    why: str = ""
    #: of a channel message, of which nothing but that it is void is ever known
    channel: str | None = None

    @property
    def stage(self) -> ReceiptStage:
        return max(self.stages, key=lambda stage: stage.rank, default=ReceiptStage.CONFIRMED)


@dataclass(frozen=True, slots=True)
class ReceiptNews:
    """One stage one message of a sender reached. `n` is its sequence in AUD; 0 if AUD had no room."""

    n: int
    key: Key
    seq: int
    stage: ReceiptStage
    at: str
    why: str = ""
    channel: str | None = None


class ReceiptStore:
    """The memory of receipts, over AUD."""

    def __init__(self, space: SpaceContext, idle: Idle) -> None:
        self.space = space
        self._idle = idle
        self.lives: OrderedDict[Key, Life] = OrderedDict()
        self.by_seq: OrderedDict[int, Key] = OrderedDict()
        refusal = "too many batches of receipts at once: wait for the answers, then tell the rest"
        #: batches of a reader's being looked up. An endpoint has one under way; who has many is refused
        self.telling = ConcurrencyLimit(MOST_TELLING_AT_ONCE, MOST_TELLING, refusal)
        self.waits: Counter[str] = Counter()
        self.unrecorded = 0
        self.newest = 0
        self._news: OrderedDict[str, deque[ReceiptNews]] = OrderedDict()
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
            s = self.space.subjects
            last = await self.space.head(s.audit_stream)
            start = max(1, last - READ_BACK)
            async for page in self.space.js.read(s.audit_stream, s.audit("receipt") + ".*", start, last):
                for record in page:
                    self._remember_stored(record)
            self._read_back = True

    def _remember_stored(self, record: StoredRecord) -> None:
        with suppress(ValueError, KeyError, TypeError):  # boundary: written by another version of us
            said = json.loads(record.payload)
            reader = record.subject.rpartition(".")[2]
            key = (said["of"]["sender"], said["of"]["id"], reader)
            stage, at = ReceiptStage(said["stage"]), moment(seconds_of(said["at"]))
            void = str(said.get("why", "")), said.get("channel")
            self.note(ReceiptNews(record.seq, key, said["seq"], stage, at, *void))

    def note(self, said: ReceiptNews) -> None:
        key = said.key
        life = self._keep(key, said.seq, why=said.why, channel=said.channel)
        if said.stage not in life.stages:
            life.why = life.why or said.why
            self._spread(said)
        life.stages.setdefault(said.stage, said.at)
        for event in self._changed.get(key, ()):
            event.set()

    def _keep(self, key: Key, seq: int, *, why: str = "", channel: str | None = None) -> Life:
        """Returns what is known of a message, as the newest. The oldest is forgotten beyond KEPT."""
        life = self.lives.setdefault(key, Life(seq, why=why, channel=channel))
        self.lives.move_to_end(key)
        if channel is None:
            self.by_seq[seq] = key
        for memory in (self.lives, self.by_seq):
            while len(memory) > KEPT:
                memory.popitem(last=False)
        return life

    def _spread(self, said: ReceiptNews) -> None:
        self.newest = max(self.newest + 1, said.n)
        sender = said.key[0]
        news = self._news.setdefault(sender, deque(maxlen=NEWS_EACH))
        news.append(replace(said, n=self.newest))
        self._news.move_to_end(sender)
        while len(self._news) > NEWS_SENDERS:
            self._news.popitem(last=False)
        for event in self._watching.get(sender, ()):
            event.set()

    def news_since(self, sender: str, n: int) -> list[ReceiptNews]:
        """What the newest receipts of a sender's messages say that is newer than `n`."""
        return [each for each in self._news.get(sender, ()) if each.n > n]

    def stage_of(self, key: Key) -> ReceiptStage | None:
        life = self.lives.get(key)
        return life.stage if life else None

    # --- writing ---

    async def write(self, told: list[tuple[Key, int, ReceiptStage]]) -> int:
        """Record what is new in AUD, all at once, and remember it. Answers how much was new."""
        await self.ready()
        fresh = [each for each in dict.fromkeys(told) if not self._knows(each)]
        at = now()
        await asyncio.gather(*(self._record(key, seq, stage, at) for key, seq, stage in fresh))
        return len(fresh)

    def _knows(self, told: tuple[Key, int, ReceiptStage]) -> bool:
        life = self.lives.get(told[0])
        return life is not None and told[2] in life.stages

    async def tell_ended(
        self, key: Key, seq: int, stage: ReceiptStage, why: str, *, channel: str | None = None
    ) -> None:
        """Say to a sender why no reader shows a message of its own, or how its life ended in another space."""
        await self.ready()
        if not self._knows((key, seq, stage)):
            await self._record(key, seq, stage, now(), why=why, channel=channel)

    async def _record(
        self, key: Key, seq: int, stage: ReceiptStage, at: str, *, why: str = "", channel: str | None = None
    ) -> None:
        sender, mid, reader = key
        body: dict[str, Any] = {"of": {"sender": sender, "id": mid}, "stage": stage, "seq": seq, "at": at}
        if why:
            body |= {"why": why, "channel": channel}
        try:
            subject = self.space.subjects.audit("receipt", reader)
            n = await self.space.js.publish(subject, json.dumps(body).encode())
        except ApiError as error:
            if not error.is_full:
                raise
            n = 0
            self.unrecorded += 1  # AUD is full: the sender is told while we live, and health counts it
        self.note(ReceiptNews(n, key, seq, stage, at, why, channel))

    # --- waiting ---

    async def wait(self, key: Key, stage: ReceiptStage, seconds: float) -> ReceiptStage | None:
        """Until the message is at `stage` or a final one, or time is over; the stage it is at then."""
        await self._until(lambda: has_reached(self.stage_of(key), stage), self._changed, key, key[0], seconds)
        return self.stage_of(key)

    async def watch(self, sender: str, n: int, seconds: float) -> tuple[list[ReceiptNews], bool]:
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
                async with asyncio.timeout(seconds), self._idle():
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

    async def addressed(self, seq: int, *, anew: bool = False) -> Key | None:
        """(sender, id, target) of the direct message at a sequence, from memory or from the stream; `anew`: not from
        memory."""
        if seq in self.by_seq and not anew:
            return self.by_seq[seq]
        stored = await self.space.js.at(self.space.subjects.direct_stream, seq, patient=False)
        return self.key_of(stored) if stored else None

    def remember(self, stored: StoredRecord) -> None:
        """Notes a record that is about to be removed: it was stored, and a later receipt for it still counts."""
        key = self.key_of(stored)
        if key is not None:
            self._keep(key, stored.seq)

    def key_of(self, stored: StoredRecord) -> Key | None:
        """What a record says, if it says it properly."""
        opened = self.space.received(stored)
        if opened is None or opened.kind != "dm":
            return None
        return opened.sender, opened.message.id, opened.destination

    async def tell_senders(self, records: list[StoredRecord], stage: ReceiptStage) -> None:
        """Say of each of these that it ended unread. Before they are removed, so that it is said at least once."""
        told = []
        for record in records:
            key = self.key_of(record)
            if key is not None and self.stage_of(key) != ReceiptStage.READ:
                told.append((key, record.seq, stage))
        try:
            await self.write(told)
        except TidingsError as error:
            log.warning("%d senders could not be told %s yet: %s", len(told), stage, error)
            raise


class ReceiptHandlers:
    """`ctl.receipt`: readers tell, senders ask or watch.

    A receipt counts only if the record it speaks of is addressed to whoever sends it. Only the sender of a message can
    wait for its receipts, or watch them. Every request is answered: at once if there is no room to wait.
    """

    def __init__(self, space: SpaceContext, receipts: ReceiptStore) -> None:
        self.space = space
        self.receipts = receipts

    @handler(ReportReceiptsRequest)
    async def report(self, caller: Caller, request: ReportReceiptsRequest) -> ReportReceiptsAnswer:
        """Refuses receipts of messages that are not addressed to the caller.

        A receipt that is reported late has `sender` and `id`: a message whose record has gone is known by them if a
        receipt of it came before, and a sequence that was used again for another message is not taken for it.
        """
        self.space.access_of(caller.id)
        single = request.seq is not None
        reported = _reported(request)
        await self.receipts.ready()
        accepted: list[tuple[Key, int, ReceiptStage]] = []
        refused: list[int] = []
        async with self.receipts.telling.turn(caller.id):
            keys = await self._addressed({each.seq for each in reported if self._known(caller, each) is None})
        for each in reported:
            known = self._known(caller, each)
            key = known or keys.get(each.seq)
            named = (each.sender, each.id)
            if key is None or key[2] != caller.id or (each.sender is not None and key[:2] != named):
                refused.append(each.seq)
            else:
                seq = self.receipts.lives[key].seq if known else each.seq
                accepted.append((key, seq, ReceiptStage(each.stage)))
        if single and refused:
            raise DeniedError(f"the direct message {refused[0]} is not addressed to you, or is gone")
        return ReportReceiptsAnswer(new=await self.receipts.write(accepted), refused=tuple(refused))

    def _known(self, caller: Caller, receipt: ReaderReceipt) -> Key | None:
        """Returns the key of a message that an earlier receipt named."""
        if receipt.sender is None or receipt.id is None:
            return None
        key = (receipt.sender, receipt.id, caller.id)
        return key if key in self.receipts.lives else None

    async def _addressed(self, seqs: set[int]) -> dict[int, Key | None]:
        """To whom each of these is addressed, a few reads at a time: a batch must not take a round trip for each."""
        found: dict[int, Key | None] = {}
        wanted = sorted(seqs)
        for start in range(0, len(wanted), AT_ONCE):
            part = wanted[start : start + AT_ONCE]
            found |= zip(part, await asyncio.gather(*map(self.receipts.addressed, part)), strict=True)
        return found

    @handler(WaitForReceiptRequest)
    async def wait(self, caller: Caller, request: WaitForReceiptRequest) -> WaitForReceiptAnswer:
        """The key begins with the caller, so that agents see only receipts of their own messages."""
        self.space.access_of(caller.id)
        key = (caller.id, check_message_id(request.id), check_agent_id(request.to))
        stage = ReceiptStage(request.stage)
        receipts = self.receipts
        await receipts.ready()
        found = receipts.stage_of(key) or await self._stored_stage(request.seq, key)
        if not has_reached(found, stage):
            found = await receipts.wait(key, stage, _seconds(request)) or found
        life = receipts.lives.get(key)
        stages, why = (dict(life.stages), life.why) if life else ({}, "")
        return WaitForReceiptAnswer(stage=found, reached=has_reached(found, stage), stages=stages, why=why)

    async def _stored_stage(self, seq: int | None, key: Key) -> ReceiptStage:
        """`confirmed` if the record is where the caller says; without a place nothing is searched for."""
        return ReceiptStage.CONFIRMED if seq and await self.receipts.addressed(seq) == key else ReceiptStage.UNKNOWN

    @handler(WatchReceiptsRequest)
    async def watch(self, caller: Caller, request: WatchReceiptsRequest) -> WatchReceiptsAnswer:
        self.space.access_of(caller.id)
        receipts = self.receipts
        await receipts.ready()
        # a larger cursor was counted by another steward while AUD was full
        since = request.since if request.since <= receipts.newest else 0
        news, waited = await receipts.watch(caller.id, since, _seconds(request))
        rows = tuple(
            ReceiptRow(
                id=each.key[1],
                to=each.key[2],
                seq=each.seq,
                stage=each.stage,
                at=each.at,
                why=each.why,
                channel=each.channel if each.why else UNSET,
            )
            for each in news
        )
        return WatchReceiptsAnswer(rows, cursor=max(since, receipts.newest if not news else news[-1].n), waited=waited)


def _reported(request: ReportReceiptsRequest) -> tuple[ReaderReceipt, ...]:
    """Returns the receipts of a request. Raises UsageError if it has none, or one that names its message in part."""
    reported = request.receipts
    if request.seq is not None:
        if request.stage is None:
            raise UsageError("receipt put: missing field `stage`")
        reported = (ReaderReceipt(request.seq, request.stage, request.sender, request.id),)
    if not reported:
        raise UsageError(f"receipt put needs `receipts` (1 to {MAX_RECEIPTS}), or `seq` and `stage` of one")
    if any((each.sender is None) != (each.id is None) for each in reported):
        raise UsageError("receipt put: a receipt that names its message has both `sender` and `id`")
    return reported


def _seconds(request: WaitForReceiptRequest | WatchReceiptsRequest) -> float:
    return min(request.wait if request.timeout is None else request.timeout, RECEIPT_WAIT)
