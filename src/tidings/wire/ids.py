"""Message ids: UUIDv7 in lower-case canonical text, so that ids sort by the time they were made.

The time inside an id is what its maker claims. It never decides delivery; readers show it beside the record's own
time. One id has one spelling: upper case, braces and `urn:uuid:` are refused, never rewritten.
"""

from __future__ import annotations

import re

import uuid_utils

ID_PATTERN = "[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_ID = re.compile(ID_PATTERN + r"\Z")


def new_id() -> str:
    return str(uuid_utils.uuid7())


def is_message_id(text: str) -> bool:
    return _ID.match(text) is not None


def id_time_ms(text: str) -> int | None:
    """Milliseconds since 1970 that the id claims, or None if it is not a message id."""
    return int(text[:8] + text[9:13], 16) if is_message_id(text) else None
