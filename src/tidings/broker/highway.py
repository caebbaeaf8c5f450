"""HighwayHash with 64 bits, by which nats-server knows whether a record on its disk is whole.

Written out after the published algorithm because no maintained package for Python has it. It is slow (some microseconds
for each 32 bytes) and used for a few records at a time: `blocks.py` compares it with what the broker wrote before it
relies on it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_ALL, _LOW = (1 << 64) - 1, (1 << 32) - 1
_MUL0 = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
_MUL1 = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)
_PACKET = struct.Struct("<4Q")


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
