"""What wakes an agent: its attention and the message's priority decide, here and nowhere else.

    low priority   never wakes
    direct, task   wakes
    muted channel  never wakes
    a mention      wakes
    now            wakes, but not an agent in focus
    the rest       wakes an open agent on a channel that is not quiet

This never decides what is kept: a message that wakes nobody is in the inbox all the same. Pure.
"""

from __future__ import annotations

from tidings.wire.message import Priority
from tidings.wire.names import is_channel
from tidings.wire.patterns import covers
from tidings.wire.roster import Attention, Level

_QUIETNESS: dict[Level, int] = {"normal": 0, "quiet": 1, "muted": 2}


def wakes(attention: Attention, kind: str, channel: str | None, priority: Priority, mentions_me: bool) -> bool:
    """Should a message of this kind, on this channel, wake an agent that set `attention`?"""
    if priority == "low":
        return False
    if kind != "channel" or channel is None:
        return True
    level = level_of(attention, channel)
    if level == "muted":
        return False
    if mentions_me:
        return True
    if attention.mode == "focus":
        return False
    return priority == "now" or (level == "normal" and attention.mode == "open")


def level_of(attention: Attention, channel: str) -> Level:
    """The level of the most specific pattern that covers `channel`; between equals the quieter one."""
    levels = [
        (_specificity(pattern), _QUIETNESS[level], level)
        for pattern, level in attention.channels.items()
        if covers(pattern, channel)
    ]
    return max(levels)[2] if levels else "normal"


def _specificity(pattern: str) -> tuple[bool, int, bool]:
    """The channel itself, then more literal tokens, then `*` before `>`."""
    tokens = pattern.split(".")
    return is_channel(pattern), sum(token not in ("*", ">") for token in tokens), tokens[-1] != ">"
