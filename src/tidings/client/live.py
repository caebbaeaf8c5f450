"""Live copies of the channels an endpoint is in: subscribed, received, held back while something older is missing.

A copy waits until the steward has answered the join, and while the log is read for what came before it. Each names the
record before it of its sender: if that never arrived, this copy shows a hole, and waits until it was read. One that
came over a link waits until it can be judged (`links.py`), and everything after it waits behind it.
What has no room waits too. Whatever is let go here is in the log. Reading the log is not done here: `catch_up` is told
that a membership needs it.

`LocalMembership` is one joined channel or pattern as an endpoint remembers it, without I/O: what the steward answered,
what waits for something older, what is being read from the log, and what is left to frames. `channels.py` joins and
leaves, `backfill.py` reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tidings.client.connection import AgentConnection
from tidings.client.intake import Intake, LiveCopy
from tidings.client.notices import Cause, Gap
from tidings.client.read_state import ReadState
from tidings.client.transport import Joined
from tidings.contract.channels import JoinAnswer
from tidings.errors import DeniedError
from tidings.nats.client import TOO_MANY_SUBSCRIPTIONS, Connection
from tidings.nats.core import Msg
from tidings.server.grants import MAX_SUBSCRIPTIONS
from tidings.wire.message import new_id
from tidings.wire.names import covers
from tidings.wire.roster import Backstop
from tidings.wire.subjects import Chat, Via

if TYPE_CHECKING:
    from tidings.client.frame_mailbox import FrameMailbox

SUBJECTS_KEPT = 4_096
HELD_AT_MOST = 1_000
HOLES_AT_MOST = 256
#: subscriptions of a connection that live copies leave to mail and answers
LEFT_TO_OTHERS = 16


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A membership of this agent that something else than this program opened or closed, heard as `membership`."""

    channel: str
    #: `joined`, or `left`: by another program of this agent, or because its access was narrowed
    state: str
    seq: int


@dataclass(frozen=True, slots=True)
class Leave:
    """One leave, of the membership that began at `joined`. Asked again it is the same operation."""

    joined: int
    op: str = field(default_factory=new_id)


@dataclass(slots=True)
class Hole:
    """A part of one subject that did not arrive: above `after`, up to `through`."""

    channel: str
    sender: str
    after: int
    through: int
    #: how far it was read
    position: int
    recovered: int = 0
    #: the link that it came over; empty if it was said here
    link: str = ""

    def as_gap(self, *, gone: bool) -> Gap:
        return Gap(self.channel, self.sender, self.after, self.through, self.recovered, "live", gone)


@dataclass(eq=False)
class LocalMembership:
    """One joined channel or pattern."""

    pattern: str
    op: str = field(default_factory=new_id)
    #: sequence of the join; None until the steward answered
    joined: int | None = None
    #: sequence of the record that opened it, which a leave names; `joined` may be older if the log went backwards
    record: int = 0
    #: a leave of it is under way
    leaving: bool = False
    #: it began with this session, so that nothing above `joined` is older than what we could have heard
    opened_here: bool = False
    #: live copies that came before the answer, or wait for something older
    held: list[LiveCopy] | None = field(default_factory=list)
    #: sequence of the newest copy that waits until the links of the space are known; 0 if none does
    undecided: int = 0
    #: the same copies while nothing else waits for them: of what is only watched, or not confirmed yet
    unjudged: list[LiveCopy] = field(default_factory=list)
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
    #: the steward's answer to the last join
    facts: JoinAnswer | None = None

    @property
    def confirmed(self) -> bool:
        """The steward answered, and what is missed here is owed."""
        return self.joined is not None and not self.watching

    @property
    def is_whole(self) -> bool:
        """Nothing is missing, and nothing waits."""
        return self.contiguous and not self.holes and self.held is None

    @property
    def cls(self) -> str:
        return self.facts.cls if self.facts else "durable"

    @property
    def backstop(self) -> Backstop:
        """What makes durable copies, as the steward told it at the join."""
        return self.facts.backstop if self.facts else Backstop()

    def take_held(self) -> list[LiveCopy]:
        held, self.held = self.held or [], None
        return held

    def open_hole(self, subject: str, hole: Hole, read_state: ReadState) -> None:
        """A hole is to be read, and until then nothing above it counts as settled."""
        self.holes[subject] = hole
        read_state.channel(hole.channel).missing[subject] = hole.after

    def close_hole(self, subject: str, read_state: ReadState) -> None:
        hole = self.holes.pop(subject)
        read_state.channel(hole.channel).missing.pop(subject, None)

    def close_holes(self, read_state: ReadState) -> None:
        for subject in list(self.holes):
            self.close_hole(subject, read_state)

    def as_joined(self, state: str, reason: str = "", backfilled: int = 0) -> Joined:
        """What whoever joined is told."""
        backstop = self.backstop
        if not reason and self.cls == "durable":
            reason = backstop.delay
        return Joined(
            self.pattern,
            state,
            self.joined or 0,
            durable=self.cls == "durable" and backstop.running and state != "live",
            reason=reason,
            backfilled=backfilled,
            cls=self.cls,
        )


class Memberships(dict[str, LocalMembership]):
    """Every channel and pattern of one endpoint, by its name; watched ones are among them."""

    def __init__(self) -> None:
        super().__init__()
        #: None while nobody pulls frames
        self.frames: FrameMailbox | None = None

    def holds(self, membership: LocalMembership) -> bool:
        """Is it still one of them? It may have been left, and joined anew."""
        return self.get(membership.pattern) is membership

    def covering(self, channel: str) -> list[LocalMembership]:
        """Those by which messages of this channel are owed."""
        return [each for each in self.values() if each.confirmed and covers(each.pattern, channel)]

    def is_ahead(self, membership: LocalMembership) -> bool:
        """May older messages of this membership still be on their way?"""
        if membership.watching:
            return False
        if membership.joined is None or membership.unreadable:  # nobody could say yet what is missing
            return True
        frames = self.frames
        if frames is None:
            return False
        if (frames.skipped or frames.unacked_before) and membership.cls == "durable" and frames.are_older_awaited():
            return True
        return frames.caught_up < membership.left_to_frames


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
