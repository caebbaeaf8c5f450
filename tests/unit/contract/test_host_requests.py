"""Requests to the host: whatever is wrong with a field, the refusal has the right status and names that field."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidings.contract.catalogue import SERVED
from tidings.contract.core import Operation, operation
from tidings.contract.host import ChallengeRequest
from tidings.host.http_api import AppState, HostApi
from tidings.host.registry import Scope
from tools.field_faults import accepted_kinds, field_faults, oversize_requests, whole

SESSION = SimpleNamespace(id="session", program="test", scope=Scope("main", "A", "U", "ada"))


def api() -> HostApi:
    """The application of the host, with handlers that answer anything."""

    async def answer(*_: Any) -> dict[str, Any]:
        return {}

    async def find(_token: str) -> Any:
        return SESSION

    host = SimpleNamespace(attend=lambda *_: None)
    sessions = SimpleNamespace(on_end=lambda _: None, find=find, ending=lambda _: asyncio.Event())
    claims = SimpleNamespace(held=lambda _: None, heard=lambda _: None)
    state = AppState(*cast("Any", (host, sessions, claims, Path("s"), asyncio.Event(), 0.0)))
    return HostApi(state, dict.fromkeys((each.name for each in SERVED.values()), answer), answer, answer)


async def post(path: str, body: bytes, pieces: int = 1) -> tuple[int, str]:
    """Status and message of the answer to a request without `Content-Length`, which comes in so many pieces."""
    size = max(1, len(body) // pieces)
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(event: Any) -> None:
        sent.append(event)

    headers = [(b"authorization", b"Bearer token"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await api()(scope, receive, send)
    answer = json.loads(b"".join(event.get("body", b"") for event in sent))
    return sent[0]["status"], answer.get("error", {}).get("message", "")


@pytest.mark.parametrize("each", SERVED.values(), ids=lambda each: each.name)
async def test_an_invalid_field_is_refused_by_its_name(each: Operation) -> None:
    async def ask(**fields: Any) -> tuple[int, str]:
        return await post(each.path, json.dumps(fields).encode())

    async def refused(named: str, **fields: Any) -> None:
        status, message = await ask(**fields)
        assert (status, named in message, message.startswith(each.name)) == (400, True, True), (fields, message)

    assert (await ask(**whole(each)))[0] == 200
    if each.server == "host":
        await refused("unknown field 'op'", **whole(each), op="operation-1")
    else:
        assert (await ask(**whole(each), op="operation-1", wait=5))[0] == 200
        for name, value in (("op", 7), ("wait", "long"), ("wait", -1), ("wait", None)):
            await refused(f"`{name}`", **whole(each), **{name: value})
    for case in field_faults(each):
        await refused(case.named, **case.arguments)
    for name, field in each.fields.items():
        if "null" in accepted_kinds(field.type):
            assert (await ask(**whole(each) | {name: None}))[0] == 200, name
    for case in oversize_requests(each):
        for pieces in (1, 7):
            status, message = await post(each.path, json.dumps(case.arguments).encode(), pieces)
            assert (status, case.named in message) == (413, True), message


async def test_a_field_that_takes_any_json_keeps_what_it_was_given() -> None:
    given = {"channel": "general", "data": 3.0}
    request: Any = SERVED["/v1/message/send"].decode(given)
    assert isinstance(request.data, float)
    assert SERVED["/v1/outbox/list"].decode({"limit": 3.0}) == SERVED["/v1/outbox/list"].decode({"limit": 3})


def test_two_operations_cannot_have_one_path() -> None:
    with pytest.raises(LookupError, match="two operations have the path /v1/session/challenge"):
        operation("session challenge", host=True)(ChallengeRequest)
