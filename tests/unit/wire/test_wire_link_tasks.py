"""Tasks on the way over a link, and what another space says of them: only what can be read is taken."""

from typing import Any

import msgspec
import pytest

from tidings.errors import MalformedRecord
from tidings.wire import message as wire
from tidings.wire.link_exchange import LONGEST_AGE, TASKS_PER_PAGE, LinkedTask, read_age, read_tasks, read_told_tasks
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
    page = read_tasks({"tasks": [msgspec.to_builtins(task())], "more": True})
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
    "said", [{}, [], "x", {"tasks": "x"}, {"tasks": [msgspec.to_builtins(task())] * (TASKS_PER_PAGE + 1)}]
)
def test_what_is_no_page_is_refused(said: Any) -> None:
    with pytest.raises(MalformedRecord):
        read_tasks(said)


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
    page = read_tasks({"tasks": [row, msgspec.to_builtins(task())]})
    assert (len(page.tasks), page.unread) == (1, 1)


def test_how_far_tasks_are_is_read() -> None:
    (found,) = read_told_tasks([told(state="done", result="eA==", sig="s")])
    assert (found.state, found.result) == ("done", b"x")


@pytest.mark.parametrize(
    "said",
    [
        "x",
        [told(state="held")],
        [told(state="gone")],
        [told(id="7")],
        [told(worker="rita")],
        [told(seq=0)],
        [told(why="x" * 500)],
        [told()] * (TASKS_PER_PAGE + 1),
    ],
)
def test_what_does_not_say_it_is_refused(said: Any) -> None:
    with pytest.raises(MalformedRecord):
        read_told_tasks(said)


@pytest.mark.parametrize(
    ("said", "found"), [([], 0), (["7"], 7), (["-7"], 0), (["7", "8"], 0), (["9" * 13], 0), (["٧"], 0), ([""], 0)]
)
def test_how_long_it_was_underway_is_a_number_or_nothing(said: list[str], found: int) -> None:
    assert read_age(tuple(("Td-Age", each) for each in said)) == found
