"""A comparison finds exactly what differs, asks for little more than that, and believes no answer that cannot be."""

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidings.errors import MalformedDigest, WireError
from tidings.links.compare import Comparison, ComparisonLimits, Difference
from tidings.wire.digests import EMPTY, BucketsAnswer, Digest, DigestAnswer, IdsAnswer, RecordIdentity, bucket_of
from tools.digest_sides import (
    HeldRows,
    PeerRows,
    Row,
    counted,
    digests_of,
    naive_difference,
    row,
    same_bucket,
    sender,
)

#: pages of any size, for sides that hold little
SMALL = ComparisonLimits(fewest_ids=1)
#: what clocks claim: around midnight, far off in both directions
TIMES = [
    "2025-11-15T12:00:00.000Z",
    "2025-11-15T23:59:59.999Z",
    "2025-11-16T00:00:00.000Z",
    "0001-01-01T00:00:00.000Z",
    "9999-12-31T23:59:59.999Z",
]
DAY = "2025-11-15"


async def collected(found: AsyncIterator[Difference]) -> list[Difference]:
    return [each async for each in found]


async def find(
    theirs: list[Row], ours: list[Row], through: int = 1_000_000, limits: ComparisonLimits = SMALL, page: int = 1_000
) -> tuple[list[Difference], PeerRows]:
    peer = PeerRows(HeldRows(theirs, page))
    return await collected(Comparison(HeldRows(ours, page), peer, limits=limits).differences(through)), peer


def assert_exact(found: list[Difference], theirs: list[Row], ours: list[Row]) -> None:
    assert counted(found, "lacking") == naive_difference(theirs, ours)
    assert counted(found, "extra") == naive_difference(ours, theirs)


ROWS = st.builds(
    lambda number, channel, ts, by: (number, channel, ts, by),
    st.integers(0, 12),
    st.sampled_from(["general", "team.a"]),
    st.sampled_from(TIMES),
    st.integers(0, 1),
)


def laid_out(kinds: list[tuple[int, str, str, int]], seqs: list[int]) -> list[Row]:
    return [
        row(seq, number, channel=channel, ts=ts, by=by)
        for seq, (number, channel, ts, by) in zip(seqs, kinds, strict=True)
    ]


@st.composite
def two_sides(draw: st.DrawFn) -> tuple[list[Row], list[Row]]:
    """Rows of one log, of which each side has some; some of ours stand at other sequences than the peer's."""
    kinds = draw(st.lists(ROWS, max_size=25))
    whole = laid_out(kinds, list(range(1, len(kinds) + 1)))
    theirs = [each for each in whole if draw(st.integers(0, 3))]
    ours = [each for each in whole if draw(st.integers(0, 3))]
    if draw(st.booleans()):
        ours = [Row(each.channel, each.ts, each.identity._replace(seq=each.identity.seq + 100)) for each in ours]
    return theirs, ours


@settings(deadline=None)
@given(two_sides(), st.integers(1, 8), st.integers(1, 40), st.integers(0, 130))
def test_the_answer_is_the_difference_of_the_two_sets(
    sides: tuple[list[Row], list[Row]], page: int, held: int, through: int
) -> None:
    theirs, ours = sides
    limits = replace(SMALL, held=held)
    found, peer = asyncio.run(find(theirs, ours, through, limits, page))
    theirs, ours = ([each for each in side if each.identity.seq <= through] for side in sides)
    assert_exact(found, theirs, ours)
    assert all(each.lacking or each.extra for each in found)
    assert {row for each in found for row in each.lacking} <= {each.identity for each in theirs}
    if digests_of(theirs) == digests_of(ours):
        assert peer.asked == [("digest",)]


