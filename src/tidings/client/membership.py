"""One joined channel or pattern as an endpoint remembers it, and all of them together.

State and questions about it, no I/O: what the steward answered, what waits for something older, what is being read from
the log, and what is left to frames. `channels.py` joins and leaves, `live.py` receives, `backfill.py` reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tidings.client.notices import Cause, Gap
from tidings.client.read_state import ReadState
from tidings.client.records import LiveCopy
from tidings.wire.message import new_id
from tidings.wire.names import covers
from tidings.wire.roster import Backstop


@dataclass(frozen=True, slots=True)
class Joined:
    """What a join came to. `durable` is False with a `reason` while the steward or durable delivery is away."""

    channel: str
    state: str
    seq: int
    durable: bool
    reason: str
    backfilled: int = 0
    cls: str = "durable"


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
    facts: dict[str, Any] = field(default_factory=dict)

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
        return str(self.facts.get("class", "durable"))

    @property
    def backstop(self) -> Backstop:
        """What makes durable copies, as the steward told it at the join."""
        return msgspec.convert(self.facts.get("backstop") or {}, Backstop)

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


class Frames(Protocol):
    """What the mailbox of frames knows of older messages that are on their way (`frame_mailbox.py`)."""

    #: everything the deliver floor spoke of up to here has arrived
    caught_up: int
    #: frames that were skipped, and how many a session before this one did not settle: they may still come
    skipped: set[tuple[str, int, int]]
    unacked_before: int

    def are_older_awaited(self) -> bool: ...


class Memberships(dict[str, LocalMembership]):
    """Every channel and pattern of one endpoint, by its name; watched ones are among them."""

    def __init__(self) -> None:
        super().__init__()
        #: None while nobody pulls frames
        self.frames: Frames | None = None

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
