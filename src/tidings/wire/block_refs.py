"""Blocks by reference: sealed once, stored once, named in the frames of everybody who is owed them.

    C      msgpack ["td-blk2", space id, epoch, channel, first, last, count, codec, raw size]
    okm    HMAC-SHA512(secret, C || SHA-256(body))      key = okm[:32], name = okm[32:52]
    sealed XChaCha20-Poly1305(body) under key, with a nonce of zeros and C as additional data

`body` is the body of a block, already compressed. A key is used for exactly one text: it is derived from the bytes that
are encrypted (two versions of a compressor give two keys), so a nonce that is always the same repeats nothing, a replay
makes the same bytes, and nobody who guesses a text can confirm it without the secret. Whoever has the secret can derive
keys from texts; it stays with the writer, and losing it only changes names. A reader needs the reference alone: the
key opens the bytes it belongs to and no others, and a reference with any other field does not open them.

Small blocks and blocks for one reader are cheaper inside the frame (`is_by_reference`). Where sealed blocks lie is
`Subjects.block`; how they are fetched is `client/block_reader.py`'s part.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import msgspec
from nacl import bindings
from nacl.exceptions import CryptoError

from tidings.errors import MalformedFrame
from tidings.wire.frames import KEY_BYTES, NAME_BYTES, Block, FrameRecord, Ref, open_block

SECRET_BYTES = 32
#: a block of so many bytes or fewer travels in the frame
MAX_INLINE = 4 * 1024
_LABEL = "td-blk2"
_NONCE = bytes(bindings.crypto_aead_xchacha20poly1305_ietf_NPUBBYTES)
#: of a reference, without its channel and its sequences
_REF_BYTES = 1 + 1 + 3 + 9 + 9 + 5 + 5 + 2 + (2 + NAME_BYTES) + (2 + KEY_BYTES) + 3

_encode = msgspec.msgpack.Encoder().encode
_blocks = msgspec.msgpack.Decoder(Block)


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
