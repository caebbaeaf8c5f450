"""Into the inbox: what an agent receives is committed first, and acknowledged upstream after that, repeats included.

    surfaced -> committed -> acknowledged -> its sender is told `delivered`, and `read` once it was

Nothing is acknowledged that is not on disk here; what cannot be stored as a message is kept aside with its bytes and
the reason; what an agent is told that is no message is kept as a notice, and so is how much found no room. Receipts are
told from notes on disk, so a restart forgets none. Whatever channels the agent is a member of are followed again with
each endpoint, however often that must be tried; one that is denied is told. When another session of the agent receives,
this one stands back.

A write of the inbox that fails is tried again, for ever in a host, and is a fact meanwhile: why, and since when
(`unkept`). Whoever receives without a host has a bounded patience, and none with a file that is damaged.

What an endpoint remembers beside the inbox is of this inbox: if that was put back to an older copy, or is another one,
the memory is dropped before the endpoint opens, and the agent is told (`check_memory`).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tidings.client.direct_transport import DirectAgent
from tidings.client.incoming import DirectRef, Incoming
from tidings.client.notices import Notice, of_inbox_set_back, of_refused_channel
from tidings.client.read_state import ReadState
from tidings.client.state_file import KeptAs
from tidings.errors import (
    AuthRevoked,
    DeniedError,
    OutcomeUnknown,
    StoreBroken,
    StoreError,
    Superseded,
    TidingsError,
    UnreachableError,
)
from tidings.host import inbox as inbox_views
from tidings.host.inbox import Arrival, DueReceipt, InboxStore
from tidings.host.registry import Scope
from tidings.util.backoff import Backoff
from tidings.util.failpoints import reach
from tidings.util.task_ends import end_tasks
from tidings.wire.names import TIDINGS
from tidings.wire.states import ReceiptStage

#: messages that are committed together
AT_ONCE = 64
#: receipts are told together, at most so often
TELL_EVERY = 0.25
#: what found no room is told so soon, and then less and less often while more of it comes
OVERFLOW_TOLD, OVERFLOW_TOLD_AT_MOST = 1.0, 60.0
RETRY = Backoff(0.5, 15.0)
#: what says that a message will never fit a table; any other failure of SQLite passes
UNSTORABLE = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, ValueError, OverflowError)
#: no row of any inbox
NOTHING = KeptAs(0, "", "")
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unkept:
    """Mail that cannot be kept now: why, and since when, in seconds since 1970."""

    error: StoreError
    since: float

    @property
    def cause(self) -> str:
        return str(self.error)


def arrival_of(scope: Scope, incoming: Incoming) -> Arrival:
    message = incoming.message
    return Arrival(
        space=scope.space_id,
        recipient=scope.agent,
        sender=incoming.sender.id,
        id=incoming.id,
        sender_name=incoming.sender.name,
        kind=incoming.kind,
        channel=incoming.channel,
        seq=incoming.seq,
        sent_at=message.ts_ms,
        logged_at=incoming.time_ns // 1_000_000,
        priority=message.priority,
        reply_to=message.reply_to,
        context=message.context,
        historical=incoming.historical,
        sealed=incoming.sealed,
        mentions_me=incoming.mentions_me,
        wakes=incoming.wakes,
        text=incoming.text,
        raw=incoming.raw,
        origin=incoming.origin,
        origin_id=incoming.origin_id,
    )


class Receiver:
    """The receiving side of one agent of this host. `on_kept` hears that something new is in its inbox.

    `on_failed`: it ended by a failure nobody foresaw, and needs another endpoint, which is given what was not kept.
    `patience`: seconds after which a write that keeps failing ends it with that failure (`error`); None: never.
    """

    def __init__(
        self,
        scope: Scope,
        inbox: InboxStore,
        on_kept: Callable[[], None],
        on_failed: Callable[[], None],
        patience: float | None = None,
    ) -> None:
        self.scope, self.inbox = scope, inbox
        #: something cannot be written to the inbox, and waits
        self.unkept: Unkept | None = None
        self._patience = patience
        #: writes that failed and are tried again
        self._failing: set[object] = set()
        #: this session receives: the steward granted it, or is away; a newer session elsewhere ends that
        self.receiving = False
        #: every channel was asked for what was missed, with the endpoint there is now
        self.followed = asyncio.Event()
        #: what ended it: a newer session elsewhere receives, it was revoked, or what came could not be kept
        self.error: Superseded | AuthRevoked | StoreError | None = None
        self._on_kept, self._on_failed = on_kept, on_failed
        self._delays = RETRY.delays()
        self._untold = asyncio.Event()
        self._overflowed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._endpoint: DirectAgent | None = None
        #: the newest row that was written here
        self._newest: KeptAs | None = None

    async def check_memory(self, state: Path) -> None:
        """Before an endpoint goes on from this state file: is what it says was received in this inbox?"""
        self._endpoint = None
        seen = await asyncio.to_thread(ReadState, state)
        cause = await self._insist(lambda: self._why_not_in_inbox(seen))
        if not cause:
            return
        # told first: whoever is killed in between finds the same again, and tells the same
        await self.keep_notice(of_inbox_set_back(self.scope.name, cause))
        seen.forget_all()
        await asyncio.to_thread(seen.close)

    async def _why_not_in_inbox(self, seen: ReadState) -> str:
        """Empty if it is."""
        mine, last = (self.scope.space_id, self.scope.agent), seen.kept_as
        if last is not None:
            there = await self.inbox.read(inbox_views.holds, *mine, last)
            return "" if there else f"host.db does not have row {last.row} with message {last.id}"
        self._newest = await self.inbox.read(inbox_views.newest_kept, *mine)
        return ""

    async def begin(self, endpoint: DirectAgent) -> None:
        """Receive from this endpoint, in the place of the one before."""
        await self.end()
        self.error, self._endpoint = None, endpoint
        self._note_kept()
        endpoint.transport.intake.keep_aside, endpoint.transport.intake.tells_delivered = self._keep_aside, False
        self._untold.set()
        self._overflowed.set()  # what the run before did not tell
        work = (self._receive, self._tell, self._tell_overflow, self._follow_channels)
        self._tasks = [asyncio.create_task(self._unless_superseded(each, endpoint)) for each in work]

    async def end(self) -> None:
        await end_tasks(self._tasks)
        self._tasks, self.receiving = [], False
        self.followed.clear()

    def tell(self) -> None:
        """Something was read: its sender may know."""
        self._untold.set()

    async def _unless_superseded(self, work: Callable[[DirectAgent], Awaitable[None]], endpoint: DirectAgent) -> None:
        try:
            await work(endpoint)
        except Superseded as error:
            self.receiving, self.error, self.unkept = False, error, None
            log.info("%s in %s: %s", self.scope.name, self.scope.space, error)
        except (
            AuthRevoked
        ) as error:  # it has no place in the space any more, and the broker takes its token all the same
            self.receiving, self.error = False, error
            log.info("%s in %s: %s", self.scope.name, self.scope.space, error)
            if self._patience is None:
                await asyncio.sleep(next(self._delays))
            self._on_failed()
        except Exception as error:  # boundary: else it would be said to receive, and nobody would
            self.receiving = False
            if self._patience is not None and isinstance(error, StoreError):
                self.error = error
                self._on_failed()
                return
            log.exception("receiving for %s in %s failed", self.scope.name, self.scope.space)
            await asyncio.sleep(next(self._delays))
            self._on_failed()

    # --- keeping ---

    async def _receive(self, endpoint: DirectAgent) -> None:
        # The session number is on disk only after this. A host that stopped before would start again without a number
        # and take the session from the program that receives by then.
        await endpoint.transport.session.ensure()
        self.receiving = True
        async for first in endpoint.messages(manual_ack=True):
            batch = [first]
            while len(batch) < AT_ONCE and (more := endpoint.transport.queue.take()) is not None:
                batch.append(more)
            await self._keep(batch)

    async def _keep(self, batch: list[Incoming]) -> None:
        reach("inbox.surfaced")
        await asyncio.gather(*(incoming.named() for incoming in batch))
        # In this order they are queued, and so written.
        news = await asyncio.gather(*(self._until_stored(incoming) for incoming in batch))
        reach("inbox.kept")
        self._note_kept()
        if any(news):
            self._untold.set()
            self._on_kept()
        await asyncio.gather(*(incoming.keep() for incoming in batch))
        self._delays = RETRY.delays()
        reach("inbox.acked")

    async def _until_stored(self, incoming: Incoming) -> bool:
        """Keep it, for as long as that takes: a full disk makes mail late, never lost. True if it is new."""
        return await self._insist(lambda: self._stored(incoming))

    async def _insist(self, store: Callable[[], Awaitable[T]]) -> T:
        delays, mine = RETRY.delays(), object()
        try:
            while True:
                try:
                    kept = await store()
                except (StoreError, sqlite3.Error) as error:
                    log.warning("mail of %s waits to be kept: %s", self.scope.name, error)
                    self._failing.add(mine)
                    self._note_unkept(error)
                else:
                    break
                await asyncio.sleep(next(delays))
        finally:
            self._failing.discard(mine)
        if not self._failing:
            self.unkept = None
        return kept

    def _note_unkept(self, error: StoreError | sqlite3.Error) -> None:
        """Raises it if this is not the place to wait until it passes."""
        found = error if isinstance(error, StoreError) else StoreError(f"the inbox cannot be written ({error})")
        self.unkept = Unkept(found, self.unkept.since if self.unkept else time.time())
        if self._patience is None:
            return
        if isinstance(found, StoreBroken) or time.time() - self.unkept.since > self._patience:
            raise found from error

    async def _stored(self, incoming: Incoming) -> bool:
        try:
            arrival = arrival_of(self.scope, incoming)
            kept = await self.inbox.keep(arrival)
        except UNSTORABLE as error:
            await self._keep_aside(incoming.raw, f"message {incoming.id} cannot be stored: {error}")
            return False
        if not kept.kept:
            self._overflowed.set()
        self._newest = max(self._newest or NOTHING, KeptAs(kept.row, arrival.sender, arrival.id))
        return kept.new

    def _note_kept(self) -> None:
        """The endpoint remembers up to which row it goes, before it remembers what is in it."""
        if self._endpoint is not None and self._newest is not None and self._newest.row:
            self._endpoint.transport.read_state.note_kept(self._newest)

    async def _keep_aside(self, raw: bytes, reason: str) -> None:
        log.warning("something for %s in %s was kept aside: %s", self.scope.name, self.scope.space, reason)
        await self._insist(lambda: self.inbox.quarantine(self.scope.space_id, self.scope.agent, raw, reason))
        reach("inbox.aside")

    async def keep_notice(self, notice: Notice) -> None:
        """What this agent is told becomes a row of its inbox; it may be told again, and is kept once."""
        log.info("%s in %s is told: %s", self.scope.name, self.scope.space, notice.text)
        kept = await self._insist(lambda: self.inbox.keep_notice(self.scope.space_id, self.scope.agent, notice))
        self._newest = max(self._newest or NOTHING, KeptAs(kept.row, TIDINGS, notice.id))
        self._note_kept()
        if kept.new:
            self._on_kept()

    # --- telling ---

    async def _tell_overflow(self, _endpoint: DirectAgent) -> None:
        pause = OVERFLOW_TOLD
        while True:
            await self._overflowed.wait()
            self._overflowed.clear()
            if await self._insist(lambda: self.inbox.tell_overflow(self.scope.space_id, self.scope.agent)):
                self._on_kept()
                pause = min(OVERFLOW_TOLD_AT_MOST, pause * 2)
            else:
                pause = OVERFLOW_TOLD
            await asyncio.sleep(pause)

    async def _tell(self, endpoint: DirectAgent) -> None:
        delays = RETRY.delays()
        while True:
            await self._untold.wait()
            self._untold.clear()
            try:
                while due := await self.inbox.read(inbox_views.receipts_to_tell, self.scope.space_id, self.scope.agent):
                    await self._tell_all(endpoint, due)
                delays, pause = RETRY.delays(), TELL_EVERY
            except TidingsError as error:  # whoever cannot be told now is told later
                log.debug("receipts of %s wait: %s", self.scope.name, error)
                self._untold.set()
                pause = next(delays)
            await asyncio.sleep(pause)

    async def _tell_all(self, endpoint: DirectAgent, due: list[DueReceipt]) -> None:
        for stage, tell in (
            (ReceiptStage.DELIVERED, endpoint.transport.tell_delivered),
            (ReceiptStage.READ, endpoint.transport.tell_read),
        ):
            some = [each for each in due if each.stage == stage]
            if some:
                await tell(*(DirectRef(each.sender, each.id, each.seq) for each in some))
        reach("inbox.told")
        await self.inbox.told(self.scope.space_id, self.scope.agent, due)

    # --- channels ---

    async def _follow_channels(self, endpoint: DirectAgent) -> None:
        """Live copies of every channel the agent is a member of; what it missed comes with them.

        What fails and may pass is tried again while this endpoint lives; which memberships stand is asked each time.
        """
        delays, denied = RETRY.delays(), set[str]()
        while not await self._follows_all(endpoint, denied):
            await asyncio.sleep(next(delays))
        self.followed.set()

    async def _follows_all(self, endpoint: DirectAgent, denied: set[str]) -> bool:
        """False if a channel is to be tried again. What is denied is told, and nobody waits for it."""
        is_done = True
        try:
            for pattern in await endpoint.memberships():
                if pattern not in denied and pattern not in endpoint.transport.joined:
                    is_done = await self._follows(endpoint, pattern, denied) and is_done
        except (UnreachableError, OutcomeUnknown) as error:
            log.debug("which channels %s is in, in %s, is not known yet: %s", self.scope.name, self.scope.space, error)
            return False
        return is_done

    async def _follows(self, endpoint: DirectAgent, pattern: str, denied: set[str]) -> bool:
        try:
            await endpoint.join(pattern, backfill=0)
        except (AuthRevoked, UnreachableError, OutcomeUnknown) as error:
            log.warning("%s cannot follow %s in %s yet: %s", self.scope.name, pattern, self.scope.space, error)
            return False
        except DeniedError as error:
            denied.add(pattern)
            await self.keep_notice(of_refused_channel(pattern, error))
        return True
