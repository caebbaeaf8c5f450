"""Control requests that no program of ours would send are refused with a sentence, and none makes the steward fail."""

import itertools
import json
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator, FormatChecker, ValidationError, validators

from schema import control_schema
from tidings.contract.agents import DescribeRequest
from tidings.contract.catalogue import OPERATIONS
from tidings.contract.core import Moment
from tidings.errors import UsageError
from tidings.wire.message import new_id
from tidings_testing.raw_requests import raw_call
from tidings_testing.real_space import RealSpace
from tools.examples import example

#: one of each kind that strict JSON has, and the numbers at the edges
VALUES: tuple[Any, ...] = ("x", "", [], ["x"], [["x"]], {}, {"a": [1]}, [{"stage": ["read"], "seq": 1}], True, None)
VALUES += (0, -1, 7, 7.0, 1e2, -0.0, 1.5, 2**53 - 1, 2**53, 2.0**53)
VALUES += (2**63, 2**64, 2**80, 1e300, "9" * 400, "a.b", new_id())


async def test_a_client_is_told_what_it_may_ask_for(space: RealSpace) -> None:
    await space.add("ada")
    async with space.agent("ada") as ada:
        told = (await ada.control.call(DescribeRequest())).operations
    known = {(each["service"], each["do"]): each for each in told}
    assert set(known) == {(each.service, each.verb) for each in OPERATIONS.values() if each.caller == "agent"}
    assert known["member", "leave"]["arguments"] == {"pattern": "required", "joined": "optional"}
    assert (known["member", "join"]["once"], known["receipt", "wait"]["waits"]) == (True, 25.0)


def _check_base64(_validator: Any, _encoding: Any, value: Any, _schema: Any) -> Iterator[ValidationError]:
    try:
        msgspec.convert(value, bytes)
    except msgspec.ValidationError:
        yield ValidationError("not base64")


WithBase64: Any = validators.extend(Draft202012Validator, {"contentEncoding": _check_base64})  # type: ignore[no-untyped-call]


def test_the_schema_refuses_what_the_steward_refuses_and_takes_what_it_takes() -> None:
    schemas = control_schema()
    assert schemas.keys() >= OPERATIONS.keys()
    formats = FormatChecker(())
    formats.checks("date-time", msgspec.ValidationError)(lambda value: msgspec.convert(value, Moment) is not None)
    for name, operation in OPERATIONS.items():
        validator = WithBase64(schemas[name] | {"$defs": schemas}, format_checker=formats)
        whole = {field: example(operation.fields[field].type) for field in operation.fields}
        required = {field: value for field, value in whole.items() if operation.fields[field].required}
        tries = [{**required, field: value} for field, value in itertools.product(operation.fields, VALUES)]
        tries += [{k: v for k, v in required.items() if k != missing} for missing in required]
        for arguments in (whole, required, {**required, "unknown": 1}, *tries):
            try:
                operation.decode(arguments)
            except UsageError:
                taken = False
            else:
                taken = True
            body = {"op": "op-12345", "do": operation.verb, **arguments}
            assert validator.is_valid(body) == taken, (name, arguments)


UNKNOWN: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("confirm", "record", {"seq": 1, "stream": ["log"]}, "confirm record: `stream`: expected str, got array"),
    ("confirm", "record", {}, "confirm record: missing field `seq`"),
    ("member", "leave", {"pattern": "a", "joined": True}, "member leave: `joined`: expected int | null, got bool"),
    ("member", "deaf", {"channel": "a", "ids": ["x"] * 99}, "member deaf: `ids`: expected array of length <= 32"),
    (
        "receipt",
        "wait",
        {"id": new_id(), "to": "x", "stage": ["read"]},
        "receipt wait: `stage`: expected str, got array",
    ),
    ("receipt", "put", {"receipts": ["read"]}, "receipt put: `receipts[0]`: expected object, got str"),
    ("task", "fail", {"seq": True, "reason": "no"}, "task fail: `seq`: expected int, got bool"),
    ("member", "join", {"patern": "a"}, "member join: unknown field 'patern'; it has pattern, epoch, marks"),
    ("member", "list", {"of": "bob"}, "member list: unknown field 'of'; it has no fields"),
    (
        "member",
        "jion",
        {"pattern": "general"},
        "the service member has no 'jion': its verbs are deaf, join, leave, list",
    ),
)


async def test_what_is_not_known_is_refused_with_what_is(space: RealSpace) -> None:
    await space.add("mal")
    async with space.agent("mal") as mal:
        for service, do, arguments, said in UNKNOWN:
            with pytest.raises(UsageError) as refused:
                await raw_call(mal.control, service, do, **arguments)
            assert said in str(refused.value)


async def test_no_value_of_any_argument_makes_the_steward_fail(space: RealSpace) -> None:
    await space.add("mal", roles=["reviewer"], manage=["general"])
    assert space.steward is not None
    async with space.agent("mal") as mal:
        table: dict[tuple[str, str], Collection[str]] = {
            (each.service, each.verb): each.fields for each in OPERATIONS.values() if each.caller == "agent"
        }
        for (service, do), known in table.items():
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
