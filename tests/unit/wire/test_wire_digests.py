"""Digests add up: whatever the order, and whatever was added and taken off again."""

import hashlib
import json
import random
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schema
from golden import cast
from golden import digests as golden_digests
from golden.digests import channel_hash
from tidings.errors import MalformedDigest, MalformedMessage
from tidings.wire.digests import (
    BUCKETS,
    EMPTY,
    ChannelDigests,
    DayDigests,
    Digest,
    RecordIdentity,
    bucket_of,
    day_of,
    is_day,
    item_hash,
    payload_hash,
)
from tidings.wire.message import TIMESTAMP_PATTERN

SHIPPED: dict[str, Any] = json.loads((schema.FOLDER / "vectors.json").read_text())["digests"]
ITEMS = st.binary(min_size=32, max_size=32)
DIGESTS = st.builds(Digest.of, st.lists(ITEMS, max_size=5))
Said = tuple[str, str, str, str, bytes]
SAID = st.tuples(
    st.sampled_from(["general", "team.a"]),
    st.sampled_from([cast.ADA.id, cast.BOB.id]),
    st.sampled_from([cast.MESSAGE_ID, cast.MESSAGE_ID[:-1] + "c"]),
    st.sampled_from(["2025-11-15T23:59:59.999Z", "2025-11-16T00:00:00.000Z"]),
    st.sampled_from([payload_hash(b"a"), payload_hash(b"b")]),
)


def naive(messages: list[Said]) -> dict[tuple[str, str, int], tuple[int, int]]:
    """By hand, from the page of the wire."""
    made: dict[tuple[str, str, int], tuple[int, int]] = {}
    for channel, sender, message_id, ts, hashed in messages:
        item = hashlib.sha256(b"\n".join([sender.encode(), message_id.encode(), hashed])).digest()
        key = channel, ts[:10], item[0]
        count, total = made.get(key, (0, 0))
        made[key] = count + 1, (total + int(item.hex(), 16)) % 2**256
    return made


def flat(digests: ChannelDigests) -> dict[tuple[str, str, int], tuple[int, int]]:
    return {
        (channel, day, bucket): (each.count, each.sum)
        for channel, day, found in digests.days()
        for bucket, each in enumerate(found.buckets)
        if each
    }


@pytest.mark.parametrize("vector", SHIPPED["items"], ids=lambda v: v["item_hex"][:8])
def test_a_message_counts_as_the_vectors_say(vector: dict[str, Any]) -> None:
    item = item_hash(vector["sender"], vector["id"], payload_hash(vector["payload"].encode()))
    assert (item.hex(), bucket_of(item)) == (vector["item_hex"], vector["bucket"])


@pytest.mark.parametrize("vector", SHIPPED["sets"], ids=lambda v: v["why"])
def test_sets_of_messages_have_the_digests_that_the_vectors_say(vector: dict[str, Any]) -> None:
    found = golden_digests.digests_of(vector["messages"])
    assert {channel: set(days) for channel, days in found.totals().items()} == {
        channel: set(each["days"]) for channel, each in vector["channels"].items()
    }
    for channel, each in vector["channels"].items():
        assert channel_hash(found, channel) == each["hash"]
        for day, said in each["days"].items():
            digests = found.day(channel, day)
            buckets = {int(number): Digest.decode(value) for number, value in said["buckets"].items()}
            assert digests == DayDigests(buckets)
            assert (digests.total, digests.hash) == (Digest.decode(said["digest"]), said["hash"])


def test_the_vectors_have_a_sum_that_went_over() -> None:
    whole = golden_digests.digests_of(SHIPPED["sets"][5]["messages"]).day("general", "2025-11-15").total
    assert whole.count == 25
    assert sum(int(SHIPPED["items"][each]["item_hex"], 16) for each in SHIPPED["sets"][5]["messages"]) >= 2**256


@given(DIGESTS, DIGESTS, DIGESTS)
def test_addition_commutes_associates_and_is_undone_by_subtraction(a: Digest, b: Digest, c: Digest) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + EMPTY == a
    assert (a + b) - b == a
    assert (a - b) + b == a
    assert 0 <= (a - b).sum < 2**256


@given(st.lists(SAID, max_size=30), st.randoms(use_true_random=False))
def test_order_never_matters_and_the_digests_are_those_made_by_hand(messages: list[Said], rng: random.Random) -> None:
    found = ChannelDigests.of(messages)
    assert flat(found) == naive(messages)
    rng.shuffle(messages)
    assert ChannelDigests.of(messages) == found


@given(st.lists(SAID, max_size=20), st.lists(SAID, max_size=20))
def test_digests_of_two_parts_merge_to_those_of_the_whole_and_come_apart_again(
    left: list[Said], right: list[Said]
) -> None:
    merged, whole = ChannelDigests.of(left), ChannelDigests.of(left + right)
    merged.merge(ChannelDigests.of(right))
    assert merged == whole
    assert flat(merged) == flat(whole)
    merged.merge(ChannelDigests.of(right), -1)
    assert flat(merged) == flat(ChannelDigests.of(left))
    for each in right:
        whole.add(*each, -1)
    assert whole == ChannelDigests.of(left)
    assert whole.totals() == ChannelDigests.of(left).totals()


