"""Frames: what the pipeline hands an owner, and the blocks they are made of.

A **block** holds consecutive records of one channel with one audience, compressed once and shared by every member. A
**frame** is a list of blocks for one owner, each as it is or as a **reference** (`Ref`) to where it
lies sealed, with the key that opens it (`open_ref`).
Frames are numbered within a series so that a reader can prove it has no gap: a repeated number is a repeat, a skipped
one a loss, a new series begins at 1 and its name says why. A frame's
`Nats-Msg-Id` is the hash of its bytes: a name made of owner and position would let a replay that packs differently be
taken for a repeat, the broker would drop the new content and nobody would notice. The head a frame was computed at
travels in a header (`HEAD_HEADER`), not in the bytes, so that an unchanged replay keeps its id.

Records keep their payload bytes verbatim; whether one may be surfaced is decided by `envelope.open_record`, not here.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Final, Literal

import msgspec
import zstandard
from nacl import bindings
from nacl.exceptions import CryptoError

from tidings.errors import MalformedFrame
from tidings.wire.names import is_channel
from tidings.wire.records import Fields

VERSION: Final = 1
MAX_FRAME_MESSAGES = 4_096
MAX_FRAME_REFS = 32
MAX_FRAME_BYTES = 512 * 1024
#: raw bytes of a block, unless one message alone is larger
MAX_BLOCK_BYTES = 192 * 1024
HEAD_HEADER = "Td-Head"
LARGEST_RECORD = 300 * 1024
_RAW, _ZSTD = 0, 1
NAME_BYTES, KEY_BYTES, TAG_BYTES = 20, 32, 16
#: the longest a sequence is after the one before it, as a varint
_VARINT_BYTES = 9
#: a key as msgpack has it, also one that is cut off
_KEY = re.compile(rb"\xc4\x20.{0,32}", re.DOTALL)

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


class Ref(msgspec.Struct, array_like=True, frozen=True):
    """A block that lies elsewhere: what a `Block` says of itself, where it is, the key, and which records it holds."""

    codec: Literal[0, 1]
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAME_MESSAGES)]
    first: Count
    last: Count
    raw_size: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_RECORD)]
    #: bytes of what is stored: the body of the block, sealed
    size: Annotated[int, msgspec.Meta(ge=TAG_BYTES + 1, le=LARGEST_RECORD + TAG_BYTES)]
    channel: str
    name: Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    #: `encode_seqs` of the records
    packed_seqs: Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME_MESSAGES * _VARINT_BYTES)]

    @property
    def seqs(self) -> tuple[int, ...]:
        return decode_seqs(self.first, self.packed_seqs)


class Frame(msgspec.Struct, frozen=True):
    """`prev` is (first, last, count) of the owner's previous frame: what is lost when the number before is missing."""

    version: int
    owner: str
    epoch: str
    series: str
    number: int
    prev: tuple[int, int, int] | None
    lost: tuple[Lost, ...]
    blocks: tuple[Block | Ref, ...]


class _Assembled(msgspec.Struct, array_like=True, frozen=True):
    """A frame as it travels. Its blocks are bytes, so that what is shared is encoded once."""

    version: Literal[1]
    owner: str
    epoch: str
    series: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    number: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    prev: tuple[Count, Count, Count] | None
    lost: tuple[Lost, ...]
    blocks: tuple[msgspec.Raw, ...]


class _Opening(msgspec.Struct, array_like=True, frozen=True):
    """What a block and a reference begin with; a body or a size comes sixth."""

    codec: msgspec.Raw
    count: msgspec.Raw
    first: msgspec.Raw
    last: msgspec.Raw
    raw_size: msgspec.Raw
    sixth: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_records = msgspec.msgpack.Decoder(tuple[FrameRecord, ...])
