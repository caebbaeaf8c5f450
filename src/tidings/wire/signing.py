"""Keys and signatures: what is signed, and how a signature travels.

Signed bytes are `td1\\n<space id>\\n<kind>\\n<sender>\\n<destination>\\n` followed by the payload bytes exactly as
they travel. The space id is the CORE account key of the *origin* space, so a message cannot be replayed into
another space of the same name; the destination is what the sender addressed, so it cannot be moved to another
channel. Nothing re-encodes a received payload.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from functools import lru_cache

import nkeys
from nacl import bindings

from tidings.errors import BadSignature, InvalidName

SIGNATURE_HEADER = "Td-Sig"
#: 64 bytes in URL-safe base64; the last character carries four zero bits, so one signature has one spelling
_SIGNATURE = re.compile(r"[A-Za-z0-9_-]{85}[AQgw]\Z")
KINDS = ("chat", "dm", "task", "result", "ruling", "person")


def signed_bytes(space_id: str, kind: str, sender: str, destination: str, payload: bytes) -> bytes:
    """The exact bytes under a signature. `kind` is one of `KINDS`; no field can contain a newline."""
    if kind not in KINDS or "\n" in space_id + sender + destination:
        raise BadSignature(f"cannot sign kind {kind!r} for destination {destination!r}")
    return f"td1\n{space_id}\n{kind}\n{sender}\n{destination}\n".encode() + payload


def sign(key: KeyPair, space_id: str, kind: str, destination: str, payload: bytes) -> str:
    """The value of the `Td-Sig` header: URL-safe base64 of 64 bytes, without padding."""
    raw = key.sign(signed_bytes(space_id, kind, key.id, destination, payload))
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def is_spelled(signature: str) -> bool:
    """Is this text a signature, whatever it signs?"""
    return _SIGNATURE.match(signature) is not None


def verifies(signature: str | None, space_id: str, kind: str, sender: str, destination: str, payload: bytes) -> bool:
    """True iff `signature` was made by `sender` over exactly these fields."""
    if not signature or not is_spelled(signature):
        return False
    try:
        message = signed_bytes(space_id, kind, sender, destination, payload)
    except (UnicodeEncodeError, BadSignature):
        return False
    return verify(sender, message, base64.urlsafe_b64decode(signature + "=="))


# --- keys ---
# Nkeys: the key pairs that identities, accounts and the steward are made of.
#
# An agent's id *is* its public key, so a signature needs no directory. `KeyPair` keeps the expanded libsodium key,
# because expanding it again for each signature costs more than signing. Seeds leave this module only as text for a 0600
# file.


OPERATOR = nkeys.PREFIX_BYTE_OPERATOR
ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
USER = nkeys.PREFIX_BYTE_USER


class KeyPair:
    """A public key (`.id`), its seed text, and `sign`."""

    __slots__ = ("_secret", "id", "seed")

    def __init__(self, seed: str) -> None:
        try:
            prefix, raw = nkeys.decode_seed(seed.encode())
        except Exception as error:  # nkeys raises bare classes of its own, binascii and struct errors
            raise InvalidName("this text is not an nkey seed") from error
        public, self._secret = bindings.crypto_sign_seed_keypair(bytes(raw[:32]))
        self.seed = seed
        self.id = encode_public(prefix, public)

    @classmethod
    def generate(cls, prefix: int = USER) -> KeyPair:
        return cls(nkeys.encode_seed(os.urandom(32), prefix).decode())

    def sign(self, message: bytes) -> bytes:
        # crypto_sign is a third cheaper than nacl.signing.SigningKey.sign (24 against 34 microseconds)
        return bindings.crypto_sign(message, self._secret)[: bindings.crypto_sign_BYTES]

    def shared_with(self, other: str) -> bytes:
        """The X25519 secret this key and the holder of `other` share, over both keys converted from ed25519."""
        try:
            point = bindings.crypto_sign_ed25519_pk_to_curve25519(public_bytes(other))
            return bindings.crypto_scalarmult(bindings.crypto_sign_ed25519_sk_to_curve25519(self._secret), point)
        except Exception as error:  # nacl: not a point of the curve, or one of small order
            raise InvalidName(f"{other!r} is not a key one can share a secret with") from error

    def open_sealed(self, sealed: bytes) -> bytes:
        """What somebody sealed for this key (`sealed_for`). BadSignature if it was not, or was changed."""
        secret = bindings.crypto_sign_ed25519_sk_to_curve25519(self._secret)
        try:
            return bytes(bindings.crypto_box_seal_open(sealed, bindings.crypto_scalarmult_base(secret), secret))
        except Exception as error:  # nacl: too short, or not for us
            raise BadSignature("this was not sealed for this key") from error

    def __repr__(self) -> str:
        return f"KeyPair({self.id})"


def seed_bytes(key: KeyPair) -> bytes:
    """The 32 raw bytes of a seed."""
    return bytes(nkeys.decode_seed(key.seed.encode())[1][:32])


def key_of_seed(raw: bytes, prefix: int = USER) -> KeyPair:
    return KeyPair(nkeys.encode_seed(raw, prefix).decode())


def sealed_for(key: str, plaintext: bytes) -> bytes:
    """What only the holder of `key` can open. Who sealed it is not said."""
    return bytes(bindings.crypto_box_seal(plaintext, bindings.crypto_sign_ed25519_pk_to_curve25519(public_bytes(key))))


def encode_public(prefix: int, public: bytes) -> str:
    """The text of a public key."""
    body = bytes([prefix]) + public
    crc: int = nkeys.crc16(bytearray(body))
    return base64.b32encode(body + crc.to_bytes(2, "little")).decode().rstrip("=")


@lru_cache(maxsize=16_384)
def public_bytes(key: str) -> bytes:
    """The 32 raw bytes of an encoded public key; its checksum is verified."""
    try:
        raw = base64.b32decode(key + "=" * (-len(key) % 8))
    except (binascii.Error, ValueError) as error:
        raise InvalidName(f"{key!r} is not an nkey public key") from error
    # The low three bits of the prefix byte are always zero: otherwise one key would have eight spellings.
    if len(raw) != 35 or raw[0] & 7 or int.from_bytes(raw[33:], "little") != nkeys.crc16(bytearray(raw[:33])):
        raise InvalidName(f"{key!r} is not an nkey public key (length, prefix or checksum is wrong)")
    return raw[1:33]


def verify(key: str, message: bytes, signature: bytes) -> bool:
    """Does `signature` (64 bytes) of `message` verify under the public key `key`? Never raises for bad input."""
    if len(signature) != bindings.crypto_sign_BYTES:
        return False
    try:
        bindings.crypto_sign_open(signature + message, public_bytes(key))
    except Exception:  # nacl.exceptions.BadSignatureError, InvalidName, or a key libsodium rejects: all mean "no"
        return False
    return True
