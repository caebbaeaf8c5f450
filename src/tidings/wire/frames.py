"""Frames: what the pipeline hands an owner, and the blocks they are made of.

A **block** holds consecutive records of one channel with one audience, compressed once and shared by every member. A
**frame** is a list of blocks for one owner, numbered within a series so that its reader can prove it has no gap: a
repeated number is a repeat, a skipped one a loss, a new series begins at 1 and its name says why. A frame's
`Nats-Msg-Id` is the hash of its bytes: a name made of owner and position would let a replay that packs differently be
taken for a repeat, the broker would drop the new content and nobody would notice. The head a frame was computed at
travels in a header (`HEAD_HEADER`), not in the bytes, so that an unchanged replay keeps its id.

Records keep their payload bytes verbatim; whether one may be surfaced is decided by `envelope.open_record`, not here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
import zstandard

from tidings.errors import MalformedFrame
from tidings.wire.headers import Fields

MAX_FRAME_MESSAGES = 256
MAX_FRAME_BYTES = 512 * 1024
#: raw bytes of a block, unless one message alone is larger
MAX_BLOCK_BYTES = 192 * 1024
HEAD_HEADER = "Td-Head"
LARGEST_RECORD = 300 * 1024
_RAW, _ZSTD = 0, 1

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class FrameRecord(msgspec.Struct, array_like=True, frozen=True):
    """One record of the log as a frame carries it. `tail` is its subject after `td.<space>.`."""

    seq: Count
    time_ns: Count
    tail: str
    headers: Fields
    payload: bytes


class Lost(msgspec.Struct, array_like=True, frozen=True):
    """Something owed that will not be delivered: how many records, where, and why."""

    channel: str
    first: Count
    last: Count
    count: Count
    cause: str


class Block(msgspec.Struct, array_like=True, frozen=True):
    codec: Literal[0, 1]
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAME_MESSAGES)]
    first: Count
    last: Count
    raw_size: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_RECORD)]
    body: bytes


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """`prev` is (first, last, count) of the owner's previous frame: what is lost when the number before is missing."""

    version: Literal[1]
    owner: str
    epoch: str
    series: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    number: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    prev: tuple[Count, Count, Count] | None
    lost: tuple[Lost, ...]
    blocks: tuple[Block, ...]


class _Assembled(msgspec.Struct, array_like=True, frozen=True):
    """A frame whose blocks are already bytes, so that what is shared is encoded once."""

    version: Literal[1]
    owner: str
    epoch: str
    series: str
    number: int
    prev: tuple[int, int, int] | None
    lost: tuple[Lost, ...]
    blocks: tuple[msgspec.Raw, ...]


_encoder = msgspec.msgpack.Encoder()
_records = msgspec.msgpack.Decoder(tuple[FrameRecord, ...])
_frames = msgspec.msgpack.Decoder(Frame)


def raw_size(record: FrameRecord) -> int:
    """About what a record adds to a block; never less than its payload."""
    size = len(record.payload) + len(record.tail) + 32
    for name, value in record.headers:
        size += len(name) + len(value) + 4
    return size


def encode_block(records: Sequence[FrameRecord]) -> bytes:
    """The bytes of a block. Deterministic: the same records give the same bytes under one codec version."""
    raw = _encoder.encode(records)
    packed = zstandard.ZstdCompressor(level=1).compress(raw)
    codec, body = (_ZSTD, packed) if len(packed) < len(raw) else (_RAW, raw)
    codec_id: Literal[0, 1] = 1 if codec == _ZSTD else 0
    return _encoder.encode(Block(codec_id, len(records), records[0].seq, records[-1].seq, len(raw), body))


def open_block(block: Block) -> tuple[FrameRecord, ...]:
    """The records of a block: as many as it says, in order, inside the range it names."""
    try:
        raw = block.body
        if block.codec == _ZSTD:
            # The library believes the size a body claims rather than the limit it is given.
            if zstandard.frame_content_size(block.body) not in (block.raw_size, -1):
                raise MalformedFrame(f"a block says {block.raw_size} bytes and its body says otherwise")
            raw = zstandard.ZstdDecompressor().decompress(
                block.body, max_output_size=block.raw_size, allow_extra_data=False
            )
        if len(raw) != block.raw_size:
            raise MalformedFrame(f"a block says {block.raw_size} bytes and has {len(raw)}")
        records = _records.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise MalformedFrame(f"a block does not open: {error}") from error
    sequences = [record.seq for record in records]
    if len(records) != block.count or sequences != sorted(set(sequences)):
        raise MalformedFrame("the records of a block are not as many as it says, or not in order")
    if (sequences[0], sequences[-1]) != (block.first, block.last):
        raise MalformedFrame(f"a block says {block.first}..{block.last} and holds {sequences[0]}..{sequences[-1]}")
    return records


def encode_frame(
    owner: str,
    epoch: str,
    series: str,
    number: int,
    blocks: Iterable[bytes],
    *,
    prev: tuple[int, int, int] | None = None,
    lost: Iterable[Lost] = (),
) -> bytes:
    """A frame around blocks that `encode_block` made."""
    shared = tuple(msgspec.Raw(block) for block in blocks)
    return _encoder.encode(_Assembled(1, owner, epoch, series, number, prev, tuple(lost), shared))


def decode_frame(data: bytes) -> Frame:
    try:
        frame = _frames.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise MalformedFrame(f"this is not a frame: {error}") from error
    if (count := sum(block.count for block in frame.blocks)) > MAX_FRAME_MESSAGES:
        raise MalformedFrame(f"a frame says it has {count} messages; at most {MAX_FRAME_MESSAGES} fit into one")
    return frame


def frame_id(frame: bytes) -> str:
    """The deduplication id of a frame: equal bytes, equal id; anything else differs."""
    return hashlib.sha256(frame).hexdigest()
