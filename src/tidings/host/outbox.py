"""The outbox of one run of the host: each transition as one job of the database's writer.

They are in `outbox_transitions`, `outbox_horizon` and `outbox_ends`; `outbox_views` only reads. What a method returns
is on disk. Rows are given as they were leased or read, so that every change states what it expects: a row that moved on
meanwhile is left alone, and the answer says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from tidings.errors import StoreError
from tidings.host import outbox_ends as ends
from tidings.host import outbox_horizon
from tidings.host import outbox_transitions as moves
from tidings.host import outbox_views as views
from tidings.host.outbox_transitions import (
    AT_ONCE,
    Accepted,
    Confirmation,
    Draft,
    Landed,
    Lane,
    Leased,
    LogPosition,
    Terms,
)
from tidings.host.outbox_views import BlockRow, OutboxRow, SpaceRow
from tidings.host.outcomes import Outcome
from tidings.util.database import Database, Job

__all__ = [
    "Accepted",
    "BlockRow",
    "Draft",
    "Lane",
    "Leased",
    "LogPosition",
    "OutboxRow",
    "OutboxStore",
    "SpaceRow",
    "Terms",
]

#: rows that are confirmed in one job of the writer
TOGETHER = 128
_Waiting: TypeAlias = asyncio.Future[tuple[Confirmation, Leased | None]]


class OutboxStore:
    """`tick` reads milliseconds of a clock that never jumps (`time.monotonic`)."""

    def __init__(self, database: Database, terms: Terms, tick: Callable[[], int]) -> None:
        self.database, self.terms, self.tick = database, terms, tick
        self._write, self._now = database.write, database.now
        #: the reason of each space that is paused, as on disk: nobody else writes it
        self._paused: dict[str, str] = {}
        self._landed: list[tuple[Landed, _Waiting]] = []
        self._confirming: asyncio.Task[None] | None = None

    def now(self) -> int:
        """Milliseconds since 1970, by the clock that ages are measured with."""
        return self._now()

    async def recover(self) -> int:
        """To be called first: how many leases of earlier runs were void."""
        now, tick = self._now(), self.tick()
        void = await self._write(lambda c: moves.recover(c, now, tick, self.terms))
        self._note_pauses(await self.spaces())
        return void

    async def accept(self, draft: Draft) -> Accepted:
        now = self._now()
        return await self._write(lambda c: moves.accept(c, draft, now))

    async def take(self, limit: int = AT_ONCE, lane: Lane | None = None) -> list[Leased]:
        """Lease what is due: at most one row of each free lane."""
        now = self._now()
        return await self._write(lambda c: moves.take(c, now, self.terms, limit, lane))

    async def take_and_look(self, limit: int, lane: Lane) -> tuple[list[Leased], bool]:
        """The same, and whether more was due than the limit."""
        now = self._now()
        return await self._write(lambda c: moves.take_and_look(c, now, self.terms, limit, lane))

    async def settle(self, row: OutboxRow, outcome: Outcome) -> str | None:
        now = self._now()
        return await self._write(lambda c: moves.settle(c, row.row, row.attempts, outcome, now, self.terms))

    async def confirmed(self, row: OutboxRow, place: LogPosition) -> Confirmation:
        now, tick = self._now(), self.tick()
        return await self._write(lambda c: moves.confirmed(c, row.row, row.attempts, place, now, tick, self.terms))

    async def confirmed_and_next(
        self, row: OutboxRow, place: LogPosition, *, go_on: bool
    ) -> tuple[Confirmation, Leased | None]:
        """The same, in one job with all that was acknowledged in this turn of the loop.

        With `go_on` the next row of its lane is leased with it.
        """
        waiting: asyncio.Future[tuple[Confirmation, Leased | None]] = asyncio.get_running_loop().create_future()
        self._landed.append((Landed(row, place, go_on), waiting))
        if self._confirming is None:
            self._confirming = asyncio.create_task(self._confirm_landed())
        return await waiting

    async def _confirm_landed(self) -> None:
        """A bounded part at a time, one after the other: while the writer has one, those of the last are sent."""
        try:
            while self._landed:
                landed, self._landed = self._landed[:TOGETHER], self._landed[TOGETHER:]
                await self._confirm_part(landed)
        finally:
            self._confirming = None

    async def _confirm_part(self, landed: list[tuple[Landed, _Waiting]]) -> None:
        said: Sequence[Any] = ()
        try:
            said = await self._confirm_all([each for each, _ in landed])
        except Exception as error:  # noqa: BLE001  it belongs to everybody who waits
            said = [error] * len(landed)
        finally:
            for (_, waiting), answer in zip_longest(landed, said):
                _answer(waiting, answer)

    async def _confirm_all(self, landed: list[Landed]) -> Sequence[tuple[Confirmation, Leased | None] | BaseException]:
        """What was said of each. A row that cannot be confirmed keeps no other from it."""
        now, tick = self._now(), self.tick()

        def job(these: list[Landed]) -> Job[list[tuple[Confirmation, Leased | None]]]:
            return lambda c: moves.confirmed_all(c, these, now, tick, self.terms)

        try:
            return await self._write(job(landed))
        except StoreError:
            raise
        except Exception:  # noqa: BLE001  it is met again by the row it belongs to
            each = await asyncio.gather(*(self._write(job([one])) for one in landed), return_exceptions=True)
            return [answer if isinstance(answer, BaseException) else answer[0] for answer in each]

    async def next_due(self, space: str, since: int) -> int | None:
        """Milliseconds until something that waits there is due; None if nothing waits. `since`: read before `take`."""
        now = self._now()
        return await self.database.read(lambda c: moves.next_due(c, space, since, now, self.terms))

    async def meet(self, space: str, incarnation: str) -> bool:
        """To be called with each connection, before anything is taken. True: verify what earlier runs confirmed."""
        return await self._write(lambda c: outbox_horizon.meet(c, space, incarnation))

    async def release(self, space: str, incarnation: str, tick: int, horizon: int) -> int:
        """`tick` was read before the broker was asked whether it is still this run."""
        now = self._now()
        return await self._write(lambda c: outbox_horizon.release(c, space, incarnation, tick, horizon, now))

    async def to_verify(
        self, space: str, incarnation: str, after: int = 0, sender: str | None = None
    ) -> list[OutboxRow]:
        return await self.database.read(lambda c: outbox_horizon.to_verify(c, space, incarnation, after, sender=sender))

    async def has_confirmed(self, space: str, incarnation: str) -> bool:
        return await self.database.read(lambda c: outbox_horizon.has_confirmed(c, space, incarnation))

    async def still_there(self, row: OutboxRow, incarnation: str) -> bool:
        tick = self.tick()
        return await self._write(lambda c: outbox_horizon.still_there(c, row, incarnation, tick))

    async def lost(self, row: OutboxRow) -> bool:
        now = self._now()
        return await self._write(lambda c: outbox_horizon.lost(c, row, now))

    async def cancel(self, row: int) -> OutboxRow:
        now = self._now()
        return await self._write(lambda c: ends.cancel(c, row, now))

    async def requeue(self, row: int, new_id: str, payload: bytes, signature: str) -> OutboxRow:
        now = self._now()
        return await self._write(lambda c: ends.requeue(c, row, new_id, payload, signature, now))

    async def pause(self, space: str, reason: str) -> None:
        now = self._now()
        await self._write(lambda c: moves.pause(c, space, reason, now))
        self._note_pauses(await self.spaces())

    async def resume(self, space: str) -> None:
        await self._write(lambda c: moves.resume(c, space))
        self._note_pauses(await self.spaces())

    def _note_pauses(self, spaces: list[SpaceRow]) -> None:
        self._paused = {each.space: each.pause_reason or "" for each in spaces if each.paused_at is not None}

    def why_paused(self, space: str) -> str | None:
        """The reason if this space is paused: asked for each message that is accepted, so nothing is read."""
        return self._paused.get(space)

    async def block(self, scope: Lane, code: str, words: str, until: int | None = None) -> None:
        now = self._now()
        await self._write(lambda c: moves.block(c, scope, code, words, now, until))

    async def unblock(self, scope: Lane) -> bool:
        return await self._write(lambda c: moves.unblock(c, scope))

    async def expire(self) -> list[OutboxRow]:
        now = self._now()
        return await self._write(lambda c: ends.expire(c, now))

    async def drop_payloads(self, older_than: int) -> int:
        before = self._now() - older_than
        return await self._write(lambda c: ends.drop_payloads(c, before))

    async def find(self, space: str, sender: str, message_id: str) -> OutboxRow | None:
        return await self.database.read(lambda c: views.find(c, space, sender, message_id))

    async def ending(self, space: str, sender: str, ending: str) -> list[str]:
        return await self.database.read(lambda c: views.ending(c, space, sender, ending))

    async def show(self, row: int) -> OutboxRow:
        return await self.database.read(lambda c: views.show(c, row))

    async def payload(self, row: int) -> tuple[bytes, str] | None:
        return await self.database.read(lambda c: views.payload(c, row))

    async def listed(
        self,
        space: str | None = None,
        sender: str | None = None,
        states: Sequence[str] = (),
        after: int = 0,
        limit: int = 100,
    ) -> list[OutboxRow]:
        return await self.database.read(lambda c: views.listed(c, space, sender, states, after, limit))

    async def newest(self, space: str, sender: str, states: Sequence[str], before: int, limit: int) -> list[OutboxRow]:
        return await self.database.read(lambda c: views.newest(c, space, sender, states, before, limit))

    async def counts(self) -> dict[tuple[str, str], int]:
        return await self.database.read(views.counts)

    async def chain(self, row: int) -> list[OutboxRow]:
        return await self.database.read(lambda c: views.chain(c, row))

    async def ahead_of(self, row: OutboxRow) -> str | None:
        """The id of what must leave first: rows of one destination go in order."""
        return await self.database.read(lambda c: views.ahead_of(c, row))

    async def blocks(self) -> list[BlockRow]:
        return await self.database.read(views.blocks)

    async def spaces(self) -> list[SpaceRow]:
        return await self.database.read(views.spaces)


def _answer(waiting: asyncio.Future[Any], answer: Any) -> None:
    if waiting.done():  # whoever carried it was stopped
        return
    if answer is None:  # the loop is ending
        waiting.cancel()
    elif isinstance(answer, BaseException):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)
