"""Moments as JSON carries them on the control plane: RFC 3339 text in UTC that ends with `Z`.

The time of a stored record has nine decimals, because together with its sequence it names the record; every other
moment has three, as `ts` of a message does. A number would not do: nanoseconds are above 2^53, where JavaScript and
whoever else reads numbers as doubles loses digits. Lengths of time stay numbers of seconds. Reading takes up to nine
decimals, as the broker writes them, and an offset, as people may.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache


def moment(seconds: float) -> str:
    """A moment, given in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def record_time(nanoseconds: int) -> str:
    """The time of a record, given in nanoseconds since 1970."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{text_of_second(seconds)}.{rest:09d}Z"


def parse_time(text: str) -> int:
    """Nanoseconds since 1970; ValueError for what is no such text."""
    if not text.endswith("Z"):
        return round(datetime.fromisoformat(text).timestamp() * 1_000_000) * 1_000
    base, _, fraction = text[:-1].partition(".")
    return start_of_second(base) + int((fraction + "000000000")[:9])


def seconds_of(text: str) -> float:
    """Seconds since 1970."""
    return parse_time(text) / 1e9


@lru_cache(maxsize=64)
def text_of_second(seconds: int) -> str:
    """What `start_of_second` reads."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"


@lru_cache(maxsize=64)
def start_of_second(base: str) -> int:
    """Nanoseconds since 1970 of a text without zone and decimals. Many records share their second."""
    return int(datetime.fromisoformat(base).replace(tzinfo=UTC).timestamp()) * 1_000_000_000
