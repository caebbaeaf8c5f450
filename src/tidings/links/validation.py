"""What a peer sent: whether a page is one that a log can answer with, and what becomes of each record; pure.

A peer is not trusted to move our token as it likes. Each record is imported under a local name, omitted, or put aside.
It is omitted only for a reason of a short list, which no later attempt would change. Everything else that does not fit
is put aside with its bytes: a peer that forges and a Tidings that misreads look the same from here. `order` says in
which order the records of one page are imported.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tidings.errors import PageRefused, WireError
from tidings.links.definition import LinkDefinition
from tidings.links.link_store import Disposed, Kind
from tidings.links.ports import OriginIdentity
from tidings.wire import message as wire_message
from tidings.wire.links import MOST_HOPS, GapKind, LinkedRecord, LinkGap, LinkPage, Token
from tidings.wire.message import MAX_PAYLOAD, Message
from tidings.wire.names import is_agent_id, is_channel
from tidings.wire.signing import is_spelled, verifies

#: records of a page; a peer sends fewer if they are large
PAGE_RECORDS = 500
PAGE_BYTES = 256 * 1024
#: a single record may be larger than a page
RECORD_BYTES = 4 * MAX_PAYLOAD
#: why a record is left out, for good
OmitReason = Literal["not_shared", "echo", "vanished", "hops"]


class Admit(NamedTuple):
    record: LinkedRecord
    ours: str
    message: Message
    hash: str
    identity: OriginIdentity


class Omit(NamedTuple):
    record: LinkedRecord
    reason: OmitReason
    message: Message | None = None


class Refuse(NamedTuple):
    """It goes into quarantine: `reason` is for counters, `words` for people."""

    record: LinkedRecord
    reason: str
    words: str
    message: Message | None = None


Verdict = Admit | Omit | Refuse


def verified(records: Sequence[LinkedRecord]) -> list[bool]:
    return [verifies(r.signature, r.origin, "chat", r.sender, r.channel, r.payload) for r in records]


def judge(record: LinkedRecord, signed: bool, definition: LinkDefinition) -> Verdict:
    """`signed`: its sender signed it, over the space and channel it says it was said in."""
    message = _message(record)
    read = message if isinstance(message, Message) else None
    if record.origin == definition.space:
        return Omit(record, "echo", read)
    ours = definition.ours(record.origin, record.channel) if is_channel(record.channel) else None
    if ours is None:
        return Omit(record, "not_shared", read)
    if not 1 <= record.hops <= MOST_HOPS + 1:
        return Refuse(record, "malformed", f"it came over {record.hops} links, which cannot be", read)
    if record.hops > min(definition.hops, MOST_HOPS):
        return Omit(record, "hops", read)
    if not signed or not is_spelled(record.signature):
        return Refuse(
            record, "signature", f"not signed by {record.sender} for {record.channel} of {record.origin}", read
        )
    if not isinstance(message, Message):
        return Refuse(record, *message)
    if message.sender.id != record.sender or not is_agent_id(record.sender):
        return Refuse(record, "sender_mismatch", f"sent by {record.sender}, claims {message.sender.id}", read)
    identity = OriginIdentity(record.origin, record.sender, message.id)
    return Admit(record, ours, message, payload_hash(record), identity)


def _message(record: LinkedRecord) -> Message | tuple[str, str]:
    """The message, or why it is none."""
    if len(record.payload) > MAX_PAYLOAD:
        return "too_large", f"payload has {len(record.payload)} bytes, the limit is {MAX_PAYLOAD}"
    try:
        return wire_message.decode(record.payload)
    except WireError as error:
        return "malformed", str(error)


def payload_hash(record: LinkedRecord) -> str:
    return hashlib.sha256(record.payload).hexdigest()


def disposed(verdict: Verdict, kind: Kind, reason: str = "", local_seq: int | None = None, words: str = "") -> Disposed:
    """What became of a record, as the ledger has it."""
    record, message = verdict.record, verdict.message
    return Disposed(
        seq=record.seq,
        identity=OriginIdentity(record.origin, record.sender, message.id if message is not None else ""),
        channel=record.channel,
        hash=verdict.hash if isinstance(verdict, Admit) else payload_hash(record),
        day=message.ts[:10] if message is not None else "",
        kind=kind,
        reason=reason,
        local_seq=local_seq,
        record=record if kind == "quarantined" else None,
        words=words,
    )


def order(page: Sequence[Admit]) -> list[Admit]:
    """By the log of the peer, but an answer behind what it answers, if both are here.

    What one sender said stays in its order, whatever answers what.
    """
    by_id = {each.message.id: number for number, each in enumerate(page)}
    waits: list[set[int]] = []
    last: dict[str, int] = {}
    for number, each in enumerate(page):
        waits.append({last[each.record.sender]} if each.record.sender in last else set())
        last[each.record.sender] = number
    hard = [set(each) for each in waits]
    for number, each in enumerate(page):
        ancestor = by_id.get(each.message.reply_to or "")
        if ancestor is not None and ancestor != number:
            waits[number].add(ancestor)
    return [page[number] for number in _topological(waits, hard)]


def _topological(waits: list[set[int]], hard: list[set[int]]) -> list[int]:
    """Lowest first among those that wait for nobody; in a circle, lowest first of those the hard rules let go."""
    followers: dict[int, list[int]] = {}
    for number, others in enumerate(waits):
        for other in others:
            followers.setdefault(other, []).append(number)
    ready = [number for number, others in enumerate(waits) if not others]
    left, done = set(range(len(waits))), list[int]()
    while left:
        number = heapq.heappop(ready) if ready else min(each for each in left if not hard[each] & left)
        if number not in left:
            continue
        left.discard(number)
        done.append(number)
        for follower in followers.get(number, ()):
            waits[follower].discard(number)
            if not waits[follower]:
                heapq.heappush(ready, follower)
    return done


def check_page(asked: Token, page: LinkPage, limit: int = PAGE_RECORDS) -> None:
    """PageRefused for what no log would answer to this token."""
    through = page.through
    if through.domain != asked.domain:
        raise PageRefused(f"asked about {asked.domain}, the peer answers about {through.domain}")
    if through.is_before(asked):
        raise PageRefused(f"asked what follows {asked.seq}, the peer goes back to {through.seq}")
    if page.head < through.seq:
        raise PageRefused(f"the peer says it looked up to {through.seq}, in a log that ends at {page.head}")
    if through.seq == asked.seq and (page.records or page.head > asked.seq):
        raise PageRefused(f"there is more behind {asked.seq} (up to {page.head}), but the peer's page does not move")
    if through.seq == asked.seq and asked.mark and through.mark != asked.mark:
        raise PageRefused(f"another record is at {asked.seq} than before, and the peer does not say why")
    _check_records(asked, page, limit)


def _check_records(asked: Token, page: LinkPage, limit: int) -> None:
    if len(page.records) > limit:
        raise PageRefused(f"{len(page.records)} records in a page of at most {limit}")
    size = sum(len(each.payload) for each in page.records)
    if size > (PAGE_BYTES if len(page.records) > 1 else RECORD_BYTES):
        raise PageRefused(f"{size} bytes in a page of {len(page.records)} records")
    last = asked.seq
    for each in page.records:
        if not last < each.seq <= page.through.seq:
            raise PageRefused(f"record {each.seq} comes behind {last}, in a page up to {page.through.seq}")
        last = each.seq


def check_gap(asked: Token, gap: LinkGap) -> None:
    """PageRefused for a reason that what is said of the log contradicts."""
    contradiction = {
        GapKind.TOO_OLD: gap.epoch != asked.epoch or not asked.seq < gap.oldest <= gap.head,
        GapKind.TOO_NEW: gap.epoch != asked.epoch or gap.head >= asked.seq,
        GapKind.EPOCH: gap.epoch == asked.epoch,
        GapKind.RECORD: gap.epoch != asked.epoch or asked.seq == 0,
        GapKind.STREAM: False,
    }[gap.kind]
    if contradiction or not 0 <= gap.agreed <= max(gap.head, 0):
        raise PageRefused(f"the peer cannot go on from {asked.seq}: {gap.kind.value}; but it says {gap}")


def agreed_token(asked: Token, gap: LinkGap) -> Token:
    """Where to begin again: up to there the log is the one we know. Its mark is not known. If nobody can say up to
    where that is, and its beginning was removed by age, that was handled when it was there: it begins behind it."""
    agreed = min(gap.agreed, asked.seq)
    if gap.agreed == 0 and gap.kind in (GapKind.RECORD, GapKind.TOO_NEW):
        agreed = max(0, min(gap.oldest, gap.head, asked.seq))
    if gap.kind is GapKind.RECORD:
        agreed = min(agreed, asked.seq - 1)
    return Token(space=asked.space, epoch=gap.epoch, seq=agreed)
