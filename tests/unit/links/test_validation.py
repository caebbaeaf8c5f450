"""What becomes of a record a peer sent, and in which order a page is let in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.links.definition import LinkDefinition
from tidings.links.validation import Admit, Omit, Refuse, judge, order, verified
from tidings.wire import message as wire_message
from tidings.wire.links import MOST_HOPS, LinkedRecord
from tidings.wire.message import MAX_PAYLOAD, Sender
from tidings.wire.signing import KeyPair, key_of_seed, sign

ADA, BOB = key_of_seed(b"a" * 32), key_of_seed(b"b" * 32)
HERE, PEER, BEHIND = "AHERE", "APEER", "ABEHIND"
TAKES = LinkDefinition(
    link="l1",
    space=HERE,
    peer=PEER,
    authority="a1",
    channels={"general": "acme", "team.>": "acme-team.>"},
    beyond={BEHIND: {"general": "far"}},
    hops=2,
)


def message_id(number: int) -> str:
    return f"0199c82c-c000-7{number:03x}-8000-000000000000"


def record(
    number: int = 1,
    *,
    key: KeyPair = ADA,
    sender: str | None = None,
    origin: str = PEER,
    channel: str = "general",
    said_in: str | None = None,
    hops: int = 1,
    payload: bytes | None = None,
    reply_to: int | None = None,
) -> LinkedRecord:
    answered = message_id(reply_to) if reply_to is not None else None
    message = wire_message.compose(Sender(key.id, "ada"), text="hi", id=message_id(number), reply_to=answered)
    payload = message.raw if payload is None else payload
    return LinkedRecord(
        seq=number,
        time_ns=number,
        origin=origin,
        channel=channel,
        sender=sender or key.id,
        signature=sign(key, origin, "chat", said_in or channel, payload),
        payload=payload,
        hops=hops,
    )


def judged(one: LinkedRecord) -> Admit | Omit | Refuse:
    return judge(one, verified([one])[0], TAKES)


@pytest.mark.parametrize(
    ("one", "ours"),
    [
        (record(), "acme"),
        (record(channel="team.a.b"), "acme-team.a.b"),
        (record(origin=BEHIND, hops=2), "far"),
    ],
)
def test_what_is_mapped_and_signed_is_let_in_under_its_name_here(one: LinkedRecord, ours: str) -> None:
    found = judged(one)
    assert isinstance(found, Admit)
    assert found.ours == ours
    assert found.identity == (one.origin, ADA.id, message_id(1))


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (record(origin=HERE), "echo"),
        (record(channel="private"), "not_shared"),
        (record(channel="not a channel"), "not_shared"),
        (record(origin="AELSE"), "not_shared"),
        (record(origin=BEHIND, channel="team.a", hops=2), "not_shared"),
        (record(origin=BEHIND, hops=3), "hops"),
    ],
)
def test_what_can_never_be_let_in_is_left_out_by_name(one: LinkedRecord, reason: str) -> None:
    found = judged(one)
    assert isinstance(found, Omit)
    assert found.reason == reason


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (record(said_in="team.a"), "signature"),
        (record(sender=BOB.id), "signature"),
        (record(payload=b'{"id": 1}'), "malformed"),
        (record(payload=bytes(MAX_PAYLOAD + 1)), "too_large"),
        (record(hops=0), "malformed"),
        (record(hops=MOST_HOPS + 2), "malformed"),
    ],
)
def test_what_does_not_fit_is_put_aside(one: LinkedRecord, reason: str) -> None:
    found = judged(one)
    assert isinstance(found, Refuse)
    assert found.reason == reason
    assert found.words


def test_words_of_one_that_another_signed_are_put_aside() -> None:
    words = record().payload
    found = judged(record(key=BOB, payload=words))
    assert isinstance(found, Refuse)
    assert found.reason == "sender_mismatch"


def admitted(number: int, key: KeyPair = ADA, reply_to: int | None = None) -> Admit:
    found = judged(record(number, key=key, reply_to=reply_to))
    assert isinstance(found, Admit)
    return found


def numbers(page: list[Admit]) -> list[int]:
    return [each.record.seq for each in order(page)]


def test_an_answer_comes_behind_what_it_answers() -> None:
    assert numbers([admitted(1, BOB, reply_to=2), admitted(2), admitted(3)]) == [2, 1, 3]


def test_what_one_sender_said_stays_in_its_order_whatever_answers_what() -> None:
    assert numbers([admitted(1, reply_to=2), admitted(2)]) == [1, 2]
    assert numbers([admitted(1, BOB, reply_to=3), admitted(2, BOB), admitted(3)]) == [3, 1, 2]
    assert numbers([admitted(1, BOB, reply_to=2), admitted(2, reply_to=1), admitted(3, reply_to=3)]) == [1, 2, 3]


@given(st.lists(st.tuples(st.booleans(), st.none() | st.integers(1, 12)), max_size=12))
def test_any_page_keeps_every_record_and_each_senders_order(said: list[tuple[bool, int | None]]) -> None:
    keys = {True: ADA, False: BOB}
    page = [admitted(n, keys[who], reply_to) for n, (who, reply_to) in enumerate(said, 1)]
    found = numbers(page)
    assert sorted(found) == list(range(1, len(said) + 1))
    for who in (True, False):
        mine = [n for n in found if said[n - 1][0] is who]
        assert mine == sorted(mine)
