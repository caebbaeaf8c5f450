"""The channels an endpoint is in: joined and left at run time, and whole again after anything that was lost.

Joining subscribes first, then asks the steward; copies that arrive before its answer are held and then surfaced iff
they came after the join. Leaving asks first and unsubscribes afterwards: an unconfirmed leave changes nothing. After a
lost connection what was missed is read from history before anything newer counts as contiguous.
If the steward is away the live subscription stands, the join says so, and it is completed in the background.
A log that went backwards (another `epoch`, or other records than those remembered) has what is known by sequence
forgotten above where both agree, joins again, and is read again.
How copies are received and held is in `live.py`, how the log is read in `backfill.py`, what a membership is in
`LocalMembership`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tidings.client import notices
from tidings.client.backfill import Backfill, LogReader
from tidings.client.connection import AgentConnection
from tidings.client.intake import Intake, LiveRecord
from tidings.client.live import Leave, LiveCopies, LocalMembership, MembershipChange, Memberships, unsubscribe
from tidings.client.read_state import NOWHERE, Position
from tidings.client.transport import Joined
from tidings.contract.channels import JoinAnswer, JoinRequest, LeaveAnswer, LeaveRequest, MembershipsRequest
from tidings.errors import (
    ConflictError,
    ConnectionLost,
    DeniedError,
    LogRegressed,
    OutcomeUnknown,
    TidingsError,
    UnreachableError,
)
from tidings.nats.client import Connection
from tidings.util.task_ends import end_tasks
from tidings.wire.message import new_id
from tidings.wire.names import check_pattern, covers_pattern, is_channel
from tidings.wire.records import Stamp

RETRY_PAUSE = 1.0
#: a connection is rebuilt for wider access, too: who joins meanwhile waits for it
REBUILT_WITHIN = 5.0
#: connections that may go while one subscribes
LISTEN_TRIES = 3
#: a resumed join does not read the log if durable copies are no further behind than this many records
NEARLY_LEVEL = 1_000


class Channels:
    def __init__(
        self,
        connection: AgentConnection,
        log: LogReader,
        intake: Intake,
    ) -> None:
        self.connection = connection
        self.intake = intake
        self.read_state = intake.read_state
        self.memberships = Memberships()
        self.live = LiveCopies(connection, self.memberships, intake, self._catch_up_later)
        self.backfill = Backfill(log, intake)
        self._links = intake.opener.links
        self._wait_for_room = intake.inbox.wait_for_room
        self._report = intake.events.emit
        self._background: set[asyncio.Task[None]] = set()
        self._stopped = False
        #: pattern -> where this program left it
        self._left: dict[str, int] = {}
        #: pattern -> a leave whose answer did not come
        self._unsure: dict[str, Leave] = {}
        #: how often the log was found to have gone backwards
        self._rewinds = 0
        log.on_stamp = self._hear_stamp
        #: patterns that something else ended, until somebody looked whether access was the cause
        self.ended: set[str] = set()
        connection.on_session(self._on_session)

    # --- join ---

    async def join(self, pattern: str, *, backfill: int = 0) -> Joined:
        check_pattern(pattern)
        self._unsure.pop(pattern, None)
        held = self.memberships.get(pattern)
        if held is not None and held.confirmed and (told := await self._confirm(held)) is not None:
            return told
        held = self.memberships.get(pattern)
        if held is not None and held.watching:  # from now on it is joined, and heard once
            await self._drop(held)
            held = None
        membership = held or LocalMembership(pattern)
        with self._pinned(pattern):
            await self._listen(membership)
            self.memberships[pattern] = membership
            return await self._join(membership, backfill)

    async def _listen(self, membership: LocalMembership) -> None:
        """Hear live copies; on the next connection if this one goes meanwhile, as it does when access was widened."""
        for left in reversed(range(LISTEN_TRIES)):
            try:
                return await self.live.subscribe(await self.connection.ready(REBUILT_WITHIN), membership)
            except ConnectionLost:
                if not left:
                    raise
        return None

    async def _confirm(self, membership: LocalMembership) -> Joined | None:
        """What the steward says of a membership we hold. None: it is over, and is no longer held."""
        try:
            answer = await self._ask_join(membership)
        except (UnreachableError, OutcomeUnknown) as error:
            reason = f"the steward is away, so nobody can say that it still stands ({error})"
            return membership.as_joined("live", reason)
        if answer.left is not None:
            await self._drop(membership)
            return None
        membership.facts = answer
        return membership.as_joined("resumed")

    @contextmanager
    def _pinned(self, pattern: str) -> Iterator[None]:
        """What is seen of a joined channel is remembered, from before its first copy until it is left."""
        self.read_state.pinned.add(pattern)
        try:
            yield
        finally:
            if pattern not in self.memberships:
                self.read_state.pinned.discard(pattern)

    async def _join(self, membership: LocalMembership, backfill: int) -> Joined:
        try:
            answer = await self._ask_join(membership)
            if answer.left is not None:  # the request is a repeat, and another program has left since
                membership.op = new_id()
                answer = await self._ask_join(membership)
        except (UnreachableError, OutcomeUnknown) as error:
            self.live.release(membership)
            self._later(self._complete(membership, backfill))
            return membership.as_joined("live", f"the steward is away, so this is live only for now ({error})")
        except TidingsError:
            await unsubscribe(membership)
            del self.memberships[membership.pattern]
            raise
        count, reason = await self._apply_join(membership, answer, backfill)
        return membership.as_joined(answer.state, reason, count)

    async def watch(self, pattern: str) -> None:
        """See live copies without becoming a member: nothing is owed, and nothing is caught up."""
        membership = LocalMembership(check_pattern(pattern), joined=0, held=None, watching=True)
        await self._listen(membership)
        self.memberships[pattern] = membership

    async def _ask_join(self, membership: LocalMembership) -> JoinAnswer:
        marks, rewinds, session = self.read_state.marks, self._rewinds, self.read_state.marks.session
        claims = () if marks.is_checked else tuple(marks.claims())
        request = JoinRequest(membership.pattern, self.read_state.epoch or None, claims)
        answer = await self.connection.call(request, op=membership.op)
        if rewinds == self._rewinds:  # else another answer reported the same before
            self._apply_epoch(answer.epoch, answer.agreed)
            marks.checked(session)
        self._hear_stamp(answer.stamp)
        return answer

    def _hear_stamp(self, stamp: Stamp | None) -> None:
        if stamp:
            self.read_state.marks.note(stamp)

    async def _apply_join(self, membership: LocalMembership, answer: JoinAnswer, backfill: int) -> tuple[int, str]:
        """Take the steward's answer: backfill below it, then what was held, then everything live.

        Answers how many were backfilled, and what is still to come if the log could not be read.
        """
        membership.joined = membership.record = answer.seq
        membership.facts = answer
        membership.opened_here = answer.state == "opened"
        if not membership.opened_here and not self.read_state.remembers:
            membership.forgotten = answer.head
        count, reason = 0, ""
        if membership.opened_here and is_channel(membership.pattern) and not backfill:
            self.read_state.channel(membership.pattern).close_hole(membership.joined)
        try:
            if membership.opened_here and backfill:
                count, reason = await self._backfill_or_later(membership, backfill)
            elif answer.state == "resumed" and self._comes_as_frames(membership):
                self._leave_to_frames(membership, answer)
            elif answer.state == "resumed" and not await self.backfill.fill(membership):
                self._catch_up_later(membership)
                return 0, ""
        except TidingsError as error:
            self._report("error", error)
            self._catch_up_later(membership)
            return 0, f"what was missed could not be read yet and comes later ({error})"
        if membership.overrun:  # more came while we read than we hold: the log has it
            self._catch_up_later(membership)
            return count, reason
        membership.contiguous = True
        self.live.release(membership)
        return count, reason

    async def _complete(self, membership: LocalMembership, backfill: int) -> None:
        """Join in the background until the steward answers, with the same op."""
        while self.memberships.holds(membership) and membership.joined is None:
            await asyncio.sleep(RETRY_PAUSE)
            try:
                answer = await self._ask_join(membership)
            except (UnreachableError, OutcomeUnknown):
                continue
            except TidingsError as error:
                self._report("error", error)
                await self._drop(membership)
                return
            if answer.left is not None:
                await self._end(membership, answer.left)
                return
            await self._apply_join(membership, answer, backfill)

    # --- what was said before a join ---

    async def _backfill_or_later(self, membership: LocalMembership, limit: int) -> tuple[int, str]:
        known = {
            name: self.read_state.channel(name).position for name in self.read_state.covered_by(membership.pattern)
        }
        try:
            count, rest = await self.backfill.before_join(membership, limit)
        except (UnreachableError, OutcomeUnknown, ConflictError) as error:
            self._report("error", error)
            self._later(self._backfill_until_done(membership, limit, known))
            return 0, f"what was said before could not be read yet and comes later ({error})"
        if not rest:
            return count, ""
        self._later(self._surface_past(membership, rest))
        return count, f"{len(rest)} older messages wait until the inbox has room for them"

    async def _backfill_until_done(self, membership: LocalMembership, limit: int, known: dict[str, Position]) -> None:
        """The same later: live copies went on meanwhile, so what was seen then decides what is new."""
        while self.memberships.holds(membership):
            await asyncio.sleep(RETRY_PAUSE)
            try:
                await self.connection.ready(30)
                records = await self.backfill.said_before(membership, limit)
            except (UnreachableError, OutcomeUnknown, ConflictError):
                continue
            except TidingsError as error:
                self._report("error", error)
                return
            new = [each for each in records if known.get(each.channel, NOWHERE).is_new(each.seq)]
            await self._surface_past(membership, new)
            return

    async def _surface_past(self, membership: LocalMembership, records: list[LiveRecord]) -> None:
        for record in records:
            if record.sender == self.intake.own_id:
                continue
            while not self.intake.offer_backfilled(record, historical=True):
                if not self.memberships.holds(membership):
                    return
                await self._wait_for_room()

    # --- what comes as frames ---

    def _comes_as_frames(self, membership: LocalMembership) -> bool:
        """Is what was missed on its way as frames? Else it is read from the log, so that nobody waits for Spark."""
        if self.read_state.reads_again:
            return False
        backstop = membership.backstop
        level = backstop.running and backstop.behind is not None and backstop.behind <= NEARLY_LEVEL
        return level and membership.cls == "durable" and self.memberships.frames is not None

    def _leave_to_frames(self, membership: LocalMembership, answer: JoinAnswer) -> None:
        """Do not read what frames bring: what was settled comes no more, however often this agent starts."""
        membership.left_to_frames = answer.head
        for channel in self.read_state.covered_by(membership.pattern):
            self.read_state.channel(channel).leave_to_frames(membership.joined or 0, membership.left_to_frames)

    # --- leave ---

    async def leave(self, pattern: str) -> LeaveAnswer:
        """Close the membership, then unsubscribe what no other pattern covers.

        What is asked names the join it ends, so that it does nothing to a newer one, however late it arrives. Asked
        again after it got no answer it is the same operation: what was joined since stands, and `open` says so.
        """
        held = self.memberships.get(check_pattern(pattern))
        if held is not None:
            held.leaving = True
        try:
            answer = await self._ask_leave(pattern, held)
        finally:
            if held is not None:
                held.leaving = False
        self._left[pattern] = answer.seq
        await self.drop(pattern)
        return answer

    async def _ask_leave(self, pattern: str, held: LocalMembership | None) -> LeaveAnswer:
        named: int | None = held.record if held is not None and held.confirmed else None
        unsure = self._unsure.get(pattern)
        if unsure is not None and named in (None, unsure.joined):
            return await self._end_named(pattern, unsure)
        if named is None:
            listed = await self.connection.call(MembershipsRequest())
            named = next((each.joined for each in listed.memberships if each.pattern == pattern), None)
            if named is None:
                covering = (each.pattern for each in listed.memberships if covers_pattern(each.pattern, pattern))
                return LeaveAnswer("absent", listed.seq, None, tuple(covering))
        answer = await self._end_named(pattern, Leave(named))
        if answer.open:  # another program left and joined again: the caller means that membership
            answer = await self._end_named(pattern, Leave(answer.open))
        return answer

    async def _end_named(self, pattern: str, leave: Leave) -> LeaveAnswer:
        """Ask for one leave, and remember it until it is known what became of it."""
        self._unsure[pattern] = leave
        try:
            answer = await self.connection.call(LeaveRequest(pattern, leave.joined), op=leave.op)
        except (UnreachableError, OutcomeUnknown):
            raise
        except TidingsError:
            self._unsure.pop(pattern, None)
            raise
        self._unsure.pop(pattern, None)
        return answer

    async def drop(self, pattern: str) -> None:
        """Forget a channel this agent may no longer read; the steward has closed the membership."""
        membership = self.memberships.get(pattern)
        if membership is not None:
            await self._drop(membership)

    async def _drop(self, membership: LocalMembership) -> None:
        self.memberships.pop(membership.pattern, None)
        self.read_state.pinned.discard(membership.pattern)
        membership.close_holes(self.read_state)
        await unsubscribe(membership)

    async def _end(self, membership: LocalMembership, seq: int) -> None:
        """It was closed, and not by this program."""
        await self._drop(membership)
        self.ended.add(membership.pattern)
        self._report("membership", MembershipChange(membership.pattern, "left", seq))

    # --- what other programs of this agent change ---

    async def follow(self, stands: Mapping[str, int], at: int, since: int, *, adopt: bool) -> None:
        """Take over what the steward says stands at `at`: pattern -> sequence of its join.

        What is not among it is over; what another program joined after `since` is joined here too if `adopt`.
        """
        for membership in list(self.memberships.values()):
            stood = stands.get(membership.pattern)
            if not membership.confirmed or membership.leaving or membership.record in (stood, 0):
                continue
            if membership.record > at or membership.rewound:
                continue
            if not self.read_state.marks.is_checked:  # a log that went backwards lacks it too: the next join tells
                continue
            await self._end(membership, at)
        for pattern, joined in stands.items():
            wanted = adopt and joined > max(since, self._left.get(pattern, 0)) and not self._stopped
            if wanted and (pattern not in self.memberships or self.memberships[pattern].watching):
                await self.join(pattern)
                self._report("membership", MembershipChange(pattern, "joined", joined))

    # --- what is known of them ---

    def is_forgotten(self, record: LiveRecord) -> bool:
        """May a process before this one have surfaced it without anybody remembering?"""
        if self.read_state.remembers:
            return False
        covering = self.memberships.covering(record.channel)
        return not any(record.seq > max(each.forgotten, each.joined or 0) for each in covering)

    def class_of(self, channel: str) -> str | None:
        """The class of a channel, if the steward told it at a join."""
        membership = self.memberships.get(channel)
        return membership.facts.cls if membership is not None and membership.facts is not None else None

    # --- after a lost connection, or a lost copy ---

    async def _on_session(self, connection: Connection) -> None:
        self.read_state.marks.doubt()
        if self._stopped:
            return
        for membership in list(self.memberships.values()):
            if membership.confirmed:
                membership.held = []
                membership.cause = "connection"
            membership.contiguous = False
            try:
                await self.live.subscribe(connection, membership)
            except DeniedError as error:
                # The access was narrowed while we were away: the channel is gone, and that is said.
                self.memberships.pop(membership.pattern, None)
                self.read_state.pinned.discard(membership.pattern)
                self._report("error", error)
                continue
            if membership.watching:
                self._report("notice", notices.of_watching(membership.pattern))
            else:
                self._catch_up_later(membership)

    def _catch_up_later(self, membership: LocalMembership) -> None:
        """Make it whole in the background. One that is under way sees what has become of it meanwhile."""
        if not membership.catching_up:
            self._later(self._catch_up(membership))

    async def _catch_up(self, membership: LocalMembership) -> None:
        """Confirm the membership and read what was missed; then what is live is contiguous again."""
        if membership.catching_up:
            return
        membership.catching_up = True
        try:
            while self.memberships.holds(membership) and not membership.is_whole:
                await self._catch_up_once(membership)
        except TidingsError as error:
            self._report("error", error)
            await self._drop(membership)
        finally:
            membership.catching_up = False

    async def _catch_up_once(self, membership: LocalMembership) -> None:
        epoch = self.read_state.epoch
        try:
            await self.connection.ready(30)
            if not await self._backfill(membership):
                await self._wait_for_room()
                return
            if membership.undecided and self._links is not None:
                await self._links.learn(membership.undecided)
        except (UnreachableError, OutcomeUnknown):
            # Nobody can say yet what was missed: live copies surface at once, as not contiguous.
            membership.unreadable, membership.undecided = True, 0
            self.live.release(membership)
            await asyncio.sleep(RETRY_PAUSE)
            return
        if membership.overrun:
            membership.overrun = False
            return
        if epoch == self.read_state.epoch:
            membership.contiguous = True
            membership.cause, membership.unreadable, membership.rewound = None, False, False
            membership.undecided = 0
            self.live.release(membership)

    async def _backfill(self, membership: LocalMembership) -> bool:
        """Read holes of single senders, and everything since the last contiguous copy. False: no room for all of it."""
        if not membership.contiguous:
            answer = await self._ask_join(membership)
            if answer.left is not None:
                await self._end(membership, answer.left)
                return True
            joined = membership.record = answer.seq
            membership.joined = min(joined, membership.joined or joined) if membership.rewound else joined
            membership.facts = answer
        if not await self.backfill.fill_holes(membership):
            return False
        return membership.contiguous or await self.backfill.fill(membership)

    # --- after the log went backwards ---

    def follow_epoch(self, epoch: str) -> None:
        """The steward speaks of a log of this epoch. If it is another than ours, every membership is asked for again;
        the answers say up to where the two agree."""
        if epoch and self.read_state.epoch and epoch != self.read_state.epoch and not self._stopped:
            self.read_state.marks.doubt()
            for membership in self.memberships.values():
                self._doubt(membership)

    def _doubt(self, membership: LocalMembership) -> None:
        if membership.confirmed:
            membership.contiguous = False
            membership.held = membership.held or []
            self._catch_up_later(membership)

    def _apply_epoch(self, epoch: str, agreed: int | None) -> None:
        if agreed is None:
            if epoch and not self.read_state.epoch:
                self.read_state.adopt(epoch)
            return
        self._rewinds += 1
        self.read_state.rewind(epoch, agreed)
        self.live.arrivals.rewind(agreed)
        for membership in self.memberships.values():
            membership.close_holes(self.read_state)
            if membership.joined is not None:
                membership.joined = min(membership.joined, agreed)
                membership.rewound = True
            self._doubt(membership)
        self._report(
            "error",
            LogRegressed(
                f"the log of this space went backwards and agrees with what was seen only up to {agreed}: memberships "
                "are checked and newer messages read again; what was lost with it only its senders have (epoch "
                f"{epoch[:8]})"
            ),
        )

    # --- life ---

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def stop(self) -> None:
        """Receive nothing more, now and after a reconnect. Memberships stay: whoever superseded us has them too."""
        self._stopped = True
        await self.close()
        for membership in self.memberships.values():
            await unsubscribe(membership)

    async def close(self) -> None:
        await end_tasks(self._background)
