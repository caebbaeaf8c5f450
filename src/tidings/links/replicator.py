"""One direction of a link: takes from the peer's log, page by page, and puts into the log here. One loop, in order.

    index of the log here caught up -> what waits is tried -> a page from the token
    -> verified, judged, ordered -> what is not here is let in -> dispositions and token in one transaction -> told
    -> at the end of the peer's log, if it is time: compared, beside the loop; what that finds is taken by a later turn

Nothing is remembered but in the ledger: a worker that dies anywhere begins at the token again, and finds in the index
what it had let in. The token moves over a page or not at all. A failure is classed by what it blocks: one record (it
goes into quarantine), the link (denied, full, a page that cannot be), or the way to it (nobody answers). Neither kind
ever ends the loop. A wake makes it look earlier and moves nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import msgspec

from tidings import errors
from tidings.contract import link_worker as contract
from tidings.errors import (
    EndedThere,
    LinkConflict,
    LinkEnded,
    LinkShareSpent,
    LogRegressed,
    PageRefused,
    TidingsError,
    WrongSpace,
)
from tidings.links import events, local_index, obligations
from tidings.links import link_store as books
from tidings.links.definition import LinkDefinition
from tidings.links.importing import Admitter
from tidings.links.link_store import BookedLink, Disposed, LinkRow
from tidings.links.local_index import IndexState
from tidings.links.obligations import LATE, OwedRecord, Quarantined
from tidings.links.ports import Clock, Comparing, Destination, Fetched, IndexRow, LocalFacts, Source, Verify
from tidings.links.validation import PAGE_RECORDS, agreed_token, check_gap, check_page
from tidings.util.backoff import Backoff
from tidings.util.failpoints import reach
from tidings.util.task_ends import end_tasks
from tidings.wire.digests import RecordIdentity
from tidings.wire.links import GapKind, LinkedRecord, LinkGap, LinkPage, Token

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
Blocks = Literal["link", "endpoint"]

#: seconds after the first failures of the way to the peer; after them it is polled
LADDER = (1.0, 3.0, 10.0)
POLL = (15.0, 30.0)
#: seconds after what blocks the link
LINK_DELAYS = Backoff(5.0, 300.0)
REPAIR_EVERY = 300.0
#: and so many times as long as the last one took
REPAIR_SHARE = 50
#: seconds between two turns, however often it is woken
SPACING = 0.05
#: and between two that failed, however often a connection comes back
BACK_SPACING = 1.0
#: records that wait and are tried in one turn
WAITING_AT_ONCE = 100
#: records that may be owed because the peer said it has them; more are found by a later comparison
MOST_OWED = 10_000
#: gaps one after the other, with no page between them
GAPS_IN_A_ROW = 3

#: what blocks the link if it is raised; whatever is not here blocks the way to it
_LINK = (errors.DeniedError, errors.UnhealthyError, errors.WireError, errors.UsageError)
#: what an operator has to deal with: the link is held back until then, and only looks now and then
_HELD_BACK = (errors.DeniedError,)


#: runs something beside the loop; what is returned ends it
Beside = Callable[[Coroutine[Any, Any, None]], Callable[[], Awaitable[None]]]


def _as_task(work: Coroutine[Any, Any, None]) -> Callable[[], Awaitable[None]]:
    task = asyncio.create_task(work, name="comparing")
    return lambda: end_tasks([task])


class _Compared(NamedTuple):
    """What comparing found up to a token, in which life of the peer's log."""

    token: Token
    lives: int
    lacking: list[RecordIdentity]
    extra: int
    unchanged: bool


class _Failure(NamedTuple):
    words: str
    blocks: Blocks
    held_back: bool
    ended_there: bool


