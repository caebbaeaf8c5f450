"""Golden vectors of frames: raw and compressed blocks, and what is refused, as a whole frame or as one block of it.

Compressed bodies are written here as bytes: another version of a compressor packs differently, and every decompressor
must open them. Those that are hostile are made by hand (RFC 8878), because no compressor writes them.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from golden.cast import ADA, BOB, MESSAGE_ID, SPACE
from golden.messages import base
from tidings.wire import signing
from tidings.wire.frames import (
    HEAD_HEADER,
    LARGEST_RECORD,
    MAX_BLOCK_BYTES,
    MAX_FRAME_BYTES,
    MAX_FRAME_MESSAGES,
    Block,
    FrameRecord,
    Lost,
    decode_frame,
    encode_frame,
    frame_id,
)
from tidings.wire.times import record_time

LIMITS = {
    "frame_messages": MAX_FRAME_MESSAGES,
    "frame_bytes": MAX_FRAME_BYTES,
    "block_bytes": MAX_BLOCK_BYTES,
    "block_raw_size": LARGEST_RECORD,
}
EPOCH, SERIES = "1f0c8a52-3d1e-4f0a-9a3b-5f6e7d8c9b0a", "s-3"
_encode = msgspec.msgpack.encode
_MAGIC = bytes.fromhex("28b52ffd")


def vectors() -> dict[str, Any]:
    return {"frames": {"head_header": HEAD_HEADER, "valid": _valid(), "invalid": _invalid()}}


def _record(seq: int, text: str) -> FrameRecord:
    payload = json.dumps(base(parts=[{"kind": "text", "text": text}])).encode()
    signature = signing.sign(ADA, SPACE.id, "chat", "general", payload)
    headers = (("Td-Sig", signature), ("Nats-Msg-Id", MESSAGE_ID))
    return FrameRecord(seq, 1_763_208_000_000_000_000 + seq, f"chat.{ADA.id}.general", headers, payload)


RECORDS = (_record(7, "hello"), _record(9, "again"))
RAW = _encode(RECORDS)
#: `RAW` by zstandard 0.25 at level 1
COMPRESSED = bytes.fromhex(
    "28b52ffd60a902dd0d00b6db653b4067aa0ec300d182dd5815e0f4f330ed8425f4150e13b9be898605d55e484a512a0d1aba"
    "8e19d50fd21136792d182b9bb28a71cd2491e7d8c1ca055a0055004e00a025e11333e4e921ee03400a056439992768cbca01"
    "9389a3fb46b799f0f2255a2eb9117e8c49873fcc9a383a31725d1e18315c102d1ee62418fc3c489670080ac72492310ca5e3"
    "b630916a07d2713228500d84d4088002830853b8ba36b3cbcc92a356d87bc96c494b677a51dd00a7b2b32668c18252fd2130"
    "8918170dfae01b4af7899022bd4dcb36f6073298bcda5de4928e039f5548ca2466ce9e08e3d818b1941423eab84ef1296cfa"
    "b236120c9f8e763ada297a6e1e4240d79eaf54e9fb4651cdf17078ff4abd2ef557ed7747a35fa9afda7778cf7ca55ebcf726"
    "eed5eed57055c995ad2a9bf1c5a0f42bf55fb52fcf87589060d48b4c81e5cb0aa586d2a3a736356383781e2a63c2ce428d2c"
    "8364500f7d962b2cb92d61b3479a5de939d521fe540bec03664677e70b896eba8140e02471de1f384f647085cac8a0f93c48"
    "23d991c82cb3790e0e224a0da5e71cce76f8aa050b00560550e30131d7fbaccb24d77185c5b44a4690ead0b1e3f03fb096f8"
    "482a29"
)


def _block(
    body: bytes = RAW,
    codec: int = 0,
    count: int = 2,
    first: int = 7,
    last: int = 9,
    raw_size: int = len(RAW),
) -> bytes:
    return _encode((codec, count, first, last, raw_size, body))


def _frame(*blocks: bytes, **changes: Any) -> bytes:
    lost = changes.pop("lost", ())
    numbers: dict[str, Any] = {"number": 4, "prev": (3, 5, 2)} | changes
    return encode_frame(BOB.id, EPOCH, SERIES, blocks=blocks, lost=lost, **numbers)


def _written(*fields: Any) -> bytes:
    """A frame with fields that ours never has."""
    return _encode(fields)


def _valid() -> list[dict[str, Any]]:
    lost = Lost("general", 1, 2, 2, "the mailbox was full for too long")
    return [
        _opened(why, data)
        for why, data in [
            ("a raw block", _frame(_block())),
            ("a compressed block", _frame(_block(COMPRESSED, 1))),
            ("two blocks", _frame(_block(), _block(COMPRESSED, 1))),
            ("the first of a series", _frame(_block(), number=1, prev=None)),
            ("something was lost, and nothing else is in it", _frame(number=5, lost=(lost,))),
            ("a compressed body that does not say its size", _frame(_block(_zstd(RAW, sized=False), 1))),
            ("a field that a later version added", _written(1, BOB.id, EPOCH, SERIES, 4, None, [], [], "more")),
        ]
    ]


def _opened(why: str, data: bytes) -> dict[str, Any]:
    frame = decode_frame(data)
    return {
        "why": why,
        "frame_hex": data.hex(),
        "id": frame_id(data),
        "owner": frame.owner,
        "epoch": frame.epoch,
        "series": frame.series,
        "number": frame.number,
        "prev": frame.prev,
        "lost": [msgspec.to_builtins(each) for each in frame.lost],
        "blocks": [_opened_block(each) for each in frame.blocks],
    }


def _opened_block(block: Block) -> dict[str, Any]:
    facts = {name: getattr(block, name) for name in ("codec", "count", "first", "last", "raw_size")}
    return facts | {
        "records": [
            {
                "seq": each.seq,
                "time": record_time(each.time_ns),
                "subject_tail": each.tail,
                "headers": [list(field) for field in each.headers],
                "payload": each.payload.decode(),
            }
            for each in RECORDS
        ]
    }


def _invalid() -> list[dict[str, str]]:
    good, half = _frame(_block()), len(RAW) // 2
    many = [_block(count=129, raw_size=len(RAW)) for _ in range(2)]
    swelling = _rle(LARGEST_RECORD)
    return [
        {"why": why, "frame_hex": data.hex(), "refused": "frame"}
        for why, data in [
            ("nothing", b""),
            ("one byte less", good[:-1]),
            ("one byte more", good + b"\xc0"),
            ("an object", _encode({"version": 1})),
            ("JSON", b"[1]"),
            ("another version", _written(2, BOB.id, EPOCH, SERIES, 4, None, [], [])),
            ("no blocks field", _written(1, BOB.id, EPOCH, SERIES, 4, None, [])),
            ("number 0", _written(1, BOB.id, EPOCH, SERIES, 0, None, [], [])),
            ("a series without a name", _written(1, BOB.id, EPOCH, "", 4, None, [], [])),
            ("two numbers in prev", _written(1, BOB.id, EPOCH, SERIES, 4, [1, 2], [], [])),
            ("an owner that is not text", _written(1, 7, EPOCH, SERIES, 4, None, [], [])),
            ("258 messages, as its blocks say", _frame(*many)),
            ("a codec that nobody knows", _frame(_block(codec=2))),
            ("a block of no records", _frame(_block(count=0))),
            ("a block that says it swells above the limit", _frame(_block(swelling, 1, raw_size=LARGEST_RECORD + 1))),
        ]
    ] + [
        {"why": why, "frame_hex": _frame(data).hex(), "refused": "block"}
        for why, data in [
            ("a raw body of another size", _block(RAW[:-1])),
            ("a raw body that is no msgpack", _block(b"\xc1" * len(RAW))),
            ("not compressed, and says so", _block(RAW, 1)),
            ("a compressed body that ends early", _block(COMPRESSED[:-4], 1)),
            ("a compressed body with something after it", _block(COMPRESSED + b"\x00", 1)),
            ("two compressed bodies, one after the other", _block(_zstd(RAW[:half]) + _zstd(RAW[half:]), 1)),
            ("a body that says it is larger than its block says", _block(COMPRESSED, 1, raw_size=len(RAW) - 1)),
            ("a body that says it is a gigabyte", _block(_claiming(2**30), 1)),
            ("a body that swells and does not say so", _block(swelling, 1)),
            ("a record less than it says", _block(_encode(RECORDS[:1]), raw_size=len(_encode(RECORDS[:1])))),
            ("records that do not ascend", _block(_encode(RECORDS[::-1]))),
            ("the same record twice", _block(_encode(RECORDS[:1] * 2), last=7, raw_size=len(_encode(RECORDS[:1] * 2)))),
            ("another range than it says", _block(last=10)),
        ]
    ]


# --- compressed by hand: RFC 8878 ---


def _zstd(raw: bytes, *, sized: bool = True) -> bytes:
    """A Zstandard frame of one uncompressed block; the content size is four bytes, or not there."""
    header = b"\xa0" + len(raw).to_bytes(4, "little") if sized else b"\x00\x58"
    return _MAGIC + header + _last_block(0, len(raw)) + raw


def _claiming(size: int) -> bytes:
    return _MAGIC + b"\xa0" + size.to_bytes(4, "little") + _last_block(1, 1) + b"x"


def _rle(size: int) -> bytes:
    """A few bytes that become `size`, and do not say so: blocks of one repeated byte, 128 KiB each at most."""
    blocks = [min(2**17, size - start) for start in range(0, size, 2**17)]
    made = b"".join(
        ((length << 3) | 2 | (n == len(blocks) - 1)).to_bytes(3, "little") + b"x" for n, length in enumerate(blocks)
    )
    return _MAGIC + b"\x00\x58" + made


def _last_block(kind: int, size: int) -> bytes:
    return ((size << 3) | (kind << 1) | 1).to_bytes(3, "little")
