"""From the outbox to the brokers: many lanes at a time, one row of each, in order.

    taken (leased) -> handed to its agent's publisher -> confirmed, or settled as the outcome means -> the lane's next

It sleeps until something is accepted, a connection opens, a block is lifted or the next retry is due. What a failure
means is in `outcomes`; a row whose earlier attempt ended without an answer, or that may have gone another way
(`DuplicateCheck`), is looked for before it is sent. When another run of a broker answers, what the earlier one
confirmed is verified before its lanes go on, and a confirmed row is done when the broker still runs a sync horizon
later. This module knows no connections, only `RowPublisher`.

`DuplicateCheck` finds rows that their program already sent itself, under the same id, because it was not answered. The
broker knows an id for ten minutes, and a row that waited longer would be stored a second time. Programs choose
their ids before they ask, so any old row may be one of these. One look through a lane serves all that waits in it: what
is stored after the look, the broker still knows while the look counts. Rows whose own attempt had no answer are not
judged here: they are looked for one by one.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tidings.client.publishing import STREAMS, Kind, Prepared, Stored
from tidings.errors import IdBurned, NotLookedFor, OutcomeUnknown, StoreError, TidingsError, UnreachableError
from tidings.host import outbox_views
from tidings.host.outbox import Lane, Leased, LogPosition, OutboxRow, OutboxStore
from tidings.host.outbox_transitions import TOO_OLD
from tidings.host.outbox_views import COLUMNS, as_row
from tidings.host.outcomes import Outcome, outcome_of
from tidings.util.backoff import Backoff
from tidings.util.failpoints import reach
from tidings.util.task_ends import end_tasks
from tidings.wire.message import id_time_ms

#: lanes in flight at a time: as many as one commit of the database takes
LANES = 256
#: a publish is given up well before its lease of a minute ends
PUBLISH_WITHIN = 20.0
#: without anything to do, the outbox is looked at this often: only a clock that jumped needs it
LOOK_EVERY = 30.0
KEEP_HOUSE_EVERY = 30.0
#: what is done keeps its bytes for a day
PAYLOADS_KEPT_MS = 24 * 3_600_000
VERIFIED_AT_ONCE = 32
STORE_RETRY = Backoff(0.5, 15.0)
log = logging.getLogger(__name__)


class RowPublisher(Protocol):
    """One agent's way to the broker of its space. What it raises is judged by class."""

    @property
    def incarnation(self) -> str:
        """The run of the broker that is connected; UnreachableError if none is."""
        ...

    async def publish(self, prepared: Prepared, incarnation: str, timeout: float) -> Stored:
        """Store it, on a connection to that run of the broker and on no other."""
        ...

    async def is_stored(self, prepared: Prepared, seq: int) -> bool: ...

    async def find_stored(self, prepared: Prepared, since: float) -> int | None: ...

    async def which_stored(self, kind: Kind, destination: str, ids: list[str], since: float) -> set[str]:
        """Those of these ids that `find_stored` may find."""
        ...

    async def prove(self) -> str:
        """A round trip: the run of the broker that answered it."""
        ...


class RowPublishers(Protocol):
    """The ways out of this host. What is raised says why there is none now."""

    def of(self, space: str, sender: str) -> RowPublisher: ...

    def any_of(self, space: str) -> RowPublisher: ...


#: the broker knows a message id for ten minutes; what is younger than this is within that
WINDOW_MS = 8 * 60_000
#: rows that one look is for
AT_ONCE = 1_000
#: together with the publish that follows, well before the lease of a minute ends
TURN_WITHIN, LOOK_WITHIN = 10.0, 20.0
#: a clock that is behind by no more than this was not put back
CLOCK_SLACK_MS = 30_000


def first_tried(row: OutboxRow) -> int:
    """Milliseconds since 1970 before which nobody can have sent it: its program makes an id, then sends."""
    return min(row.accepted_at, id_time_ms(row.id) or row.accepted_at)


