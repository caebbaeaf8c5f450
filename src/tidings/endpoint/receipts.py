"""Receipts of direct messages: told to the steward by the reader, asked of it by the sender.

`delivered` means surfaced to the application, `read` means settled. A reader's receipts are sent together, at most
four times a second, and kept while the steward is away; beyond a bound the oldest are dropped and counted, because a
receipt is a courtesy and the message itself is not at stake. A sender waits by long polls that the steward always
answers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Literal

from tidings.endpoint.supervision import Supervision
from tidings.errors import OutcomeUnknown, TidingsError, UnreachableError

Stage = Literal["delivered", "read"]
EVERY = 0.25
KEPT = 4_096
AT_ONCE = 256
RETRY_PAUSE = 1.0
LONGEST_POLL = 20.0


class ReceiptSender:
    """Receipts on their way to the steward."""

    def __init__(self, link: Supervision) -> None:
        self.link = link
        self.dropped = 0
        self._waiting: OrderedDict[tuple[int, Stage], None] = OrderedDict()
        self._some = asyncio.Event()

    def note(self, seq: int, stage: Stage) -> None:
        self._waiting[seq, stage] = None
        if len(self._waiting) > KEPT:
            self._waiting.popitem(last=False)
            self.dropped += 1
        self._some.set()

    async def run(self) -> None:
        """Send what is noted, until cancelled."""
        while True:
            await self._some.wait()
            sent = await self.flush()
            await asyncio.sleep(EVERY if sent else RETRY_PAUSE)

    async def flush(self, timeout: float = 5.0) -> bool:
        """Send one batch. False if nobody took it: it is kept."""
        batch = list(self._waiting)[:AT_ONCE]
        if batch:
            told = [{"seq": seq, "stage": stage} for seq, stage in batch]
            try:
                answer = await self.link.call("receipt", "put", stream="dm", receipts=told, timeout=timeout)
                self.dropped += len(answer.get("refused", ()))
            except (UnreachableError, OutcomeUnknown):
                return False
            except TidingsError:
                self.dropped += len(batch)  # boundary: the steward will not take these, now or later
        for each in batch:
            self._waiting.pop(each, None)
        if not self._waiting:
            self._some.clear()
        return True


async def wait_for_stage(
    link: Supervision, message_id: str, to: str, seq: int, stage: str, timeout: float
) -> dict[str, Any]:
    """Ask until the message has come that far or the time is over; the answer says how far it is."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    while True:
        left = max(0.0, deadline - clock())
        poll = min(LONGEST_POLL, left)
        answer = await link.call(
            "receipt", "wait", id=message_id, to=to, seq=seq, stage=stage, wait=poll, timeout=poll + 5
        )
        if answer["reached"] or clock() >= deadline:
            return answer
        await asyncio.sleep(min(0.05, left))  # a steward with too many waiting answers at once
