"""Comparing what two spaces hold, by digests: which records the other one has and we lack, and the other way round.

`Comparison` asks the other space (`PeerSide`) one question for all channels. If that shows a difference it asks for the
buckets of each day that differs, and for the ids of each bucket that differs; of what agrees nothing is asked. What it
yields is a claim of the peer's: whoever fetches such a record verifies it. Nothing is fetched, stored or repaired here.

A peer may say anything. It is held to what it said before: buckets add up to their day, ids to their buckets, and no
more records can be there than sequences. What cannot be true is refused (`MalformedDigest`), and the number of rows in
memory does not depend on what it says: large buckets are read several times, a share of them each time.

Everything is about records of the peer's log from its floor up to `through`. The floor may rise between two questions;
both sides are then compared from the new one on, so what was removed meanwhile is never taken for a difference.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from tidings.errors import MalformedDigest
from tidings.wire.digests import (
    BUCKETS,
    EMPTY,
    HASH_BYTES,
    BucketsAnswer,
    Digest,
    DigestAnswer,
    IdsAnswer,
    RecordIdentity,
    bucket_of,
    is_day,
)
from tidings.wire.message import is_message_id
from tidings.wire.names import is_agent_id, is_channel

#: ids in an answer that says there are more: fewer would only make questions
FEWEST_IDS: Final = 100
MOST_IDS: Final = 10_000


class PeerSide(Protocol):
    """The space at the other end. An answer that is not about `through` is refused."""

    async def digest(self, through: int) -> DigestAnswer: ...

    async def buckets(self, channel: str, day: str, through: int) -> BucketsAnswer: ...

    async def ids(self, channel: str, day: str, buckets: Sequence[int], through: int, after: int) -> IdsAnswer:
        """By sequence, above `after`; at least `FEWEST_IDS` if there are more, at most `MOST_IDS`."""
        ...


class LocalSide(Protocol):
    """What we know of the peer's log, record by record, whatever became of each: admitted, omitted or put aside.

    It is asked the same, and cuts at the floor that the peer named. It is believed.
    """

    async def digest(self, through: int, *, floor: int) -> DigestAnswer: ...

    async def buckets(self, channel: str, day: str, through: int, *, floor: int) -> BucketsAnswer: ...

    async def ids(
        self, channel: str, day: str, buckets: Sequence[int], through: int, after: int, *, floor: int
    ) -> IdsAnswer: ...


@dataclass(frozen=True)
class ComparisonLimits:
    """What is taken of a peer."""

    #: pairs of a channel and a day
    days: int = 100_000
    #: rows of both sides in memory at a time, about 600 bytes each
    held: int = 50_000
    #: rows read of the peer in one comparison
    read: int = 10_000_000
    fewest_ids: int = FEWEST_IDS
    most_ids: int = MOST_IDS


@dataclass(frozen=True)
class DayDifference:
    channel: str
    day: str
    theirs: Digest
    ours: Digest


@dataclass(frozen=True)
class Divergence:
    """What the first question shows."""

    floor: int
    through: int
    days: tuple[DayDifference, ...]

    @property
    def fingerprint(self) -> str:
        """Names the difference; empty if there is none. What both sides get alike does not change it."""
        apart = ((each.channel, each.day, *(each.theirs - each.ours).encode()) for each in self.days)
        lines = sorted("\n".join(map(str, each)) + "\n" for each in apart)
        return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


@dataclass(frozen=True)
class Difference:
    """Records of a channel and a day; of one that is there twice on one side, the second."""

    channel: str
    day: str
    #: the peer has them and we do not; sequences are the peer's
    lacking: tuple[RecordIdentity, ...]
    #: we have them and the peer does not
    extra: tuple[RecordIdentity, ...]


@dataclass
class Comparison:
    """Of one link, time after time. `reported` is the last difference that was yielded whole: keep it, and a
    difference that stays is not yielded again until it changes."""

    ours: LocalSide
    peer: PeerSide
    reported: str = ""
    limits: ComparisonLimits = field(default_factory=ComparisonLimits)
    #: the last comparison found the difference that was reported before, and nothing else
    standing: bool = False

    async def differences(self, through: int) -> AsyncIterator[Difference]:
        """What differs now, unless all of it was reported. Equal sides forget what was reported."""
        found = await self.divergence(through)
        self.standing = bool(found.days) and found.fingerprint == self.reported
        if found.fingerprint == self.reported:
            return
        async for each in self.between(found):
            yield each
        self.reported = found.fingerprint

    async def divergence(self, through: int) -> Divergence:
        """One question, whatever the number of records."""
        theirs = await self.peer.digest(through)
        floor = _checked_digest(theirs, through, self.limits)
        ours = await self.ours.digest(through, floor=floor)
        return Divergence(floor, through, tuple(_differing_days(theirs.channels, ours.channels)))

    async def between(self, divergence: Divergence) -> AsyncIterator[Difference]:
        """The records behind it."""
        reading = _Reading(self.ours, self.peer, self.limits, divergence, divergence.floor)
        for day in divergence.days:
            async for each in reading.day(day):
                yield each


#: a row, and what it counts as
Row = tuple[bytes, RecordIdentity]
Keep = Callable[[bytes], bool]


@dataclass(frozen=True)
class _Group:
    """Buckets that are read together; only a share of them at a time if `turns` is above 1."""

    theirs: Mapping[int, Digest]
    ours: tuple[int, ...]
    #: the floor that `theirs` is cut at
    floor: int
    turns: int = 1


@dataclass
class _Reading:
    """One way through the days that differ. `floor` is the highest that the peer has named."""

    ours: LocalSide
    peer: PeerSide
    limits: ComparisonLimits
    divergence: Divergence
    floor: int
    _read: int = 0
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    async def day(self, day: DayDifference) -> AsyncIterator[Difference]:
        theirs = await self._their_buckets(day)
        floor, through = self.floor, self.divergence.through
        ours = await self.ours.buckets(day.channel, day.day, through, floor=floor)
        for group in _groups(theirs, ours.buckets, floor, self.limits.held):
            for turn in range(group.turns):
                keep = self._share(turn, group.turns)
                # The peer first: it may name a higher floor.
                claimed = await self._their_rows(day, group, keep)
                known = await self._our_rows(day, group, keep)
                lacking, extra = _unmatched([row for row in claimed if row[1].seq >= self.floor], known)
                if lacking or extra:
                    yield Difference(day.channel, day.day, lacking, extra)

    async def _their_buckets(self, day: DayDifference) -> Sequence[Digest]:
        if not day.theirs:
            return (EMPTY,) * BUCKETS
        where = f"the buckets of {day.channel} on {day.day}"
        answer = await self.peer.buckets(day.channel, day.day, self.divergence.through)
        self.floor = _checked_floor(answer, self.divergence.through, self.floor, where)
        if len(answer.buckets) != BUCKETS:
            raise MalformedDigest(f"{where} are {len(answer.buckets)}, and not {BUCKETS}")
        if not all(each.can_be for each in answer.buckets):
            raise MalformedDigest(f"{where} have one that cannot be: fewer than none, or a sum of none")
        _check_sum(sum(answer.buckets, EMPTY), day.theirs, where, cut=self.floor > self.divergence.floor)
        return answer.buckets

    async def _their_rows(self, day: DayDifference, group: _Group, keep: Keep) -> list[Row]:
        """Read whole and added up; what is kept of it is true to the buckets."""
        kept: list[Row] = []
        if not group.theirs:
            return kept
        where, expected = f"the ids of {day.channel} on {day.day}", sum(each.count for each in group.theirs.values())
        found: dict[int, Digest] = dict.fromkeys(group.theirs, EMPTY)
        buckets, after, more, rows = sorted(group.theirs), 0, True, 0
        while more:
            answer = await self.peer.ids(day.channel, day.day, buckets, self.divergence.through, after)
            self.floor = _checked_floor(answer, self.divergence.through, self.floor, where)
            rows += _checked_size(answer, expected - rows, self.limits, where)
            self._count(len(answer.ids))
            for each in answer.ids:
                item = _checked_item(each, after, self.divergence.through, where)
                bucket, after = bucket_of(item), each.seq
                if bucket not in found:
                    raise MalformedDigest(
                        f"{where}: record {each.seq} lies in bucket {bucket}, which was not asked for"
                    )
                found[bucket] += Digest(1, int.from_bytes(item))
                if keep(item):
                    kept.append((item, each))
            more = answer.more
        for bucket, digest in group.theirs.items():
            _check_sum(found[bucket], digest, f"{where} in bucket {bucket}", cut=self.floor > group.floor)
        return kept

    async def _our_rows(self, day: DayDifference, group: _Group, keep: Keep) -> list[Row]:
        kept: list[Row] = []
        after, more = 0, bool(group.ours)
        while more:
            answer = await self.ours.ids(
                day.channel, day.day, group.ours, self.divergence.through, after, floor=self.floor
            )
            kept += [(item, each) for each in answer.ids if keep(item := each.item)]
            after, more = (answer.ids[-1].seq, answer.more) if answer.ids else (after, False)
        return kept

    def _share(self, turn: int, turns: int) -> Keep:
        """A share that nobody can aim at: senders choose what their messages count as, within reason."""
        if turns == 1:
            return lambda _: True
        key = partial(hashlib.blake2b, digest_size=8, key=self._secret)
        return lambda item: int.from_bytes(key(item).digest()) % turns == turn

    def _count(self, rows: int) -> None:
        self._read += rows
        if self._read > self.limits.read:
            raise MalformedDigest(f"more than {self.limits.read:,} records differ, too many to compare in one go")


def _differing_days(
    theirs: Mapping[str, Mapping[str, Digest]], ours: Mapping[str, Mapping[str, Digest]]
) -> Iterator[DayDifference]:
    for channel in sorted({*theirs, *ours}):
        left, right = theirs.get(channel, {}), ours.get(channel, {})
        for day in sorted({*left, *right}):
            found = DayDifference(channel, day, left.get(day, EMPTY), right.get(day, EMPTY))
            if found.theirs != found.ours:
                yield found


def _groups(theirs: Sequence[Digest], ours: Sequence[Digest], floor: int, held: int) -> Iterator[_Group]:
    """Buckets that differ, as many at a time as may be held."""
    gathered: list[int] = []
    size = 0
    for bucket in range(BUCKETS):
        if theirs[bucket] == ours[bucket]:
            continue
        more = theirs[bucket].count + ours[bucket].count
        if gathered and size + more > held:
            yield _group(gathered, theirs, ours, floor, size, held)
            gathered, size = [], 0
        gathered.append(bucket)
        size += more
    if gathered:
        yield _group(gathered, theirs, ours, floor, size, held)


def _group(
    buckets: list[int], theirs: Sequence[Digest], ours: Sequence[Digest], floor: int, size: int, held: int
) -> _Group:
    claimed = {each: theirs[each] for each in buckets if theirs[each].count}
    return _Group(claimed, tuple(each for each in buckets if ours[each].count), floor, -(-size // held))


def _unmatched(theirs: list[Row], ours: list[Row]) -> tuple[tuple[RecordIdentity, ...], tuple[RecordIdentity, ...]]:
    """What each side has more often than the other. Rows of one sequence match first, then the oldest."""
    paired: dict[bytes, tuple[list[RecordIdentity], list[RecordIdentity]]] = {}
    for side, rows in enumerate((theirs, ours)):
        for item, each in rows:
            paired.setdefault(item, ([], []))[side].append(each)
    lacking: list[RecordIdentity] = []
    extra: list[RecordIdentity] = []
    for left, right in paired.values():
        lacking += _surplus(left, right)
        extra += _surplus(right, left)
    return tuple(sorted(lacking)), tuple(sorted(extra))


def _surplus(rows: list[RecordIdentity], others: list[RecordIdentity]) -> list[RecordIdentity]:
    more = len(rows) - len(others)
    if more <= 0:
        return []
    elsewhere = {each.seq for each in others}
    return [each for each in rows if each.seq not in elsewhere][-more:]


# --- what is refused ---


def _checked_digest(answer: DigestAnswer, through: int, limits: ComparisonLimits) -> int:
    """Its floor."""
    floor = _checked_floor(answer, through, 0, "the digest")
    if (days := sum(max(len(found), 1) for found in answer.channels.values())) > limits.days:
        raise MalformedDigest(f"the digest has {days:,} days of channels, more than the {limits.days:,} that are taken")
    for channel, found in answer.channels.items():
        if not is_channel(channel):
            raise MalformedDigest(f"the digest has the channel {channel[:80]!r}, which is none")
        for day, digest in found.items():
            if not is_day(day) or not digest.can_be:
                raise MalformedDigest(f"the digest of {channel} on {day[:80]!r} cannot be: no such day, count or sum")
    total, room = sum(each.count for found in answer.channels.values() for each in found.values()), through - floor + 1
    if total > room:
        raise MalformedDigest(f"the digest counts {total:,} records, in a log that has room for {room:,}")
    return floor


def _checked_floor(answer: DigestAnswer | BucketsAnswer | IdsAnswer, through: int, floor: int, where: str) -> int:
    """The floor of an answer; none is below the one before. The first sequence of a log is 1."""
    found = max(answer.floor, 1)
    if answer.through != through:
        raise MalformedDigest(f"{where} were asked for up to record {through}, and are up to {answer.through}")
    if answer.floor < 0 or not floor <= found <= through + 1:
        raise MalformedDigest(f"{where} begin at record {answer.floor}, and {floor} to {through + 1} could be")
    return found


def _checked_size(answer: IdsAnswer, left: int, limits: ComparisonLimits, where: str) -> int:
    """How many ids it has: no more than are left of what the buckets counted, and enough to get on."""
    found, most = len(answer.ids), min(left, limits.most_ids)
    if found > most:
        raise MalformedDigest(f"{where}: {found:,} in one answer, and {most:,} could be")
    if answer.more and found < limits.fewest_ids:
        raise MalformedDigest(f"{where}: {found:,} in an answer that says there are more")
    if found and answer.ids[0].seq < answer.floor:
        raise MalformedDigest(f"{where}: record {answer.ids[0].seq} is below the floor, {answer.floor}")
    return found


def _checked_item(each: RecordIdentity, after: int, through: int, where: str) -> bytes:
    if not after < each.seq <= through:
        raise MalformedDigest(f"{where}: record {each.seq} follows {after}, in a log up to {through}")
    if not is_agent_id(each.sender) or not is_message_id(each.id) or len(each.hash) != HASH_BYTES:
        raise MalformedDigest(f"{where}: record {each.seq} has no sender, id or hash of a message")
    return each.item


def _check_sum(found: Digest, said: Digest, where: str, *, cut: bool) -> None:
    """It is what was said before, or less if records were removed meanwhile."""
    if found.count > said.count or (found != said and not cut):
        raise MalformedDigest(f"{where} do not add up: {found.count:,} records and not the {said.count:,} said before")
