"""Digests: what two spaces compare to know that they hold the same messages; pure.

A message counts as one number, SHA-256 of its sender, its id and the hash of its payload. Messages of a channel and a
UTC day (of the `ts` that its sender signed) lie in 256 buckets by the first byte of that number; the digest of a bucket
is how many there are, and their sum modulo 2^256. Sums add up: order does not matter, a day is the sum of its buckets,
what is known to be left out can be taken off, and a message that is there twice is seen, as it would not be with XOR.

A digest finds what was lost or altered. It does not bind a peer that lies: whoever may choose both sets can find two of
one sum. `delivery/digests.py` computes the same in Spark, `links/compare.py` asks another space for its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

from tidings.errors import MalformedDigest, MalformedMessage
from tidings.wire.message import MAX_WHOLE

T = TypeVar("T")
BUCKETS: Final = 256
HASH_BYTES: Final = 32
_MODULUS: Final = 1 << 256
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}\Z")
_TIME_OF_DAY = re.compile(r"T(?:[01][0-9]|2[0-3])(?::[0-5][0-9]){2}\.[0-9]{3}Z\Z")
_HEX = re.compile(r"[0-9a-f]{64}\Z")


def payload_hash(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()


def item_hash(sender: str, message_id: str, payload_hash: bytes) -> bytes:
    """What a message counts as. Neither an agent's id nor a message's has a newline, so nothing else is spelled so."""
    return hashlib.sha256(f"{sender}\n{message_id}\n".encode() + payload_hash).digest()


def bucket_of(item: bytes) -> int:
    return item[0]


def day_of(ts: str) -> str:
    """The UTC day of a message's `ts`, `2025-11-15`; MalformedMessage for what no message has as its time."""
    if not _TIME_OF_DAY.match(ts, 10) or not _is_in_calendar(ts[:10]):
        raise MalformedMessage(f"{ts[:40]!r} is not the time of a message: 2025-11-15T12:00:00.000Z")
    return ts[:10]


def is_day(text: str) -> bool:
    """A day of the calendar from year 1 on, in its one spelling."""
    return len(text) == 10 and _is_in_calendar(text)


@lru_cache(maxsize=1024)
def _is_in_calendar(day: str) -> bool:
    try:
        return _DAY.match(day) is not None and bool(date.fromisoformat(day))
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Digest:
    """How many messages, and the sum of what they count as. A difference of two may have a count below zero."""

    count: int = 0
    sum: int = 0

    @classmethod
    def of(cls, items: Iterable[bytes]) -> Digest:
        numbers = [int.from_bytes(item) for item in items]
        return cls(len(numbers), sum(numbers) % _MODULUS)

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.count + other.count, (self.sum + other.sum) % _MODULUS)

    def __sub__(self, other: Digest) -> Digest:
        return Digest(self.count - other.count, (self.sum - other.sum) % _MODULUS)

    def __bool__(self) -> bool:
        return self.count != 0 or self.sum != 0

    @property
    def can_be(self) -> bool:
        """Could it be of messages? Not with fewer than none, nor with a sum of none."""
        return 0 <= self.count <= MAX_WHOLE and 0 <= self.sum < _MODULUS and (self.count > 0 or self.sum == 0)

    def encode(self) -> tuple[int, str]:
        """As JSON has it: the count, and 64 hex digits."""
        return self.count, f"{self.sum:064x}"

    @classmethod
    def decode(cls, value: object) -> Digest:
        if isinstance(value, list | tuple) and len(value) == 2 and type(value[0]) is int and _is_hash(value[1]):
            found = cls(value[0], int(value[1], 16))
            if found.can_be:
                return found
        raise MalformedDigest(f"{str(value)[:100]} is not a digest: a count, and 64 hex digits")


EMPTY: Final = Digest()


