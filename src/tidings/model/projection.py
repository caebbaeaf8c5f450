"""The fold: who is owed what, computed from the ruling records of the log and from nothing else.

`Table.apply` takes records in sequence order; the questions answer for any sequence from the floor up to the
newest record applied (below the floor superseded versions may be gone). A record that does not count is **void**:
it is counted by reason and leaves the older valid version in force. Access never closes an interval by itself: a
join is judged by the access in force at its own sequence, the steward writes the `out` records of a narrowing, and
delivery asks for the access in force at its head. Pure: no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tidings.contract.admin import TableView
from tidings.errors import LogRegressed, MalformedRecord
from tidings.model.membership import Interval, MembershipIntervals
from tidings.model.rulebook import Rulebook, Timeline
from tidings.model.view import view_of
from tidings.wire import rulings, subjects
from tidings.wire.names import covers, covers_any, is_channel
from tidings.wire.rulings import Access, Channel, ChannelClass, Lease, Link, Member, Space
from tidings.wire.signing import SIGNATURE_HEADER

#: void records kept for people to look at; the counters have no such limit
VOID_KEPT = 1000

#: (signature, space id, steward key, subject after `td.S.`, payload) -> verified?
Verify = Callable[[str | None, str, str, str, bytes], bool]


class Verdict(StrEnum):
    """What became of a record."""

    MESSAGE = "message"
    EFFECTIVE = "effective"
    REPEAT = "repeat"  # a join of somebody who is in: the earlier opening stands
    BAD_SUBJECT = "bad subject"
    BAD_SIGNATURE = "bad signature"
    MALFORMED = "malformed"
    MISMATCH = "payload names another thing than the subject"
    NAME_TAKEN = "name taken"
    NOT_PROVISIONED = "join without an access record"
    REVOKED = "join of a revoked owner"
    NOT_COVERED = "join not covered by access"
    NOT_IN = "leave without a join"

    @property
    def is_void(self) -> bool:
        return self not in _COUNTING


_COUNTING: Final = frozenset({Verdict.MESSAGE, Verdict.EFFECTIVE, Verdict.REPEAT})


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record of the log. Of its headers only our own are kept (`Td-Sig`)."""

    seq: int
    time_ns: int
    subject: str
    headers: Mapping[str, str]
    payload: bytes


@dataclass(frozen=True, slots=True)
class VoidRecord:
    seq: int
    subject: str
    reason: Verdict


