"""A bounded part of an inbox, and the receipts for it.

A window has a receipt. Only when the receipt comes back are exactly the messages of that window read; an answer that
was lost on its way is simply given again. Receipts are remembered here and not on disk: after a restart of this
server an old one is unknown, and what it stood for is shown once more.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence

from tidings.errors import UsageError

REMEMBERED = 64
#: what a message costs besides its text: sender, id, times
OVERHEAD = 200


def fitting(sizes: Sequence[int], most: int) -> int:
    """How many messages, from the first, fit into so many bytes; the first always does, cut if it must be."""
    total = 0
    for number, size in enumerate(sizes):
        total += size + OVERHEAD
        if number and total > most:
            return number
    return len(sizes)


class Receipts:
    """Which rows which receipt stands for."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def write(self, rows: Sequence[int]) -> str:
        receipt = f"seen-{secrets.token_hex(4)}"
        self._rows[receipt] = tuple(rows)
        while len(self._rows) > REMEMBERED:
            self._rows.popitem(last=False)
        return receipt

    def rows(self, receipt: str) -> tuple[int, ...]:
        """The rows; a receipt may come back again."""
        try:
            return self._rows[receipt]
        except KeyError:
            raise UsageError(
                f"no window has the receipt {receipt[:40]!r}: this server gave none, or started anew since; "
                "what was not acknowledged is shown again"
            ) from None