class DayDigests:
    """The 256 digests of a channel and a day. Only buckets that hold something take room."""

    __slots__ = ("_found",)

    def __init__(self, buckets: Mapping[int, Digest] | None = None) -> None:
        # Sums grow while messages are added, and are reduced when they are looked at: that is half the time.
        self._found: dict[int, list[int]] = {b: [each.count, each.sum] for b, each in (buckets or {}).items()}

    def add(self, item: bytes, times: int = 1) -> None:
        """One more message, or with -1 one less."""
        found = self._found.get(item[0])
        if found is None:
            found = self._found[item[0]] = [0, 0]
        found[0] += times
        found[1] += int.from_bytes(item) * times

    def merge(self, other: DayDigests, times: int = 1) -> None:
        for bucket, (count, total) in other._found.items():
            found = self._found.setdefault(bucket, [0, 0])
            found[0] += count * times
            found[1] += total * times

    def bucket(self, bucket: int) -> Digest:
        count, total = self._found.get(bucket, (0, 0))
        return Digest(count, total % _MODULUS)

    @property
    def buckets(self) -> tuple[Digest, ...]:
        return tuple(self.bucket(each) for each in range(BUCKETS))

    @property
    def total(self) -> Digest:
        found = self._found.values()
        return Digest(sum(count for count, _ in found), sum(total for _, total in found) % _MODULUS)

    @property
    def hash(self) -> str:
        """Of all 256, for a first look: 8 bytes of count and 32 of sum each, big-endian."""
        parts = (each.count.to_bytes(8, signed=True) + each.sum.to_bytes(32) for each in self.buckets)
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def __bool__(self) -> bool:
        return any(self.bucket(each) for each in self._found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DayDigests) and self.buckets == other.buckets

    __hash__ = None  # type: ignore[assignment]  # it changes


class ChannelDigests:
    """Digests of channels, day by day."""

    def __init__(self) -> None:
        self._days: dict[tuple[str, str], DayDigests] = {}

    @classmethod
    def of(cls, messages: Iterable[tuple[str, str, str, str, bytes]]) -> ChannelDigests:
        """From (channel, sender, id, ts, hash of the payload)."""
        made = cls()
        for channel, sender, message_id, ts, hashed in messages:
            made.add(channel, sender, message_id, ts, hashed)
        return made

    def add(self, channel: str, sender: str, message_id: str, ts: str, hashed: bytes, times: int = 1) -> None:
        """One more message, or with -1 one less."""
        key = channel, day_of(ts)
        found = self._days.get(key)
        if found is None:
            found = self._days[key] = DayDigests()
        found.add(item_hash(sender, message_id, hashed), times)

    def merge(self, other: ChannelDigests, times: int = 1) -> None:
        for key, found in other._days.items():
            self._days.setdefault(key, DayDigests()).merge(found, times)

    def day(self, channel: str, day: str) -> DayDigests:
        return self._days.get((channel, day)) or DayDigests()

    def days(self) -> Iterator[tuple[str, str, DayDigests]]:
        """Every channel and day that holds something, in order."""
        return ((*key, found) for key, found in sorted(self._days.items(), key=lambda each: each[0]) if found)

    def totals(self) -> dict[str, dict[str, Digest]]:
        made: dict[str, dict[str, Digest]] = {}
        for channel, day, found in self.days():
            made.setdefault(channel, {})[day] = found.total
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChannelDigests) and list(self.days()) == list(other.days())

    __hash__ = None  # type: ignore[assignment]  # it changes


# --- what a space answers; everything is about records from `floor` to `through` of its log ---


@dataclass(frozen=True, slots=True)
class DigestAnswer:
    """To `digest`: each shared channel, each day that holds something. `more`: there are days behind the last of these,
    by channel and day."""

    floor: int
    through: int
    channels: Mapping[str, Mapping[str, Digest]]
    more: bool = False


@dataclass(frozen=True, slots=True)
class BucketsAnswer:
    """To `buckets`: the 256 of a channel and a day."""

    floor: int
    through: int
    buckets: Sequence[Digest]


class RecordIdentity(NamedTuple):
    """A record by what counts of it."""

    seq: int
    sender: str
    id: str
    hash: bytes

    @property
    def item(self) -> bytes:
        return item_hash(self.sender, self.id, self.hash)

    def encode(self) -> tuple[int, str, str, str]:
        """As JSON has it: the hash in hex digits."""
        return self.seq, self.sender, self.id, self.hash.hex()

    @classmethod
    def decode(cls, row: tuple[int, str, str, str]) -> RecordIdentity:
        seq, sender, message_id, hashed = row
        if not _is_hash(hashed):
            raise MalformedDigest(f"{str(row)[:200]} does not name a record: sequence, sender, id, and 64 hex digits")
        return cls(seq, sender, message_id, bytes.fromhex(hashed))


@dataclass(frozen=True, slots=True)
class IdsAnswer:
    """To `ids`: records of a channel, a day and some buckets, by sequence; `more` follow after the last of them."""

    floor: int
    through: int
    ids: Sequence[RecordIdentity]
    more: bool = False


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and _HEX.match(value) is not None