class Table:
    """Memberships, access, channels, links and settings of one space, as of any sequence."""

    def __init__(
        self,
        subjects: subjects.Subjects,
        space_id: str,
        anchor_key: str,
        *,
        floor: int = 0,
        verify: Verify = rulings.verify_ruling,
    ) -> None:
        """`anchor_key` is the *first* steward key of the space; rotations are followed from it."""
        self.subjects = subjects
        self.space_id = space_id
        #: what is in force besides memberships
        self.rules = Rulebook(subjects.log_stream, floor)
        self.head = 0
        self.void: Counter[Verdict] = Counter()
        self.void_records: deque[VoidRecord] = deque(maxlen=VOID_KEPT)
        self.repeats = 0
        #: sequences of the records that changed something, by subject
        self.effective: dict[str, list[int]] = {}
        #: the oldest record of each ruling subject, void ones included
        self.oldest: dict[str, int] = {}
        #: (sequence, channels it may concern): after each of them an audience may be another
        self.cuts: list[tuple[int, str]] = []
        #: sequences of the space records that named a new steward key
        self.rotations: list[int] = []
        #: owner -> sequence of the newest record that changed a membership of it
        self.moved: dict[str, int] = {}
        #: owner -> oldest access version whose name voided somebody else's record
        self.name_pins: dict[str, int] = {}
        self._verify = verify
        self._keys: Timeline[str] = Timeline()
        self._keys.put(0, anchor_key)
        self._holders: dict[str, str] = {}
        self._lease: tuple[int, Lease] | None = None
        self._bound: dict[str, str] = {}
        self._memberships: dict[str, dict[str, MembershipIntervals]] = {}
        self._by_pattern: dict[str, list[MembershipIntervals]] = {}
        self._wildcards: list[str] = []

    # --- applying records ---

    def apply(self, record: LogRecord) -> Verdict:
        """Take the next record of the log. Sequences must increase; holes are the caller's to notice."""
        if record.seq <= self.head:
            raise LogRegressed(f"record {record.seq} of {self.subjects.log_stream} after {self.head}: fold it again")
        verdict = self._judge(record)
        self.head = record.seq
        if verdict is not Verdict.MESSAGE:
            self.oldest.setdefault(record.subject, record.seq)
        if verdict is Verdict.EFFECTIVE:
            self.effective.setdefault(record.subject, []).append(record.seq)
        elif verdict is Verdict.REPEAT:
            self.repeats += 1
        elif verdict.is_void:
            self.void[verdict] += 1
            self.void_records.append(VoidRecord(record.seq, record.subject, verdict))
        return verdict

    def apply_all(self, records: Iterable[LogRecord]) -> Table:
        for record in records:
            self.apply(record)
        return self

    def _judge(self, record: LogRecord) -> Verdict:
        parsed = self.subjects.parse(record.subject)
        if isinstance(parsed, subjects.Chat | subjects.Via):
            return Verdict.MESSAGE
        if not isinstance(parsed, subjects.Ruling):
            return Verdict.BAD_SUBJECT
        tail = self.subjects.tail(record.subject)
        signature = record.headers.get(SIGNATURE_HEADER)
        if not self._verify(signature, self.space_id, self.steward_key, tail, record.payload):
            return Verdict.BAD_SIGNATURE
        try:
            ruling = rulings.decode(tail.partition(".")[0], record.payload)
        except MalformedRecord:
            return Verdict.MALFORMED
        return self._rule(record, parsed, ruling)

    def _rule(self, record: LogRecord, subject: subjects.Ruling, ruling: rulings.RulingRecord) -> Verdict:
        match subject, ruling:
            case subjects.MemberSubject(), Member():
                return self._rule_member(record, subject, ruling)
            case subjects.AccessSubject(), Access():
                return self._rule_access(record.seq, subject.owner, ruling)
            case subjects.ChannelSubject(), Channel():
                return self._rule_channel(record, ruling)
            case subjects.LinkSubject(), Link():
                return self._rule_link(record.seq, subject.link, ruling)
            case subjects.StewardLeaseSubject(), Lease():
                self._lease = (record.seq, ruling)
                return Verdict.EFFECTIVE
            case subjects.SpaceSubject(), Space():
                return self._rule_space(record.seq, ruling)
        return Verdict.MALFORMED

    def _rule_member(self, record: LogRecord, subject: subjects.MemberSubject, ruling: Member) -> Verdict:
        if not self._binds(record.subject, ruling.pattern):
            return Verdict.MISMATCH
        held = self._memberships.get(subject.owner, {}).get(subject.tag)
        if ruling.state == "out":
            if held is None or not held.is_open or ruling.ends not in (None, held.joined[-1]):
                return Verdict.NOT_IN
            held.left.append(record.seq)
            self.cuts.append((record.seq, ruling.pattern))
            self.moved[subject.owner] = record.seq
            return Verdict.EFFECTIVE
        refusal = self._refuse_join(subject.owner, ruling.pattern)
        if refusal is not None:
            return refusal
        if held is not None and held.is_open:
            return Verdict.REPEAT
        (held or self._new_membership(subject, ruling.pattern)).joined.append(record.seq)
        self.moved[subject.owner] = record.seq
        self.cuts.append((record.seq, ruling.pattern))
        return Verdict.EFFECTIVE

    def _refuse_join(self, owner: str, pattern: str) -> Verdict | None:
        history = self.rules.access.get(owner)
        access = history.newest() if history else None
        if access is None:
            return Verdict.NOT_PROVISIONED
        if access.revoked:
            return Verdict.REVOKED
        return None if covers_any(access.read, pattern) else Verdict.NOT_COVERED

    def _new_membership(self, subject: subjects.MemberSubject, pattern: str) -> MembershipIntervals:
        membership = MembershipIntervals(subject.owner, pattern)
        self._memberships.setdefault(subject.owner, {})[subject.tag] = membership
        if pattern not in self._by_pattern and not is_channel(pattern):
            self._wildcards.append(pattern)
        self._by_pattern.setdefault(pattern, []).append(membership)
        return membership

    def _rule_access(self, seq: int, owner: str, ruling: Access) -> Verdict:
        holder = self._holders.get(ruling.name, owner)
        if not ruling.revoked and holder not in (owner, ruling.succeeds):
            self._pin_name(holder, seq)
            return Verdict.NAME_TAKEN
        history = self.rules.access.get(owner)
        before = history.newest() if history else None
        if before is not None and self._holders.get(before.name) == owner:
            del self._holders[before.name]
        if not ruling.revoked:
            self._holders[ruling.name] = owner
        self.rules.put_access(owner, seq, ruling)
        return Verdict.EFFECTIVE

    def _pin_name(self, holder: str, seq: int) -> None:
        version = self.rules.access[holder].since(seq)
        assert version is not None
        self.name_pins[holder] = min(version, self.name_pins.get(holder, version))

    def _rule_channel(self, record: LogRecord, ruling: Channel) -> Verdict:
        if not self._binds(record.subject, ruling.name):
            return Verdict.MISMATCH
        self.rules.put_channel(record.seq, ruling)
        self.cuts.append((record.seq, ruling.name))
        return Verdict.EFFECTIVE

    def _rule_link(self, seq: int, link: str, ruling: Link) -> Verdict:
        if ruling.link != link:
            return Verdict.MISMATCH
        self.rules.put_link(seq, ruling)
        return Verdict.EFFECTIVE

    def _rule_space(self, seq: int, ruling: Space) -> Verdict:
        self.rules.put_space(seq, ruling)
        self.cuts.append((seq, ">"))
        if ruling.steward_key is not None and ruling.steward_key != self.steward_key:
            # This record was verified with the old key; the next one is the first under the new key.
            self._keys.put(seq + 1, ruling.steward_key)
            self.rotations.append(seq)
        return Verdict.EFFECTIVE

    def _binds(self, subject: str, text: str) -> bool:
        """A tag stands for one text for ever. Only the steward can compute it, so the first authentic record binds."""
        return self._bound.setdefault(subject, text) == text

    # --- questions ---

    @property
    def floor(self) -> int:
        """From here on the questions can be answered."""
        return self.rules.floor

    @floor.setter
    def floor(self, seq: int) -> None:
        self.rules.floor = seq

    @property
    def steward_key(self) -> str:
        """The key that must have signed the next record."""
        key = self._keys.newest()
        assert key is not None
        return key

    @property
    def lease(self) -> tuple[int, Lease] | None:
        """Sequence and content of the newest lease. Only the newest one ever matters."""
        return self._lease

    def steward_key_at(self, seq: int) -> str:
        """The key that verifies the record at `seq`."""
        key = self._keys.at(self.rules.checked(seq))
        assert key is not None
        return key

    def intervals(self, owner: str) -> list[Interval]:
        """Every interval of `owner` the log still tells of, oldest first."""
        held = self._memberships.get(owner, {}).values()
        return sorted((i for m in held for i in m.intervals()), key=lambda interval: interval.joined)

    def cuts_within(self, after: int, through: int) -> tuple[tuple[int, str], ...]:
        """Where in (after, through] an audience may change, and of which channels: a run never spans one."""
        start = bisect_right(self.cuts, (after + 1, ""))
        return tuple(self.cuts[start : bisect_right(self.cuts, (through + 1, ""))])

    def members_at(self, channel: str, seq: int) -> frozenset[str]:
        """Owners with an interval that covers `channel` and has joined < seq < left."""
        self.rules.checked(seq)
        return frozenset(m.owner for m in self._covering(channel) if m.holds(seq))

    def members_within(self, channel: str, first: int, last: int) -> frozenset[str]:
        """Owners with an interval that covers `channel` and holds one of these sequences."""
        return frozenset(
            each.owner
            for membership in self._covering(channel)
            for each in membership.intervals()
            if each.joined < last and (each.left is None or each.left > first)
        )

    def _covering(self, channel: str) -> Iterator[MembershipIntervals]:
        if not is_channel(channel):
            return
        yield from self._by_pattern.get(channel, ())
        for pattern in self._wildcards:
            if covers(pattern, channel):
                yield from self._by_pattern[pattern]

    def memberships_at(self, owner: str, seq: int) -> list[Interval]:
        """The intervals of `owner` that hold at `seq`, oldest first."""
        self.rules.checked(seq)
        return [interval for interval in self.intervals(owner) if interval.holds(seq)]

    def owners(self) -> frozenset[str]:
        """Everybody who ever had an access record the log still tells of."""
        return frozenset(self.rules.access)

    def access_at(self, owner: str, seq: int) -> Access | None:
        return self.rules.access_at(owner, seq)

    def space_at(self, seq: int) -> Space:
        return self.rules.space_at(seq)

    def channel_at(self, name: str, seq: int) -> Channel | None:
        return self.rules.channel_at(name, seq)

    def channel_names(self, seq: int) -> frozenset[str]:
        """Channels that have a record at `seq`, or that somebody is in by their name."""
        listed = {
            name for name, history in self.rules.channels.items() if history.at(self.rules.checked(seq)) is not None
        }
        held = {
            p for p, members in self._by_pattern.items() if is_channel(p) and any(m.holds(seq + 1) for m in members)
        }
        return frozenset(listed | held)

    def link_at(self, link: str, seq: int) -> Link | None:
        return self.rules.link_at(link, seq)

    def class_at(self, channel: str, seq: int) -> ChannelClass:
        return self.rules.class_at(channel, seq)

    def post_allowed(self, sender: str, channel: str, seq: int) -> bool:
        return self.rules.post_allowed(sender, channel, seq)

    def post_refusal(self, sender: str, channel: str, seq: int) -> str | None:
        return self.rules.post_refusal(sender, channel, seq)

    def audience_at(self, channel: str, seq: int) -> frozenset[str]:
        """The members, if the channel is durable at `seq`: whom a valid record there is owed to."""
        return self.members_at(channel, seq) if self.class_at(channel, seq) == "durable" else frozenset()

    def owed(self, seq: int, sender: str, channel: str) -> frozenset[str]:
        """Owners of the chat record at `seq`, by the rule of the design; nothing later changes the answer."""
        if not self.post_allowed(sender, channel, seq):
            return frozenset()
        return self.audience_at(channel, seq) - {sender}

    def allowed_at(self, owner: str, channel: str, seq: int) -> bool:
        return self.rules.allowed_at(owner, channel, seq)

    def allowed_now(self, owner: str, channel: str) -> bool:
        return self.allowed_at(owner, channel, max(self.head, self.floor))

    def deliverable(self, seq: int, sender: str, channel: str, head: int | None = None) -> frozenset[str]:
        """`owed`, less those whom the access in force at `head` (default: now) does not let read the channel."""
        at = max(self.head, self.floor) if head is None else head
        return frozenset(o for o in self.owed(seq, sender, channel) if self.allowed_at(o, channel, at))

    def owner_named(self, name: str) -> str | None:
        """The agent that goes by `name` now. A revoked agent goes by no name."""
        return self._holders.get(name)

    def uncovered(self, owner: str) -> list[Interval]:
        """Open intervals that the access in force no longer covers: what a narrowing has to close."""
        history = self.rules.access.get(owner)
        access = history.newest() if history else None
        read = () if access is None or access.revoked else access.read
        return [i for i in self.intervals(owner) if i.left is None and not covers_any(read, i.pattern)]

    def as_of(self, seq: int) -> TableView:
        """The state after the record at `seq`, printable and without credentials."""
        self.rules.checked(seq)
        return view_of(
            seq=seq,
            steward_key=self.steward_key_at(seq + 1),
            space=self.space_at(seq),
            lease=self._lease[1] if self._lease and self._lease[0] <= seq else None,
            intervals=[i for owner in sorted(self._memberships) for i in self.intervals(owner)],
            access={owner: history.at(seq) for owner, history in self.rules.access.items()},
            channels={name: history.at(seq) for name, history in self.rules.channels.items()},
            links={link: history.at(seq) for link, history in self.rules.links.items()},
        )
