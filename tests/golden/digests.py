"""Golden vectors of digests: what a message counts as, and the sums of sets of messages."""

from __future__ import annotations

import hashlib
from typing import Any

from golden.cast import ADA, BOB, MESSAGE_ID
from tidings.wire.digests import ChannelDigests, DayDigests, bucket_of, item_hash, payload_hash

_OTHER_ID = MESSAGE_ID[:-1] + "c"
#: channel, sender, id, ts, payload; a payload is any bytes here
ITEMS: list[tuple[str, str, str, str, str]] = [
    ("general", ADA.id, MESSAGE_ID, "2025-11-15T12:00:00.000Z", "{}"),
    ("general", ADA.id, _OTHER_ID, "2025-11-15T12:00:00.000Z", "{}"),
    ("general", BOB.id, MESSAGE_ID, "2025-11-15T12:00:00.000Z", "{}"),
    ("general", ADA.id, MESSAGE_ID, "2025-11-15T12:00:00.000Z", "{} "),
    ("general", BOB.id, _OTHER_ID, "2025-11-15T23:59:59.999Z", "ü"),
    ("general", BOB.id, MESSAGE_ID, "2025-11-16T00:00:00.000Z", ""),
    ("team.backend", ADA.id, MESSAGE_ID, "0001-01-01T00:00:00.000Z", "{}"),
    ("team.backend", ADA.id, _OTHER_ID, "9999-12-31T23:59:59.999Z", "{}"),
]
SETS: list[tuple[str, list[int]]] = [
    ("nothing", []),
    ("one message", [0]),
    ("the same message twice", [0, 0]),
    ("another id, another sender, another payload", [0, 1, 2, 3]),
    ("the last moment of a day and the first of the next", [4, 5]),
    ("a sum beyond 2^256", list(range(5)) * 5),
    ("two channels, and days that clocks claim", list(range(8))),
]


def vectors() -> dict[str, Any]:
    return {
        "digests": {
            "items": [_item(*each) for each in ITEMS],
            "sets": [{"why": why, "messages": chosen, "channels": _channels(chosen)} for why, chosen in SETS],
        }
    }


def _item(channel: str, sender: str, message_id: str, ts: str, payload: str) -> dict[str, Any]:
    item = item_hash(sender, message_id, payload_hash(payload.encode()))
    said = {"channel": channel, "sender": sender, "id": message_id, "ts": ts, "payload": payload}
    return {**said, "item_hex": item.hex(), "bucket": bucket_of(item)}


def digests_of(chosen: list[int]) -> ChannelDigests:
    return ChannelDigests.of((*ITEMS[each][:4], payload_hash(ITEMS[each][4].encode())) for each in chosen)


def channel_hash(digests: ChannelDigests, channel: str) -> str:
    """Of the days of a channel, in order: `<day>\\n<hash of the day>\\n` each."""
    lines = (f"{day}\n{found.hash}\n" for each, day, found in digests.days() if each == channel)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _channels(chosen: list[int]) -> dict[str, Any]:
    found = digests_of(chosen)
    made: dict[str, Any] = {}
    for channel, day, digests in found.days():
        within = made.setdefault(channel, {"hash": channel_hash(found, channel), "days": {}})
        within["days"][day] = {"digest": digests.total.encode(), "hash": digests.hash, "buckets": _buckets(digests)}
    return made


def _buckets(digests: DayDigests) -> dict[str, Any]:
    """Those that hold something."""
    return {str(number): each.encode() for number, each in enumerate(digests.buckets) if each}
