"""Every field of every operation of the steward: null, missing, unknown, of the wrong type, too large."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tidings.contract.catalogue import OPERATIONS
from tidings.contract.core import Caller, EmptyAnswer, Operation
from tidings.nats.core import Msg
from tidings.steward.context import Lifecycle
from tidings.steward.requests import Dispatcher
from tidings.wire.message import new_id
from tidings.wire.subjects import Subjects
from tools.field_faults import accepted_kinds, field_faults, oversize_requests, whole

SUBJECTS = Subjects("main")
SENDER = "U" + "A" * 55


class RecordingSteward:
    """A dispatcher whose handlers only record the requests that reach them."""

    def __init__(self) -> None:
        lease: Any = SimpleNamespace(is_fresh=True)
        self.handled: list[Any] = []
        self.replies: list[bytes] = []
        self.life = Lifecycle()
        self.dispatcher = Dispatcher(SUBJECTS, lease, self.life, lambda _sender, _why: None)
        self.dispatcher.handlers = dict.fromkeys(OPERATIONS, self._handle)

    async def _handle(self, _caller: Caller, request: Any) -> EmptyAnswer:
        self.handled.append(request)
        return EmptyAnswer()

    async def publish(self, _subject: str, payload: bytes) -> None:
        self.replies.append(payload)

    async def ask(self, service: str, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Takes a request as it comes from the broker and returns its answer."""
        body = json.dumps({"op": new_id(), "do": do, **arguments}).encode()
        subject = SUBJECTS.control(service, SENDER).encode()
        connection: Any = self
        await self.dispatcher.take(connection, Msg(1, subject, b"_INBOX.1", b"", body))
        await self.life.finish(5)
        answer: dict[str, Any] = json.loads(self.replies.pop())
        assert not self.replies, "a request has one answer"
        return answer


@pytest.fixture
def steward() -> RecordingSteward:
    return RecordingSteward()


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
async def test_an_invalid_field_is_refused_by_its_name_before_any_handler(
    steward: RecordingSteward, operation: Operation
) -> None:
    """A body that is too large as a whole is refused with the service and its largest field."""
    assert (await steward.ask(operation.service, operation.verb, whole(operation)))["ok"]
    assert len(steward.handled) == 1
    for case in (*field_faults(operation), *oversize_requests(operation)):
        answer = await steward.ask(operation.service, operation.verb, case.arguments)
        assert not answer["ok"], case.fault
        assert answer["error"]["code"] == "usage", (case.fault, answer)
        assert case.named in answer["error"]["message"], (case.fault, answer)
    assert len(steward.handled) == 1
    assert steward.dispatcher.counts["failed"] == 0


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
async def test_null_and_missing_reach_the_handler_as_what_they_are(
    steward: RecordingSteward, operation: Operation
) -> None:
    """A missing field has its default. `null` is the value None, also where the default is another."""
    for name, field in operation.fields.items():
        attribute = field.name
        if not field.required:
            assert (
                await steward.ask(
                    operation.service, operation.verb, {k: v for k, v in whole(operation).items() if k != name}
                )
            )["ok"]
            assert getattr(steward.handled.pop(), attribute) == getattr(_smallest(operation), attribute)
        if "null" in accepted_kinds(field.type):
            assert (await steward.ask(operation.service, operation.verb, {**whole(operation), name: None}))["ok"]
            assert getattr(steward.handled.pop(), attribute) is None


REFUSED: tuple[tuple[str, str, dict[str, Any], str], ...] = (
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


@pytest.mark.parametrize(("service", "do", "arguments", "message"), REFUSED)
async def test_a_refusal_says_what_is_wrong_and_what_there_is(
    steward: RecordingSteward, service: str, do: str, arguments: dict[str, Any], message: str
) -> None:
    answer = await steward.ask(service, do, arguments)
    assert message in answer["error"]["message"]


def _smallest(operation: Operation) -> Any:
    """Returns a request with its required fields only, as a program makes it."""
    required = {field.name: None for field in operation.fields.values() if field.required}
    return operation.request(**required)
