"""Who is in the golden vectors: keys from fixed seeds, a space, a message id. Public on purpose: they own nothing."""

from __future__ import annotations

import nkeys

from tidings.wire import signing


def key_of(byte: int, prefix: int = signing.USER) -> signing.KeyPair:
    return signing.KeyPair(nkeys.encode_seed(bytes([byte]) * 32, prefix).decode())


ADA, BOB, STEWARD, NEXT_STEWARD = key_of(1), key_of(2), key_of(5), key_of(7)
SPACE, OTHER_SPACE, AGENTS = key_of(3, signing.ACCOUNT), key_of(4, signing.ACCOUNT), key_of(6, signing.ACCOUNT)
THIRD_SPACE = key_of(8, signing.ACCOUNT)
SECRET = bytes(range(32))
SPACE_NAME = "main"
MESSAGE_ID = "019a8a3c-5c00-7abc-8def-0123456789ab"
#: name -> key and the byte its seed is made of
CAST = {
    "ada": (ADA, 1),
    "bob": (BOB, 2),
    "space": (SPACE, 3),
    "other_space": (OTHER_SPACE, 4),
    "steward": (STEWARD, 5),
    "agents": (AGENTS, 6),
    "next_steward": (NEXT_STEWARD, 7),
    "third_space": (THIRD_SPACE, 8),
}
