"""The proof that a program may act as an agent: a signature with the agent's key over what the host asked.

It covers the nonce, the socket and the space, so that it is worth nothing at another host, in another space, or a
second time; no message that is signed for the wire begins like it.
"""

from __future__ import annotations

import base64
import binascii

from tidings.errors import UsageError
from tidings.wire.signing import KeyPair, verify

_DOMAIN = "tidings host session 1"


def proof_bytes(space_id: str, agent: str, socket: str, nonce: str) -> bytes:
    fields = (_DOMAIN, space_id, agent, socket, nonce)
    if any("\n" in each for each in fields):
        raise UsageError("a session is asked for without line breaks in the space, the agent, the socket or the nonce")
    return "\n".join(fields).encode("utf-8", "surrogateescape")


def prove(key: KeyPair, space_id: str, socket: str, nonce: str) -> str:
    """URL-safe base64 of 64 bytes, without padding."""
    return base64.urlsafe_b64encode(key.sign(proof_bytes(space_id, key.id, socket, nonce))).decode().rstrip("=")


def is_proven(signature: str, space_id: str, agent: str, socket: str, nonce: str) -> bool:
    """Was it made with the key of this agent over exactly these?"""
    try:
        raw = base64.b64decode(signature + "=" * (-len(signature) % 4), altchars=b"-_", validate=True)
        asked = proof_bytes(space_id, agent, socket, nonce)
    except (binascii.Error, ValueError, UsageError):
        return False
    return verify(agent, asked, raw)
