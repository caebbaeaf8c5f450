"""Names of channels on both sides of a link, what a link record admits, and tokens."""

import hashlib
import json

import pytest

from tidings.errors import InvalidName, MalformedRecord, UsageError
from tidings.wire import rulings
from tidings.wire.links import (
    ChannelMap,
    GapKind,
    LinkGap,
    LinkPage,
    Token,
    authorization_epoch,
    origin_fields,
    read_origin,
    scope_id,
)
from tidings.wire.records import values_of
from tidings.wire.rulings import Link
from tidings.wire.signing import ACCOUNT, KeyPair

A, B, C = (KeyPair.generate(ACCOUNT).id for _ in range(3))
SECOND = 1_000_000_000


def link(**fields: object) -> Link:
    given: dict[str, object] = {
        "op": "1",
        "link": "east",
        "state": "on",
        "origin": A,
        "channels": {"general": "a.general"},
    }
    return Link(**(given | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "theirs", "ours"),
    [
        ({"general": "acme"}, "general", "acme"),
        ({"general": "acme"}, "other", None),
        ({"team.>": "acme.team.>"}, "team.a.b", "acme.team.a.b"),
        ({"team.>": "acme.team.>"}, "team", None),
        ({"team.>": "acme.team.>"}, "teams.a", None),
        ({">": ">"}, "a.b", "a.b"),
        ({">": "acme.>"}, "a", "acme.a"),
        ({"team.>": "x.>", "team.core.>": "y.>"}, "team.core.a", "y.a"),
        ({"team.>": "x.>", "team.a": "z"}, "team.a", "z"),
        ({">": "acme.>"}, "a" * 64 + "." + "b" * 64 + "." + "c" * 64 + ".dddd", None),
        ({">": ">"}, "not a channel", None),
    ],
)
def test_a_channel_has_one_name_on_each_side(names: dict[str, str], theirs: str, ours: str | None) -> None:
    found = ChannelMap(names)
    assert found.ours(theirs) == ours
    assert ours is None or found.theirs(ours) == theirs


@pytest.mark.parametrize(
    "names",
    [
        {"a": "x", "b": "x"},
        {"a.>": "x.>", "b": "x.q"},
        {"a": "x.y", ">": "x.>"},
        {"a.>": "x.>", "b.>": "x.y.>"},
        {"a.>": ">", "b": "b"},
        {"a": "x.>"},
        {"a.>": "x"},
        {"a.*": "b.*"},
        {"a.*.>": "b.>"},
        {"": "a"},
        {"a b": "a"},
    ],
)
def test_no_two_channels_become_one_and_no_name_is_bent(names: dict[str, str]) -> None:
    with pytest.raises(InvalidName):
        ChannelMap(names)


def test_a_name_beside_a_pattern_is_not_one_of_its_channels() -> None:
    assert ChannelMap({"a": "x", "b.>": "x.>"}).ours("b.c") == "x.c"


def test_a_name_that_another_channel_has_is_not_turned_back_into_it() -> None:
    assert ChannelMap({"team.>": "x.>", "team.a": "z"}).theirs("x.a") is None


def test_an_agreement_is_known_by_what_it_lets_pass_not_by_when_or_how_often_it_was_written() -> None:
    one = link(channels={"a": "b", "c": "d"}, shares=("x", "y"))
    assert authorization_epoch(one) == authorization_epoch(
        link(channels={"c": "d", "a": "b"}, shares=("y", "x"), op="2", at="2026-01-01T00:00:00Z", space="acme")
    )
    others = [
        link(channels={"a": "b"}),
        link(channels={"a": "c"}),
        link(channels={"a": "b"}, shares=("x",)),
        link(channels={"a": "b"}, beyond={B: {"a": "z"}}),
        link(channels={"a": "b"}, hops=2),
        link(channels={"a": "b"}, until=9),
        link(channels={"a": "b"}, direct="on"),
        link(channels={"a": "b"}, roster="on"),
        link(channels={"a": "b"}, peer=KeyPair.generate().id),
        link(channels={"a": "b"}, steward=KeyPair.generate().id),
        link(channels={"a": "b"}, origin=C),
    ]
    assert len({authorization_epoch(each) for each in others}) == len(others)


