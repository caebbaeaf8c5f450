"""Models of stewards speak in plain dictionaries; link workers call them with typed requests."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from tidings.contract.core import Request

A = TypeVar("A")


def fields_of(request: Request[Any]) -> dict[str, Any]:
    """Returns every field of a request as plain values, defaults included."""
    return {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(request).items()}


def typed_answer(request: Request[A], fields: dict[str, Any]) -> A:
    """Returns the answer to a request as a caller reads it from the wire."""
    found: A = request.operation.read_answer(msgspec.json.encode({"ok": True, **fields}))
    return found
