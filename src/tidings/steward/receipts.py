"""Receipts: what became of direct messages, told by their readers, asked by their senders.

    confirmed -> delivered -> read          or, said by the steward:  expired, undeliverable

A receipt counts only if the record it speaks of is addressed to whoever sends it. It is written to AUD before it is
answered, so a reader that hears nothing tells again; once per (reader, sender, id, stage) as far as memory goes. Only
the sender of a message can wait for its receipts. A wait holds no place among the requests being worked on, is
bounded in number, and is always answered. What AUD says is read back when the steward starts.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tidings.broker.jetstream import NO_ROOM, ApiError, StoredRecord
from tidings.errors import DeniedError, TidingsError, UsageError
from tidings.steward.requests import Request
from tidings.steward.services import Answer, Handler, access_of, now
from tidings.wire.envelope import Received, open_record
from tidings.wire.ids import id_time_ms, is_message_id
from tidings.wire.names import check_agent_id

if TYPE_CHECKING:
    from tidings.steward.service import Steward

#: how far each stage is; the last two end a life without its being read
RANK = {"unknown": -1, "confirmed": 0, "delivered": 1, "read": 2, "expired": 3, "undeliverable": 3}
READER_STAGES = ("delivered", "read")
KEPT = 50_000
READ_BACK = 20_000
MOST_RECEIPTS = 512
MOST_WAITS, MOST_WAITS_EACH = 2_000, 32
LONGEST_WAIT = 25.0
#: how far from the time in its id a message is looked for, and how many bytes are looked at
NEAR = timedelta(minutes=10)
MOST_LOOKED_AT = 8 * 1024 * 1024
log = logging.getLogger(__name__)

Key = tuple[str, str, str]


@dataclass(slots=True)
class Life:
    """What is known of one direct message."""

    seq: int
    stages: dict[str, str] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        return max(self.stages, key=lambda stage: RANK[stage], default="confirmed")


class Receipts:
    """The memory of receipts, over AUD."""

    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        self.lives: OrderedDict[Key, Life] = OrderedDict()
        self.by_seq: OrderedDict[int, Key] = OrderedDict()
        self.waits: Counter[str] = Counter()
        self.unrecorded = 0
        #: one search of a stream at a time: whoever asks for many waits for itself
        self.searching = asyncio.Lock()
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
            self.note((said["of"]["sender"], said["of"]["id"], reader), said["seq"], said["stage"], said["at"])

    def note(self, key: Key, seq: int, stage: str, at: str) -> None:
        life = self.lives.setdefault(key, Life(seq))
        life.stages.setdefault(stage, at)
        self.lives.move_to_end(key)
        self.by_seq[seq] = key
        while len(self.lives) > KEPT:
            self.lives.popitem(last=False)
        while len(self.by_seq) > KEPT:
            self.by_seq.popitem(last=False)
        for event in self._changed.get(key, ()):
            event.set()

    def stage_of(self, key: Key) -> str | None:
        life = self.lives.get(key)
        return life.stage if life else None

    # --- writing ---

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

    async def _record(self, key: Key, seq: int, stage: str, at: str) -> None:
        sender, mid, reader = key
        body = {"of": {"sender": sender, "id": mid}, "stage": stage, "seq": seq, "at": at}
        try:
            await self.steward.js.publish(self.steward.subjects.audit("receipt", reader), json.dumps(body).encode())
        except ApiError as error:
            if error.err_code != NO_ROOM:
                raise
            self.unrecorded += 1  # AUD is full: the sender is told while we live, and health counts it
        self.note(key, seq, stage, at)

    # --- waiting ---

    async def wait(self, key: Key, stage: str, seconds: float) -> str | None:
        """Until the message is at `stage` or beyond, or time is over; the stage it is at then."""
        sender = key[0]
        if self.waits[sender] >= MOST_WAITS_EACH or self.waits.total() >= MOST_WAITS:
            return self.stage_of(key)
        self.waits[sender] += 1
        changed = asyncio.Event()
        self._changed[key].add(changed)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds), self.steward.idle():
                    while not self._closed and not reached(self.stage_of(key), stage):
                        await changed.wait()
                        changed.clear()
        finally:
            self.waits[sender] -= 1
            self._changed[key].discard(changed)
            if not self._changed[key]:
                del self._changed[key]
            if not self.waits[sender]:
                del self.waits[sender]
        return self.stage_of(key)

    def close(self) -> None:
        """Wake everybody who waits: the steward is going."""
        self._closed = True
        for event in [event for events in self._changed.values() for event in events]:
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


# --- requests ---


async def put(steward: Steward, request: Request) -> Answer:
    """`receipts`: [{seq, stage}], or one `seq` and `stage`. What is not addressed to the caller is refused."""
    access_of(steward, request.sender)
    if request.arguments.get("stream", "dm") != "dm":
        raise UsageError("receipts are for direct messages: `stream` is dm")
    single = "seq" in request.arguments
    told = _told([request.arguments] if single else request.arguments.get("receipts"))
    await steward.receipts.ready()
    accepted: list[tuple[Key, int, str]] = []
    refused: list[int] = []
    for seq, stage in told:
        key = await steward.receipts.addressed(seq)
        if key is None or key[2] != request.sender:
            refused.append(seq)
        else:
            accepted.append((key, seq, stage))
    if single and refused:
        raise DeniedError(f"the direct message {refused[0]} is not addressed to you, or is gone")
    return {"new": await steward.receipts.write(accepted), "refused": refused}


def _told(items: Any) -> list[tuple[int, str]]:
    if not isinstance(items, list) or not 0 < len(items) <= MOST_RECEIPTS:
        raise UsageError(f"receipt put needs `receipts`, a list of 1 to {MOST_RECEIPTS}")
    found = []
    for item in items:
        seq = item.get("seq") if isinstance(item, dict) else None
        stage = item.get("stage") if isinstance(item, dict) else None
        if type(seq) is not int or seq < 1 or stage not in READER_STAGES:
            raise UsageError(f"a receipt has `seq` and `stage`, one of {', '.join(READER_STAGES)}")
        found.append((seq, str(stage)))
    return found


async def wait(steward: Steward, request: Request) -> Answer:
    """Wait for a receipt of a message of the caller's own: the key begins with who asks, so nobody sees another's."""
    access_of(steward, request.sender)
    key = (request.sender, _message_id(request), check_agent_id(request.text("to")))
    stage = request.arguments.get("stage", "delivered")
    if stage not in RANK or RANK[stage] < 0:
        raise UsageError(f"stages are {', '.join(name for name in RANK if RANK[name] >= 0)}")
    receipts = steward.receipts
    await receipts.ready()
    found = receipts.stage_of(key) or await _stored_stage(steward, request, key)
    if not reached(found, stage):
        found = await receipts.wait(key, stage, _seconds(request)) or found
    life = receipts.lives.get(key)
    return {"stage": found, "reached": reached(found, stage), "stages": dict(life.stages) if life else {}}


async def _stored_stage(steward: Steward, request: Request, key: Key) -> str:
    """`confirmed` if the record is where the caller says; without a place nothing is searched for."""
    seq = request.optional("seq", int)
    return "confirmed" if seq and await steward.receipts.addressed(seq) == key else "unknown"


def _seconds(request: Request) -> float:
    value = request.arguments.get("timeout", request.arguments.get("wait", LONGEST_WAIT))
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UsageError("receipt wait: `timeout` is a number of seconds")
    return min(float(value), LONGEST_WAIT)


def _message_id(request: Request) -> str:
    mid = request.text("id")
    if not is_message_id(mid):
        raise UsageError(f"{mid[:64]!r} is not a message id")
    return mid


async def room(steward: Steward, request: Request) -> Answer:
    """Make room in a mailbox that is full of what the caller sent and its target has read."""
    access_of(steward, request.sender)
    return {"made": await steward.mail.make_room(request.sender, check_agent_id(request.text("to")))}


async def trace(steward: Steward, request: Request) -> Answer:
    """Where a message of the caller's own, sent or received, is stored, and what became of it."""
    access_of(steward, request.sender)
    caller, mid = request.sender, _message_id(request)
    await steward.receipts.ready()
    lives = [(k, life) for k, life in steward.receipts.lives.items() if k[1] == mid and caller in (k[0], k[2])]
    told = [
        {"sender": key[0], "to": key[2], "seq": life.seq, "stage": life.stage, "stages": dict(life.stages)}
        for key, life in lives
    ]
    stored: dict[tuple[str, int], dict[str, Any]] = {}
    async with steward.receipts.searching:
        for stream, record in await _candidates(steward, caller, mid, request.optional("seq", int)):
            line = _line(steward, record, caller, mid)
            if line is not None:
                stored[stream, record.seq] = {"stream": stream, **line}
    return {"id": mid, "stored": list(stored.values()), "receipts": told}


