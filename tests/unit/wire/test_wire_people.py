"""Agents of another space: names are pinned to keys, and a statement is one steward's word for one link."""

import pytest

from tidings.errors import InvalidName, MalformedRecord
from tidings.wire.link_exchange import Person, Statement, read_people, read_statement, sort_people, state
from tidings.wire.signing import ACCOUNT, KeyPair, sign

SPACE = KeyPair.generate(ACCOUNT).id
A, B, C = sorted(KeyPair.generate().id for _ in range(3))


def person(agent: str, seq: int, name: str = "bob", **more: object) -> Person:
    return Person(id=agent, name=name, seq=seq, **more)  # type: ignore[arg-type]


def test_the_first_key_that_has_a_name_keeps_it_against_one_that_does_not_say_it_succeeds_it() -> None:
    first = sort_people([person(A, 1)], {})
    assert first.pins == {"bob": A}
    found = sort_people([person(A, 5, revoked=True), person(B, 6)], first.pins)
    assert (found.known, [each.id for each in found.refused], found.pins) == ((), [B], {"bob": A})


def test_a_key_that_succeeds_the_pinned_one_has_the_name_and_the_old_one_is_no_surprise_meanwhile() -> None:
    found = sort_people([person(A, 1), person(B, 6, succeeds=A)], {"bob": A})
    assert ([each.id for each in found.known], found.refused, found.pins) == ([B], (), {"bob": B})


def test_two_rotations_are_followed_whichever_of_their_records_is_read_first() -> None:
    # the record that takes B back is later than the one that grants C
    people = [person(A, 3, revoked=True), person(C, 4, succeeds=B), person(B, 5, revoked=True, succeeds=A)]
    found = sort_people(people, {"bob": A})
    assert ([each.id for each in found.known], found.refused, found.pins["bob"]) == ([C], (), C)


def test_keys_that_succeed_each_other_in_a_circle_come_to_an_end() -> None:
    found = sort_people([person(A, 1, succeeds=B), person(B, 2, succeeds=A)], {})
    assert len(found.known) == 1


def test_a_statement_counts_only_as_its_steward_signed_it_for_its_link_and_space() -> None:
    steward, other = KeyPair.generate(), KeyPair.generate()
    said = state(steward, SPACE, "link1", person(A, 1, roles=("reviewer",)))
    assert read_statement(said, SPACE, steward.id, "link1").roles == ("reviewer",)
    ruling = sign(steward, SPACE, "ruling", "link1", said.text.encode())
    for changed, space, key, link in (
        (Statement(said.text.replace("bob", "eve"), said.sig), SPACE, steward.id, "link1"),
        (Statement(said.text, ruling), SPACE, steward.id, "link1"),
        (said, KeyPair.generate(ACCOUNT).id, steward.id, "link1"),
        (said, SPACE, other.id, "link1"),
        (said, SPACE, steward.id, "link2"),
    ):
        with pytest.raises(MalformedRecord, match="not signed"):
            read_statement(changed, space, key, link)


@pytest.mark.parametrize("text", ['{"id": "x"}', '{"id": "x", "id": "y"}', "[]", "{", '{"name": "bob@acme"}'])
def test_what_a_steward_signed_and_is_about_nobody_is_refused(text: str) -> None:
    steward = KeyPair.generate()
    signed = Statement(text, sign(steward, SPACE, "person", "link1", text.encode()))
    with pytest.raises(MalformedRecord, match="of nobody"):
        read_statement(signed, SPACE, steward.id, "link1")


def test_a_name_with_a_space_in_it_is_no_agents_name() -> None:
    with pytest.raises(InvalidName):
        person(A, 1, name="bob@acme")


def test_a_page_that_is_none_is_refused() -> None:
    for said in ({}, {"people": [{"text": "x"}]}, {"people": [], "through": -1, "more": False, "epoch": "", "key": ""}):
        with pytest.raises(MalformedRecord):
            read_people(said)
