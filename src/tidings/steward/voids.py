"""Messages that were stored and do not count: found, counted, and told to whoever sent them.

The broker stores what it is sent and says so; readers drop what does not open (`wire/envelope`): reserved headers, a
bad signature, a payload that is no message. And a post that the rules in force at its sequence did not allow (a channel
that is not listed, access that was just narrowed) is owed to nobody. Its sender has a positive answer and would never
know. The steward reads what is new among channel and direct messages, a bounded amount each round, and writes a receipt
`void` that says why. It goes on where it was, also after a restart; how far behind it is can be seen. Tasks are read by
their desk.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from tidings.errors import ConflictError, WireError
from tidings.model.projection import Table
from tidings.nats.jetstream import StoredRecord
from tidings.steward.context import SpaceContext, open_stored
from tidings.steward.receipts import NOBODY, ReceiptStore
from tidings.steward.writer import RulingWriter
from tidings.wire.envelope import RULED_OUT, Refused
from tidings.wire.message import is_message_id
from tidings.wire.records import Headers, values_of
from tidings.wire.states import ReceiptStage
from tidings.wire.subjects import Chat, Direct, StateKey

KEY = StateKey.VOIDS
#: what one round looks at, of each stream
MOST_RECORDS, MOST_BYTES = 4_000, 8 * 1024 * 1024
PAGE = 500
#: receipts that one sender is written in a round; the rest is counted
MOST_TOLD = 32
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RuledOut:
    """The rules in force when it was stored did not allow a message; in the words of `Refused`."""

    detail: str
    reason: str = "ruling"


Void = Refused | RuledOut


class _IdOnly(msgspec.Struct):
    id: str


_ID_ONLY = msgspec.json.Decoder(_IdOnly)


class VoidWatch:
    def __init__(self, space: SpaceContext, writer: RulingWriter, receipts: ReceiptStore) -> None:
        self.space = space
        self.writer = writer
        self.receipts = receipts
        #: void messages by reason, found by this steward
        self.found: Counter[str] = Counter()
        self._looked: dict[str, int] | None = None
        self._saved: dict[str, int] = {}
        self._revision = 0

    async def run(self) -> int:
        """One round. Answers how many void messages it found."""
        s = self.space.subjects
        places = {"log": (s.log_stream, f"{s.root}.chat.>"), "dm": (s.direct_stream, f"{s.root}.dm.>")}
        async with self.writer.lock:  # the table has every ruling up to these heads
            heads = {name: await self.space.head(place[0]) for name, place in places.items()}
        looked = dict(await self._load(heads))
        void: list[tuple[StoredRecord, Void]] = []
        for name, (stream, subject_filter) in places.items():
            if looked[name] > heads[name]:  # it went backwards
                looked[name] = heads[name]
            looked[name] = await self._look(stream, subject_filter, looked[name] + 1, heads[name], void)
        await self._tell(void)  # a round that fails here is done again: whoever was told already is known
        self._looked = looked
        self.found.update(cause.reason for _, cause in void)
        if looked != self._saved:
            await self._save(looked)
        return len(void)

    async def _load(self, heads: dict[str, int]) -> dict[str, int]:
        """Where the last round ended. A space that was never looked at is looked at from now on."""
        if self._looked is None:
            entry = await self.space.state.get(KEY)
            known = entry.value if entry else {}
            self._saved = {name: int(place) for name, place in known.items()}
            self._looked = {**heads, **self._saved}
            self._revision = entry.revision if entry else 0
        return self._looked

    async def _save(self, looked: dict[str, int]) -> None:
        try:
            self._revision = await self.space.state.put(KEY, dict(looked), self._revision)
            self._saved = looked
        except ConflictError:  # a steward before this one was slow: it tells nobody twice, receipts are known
            entry = await self.space.state.get(KEY)
            self._revision = entry.revision if entry else 0

    async def _look(
        self, stream: str, subject_filter: str, start: int, head: int, void: list[tuple[StoredRecord, Void]]
    ) -> int:
        """Open what lies from `start` up to the head, as far as one round goes. Answers how far that was."""
        records = size = 0
        async for page in self.space.js.read(stream, subject_filter, start, head, page=PAGE, max_bytes=MOST_BYTES):
            for record in page:
                cause = void_of(self.space.table, record)
                if cause is not None:
                    void.append((record, cause))
            records, size = records + len(page), size + sum(len(record.payload) for record in page)
            if records >= MOST_RECORDS or size >= MOST_BYTES:
                return page[-1].seq
        return head

    async def _tell(self, void: list[tuple[StoredRecord, Void]]) -> None:
        told: Counter[str] = Counter()
        for record, cause in void:
            parsed = self.space.subjects.parse(record.subject)
            if not isinstance(parsed, Chat | Direct):
                continue
            told[parsed.sender] += 1
            if told[parsed.sender] > MOST_TOLD:
                continue
            channel, target = (parsed.channel, NOBODY) if isinstance(parsed, Chat) else (None, parsed.target)
            key = (parsed.sender, claimed_id(record), target)
            await self.receipts.tell_ended(key, record.seq, ReceiptStage.VOID, cause.detail, channel=channel)
        for sender, count in told.items():
            log.warning("%d messages of %s are void: they are owed to nobody", count, sender)


def void_of(table: Table, record: StoredRecord) -> Void | None:
    """Why a message does not count; None if it does."""
    if isinstance(opened := open_stored(table, record), Refused):
        return opened
    parsed = table.subjects.parse(record.subject)
    if not isinstance(parsed, Chat) or record.seq < table.floor:  # below it nobody knows any more
        return None
    refusal = table.post_refusal(parsed.sender, parsed.channel, record.seq)
    return RuledOut(f"{RULED_OUT}: {refusal}") if refusal else None


def payload_id(record: StoredRecord) -> str:
    """The id that its payload claims; empty if that is no message: readers refuse it."""
    with suppress(ValueError):
        return _ID_ONLY.decode(record.payload).id
    return ""


def claimed_id(record: StoredRecord) -> str:
    """The id its sender knows it by: in its payload, else in its header, else its place."""
    if is_message_id(claimed := payload_id(record)):
        return claimed
    with suppress(WireError):
        for value in values_of(Headers.parse(record.own_block).fields if record.own_block else (), "Nats-Msg-Id"):
            return value[:64]
    return f"record-{record.seq}"
