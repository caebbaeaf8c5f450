"""Golden vectors: what another language must agree with us on, verdicts written by hand.

The modules here have a subject each; `vectors()` is the whole file. Values that only code can compute (tags, shards,
signatures) come from fixed seeds, so the same code always gives the same bytes, and a change of any value shows in
review.
"""

from __future__ import annotations

from typing import Any

from golden import control, digests, frames, grammar, linked, messages
from golden.cast import CAST
from tidings.wire.message import MAX_MENTIONS, MAX_PARTS, MAX_PAYLOAD, MAX_WHOLE
from tidings.wire.names import MAX_CHANNEL, MAX_TOKEN
from tidings.wire.seal import MAX_SEALED
from tidings.wire.strict_json import MAX_DEPTH, MAX_NUMBER


def vectors() -> dict[str, Any]:
    return {
        "about": "Golden vectors of the Tidings wire (docs/wire.md); regenerate with `make schema`.",
        "limits": {
            "payload": MAX_PAYLOAD,
            "sealed": MAX_SEALED,
            "mentions": MAX_MENTIONS,
            "parts": MAX_PARTS,
            "depth": MAX_DEPTH,
            "number": MAX_NUMBER,
            "whole": MAX_WHOLE,
            "token": MAX_TOKEN,
            "channel": MAX_CHANNEL,
            **frames.LIMITS,
        },
        "keys": {
            name: {"seed_hex": bytes([byte] * 32).hex(), "seed": key.seed, "id": key.id}
            for name, (key, byte) in CAST.items()
        },
        **grammar.vectors(),
        **messages.vectors(),
        **linked.vectors(),
        **frames.vectors(),
        **control.vectors(),
        **digests.vectors(),
    }