def test_the_name_of_an_agreement_does_not_change_from_version_to_version() -> None:
    record = link(channels={"a": "b"}, shares=("x",))
    text = {"origin": A, "steward": None, "channels": {"a": "b"}, "shares": ["x"], "beyond": {}, "hops": 1}
    text |= {"until": None, "direct": "off", "roster": "off", "peer": None}
    canonical = json.dumps(text, sort_keys=True, separators=(",", ":")).encode()
    assert authorization_epoch(record) == hashlib.sha256(canonical).hexdigest()[:32]


def test_a_scope_is_known_by_what_it_maps_whatever_the_order() -> None:
    assert scope_id({"a": "b", "c": "d"}) == scope_id({"c": "d", "a": "b"}) == "31582913f10d8bd2a18c0bfdb1007c9d"
    assert scope_id({"a": "b"}) == "07e7df8675adcfdc7fa0ef99edfcece7"
    assert scope_id({}) not in (scope_id({"a": "b"}), scope_id({">": ">"}))


def test_a_link_admits_what_its_record_maps_and_nothing_else() -> None:
    on = link(beyond={C: {"general": "c.general"}}, hops=2, until=100)
    assert on.admits(A, "general") == "a.general"
    assert on.admits(A, "other") is None
    assert on.admits(C, "general", hops=2) == "c.general"
    assert on.admits(B, "general") is None
    assert on.admits(A, "general", hops=3) is None
    assert on.admits(A, "general", hops=0) is None
    assert on.admits(A, "general", time_ns=100 * SECOND - 1) == "a.general"
    assert on.admits(A, "general", time_ns=100 * SECOND) is None
    assert link(state="off").admits(A, "general") is None
    assert link(channels={}).admits(A, "general") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"channels": {"a": "x", "b": "x"}},
        {"beyond": {C: {"a": "x", "b": "x"}}},
        {"beyond": {"elsewhere": {"a": "x"}}},
        {"hops": 0},
        {"hops": 9},
        {"shares": ("a b",)},
        {"space": "no space"},
        {"steward": "key"},
        {"peer": "peer"},
        {"direct": "maybe"},
    ],
)
def test_a_link_record_that_says_what_cannot_be_is_no_record(fields: dict[str, object]) -> None:
    good = rulings.encode(link())
    with pytest.raises((MalformedRecord, InvalidName)):
        rulings.encode(link(**fields))
    assert rulings.decode("link", good) == link()


def test_an_older_link_record_is_read_as_it_was_meant() -> None:
    payload = f'{{"op":"1","link":"east","state":"on","origin":"{A}","channels":{{"general":"a.general"}}}}'.encode()
    assert rulings.decode("link", payload) == link()


def test_where_a_record_was_said_is_written_and_read_in_one_way() -> None:
    for hops in (1, 2, 8):
        assert read_origin(tuple(origin_fields(A, "general", hops))) == (A, "general", hops)
    assert values_of(origin_fields(A, "general", 1), "Td-Hops") == ()
    good = ("Td-Origin", f"{A} general")
    for fields in (
        (),
        (good, good),
        (("Td-Origin", A),),
        (("Td-Origin", f"{A} gene ral"),),
        (good, ("Td-Hops", "0")),
        (good, ("Td-Hops", "01")),
        (good, ("Td-Hops", "-1")),
        (good, ("Td-Hops", "2"), ("Td-Hops", "2")),
    ):
        assert read_origin(fields) is None, fields


def test_tokens_of_two_logs_have_no_order() -> None:
    early, late = Token(space=A, epoch="1", seq=5), Token(space=A, epoch="1", seq=9)
    assert early.is_before(late)
    assert not late.is_before(early)
    for other in (Token(space=B, epoch="1", seq=9), Token(space=A, epoch="2", seq=9)):
        with pytest.raises(UsageError):
            early.is_before(other)


def test_a_page_with_a_gap_has_nothing_more_to_give() -> None:
    through = Token(space=A, epoch="1", seq=5)
    gap = LinkGap(kind=GapKind.TOO_OLD, oldest=9, head=20, epoch="1")
    assert LinkPage(records=(), through=through, head=20, floor=1).more
    assert not LinkPage(records=(), through=through, head=5, floor=1).more
    assert not LinkPage(records=(), through=through, head=20, floor=10, gap=gap).more
