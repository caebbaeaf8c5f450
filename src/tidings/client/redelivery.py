"""Messages that a program gave back: handed out again after a growing pause, and after a ceiling kept as dead letters.

    handler raises, or `nak()`  ->  pause  ->  handed out again, `redelivered`  ->  ...  ->  dead letter with the error

A message that waits here stays unsettled: whoever is killed meanwhile gets it again, as ever. A dead letter is kept by
the steward (`tidings dead`), and only then the message is settled, so that it holds nothing else up. One that somebody
wants again is fetched and handed out like any other; settling it drops the letter. Tries are counted by this program.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tidings.client.direct_mailbox import DirectMailbox, tell
from tidings.client.incoming import Events, Inbox, Incoming
from tidings.client.intake import UNDECIDED
from tidings.contract.channels import RawRecord
from tidings.contract.mail import (
    DropLetterRequest,
    KeepLetterRequest,
    LetterKind,
    WantedLetterRow,
    WantedLettersRequest,
)
from tidings.errors import DeadLetter, DeniedError, TidingsError, UnreachableError, UsageError
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks
from tidings.wire.records import parse_time
from tidings.wire.roster import AgentEntry

#: before the steward is asked again
RETRY = Backoff(1.0, 60.0)
LONGEST_ERROR = 500


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a message that was given back is handed out in all, and the pauses between: doubling, bounded."""

    attempts: int = 5
    first: float = 1.0
    longest: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first < 0 or self.longest < 0:
            raise UsageError("a message is tried at least once, and pauses are seconds: Retry(attempts=5, first=1.0)")

    def pause(self, attempt: int) -> float:
        """Seconds before the try that follows this one, which is counted from 1."""
        return Backoff(self.first, self.longest, jitter=0).delay(attempt, 0.5)

    def is_over(self, attempt: int) -> bool:
        return attempt >= self.attempts


class UnreadRows:
    """Rows of an inbox on disk, handed to a program: acked they are marked as read, given back they come again.

    One that was tried too often stays unread.
    """

    def __init__(self, queue: Inbox, events: Events, retry: Retry, mark_read: Callable[[int], Awaitable[None]]) -> None:
        self._queue, self._events, self._retry, self._mark_read = queue, events, retry, mark_read
        #: row -> when it is handed out again
        self._returns: dict[int, asyncio.TimerHandle] = {}

    def hand_out(self, row: int, incoming: Incoming, attempt: int = 1) -> None:
        self._returns.pop(row, None)
        incoming.durable, incoming.attempt = True, attempt

        async def keep() -> None:
            """It stays unread in the inbox, which is where it is kept."""

        async def give_back(returned: Incoming, delay: float | None, _error: str) -> None:
            if self._retry.is_over(attempt):
                return
            again = replace(returned, redelivered=True, _settled=False, _returned=False)
            pause = self._retry.pause(attempt) if delay is None else delay
            loop = asyncio.get_running_loop()
            self._returns[row] = loop.call_later(pause, self.hand_out, row, again, attempt + 1)

        incoming._settle, incoming._keep, incoming._nak = partial(self._mark_read, row), keep, give_back
        self._queue.put(incoming)
        self._events.emit("message", incoming)

    def close(self) -> None:
        for each in self._returns.values():
            each.cancel()


