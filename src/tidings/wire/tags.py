"""Tags: how a pattern or channel appears in a ruling subject without being readable there.

An agent can test any subject it can spell with a sequence expectation and the broker answers with the last
sequence. So the subject carries a keyed hash that only the steward can compute; the name is in the signed payload.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

TAG_LENGTH = 26
SECRET_BYTES = 32


def tag(secret: bytes, text: str) -> str:
    """26 base32 characters of HMAC-SHA256(space secret, pattern or channel name)."""
    digest = hmac.new(secret, text.encode(), hashlib.sha256).digest()
    return base64.b32encode(digest).decode()[:TAG_LENGTH]


def is_tag(text: str) -> bool:
    return len(text) == TAG_LENGTH and all(c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567" for c in text)