def generated(rng: random.Random, count: int) -> list[Row]:
    """A log with channels of different size, days, repeats of a record, and clocks that are off."""
    made: list[Row] = []
    for seq in range(1, count + 1):
        if made and rng.random() < 0.02:
            again = rng.choice(made)
            made.append(Row(again.channel, again.ts, again.identity._replace(seq=seq)))
            continue
        channel = rng.choice(["general"] * 6 + ["team.a", "team.b"])
        day = TIMES[3] if rng.random() < 0.01 else f"2025-11-{rng.randint(1, 9):02}T10:00:00.000Z"
        made.append(row(seq, seq, channel=channel, ts=day, by=rng.randint(0, 3)))
    return made


@pytest.mark.parametrize("seed", range(12))
async def test_on_generated_logs_only_what_differs_is_asked_for(seed: int) -> None:
    rng = random.Random(seed)
    whole = generated(rng, 3_000)
    lost, more = ({each.identity.seq for each in rng.sample(whole, rng.randint(0, 12))} for _ in range(2))
    theirs = [each for each in whole if each.identity.seq not in lost]
    ours = [each for each in whole if each.identity.seq not in more]
    found, peer = await find(theirs, ours, limits=ComparisonLimits())
    assert_exact(found, theirs, ours)
    different = naive_difference(theirs, ours) + naive_difference(ours, theirs)
    days = {each[:2] for each in different}
    buckets = {(*each[:2], bucket_of(RecordIdentity(0, *each[2:]).item)) for each in different}
    assert peer.questions("digest") == 1
    assert peer.questions("buckets") <= len(days)
    assert peer.questions("ids") <= len(days)
    assert len(peer.asked) <= 1 + 2 * len(days)
    inside = [each for each in theirs if (*each.counted[:2], bucket_of(each.identity.item)) in buckets]
    assert peer.handed <= len(inside) < len(whole) / 20


async def test_equal_sides_cost_one_question_however_much_they_hold() -> None:
    rows = generated(random.Random(1), 2_000)
    found, peer = await find(rows, list(reversed(rows)))
    assert (found, peer.asked) == ([], [("digest",)])


async def test_of_a_side_that_holds_nothing_everything_is_found() -> None:
    rows = generated(random.Random(2), 700)
    found, _ = await find(rows, [], limits=ComparisonLimits())
    assert_exact(found, rows, [])
    found, peer = await find([], rows, limits=ComparisonLimits())
    assert_exact(found, [], rows)
    assert peer.asked == [("digest",)], "the peer has nothing that it could be asked about"
    assert (await find([], []))[0] == []


async def test_the_second_of_a_record_that_is_there_twice_is_what_is_lacking() -> None:
    (found,), _ = await find([row(5, 1), row(9, 1)], [row(5, 1)])
    assert ([each.seq for each in found.lacking], found.extra) == ([9], ())
    (found,), _ = await find([row(5, 1), row(9, 1)], [row(9, 1)])
    assert [each.seq for each in found.lacking] == [5]
    (found,), _ = await find([row(5, 1), row(9, 1)], [row(7, 1)])
    assert [each.seq for each in found.lacking] == [9], "no sequence is common: the oldest count as the same"
    (found,), _ = await find([row(5, 1)], [row(5, 1), row(7, 1), row(9, 1)])
    assert ([each.seq for each in found.extra], found.lacking) == ([7, 9], ())


async def test_altered_bytes_are_lacking_as_they_are_there_and_extra_as_they_are_here() -> None:
    original = row(5, 1)
    altered = Row(original.channel, original.ts, original.identity._replace(hash=bytes(32)))
    (found,), _ = await find([original], [altered])
    assert (found.lacking, found.extra) == ((original.identity,), (altered.identity,))


async def test_a_message_that_is_on_another_day_or_in_another_channel_is_another() -> None:
    here = [row(5, 1, ts=TIMES[1]), row(6, 2)]
    there = [row(5, 1, ts=TIMES[2]), row(6, 2, channel="team.a")]
    found, _ = await find(there, here)
    assert_exact(found, there, here)
    assert sum(len(each.lacking) + len(each.extra) for each in found) == 4


