"""Control requests: decoded strictly, held against the table of operations, answered always.

An unanswered request through a service import stays in the broker's memory, so whatever arrives with a reply gets
one: junk, unknown services, wrong senders, failures of ours. This module turns bytes into a request and results or
errors into an answer, and says which function handles which operation (`handles`); who works on it when is
`dispatch.py`'s part. After `check_arguments` a handler meets no value of a kind it did not think of; which arguments
are needed is the handler's to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from tidings.errors import MalformedMessage, TidingsError, UsageError
from tidings.wire import strict_json
from tidings.wire.message import is_message_id
from tidings.wire.operations import COUNT, COUNTS, FIELD, FLAG, MOST, NUMBER, OPERATIONS, ROWS, TEXTS, Kind
from tidings.wire.records import parse_time
from tidings.wire.subjects import SERVICES, Control, Subjects

MAX_REQUEST = 128 * 1024
Answer = Mapping[str, Any]
#: a request that only waits gives its place among those worked on to another
Idle = Callable[[], AbstractAsyncContextManager[None]]

#: RFC 3339 in UTC, as docs/wire.md has it; Python reads many more
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z")


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """One control request. The sender is the broker's word, not the payload's."""

    service: str
    sender: str
    op: str
    do: str
    arguments: Mapping[str, Any]

    def text(self, name: str) -> str:
        value = self.arguments.get(name)
        if not isinstance(value, str) or not value:
            raise UsageError(f"{self.service} {self.do} needs `{name}`, a text")
        return value

    def optional(self, name: str, kind: type[Any]) -> Any:
        value = self.arguments.get(name)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise UsageError(f"{self.service} {self.do}: `{name}` must be a {kind.__name__}")
        return value

    def time_ns(self, name: str) -> int | None:
        """A moment among the arguments, in nanoseconds since 1970."""
        text = self.optional(name, str)
        try:
            if text is not None and not _MOMENT.fullmatch(text):
                raise ValueError(text)
            return None if text is None else parse_time(text)
        except ValueError as error:
            said = f"{self.service} {self.do}: `{name}` is a time such as 2025-11-15T12:00:00.000Z"
            raise UsageError(said) from error

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.arguments.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{self.service} {self.do}: `{name}` must be a list of texts")
        return tuple(value)

    def message_id(self) -> str:
        mid = self.text("id")
        if not is_message_id(mid):
            raise UsageError(f"{mid[:64]!r} is not a message id")
        return mid


Handler = Callable[[ControlRequest], Awaitable[Answer]]
Method = TypeVar("Method", bound=Callable[..., Awaitable[Answer]])
#: (service, do) -> the function that handles it, of every module that was loaded
HANDLED: dict[tuple[str, str], str] = {}


def handles(service: str, do: str) -> Callable[[Method], Method]:
    """Mark a method as the handler of a declared operation: it takes a request and answers it."""
    if (service, do) not in OPERATIONS:
        raise LookupError(f"{service} {do} has a handler and is not declared in wire/operations.py")

    def mark(method: Method) -> Method:
        before = HANDLED.setdefault((service, do), method.__qualname__)
        if before != method.__qualname__:
            raise LookupError(f"{service} {do} has two handlers: {before} and {method.__qualname__}")
        vars(method)["operation"] = (service, do)
        return method

    return mark


def handlers_of(*parts: object) -> dict[tuple[str, str], Handler]:
    """The handlers these objects have. LookupError if an operation of the table has none."""
    found: dict[tuple[str, str], Handler] = {}
    for part in parts:
        for name, method in vars(type(part)).items():
            if (operation := getattr(method, "operation", None)) is not None:
                found[operation] = getattr(part, name)
    if missing := sorted(set(OPERATIONS) - set(found)):
        raise LookupError(f"declared in wire/operations.py and not handled: {', '.join(map(' '.join, missing))}")
    return found


def parse_request(subjects: Subjects, subject: str, payload: bytes) -> ControlRequest:
    parsed = subjects.parse(subject)
    if not isinstance(parsed, Control):
        raise UsageError(
            f"this is not a control subject: td.<space>.ctl.<service>.<sender>; the services are {', '.join(SERVICES)}"
        )
    if len(payload) > MAX_REQUEST:
        raise UsageError(f"a control request has at most {MAX_REQUEST} bytes, this one has {len(payload)}")
    try:
        body = strict_json.loads(payload)
    except MalformedMessage as error:
        raise UsageError(f"a control request is strict JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError("a control request is a JSON object")
    op, do = body.pop("op", None), body.pop("do", None)
    if not isinstance(op, str) or not 8 <= len(op) <= 64 or not isinstance(do, str):
        raise UsageError("a control request needs `op` (8 to 64 characters, yours to choose) and `do`")
    return ControlRequest(parsed.service, parsed.sender, op, do, {name: _whole(value) for name, value in body.items()})


def _whole(value: Any) -> Any:
    """`3.0` and `3e0` are the whole number 3, as JSON Schema and JavaScript have it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def answer(result: Mapping[str, Any]) -> bytes:
    return json.dumps({"ok": True, **result}, separators=(",", ":")).encode()


def refusal(error: BaseException) -> bytes:
    """A refusal names its class of error; what was not foreseen is said without details of ours."""
    if isinstance(error, TidingsError):
        code, message = error.code, str(error)
    else:
        code, message = "failed", f"the steward failed ({type(error).__name__}); its log says more"
    return json.dumps({"ok": False, "error": {"code": code, "message": message[:1000]}}).encode()


def check_arguments(request: ControlRequest) -> None:
    """Raise UsageError for a verb, an argument or a kind of value that the table does not know."""
    operation = OPERATIONS.get((request.service, request.do))
    if operation is None:
        raise UsageError(_no_such_verb(request))
    known = operation.arguments
    unknown = sorted(set(request.arguments) - set(known))
    if unknown:
        named = ", ".join(repr(name[:64]) for name in unknown[:8])
        takes = f"the arguments {', '.join(sorted(known))}" if known else "no arguments"
        raise UsageError(f"{request.service} {request.do} takes {takes}, not {named}")
    for name, value in request.arguments.items():
        kind = known[name]
        if value is not None and not _is(kind, value):
            raise UsageError(f"{request.service} {request.do}: `{name}` must be {kind.words}")


def _no_such_verb(request: ControlRequest) -> str:
    verbs = [do for service, do in OPERATIONS if service == request.service]
    known = f"its verbs are {', '.join(sorted(verbs))}" if verbs else "it has no verbs yet"
    return f"the service {request.service} has no {request.do[:64]!r}: {known}"


def _is(kind: Kind, value: Any) -> bool:
    if kind is FIELD:
        return True
    if isinstance(value, bool):
        return kind is FLAG
    if kind is COUNT and isinstance(value, float):
        return value.is_integer() and -MOST <= value <= MOST
    if not isinstance(value, kind.types):
        return False
    if kind in (COUNT, NUMBER):
        return bool(-MOST <= value <= MOST)
    if kind is COUNTS:
        return all(type(item) is int and -MOST <= item <= MOST for item in value)
    items: list[Any] = value if kind in (TEXTS, ROWS) else []
    return all(isinstance(item, str if kind is TEXTS else dict) for item in items)