async def _candidates(steward: Steward, caller: str, mid: str, seq: int | None) -> list[tuple[str, StoredRecord]]:
    s = steward.subjects
    at = await steward.js.at(s.direct_stream, seq) if seq and seq > 0 else None
    found = [(s.direct_stream, at)] if at else []
    for stream, subject_filter in (
        (s.direct_stream, f"{s.root}.dm.*.*.{caller}"),
        (s.direct_stream, s.direct_inbox(caller)),
        (s.log_stream, f"{s.root}.chat.{caller}.>"),
    ):
        found += [(stream, record) for record in await _near(steward, stream, subject_filter, mid)]
    return found


async def _near(steward: Steward, stream: str, subject_filter: str, mid: str) -> list[StoredRecord]:
    """Records stored near the time in an id. A hint, not a proof: what was sent much later is not found this way."""
    try:
        when = datetime.fromtimestamp((id_time_ms(mid) or 0) / 1000, UTC)
        start = await steward.js.first_after(stream, subject_filter, when - NEAR)
    except (ValueError, OverflowError):
        return []
    end = int((await steward.js.info(stream))["state"]["last_seq"])
    latest = int((when + NEAR).timestamp()) * 1_000_000_000
    found: list[StoredRecord] = []
    looked = 0
    async for page in steward.js.read(stream, subject_filter, start or end + 1, end):
        found += [record for record in page if mid.encode() in record.payload]
        looked += sum(len(record.payload) for record in page)
        if looked >= MOST_LOOKED_AT or page[-1].time_ns > latest:
            break
    return found


def _line(steward: Steward, record: StoredRecord, caller: str, mid: str) -> dict[str, Any] | None:
    fields = record.own_fields()
    if fields is None:
        return None
    opened = open_record(steward.subjects, steward.info.id, record.subject, fields, record.payload)
    if not isinstance(opened, Received) or opened.message.id != mid:
        return None
    if caller != opened.sender and not (opened.kind == "dm" and caller == opened.destination):
        return None
    return {
        "seq": record.seq,
        "time_ns": record.time_ns,
        "kind": opened.kind,
        "sender": opened.sender,
        "to": opened.destination,
    }


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


RECEIPT_HANDLERS: dict[tuple[str, str], Handler] = {
    ("receipt", "put"): put,
    ("receipt", "wait"): wait,
    ("receipt", "room"): room,
    ("trace", "get"): trace,
}