async def test_items_that_begin_alike_are_told_apart() -> None:
    alike = same_bucket(60) + same_bucket(4, beginning=b"\x07\x07")
    whole = [row(seq, number) for seq, number in enumerate(dict.fromkeys(alike), 1)]
    theirs, ours = whole[:-1], whole[1:]
    found, peer = await find(theirs, ours)
    assert_exact(found, theirs, ours)
    assert [each for each in peer.asked if each[0] == "ids"] == [("ids", "general", DAY, 7)]


async def test_a_bucket_that_somebody_filled_is_read_in_shares_that_are_held_one_at_a_time() -> None:
    numbers = same_bucket(600)
    theirs = [row(seq, number) for seq, number in enumerate(numbers[:400], 1)]
    ours = [row(seq, number) for seq, number in enumerate(numbers[300:], 301)]
    found, peer = await find(theirs, ours, limits=ComparisonLimits(held=50, fewest_ids=1), page=100)
    assert_exact(found, theirs, ours)
    assert len(found) > 10
    assert max(len(each.lacking) + len(each.extra) for each in found) < 150
    assert len(peer.asked) <= 2 + 14 * 4


async def test_a_share_cannot_be_aimed_at() -> None:
    """The shares of two comparisons differ, so nobody can make all messages fall into one of them."""
    theirs = [row(seq, number) for seq, number in enumerate(same_bucket(60), 1)]
    shares = [(await find(theirs, [], limits=replace(SMALL, held=20)))[0] for _ in range(2)]
    assert [each.lacking for each in shares[0]] != [each.lacking for each in shares[1]]


# --- the floor ---


async def test_what_lies_below_the_floor_or_above_the_end_is_no_difference() -> None:
    whole = [row(seq, seq) for seq in range(1, 21)]
    peer = PeerRows(HeldRows([each for each in whole if each.identity.seq != 12]), floor=10)
    found = await collected(Comparison(HeldRows(whole[:14] + whole[16:]), peer, limits=SMALL).differences(18))
    assert_exact(found, whole[14:16], [whole[11]])
    for floor, through, expected in [(11, 12, 1), (12, 12, 1), (13, 14, 0), (10, 11, 0), (13, 12, 0)]:
        peer.floor = floor
        found = await collected(Comparison(HeldRows(whole[:14]), peer, limits=SMALL).differences(through))
        assert sum(len(each.extra) for each in found) == expected, (floor, through)


@pytest.mark.parametrize("seed", range(40))
async def test_a_floor_that_rises_between_questions_is_no_difference_and_hides_none(seed: int) -> None:
    rng = random.Random(seed)
    whole = generated(rng, 300)
    theirs, ours = ([each for each in whole if rng.random() > 0.1] for _ in range(2))
    rising = sorted(rng.sample(range(1, 300), rng.randint(1, 40)))
    peer = PeerRows(HeldRows(theirs, rng.choice([1, 7, 50])), rising=rising)
    found = await collected(Comparison(HeldRows(ours), peer, limits=replace(SMALL, held=60)).differences(300))
    above = [[each for each in side if each.identity.seq >= peer.floor] for side in (theirs, ours)]
    for side, have, others, kept in [("lacking", theirs, ours, above), ("extra", ours, theirs, above[::-1])]:
        claimed = counted(found, side)
        assert claimed <= naive_difference(have, others) + naive_difference(kept[0], kept[1])
        assert naive_difference(kept[0], kept[1]) <= claimed


# --- reported once ---


async def test_a_difference_is_reported_once_until_it_changes() -> None:
    theirs, ours = [row(seq, seq) for seq in range(1, 50)], [row(seq, seq) for seq in range(1, 48)]
    peer = PeerRows(HeldRows(theirs))
    comparison = Comparison(HeldRows(ours), peer, limits=SMALL)
    assert_exact(await collected(comparison.differences(100)), theirs, ours)
    peer.asked.clear()
    assert await collected(comparison.differences(100)) == []
    assert peer.asked == [("digest",)], "what was reported is not read again"
    assert comparison.standing, "and is not taken for equal"

    for side in (theirs, ours):
        side.append(row(60, 60))
    assert await collected(comparison.differences(100)) == [], "both got a record: the difference is the same"

    theirs.append(row(61, 61))
    assert_exact(await collected(comparison.differences(100)), theirs, ours)
    assert await collected(comparison.differences(100)) == []


