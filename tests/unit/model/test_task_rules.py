"""A task has at most one holder, a worker at most one task, and what is done stays done."""

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidings.errors import ConflictError, DeniedError
from tidings.model.task_rules import (
    MAX_ATTEMPTS,
    OUTCOMES_KEPT,
    EndedTask,
    TaskBook,
    TaskState,
    asked_deadline,
    give,
    is_overdue,
    is_silent,
    take_back,
)
from tidings.wire.message import ExtensionPart, Sender, compose

WORKERS = ("bob", "cat", "dan")
SENDER = Sender("U" + "A" * 55, "ada")


def task(seq: int, **fields: object) -> TaskState:
    return TaskState(seq=seq, time_ns=seq * 10, role="r", asker="ada", id=f"id-{seq}", **fields)  # type: ignore[arg-type]


def ended(state: TaskState, how: str, record: int) -> EndedTask:
    return EndedTask(
        seq=state.seq,
        time_ns=state.time_ns,
        role=state.role,
        asker=state.asker,
        id=state.id,
        state=how,  # type: ignore[arg-type]
        record=record,
        worker=state.worker,
        workers=state.workers,
        attempt=state.attempt,
    )


class Desk(RuleBasedStateMachine):
    """Workers come, beat, die, fail and finish in any order, over a few tasks; the steward restarts at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.book = TaskBook()
        self.now = 1_000.0
        self.records = 0
        self.done: dict[int, EndedTask] = {}
        self.last_attempt: dict[int, int] = {}
        self.written: dict[int, TaskState] = {}

    def keep(self, state: TaskState) -> None:
        self.written[state.seq] = state
        self.book.put(state)

    def end(self, state: TaskState, how: str) -> None:
        self.records += 1
        outcome = ended(state, how, self.records)
        self.book.end(outcome)
        self.written.pop(state.seq, None)
        if how == "done":
            self.done[state.seq] = outcome

    @rule(seq=st.integers(1, 6))
    def arrives(self, seq: int) -> None:
        if seq not in self.book.open and self.book.outcome_of(seq, seq * 10) is None:
            self.book.put(task(seq))

    @rule(worker=st.sampled_from(WORKERS))
    def claims(self, worker: str) -> None:
        found = next(iter(self.book.ready("r", self.now)), None)
        if found is None or self.book.held_by(worker) is not None:
            return
        held = give(found, worker, None, self.now)
        assert held.attempt == self.last_attempt.get(held.seq, 0) + 1
        self.last_attempt[held.seq] = held.attempt
        self.keep(held)

    @rule(worker=st.sampled_from(WORKERS), how=st.sampled_from(["done", "fail", "give up", "silent"]))
    def settles(self, worker: str, how: str) -> None:
        held = self.book.held_by(worker)
        if held is None:
            return
        if how == "done":
            self.end(held, "done")
        elif how == "give up":
            self.end(held, "dead")
        else:
            waiting = take_back(held, how, self.now, pause=1.0 if how == "fail" else 0.0)
            assert (waiting is None) == (held.tries >= MAX_ATTEMPTS)
            self.end(held, "dead") if waiting is None else self.keep(waiting)

    @rule(worker=st.sampled_from(WORKERS), seq=st.integers(1, 6))
    def a_worker_without_the_hold_is_refused(self, worker: str, seq: int) -> None:
        state = self.book.open.get(seq)
        if state is None or state.worker != worker:
            with pytest.raises((ConflictError, DeniedError)):
                self.book.require(seq, worker)

    @rule(seq=st.integers(1, 6))
    def is_revived(self, seq: int) -> None:
        dead = self.book.outcome_of(seq, seq * 10)
        if dead is not None and dead.state == "dead":
            self.keep(task(seq, attempt=dead.attempt, attempts_before=dead.attempt, revived_from=dead.record))

    @rule(seconds=st.floats(0.1, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.written or self.done)
    @rule()
    def the_steward_restarts(self) -> None:
        """What was written down is all it knows; what was never handed out comes from the broker again."""
        again = TaskBook()
        for outcome in self.book.outcomes.values():
            again.end(outcome)
        for state in self.written.values():
            again.put(msgspec.convert(msgspec.to_builtins(state), TaskState))
        self.book = again

    @invariant()
    def nobody_shares_a_task_and_nobody_has_two(self) -> None:
        holders = [state.worker for state in self.book.open.values() if state.worker is not None]
        assert len(holders) == len(set(holders))
        for worker in WORKERS:
            held = self.book.held_by(worker)
            assert (held is not None) == (worker in holders)
            assert held is None or held.worker == worker

    @invariant()
    def done_is_final(self) -> None:
        for seq, outcome in self.done.items():
            assert self.book.outcome_of(seq, outcome.time_ns) == outcome
            assert seq not in self.book.open

    @invariant()
    def no_task_has_more_tries_than_allowed(self) -> None:
        assert all(state.tries <= MAX_ATTEMPTS for state in self.book.open.values())


TestDesk = Desk.TestCase


def test_the_deadline_is_the_askers_or_an_hour_from_the_claim() -> None:
    assert give(task(1), "bob", None, 100.0).deadline == 3_700.0
    assert give(task(1, due=150.0), "bob", None, 100.0).deadline == 150.0
    assert is_overdue(task(1, due=99.0), 100.0)
    assert not is_overdue(task(1), 1e12)


@pytest.mark.parametrize(
    ("seconds", "due"), [(5, 6.0), (0.5, 1.5), (0, None), (-1, None), (True, None), ("5", None), (1e9, None)]
)
def test_a_deadline_that_makes_no_sense_is_none(seconds: object, due: float | None) -> None:
    part = ExtensionPart("dev.tidings.task", {"kind": "dev.tidings.task", "deadline_s": seconds})
    assert asked_deadline(compose(SENDER, text="x", parts=[part]), 1_000_000_000) == due


def test_silence_is_only_that_of_a_holder() -> None:
    assert not is_silent(task(1), 1e12, 30)
    held = give(task(1), "bob", None, 100.0)
    assert (is_silent(held, 130.0, 30), is_silent(held, 131.0, 30)) == (False, True)


def test_pauses_double_and_end() -> None:
    state, pauses = task(1), []
    while True:
        waiting = take_back(give(state, "bob", None, 0.0), "no", 0.0, pause=100.0)
        if waiting is None:
            break
        pauses.append(waiting.not_before)
        state = waiting
    assert pauses == [100.0, 200.0, 300.0, 300.0]


def test_the_memory_of_settled_tasks_is_bounded() -> None:
    book = TaskBook()
    for seq in range(OUTCOMES_KEPT + 10):
        book.end(ended(task(seq + 1), "done", seq))
    assert len(book.outcomes) == len(book._by_id) == OUTCOMES_KEPT
    assert book.find("ada", "id-1") is None
