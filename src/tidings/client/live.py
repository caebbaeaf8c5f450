"""Live copies of the channels an endpoint is in: subscribed, received, held back while something older is missing.

A copy waits until the steward has answered the join, and while the log is read for what came before it. Each names the
record before it of its sender: if that never arrived, this copy shows a hole, and waits until it was read. One that
came over a link waits until it can be judged (`links.py`), and everything after it waits behind it.
What has no room waits too. Whatever is let go here is in the log. Reading the log is not done here: `catch_up` is told
that a membership needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from tidings.client.connection import AgentConnection
from tidings.client.intake import Intake
from tidings.client.membership import Hole, LocalMembership, Memberships
from tidings.client.records import LiveCopy
from tidings.errors import DeniedError
from tidings.nats.client import TOO_MANY_SUBSCRIPTIONS, Connection
from tidings.nats.core import Msg
from tidings.server.grants import MAX_SUBSCRIPTIONS
from tidings.wire.subjects import Chat, Via

SUBJECTS_KEPT = 4_096
HELD_AT_MOST = 1_000
HOLES_AT_MOST = 256
#: subscriptions of a connection that live copies leave to mail and answers
LEFT_TO_OTHERS = 16


async def unsubscribe(membership: LocalMembership) -> None:
    for subscription in membership.subscriptions:
        await subscription.unsubscribe()
    membership.subscriptions = []


class Arrivals:
    """The newest sequence that arrived on each subject; the subjects heard longest ago are forgotten first."""

    def __init__(self, kept: int = SUBJECTS_KEPT) -> None:
        self.kept = kept
        self._last: OrderedDict[str, int] = OrderedDict()
        #: a subject that is not known may have arrived up to here
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._last)

    def last(self, subject: str) -> int:
        return self._last.get(subject, 0)

    def covers(self, subject: str, seq: int) -> bool:
        """Has `seq` of this subject arrived, as far as anybody remembers? 0 is "there is none before this"."""
        known = self._last.get(subject)
        return seq <= (self.forgotten if known is None else known)

    def rewind(self, agreed: int) -> None:
        """The log went backwards: above `agreed` its sequences are other records."""
        self.forgotten = min(self.forgotten, agreed)
        for subject, seq in self._last.items():
            self._last[subject] = min(seq, agreed)

    def note(self, subject: str, seq: int) -> None:
        known = self._last
        if subject in known:
            known.move_to_end(subject)
            if known[subject] < seq:
                known[subject] = seq
            return
        known[subject] = seq
        if len(known) > self.kept:
            self.forgotten = max(self.forgotten, known.popitem(last=False)[1])


class LiveCopies:
    """The live copies of one endpoint."""

    def __init__(
        self,
        connection: AgentConnection,
        memberships: Memberships,
        intake: Intake,
        catch_up: Callable[[LocalMembership], None],
    ) -> None:
        self.connection = connection
        self.opener = intake.opener
        self.read_state = intake.read_state
        self.memberships = memberships
        self.intake = intake
        self.arrivals = Arrivals()
        self._catch_up = catch_up
        if self.opener.links is not None:
            self.opener.links.on_learned.append(self._judge_again)

    async def subscribe(self, connection: Connection, membership: LocalMembership) -> None:
        """Subscribe and know whether the broker allows it: its refusal comes before the answer to a flush."""
        s = self.connection.identity.subjects
        membership.subscriptions = []
        if len(connection.subscriptions) + 3 > MAX_SUBSCRIPTIONS - LEFT_TO_OTHERS:
            raise self._too_many(membership)
        refusals: list[str] = []
        hear = refusals.append
        connection.on_complaint.append(hear)
        try:
            for subject in (s.live_chat(membership.pattern), s.live_via(membership.pattern)):
                subscription = await connection.listen(subject, partial(self._receive, membership))
                membership.subscriptions.append(subscription)
            await connection.flush(timeout=5)
        finally:
            connection.on_complaint.remove(hear)
        if any(TOO_MANY_SUBSCRIPTIONS in each.lower() for each in refusals):
            await unsubscribe(membership)
            raise self._too_many(membership)
        if any(s.live_chat(membership.pattern).lower() in each.lower() for each in refusals):
            await unsubscribe(membership)
            raise DeniedError(f"{self.connection.identity.name} may not read {membership.pattern}")

    def _too_many(self, membership: LocalMembership) -> DeniedError:
        return DeniedError(
            f"{self.connection.identity.name} cannot hear {membership.pattern}: a connection may have "
            f"{MAX_SUBSCRIPTIONS:,} subscriptions, two for each channel or pattern; leave some, or join one pattern in "
            "place of many channels"
        )

    def _receive(self, membership: LocalMembership, message: Msg) -> None:
        copy = self.opener.live(message)
        if copy is None:
            return
        if membership.held is not None:
            self._hold(membership, copy)
        elif membership.joined is None or copy.seq > membership.joined:
            self._take(membership, copy)

    def _hold(self, membership: LocalMembership, copy: LiveCopy) -> None:
        """Keep a copy for later. Too many are let go: they are in the log, and are read from there."""
        assert membership.held is not None
        self._note_channel(copy)
        membership.held.append(copy)
        if len(membership.held) > HELD_AT_MOST:
            membership.held.clear()
            membership.overrun = True
            membership.contiguous = False

    def _note_channel(self, copy: LiveCopy) -> None:
        """So that its channel is among those that are read."""
        if copy.record is not None:
            self.read_state.channel(copy.record.channel)
        elif copy.undecided is not None and isinstance(via := self.opener.subjects.parse(copy.subject), Via):
            self.read_state.channel(via.channel)

    def release(self, membership: LocalMembership) -> None:
        """Surface what was held, if it came after the join; from now on copies surface as they come."""
        after = membership.joined or 0
        for copy in membership.take_held():
            if membership.held is not None:  # one of them found no room, or a hole: the others wait behind it
                self._hold(membership, copy)
            elif copy.seq > after:
                self._take(membership, copy)

    def _take(self, membership: LocalMembership, copy: LiveCopy) -> None:
        """Surface a copy, unless the one before it was lost: then it waits until that was read from the log."""
        if any(each.subject == copy.subject for each in membership.unjudged):  # its sender said that one first
            self._wait_unjudged(membership, copy)
            return
        if copy.undecided is not None:
            again = self.opener.live(copy.undecided)
            if again is None or again.undecided is not None:
                self._wait_for_links(membership, copy)
                return
            copy = again
        confirmed = membership.joined is not None and not membership.watching
        if confirmed:
            hole = None if self.arrivals.covers(copy.subject, copy.previous) else self._hole_before(copy)
            if hole is not None and self._must_wait(membership, copy, hole):
                return
            if hole is None or copy.subject in membership.holes:
                self.arrivals.note(copy.subject, copy.seq)
        if copy.record is None:
            return
        ahead = self.memberships.is_ahead(membership)
        if self.intake.offer(copy.record, contiguous=membership.contiguous, ahead=ahead):
            return
        # There is no room for it: it is in the log, and is read again when there is. What comes now waits for it.
        membership.contiguous = False
        if confirmed:
            membership.held = membership.held or []
            self._catch_up(membership)

    def _wait_for_links(self, membership: LocalMembership, copy: LiveCopy) -> None:
        """Hold it, and what comes after it, until it can be judged. While nobody says, it is let go: the log has it."""
        links = self.opener.links
        if links is None:
            return
        if not membership.confirmed:  # there is nothing to read for it: others pass it
            self._wait_unjudged(membership, copy)
            links.want(copy.seq)
        elif membership.unreadable:
            self._note_channel(copy)
            membership.contiguous = False
            self._catch_up(membership)
        else:
            membership.undecided = max(membership.undecided, copy.seq)
            membership.held = membership.held or []
            self._hold(membership, copy)
            self._catch_up(membership)

    def _wait_unjudged(self, membership: LocalMembership, copy: LiveCopy) -> None:
        membership.unjudged = [*membership.unjudged[-HELD_AT_MOST:], copy]

    def _judge_again(self) -> None:
        for membership in list(self.memberships.values()):
            waiting, membership.unjudged = membership.unjudged, []
            for copy in waiting:
                if membership.held is not None:
                    self._hold(membership, copy)
                elif copy.seq > (membership.joined or 0):
                    self._take(membership, copy)

    def _hole_before(self, copy: LiveCopy) -> Hole | None:
        """The hole this copy shows, if what lies in it is owed to us and nothing else explains it."""
        address = self.connection.identity.subjects.parse(copy.subject)
        if not isinstance(address, Chat | Via) or address.sender == self.connection.identity.id:
            return None
        seen = self.read_state.channel(address.channel)
        covering = self.memberships.covering(address.channel)
        known = self.arrivals.last(copy.subject)
        if not known and not seen.read:  # what was said before this session listened is not a lost copy
            covering = [each for each in covering if each.opened_here]
        joined = min((each.joined or 0 for each in covering), default=copy.previous)
        after = max(known, seen.read, seen.left_to_frames, joined)
        if copy.previous <= after or copy.previous in seen.beyond:
            return None
        link = address.link if isinstance(address, Via) else ""
        return Hole(address.channel, address.sender, after, copy.previous, position=after, link=link)

    def _must_wait(self, membership: LocalMembership, copy: LiveCopy, hole: Hole) -> bool:
        """Have a hole read. The copy that shows it waits for that, unless nobody can say how long it would take.

        Beyond a number of holes none is opened and nothing is noted as arrived, so the next copy shows it again.
        """
        known = membership.holes.get(copy.subject)
        if known is not None:
            known.through = hole.through
        elif len(membership.holes) < HOLES_AT_MOST:
            membership.open_hole(copy.subject, hole, self.read_state)
        else:
            return False
        self._catch_up(membership)
        if membership.unreadable:
            return False
        self.arrivals.note(copy.subject, hole.through)
        membership.held = membership.held or []
        self._hold(membership, copy)
        return True
