"""Receipts of direct messages: told to the steward by the reader, asked of it by the sender.

`delivered` means surfaced to the application, `read` means settled. A reader's receipts are sent together, at most
four times a second, and kept while the steward is away; beyond a bound the oldest are dropped and counted, because a
receipt is a courtesy and the message itself is not at stake. Whoever keeps mail durably tells its receipts with `tell`,
which answers once they are recorded. A sender waits by long polls that the steward always answers; whoever listens for
`receipt` events has one such poll, however many messages are out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from tidings.client.connection import AgentConnection
from tidings.client.incoming import DirectRef
from tidings.errors import OutcomeUnknown, TidingsError, UnreachableError
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks
from tidings.wire.states import ReceiptStage

EVERY = 0.25
KEPT = 4_096
AT_ONCE = 256
RETRY_PAUSE = 1.0
LONGEST_POLL = 20.0
#: messages watched at once; the oldest is forgotten first
WATCHED = 1_024
LAST_STAGES = (ReceiptStage.READ, ReceiptStage.EXPIRED, ReceiptStage.UNDELIVERABLE, ReceiptStage.VOID)


class ReceiptSender:
    """Receipts on their way to the steward."""

    def __init__(self, connection: AgentConnection) -> None:
        self.connection = connection
        self.dropped = 0
        self._waiting: OrderedDict[tuple[int, ReceiptStage], None] = OrderedDict()
        self._some = asyncio.Event()

    def note(self, seq: int, stage: ReceiptStage) -> None:
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
                answer = await self.connection.call("receipt", "put", stream="dm", receipts=told, timeout=timeout)
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


async def tell(
    connection: AgentConnection, kept: Sequence[DirectRef], stage: ReceiptStage, timeout: float = 5.0
) -> list[DirectRef]:
    """Have the steward record a stage of these; the answer is those it knows nothing of, now or later."""
    unknown: list[DirectRef] = []
    for start in range(0, len(kept), AT_ONCE):
        part = kept[start : start + AT_ONCE]
        told = [{"seq": each.seq, "stage": stage, "sender": each.sender, "id": each.id} for each in part]
        answer = await connection.call("receipt", "put", stream="dm", receipts=told, timeout=timeout)
        refused = set(answer.get("refused", ()))
        unknown += [each for each in part if each.seq in refused]
    return unknown


async def wait_for_stage(
    connection: AgentConnection, message_id: str, to: str, seq: int, stage: str, timeout: float
) -> dict[str, Any]:
    """Ask until the message has come that far or the time is over; the answer says how far it is."""
    clock = asyncio.get_running_loop().time
    deadline, delays = clock() + timeout, Backoff(0.05, RETRY_PAUSE).delays()
    while True:
        left = max(0.0, deadline - clock())
        poll = min(LONGEST_POLL, left)
        answer = await connection.call(
            "receipt", "wait", id=message_id, to=to, seq=seq, stage=stage, wait=poll, timeout=poll + 5
        )
        if answer["reached"] or clock() >= deadline:
            return answer
        await asyncio.sleep(min(next(delays), left))  # a steward with too many waiting answers at once


class ReceiptWatch:
    """What becomes of the messages this process sent, told as it happens: one long poll while any is open.

    Whoever wants notices hears besides of messages of this agent that no reader shows, whichever program sent them.
    """

    def __init__(
        self,
        connection: AgentConnection,
        tell: Callable[[str, str, int, str], None],
        tell_void: Callable[[dict[str, Any]], None],
    ) -> None:
        self.connection = connection
        self.polls = 0
        self._tell = tell
        self._tell_void = tell_void
        self._wants_voids = False
        self._voids: OrderedDict[tuple[str, int], None] = OrderedDict()
        #: id -> target, sequence, and the stages told
        self._open: OrderedDict[str, tuple[str, int, set[str]]] = OrderedDict()
        self._cursor = 0
        self._listening = False
        self._task: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Somebody wants to hear."""
        self._listening = True
        self._run_if_needed()

    def listen_for_voids(self) -> None:
        self._wants_voids = True
        self._run_if_needed()

    def add(self, message_id: str, to: str, seq: int) -> None:
        self._open.setdefault(message_id, (to, seq, set()))
        if len(self._open) > WATCHED:
            self._open.popitem(last=False)
        self._run_if_needed()

    def _run_if_needed(self) -> None:
        needed = self._wants_voids or (self._listening and bool(self._open))
        if needed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        polling = Backoff(0.05, LONGEST_POLL)
        delays = polling.delays()
        while self._open or self._wants_voids:
            try:
                await self.connection.ready(LONGEST_POLL)
                self.polls += 1
                answer = await self.connection.call(
                    "receipt", "watch", since=self._cursor, wait=LONGEST_POLL, timeout=LONGEST_POLL + 5
                )
            except (UnreachableError, OutcomeUnknown):
                waited = False
            except TidingsError:
                return  # boundary: a steward that does not know this, or an agent that is none any more
            else:
                waited = bool(answer["waited"])
                self._cursor = int(answer["cursor"])
                for each in answer["news"]:
                    self._heard(each)
            if waited:
                delays = polling.delays()
            else:
                await asyncio.sleep(next(delays))

    def _heard(self, news: dict[str, Any]) -> None:
        mid, stage = str(news["id"]), str(news["stage"])
        if stage == ReceiptStage.VOID:
            self._heard_void(mid, news)
        to, seq, told = self._open.get(mid, ("", 0, set()))
        if to != news["to"] or stage in told:
            return
        told.add(stage)
        if stage in LAST_STAGES:
            del self._open[mid]
        self._tell(mid, to, seq, stage)

    def _heard_void(self, mid: str, news: dict[str, Any]) -> None:
        key = (mid, int(news["seq"]))
        if key not in self._voids:
            self._voids[key] = None
            if len(self._voids) > WATCHED:
                self._voids.popitem(last=False)
            self._tell_void(news)

    async def close(self) -> None:
        await end_tasks([self._task])
