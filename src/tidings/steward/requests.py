"""Control requests: decoded strictly, answered always.

An unanswered request through a service import stays in the broker's memory, so whatever arrives with a reply gets
one: junk, unknown services, wrong senders, failures of ours. This module turns bytes into a request and results or
errors into an answer; who works on it when is `dispatch.py`'s part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidings.errors import MalformedMessage, TidingsError, UsageError
from tidings.wire import strict_json
from tidings.wire.subjects import SERVICES, Control, Subjects

MAX_REQUEST = 128 * 1024


@dataclass(frozen=True, slots=True)
class Request:
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

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.arguments.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{self.service} {self.do}: `{name}` must be a list of texts")
        return tuple(value)


def parse_request(subjects: Subjects, subject: str, payload: bytes) -> Request:
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
    return Request(parsed.service, parsed.sender, op, do, body)


def answer(result: Mapping[str, Any]) -> bytes:
    return json.dumps({"ok": True, **result}, separators=(",", ":")).encode()


def refusal(error: BaseException) -> bytes:
    """A refusal names its class of error; what was not foreseen is said without details of ours."""
    if isinstance(error, TidingsError):
        code, message = error.code, str(error)
    else:
        code, message = "failed", f"the steward failed ({type(error).__name__}); its log says more"
    return json.dumps({"ok": False, "error": {"code": code, "message": message[:1000]}}).encode()