class Direction:
    """What comes from one peer into one space. `turn` is one step of it, `run` all of them until `end`."""

    def __init__(
        self,
        definition: LinkDefinition,
        ledger: BookedLink,
        source: Source,
        destination: Destination,
        clock: Clock,
        *,
        verify: Verify,
        comparison: Comparing | None = None,
        rng: random.Random | None = None,
        every: float | None = None,
        limit: int = PAGE_RECORDS,
        tell_after: float = POLL[1],
        beside: Beside = _as_task,
    ) -> None:
        """`every`: it looks every so many seconds; None: it is woken, with a poll behind it. `tell_after`: seconds
        after records were handled until the peer is asked again, and hears how far we are."""
        self.definition, self.every = definition, every
        self._tell_after = tell_after
        self._ledger, self._source, self._destination, self._clock = ledger, source, destination, clock
        self._comparison, self._rng, self._limit = comparison, rng or random.Random(), limit
        self._admitter = Admitter(definition, ledger, destination, verify)
        self._listeners = events.Listeners()
        self._task: asyncio.Task[None] | None = None
        self._ending = self._asked = self._idle = self._back = False
        # facts of this run
        self._greeted = self._reached_the_end = self._paused = False
        self._connectivity: contract.Connectivity = "unknown"
        self._failure: _Failure | None = None
        self._failures = self._gaps = self._head = self._owed = self._quarantined = 0
        #: failures in a row before a connection came back
        self._failures_before = 0
        #: the peer's log is read again, up to its end
        self._rescan = False
        self._repair_at = 0.0
        #: what the last difference that was found was: records there and not here, here and not there
        self._differed = (0, 0)
        self._differing = 0
        #: ends the comparison that is under way; and what the last one found, until it is taken
        self._end_comparing: Callable[[], Awaitable[None]] | None = None
        self._compared: _Compared | None = None
        self._beside = beside
        self._floor = 0
        #: seconds by which the peer's clock was before ours when it said so
        self._ahead = 0.0
        self._last_activity: float | None = None
        self._link: LinkRow | None = None
        self._index: IndexState | None = None
        #: the sequence of the link record that what is let in counts by; None if nobody says it
        self._agreed: int | None = None
        #: which channels are listed here, as a number; None before it is known
        self._listing: int | None = None
        #: bytes that may be let in within a day, and what of them was
        self._share = self._spent = 0
        #: the same of the peer's record by which it shares; 0 if nobody says it
        self._granted = 0
        self._told: contract.Status = "initializing"

    # --------------------------------------------------------------------------------------- what others may do

    def listen(self, listener: events.Listener) -> Callable[[], None]:
        """What is returned ends it."""
        return self._listeners.add(listener)

    def wake(self) -> None:
        """There may be news. While something fails it waits all the same: a peer cannot make us hurry."""
        self._clock.wake()

    def back(self) -> None:
        """A connection came back, or our steward: what failed for want of it is tried soon. Whoever makes it come and
        go does not make us hurry more than that."""
        self._back = True
        self._clock.wake()

    def ask(self, *, repair: bool = False) -> None:
        """An operator does not want to wait: look now, and compare if asked to."""
        if repair:
            self._repair_at = 0.0
        self._asked = True
        self._clock.wake()

    def end(self) -> None:
        """`run` returns after the step it is at."""
        self._ending = True
        self._clock.wake()

    def status(self) -> contract.LinkStatus:
        link, behind = self._link, 0
        if link is not None and link.handled is not None:
            behind = max(0, self._head - link.handled.seq)
        # by the peer's clock, which its records have their times by
        now = self._clock.now() + self._ahead
        late = now - link.handled_time / 1e9 if link is not None and link.handled_time else 0.0
        return contract.LinkStatus(
            status=self._status(),
            connectivity=self._connectivity,
            words=self._words(),
            handled=link.handled if link is not None else None,
            received=link.received if link is not None else None,
            head=self._head,
            lag_records=behind,
            lag_seconds=max(0.0, late) if behind else 0.0,
            last_activity=self._last_activity,
            owed=self._owed,
            quarantined=self._quarantined,
            ended_there=not self._paused and self._failure is not None and self._failure.ended_there,
            differing=self._differing,
            share=self._share,
            spent=self._spent,
        )

    # ------------------------------------------------------------------------------------------------- the loop

    def start(self) -> None:
        """`run` as a task of the event loop."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self.run(), name=f"link {self.definition.link}")

    async def stop(self, deadline: float) -> bool:
        """Let it finish what it is at, for at most `deadline` seconds; then it is broken off. The ledger holds
        either way: the page it was at is handled whole or not at all. False if it was broken off."""
        task, self._task = self._task, None
        if task is None:
            return True
        self.end()
        done, _ = await asyncio.wait([task], timeout=deadline)
        if not done:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        return bool(done)

    async def run(self) -> None:
        try:
            while not self._ending:
                begun = self._clock.tick()
                due = await self.turn() + self._clock.tick()
                while not (self._ending or self._asked):
                    if (left := self._soonest(due, begun) - self._clock.tick()) <= 0:
                        break
                    await self._clock.wait(left)
                    due = min(due, begun + SPACING) if self._idle else due
        finally:
            if self._end_comparing is not None:
                await self._end_comparing()

    def _soonest(self, due: float, begun: float) -> float:
        waits_for_it = self._failure is not None and self._failure.blocks == "endpoint"
        return min(due, begun + BACK_SPACING) if self._back and waits_for_it else due

    async def turn(self) -> float:
        """One step; seconds until the next one is due."""
        if self._back:
            self._failures_before = self._failures  # from here on it is tried soon again
        self._asked = self._idle = self._back = False
        try:
            delay = await self._step()
        except TidingsError as error:
            delay = self._failed(error)
        except Exception as error:
            if self._failures == 0:
                log.exception("link %s failed", self.definition.link)
            delay = self._failed(error)
        self._tell_status()
        return delay

    async def _step(self) -> float:
        link = await self._look()
        if link.paused is not None:
            self._failure, self._failures = None, 0
            return self._idle_until(None)
        self._check_still_granted()
        token = await self._greet(link)
        self._index = await self._catch_up()
        if served := await self._serve_waiting(token):
            self._index = await self._catch_up()  # it does not know yet what was let in
        if await self._take_comparison(link, token) or self._ending:
            return 0.0
        page = await self._ask_page(token)
        if page.gap is not None:
            await self._cross_gap(token, page.gap)
            return 0.0
        await self._take_page(token, page)
        self._failure, self._failures, self._gaps = None, 0, 0
        due = await self._look_at_waiting()
        if served:  # there may be more; but what is new does not wait for all of it
            return 0.0
        if page.more:  # a peer that moves and has nothing to say must not keep us busy either
            return 0.0 if page.records else SPACING
        self._compare_if_due(page.through)
        delay = self._idle_until(due)
        return min(delay, self._tell_after) if page.records and self.every is None else delay

    async def _look(self) -> LinkRow:
        self._link = link = await self._ledger.link()
        self._paused = link.paused is not None
        return link

    def _check_still_granted(self) -> None:
        until = self.definition.until
        if until is not None and self._clock.now() >= until:
            raise LinkEnded(f"link {self.definition.link} was granted until {until:.0f}: nothing is taken over it now")

    async def _greet(self, link: LinkRow) -> Token:
        """The token to go on from. Once in a run, and after failures, the peer is asked who it is."""
        if self._greeted and link.handled is not None:
            return link.handled
        facts = await self._from_peer(self._source.hello())
        if facts.space != self.definition.peer:
            raise self._wrong_space(facts.space)
        self._head = max(self._head, facts.head)
        self._ahead = facts.clock - self._clock.now() if facts.clock is not None else 0.0
        token = link.handled
        if token is None:
            token = Token(space=facts.space, epoch=facts.epoch, seq=0)
            await self._ledger.write(lambda c: books.begin(c, self._ledger.row, token))
        self._greeted = True
        return token

    def _wrong_space(self, found: str) -> WrongSpace:
        return WrongSpace(f"link {self.definition.link} is with {self.definition.peer}, but {found} answers there")

    def _idle_until(self, due: int | None) -> float:
        """Seconds until it is polled, what waits is due (`due`, milliseconds), or it is time to compare."""
        self._idle = True
        every = self.every
        delay = self._rng.uniform(*POLL) if every is None else every * self._rng.uniform(0.8, 1.2)
        if self._comparison is not None and self._end_comparing is None and every is None and not self._paused:
            delay = min(delay, max(self._repair_at - self._clock.tick(), 1.0))
        if due is not None:
            delay = min(delay, max(due / 1000 - self._clock.now(), 1.0))
        return delay

    # --------------------------------------------------------------------------------------------- the log here

    async def _catch_up(self) -> IndexState:
        """Know everything that links brought here up to the end of the log, before anything is let in."""
        space = self.definition.space
        facts = await self._destination.facts()
        if facts.space != space:
            raise WrongSpace(f"link {self.definition.link} leads into {space}, but the log here is of {facts.space}")
        self._agreed, self._share = self._checked_agreement(facts), facts.share
        if facts.listing != self._listing:
            await self._ledger.write(lambda c: obligations.retry_unlisted(c, self._ledger.row, self._now()))
            self._listing = facts.listing
        known = await self._ledger.read(lambda c: local_index.state(c, space))
        if known.epoch != facts.epoch or known.through > facts.head:
            known = await self._ledger.write(lambda c: local_index.meet(c, facts))
        while known.through < facts.head:
            page = await self._destination.index(known.through)
            if page.epoch != known.epoch or page.through <= known.through:
                raise LogRegressed(f"the log of {space} was set back while it was read: it is read again")
            known = await self._ledger.write(partial(local_index.extend, space=space, known=known, page=page))
            if known.epoch != facts.epoch:
                raise LogRegressed(f"the log of {space} is read by another worker, and was set back: look again")
        if known.anew:
            now = await self._destination.facts()  # what was removed while it was read is not lost

            def complete(c: sqlite3.Connection) -> int:
                local_index.check(c, space, known)
                return local_index.complete(c, now, self._now())

            if now.epoch != known.epoch:
                raise LogRegressed(f"the log of {space} was set back while it was read: it is read again")
            if lost := await self._ledger.write(complete):
                self._tell(contract.LocalLogSetBack, lost)
        return known

    # -------------------------------------------------------------------------------------------------- a page

    async def _ask_page(self, token: Token) -> LinkPage:
        page = await self._from_peer(self._source.page(token, self._limit))
        if page.gap is None:
            check_page(token, page, self._limit)
            self._head, self._floor = page.head, page.floor
            if self._granted not in (0, page.granted):  # more may be shared of what the token has passed: compare
                self._repair_at = 0.0
            self._granted = page.granted
        return page

    async def _take_page(self, token: Token, page: LinkPage) -> None:
        """Everything in it gets its disposition, or nothing of it does."""
        if page.through == token:
            self._note_end(page)
            return
        try:
            reach("link.page.before_admit")
            done = await self._dispose(page.records)
            reach("link.page.admitted")
            time_ns = page.records[-1].time_ns if page.records else 0
            await self._commit(token, page.through, done, time_ns, min(page.floor, page.through.seq))
        except TidingsError as error:
            if not isinstance(error, errors.StoreError | errors.ConflictError):
                await self._note_received(page.through)
            raise
        reach("link.page.committed")
        self._last_activity = self._clock.now()
        self._note_end(page)
        kinds = Counter(each.kind for each in done)
        counts = [kinds[each] for each in ("admitted", "duplicate", "omitted", "quarantined")]
        self._tell(contract.PullAdvanced, page.through, page.head, *counts)

    def _note_end(self, page: LinkPage) -> None:
        if not page.more:
            self._reached_the_end, self._rescan = True, False

    async def _commit(
        self, before: Token, through: Token, done: Sequence[Disposed], time_ns: int, floor: int = 0
    ) -> None:
        row, now, space, known = self._ledger.row, self._now(), self.definition.space, self._index
        assert known is not None
        # what this page put into the log here, as the log's own index has it
        own = {
            seq: IndexRow(seq, self.definition.link, one.identity.origin, one.channel, *one.identity[1:], one.hash)
            for one in done
            if one.kind == "admitted" and (seq := one.local_seq) is not None and seq > known.through
        }

        def commit(c: sqlite3.Connection) -> None:
            self._check_unchanged(c)
            books.commit_page(c, row, before, through, done, now, time_ns)
            local_index.extend_own(c, space, known, own)
            books.forget_removed(c, row, floor)

        await self._write_down(commit)

    def _check_unchanged(self, connection: sqlite3.Connection) -> None:
        """Neither log was set back since this step began, as far as another worker of this ledger would know."""
        assert self._index is not None
        assert self._link is not None
        local_index.check(connection, self.definition.space, self._index)
        if books.find(connection, self._ledger.row).lives != self._link.lives:
            raise LinkConflict(f"link {self.definition.link} was taken back meanwhile: another worker carries it too")

    async def _note_received(self, through: Token) -> None:
        """A page came and cannot be handled now. Only the first of a row of failures is written down."""
        if self._failures == 0 and not await self._ledger.write(lambda c: books.receive(c, self._ledger.row, through)):
            self._repair_at = 0.0

    async def _dispose(self, records: Sequence[LinkedRecord]) -> list[Disposed]:
        assert self._index is not None
        refusal = await self._refusal() if self._share else None
        return await self._admitter.dispose(
            records, self._index, self._check_agreed, listed=bool(self._listing), refusal=refusal
        )

    async def _refusal(self) -> LinkShareSpent | None:
        """Why nothing more may be put into the log here now. Somebody who may say anything in another space must not
        drive out what is said here."""
        share, now = self._share, self._now()
        self._spent = await self._ledger.read(lambda c: books.spent(c, self._ledger.row, share, now))
        if self._spent < share:
            return None
        return LinkShareSpent(
            f"{self._spent / 1e6:,.1f} MB came over link {self.definition.link} within a day, its part of this space's "
            f"log: more comes as time passes, {share / 24e6:,.2f} MB in an hour"
        )

    async def _write_down(self, job: Callable[[sqlite3.Connection], None]) -> None:
        """What became of records, and what of them was put into the log here."""
        added, share, now = self._admitter.added, self._share, self._now()

        def charged(c: sqlite3.Connection) -> None:
            job(c)
            if added and share:
                books.spend(c, self._ledger.row, added, share, now)

        await self._ledger.write(charged)
        self._admitter.added -= added

    async def _check_agreed(self) -> None:
        """What is let in counts by the link record in force where it lands, and by what is listed there. If that
        changed nothing is let in; if it changed meanwhile, what was let in has no disposition yet, and is looked for
        again."""
        facts = await self._destination.facts()
        if (self._checked_agreement(facts), facts.listing) != (self._agreed, self._listing):
            raise LinkConflict(
                f"link {self.definition.link} was agreed on anew, or other channels were listed here, while a page was "
                "let in: look again"
            )

    def _checked_agreement(self, facts: LocalFacts) -> int | None:
        """The sequence of the link record in force, if it is the one this direction was made for."""
        if facts.agreed is not None and facts.authority != self.definition.authority:
            raise LinkEnded(f"link {self.definition.link} was ended here, or agreed on otherwise")
        return facts.agreed

    # ------------------------------------------------------------------------------------------------- gaps

    async def _cross_gap(self, token: Token, gap: LinkGap) -> None:
        """The peer's log cannot go on from the token. Go on where it can, and say what that means."""
        check_gap(token, gap)
        if gap.kind is GapKind.STREAM:
            self._greeted = False
            raise self._wrong_space("another space")
        if gap.kind is GapKind.TOO_OLD:
            after = Token(space=token.space, epoch=token.epoch, seq=gap.oldest)
            await self._ledger.write(lambda c: books.omit_range(c, self._ledger.row, token, after, self._now()))
            self._tell(contract.GapDetected, gap.kind, token, after)
        else:
            await self._read_again(token, agreed_token(token, gap), gap.kind)
        self._head, self._repair_at = gap.head, 0.0
        self._gaps += 1
        if self._gaps > GAPS_IN_A_ROW:  # each was crossed, but a peer that only says so must not keep us busy
            raise PageRefused(f"{self._gaps} gaps one after the other, the last one {gap.kind.value}, and no page")

    # ------------------------------------------------------------------------------------- what waits; comparing

    async def _serve_waiting(self, token: Token) -> bool:
        """Try what is due, before anything new is let in. True if something was."""
        now, row = self._now(), self._ledger.row
        owed = await self._ledger.read(lambda c: obligations.owed(c, row, now, WAITING_AT_ONCE))
        if owed:
            await self._fetch(token, owed)
        kept = await self._ledger.read(
            lambda c: obligations.due_in_quarantine(c, row, now, WAITING_AT_ONCE - len(owed))
        )
        if kept:
            await self._try_quarantined(kept)
        return bool(owed or kept)

    async def _fetch(self, token: Token, owed: Sequence[OwedRecord]) -> None:
        row, asked = self._ledger.row, {each.seq: each for each in owed}
        # Said before it is tried: if trying it fails, or kills the worker, something else has its turn.
        luck, now = self._rng.random(), self._now()
        await self._ledger.write(lambda c: obligations.postpone(c, row, asked, now, luck))
        fetched = await self._from_peer(self._source.fetch(list(asked)))
        _check_fetched(asked, fetched)
        if fetched.epoch != token.epoch:
            return  # the next page says what that means
        there = [each for each in fetched.records if _is_what_was_owed(each, asked[each.seq])]
        gone = {*fetched.missing, *(each.seq for each in fetched.records)} - {each.seq for each in there}
        done = [_late(each) for each in await self._dispose(there)]
        done += [_vanished(asked[seq]) for seq in sorted(gone)]

        def settle(c: sqlite3.Connection) -> None:
            self._check_unchanged(c)
            obligations.settle(c, row, done, now)
            obligations.due_again(c, row, set(asked) - {each.seq for each in done}, now)

        await self._write_down(settle)

    async def _try_quarantined(self, kept: Sequence[Quarantined]) -> None:
        """Perhaps what made it unfit is over: a burnt id, a rule of ours that was wrong."""
        row, luck, now = self._ledger.row, self._rng.random(), self._now()
        tried = [(each.life, each.record.seq) for each in kept]
        await self._ledger.write(lambda c: obligations.quarantine_tried(c, row, tried, now, luck))

        def end(c: sqlite3.Connection, life: int, done: Disposed) -> None:
            self._check_unchanged(c)
            if done.kind == "quarantined":
                obligations.still_quarantined(c, row, life, done.seq, done.reason, done.words)
            else:
                obligations.settle(c, row, [_late(done)], now, life)

        for each in kept:
            (done,) = await self._dispose([each.record])
            await self._write_down(partial(end, life=each.life, done=done))

    async def _look_at_waiting(self) -> int | None:
        """When something that waits is due, in milliseconds."""
        row, share, now = self._ledger.row, self._share, self._now()

        def look(c: sqlite3.Connection) -> tuple[tuple[int, int], int | None, LinkRow, int]:
            return (
                obligations.counts(c, row),
                obligations.next_due(c, row),
                books.find(c, row),
                books.spent(c, row, share, now),
            )

        (self._owed, self._quarantined), due, self._link, self._spent = await self._ledger.read(look)
        return due

    def _compare_if_due(self, token: Token) -> None:
        """Everything that is there is here: is it the same? Comparing may take long, so it is done beside the loop."""
        tick, busy = self._clock.tick(), self._end_comparing is not None or self._compared is not None
        if self._comparison is None or busy or tick < self._repair_at:
            return
        self._repair_at = tick + REPAIR_EVERY * self._rng.uniform(0.8, 1.2)
        if token.seq and self._link is not None:
            self._tell(contract.RepairStarted, token)
            self._end_comparing = self._beside(self._compare(self._comparison, token, self._link.lives))

    async def _compare(self, comparison: Comparing, token: Token, lives: int) -> None:
        """Nothing is changed by it: what it finds waits for the next turn."""
        begun, lacking, extra = self._clock.tick(), list[RecordIdentity](), 0
        try:
            async for each in comparison.differences(token.seq):
                lacking += each.lacking
                extra += len(each.extra)
                if len(lacking) > MOST_OWED - self._owed:
                    del lacking[MOST_OWED - self._owed :]
                    break
            self._compared = _Compared(token, lives, lacking, extra, comparison.standing)
        except Exception as error:  # Boundary: comparing stops nothing.
            if not isinstance(error, TidingsError):
                log.exception("link %s could not be compared", self.definition.link)
            words = str(error) or type(error).__name__
            self._tell(contract.RepairFailed, words)
        self._end_comparing = None
        if self._repair_at:  # else it is wanted again at once
            tick = self._clock.tick()
            self._repair_at = max(self._repair_at, tick + REPAIR_SHARE * (tick - begun))
        self._clock.wake()

    async def _take_comparison(self, link: LinkRow, token: Token) -> bool:
        """What the peer has and we know nothing of is owed; where it has another record than we know, its log was set
        back and nobody noticed: from there on it is read again (True)."""
        found, comparison = self._compared, self._comparison
        if found is None or comparison is None:
            return False
        if (found.lives, found.token.domain) != (link.lives, token.domain):
            # it was about what is read again now: of that, the same may be missing once more
            self._compared, comparison.reported, self._repair_at = None, "", 0.0
            return False
        row, fetching, other = self._ledger.row, 0, None
        # what was removed there since is known no more, and is no difference
        lacking = [each for each in found.lacking if each.seq >= self._floor]
        if lacking:
            seqs = [each.seq for each in lacking]
            fetching = await self._ledger.write(lambda c: obligations.owe(c, row, seqs, self._now()))
            other = await self._ledger.read(lambda c: obligations.first_other(c, row, lacking))
        self._owed += fetching
        self._compared = None
        if not found.unchanged:
            self._differed = len(lacking), found.extra
        self._differing = sum(self._differed) - fetching
        self._tell(contract.RepairCompleted, found.token, *self._differed, fetching, found.unchanged)
        if other is not None:
            after = Token(space=token.space, epoch=token.epoch, seq=other - 1)
            await self._read_again(token, after, GapKind.RECORD, by_comparing=True)
        return other is not None

    async def _read_again(self, before: Token, after: Token, why: GapKind, *, by_comparing: bool = False) -> None:
        gone = await self._ledger.write(lambda c: books.go_back(c, self._ledger.row, before, after))
        self._rescan = True
        if self._comparison is not None:
            self._comparison.reported = ""  # of what is read again, the same may be missing once more
        self._tell(contract.GapDetected, why, before, after, *gone, by_comparing)

    # ------------------------------------------------------------------------------------- failures and telling

    def _failed(self, error: Exception) -> float:
        """Seconds until it is tried again."""
        blocks: Blocks = "link" if isinstance(error, _LINK) else "endpoint"
        self._failures_before = self._failures_before if self._failures else 0
        self._failures += 1
        ended_there = isinstance(error, EndedThere)
        self._failure = _Failure(str(error) or type(error).__name__, blocks, isinstance(error, _HELD_BACK), ended_there)
        self._greeted = False
        if blocks == "link":
            return LINK_DELAYS.delay(self._failures, self._rng.random())
        if (tries := self._failures - min(self._failures_before, self._failures - 1)) <= len(LADDER):
            return LADDER[tries - 1] * self._rng.uniform(0.8, 1.2)
        return self._rng.uniform(*POLL)

    async def _from_peer(self, answer: Awaitable[T]) -> T:
        """What the peer answers. Whether it is heard is said by this alone: our own broker may be away, too."""
        try:
            found = await answer
        except (errors.UnreachableError, errors.OutcomeUnknown, EndedThere):
            self._set_connectivity("offline")
            raise
        self._set_connectivity("online")
        return found

    def _set_connectivity(self, now: contract.Connectivity) -> None:
        before, self._connectivity = self._connectivity, now
        if before != now:
            self._tell(contract.ConnectivityChanged, before, now)

    def _status(self) -> contract.Status:
        if self._paused or (self._failure is not None and self._failure.held_back):
            return "paused"
        if self._failures >= len(LADDER):
            return "degraded_poll"
        if self._owed > 0 or self._rescan:
            return "repairing"
        return "live" if self._reached_the_end else "initializing"

    def _words(self) -> str:
        if self._paused and self._link is not None:
            return self._link.paused or ""
        return self._failure.words if self._failure is not None else ""

    def _tell_status(self) -> None:
        now, before = self._status(), self._told
        if now == before:
            return
        self._told = now
        self._tell(contract.StatusChanged, before, now, self._words())
        if now == "degraded_poll":
            self._tell(contract.DegradedPollEntered, self._words())

    def _tell(
        self, kind: Callable[Concatenate[str, float, P], contract.LinkEvent], *facts: P.args, **more: P.kwargs
    ) -> None:
        self._listeners.tell(kind(self.definition.link, self._clock.now(), *facts, **more))

    def _now(self) -> int:
        return int(self._clock.now() * 1000)


def _late(done: Disposed) -> Disposed:
    """It comes behind what its sender said since; whoever looks is told."""
    return msgspec.structs.replace(done, reason=LATE) if done.kind == "admitted" else done


def _vanished(owed: OwedRecord) -> Disposed:
    known = {name: value for name, value in owed._asdict().items() if name != "attempts"}
    return Disposed(**known, kind="omitted", reason="vanished")


def _is_what_was_owed(record: LinkedRecord, owed: OwedRecord) -> bool:
    """The peer's log may have another record there by now."""
    if not owed.hash:
        return True
    return hashlib.sha256(record.payload).hexdigest() == owed.hash and record.sender == owed.identity.sender


def _check_fetched(asked: dict[int, OwedRecord], fetched: Fetched) -> None:
    given = [*(each.seq for each in fetched.records), *fetched.missing]
    if len(set(given)) != len(given) or not set(given) <= set(asked):
        raise PageRefused("the peer was asked for some records, and answers with others, or with one twice")
    if not given:
        raise PageRefused(f"the peer was asked for {len(asked)} records, and says nothing of any")