@given(st.lists(SAID, max_size=12), st.lists(SAID, max_size=12))
def test_digests_and_hashes_are_equal_iff_the_messages_are(left: list[Said], right: list[Said]) -> None:
    ours, theirs = ChannelDigests.of(left), ChannelDigests.of(right)
    kept = [[(c, s, i, ts[:10], h) for c, s, i, ts, h in each] for each in (left, right)]
    same = Counter(kept[0]) == Counter(kept[1])
    assert (ours == theirs) is same
    assert (ours.totals() == theirs.totals()) is same
    assert all(channel_hash(ours, each) == channel_hash(theirs, each) for each in ("general", "team.a")) is same


@given(SAID, st.integers(2, 5))
def test_a_message_that_is_there_again_is_seen(message: Said, times: int) -> None:
    seen = [ChannelDigests.of([message] * count) for count in (1, times)]
    assert seen[0] != seen[1]
    (digest,) = seen[1].totals()[message[0]].values()
    assert digest.count == times
    assert len({channel_hash(each, message[0]) for each in seen}) == 2


@given(st.lists(ITEMS, max_size=20))
def test_a_day_is_the_sum_of_its_buckets_and_each_item_lies_in_that_of_its_first_byte(items: list[bytes]) -> None:
    day = DayDigests()
    for item in items:
        day.add(item)
    assert len(day.buckets) == BUCKETS
    assert sum(day.buckets, EMPTY) == day.total == Digest.of(items)
    for number, digest in enumerate(day.buckets):
        assert digest == Digest.of(item for item in items if item[0] == number) == day.bucket(number)


def test_what_was_taken_off_again_leaves_no_day() -> None:
    message = ("general", cast.ADA.id, cast.MESSAGE_ID, "2025-11-15T12:00:00.000Z", payload_hash(b""))
    found = ChannelDigests.of([message])
    found.add(*message, -1)
    assert list(found.days()) == []
    assert found == ChannelDigests()
    assert channel_hash(found, "general") == channel_hash(ChannelDigests(), "general")


@pytest.mark.parametrize(
    "ts",
    [
        "",
        "2025-11-15",
        "2025-11-15T12:00:00Z",
        "2025-11-15T12:00:00.000+00:00",
        "2025-02-30T12:00:00.000Z",
        "0000-01-01T00:00:00.000Z",
        "2025-11-15T24:00:00.000Z",
        "2025-11-15T12:00:00.000Z\n",
        "20251115  T12:00:00.000Z",
        "٢٠٢٥-11-15T12:00:00.000Z",
    ],
)
def test_what_no_message_has_as_its_time_has_no_day(ts: str) -> None:
    with pytest.raises(MalformedMessage):
        day_of(ts)


PARTS = st.tuples(*(st.integers(0, most) for most in (9999, 13, 32, 25, 61, 61)))


@given(PARTS, st.sampled_from([".000Z", ".999Z", "Z", ".0000Z", ".000z", ".000Z\n"]))
def test_a_time_has_a_day_iff_a_message_may_have_that_time(parts: tuple[int, ...], end: str) -> None:
    ts = "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}".format(*parts) + end
    try:
        found = day_of(ts)
    except MalformedMessage:
        found = ""
    assert found == (ts[:10] if re.match(TIMESTAMP_PATTERN, ts) else "")


def test_days_are_days_of_the_calendar() -> None:
    assert [each for each in ("2024-02-29", "0001-01-01", "9999-12-31") if not is_day(each)] == []
    assert [each for each in ("2025-02-29", "20250101", "2025-W01-1", "2025-01-01\n", "") if is_day(each)] == []


@given(DIGESTS)
def test_a_digest_is_read_back_from_json(digest: Digest) -> None:
    assert Digest.decode(json.loads(json.dumps(digest.encode()))) == digest


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        [1],
        [1, "0" * 64, 1],
        ["1", "0" * 64],
        [True, "0" * 64],
        [1.0, "0" * 64],
        [-1, "0" * 64],
        [2**53, "0" * 64],
        [0, "0" * 63 + "1"],
        [1, "0" * 63],
        [1, "0" * 65],
        [1, "A" * 64],
        [1, "0x" + "0" * 62],
        [1, 5],
    ],
    ids=str,
)
def test_what_cannot_be_a_digest_is_refused(value: object) -> None:
    with pytest.raises(MalformedDigest):
        Digest.decode(value)


def test_a_record_is_named_as_json_has_it() -> None:
    named = RecordIdentity(4, cast.ADA.id, cast.MESSAGE_ID, payload_hash(b""))
    assert RecordIdentity.decode(named.encode()) == named
    assert named.item == item_hash(cast.ADA.id, cast.MESSAGE_ID, payload_hash(b""))
    with pytest.raises(MalformedDigest):
        RecordIdentity.decode((4, cast.ADA.id, cast.MESSAGE_ID, "0" * 62))


def test_days_come_in_order() -> None:
    rng = random.Random(5)
    days = [f"2025-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}T00:00:00.000Z" for _ in range(40)]
    found = ChannelDigests.of((rng.choice("ab"), cast.ADA.id, cast.MESSAGE_ID, day, bytes(32)) for day in days)
    keys = [(channel, day) for channel, day, _ in found.days()]
    assert all(a < b for a, b in pairwise(keys))