@dataclass(frozen=True, slots=True)
class _Look:
    """When it was, by both clocks, for which rows of its lane, and which of them may have been in the log then."""

    now: int
    tick: int
    asked: frozenset[str]
    found: frozenset[str]


class DuplicateCheck:
    """Finds rows of one space that were already sent another way."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        #: oldest first
        self._looks: dict[Lane, _Look] = {}
        #: the steward searches for one caller at a time, and refuses those who wait in numbers
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        #: where the clock would be if nobody had put it back, at that tick
        self._straight, self._tick = store.now(), store.tick()
        #: where the clock was when it was put back: how old a row from before that is, it does not say
        self._put_back_at = -1

    def broker_knows(self, row: OutboxRow) -> bool:
        """Would the broker itself notice that this is there already? Of no row that may be older than it seems."""
        now, first = self._now(), first_tried(row)
        return first > self._put_back_at and 0 <= now - first < WINDOW_MS

    def _now(self) -> int:
        now, tick = self._store.now(), self._store.tick()
        self._straight, self._tick = max(now, self._straight + tick - self._tick), tick
        if self._straight - now > CLOCK_SLACK_MS:
            self._put_back_at, self._straight = max(self._put_back_at, self._straight), now
        return now

    async def may_be_stored(self, publisher: RowPublisher, row: OutboxRow) -> bool:
        """May it be in the log although it was never tried from here? False: it may be published."""
        if self.broker_knows(row):
            return False
        look = self._look_for(row)
        return row.id in (look or await self._looked_in_turn(publisher, row)).found

    def _look_for(self, row: OutboxRow) -> _Look | None:
        look = self._looks.get(_lane_of(row))
        return look if look is not None and row.id in look.asked and self._counts(look) else None

    def _counts(self, look: _Look) -> bool:
        ages = (self._store.now() - look.now, self._store.tick() - look.tick)
        return all(0 <= age < WINDOW_MS for age in ages)

    async def _looked_in_turn(self, publisher: RowPublisher, row: OutboxRow) -> _Look:
        """NotLookedFor if it cannot be done now: nothing was sent, so the row is as it was."""
        turn = self._turns[row.sender]
        try:
            async with asyncio.timeout(TURN_WITHIN):
                await turn.acquire()
        except TimeoutError as error:
            raise NotLookedFor("whether it arrived before was not asked yet: other looks of its agent go on") from error
        try:
            async with asyncio.timeout(LOOK_WITHIN):
                look = await self._looked(publisher, row)
        except TimeoutError as error:
            raise NotLookedFor(f"the steward did not say within {LOOK_WITHIN:.0f} s what is stored") from error
        except UnreachableError as error:
            raise NotLookedFor(f"whether it arrived before cannot be found out yet: {error}") from error
        finally:
            turn.release()
        self._forget_old_looks()
        self._looks.pop(_lane_of(row), None)
        self._looks[_lane_of(row)] = look
        return look

    async def _looked(self, publisher: RowPublisher, row: OutboxRow) -> _Look:
        """For this row and those that wait behind it."""
        lane, now, tick = _lane_of(row), self._store.now(), self._store.tick()
        rows = [row, *await self._store.database.read(lambda c: _waiting(c, lane, row.row, AT_ONCE - 1))]
        asked = frozenset(each.id for each in rows)
        since = min(first_tried(each) for each in rows) / 1000
        found = await publisher.which_stored(row.kind, row.destination, sorted(asked), since)  # type: ignore[arg-type]
        return _Look(now, tick, asked, asked & found)

    def _forget_old_looks(self) -> None:
        while self._looks and not self._counts(next(iter(self._looks.values()))):
            del self._looks[next(iter(self._looks))]


def _lane_of(row: OutboxRow) -> Lane:
    return Lane(row.space, row.sender, row.kind, row.destination)


def _waiting(connection: sqlite3.Connection, lane: Lane, after: int, limit: int) -> list[OutboxRow]:
    found = connection.execute(
        f"""SELECT {COLUMNS} FROM outbox WHERE state IN ('pending', 'inflight')
        AND space = ? AND sender = ? AND kind = ? AND destination = ? AND row > ? ORDER BY row LIMIT ?""",
        (*lane, after, limit),
    )
    return [as_row(one) for one in found]


OnMoved = Callable[[OutboxRow, str], None]


def _nothing(_row: OutboxRow, _state: str) -> None:
    return None


class Drain:
    """One per host: a `SpaceDrain` for each space, so that one which is down stalls nobody else.

    `horizon`: milliseconds after which the broker of a space has on disk what it acknowledged.
    """

    def __init__(
        self, store: OutboxStore, publishers: RowPublishers, horizon: Callable[[str], int], on_moved: OnMoved = _nothing
    ) -> None:
        self.store = store
        self._outlets, self._horizon, self._on_moved = publishers, horizon, on_moved
        self._spaces: dict[str, SpaceDrain] = {}
        self._house: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._house = asyncio.create_task(self._keep_house(), name="house of the outbox")

    def of(self, space: str) -> SpaceDrain:
        """The drain of a space, running."""
        if space not in self._spaces:
            drain = SpaceDrain(space, self.store, self._outlets, self._horizon(space), self._on_moved)
            self._spaces[space] = drain
            drain.start()
        return self._spaces[space]

    async def stop(self) -> None:
        """Leave what is in flight: its leases are void when the next run begins."""
        await end_tasks([self._house])
        await asyncio.gather(*(drain.stop() for drain in self._spaces.values()))

    async def _keep_house(self) -> None:
        while True:
            try:
                await self.keep_house()
            except Exception as error:  # noqa: BLE001  boundary, see `_note`
                _note("the outbox cannot be tidied now", error)
            await asyncio.sleep(KEEP_HOUSE_EVERY)

    async def keep_house(self) -> None:
        """What waited too long is dead; what is long done forgets its bytes."""
        while ended := await self.store.expire():
            for row in ended:
                self._on_moved(row, row.state)
        while await self.store.drop_payloads(PAYLOADS_KEPT_MS):
            pass


class SpaceDrain:
    """What leaves for one space. Made by `Drain.of`."""

    def __init__(
        self,
        space: str,
        store: OutboxStore,
        publishers: RowPublishers,
        horizon: int,
        on_moved: OnMoved = _nothing,
        *,
        lanes: int = LANES,
        publish_within: float = PUBLISH_WITHIN,
    ) -> None:
        self.space, self.store, self.horizon = space, store, horizon
        self._outlets, self._on_moved = publishers, on_moved
        self._lanes, self._publish_within = lanes, publish_within
        self._wake, self._unreleased = asyncio.Event(), asyncio.Event()
        self._elsewhere = DuplicateCheck(store)
        self._crowded = False
        #: a failure may have made several lanes wait; what is confirmed next ends that, and only who looks sees it
        self._held_back = True
        self._carrying: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._verifying: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run(), name=f"drain of {self.space}"),
            asyncio.create_task(self._release_when_synced(), name=f"release of {self.space}"),
        ]
        self._unreleased.set()

    async def stop(self) -> None:
        await end_tasks([*self._tasks, *self._verifying.values()])
        await end_tasks(self._carrying.copy())

    def wake(self) -> None:
        """Something may be due."""
        self._wake.set()

    # --- taking and carrying ---

    async def _run(self) -> None:
        delays = STORE_RETRY.delays()
        while True:
            self._wake.clear()
            try:
                await self._take_what_is_due()
                delays = STORE_RETRY.delays()
            except Exception as error:  # noqa: BLE001  boundary, see `_note`
                _note("the outbox cannot be used now", error)
                await asyncio.sleep(next(delays))

    async def _take_what_is_due(self) -> None:
        if self.store.why_paused(self.space) is not None:  # `resume` wakes
            await self._wake.wait()
            return
        free = self._lanes - len(self._carrying)
        if self._crowded and free < max(1, self._lanes // 4):
            await self._wake.wait()
            return
        looked = self.store.now()
        leased, self._crowded = await self.store.take_and_look(free, Lane(self.space))
        for each in leased:
            self._carry(each)
        if not self._crowded:
            await self._until_something_is_due(looked)

    async def _until_something_is_due(self, looked: int) -> None:
        due = await self.store.next_due(self.space, looked)
        seconds = LOOK_EVERY if due is None else min(LOOK_EVERY, due / 1000)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _carry(self, leased: Leased) -> None:
        reach("drain.leased")
        task = asyncio.create_task(self._carry_lane(leased))
        self._carrying.add(task)
        task.add_done_callback(self._carried)

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._carrying.discard(task)
        if self._crowded:
            self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its row is leased until the lease ends, and is tried again then.
            log.error("carrying a row of the outbox failed: %s", error, exc_info=error)

    async def _carry_lane(self, leased: Leased) -> None:
        """Carry a row, then the next of its lane, as long as nobody else waits for a turn."""
        following: Leased | None = leased
        while following is not None:
            following = await self._carry_row(following)

    async def _carry_row(self, leased: Leased) -> Leased | None:
        row = leased.row
        if row.accepted_at + row.max_age <= self.store.now():
            await self._settle(row, Outcome(*TOO_OLD, retryable=False, blocks="row"))
            return None
        try:
            place = await self._hand_over(leased)
        except Exception as error:  # every failure of an attempt is an outcome
            if not isinstance(error, TidingsError):
                log.error("sending row %s of the outbox failed", row.row, exc_info=error)
            await self._settle(row, outcome_of(error))
            return None
        reach("drain.published")
        go_on = not self._crowded
        state, following = await self.store.confirmed_and_next(row, place, go_on=go_on)
        reach("drain.confirmed")
        if not go_on or self._held_back:  # by now nobody else may wait for a turn, or lanes that waited need not
            self._held_back = False
            self.wake()
        self._unreleased.set()
        self._on_moved(row, state)
        if following is not None:
            reach("drain.leased")
        return following

    async def _settle(self, row: OutboxRow, outcome: Outcome) -> None:
        state = await self.store.settle(row, outcome)
        reach("drain.settled")
        self._held_back = self._held_back or outcome.blocks != "row"
        if state is not None:
            self._on_moved(row, state)
        self.wake()

    async def _hand_over(self, leased: Leased) -> LogPosition:
        row = leased.row
        publisher = self._outlets.of(row.space, row.sender)
        prepared = _prepared(leased)
        incarnation = publisher.incarnation
        stream = STREAMS[prepared.kind]
        if (seq := await self._found_before(publisher, row, prepared)) is not None:
            return LogPosition(seq, stream, incarnation)
        stored = await publisher.publish(prepared, incarnation, self._publish_within)
        return LogPosition(stored.seq, stream, stored.incarnation)

    async def _found_before(self, publisher: RowPublisher, row: OutboxRow, prepared: Prepared) -> int | None:
        """Did it arrive before, by an attempt without an answer or another way?"""
        try:
            if not row.doubt and not await self._elsewhere.may_be_stored(publisher, row):
                return None
            return await publisher.find_stored(prepared, first_tried(row) / 1000)
        except UnreachableError as error:
            if self._elsewhere.broker_knows(row):
                return None
            raise OutcomeUnknown(f"whether it arrived before cannot be found out yet: {error}") from error

    # --- a broker that may have lost something ---

    async def verify(self, sender: str, incarnation: str) -> None:
        """This agent is connected to a run of the broker that was met: look for what another run confirmed."""
        await end_tasks([self._verifying.get(sender)])
        self._verifying[sender] = asyncio.create_task(
            self._verify(sender, incarnation), name=f"verification of {self.space}"
        )

    async def _verify(self, sender: str, incarnation: str) -> None:
        after, delays = 0, STORE_RETRY.delays()
        while True:
            try:
                rows = await self.store.to_verify(self.space, incarnation, after, sender)
                if not rows:
                    break
                done = await self._verify_all(rows, incarnation)
            except Exception as error:  # noqa: BLE001  boundary, see `_note`
                _note("the outbox cannot be verified now", error)
                done = False
            if done:
                after, delays = rows[-1].row, STORE_RETRY.delays()
            else:
                await asyncio.sleep(next(delays))
        self._unreleased.set()
        self.wake()

    async def _verify_all(self, rows: list[OutboxRow], incarnation: str) -> bool:
        turns = asyncio.Semaphore(VERIFIED_AT_ONCE)
        return all(await asyncio.gather(*(self._verified(turns, row, incarnation) for row in rows)))

    async def _verified(self, turns: asyncio.Semaphore, row: OutboxRow, incarnation: str) -> bool:
        """False if it could not be found out now."""
        async with turns:
            try:
                await self._verify_row(row, incarnation)
            except TidingsError as error:
                log.info("message %s could not be verified yet: %s", row.id, error)
                return False
            return True

    async def _verify_row(self, row: OutboxRow, incarnation: str) -> None:
        kept = await self.store.read(outbox_views.payload, row.row)
        assert kept is not None, "what is confirmed has its payload"
        publisher = self._outlets.of(row.space, row.sender)
        prepared = _prepared(Leased(row, *kept))
        assert row.seq is not None
        try:
            there = await publisher.is_stored(prepared, row.seq)
            if not there:  # read and removed since, or lost
                there = await publisher.find_stored(prepared, row.accepted_at / 1000) is not None
        except IdBurned:  # another message of this agent has its id: said when it is sent again
            there = False
        if publisher.incarnation != incarnation:
            raise UnreachableError("another run of the broker answers meanwhile")
        reach("drain.verified")
        if there:
            await self.store.still_there(row, incarnation)
        elif await self.store.lost(row):
            self._on_moved(row, "pending")

    # --- what is on the broker's disk ---

    async def _release_when_synced(self) -> None:
        while True:
            await self._unreleased.wait()
            self._unreleased.clear()
            await asyncio.sleep(self.horizon / 1000)
            try:
                if await self._release():
                    self._unreleased.set()
            except TidingsError as error:  # a broker that is away, or a full disk: rows are kept until it works
                log.debug("nothing of %s can be released now: %s", self.space, error)
                self._unreleased.set()
            except Exception as error:  # noqa: BLE001  boundary, see `_note`
                _note(f"nothing of {self.space} can be released now", error)
                self._unreleased.set()

    async def _release(self) -> bool:
        """True if rows are left to release."""
        publisher = self._outlets.any_of(self.space)
        tick = self.store.tick()  # before the round trip, which proves that the broker ran at this moment
        incarnation = await publisher.prove()
        while await self.store.release(self.space, incarnation, tick, self.horizon):
            reach("drain.released")
        return await self.store.has_confirmed(self.space, incarnation)


def _note(what: str, error: Exception) -> None:
    """A failure nobody foresaw is tried again like any other: if a drain ended, messages would wait for ever while
    everything else says that all is well."""
    log.log(
        logging.WARNING if isinstance(error, StoreError) else logging.ERROR,
        "%s: %s",
        what,
        error,
        exc_info=None if isinstance(error, StoreError) else error,
    )


def _prepared(leased: Leased) -> Prepared:
    row = leased.row
    kind: Kind = row.kind  # type: ignore[assignment]  # the table allows no other
    return Prepared(kind, row.subject, row.destination, leased.payload, leased.signature, row.id)
