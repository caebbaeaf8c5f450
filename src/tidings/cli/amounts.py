"""Amounts as people write them: `90m` is a time, `500M` a size, and neither is ever taken for the other."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from tidings.errors import UsageError

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def seconds(name: str, text: str) -> int:
    return _amount(name, text, _SECONDS, "a time such as 3600, 90m, 12h or 7d")


def moment(name: str, text: str) -> datetime:
    """A point in time: so long ago, or a date with or without a time, in the zone of this machine unless told."""
    if re.fullmatch(r"\d+[a-z]*", text):
        return datetime.now(UTC) - timedelta(seconds=seconds(name, text))
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{name}={text!r} is neither a time ago such as 90m or 7d nor one such as 2026-11-16T09:00"
        ) from None


def byte_count(name: str, text: str) -> int:
    return _amount(name, text, _BYTES, "a size such as 1000000, 500M, 2G or 4GiB")


def _amount(name: str, text: str, units: dict[str, int], like: str) -> int:
    match = re.fullmatch(r"(\d+)([A-Za-z]*)", text)
    if not match or match[2] not in units:
        raise UsageError(f"{name}={text!r} is not {like}")
    return int(match[1]) * units[match[2]]
