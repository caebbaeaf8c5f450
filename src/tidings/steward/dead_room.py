"""How much of DEAD one agent may hold: beyond it its own oldest letters go, and it hears of it.

A letter is often the only copy of a direct message or a task, so its owner's notice is written down before it goes.
None goes before there is an eighth too much: then many go together, and are told in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidings.steward.shares import share_of

#: of a small stream, for one agent: well below where a full one loses the oldest of everybody
MOST_OF_SMALL = 0.25
#: bytes of letters of messages of one agent, however large the stream
MOST_BYTES_OF_MAIL = 8 * 1024 * 1024
BEYOND_BOUND = "because you had more than one agent may keep"


def bytes_of_mail(limit: int) -> int:
    """What letters of messages of one agent may take of a stream with this limit."""
    return min(MOST_BYTES_OF_MAIL, share_of(limit, of_small=MOST_OF_SMALL) // 2)


def bytes_of_tasks(limit: int) -> int:
    """What dead tasks of one asker may take: the rest of its share."""
    return share_of(limit, of_small=MOST_OF_SMALL) - bytes_of_mail(limit)


def with_slack(most: int) -> int:
    return most + most // 8


def excess(sizes: Sequence[int], most: int, most_bytes: int) -> int:
    """How many of these letters, the oldest first, are to go. The newest stays however large it is."""
    size = sum(sizes)
    if len(sizes) <= with_slack(most) and size <= with_slack(most_bytes):
        return 0
    gone = 0
    while len(sizes) - gone > 1 and (len(sizes) - gone > most or size > most_bytes):
        size -= sizes[gone]
        gone += 1
    return gone
