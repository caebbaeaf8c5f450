"""Whether a pattern covers a channel: the one place that decides it.

The rules are those of NATS subjects: `*` is exactly one token, a final `>` is one or more. `team.>` does not cover
`team`. The broker matches grants with the same rules, and a test holds the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from tidings.wire.names import is_channel, is_pattern


def covers(pattern: str, channel: str) -> bool:
    """Does `pattern` cover the concrete channel `channel`? False for anything malformed."""
    return is_channel(channel) and covers_pattern(pattern, channel)


def covers_pattern(wide: str, narrow: str) -> bool:
    """Is every channel that `narrow` covers also covered by `wide`?"""
    return _subsumes(wide, narrow)


def covers_any(patterns: Iterable[str], narrow: str) -> bool:
    """Does one of `patterns` alone cover `narrow` (a channel or a pattern)?"""
    return any(_subsumes(wide, narrow) for wide in patterns)


def may_meet(one: str, other: str) -> bool:
    """Is there a channel that both cover?"""
    if not is_pattern(one) or not is_pattern(other):
        return False
    left, right = one.split("."), other.split(".")
    for mine, theirs in zip(left, right, strict=False):
        if ">" in (mine, theirs):
            return True
        if mine != theirs and "*" not in (mine, theirs):
            return False
    return len(left) == len(right)


@lru_cache(maxsize=65_536)
def _subsumes(wide: str, narrow: str) -> bool:
    if not is_pattern(wide) or not is_pattern(narrow):
        return False
    left, right = wide.split("."), narrow.split(".")
    for index, token in enumerate(left):
        if token == ">":
            return len(right) > index
        if index >= len(right):
            return False
        other = right[index]
        # a narrow `>` spans several tokens, a narrow `*` any one: only `>` or an equal wildcard is as wide
        if other == ">" or (token != "*" and token != other):
            return False
    return len(left) == len(right)


def pattern_regex(pattern: str) -> str:
    """The same rule as an anchored regular expression, for SQL (`rlike`) and other languages.

    For well-formed channels only, such as those of parsed subjects: it does not repeat the length limit, and `$` lets
    a final newline pass in some dialects (lookahead would not, but not every engine has it).
    """
    if not is_pattern(pattern):
        return r"(?!)"
    token = r"[A-Za-z0-9_-]{1,64}"
    parts = [
        token if part == "*" else rf"{token}(\.{token})*" if part == ">" else re.escape(part).replace(r"\-", "-")
        for part in pattern.split(".")
    ]
    return r"^" + r"\.".join(parts) + r"$"