_frames = msgspec.msgpack.Decoder(_Assembled)
_openings = msgspec.msgpack.Decoder(_Opening)
_blocks = msgspec.msgpack.Decoder(Block)
_refs = msgspec.msgpack.Decoder(Ref)
#: first bytes of `bin` in msgpack
_BIN = frozenset({0xC4, 0xC5, 0xC6})


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
    """A frame around blocks that `encode_block` made, or references to blocks that `BlockSealer` sealed."""
    shared = tuple(msgspec.Raw(block) for block in blocks)
    return _encoder.encode(_Assembled(VERSION, owner, epoch, series, number, prev, tuple(lost), shared))


def decode_frame(data: bytes) -> Frame:
    """The frame in these bytes. What its references name is not looked at here."""
    try:
        found = _frames.decode(data)
        blocks = tuple(_decode_block(raw) for raw in found.blocks)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise MalformedFrame(f"this is not a frame: {error}") from error
    if (count := sum(block.count for block in blocks)) > MAX_FRAME_MESSAGES:
        raise MalformedFrame(f"a frame says it has {count} messages; at most {MAX_FRAME_MESSAGES} fit into one")
    if (refs := sum(isinstance(block, Ref) for block in blocks)) > MAX_FRAME_REFS:
        raise MalformedFrame(f"a frame has {refs} references; at most {MAX_FRAME_REFS} fit into one")
    return Frame(found.version, found.owner, found.epoch, found.series, found.number, found.prev, found.lost, blocks)


def _decode_block(raw: msgspec.Raw) -> Block | Ref:
    """The sixth element says which it is: the body of a block, or the size of what a reference names."""
    if memoryview(_openings.decode(raw).sixth)[0] in _BIN:
        return _blocks.decode(raw)
    ref = _refs.decode(raw)
    seqs = ref.seqs
    if len(seqs) != ref.count or seqs[-1] != ref.last:
        raise MalformedFrame(f"a reference says {ref.count} records up to {ref.last} and names others")
    if not is_channel(ref.channel):
        raise MalformedFrame("a reference names no channel")
    return ref


def encode_seqs(seqs: Sequence[int]) -> bytes:
    """Ascending sequences, each but the first as what it adds to the one before: LEB128, low seven bits first."""
    steps = [seq - before for before, seq in pairwise(seqs)]
    if max(steps, default=0) < 0x80:
        return bytes(steps)
    packed = bytearray()
    for step in steps:
        while step > 0x7F:
            packed.append(step & 0x7F | 0x80)
            step >>= 7
        packed.append(step)
    return bytes(packed)


def decode_seqs(first: int, packed: bytes) -> tuple[int, ...]:
    """What `encode_seqs` packed. Each step is at least 1 and has one spelling."""
    if packed.isascii():  # every step in one byte, as on a channel of a usual log
        if 0 in packed:
            raise MalformedFrame("a sequence in a reference does not ascend")
        return tuple(accumulate(packed, initial=first))
    seqs, step, shift = [first], 0, 0
    for byte in packed:
        step |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80:
            if shift == 7 * _VARINT_BYTES:
                raise MalformedFrame("a sequence in a reference is too long")
        elif not byte:
            raise MalformedFrame("a sequence in a reference does not ascend, or is not spelled the shortest way")
        else:
            seqs.append(seqs[-1] + step)
            step = shift = 0
    if shift:
        raise MalformedFrame("the sequences of a reference end early")
    return tuple(seqs)


def without_keys(frame: bytes) -> bytes:
    """Bytes that may be a frame, for somebody to look at: whatever could be a key in them is struck out.

    Where they do not open nobody can say what is a key, so a few bytes of a body may be struck out too.
    """
    return _KEY.sub(lambda found: found[0][:2] + bytes(len(found[0]) - 2), frame)


def frame_id(frame: bytes) -> str:
    """The deduplication id of a frame: equal bytes, equal id; anything else differs."""
    return hashlib.sha256(frame).hexdigest()


