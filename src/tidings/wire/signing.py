"""What is signed, and how a signature travels.

Signed bytes are `td1\\n<space id>\\n<kind>\\n<sender>\\n<destination>\\n` followed by the payload bytes exactly as
they travel. The space id is the CORE account key of the *origin* space, so a message cannot be replayed into
another space of the same name; the destination is what the sender addressed, so it cannot be moved to another
channel. Nothing re-encodes a received payload.
"""

from __future__ import annotations

import base64
import re

from tidings.errors import BadSignature
from tidings.wire import keys

SIGNATURE_HEADER = "Td-Sig"
#: 64 bytes in URL-safe base64; the last character carries four zero bits, so one signature has one spelling
_SIGNATURE = re.compile(r"[A-Za-z0-9_-]{85}[AQgw]\Z")
KINDS = ("chat", "dm", "task", "result", "ruling", "person")


def signed_bytes(space_id: str, kind: str, sender: str, destination: str, payload: bytes) -> bytes:
    """The exact bytes under a signature. `kind` is one of `KINDS`; no field can contain a newline."""
    if kind not in KINDS or "\n" in space_id + sender + destination:
        raise BadSignature(f"cannot sign kind {kind!r} for destination {destination!r}")
    return f"td1\n{space_id}\n{kind}\n{sender}\n{destination}\n".encode() + payload


def sign(key: keys.KeyPair, space_id: str, kind: str, destination: str, payload: bytes) -> str:
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
    return keys.verify(sender, message, base64.urlsafe_b64decode(signature + "=="))
