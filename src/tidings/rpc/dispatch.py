"""Maps operations to their handler functions, and encodes answers and refusals.

    @handler(JoinRequest)
    async def join(self, caller: Caller, request: JoinRequest) -> JoinAnswer: ...

The request is the last parameter; each server chooses the ones before it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import msgspec

from tidings.contract.core import DECLARED, Request, Server
from tidings.errors import TidingsError

A = TypeVar("A")
P = ParamSpec("P")
#: server and operation -> the name of its handler, for all loaded modules
HANDLED: dict[tuple[Server, str], str] = {}


def handler(request: type[Request[A]]) -> Callable[[Callable[P, Awaitable[A]]], Callable[P, Awaitable[A]]]:
    """Marks a function as the handler of the operation with this request."""
    operation = request.operation

    def mark(function: Callable[P, Awaitable[A]]) -> Callable[P, Awaitable[A]]:
        name = f"{function.__module__}.{function.__qualname__}"
        if (before := HANDLED.setdefault((operation.server, operation.name), name)) != name:
            raise LookupError(f"{operation.name} has two handlers: {before} and {name}")
        annotation = [*inspect.signature(function).parameters.values()][-1].annotation
        if annotation is not request and str(annotation).rpartition(".")[2] != request.__name__:
            raise LookupError(f"{name} handles {operation.name} and takes a {annotation}, not a {request.__name__}")
        vars(function)["operation"] = operation
        return function

    return mark


def handlers_of(server: Server, *parts: object, complete: bool = True) -> dict[str, Callable[..., Awaitable[Any]]]:
    """Returns the handlers in these objects or modules. Raises LookupError if an operation of the server has none,
    unless the set may be incomplete."""
    found: dict[str, Callable[..., Awaitable[Any]]] = {}
    for part in parts:
        owner = part if inspect.ismodule(part) else type(part)
        for name in dir(owner):  # inherited ones too
            function = inspect.getattr_static(owner, name)
            operation = getattr(function, "operation", None)
            if inspect.isfunction(function) and operation is not None and operation.server == server:
                found[operation.name] = getattr(part, name)
    if complete and (missing := sorted(DECLARED[server].keys() - found.keys())):
        raise LookupError(f"no handler for declared operations: {', '.join(missing)}")
    return found


def encode_answer(answer: msgspec.Struct) -> bytes:
    """Returns an answer as one JSON object, with `ok` first."""
    body = msgspec.json.encode(answer)
    return b'{"ok":true' + (b"," + body[1:] if len(body) > 2 else b"}")


def encode_refusal(error: BaseException, server: Server) -> bytes:
    """Returns a refusal with the code of its error. Details of an unexpected error are left out."""
    if isinstance(error, TidingsError):
        code, message = error.code, str(error)
    else:
        code, message = "failed", f"the {server} failed ({type(error).__name__}): see its log"
    return json.dumps({"ok": False, "error": {"code": code, "message": message[:1000]}}).encode()