# --- block refs ---
# Blocks by reference: sealed once, stored once, named in the frames of everybody who is owed them.
#
#     C      msgpack ["td-blk2", space id, epoch, channel, first, last, count, codec, raw size]
#     okm    HMAC-SHA512(secret, C || SHA-256(body))      key = okm[:32], name = okm[32:52]
#     sealed XChaCha20-Poly1305(body) under key, with a nonce of zeros and C as additional data
#
# `body` is the body of a block, already compressed. A key is used for exactly one text: it is derived from the bytes
# that are encrypted (two versions of a compressor give two keys), so a nonce that is always the same repeats nothing, a
# replay makes the same bytes, and nobody who guesses a text can confirm it without the secret. Whoever has the secret
# can derive keys from texts; it stays with the writer, and losing it only changes names. A reader needs the reference
# alone: the key opens the bytes it belongs to and no others, and a reference with any other field does not open them.
#
# Small blocks and blocks for one reader are cheaper inside the frame (`is_by_reference`). Where sealed blocks lie is
# `Subjects.block`; how they are fetched is `client/frame_mailbox.py`'s part.


SECRET_BYTES = 32
#: a block of so many bytes or fewer travels in the frame
MAX_INLINE = 4 * 1024
_LABEL = "td-blk2"
_NONCE = bytes(bindings.crypto_aead_xchacha20poly1305_ietf_NPUBBYTES)
#: of a reference, without its channel and its sequences
_REF_BYTES = 1 + 1 + 3 + 9 + 9 + 5 + 5 + 2 + (2 + NAME_BYTES) + (2 + KEY_BYTES) + 3

_encode = msgspec.msgpack.Encoder().encode


def is_by_reference(size: int, readers: int) -> bool:
    """Does a block of `size` bytes for so many readers go into the store, and references to it into frames?"""
    return size > MAX_INLINE and readers > 1


def ref_size(channel: str, packed_seqs: bytes) -> int:
    """What a reference adds to a frame, before it is made: never less than its bytes, and at most 40 more."""
    return _REF_BYTES + len(channel.encode()) + len(packed_seqs)


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block that was sealed: what is stored under which name, and the reference that frames carry."""

    name: str
    data: bytes
    #: for `encode_frame`, in the place of the block
    ref: bytes


class BlockSealer:
    """Seals the blocks of one epoch of one space."""

    def __init__(self, secret: bytes, space_id: str, epoch: str) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the secret that names blocks has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self.space_id, self.epoch = space_id, epoch

    def seal(self, channel: str, block: bytes, packed_seqs: bytes) -> SealedBlock:
        """`block` as `encode_block` made it, `packed_seqs` as `encode_seqs` did. The same gives the same."""
        found = _blocks.decode(block)
        bound = context(self.space_id, self.epoch, channel, found)
        made = hmac.digest(self._secret, bound + hashlib.sha256(found.body).digest(), "sha512")
        key, name = made[:KEY_BYTES], made[KEY_BYTES : KEY_BYTES + NAME_BYTES]
        data = bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(found.body, bound, _NONCE, key)
        facts = found.codec, found.count, found.first, found.last, found.raw_size
        ref = Ref(*facts, len(data), channel, name, key, packed_seqs)
        return SealedBlock(name.hex(), data, _encode(ref))


def context(space_id: str, epoch: str, channel: str, block: Block | Ref) -> bytes:
    """What a sealed block is bound to: the same for the block and for a reference to it."""
    facts = block.first, block.last, block.count, block.codec, block.raw_size
    return _encode((_LABEL, space_id, epoch, channel, *facts))


def open_ref(space_id: str, epoch: str, ref: Ref, data: bytes) -> tuple[FrameRecord, ...]:
    """The records of a block that was fetched: exactly those its reference names, or MalformedFrame."""
    if len(data) != ref.size:
        raise MalformedFrame(f"block {ref.name.hex()} has {len(data)} bytes and its reference says {ref.size}")
    try:
        body = bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(
            data, context(space_id, epoch, ref.channel, ref), _NONCE, ref.key
        )
    except CryptoError as error:
        raise MalformedFrame(f"block {ref.name.hex()} is not what its reference names") from error
    records = open_block(Block(ref.codec, ref.count, ref.first, ref.last, ref.raw_size, body))
    if tuple(record.seq for record in records) != ref.seqs:
        raise MalformedFrame(f"block {ref.name.hex()} holds other records than its reference names")
    return records
