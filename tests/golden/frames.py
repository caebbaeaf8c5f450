"""Golden vectors of frames: raw, compressed and sealed blocks, and what is refused, as a whole frame or as one block.

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
from tidings.wire.block_refs import MAX_INLINE, BlockSealer, context
from tidings.wire.frames import (
    HEAD_HEADER,
    LARGEST_RECORD,
    MAX_BLOCK_BYTES,
    MAX_FRAME_BYTES,
    MAX_FRAME_MESSAGES,
    MAX_FRAME_REFS,
    Block,
    FrameRecord,
    Lost,
    Ref,
    decode_frame,
    encode_frame,
    encode_seqs,
    frame_id,
)
from tidings.wire.subjects import Subjects, block_shard
from tidings.wire.times import record_time

LIMITS = {
    "frame_messages": MAX_FRAME_MESSAGES,
    "frame_refs": MAX_FRAME_REFS,
    "block_inline": MAX_INLINE,
    "frame_bytes": MAX_FRAME_BYTES,
    "block_bytes": MAX_BLOCK_BYTES,
    "block_raw_size": LARGEST_RECORD,
}
EPOCH, SERIES = "1f0c8a52-3d1e-4f0a-9a3b-5f6e7d8c9b0a", "s-3"
_encode = msgspec.msgpack.encode
_MAGIC = bytes.fromhex("28b52ffd")


def vectors() -> dict[str, Any]:
    return {
        "frames": {"head_header": HEAD_HEADER, "valid": _valid(), "invalid": _invalid()},
        "sealed_blocks": [_sealed_block(*each) for each in ((RAW, 0), (COMPRESSED, 1))],
        "block_shards": [{"name": name, "shard": block_shard(name)} for name in ("0" * 40, "f" * 40, NAME.hex())],
    }


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


# --- blocks by reference ---

SEALER = BlockSealer(bytes(range(32)), SPACE.id, EPOCH)
SEQS = encode_seqs([record.seq for record in RECORDS])
SEALED = SEALER.seal("general", _block(COMPRESSED, 1), SEQS)
NAME, KEY = bytes.fromhex(SEALED.name), msgspec.msgpack.decode(SEALED.ref, type=Ref).key


def _ref(**changes: Any) -> bytes:
    """The reference to `SEALED`, with fields that are not true of it."""
    fields: dict[str, Any] = msgspec.structs.asdict(msgspec.msgpack.decode(SEALED.ref, type=Ref)) | changes
    return _encode(tuple(fields.values()))


def _sealed_block(body: bytes, codec: int) -> dict[str, Any]:
    """What whoever writes blocks derives. A reader needs none of it but `context_hex`."""
    block, sealed = _block(body, codec), SEALER.seal("general", _block(body, codec), SEQS)
    ref = msgspec.msgpack.decode(sealed.ref, type=Ref)
    return {
        "secret_hex": bytes(range(32)).hex(),
        "space_id": SPACE.id,
        "epoch": EPOCH,
        "channel": "general",
        "block_hex": block.hex(),
        "context_hex": context(SPACE.id, EPOCH, "general", ref).hex(),
        "name": sealed.name,
        "key_hex": ref.key.hex(),
        "data_hex": sealed.data.hex(),
        "ref_hex": sealed.ref.hex(),
    }


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
            ("a block by reference", _frame(SEALED.ref)),
            ("a raw block by reference", _frame(SEALER.seal("general", _block(), SEQS).ref)),
            ("a block and one by reference", _frame(_block(), SEALED.ref)),
            ("a reference with a field that a later version added", _frame(_encode((*_fields(SEALED.ref), "more")))),
            ("a block with a field that a later version added", _frame(_encode((*_fields(_block()), 7)))),
        ]
    ]


def _fields(block: bytes) -> list[Any]:
    return list(msgspec.msgpack.decode(block))


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


def _opened_block(block: Block | Ref) -> dict[str, Any]:
    facts: dict[str, Any] = {name: getattr(block, name) for name in ("codec", "count", "first", "last", "raw_size")}
    if isinstance(block, Ref):
        stored = SEALER.seal("general", _block(COMPRESSED, 1) if block.codec else _block(), SEQS)
        facts["ref"] = {
            "size": block.size,
            "channel": block.channel,
            "name": block.name.hex(),
            "key_hex": block.key.hex(),
            "seqs": list(block.seqs),
            "get": Subjects("main").block_get(block.name.hex()),
            "stored_hex": stored.data.hex(),
        }
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
    many = [_block(count=2_049, raw_size=len(RAW)) for _ in range(2)]
    wrong_key, flipped = bytes(32), bytes([SEALED.data[0] ^ 1]) + SEALED.data[1:]
    swelling = _rle(LARGEST_RECORD)
    return (
        [
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
                ("4,098 messages, as its blocks say", _frame(*many)),
                ("33 references", _frame(*[SEALED.ref] * (MAX_FRAME_REFS + 1))),
                ("a reference without its sequences", _frame(_encode(_fields(SEALED.ref)[:-1]))),
                ("a reference of a codec that nobody knows", _frame(_ref(codec=2))),
                ("a reference to no records", _frame(_ref(count=0))),
                ("a reference to more records than it names", _frame(_ref(count=3))),
                ("a reference to fewer records than it names", _frame(_ref(count=1))),
                ("a reference to 4,097 records", _frame(_many_records(MAX_FRAME_MESSAGES + 1))),
                ("a reference whose last is another", _frame(_ref(last=10))),
                ("a reference to what swells above the limit", _frame(_ref(raw_size=LARGEST_RECORD + 1))),
                ("a reference to no more than a tag", _frame(_ref(size=16))),
                ("a reference to more than a block may have", _frame(_ref(size=LARGEST_RECORD + 17))),
                ("a reference to a channel that is none", _frame(_ref(channel="general.*"))),
                ("a reference with a name that is too short", _frame(_ref(name=NAME[:-1]))),
                ("a reference with a name in hex", _frame(_ref(name=SEALED.name))),
                ("a reference with a key that is too long", _frame(_ref(key=KEY + b"x"))),
                ("a reference with a key that is text", _frame(_ref(key="k" * 32))),
                ("sequences that do not ascend", _frame(_ref(packed_seqs=b"\x00", last=7))),
                ("sequences that are not spelled the shortest way", _frame(_ref(packed_seqs=b"\x82\x00"))),
                ("sequences that end early", _frame(_ref(packed_seqs=b"\x82"))),
                ("sequences of more than nine bytes", _frame(_ref(packed_seqs=b"\x82" + b"\x80" * 8 + b"\x01"))),
                ("sequences beyond 63 bits", _frame(_ref(packed_seqs=b"\xff" * 8 + b"\x7f"))),
                ("a codec that nobody knows", _frame(_block(codec=2))),
                ("a block of no records", _frame(_block(count=0))),
                (
                    "a block that says it swells above the limit",
                    _frame(_block(swelling, 1, raw_size=LARGEST_RECORD + 1)),
                ),
            ]
        ]
        + [
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
                (
                    "the same record twice",
                    _block(_encode(RECORDS[:1] * 2), last=7, raw_size=len(_encode(RECORDS[:1] * 2))),
                ),
                ("another range than it says", _block(last=10)),
            ]
        ]
        + [
            {"why": why, "frame_hex": _frame(ref).hex(), "stored_hex": stored.hex(), "refused": "block"}
            for why, ref, stored in [
                ("what is stored is a byte shorter", SEALED.ref, SEALED.data[:-1]),
                ("what is stored is a byte longer", SEALED.ref, SEALED.data + b"x"),
                ("what is stored was changed", SEALED.ref, flipped),
                ("nothing is stored", SEALED.ref, b""),
                ("a reference with another key", _ref(key=wrong_key), SEALED.data),
                ("a reference with another channel", _ref(channel="other"), SEALED.data),
                ("a reference with another codec", _ref(codec=0), SEALED.data),
                ("a reference with another raw size", _ref(raw_size=len(RAW) + 1), SEALED.data),
                ("a reference to another range", _ref(first=6, packed_seqs=b"\x03"), SEALED.data),
                ("a reference to another number of records", _ref(count=3, packed_seqs=b"\x01\x01"), SEALED.data),
                ("a reference sealed in another epoch", *_elsewhere(SPACE.id, "another epoch")),
                ("a reference sealed in another space", *_elsewhere(ADA.id, EPOCH)),
                ("a reference that names other records than are inside", *_misnamed()),
            ]
        ]
    )


def _many_records(count: int) -> bytes:
    return _ref(count=count, last=7 + count - 1, packed_seqs=b"\x01" * (count - 1))


def _elsewhere(space_id: str, epoch: str) -> tuple[bytes, bytes]:
    sealed = BlockSealer(bytes(range(32)), space_id, epoch).seal("general", _block(COMPRESSED, 1), SEQS)
    return sealed.ref, sealed.data


def _misnamed() -> tuple[bytes, bytes]:
    """The records are 7, 9 and 11; the reference says 7, 8 and 11."""
    records = (RECORDS[0], msgspec.structs.replace(RECORDS[0], seq=9), msgspec.structs.replace(RECORDS[1], seq=11))
    raw = _encode(records)
    sealed = SEALER.seal("general", _block(raw, count=3, last=11, raw_size=len(raw)), encode_seqs([7, 8, 11]))
    return sealed.ref, sealed.data


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
