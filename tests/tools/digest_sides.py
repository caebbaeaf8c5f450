"""The two sides of a comparison in memory: rows of one log, and the three questions about them, answered plainly."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tidings.links.compare import Difference
from tidings.wire.digests import (
    BucketsAnswer,
    ChannelDigests,
    DigestAnswer,
    IdsAnswer,
    RecordIdentity,
    bucket_of,
    day_of,
    item_hash,
    payload_hash,
)

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


@dataclass(frozen=True, order=True)
class Row:
    """A record that counts, by channel and time."""

    channel: str
    ts: str
    identity: RecordIdentity

    @property
    def counted(self) -> tuple[str, str, str, str, bytes]:
        """What a digest sees of it: neither its sequence nor the time of day."""
        return self.channel, day_of(self.ts), self.identity.sender, self.identity.id, self.identity.hash


@dataclass
class HeldRows:
    """Our side."""

    rows: list[Row]
    page: int = 1_000

    def within(self, through: int, floor: int) -> list[Row]:
        return sorted(
            (row for row in self.rows if floor <= row.identity.seq <= through), key=lambda row: row.identity.seq
        )

    async def digest(self, through: int, *, floor: int) -> DigestAnswer:
        return DigestAnswer(floor, through, digests_of(self.within(through, floor)).totals())

    async def buckets(self, channel: str, day: str, through: int, *, floor: int) -> BucketsAnswer:
        found = digests_of(self.within(through, floor)).day(channel, day)
        return BucketsAnswer(floor, through, found.buckets)

    async def ids(
        self, channel: str, day: str, buckets: Sequence[int], through: int, after: int, *, floor: int
    ) -> IdsAnswer:
        found = [
            row.identity
            for row in self.within(through, floor)
            if row.channel == channel
            and day_of(row.ts) == day
            and row.identity.seq > after
            and bucket_of(row.identity.item) in buckets
        ]
        return IdsAnswer(floor, through, tuple(found[: self.page]), len(found) > self.page)


@dataclass
class PeerRows:
    """The other side: it has a floor of its own, and counts what it is asked and what it hands out."""

    held: HeldRows
    floor: int = 1
    #: the floor from each question on, one after the other; then it stays
    rising: list[int] = field(default_factory=list)
    asked: list[tuple[object, ...]] = field(default_factory=list)
    handed: int = 0

    def _ask(self, *question: object) -> int:
        self.asked.append(question)
        if self.rising:
            self.floor = max(self.floor, self.rising.pop(0))
        return self.floor

    async def digest(self, through: int) -> DigestAnswer:
        return await self.held.digest(through, floor=self._ask("digest"))

    async def buckets(self, channel: str, day: str, through: int) -> BucketsAnswer:
        return await self.held.buckets(channel, day, through, floor=self._ask("buckets", channel, day))

    async def ids(self, channel: str, day: str, buckets: Sequence[int], through: int, after: int) -> IdsAnswer:
        floor = self._ask("ids", channel, day, *buckets)
        answer = await self.held.ids(channel, day, buckets, through, after, floor=floor)
        self.handed += len(answer.ids)
        return answer

    def questions(self, kind: str) -> int:
        return sum(each[0] == kind for each in self.asked)


def digests_of(rows: Iterable[Row]) -> ChannelDigests:
    return ChannelDigests.of(
        (row.channel, row.identity.sender, row.identity.id, row.ts, row.identity.hash) for row in rows
    )


def naive_difference(have: Iterable[Row], others: Iterable[Row]) -> Counter[tuple[str, str, str, str, bytes]]:
    """What is there more often than at the others, one by one."""
    return Counter(row.counted for row in have) - Counter(row.counted for row in others)


def counted(found: Iterable[Difference], side: str) -> Counter[tuple[str, str, str, str, bytes]]:
    return Counter(
        (each.channel, each.day, row.sender, row.id, row.hash) for each in found for row in getattr(each, side)
    )


@lru_cache
def sender(number: int) -> str:
    return "U" + "".join(random.Random(number).choices(ALPHABET, k=55))


def message_id(number: int) -> str:
    return f"019a8a3c-5c00-7abc-8def-{number:012x}"


def row(seq: int, number: int, *, channel: str = "general", ts: str = "2025-11-15T12:00:00.000Z", by: int = 0) -> Row:
    """A record at `seq` of message `number`."""
    hashed = payload_hash(f"message {number}".encode())
    return Row(channel, ts, RecordIdentity(seq, sender(by), message_id(number), hashed))


def same_bucket(count: int, bucket: int = 7, beginning: bytes = b"") -> list[int]:
    """Numbers of messages that all lie in one bucket, as a sender can choose them."""
    beginning = beginning or bytes([bucket])
    found: list[int] = []
    number = 0
    while len(found) < count:
        number += 1
        hashed = payload_hash(f"message {number}".encode())
        if item_hash(sender(0), message_id(number), hashed).startswith(beginning):
            found.append(number)
    return found
