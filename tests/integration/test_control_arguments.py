"""Control requests that no program of ours would send are refused with a sentence, and none makes the steward fail."""

import itertools
import json
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator, FormatChecker, ValidationError, validators

from linked_spaces import linked, peer_of, worker_of
from schema import control_schema
from tidings.contract.admin import IssuedRequest
from tidings.contract.agents import DescribeRequest
from tidings.contract.catalogue import OPERATIONS
from tidings.contract.core import CallerKind, Moment
from tidings.errors import UsageError
from tidings.rpc.control import ControlClient
from tidings.wire.message import new_id
from tidings_testing.raw_requests import raw_call
from tidings_testing.real_space import RealSpace
from tools.examples import example
from tools.field_faults import field_faults, oversize_requests

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


@asynccontextmanager
async def clients(space: RealSpace) -> AsyncIterator[dict[CallerKind, ControlClient]]:
    """A client for each kind of caller that a space has without an invitation."""
    await space.add("mal", roles=["reviewer"], manage=["general"])
    made = await linked(space)
    async with (
        space.agent("mal") as mal,
        space.administer() as admin,
        worker_of(space) as worker,
        peer_of(space, made.creds) as peer,
    ):
        await admin.call(IssuedRequest())
        assert admin._control is not None
        yield {"agent": mal.control, "admin": admin._control, "link worker": worker, "peer": peer.control}


async def test_an_invalid_field_is_refused_by_its_name_and_changes_nothing(space: RealSpace) -> None:
    """As `tests/unit/contract/test_fields.py`, with every byte through the broker and the real handlers behind it."""
    steward, s = space.steward, space.subjects
    assert steward is not None
    async with clients(space) as by_caller, space.core() as js:

        async def state() -> object:
            return [
                (await js.info(stream))["state"]["last_seq"]
                for stream in (s.log_stream, s.direct_stream, s.task_stream)
            ]

        before, refused, sent = await state(), steward.dispatcher.counts["refused"], 0
        for operation in OPERATIONS.values():
            if (control := by_caller.get(operation.caller)) is None:
                continue
            cases = [*field_faults(operation)]
            if operation.caller != "peer":  # the broker takes at most 64 KiB from a peer
                cases += [*oversize_requests(operation)][:1]
            for case in cases:
                with pytest.raises(UsageError) as error:
                    await raw_call(control, operation.service, operation.verb, **case.arguments)
                assert case.named in str(error.value), case.fault
                sent += 1
        assert await state() == before
    counts = steward.dispatcher.counts
    assert (counts["refused"] - refused, counts["failed"]) == (sent, 0)


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