async def test_a_difference_that_comes_back_is_reported_again() -> None:
    theirs, ours = [row(1, 1), row(2, 2)], [row(1, 1)]
    comparison = Comparison(held := HeldRows(ours), PeerRows(HeldRows(theirs)), limits=SMALL)
    assert len(await collected(comparison.differences(10))) == 1
    held.rows = theirs
    assert await collected(comparison.differences(10)) == []
    assert (comparison.reported, comparison.standing) == ("", False)
    held.rows = ours
    assert len(await collected(comparison.differences(10))) == 1


async def test_what_was_reported_is_known_after_a_restart_and_what_was_cut_short_is_not() -> None:
    theirs = [row(1, 1), row(2, 2, channel="team.a")]
    comparison = Comparison(HeldRows([]), PeerRows(HeldRows(theirs)), limits=SMALL)
    async for _ in (cut_short := comparison.differences(10)):
        break
    await cut_short.aclose()  # type: ignore[attr-defined]
    assert comparison.reported == ""
    assert len(await collected(comparison.differences(10))) == 2
    again = Comparison(HeldRows([]), PeerRows(HeldRows(theirs)), comparison.reported, SMALL)
    assert await collected(again.differences(10)) == []


@settings(deadline=None)
@given(two_sides(), two_sides())
def test_fingerprints_are_equal_iff_the_differences_are(
    one: tuple[list[Row], list[Row]], other: tuple[list[Row], list[Row]]
) -> None:
    prints, differences = [], []
    for theirs, ours in (one, other):
        comparison = Comparison(HeldRows(ours), PeerRows(HeldRows(theirs)))
        prints.append(asyncio.run(comparison.divergence(1_000)).fingerprint)
        differences.append((naive_difference(theirs, ours), naive_difference(ours, theirs)))
    assert (prints[0] == prints[1]) is (differences[0] == differences[1])
    assert [each == "" for each in prints] == [not any(each) for each in differences]


# --- answers that cannot be ---

Change = Callable[[Any], Any]


class Liar(PeerRows):
    """Answers honestly, but for one question."""

    def __init__(self, rows: list[Row], question: str, change: Change, page: int = 1_000) -> None:
        super().__init__(HeldRows(rows, page))
        self.question, self.change = question, change

    async def digest(self, through: int) -> DigestAnswer:
        answer = await super().digest(through)
        return self.change(answer) if self.question == "digest" else answer

    async def buckets(self, channel: str, day: str, through: int) -> BucketsAnswer:
        answer = await super().buckets(channel, day, through)
        return self.change(answer) if self.question == "buckets" else answer

    async def ids(self, channel: str, day: str, buckets: Sequence[int], through: int, after: int) -> IdsAnswer:
        answer = await super().ids(channel, day, buckets, through, after)
        return self.change(answer) if self.question == "ids" else answer


def with_day(day: str, digest: Digest, channel: str = "general") -> Change:
    return lambda answer: replace(answer, channels={**answer.channels, channel: {day: digest}})


def with_bucket(number: int, digest: Digest) -> Change:
    def change(answer: BucketsAnswer) -> BucketsAnswer:
        buckets = list(answer.buckets)
        buckets[number] = digest
        return replace(answer, buckets=buckets)

    return change


def balanced(apart: Digest) -> Change:
    """Another bucket makes up for one, so that the day adds up."""

    def change(answer: BucketsAnswer) -> BucketsAnswer:
        buckets = list(answer.buckets)
        empty = next(number for number, each in enumerate(buckets) if not each)
        filled = next(number for number, each in enumerate(buckets) if each)
        buckets[empty], buckets[filled] = EMPTY - apart, buckets[filled] + apart
        return replace(answer, buckets=buckets)

    return change


