"""Records of the broker's files that are known to be damaged, made harmless while the broker is not running.

nats-server reads a block from its beginning when it starts after a crash, and cuts away everything from the first
record whose checksum is wrong: one flipped bit then costs all the records behind it (measured, 2.15.1). One that is
known to be damaged is therefore given the checksum of what it holds now. Nothing else of it changes and its content
stays lost: its signature no longer verifies, so no reader takes it for what its sender wrote.

    record   length u32 (top bit: it has headers), sequence u64, time i64, length of the subject u16,
             subject, [length of the headers u32, headers], payload, checksum of all but the lengths
    key      SHA-256 of "<stream>-<number of the block>"

Before anything is written another record of the same block must have the checksum we compute: files of another format
are left alone. A record whose lengths are damaged cannot be mended here, which is said.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_HEAD = struct.Struct("<IQqH")
_CHECKSUM = 8
_HAS_HEADERS = 1 << 31
#: marks of a record that was erased, or that says another one was
_NO_MESSAGE = 3 << 62
_LONGEST = 32 << 20
_ALL, _LOW = (1 << 64) - 1, (1 << 32) - 1
_MUL0 = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
_MUL1 = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)
_PACKET = struct.Struct("<4Q")


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """Where a record lies in its block."""

    start: int
    end: int
    seq: int
    hashed: bytes
    checksum: bytes

    def is_whole(self, key: bytes) -> bool:
        return highway_hash_64(key, self.hashed) == self.checksum


@dataclass(slots=True)
class Sealing:
    """What was done: sequences that no longer endanger others, and sentences about those that still do."""

    sealed: list[int]
    left: list[str]


def seal_damaged(stream_folder: Path, stream: str, damaged: Iterable[tuple[int, int]]) -> Sealing:
    """Give these records of a stream (runs of first and last sequence) checksums that fit. The broker must be off."""
    runs, done = list(damaged), Sealing([], [])
    blocks = sorted((each for each in (stream_folder / "msgs").glob("*.blk") if each.stem.isdigit()), key=_number)
    for path, following in zip(blocks, [*blocks[1:], None], strict=True):
        first, end = _first_seq(path), _first_seq(following) if following is not None else None
        if any(last >= first and (end is None or start < end) for start, last in runs):
            _seal_in(path, hashlib.sha256(f"{stream}-{_number(path)}".encode()).digest(), runs, done)
    return done


def _number(path: Path) -> int:
    return int(path.stem)


def _first_seq(path: Path) -> int:
    """Of the first record of a block; 0 if that cannot be said, which rules no block out."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    return int(_HEAD.unpack(head)[1]) & ~_NO_MESSAGE if len(head) == _HEAD.size else 0


def _seal_in(path: Path, key: bytes, runs: Collection[tuple[int, int]], done: Sealing) -> None:
    data = path.read_bytes()
    records = list(read_block(data))
    wanted = [each for each in records if any(first <= each.seq <= last for first, last in runs)]
    broken = [each for each in wanted if not each.is_whole(key)]
    reached = records[-1].end if records else 0
    if reached < len(data) and any(last > (records[-1].seq if records else 0) for _, last in runs):
        done.left.append(f"{path.name} cannot be read from byte {reached} on: a crash of the broker may cut it there")
    if not broken:
        return
    if not any(each.is_whole(key) for each in records if each not in wanted):
        done.left.append(f"{path.name} has no record that shows its format is the one known here: it is left as it is")
        return
    with path.open("r+b") as file:
        for each in broken:
            file.seek(each.end - _CHECKSUM)
            file.write(highway_hash_64(key, each.hashed))
            done.sealed.append(each.seq)
        file.flush()
        os.fsync(file.fileno())


def read_block(data: bytes) -> Iterator[BlockRecord]:
    """The records of a block in order, up to where its lengths make no sense; what holds no message is passed over."""
    start = 0
    while start + _HEAD.size + _CHECKSUM <= len(data):
        length, seq, _, subject = _HEAD.unpack_from(data, start)
        has_headers, length = bool(length & _HAS_HEADERS), length & ~_HAS_HEADERS
        end, body = start + length, start + _HEAD.size
        after_subject = body + subject
        content = after_subject + 4 if has_headers else after_subject
        if length > _LONGEST or end > len(data) or content > end - _CHECKSUM:
            return
        if has_headers and content + int.from_bytes(data[after_subject:content], "little") > end - _CHECKSUM:
            return
        if not seq & _NO_MESSAGE and seq:
            hashed = data[start + 4 : start + 20] + data[body:after_subject] + data[content : end - _CHECKSUM]
            yield BlockRecord(start, end, seq, hashed, data[end - _CHECKSUM : end])
        start = end


