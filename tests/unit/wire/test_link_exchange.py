"""Tasks on the way over a link, and what another space says of them: only what can be read is taken."""

from typing import Any

import msgspec
import pytest

from tidings.contract.links import LinkProgressRequest
from tidings.errors import InvalidName, MalformedRecord, UsageError
from tidings.wire import message as wire
from tidings.wire.link_exchange import (
    LONGEST_AGE,
    TASKS_PER_PAGE,
    LinkedTask,
    Person,
    Statement,
    ToldTask,
    check_told_tasks,
    read_age,
    read_statement,
    read_tasks,
    sort_people,
    state,
)
from tidings.wire.message import Sender, compose, new_id
from tidings.wire.names import role_elsewhere
from tidings.wire.seal import seal_task
from tidings.wire.signing import ACCOUNT, KeyPair, sign

MAIN, ACME, OTHER = (KeyPair.generate(ACCOUNT).id for _ in range(3))
ADA, RITA = KeyPair.generate(), KeyPair.generate()


def task(*, sealed: bool = True, to: str = ACME, kind: str = "task", space: str = MAIN) -> LinkedTask:
    message = compose(Sender(ADA.id, "ada"), text="is this right?")
    payload = wire.encode(seal_task(ADA, [RITA.id], message) if sealed else message)
    signature = sign(ADA, space, kind, role_elsewhere("reviewer", to), payload)
    return LinkedTask(seq=3, sender=ADA.id, role="reviewer", sig=signature, payload=payload, age=5)


def told(**changes: Any) -> dict[str, Any]:
    return {"sender": ADA.id, "id": new_id(), "seq": 3, "state": "claimed", "worker": RITA.id, "attempt": 1} | changes


def test_a_task_that_its_asker_signed_for_a_role_of_this_space_is_read() -> None:
    page = read_tasks([msgspec.to_builtins(task())], more=True)
    (found,) = page.tasks
    assert found.message(MAIN, ACME).sender.id == ADA.id
    assert (page.more, page.unread) == (True, 0)


@pytest.mark.parametrize(
    "other",
    [
        task(to=OTHER),
        task(kind="dm"),
        task(space=OTHER),
        msgspec.structs.replace(task(), role="tester"),
        msgspec.structs.replace(task(), sender=RITA.id),
        msgspec.structs.replace(task(), sig="A" * 86),
    ],
    ids=["for another space", "no task", "of another space", "another role", "another asker", "unsigned"],
)
def test_any_other_is_none(other: LinkedTask) -> None:
    with pytest.raises(MalformedRecord):
        other.message(MAIN, ACME)


@pytest.mark.parametrize(
    "row",
    [
        7,
        {},
        msgspec.to_builtins(task()) | {"seq": 0},
        msgspec.to_builtins(task()) | {"age": -1},
        msgspec.to_builtins(task()) | {"age": LONGEST_AGE + 1},
        msgspec.to_builtins(task()) | {"sender": "ada"},
        msgspec.to_builtins(task()) | {"role": "reviewer@acme"},
    ],
)
def test_a_row_that_is_no_task_keeps_no_other_back(row: Any) -> None:
    page = read_tasks([row, msgspec.to_builtins(task())], more=False)
    assert (len(page.tasks), page.unread) == (1, 1)


def read_progress(said: Any) -> tuple[ToldTask, ...]:
    """As a steward reads it in a request of a linked space."""
    request = LinkProgressRequest.operation.decode({"tasks": said})
    assert isinstance(request, LinkProgressRequest)
    check_told_tasks(request.tasks)
    return request.tasks


def test_how_far_tasks_are_is_read() -> None:
    (found,) = read_progress([told(state="done", result="eA==", sig="s")])
    assert (found.state, found.result) == ("done", b"x")


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("x", UsageError),
        ([told(state="held")], MalformedRecord),
        ([told(state="gone")], MalformedRecord),
        ([told(id="7")], MalformedRecord),
        ([told(worker="rita")], MalformedRecord),
        ([told(seq=0)], UsageError),
        ([told(why="x" * 500)], UsageError),
        ([told()] * (TASKS_PER_PAGE + 1), UsageError),
    ],
)
def test_what_does_not_say_it_is_refused(said: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        read_progress(said)


@pytest.mark.parametrize(
    ("said", "found"), [([], 0), (["7"], 7), (["-7"], 0), (["7", "8"], 0), (["9" * 13], 0), (["٧"], 0), ([""], 0)]
)
def test_how_long_it_was_underway_is_a_number_or_nothing(said: list[str], found: int) -> None:
    assert read_age(tuple(("Td-Age", each) for each in said)) == found


# --- Agents of another space: names are pinned to keys, and a statement is one steward's word for one link ---


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