def with_id(**changes: Any) -> Change:
    return lambda answer: replace(answer, ids=(answer.ids[0]._replace(**changes), *answer.ids[1:]))


THEIRS = [row(seq, seq) for seq in range(1, 41)]
#: the first two have other buckets than a third
STRANGER = next(
    each.identity for each in (row(seq, 1_000 + seq) for seq in range(1, 500)) if bucket_of(each.identity.item) == 0
)
YEARS = {f"{year:04}-01-01": EMPTY for year in range(1, 99)}
OVERFULL = with_bucket(3, Digest(40, 5))
HOSTILE: list[tuple[str, str, Change]] = [
    ("more days than are taken", "digest", lambda a: replace(a, channels={"a": YEARS})),
    ("more channels than are taken", "digest", lambda a: replace(a, channels={f"a{n}": {} for n in range(99)})),
    ("a count below zero", "digest", with_day(DAY, Digest(-1, 5))),
    ("a sum of nothing", "digest", with_day(DAY, Digest(0, 5))),
    ("a sum beyond 2^256", "digest", with_day(DAY, Digest(1, 2**256))),
    ("more records than sequences", "digest", with_day(DAY, Digest(101, 5))),
    ("more records than numbers", "digest", with_day(DAY, Digest(2**60, 5))),
    ("a day that is none", "digest", with_day("2025-02-30", Digest(1, 5))),
    ("a channel that is none", "digest", with_day(DAY, Digest(1, 5), "general.>")),
    ("another end", "digest", lambda a: replace(a, through=99)),
    ("a floor below zero", "digest", lambda a: replace(a, floor=-1)),
    ("a floor beyond the end", "digest", lambda a: replace(a, floor=102)),
    ("buckets up to another end", "buckets", lambda a: replace(a, through=101)),
    ("a floor that sinks", "buckets", lambda a: replace(a, floor=0)),
    ("255 buckets", "buckets", lambda a: replace(a, buckets=a.buckets[:-1])),
    ("257 buckets", "buckets", lambda a: replace(a, buckets=(*a.buckets, EMPTY))),
    ("a bucket with a count below zero", "buckets", balanced(Digest(1, 5))),
    ("a bucket with a sum of nothing", "buckets", balanced(Digest(0, 5))),
    ("a bucket more than the day has", "buckets", OVERFULL),
    ("no buckets of a day that has some", "buckets", lambda a: replace(a, buckets=(EMPTY,) * 256)),
    ("more in the buckets, from a higher floor", "buckets", lambda a: replace(OVERFULL(a), floor=20)),
    ("a record of a bucket that was not asked for", "ids", lambda a: replace(a, ids=(STRANGER, *a.ids[1:]))),
    ("a record of another sender", "ids", with_id(sender=sender(5))),
    ("a record of another hash", "ids", with_id(hash=bytes(32))),
    ("a record of a hash that is too short", "ids", with_id(hash=b"short")),
    ("a sender that is none", "ids", with_id(sender="ada")),
    ("an id that is none", "ids", with_id(id="1")),
    ("a record below the floor", "ids", lambda a: replace(a, floor=50)),
    ("a record beyond the end", "ids", lambda a: replace(a, ids=(*a.ids[:-1], a.ids[-1]._replace(seq=101)))),
    ("sequence 0", "ids", with_id(seq=0)),
    ("records in another order", "ids", lambda a: replace(a, ids=a.ids[::-1])),
    ("a record twice", "ids", lambda a: replace(a, ids=(a.ids[0], *a.ids[:-1]))),
    ("a record less", "ids", lambda a: replace(a, ids=a.ids[1:])),
    ("a record more", "ids", lambda a: replace(a, ids=(*a.ids, a.ids[-1]._replace(seq=99)))),
    ("no records", "ids", lambda a: replace(a, ids=())),
    ("nothing, and more of it", "ids", lambda a: replace(a, ids=(), more=True)),
    ("all of it, and more to come", "ids", lambda a: replace(a, more=True)),
    ("ids up to another end", "ids", lambda a: replace(a, through=101)),
    ("ids from a floor that sinks", "ids", lambda a: replace(a, floor=0)),
]  # fmt: skip


