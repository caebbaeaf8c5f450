"""Which operation did what: once, bounded, and never something else."""

import pytest

from tidings.errors import ConflictError
from tidings.steward.writer import ADMIN, Completed, OperationDedup


def test_an_operation_is_answered_as_it_was_and_refused_for_anything_else() -> None:
    operations = OperationDedup()
    operations.note("ada", "op-1", Completed("member.a", 7, "opened"))
    operations.note("ada", "op-1", Completed("member.a", 9, "opened"))
    assert operations.outcome("ada", "op-1", "member.a", "opened", "resumed") == Completed("member.a", 7, "opened")
    assert operations.outcome("bob", "op-1", "member.a", "opened") is None, "ids are chosen by each for itself"
    for subject, state in (("member.b", "opened"), ("member.a", "left")):
        with pytest.raises(ConflictError, match="op-1 was used for something else"):
            operations.outcome("ada", "op-1", subject, state)


def test_administrators_do_one_thing_in_several_steps() -> None:
    operations = OperationDedup()
    operations.note(ADMIN, "op-1", Completed("acl.a", 7, "set"))
    assert operations.outcome(ADMIN, "op-1", "acl.b") is None


def test_the_memory_of_operations_is_bounded_for_each_who_chooses_them() -> None:
    operations = OperationDedup(kept=3)
    operations.note("ada", "only", Completed("member.a", 1, "opened"))
    for number in range(9):
        operations.note("bob", f"op-{number}", Completed("member.b", number, "opened"))
    assert operations.outcome("ada", "only", "member.a", "opened") is not None
    assert operations.outcome("bob", "op-5", "member.b", "opened") is None
    assert operations.outcome("bob", "op-6", "member.b", "opened") is not None