class Redelivery:
    """What the program of one direct transport gave back."""

    def __init__(self, direct: DirectMailbox, retry: Retry) -> None:
        self.direct = direct
        self.connection, self.roster = direct.connection, direct.session.roster
        self.intake = direct.intake
        self.intake.nak = self.take
        self.retry = retry
        #: letters that were fetched to be tried again and are in the application's hands
        self._fetched: set[str] = set()
        self._asked = 0
        self._more = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetching: asyncio.Task[None] | None = None
        self._begun = False
        self.roster.on_own_row.append(self._on_row)

    async def take(self, incoming: Incoming, delay: float | None, error: str) -> None:
        """A message the application is done with for now."""
        if self.retry.is_over(incoming.attempt):
            self._start(self._bury(incoming, error))
            return
        pause = self.retry.pause(incoming.attempt) if delay is None else delay
        self._start(self._again(incoming, pause))

    async def _again(self, incoming: Incoming, pause: float) -> None:
        await asyncio.sleep(pause)
        await self.intake.put(
            replace(incoming, attempt=incoming.attempt + 1, redelivered=True, _settled=False, _returned=False)
        )

    # --- dead letters ---

    async def _bury(self, incoming: Incoming, error: str) -> None:
        """Have the steward keep it, for as long as that takes, and only then settle it.

        Only a refusal that no later try can change ends this: the message is gone or not ours, or we may not ask.
        """
        ref = f"{incoming.kind}-{incoming.seq}"
        told = DeadLetter(
            f"{ref} from {incoming.sender.name} was given back {incoming.attempt} times and is a dead letter now "
            f"(`tidings dead show {ref}`): {error or 'no error was said'}"
        )
        delays, is_told = RETRY.delays(), False
        while True:
            try:
                await self.connection.call(
                    KeepLetterRequest(incoming.kind, incoming.seq, error[:LONGEST_ERROR], incoming.attempt)
                )
            except (UsageError, DeniedError) as refusal:
                told = DeadLetter(f"{told}; it could not be kept: {refusal}")
            except TidingsError as failure:
                if not is_told and not isinstance(failure, UnreachableError):
                    is_told = True
                    self.intake.events.emit("error", failure)
                await asyncio.sleep(next(delays))
                continue
            break
        await incoming._bury()
        self.intake.events.emit("error", told)

    # --- letters that are wanted again ---

    def begin(self) -> None:
        """This program receives from now on, so what is wanted again is for it."""
        if not self._begun:
            self._begun = True
            row = self.roster.get(self.connection.identity.id)
            if row is not None:
                self._on_row(row)

    def _on_row(self, row: AgentEntry) -> None:
        if self._begun and row.wanted and row.wanted != self._asked:
            self._asked = row.wanted
            self._fetch_soon()

    def _fetch_soon(self) -> None:
        if self._fetching is None or self._fetching.done():
            self._fetching = self._start(self._fetch())

    async def _fetch(self) -> None:
        asked = 0
        while asked != self._asked:
            asked = self._asked
            try:
                answer = await self.connection.call(WantedLettersRequest())
            except TidingsError:
                asked = 0
                await asyncio.sleep(RETRY.first)
                continue
            self._more = answer.more
            for row in answer.letters:
                if row.letter not in self._fetched:
                    await self._try_again(row)

    async def _try_again(self, row: WantedLetterRow) -> None:
        try:
            incoming = await self.open_letter(row.kind, row.record)
        except TidingsError as error:
            self.intake.events.emit("error", error)
            return
        if incoming is None:
            return
        ref = row.letter
        self._fetched.add(ref)

        async def settle() -> None:
            self._fetched.discard(ref)
            with suppress(TidingsError):  # it stays wanted, and comes again with the next program
                await self.connection.call(DropLetterRequest(letter=ref))
            if incoming.kind == "direct":
                with suppress(TidingsError):
                    await tell(self.connection, [incoming.kept], "read")
            if self._more:
                self._fetch_soon()

        async def forget() -> None:
            self._fetched.discard(ref)

        incoming.redelivered = incoming.durable = True
        incoming._settle, incoming._keep, incoming._buried, incoming._nak = settle, None, forget, self.take
        await self.intake.put(incoming)

    async def open_letter(self, kind: LetterKind, record: RawRecord | None) -> Incoming | None:
        """Returns the message of a letter, verified like any other; None if it is no longer there."""
        if record is None:
            return None
        if kind == "direct":
            stored = record.seq, parse_time(record.time)
            return await self.direct.reopened(record.subject, record.headers, record.payload, *stored)
        opener = self.intake.opener
        while (opened := opener.stored(record)) is UNDECIDED:
            await opener.learn_links(record.seq)
        return self.intake.incoming(opened) if opened is not None else None

    # --- life ---

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        self._begun = False
        await end_tasks(self._tasks)
