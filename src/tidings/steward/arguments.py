"""Every control request is held against the table of operations (`wire/operations.py`) before its handler runs.

A handler then meets no value of a kind it did not think of, and whoever misspells an argument hears the known ones
instead of an answer that ignored it. Which arguments are needed is the handler's to say.
"""

from __future__ import annotations

from typing import Any

from tidings.errors import UsageError
from tidings.steward.requests import Request
from tidings.wire.operations import COUNT, FIELD, FLAG, MOST, NUMBER, OPERATIONS, ROWS, TEXTS, Kind


def check_arguments(request: Request) -> None:
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


def _no_such_verb(request: Request) -> str:
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
    items: list[Any] = value if kind in (TEXTS, ROWS) else []
    return all(isinstance(item, str if kind is TEXTS else dict) for item in items)