# --- HighwayHash with 64 bits, by which nats-server knows whether a record on its disk is whole: written out after the
# published algorithm because no maintained package for Python has it. Slow (some microseconds for each 32 bytes), and
# compared with what the broker wrote before it is relied on.


def highway_hash_64(key: bytes, data: bytes) -> bytes:
    """Eight bytes, as they lie on disk. `key` has 32."""
    state = _State(_PACKET.unpack(key))
    whole = len(data) // _PACKET.size * _PACKET.size
    for at in range(0, whole, _PACKET.size):
        state.update(_PACKET.unpack_from(data, at))
    if whole < len(data):
        state.update_rest(data[whole:])
    return state.finish().to_bytes(8, "little")


class _State:
    def __init__(self, key: Sequence[int]) -> None:
        self.mul0, self.mul1 = list(_MUL0), list(_MUL1)
        self.v0 = [mul ^ word for mul, word in zip(_MUL0, key, strict=True)]
        self.v1 = [mul ^ _swapped(word) for mul, word in zip(_MUL1, key, strict=True)]

    def update(self, words: Sequence[int]) -> None:
        v0, v1, mul0, mul1 = self.v0, self.v1, self.mul0, self.mul1
        for lane in range(4):
            v1[lane] = (v1[lane] + mul0[lane] + words[lane]) & _ALL
            mul0[lane] ^= (v1[lane] & _LOW) * (v0[lane] >> 32)
            v0[lane] = (v0[lane] + mul1[lane]) & _ALL
            mul1[lane] ^= (v0[lane] & _LOW) * (v1[lane] >> 32)
        for source, target in ((v1, v0), (v0, v1)):
            for lane in (0, 2):
                _zip_and_add(source, target, lane)

    def update_rest(self, rest: bytes) -> None:
        """Fewer than 32 bytes."""
        size, odd = len(rest), len(rest) % 4
        for lane in range(4):
            self.v0[lane] = (self.v0[lane] + (size << 32) + size) & _ALL
            low, high = self.v1[lane] & _LOW, self.v1[lane] >> 32
            self.v1[lane] = _rotated(low, size) | _rotated(high, size) << 32
        packet = bytearray(_PACKET.size)
        even = size - odd
        packet[:even] = rest[:even]
        if size & 16:
            packet[28:32] = rest[size - 4 :]
        elif odd:
            packet[16:19] = bytes((rest[even], rest[even + odd // 2], rest[size - 1]))
        self.update(_PACKET.unpack(packet))

    def finish(self) -> int:
        for _ in range(4):
            self.update([_swapped(self.v0[lane]) for lane in (2, 3, 0, 1)])
        return (self.v0[0] + self.v1[0] + self.mul0[0] + self.mul1[0]) & _ALL


def _swapped(word: int) -> int:
    return word >> 32 | (word & _LOW) << 32


def _rotated(half: int, by: int) -> int:
    return (half << by | half >> 32 - by) & _LOW


def _bytes_of(word: int, *places: tuple[int, int]) -> int:
    """Bytes of a word, moved: (from, to), counted from the lowest."""
    return sum((word >> 8 * source & 0xFF) << 8 * target for source, target in places)


def _zip_and_add(source: list[int], target: list[int], lane: int) -> None:
    low, high = source[lane], source[lane + 1]
    first = _bytes_of(low, (3, 0), (2, 2), (5, 3), (1, 5), (0, 7)) | _bytes_of(high, (4, 1), (6, 4), (7, 6))
    second = _bytes_of(high, (3, 0), (2, 2), (5, 3), (1, 4), (0, 6)) | _bytes_of(low, (4, 1), (6, 5), (7, 7))
    target[lane] = (target[lane] + first) & _ALL
    target[lane + 1] = (target[lane + 1] + second) & _ALL
