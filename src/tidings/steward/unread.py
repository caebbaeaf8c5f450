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
from typing import TYPE_CHECKING

from tidings.broker.answers import NO_CONSUMER, ApiError
from tidings.errors import TidingsError
from tidings.steward.agent_handlers import Answer, now
from tidings.steward.damage import Removed
from tidings.steward.requests import Request
from tidings.wire.frames import decode_frame
from tidings.wire.names import check_agent_id
from tidings.wire.rulings import Access
from tidings.wire.subjects import Chat, Direct

if TYPE_CHECKING:
    from tidings.steward.service import Steward

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


async def unread_of(steward: Steward, owner: str, successor: str | None = None) -> Unread:
    """`successor`: who gets by itself what was said since it has the name."""
    return Unread(
        await _direct(steward, owner),
        await _copies(steward, owner),
        await _undelivered(steward, owner, successor),
        len(steward.dead_mail.of(owner)),
    )


async def _mailbox(steward: Steward, stream: str, consumer: str) -> tuple[int, int]:
    """How many records of a mailbox are not settled, and after which sequence they lie."""
    try:
        info = await steward.js.api(f"CONSUMER.INFO.{stream}.{consumer}")
    except ApiError as error:
        if error.err_code != NO_CONSUMER:
            raise
        return 0, 0
    return int(info["num_pending"]) + int(info["num_ack_pending"]), int(info["ack_floor"]["stream_seq"])


async def _direct(steward: Steward, owner: str) -> Counter[str]:
    s, found = steward.subjects, Counter[str]()
    waiting, after = await _mailbox(steward, s.direct_stream, f"dm_{owner}")
    if not waiting:
        return found
    await steward.receipts.ready()
    head = int((await steward.js.info(s.direct_stream))["state"]["last_seq"])
    async for page in steward.js.read(s.direct_stream, s.direct_inbox(owner), after + 1, head):
        for record in page:
            parsed, key = s.parse(record.subject), steward.receipts.key_of(record)
            if isinstance(parsed, Direct) and key is not None and steward.receipts.stage_of(key) != "read":
                found[parsed.sender] += 1
    return found


async def _copies(steward: Steward, owner: str) -> int:
    s, found = steward.subjects, 0
    waiting, after = await _mailbox(steward, s.delivery_stream, f"dlv_{owner}")
    if not waiting:
        return 0
    head = int((await steward.js.info(s.delivery_stream))["state"]["last_seq"])
    async for page in steward.js.read(s.delivery_stream, s.delivery(owner), after + 1, head):
        found += sum(_messages_in(record.payload) for record in page)
    return found


def _messages_in(frame: bytes) -> int:
    try:
        return sum(block.count for block in decode_frame(frame).blocks)
    except TidingsError:  # boundary: a frame that cannot be read holds at least one
        return 1


async def _undelivered(steward: Steward, owner: str, successor: str | None) -> int:
    """Owed, and above the floor of durable delivery. Where that never ran, or is off, nobody waits for it."""
    delivered = await steward.roster.backstop.delivered()
    is_off = steward.table.space_at(steward.position).parts.deliver == "off"
    if delivered is None or is_off or not steward.table.intervals(owner):
        return 0
    s, found, looked = steward.subjects, 0, 0
    async for page in steward.js.read(s.log_stream, f"{s.root}.chat.>", delivered + 1, await steward.log_head()):
        for record in page:
            parsed = s.parse(record.subject)
            if isinstance(parsed, Chat):
                owed = steward.table.deliverable(record.seq, parsed.sender, parsed.channel)
                found += owner in owed and successor not in owed
        looked += len(page)
        if looked >= MOST_LOOKED_AT:
            break
    return found


def in_words(counts: dict[str, int]) -> str:
    """Counts of unread mail, those that are not 0."""
    named = {
        "direct": ("direct message", "direct messages"),
        "copies": ("channel message in its mailbox", "channel messages in its mailbox"),
        "undelivered": ("channel message that is not delivered yet", "channel messages that are not delivered yet"),
        "letters": ("dead letter", "dead letters"),
    }
    return ", ".join(f"{n} {named[key][n != 1]}" for key, n in counts.items() if n and key in named)


async def tell_dropped(steward: Steward, owner: str, access: Access) -> None:
    """Before the mailboxes of an agent go: say what goes with them. Whoever finishes this finds it said."""
    successor = successor_of(steward, owner, access)
    unread = await unread_of(steward, owner, successor)
    removed = []
    why = f"{access.name} has a new key, which cannot open them" if successor else f"{access.name} was revoked"
    for sender, count in unread.direct.items():
        if steward.active_access(sender) is not None:
            what = "a direct message" if count == 1 else f"{count} direct messages"
            again = "; send again what matters" if successor else ""
            text = f"{what} you sent to {access.name} will not be read: {why}{again}"
            removed.append(Removed(sender, text, count, f"unread by {owner}", kind="lost", at=now()))
    lost = unread.counts()
    if successor is not None and any(lost.values()):
        text = (
            f"your key is new, and what lay unread for the one before does not come: {in_words(lost)}. Senders of "
            "direct messages are told; channel messages are in the log as long as that keeps them (`tidings history`)"
        )
        removed.append(
            Removed(successor, text, sum(lost.values()), f"unread at the rotation of {owner}", kind="lost", at=now())
        )
    known = {(each.target, each.cause) for each in steward.store.file.removed}
    await steward.store.note_removed([each for each in removed if (each.target, each.cause) not in known])


def successor_of(steward: Steward, owner: str, access: Access) -> str | None:
    """Whoever has the name of an agent by a rotation."""
    holder = steward.table.owner_named(access.name)
    held = steward.active_access(holder) if holder else None
    return holder if held is not None and held.succeeds == owner else None


def predecessors(steward: Steward, owner: str, most: int = 8) -> list[str]:
    """The keys an agent had before its rotations, newest first."""
    found: list[str] = []
    access = steward.table.access_at(owner, steward.position)
    while access is not None and access.succeeds and access.succeeds not in (owner, *found) and len(found) < most:
        found.append(access.succeeds)
        access = steward.table.access_at(access.succeeds, steward.position)
    return found


async def unread(steward: Steward, request: Request) -> Answer:
    """How much would be dropped with the key of an agent."""
    counts = (await unread_of(steward, check_agent_id(request.text("id")))).counts()
    return {**counts, "words": in_words(counts)}
