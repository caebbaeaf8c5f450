"""What lies unread for an agent, and telling it before it is dropped with the agent's key.

    direct        sealed to its key: no other key opens them, also not its successor's
    copies        durable copies of channel messages in its mailbox, which goes with the key
    undelivered   channel messages it is owed that durable delivery has not come to
    letters       its dead letters

A rotation asks first, so that its owner can decide. Whatever is dropped in the end, by a rotation or a revocation, and
also what came after the question, is told: the successor hears how much it does not get, senders of direct messages
hear that theirs was not read. Channel messages stay in the log.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tidings.contract.admin import UnreadAnswer, UnreadRequest
from tidings.contract.core import Caller
from tidings.errors import TidingsError
from tidings.nats.jetstream import StoredRecord
from tidings.rpc.dispatch import handler
from tidings.steward.backstop import BackstopWatch
from tidings.steward.context import SpaceContext, now
from tidings.steward.damage import Removed
from tidings.steward.dead_letters import DeadLetters
from tidings.steward.receipts import ReceiptStore
from tidings.steward.store_watch import StoreWatch
from tidings.wire.frames import decode_frame
from tidings.wire.names import check_agent_id
from tidings.wire.rulings import Access
from tidings.wire.states import ReceiptStage
from tidings.wire.subjects import Chat, Direct, Via

#: records of the log that are looked at for what is not delivered yet
MOST_LOOKED_AT = 5_000


@dataclass(frozen=True, slots=True)
class Unread:
    #: sender -> how many
    direct: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    undelivered: int = 0
    letters: int = 0

    def counts(self) -> dict[str, int]:
        return {
            "direct": self.direct.total(),
            "copies": self.copies,
            "undelivered": self.undelivered,
            "letters": self.letters,
        }


def _messages_in(frame: bytes) -> int:
    try:
        return sum(block.count for block in decode_frame(frame).blocks)
    except TidingsError:  # boundary: a frame that cannot be read holds at least one
        return 1


def in_words(counts: dict[str, int]) -> str:
    """Counts of unread mail, those that are not 0."""
    named = {
        "direct": ("direct message", "direct messages"),
        "copies": ("channel message in its mailbox", "channel messages in its mailbox"),
        "undelivered": ("channel message that is not delivered yet", "channel messages that are not delivered yet"),
        "letters": ("dead letter", "dead letters"),
    }
    return ", ".join(f"{n} {named[key][n != 1]}" for key, n in counts.items() if n and key in named)


@dataclass(frozen=True, slots=True)
class UnreadMail:
    space: SpaceContext
    receipts: ReceiptStore
    letters: DeadLetters
    store: StoreWatch
    backstop: BackstopWatch

    async def unread_of(self, owner: str, successor: str | None = None) -> Unread:
        """`successor`: who gets by itself what was said since it has the name."""
        return Unread(
            await self._direct(owner),
            await self._copies(owner),
            await self._undelivered(owner, successor),
            len(self.letters.of(owner)),
        )

    async def _mailbox(self, stream: str, consumer: str) -> tuple[int, int]:
        """How many records of a mailbox are not acknowledged, and after which sequence they lie."""
        info = await self.space.consumer(stream, consumer)
        if info is None:
            return 0, 0
        return int(info["num_pending"]) + int(info["num_ack_pending"]), int(info["ack_floor"]["stream_seq"])

    async def _direct(self, owner: str) -> Counter[str]:
        s, found = self.space.subjects, Counter[str]()
        waiting, after = await self._mailbox(s.direct_stream, f"dm_{owner}")
        if not waiting:
            return found
        await self.receipts.ready()
        head = await self.space.head(s.direct_stream)
        async for page in self.space.js.read(s.direct_stream, s.direct_inbox(owner), after + 1, head):
            for record in page:
                parsed, key = s.parse(record.subject), self.receipts.key_of(record)
                if isinstance(parsed, Direct) and key is not None and self.receipts.stage_of(key) != ReceiptStage.READ:
                    found[parsed.sender] += 1
        return found

    async def _copies(self, owner: str) -> int:
        s, found = self.space.subjects, 0
        waiting, after = await self._mailbox(s.delivery_stream, f"dlv_{owner}")
        if not waiting:
            return 0
        head = await self.space.head(s.delivery_stream)
        async for page in self.space.js.read(s.delivery_stream, s.delivery(owner), after + 1, head):
            found += sum(_messages_in(record.payload) for record in page)
        return found

    async def _undelivered(self, owner: str, successor: str | None) -> int:
        """Owed, and above the floor of durable delivery. Where that never ran, or is off, nobody waits for it."""
        delivered = await self.backstop.delivered()
        is_off = self.space.table.space_at(self.space.position).parts.deliver == "off"
        if delivered is None or is_off or not self.space.table.intervals(owner):
            return 0
        s, found, looked = self.space.subjects, 0, 0
        head = await self.space.log_head()
        for said in (f"{s.root}.chat.>", f"{s.root}.via.>"):
            async for page in self.space.js.read(s.log_stream, said, delivered + 1, head):
                for record in page:
                    owed = self._deliverable(record)
                    found += owner in owed and successor not in owed
                looked += len(page)
                if looked >= MOST_LOOKED_AT:
                    break
        return found

    def _deliverable(self, record: StoredRecord) -> frozenset[str]:
        table = self.space.table
        match self.space.subjects.parse(record.subject):
            case Chat(sender, channel):
                return table.deliverable(record.seq, sender, channel)
            case Via(_, sender, channel) if self.space.admitted(record):
                owed = table.audience_at(channel, record.seq) - {sender}
                return frozenset(each for each in owed if table.allowed_now(each, channel))
        return frozenset()

    async def tell_dropped(self, owner: str, access: Access) -> None:
        """Before the mailboxes of an agent go: say what goes with them. Whoever finishes this finds it said."""
        successor = self.successor_of(owner, access)
        unread = await self.unread_of(owner, successor)
        removed = []
        why = f"{access.name} has a new key, which cannot open them" if successor else f"{access.name} was revoked"
        for sender, count in unread.direct.items():
            if self.space.active_access(sender) is not None:
                what = "a direct message" if count == 1 else f"{count} direct messages"
                again = "; send again what matters" if successor else ""
                text = f"{what} you sent to {access.name} will not be read: {why}{again}"
                removed.append(Removed(sender, text, count, f"unread by {owner}", kind="lost", at=now()))
        lost = unread.counts()
        if successor is not None and any(lost.values()):
            text = (
                f"your key is new, and what lay unread for the one before does not come: {in_words(lost)}. Senders "
                "of direct messages are told; channel messages are in the log as long as that keeps them "
                "(`tidings history`)"
            )
            removed.append(
                Removed(
                    successor, text, sum(lost.values()), f"unread at the rotation of {owner}", kind="lost", at=now()
                )
            )
        known = {(each.target, each.cause) for each in self.store.file.removed}
        await self.store.note_removed([each for each in removed if (each.target, each.cause) not in known])

    def successor_of(self, owner: str, access: Access) -> str | None:
        """Whoever has the name of an agent by a rotation."""
        holder = self.space.table.owner_named(access.name)
        held = self.space.active_access(holder) if holder else None
        return holder if held is not None and held.succeeds == owner else None

    @handler(UnreadRequest)
    async def unread(self, _caller: Caller, request: UnreadRequest) -> UnreadAnswer:
        """Counts what would be dropped with the key of an agent."""
        counts = (await self.unread_of(check_agent_id(request.id))).counts()
        return UnreadAnswer(**counts, words=in_words(counts))
