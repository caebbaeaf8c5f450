"""What is in force at a sequence: settings, access, channels and links. Everything but memberships.

The fold (`model/projection.py`) fills it and asks it. The pipeline's workers have to judge each record by the same
rules but need no membership to do so, and of the rules only who may post where: `for_workers` is the same book without
the rest, and `revised` tells when that changed. A change counts from its own sequence on. Pure and picklable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Generic, TypeVar, cast

from tidings.errors import UsageError
from tidings.wire.envelope import Admits, ClaimedOrigin
from tidings.wire.names import covers_any, is_channel
from tidings.wire.rulings import Access, Channel, ChannelClass, Defaults, Link, Space

T = TypeVar("T")
Rule = Access | Channel | Link | Space
R = TypeVar("R", bound=Rule)

#: after every sequence that a log can have
NEVER: Final = 2**63
#: in force until the first space record
BUILT_IN: Final = Space(op="built-in")


class Timeline(Generic[T]):
    """A value that changes at sequences of the log, and what it was at any of them.

    It only ever grows at its end, so a change costs O(1) and a question O(log n). A change counts from its own
    sequence on.
    """

    __slots__ = ("_seqs", "_values")

    def __init__(self) -> None:
        self._seqs: list[int] = []
        self._values: list[T] = []

    def __reduce__(self) -> tuple[Callable[..., Timeline[T]], tuple[list[int], list[T]]]:
        return _timeline, (self._seqs, self._values)

    def put(self, seq: int, value: T) -> None:
        self._seqs.append(seq)
        self._values.append(value)

    def at(self, seq: int) -> T | None:
        """The value in force at `seq`."""
        index = bisect_right(self._seqs, seq)
        return self._values[index - 1] if index else None

    def since(self, seq: int) -> int | None:
        """The sequence from which the value in force at `seq` has been in force."""
        index = bisect_right(self._seqs, seq)
        return self._seqs[index - 1] if index else None

    def entries(self, floor: int) -> Iterator[tuple[int, T | None, T]]:
        """Like `changes` for everything from `floor` on; what is in force there counts as a change at `floor`."""
        index = bisect_right(self._seqs, floor)
        if index:
            yield floor, None, self._values[index - 1]
        yield from self.changes(floor, NEVER)

    def changes(self, after: int, through: int) -> Iterator[tuple[int, T | None, T]]:
        """(sequence, value before, value from then on) of every change in (after, through]."""
        for index in range(bisect_right(self._seqs, after), bisect_right(self._seqs, through)):
            yield self._seqs[index], self._values[index - 1] if index else None, self._values[index]

    def steady(self, seq: int) -> tuple[int, int]:
        """(first, end): the value in force at `seq` is in force at first and at everything after it, before end."""
        index = bisect_right(self._seqs, seq)
        return self._seqs[index - 1] if index else 0, self._seqs[index] if index < len(self._seqs) else NEVER

    def newest(self) -> T | None:
        return self._values[-1] if self._values else None


def _timeline(seqs: list[int], values: list[T]) -> Timeline[T]:
    made: Timeline[T] = Timeline()
    made._seqs, made._values = seqs, values
    return made


class Rulebook:
    """Answers for any sequence from the floor on."""

    def __init__(self, stream: str, floor: int = 0) -> None:
        self.stream = stream
        self.floor = floor
        self.spaces: Timeline[Space] = Timeline()
        self.access: dict[str, Timeline[Access]] = {}
        self.channels: dict[str, Timeline[Channel]] = {}
        self.links: dict[str, Timeline[Link]] = {}
        #: the newest sequence from which on a post may be judged otherwise than before
        self.revised = 0
        #: the newest sequence from which on other channels may be used than before
        self._listing_revised = 0

    def put_access(self, owner: str, seq: int, ruling: Access) -> None:
        self._put(self.access.setdefault(owner, Timeline()), seq, ruling)

    def put_channel(self, seq: int, ruling: Channel) -> None:
        before = self.channels[ruling.name].newest() if ruling.name in self.channels else None
        if self._lists(self.spaces.newest()) and (before is not None and before.listed) != ruling.listed:
            self._listing_revised = seq
        self._put(self.channels.setdefault(ruling.name, Timeline()), seq, ruling)

    def put_link(self, seq: int, ruling: Link) -> None:
        self._put(self.links.setdefault(ruling.link, Timeline()), seq, ruling)

    def put_space(self, seq: int, ruling: Space) -> None:
        if self._lists(self.spaces.newest()) != self._lists(ruling):
            self._listing_revised = seq
        self._put(self.spaces, seq, ruling)

    def _put(self, history: Timeline[R], seq: int, ruling: R) -> None:
        before = history.newest()
        history.put(seq, ruling)
        if before is None or _judged_by(before) != _judged_by(ruling):
            self.revised = seq

    def for_workers(self, floor: int) -> Rulebook:
        """A book that judges posts from `floor` on as this one does, and knows nothing else: no token, no name.

        Most histories are alike then, and the same object; that is what makes it small.
        """
        made = Rulebook(self.stream, max(floor, self.floor))
        made.revised = self.revised
        made.spaces = _condensed({"": self.spaces}, made.floor)[""]
        made.access = _condensed(self.access, made.floor)
        made.channels = _condensed(self.channels, made.floor)
        made.links = _condensed(self.links, made.floor)
        return made

    def space_at(self, seq: int) -> Space:
        return self.spaces.at(self.checked(seq)) or BUILT_IN

    def access_at(self, owner: str, seq: int) -> Access | None:
        return self._at(self.access.get(owner), seq)

    def channel_at(self, name: str, seq: int) -> Channel | None:
        return self._at(self.channels.get(name), seq)

    def link_at(self, link: str, seq: int) -> Link | None:
        return self._at(self.links.get(link), seq)

    def class_at(self, channel: str, seq: int) -> ChannelClass:
        """The channel's own class, else the space's default, else durable."""
        record = self.channel_at(channel, seq)
        own = record.cls if record else None
        return own or self.space_at(seq).defaults.cls or "durable"

    def post_allowed(self, sender: str, channel: str, seq: int) -> bool:
        """Did the access in force at `seq` let `sender` post there, and was the channel listed if it had to be?"""
        return self.post_refusal(sender, channel, seq) is None

    def post_refusal(self, sender: str, channel: str, seq: int) -> str | None:
        """Why a post at `seq` does not count, for whoever posted it; None if it does."""
        access = self.access_at(sender, seq)
        if access is None:
            return "its sender had no access"
        if access.revoked:
            return "its sender was revoked"
        if not is_channel(channel) or not covers_any(access.post, channel):
            return f"its sender might not post in #{channel}"
        if not self.is_listed(channel, seq):
            return f"only listed channels are posted to in this space, and #{channel} was none"
        return None

    def steady(self, sender: str, channel: str, seq: int) -> tuple[int, int]:
        """(first, end) around `seq`: from first on and before end `post_allowed` and `class_at` answer the same."""
        first, end = self.floor, NEVER
        for history in (self.spaces, self.access.get(sender), self.channels.get(channel)):
            if history is not None:
                since, until = history.steady(seq)
                first, end = max(first, since), min(end, until)
        return first, end

    def admission_allowed(
        self, link: str, origin: str, theirs: str, channel: str, seq: int, *, hops: int = 1, time_ns: int = 0
    ) -> bool:
        """Did the link record in force at `seq` let `theirs` of the space `origin` come in as `channel`?"""
        record = self.link_at(link, seq)
        if record is None or record.admits(origin, theirs, hops=hops, time_ns=time_ns) != channel:
            return False
        return self.is_listed(channel, seq)

    def mail_allowed(self, kind: str, link: str, origin: str, agreed: int, sender: str, time_ns: int) -> bool:
        """Did the link record at `agreed` let direct messages (`dm`) or tasks of the space `origin` come in? Those of
        our own agents do not come over a link. What was agreed below the floor is not known any more: it counts by whom
        the link is with, or what was let in would be refused to whoever reads it late."""
        history = self.links.get(link)
        if sender in self.access or history is None or agreed > (history.since(NEVER) or 0):
            return False
        record = history.at(max(agreed, self.floor))
        if record is None or agreed < self.floor:
            return record is not None and record.origin == origin
        return record.admits_to_agents(kind, origin, time_ns=time_ns)

    def admits_at(self, seq: int, time_ns: int) -> Admits:
        """The same of the record at `seq`, for whoever opens it (`wire/envelope`); below the floor as it was there."""

        def admits(asked: ClaimedOrigin) -> bool:
            link, origin, theirs, channel, hops, agreed, sender, kind = asked
            if agreed:
                return self.mail_allowed(kind, link, origin, agreed, sender, time_ns)
            at = max(seq, self.floor)
            return self.admission_allowed(link, origin, theirs, channel, at, hops=hops, time_ns=time_ns)

        return admits

    @property
    def links_revised(self) -> int:
        """The newest sequence from which on links let in other things than before; 0 if there is no link."""
        newest = max((history.since(NEVER) or 0 for history in self.links.values()), default=0)
        return max(newest, self._listing_revised) if self.links else 0

    def listing_at(self, seq: int) -> int:
        """0 if every channel may be used; else a number that changes whenever other channels are listed."""
        return self._listing_revised if self._lists(self.space_at(seq)) else 0

    def listings(self) -> Iterator[tuple[int, str | None]]:
        """Where, from the floor on, other channels may be used than before: the sequence, and which channel; None is
        that only listed ones may from there on, or all."""
        for seq, space_before, space in self.spaces.entries(self.floor):
            if self._lists(space_before) != self._lists(space):
                yield seq, None
        for name, history in self.channels.items():
            for seq, before, now in history.entries(self.floor):
                if self._lists(self.space_at(seq)) and (before is not None and before.listed) != now.listed:
                    yield seq, name

    def listed_at(self, seq: int) -> list[str] | None:
        """The channels that may be used; None if all may."""
        if not self._lists(self.space_at(seq)):
            return None
        found = ((name, history.at(seq)) for name, history in self.channels.items())
        return sorted(name for name, record in found if record is not None and record.listed)

    @staticmethod
    def _lists(space: Space | None) -> bool:
        return space is not None and space.channels == "listed"

    def allowed_at(self, owner: str, channel: str, seq: int) -> bool:
        """May `owner` read `channel` under the access in force at `seq`?"""
        access = self.access_at(owner, seq)
        return access is not None and not access.revoked and is_channel(channel) and covers_any(access.read, channel)

    def narrowings(self, after: int, through: int) -> dict[str, int]:
        """Owners who lost a right to read in (after, through], with the newest access record that took one."""
        found: dict[str, int] = {}
        for owner, history in self.access.items():
            for seq, before, now in history.changes(after, through):
                if before is not None and not before.revoked and _takes(before, now):
                    found[owner] = seq
        return found

    def is_listed(self, channel: str, seq: int) -> bool:
        """May it be used, by whoever may?"""
        if not self._lists(self.space_at(seq)):
            return True
        record = self.channel_at(channel, seq)
        return record is not None and record.listed

    def _at(self, history: Timeline[T] | None, seq: int) -> T | None:
        self.checked(seq)
        return history.at(seq) if history else None

    def checked(self, seq: int) -> int:
        if seq < self.floor:
            raise UsageError(f"{self.stream} can answer from its floor {self.floor} on, not for {seq}")
        return seq


def _takes(before: Access, now: Access) -> bool:
    return now.revoked or not all(covers_any(now.read, pattern) for pattern in before.read)


def _judged_by(ruling: Rule) -> tuple[object, ...]:
    """What of a ruling decides about posts."""
    match ruling:
        case Access():
            return ruling.post, ruling.revoked
        case Channel():
            return ruling.cls, ruling.listed
        case Link():
            beyond = tuple(sorted((space, tuple(sorted(names.items()))) for space, names in ruling.beyond.items()))
            names = tuple(sorted(ruling.channels.items()))
            return ruling.state, ruling.origin, names, beyond, ruling.hops, ruling.until
        case Space():
            return ruling.defaults.cls, ruling.channels


def _blanked(ruling: R) -> R:
    """The ruling with nothing else in it."""
    made: Rule
    match ruling:
        case Access():
            made = Access(op="-", name="-", post=ruling.post, revoked=ruling.revoked)
        case Channel():
            made = Channel(op="-", name="-", cls=ruling.cls, listed=ruling.listed)
        case Link():
            made = Link(
                op="-",
                link="-",
                state=ruling.state,
                origin=ruling.origin,
                channels=ruling.channels,
                beyond=ruling.beyond,
                hops=ruling.hops,
                until=ruling.until,
            )
        case Space():
            made = Space(op="-", defaults=Defaults(cls=ruling.defaults.cls), channels=ruling.channels)
    return cast("R", made)


def _condensed(histories: Mapping[str, Timeline[R]], floor: int) -> dict[str, Timeline[R]]:
    """What posts are judged by from `floor` on, without changes that change nothing.

    Equal rulings and equal histories become one object each, which is pickled once.
    """
    made: dict[str, Timeline[R]] = {}
    blanks: dict[tuple[object, ...], R] = {}
    alike: dict[tuple[tuple[int, tuple[object, ...]], ...], Timeline[R]] = {}
    for key, history in histories.items():
        changes = [
            (seq, ruling)
            for seq, before, ruling in history.entries(floor)
            if before is None or _judged_by(before) != _judged_by(ruling)
        ]
        content = tuple([(seq, _judged_by(ruling)) for seq, ruling in changes])
        if (condensed := alike.get(content)) is None:
            condensed = alike[content] = Timeline()
            for (seq, judged_by), (_, ruling) in zip(content, changes, strict=True):
                condensed.put(seq, blanks.setdefault(judged_by, _blanked(ruling)))
        made[key] = condensed
    return made
