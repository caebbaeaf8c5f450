"""Control requests that no program of ours would send are refused with a sentence, and none makes the steward fail."""

import itertools
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from schema import control_schema
from tidings.errors import UsageError
from tidings.steward.requests import ControlRequest, check_arguments
from tidings.wire.ids import new_id
from tidings.wire.operations import OPERATIONS
from tidings.wire.subjects import AGENT_SERVICES
from tidings_testing.real_space import RealSpace

#: one of each kind that strict JSON has, and the numbers at the edges
VALUES: tuple[Any, ...] = ("x", "", [], ["x"], [["x"]], {}, {"a": [1]}, [{"stage": ["read"], "seq": 1}], True, None)
VALUES += (0, -1, 7, 7.0, 1e2, -0.0, 1.5, 2**53 - 1, 2**53, 2.0**53)
VALUES += (2**63, 2**64, 2**80, 1e300, "9" * 400, "a.b", new_id())


async def test_a_client_is_told_what_it_may_ask_for(space: RealSpace) -> None:
    await space.add("ada")
    async with space.agent("ada") as ada:
        told = (await ada.control.call("health", "describe"))["operations"]
    known = {(each["service"], each["do"]): each for each in told}
    assert set(known) == {each for each in OPERATIONS if each[0] in AGENT_SERVICES}
    assert known["member", "leave"]["arguments"] == {"pattern": "a text", "joined": "a whole number"}
    assert (known["member", "join"]["once"], known["receipt", "wait"]["waits"]) == (True, 25.0)


def test_the_schema_refuses_what_the_steward_refuses_and_takes_what_it_takes() -> None:
    schemas = control_schema()
    assert set(schemas) == {" ".join(each) for each in OPERATIONS}
    for (service, do), operation in OPERATIONS.items():
        for name, value in itertools.product(operation.arguments, VALUES):
            request = ControlRequest(service, "U", "op-12345", do, {name: value})
            body = {"op": request.op, "do": do, name: value}
            try:
                check_arguments(request)
            except UsageError:
                taken = False
            else:
                taken = True
            assert Draft202012Validator(schemas[f"{service} {do}"]).is_valid(body) == taken, (service, do, name, value)


UNKNOWN: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("confirm", "record", {"seq": 1, "stream": ["log"]}, "confirm record: `stream` must be a text"),
    ("receipt", "wait", {"id": new_id(), "stage": ["read"]}, "receipt wait: `stage` must be a text"),
    ("receipt", "put", {"receipts": ["read"]}, "receipt put: `receipts` must be a list of objects"),
    ("task", "fail", {"seq": True, "reason": "no"}, "task fail: `seq` must be a whole number"),
    ("member", "join", {"patern": "general"}, "member join takes the arguments epoch, marks, pattern, not 'patern'"),
    ("member", "list", {"of": "bob"}, "member list takes no arguments, not 'of'"),
    (
        "member",
        "jion",
        {"pattern": "general"},
        "the service member has no 'jion': its verbs are deaf, join, leave, list",
    ),
    ("page", "get", {}, "the service page has no 'get': it has no verbs yet"),
)


async def test_what_is_not_known_is_refused_with_what_is(space: RealSpace) -> None:
    await space.add("mal")
    async with space.agent("mal") as mal:
        for service, do, arguments, said in UNKNOWN:
            with pytest.raises(UsageError) as refused:
                await mal.control.call(service, do, **arguments)
            assert said in str(refused.value)


async def test_no_value_of_any_argument_makes_the_steward_fail(space: RealSpace) -> None:
    await space.add("mal", roles=["reviewer"], manage=["general"])
    assert space.steward is not None
    async with space.agent("mal") as mal:
        for (service, do), operation in OPERATIONS.items():
            known = operation.arguments
            if service not in AGENT_SERVICES:
                continue
            likely = {"id": new_id(), "to": mal.id, "pattern": "general", "channel": "general", "role": "reviewer"}
            base = {name: likely[name] for name in known if name in likely}
            quick = {name: 0 for name in known if name in ("wait", "timeout")}
            for name, value in itertools.product(known, VALUES):
                if name in quick and value in (7, 100, 2**53 - 1, 1.5, None):
                    continue  # it would wait for that long
                body = {"op": new_id(), "do": do, **base, **quick, name: value}
                reply = await mal.connection.request(
                    space.subjects.control(service, mal.id), json.dumps(body).encode(), timeout=10
                )
                refused = json.loads(reply.data).get("error", {})
                assert refused.get("code") != "failed", (service, do, name, value)
    assert space.steward.dispatcher.counts["failed"] == 0