@pytest.mark.parametrize(("why", "question", "change"), HOSTILE, ids=[each[0] for each in HOSTILE])
async def test_an_answer_that_cannot_be_is_refused(why: str, question: str, change: Change) -> None:
    peer = Liar(THEIRS, question, change)
    peer.floor = 1 if "sinks" not in why else 2
    comparison = Comparison(HeldRows(THEIRS[20:30]), peer, limits=replace(SMALL, days=90))
    with pytest.raises(MalformedDigest):
        await collected(comparison.differences(100))
    assert peer.asked[-1][0] == question
    assert comparison.reported == ""
    assert issubclass(MalformedDigest, WireError)


async def test_the_same_peer_is_believed_when_it_does_not_lie() -> None:
    """Or the refusals above would prove nothing."""
    for question in ("digest", "buckets", "ids"):
        peer = Liar(THEIRS, question, lambda answer: answer)
        found = await collected(Comparison(HeldRows(THEIRS[20:30]), peer, limits=SMALL).differences(100))
        assert_exact(found, THEIRS, THEIRS[20:30])


@pytest.mark.parametrize(
    "changes", [{"sender": "ada"}, {"sender": sender(0) + "\n" + sender(0)}, {"id": "1"}, {"hash": b"short"}]
)
async def test_rows_that_are_no_messages_are_refused_though_they_add_up(changes: dict[str, Any]) -> None:
    stray = Row("general", TIMES[0], row(50, 50).identity._replace(**changes))
    with pytest.raises(MalformedDigest, match="no sender, id or hash"):
        await find([*THEIRS, stray], [], through=100)


class Endless(PeerRows):
    """Claims a full log in one bucket, and has another page of it for whoever asks."""

    def __init__(self, most: int) -> None:
        super().__init__(HeldRows([]))
        self.most, self.pages = most, 0
        self.bucket = same_bucket(1)[0]

    async def digest(self, through: int) -> DigestAnswer:
        return DigestAnswer(1, through, {"general": {DAY: Digest(through, 5)}})

    async def buckets(self, channel: str, day: str, through: int) -> BucketsAnswer:  # noqa: ARG002
        return with_bucket(7, Digest(through, 5))(BucketsAnswer(1, through, (EMPTY,) * 256))  # type: ignore[no-any-return]

    async def ids(self, channel: str, day: str, buckets: Sequence[int], through: int, after: int) -> IdsAnswer:  # noqa: ARG002
        self.pages += 1
        one = row(1, self.bucket).identity
        return IdsAnswer(1, through, tuple(one._replace(seq=after + 1 + n) for n in range(self.most)), True)


async def test_pages_without_end_are_read_up_to_a_limit() -> None:
    peer = Endless(1_000)
    with pytest.raises(MalformedDigest, match="too many to compare"):
        await collected(Comparison(HeldRows([]), peer, limits=ComparisonLimits(read=20_000)).differences(2**50))
    assert peer.pages == 21


async def test_small_pages_and_large_ones_are_refused_at_once() -> None:
    for most in (0, 99, 10_001):
        peer = Endless(most)
        with pytest.raises(MalformedDigest):
            await collected(Comparison(HeldRows([]), peer).differences(2**50))
        assert peer.pages == 1


async def test_of_pages_without_end_no_more_is_held_than_may_be() -> None:
    peer = Endless(1_000)
    comparison = Comparison(HeldRows([]), peer, limits=ComparisonLimits(held=1_000, read=100_000))
    tracemalloc.start()
    try:
        with pytest.raises(MalformedDigest):
            await collected(comparison.differences(2**50))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peer.pages == 101
    assert peak < 5_000_000, "a hundred thousand rows would be fifty million bytes"
