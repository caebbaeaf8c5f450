"""The channels an endpoint is in: joined and left at run time, live copies, backfill, and holes filled.

Joining subscribes first, then asks the steward; copies that arrive before its answer are held and then surfaced iff
they came after the join. Leaving asks first and unsubscribes afterwards: an unconfirmed leave changes nothing. After a
lost connection what was missed is read from history before anything newer counts as contiguous. A single live copy
that was lost is noticed by the next one of its sender (`gaps`), which then waits until the hole was read from the log.
If the steward is away the live subscription stands, the join says so, and it is completed in the background.
A log that went backwards (another `epoch`) has what is known by sequence forgotten, joins again, and is read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tidings.broker.client import Connection
from tidings.broker.ending import end_tasks
from tidings.endpoint.gaps import Arrivals, Cause, Gap, Hole
from tidings.endpoint.history import History
from tidings.endpoint.records import LiveCopy, LiveRecord, RecordOpener
from tidings.endpoint.seen import Seen
from tidings.endpoint.supervision import Supervision
from tidings.errors import ConflictError, DeniedError, LogRegressed, OutcomeUnknown, TidingsError, UnreachableError
from tidings.wire.ids import new_id
from tidings.wire.names import check_pattern
from tidings.wire.patterns import covers, is_concrete
from tidings.wire.roster import Backstop
from tidings.wire.subjects import Chat

BACKFILL = 100
FILL_LIMIT = 1_000
HELD_AT_MOST = 1_000
HOLES_AT_MOST = 256
RETRY_PAUSE = 1.0
log = logging.getLogger(__name__)

#: a resumed join does not read the log if durable copies are no further behind than this many records
NEARLY_LEVEL = 1_000
WaitForRoom = Callable[[], Awaitable[None]]


class Surface(Protocol):
    """Hand a record to the application; False when there is no room for it."""

    def __call__(
        self,
        record: LiveRecord,
        /,
        *,
        historical: bool = False,
        late: bool = False,
        ahead: bool = False,
        redelivered: bool = False,
    ) -> bool: ...


@dataclass(frozen=True, slots=True)
class Joined:
    """What a join came to. `durable` is False with a `reason` while the steward or the backstop is away."""

    channel: str
    state: str
    seq: int
    durable: bool
    reason: str
    backfilled: int = 0
    cls: str = "durable"


@dataclass(eq=False)
class Membership:
    """One joined channel or pattern."""

    pattern: str
    op: str = field(default_factory=new_id)
    #: sequence of the join; None until the steward answered
    joined: int | None = None
    #: it began with this session, so that nothing above `joined` is older than what we could have heard
    opened_here: bool = False
    #: live copies that came before the answer, or wait for something older
    held: list[LiveCopy] | None = field(default_factory=list)
    #: subject -> what of it was lost on the way and is being read from the log
    holes: dict[str, Hole] = field(default_factory=dict)
    #: why the log is being read, if somebody is to be told
    cause: Cause | None = None
    #: the steward was away when the log was to be read: live goes on meanwhile, and nothing waits for it
    unreadable: bool = False
    #: no copy of this session was missed: what arrives is contiguous
    contiguous: bool = False
    #: held copies were let go, so the log must be read once more
    overrun: bool = False
    #: only looking: live copies without a membership
    watching: bool = False
    #: a task reads what was missed
    catching_up: bool = False
    #: the log went backwards: what came after that counts, even if it was before we had joined again
    rewound: bool = False
    #: what lies up to here was not read from the log, because frames bring it
    left_to_frames: int = 0
    #: what lies up to here may have been surfaced by a process before this one, and nobody remembers
    forgotten: int = 0
    subscriptions: list[Any] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def take_held(self) -> list[LiveCopy]:
        held, self.held = self.held or [], None
        return held

    @property
    def confirmed(self) -> bool:
        """The steward answered, and what is missed here is owed."""
        return self.joined is not None and not self.watching


class Channels:
    def __init__(
        self,
        link: Supervision,
        opener: RecordOpener,
        seen: Seen,
        history: History,
        surface: Surface,
        wait_for_room: WaitForRoom,
        report: Callable[[str, Any], None],
    ) -> None:
        self.link = link
        self.opener = opener
        self.seen = seen
        self.history = history
        self.memberships: dict[str, Membership] = {}
        self.arrivals = Arrivals()
        #: live copies that were lost on the way and were read from the log; and holes whose messages had left it
        self.recovered = self.gone = 0
        self._surface = surface
        self._wait_for_room = wait_for_room
        self._report = report
        self._background: set[asyncio.Task[None]] = set()
        self._stopped = False
        #: have frames brought everything up to this sequence? None while nobody pulls them
        self.frames_through: Callable[[], int] | None = None
        link.on_session(self._on_session)

    # --- join and leave ---

    async def join(self, pattern: str, *, backfill: int = BACKFILL) -> Joined:
        check_pattern(pattern)
        held = self.memberships.get(pattern)
        if held is not None and held.joined is not None:
            return self._told(held, "resumed", "", 0)
        membership = held or Membership(pattern)
        with self._pinned(pattern):
            await self._subscribe(self.link.connection, membership)
            self.memberships[pattern] = membership
            return await self._join(membership, backfill)

    @contextmanager
    def _pinned(self, pattern: str) -> Iterator[None]:
        """What is seen of a joined channel is remembered, from before its first copy until it is left."""
        self.seen.pinned.add(pattern)
        try:
            yield
        finally:
            if pattern not in self.memberships:
                self.seen.pinned.discard(pattern)

    async def _join(self, membership: Membership, backfill: int) -> Joined:
        try:
            answer = await self._ask_join(membership)
        except (UnreachableError, OutcomeUnknown) as error:
            self._release(membership, 0)
            self._later(self._complete(membership, backfill))
            return self._told(membership, "live", f"the steward is away, so this is live only for now ({error})", 0)
        except TidingsError:
            await self._unsubscribe(membership)
            del self.memberships[membership.pattern]
            raise
        count, reason = await self._settle_join(membership, answer, backfill)
        return self._told(membership, answer["state"], reason, count)

    async def watch(self, pattern: str) -> None:
        """See live copies without becoming a member: nothing is owed, and nothing is caught up."""
        membership = Membership(check_pattern(pattern), joined=0, held=None, watching=True)
        await self._subscribe(self.link.connection, membership)
        self.memberships[pattern] = membership

    async def _ask_join(self, membership: Membership, connection: Connection | None = None) -> dict[str, Any]:
        arguments: dict[str, Any] = {"epoch": self.seen.epoch} if self.seen.epoch else {}
        answer = await self.link.call(
            "member", "join", op=membership.op, pattern=membership.pattern, connection=connection, **arguments
        )
        self._follow_epoch(str(answer.get("epoch", "")), answer.get("agreed"))
        return answer

    async def _settle_join(self, membership: Membership, answer: dict[str, Any], backfill: int) -> tuple[int, str]:
        """Take the steward's answer: backfill below it, then what was held, then everything live.

        Answers how many were backfilled, and what is still to come if the log could not be read.
        """
        membership.joined = int(answer["seq"])
        membership.facts = answer
        membership.opened_here = answer["state"] == "opened"
        if not membership.opened_here and not self.seen.remembers:
            membership.forgotten = int(answer.get("head", 0))
        count, reason = 0, ""
        try:
            if answer["state"] == "opened" and answer.get("replay") and backfill and is_concrete(membership.pattern):
                count, reason = await self._backfill_or_later(membership, backfill)
            elif answer["state"] == "resumed" and self._comes_as_frames(membership):
                self._leave_to_frames(membership)
            elif answer["state"] == "resumed" and not await self._fill(membership):
                self._later(self._resume(membership))
                return 0, ""
        except TidingsError as error:
            self._report("error", error)
            self._later(self._resume(membership))
            return 0, f"what was missed could not be read yet and comes later ({error})"
        if membership.overrun:  # more came while we read than we hold: the log has it
            self._later(self._resume(membership))
            return count, reason
        membership.contiguous = True
        self._release(membership, membership.joined)
        return count, reason

    async def _backfill_or_later(self, membership: Membership, limit: int) -> tuple[int, str]:
        seen = self.seen.channel(membership.pattern)
        after, beyond = seen.through, frozenset(seen.beyond)
        try:
            return await self._backfill(membership, limit), ""
        except (UnreachableError, OutcomeUnknown, ConflictError) as error:
            self._report("error", error)
            self._later(self._backfill_until_done(membership, limit, after, beyond))
            return 0, f"what was said before could not be read yet and comes later ({error})"

    async def _said_before(self, membership: Membership, limit: int) -> list[LiveRecord]:
        """What was said before the join, oldest first."""
        window = membership.facts.get("replay_window")
        found = await self.history.records(membership.pattern, limit, before=membership.joined, window=window)
        return found[::-1]

    def _comes_as_frames(self, membership: Membership) -> bool:
        """Is what was missed on its way as frames? Else it is read from the log, so that nobody waits for Spark."""
        backstop = self._backstop(membership)
        level = backstop.running and backstop.behind is not None and backstop.behind <= NEARLY_LEVEL
        return level and membership.facts.get("class") == "durable" and self.frames_through is not None

    def _leave_to_frames(self, membership: Membership) -> None:
        """Do not read what frames bring: what was settled comes no more, however often this agent starts."""
        membership.left_to_frames = int(membership.facts["head"])
        for channel in self._known_channels(membership):
            self.seen.channel(channel).leave_to_frames(membership.joined or 0, membership.left_to_frames)

    def _known_channels(self, membership: Membership) -> list[str]:
        known = [name for name in self.seen.channels if covers(membership.pattern, name)]
        if is_concrete(membership.pattern) and membership.pattern not in known:
            known.append(membership.pattern)
        return known

    @staticmethod
    def _backstop(membership: Membership) -> Backstop:
        return msgspec.convert(membership.facts.get("backstop") or {}, Backstop)

    async def _backfill(self, membership: Membership, limit: int) -> int:
        """Surface what was said before the join, marked historical."""
        assert membership.joined is not None
        epoch = self.seen.epoch
        records = await self._said_before(membership, limit)
        for record in records:
            self._offer(record, historical=True, contiguous=False)
        if self.seen.epoch == epoch:
            self.seen.channel(membership.pattern).close_hole(membership.joined)
        return len(records)

    async def _backfill_until_done(
        self, membership: Membership, limit: int, after: int, beyond: frozenset[int]
    ) -> None:
        """The same later: live copies went on meanwhile, so what was seen then decides what is new."""
        while self.memberships.get(membership.pattern) is membership:
            await asyncio.sleep(RETRY_PAUSE)
            try:
                await self.link.ready(30)
                records = await self._said_before(membership, limit)
            except (UnreachableError, OutcomeUnknown, ConflictError):
                continue
            except TidingsError as error:
                self._report("error", error)
                return
            own = self.link.identity.id
            for record in records:
                if record.seq > after and record.seq not in beyond and record.received.sender != own:
                    while not self._surface_missed(record, historical=True):
                        await self._wait_for_room()
            return

    def _release(self, membership: Membership, after: int) -> None:
        for copy in membership.take_held():
            if membership.held is not None:  # one of them found no room, or a hole: the others wait behind it
                self._hold(membership, copy)
            elif copy.seq > after:
                self._take(membership, copy)

    async def _complete(self, membership: Membership, backfill: int) -> None:
        """Join in the background until the steward answers, with the same op."""
        while self.memberships.get(membership.pattern) is membership and membership.joined is None:
            await asyncio.sleep(RETRY_PAUSE)
            try:
                answer = await self._ask_join(membership)
            except (UnreachableError, OutcomeUnknown):
                continue
            except TidingsError as error:
                self._report("error", error)
                await self._drop(membership)
                return
            await self._settle_join(membership, answer, backfill)

    async def leave(self, pattern: str) -> dict[str, Any]:
        """Close the membership, then unsubscribe what no other pattern covers."""
        answer = await self.link.call("member", "leave", pattern=check_pattern(pattern))
        membership = self.memberships.get(pattern)
        if membership is not None:
            await self._drop(membership)
        return answer

    async def drop(self, pattern: str) -> None:
        """Forget a channel this agent may no longer read; the steward has closed the membership."""
        membership = self.memberships.get(pattern)
        if membership is not None:
            await self._drop(membership)

    async def _drop(self, membership: Membership) -> None:
        self.memberships.pop(membership.pattern, None)
        self.seen.pinned.discard(membership.pattern)
        for subject in list(membership.holes):
            self._close_hole(membership, subject)
        await self._unsubscribe(membership)

    def _told(self, membership: Membership, state: str, reason: str, count: int) -> Joined:
        cls = str(membership.facts.get("class", "durable"))
        backstop = self._backstop(membership)
        if not reason and cls == "durable":
            reason = backstop.delay
        return Joined(
            membership.pattern,
            state,
            membership.joined or 0,
            durable=cls == "durable" and backstop.running and membership.joined is not None,
            reason=reason,
            backfilled=count,
            cls=cls,
        )

    def is_forgotten(self, record: LiveRecord) -> bool:
        """May a process before this one have surfaced it without anybody remembering?"""
        if self.seen.remembers:
            return False
        covering = [m for m in self.memberships.values() if m.confirmed and covers(m.pattern, record.channel)]
        return not any(record.seq > max(m.forgotten, m.joined or 0) for m in covering)

    def class_of(self, channel: str) -> str | None:
        """The class of a channel, if the steward told it at a join."""
        membership = self.memberships.get(channel)
        return membership.facts.get("class") if membership is not None else None

    # --- live copies ---

    async def _subscribe(self, connection: Connection, membership: Membership) -> None:
        """Subscribe and know whether the broker allows it: its refusal comes before the answer to a flush."""
        s = self.link.identity.subjects
        membership.subscriptions = []
        refusals: list[str] = []
        hear = refusals.append
        connection.on_violation.append(hear)
        try:
            for subject in (s.live_chat(membership.pattern), s.live_via(membership.pattern)):
                subscription = await connection.listen(subject, self._receiver(membership))
                membership.subscriptions.append(subscription)
            await connection.flush(timeout=5)
        finally:
            connection.on_violation.remove(hear)
        if any(s.live_chat(membership.pattern).lower() in each.lower() for each in refusals):
            await self._unsubscribe(membership)
            raise DeniedError(f"{self.link.identity.name} may not read {membership.pattern}")

    def _receiver(self, membership: Membership) -> Any:
        def receive(message: Any) -> None:
            copy = self.opener.live(message)
            if copy is None:
                return
            if membership.held is not None:
                self._hold(membership, copy)
            elif membership.joined is None or copy.seq > membership.joined:
                self._take(membership, copy)

        return receive

    def _hold(self, membership: Membership, copy: LiveCopy) -> None:
        """Keep a copy for later. Too many are let go: they are in the log, and are read from there."""
        assert membership.held is not None
        if copy.record is not None:
            self.seen.channel(copy.record.channel)  # so that this channel is among those that are read
        membership.held.append(copy)
        if len(membership.held) > HELD_AT_MOST:
            membership.held.clear()
            membership.overrun = True
            membership.contiguous = False

    def _take(self, membership: Membership, copy: LiveCopy) -> None:
        """Surface a copy, unless the one before it was lost: then it waits until that was read from the log."""
        if membership.confirmed:
            hole = None if self.arrivals.covers(copy.subject, copy.previous) else self._hole_before(copy)
            if hole is not None and self._must_wait(membership, copy, hole):
                return
            if hole is None or copy.subject in membership.holes:
                self.arrivals.note(copy.subject, copy.seq)
        if copy.record is not None:
            self._offer_live(membership, copy.record)

    def _hole_before(self, copy: LiveCopy) -> Hole | None:
        """The hole this copy shows, if what lies in it is owed to us and nothing else explains it."""
        address = self.link.identity.subjects.parse(copy.subject)
        if not isinstance(address, Chat) or address.sender == self.link.identity.id:
            return None
        seen = self.seen.channel(address.channel)
        covering = [m for m in self.memberships.values() if m.confirmed and covers(m.pattern, address.channel)]
        known = self.arrivals.last(copy.subject)
        if not known and not seen.read:  # what was said before this session listened is not a lost copy
            covering = [m for m in covering if m.opened_here]
        after = max(
            known, seen.read, seen.left_to_frames, min((m.joined or 0 for m in covering), default=copy.previous)
        )
        if copy.previous <= after or copy.previous in seen.beyond:
            return None
        return Hole(address.channel, address.sender, after, copy.previous, position=after)

    def _must_wait(self, membership: Membership, copy: LiveCopy, hole: Hole) -> bool:
        """Have a hole read. The copy that shows it waits for that, unless nobody can say how long it would take.

        Beyond a number of holes none is opened and nothing is noted as arrived, so the next copy shows it again.
        """
        known = membership.holes.get(copy.subject)
        if known is not None:
            known.through = hole.through
        elif len(membership.holes) < HOLES_AT_MOST:
            membership.holes[copy.subject] = hole
            self.seen.channel(hole.channel).missing[copy.subject] = hole.after
        else:
            return False
        if not membership.catching_up:
            self._later(self._resume(membership))
        if membership.unreadable:
            return False
        self.arrivals.note(copy.subject, hole.through)
        membership.held = membership.held or []
        self._hold(membership, copy)
        return True

    def _offer_live(self, membership: Membership, record: LiveRecord) -> None:
        """A copy for which there is no room is not lost: it is in the log, and is read again when there is."""
        if not self._offer(record, contiguous=membership.contiguous, ahead=self._is_ahead(membership)):
            membership.contiguous = False
            if membership.watching or membership.joined is None:
                return
            membership.held = membership.held or []  # what comes now waits for what has no room
            if not membership.catching_up:
                self._later(self._resume(membership))

    def _is_ahead(self, membership: Membership) -> bool:
        """May older messages of this membership still be on their way?"""
        if membership.unreadable:
            return membership.confirmed
        if membership.left_to_frames and self.frames_through is not None:
            return self.frames_through() < membership.left_to_frames
        return False

    @staticmethod
    async def _unsubscribe(membership: Membership) -> None:
        for subscription in membership.subscriptions:
            if not subscription._conn.is_closed:
                await subscription.unsubscribe()
        membership.subscriptions = []

    def _offer(self, record: LiveRecord, *, contiguous: bool, **marks: bool) -> bool:
        """Surface a record once: by its sequence, and by (sender, id). False if there was no room for it."""
        seen = self.seen.channel(record.channel)
        if not seen.is_new(record.seq) or record.seq in self.seen.known:
            return True
        own = record.received.sender == self.link.identity.id
        repeated = not own and not self.seen.first_time(record.identity)
        if not own and not repeated and not self._surface(record, **marks):
            self.seen.forget(record.identity)
            return False
        seen.surface(record.seq, contiguous=contiguous)
        if repeated:
            self.opener.refused["repeated"] += 1
        if own or repeated:
            seen.settle(record.seq)
        return True

    def offer_durable(self, record: LiveRecord, *, redelivered: bool) -> bool:
        """Surface a durable copy unless the message was surfaced before, from whatever copy. False: there is no room.

        A copy in the application's hands stays the only one: whoever offers this one waits until that was settled.
        """
        own = record.received.sender == self.link.identity.id
        if own or record.seq in self.seen.known:
            return True
        if not self.seen.first_time(record.identity):
            self.opener.refused["repeated"] += 1
            return True
        seen = self.seen.channel(record.channel)
        if not self._surface(record, late=record.seq < seen.newest, redelivered=redelivered):
            self.seen.forget(record.identity)
            return False
        seen.surface_durable(record.seq)
        return True

    # --- after a lost connection ---

    async def _on_session(self, connection: Connection) -> None:
        if self._stopped:
            return
        for membership in list(self.memberships.values()):
            if membership.joined is not None and not membership.watching:
                membership.held = []
                membership.cause = "connection"
            membership.contiguous = False
            try:
                await self._subscribe(connection, membership)
            except DeniedError as error:
                # The access was narrowed while we were away: the channel is gone, and that is said.
                self.memberships.pop(membership.pattern, None)
                self.seen.pinned.discard(membership.pattern)
                self._report("error", error)
                continue
            if not membership.watching:
                self._later(self._resume(membership))

    async def _resume(self, membership: Membership) -> None:
        """Confirm the membership and read what was missed; then what is live is contiguous again."""
        if membership.catching_up:
            return
        membership.catching_up = True
        try:
            await self._catch_up(membership)
        finally:
            membership.catching_up = False

    async def _catch_up(self, membership: Membership) -> None:
        while self.memberships.get(membership.pattern) is membership and not self._is_whole(membership):
            epoch = self.seen.epoch
            try:
                await self.link.ready(30)
                if not await self._read_missed(membership):
                    await self._wait_for_room()
                    continue
                if membership.overrun:
                    membership.overrun = False
                    continue
                if epoch != self.seen.epoch:
                    continue
            except (UnreachableError, OutcomeUnknown):
                membership.unreadable = True
                self._release_unconfirmed(membership)
                await asyncio.sleep(RETRY_PAUSE)
                continue
            except TidingsError as error:
                self._report("error", error)
                await self._drop(membership)
                return
            membership.contiguous = True
            membership.cause, membership.unreadable, membership.rewound = None, False, False
            self._release(membership, membership.joined or 0)

    @staticmethod
    def _is_whole(membership: Membership) -> bool:
        return membership.contiguous and not membership.holes and membership.held is None

    async def _read_missed(self, membership: Membership) -> bool:
        """Read holes of single senders, and everything since the last contiguous copy. False: no room for all of it."""
        if not membership.contiguous:
            answer = await self._ask_join(membership)
            joined = int(answer["seq"])
            membership.joined = min(joined, membership.joined or joined) if membership.rewound else joined
            membership.facts = answer
        while membership.holes:
            if not await self._fill_hole(membership, next(iter(membership.holes))):
                return False
        return membership.contiguous or await self._fill(membership)

    def _release_unconfirmed(self, membership: Membership) -> None:
        """Nobody can say yet what was missed: live copies surface at once, as not contiguous."""
        self._release(membership, membership.joined or 0)

    async def _fill(self, membership: Membership) -> bool:
        """Read what lies between what was seen and now, on every channel of this membership seen before.

        False when the application has no room for all of it: then it goes on when there is.
        """
        assert membership.joined is not None
        for channel in self._known_channels(membership):
            seen = self.seen.channel(channel)
            start = max(seen.through, membership.joined)
            epoch = self.seen.epoch
            records, complete, head = await self.history.after(channel, start, FILL_LIMIT)
            if epoch != self.seen.epoch:  # `start` was a place in another log
                return False
            fresh = 0
            for record in records:
                new = seen.is_new(record.seq) and record.received.sender != self.link.identity.id
                if not self._offer(record, contiguous=True, redelivered=record.seq <= membership.forgotten):
                    return False
                fresh += new
            if fresh and membership.cause is not None:
                self._report("gap", Gap(channel, None, start, records[-1].seq, fresh, membership.cause))
            if not complete:
                return await self._fill(membership)
            seen.close_hole(max(head, start))
        return True

    async def _fill_hole(self, membership: Membership, subject: str) -> bool:
        """Read what one sender said in a hole, surface it, and say so. False when there is no room."""
        hole = membership.holes[subject]
        more = True
        while more:
            asked = hole.through
            records, last, more = await self.history.of_sender(hole.channel, hole.sender, hole.position, asked)
            if membership.holes.get(subject) is not hole:  # it was in another log
                return True
            for record in records:
                if not self._offer_missed(record, hole):
                    return False
            hole.position = last
            more = more or hole.through > asked  # it grew meanwhile
        gone = hole.position < hole.through  # the record that was there when a copy named it is no longer
        self.gone += gone
        if hole.recovered or gone:
            self._report("gap", hole.told(gone=gone))
        self._close_hole(membership, subject)
        return True

    def _close_hole(self, membership: Membership, subject: str) -> None:
        hole = membership.holes.pop(subject, None)
        if hole is not None:
            self.seen.channel(hole.channel).missing.pop(subject, None)

    def _offer_missed(self, record: LiveRecord, hole: Hole) -> bool:
        """A record of a hole: no copy of it arrived, whatever came after it. False if there was no room for it."""
        if record.received.sender != hole.sender or record.seq in self.seen.known:
            return True
        if not self._surface_missed(record, historical=False):
            return False
        hole.recovered += 1
        self.recovered += 1
        return True

    def _surface_missed(self, record: LiveRecord, *, historical: bool) -> bool:
        """Surface a record that others of its channel have passed, once. False if there was no room for it."""
        if not self.seen.first_time(record.identity):
            return True
        seen = self.seen.channel(record.channel)
        if not self._surface(record, historical=historical, late=record.seq < seen.newest):
            self.seen.forget(record.identity)
            return False
        seen.surface_missed(record.seq)
        return True

    # --- after the log went backwards ---

    def heed_epoch(self, epoch: str) -> None:
        """The steward speaks of a log of this epoch. If it is another than ours, every membership is asked for again;
        the answers say up to where the two agree."""
        if epoch and self.seen.epoch and epoch != self.seen.epoch and not self._stopped:
            for membership in self.memberships.values():
                self._doubt(membership)

    def _doubt(self, membership: Membership) -> None:
        if not membership.confirmed:
            return
        membership.contiguous = False
        membership.held = membership.held or []
        if not membership.catching_up:
            self._later(self._resume(membership))

    def _follow_epoch(self, epoch: str, agreed: int | None) -> None:
        if agreed is None or epoch == self.seen.epoch:
            if epoch and not self.seen.epoch:
                self.seen.adopt(epoch)
            return
        self.seen.rewind(epoch, agreed)
        self.arrivals.rewind(agreed)
        for membership in self.memberships.values():
            for subject in list(membership.holes):
                self._close_hole(membership, subject)
            if membership.joined is not None:
                membership.joined = min(membership.joined, agreed)
                membership.rewound = True
            self._doubt(membership)
        self._report(
            "error",
            LogRegressed(
                f"the log of this space went backwards and agrees with what was seen only up to {agreed}: memberships "
                "are checked and newer messages read again; what was lost with it only its senders have"
            ),
        )

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def stop(self) -> None:
        """Receive nothing more, now and after a reconnect. Memberships stay: whoever superseded us has them too."""
        self._stopped = True
        await self.close()
        for membership in self.memberships.values():
            await self._unsubscribe(membership)

    async def close(self) -> None:
        await end_tasks(self._background)
