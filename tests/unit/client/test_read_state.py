"""What a reader remembers by sequence counts only of the log it is of."""

import asyncio

import pytest

from tidings.client import read_state
from tidings.client.read_state import ReadState
from tidings.wire.records import Stamp


def remembering() -> ReadState:
    state = ReadState()
    state.marks.note(Stamp(7, "mark"))
    state.known.add(1, 7)
    return state


def test_a_sequence_is_not_known_while_the_log_may_be_another_one() -> None:
    state = remembering()
    state.marks.doubt()
    assert not state.is_known(7)
    state.marks.checked(state.marks.session)
    assert state.is_known(7)
    state.marks.doubt()
    state.rewind("epoch", 5)
    state.marks.checked(state.marks.session)
    assert [state.is_known(seq) for seq in (5, 6, 7)] == [True, False, False]


async def test_the_answer_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    state = remembering()
    state.marks.doubt()
    waiting = asyncio.create_task(state.marks.until_checked())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    state.marks.checked(state.marks.session)
    await asyncio.wait_for(waiting, 5)
    monkeypatch.setattr(read_state, "CHECK_PATIENCE", 0.1)
    state.marks.doubt()
    await asyncio.wait_for(state.marks.until_checked(), 5)
    assert state.is_known(7), "nobody asks, or nobody answers: what is remembered counts"
    state.epoch, state.copies_of = "old", "new"
    assert not state.is_known(7), "unless the copies say that they are of another log"


async def test_who_remembers_nothing_waits_for_nothing() -> None:
    state = ReadState()
    state.marks.doubt()
    await asyncio.wait_for(state.marks.until_checked(), 1)
