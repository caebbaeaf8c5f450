"""Every operation that the table declares has a handler, and nothing else has one."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import tidings.steward
from declared_answers import wrong_with
from tidings.contract.catalogue import OPERATIONS
from tidings.contract.channels import JoinRequest, MembershipsAnswer, MembershipsRequest
from tidings.contract.core import DECLARED, Caller
from tidings.rpc import dispatch
from tidings.rpc.dispatch import HANDLED, handler, handlers_of
from tidings.wire.subjects import SERVICES


def test_every_operation_has_a_handler_and_every_handler_an_operation() -> None:
    for module in pkgutil.iter_modules(tidings.steward.__path__):
        importlib.import_module(f"tidings.steward.{module.name}")
    handled = {name for server, name in HANDLED if server == "steward"}
    assert handled == OPERATIONS.keys()
    assert {name.split()[0] for name in handled} <= set(SERVICES)


def test_an_operation_has_one_handler() -> None:
    async def another(_self: object, _caller: Caller, _request: MembershipsRequest) -> MembershipsAnswer:
        return MembershipsAnswer((), 0)

    with pytest.raises(LookupError, match="member list has two handlers"):
        handler(MembershipsRequest)(another)


def test_a_handler_takes_the_request_it_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HANDLED", {})

    async def wrong(_self: object, _caller: Caller, _request: JoinRequest) -> MembershipsAnswer:
        return MembershipsAnswer((), 0)

    with pytest.raises(LookupError, match=r"takes a .*JoinRequest.*, not a MembershipsRequest"):
        handler(MembershipsRequest)(wrong)


def test_a_steward_does_not_start_while_an_operation_has_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HANDLED", {})

    class One:
        @handler(MembershipsRequest)
        async def memberships(self, _caller: Caller, _request: MembershipsRequest) -> MembershipsAnswer:
            return MembershipsAnswer((), 0)

    with pytest.raises(LookupError) as refused:
        handlers_of("steward", One())
    missing = "accept offer, accept redeem, access get, admin acknowledge"
    assert f"no handler for declared operations: {missing}" in str(refused.value)
    assert "member list" not in str(refused.value)
    monkeypatch.setitem(DECLARED, "steward", {"member list": MembershipsRequest.operation})
    assert set(handlers_of("steward", One())) == {"member list"}

    class Derived(One):
        pass

    assert set(handlers_of("steward", Derived())) == {"member list"}, "what is inherited counts"


def test_no_part_takes_the_steward_itself() -> None:
    """Import-linter holds the modules; this holds what is only written in quotes or as `Any`."""
    for path in Path(tidings.steward.__path__[0]).glob("*.py"):
        taken = [
            argument.arg
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for argument in node.args.args
        ]
        assert "steward" not in taken or path.name == "supervisor.py", path.name


def test_an_answer_is_held_against_what_the_table_declares() -> None:
    assert wrong_with("member list", {"memberships": [{"pattern": "a", "joined": 1}], "seq": 1}) is None
    assert wrong_with("member list", {"memberships": []}) == ("member list: Object missing required field `seq`")
    assert wrong_with("member list", {"memberships": [{"pattern": "a", "joined": 1, "left": 2}], "seq": 1})
    assert wrong_with("task claim", {"task": None}) is None
