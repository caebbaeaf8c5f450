"""docs/host-api.md: the routes of the host as a page. `make docs` writes it from what the host serves."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from tidings.host.http_api import STATUS, ApiRoute, api_routes
from tidings.wire.operations import OPERATIONS

HEAD = """# The HTTP API of the host

Written by `make docs` from the routes themselves. The host listens on `run/host.sock` of its home, a unix socket for
this user only; requests and answers are JSON. For programs in Python `tidings.connect(via="host")` speaks it.

A session comes first: `POST /v1/challenge` gives a nonce; signed with the agent's key (the bytes are in
`client/host_session.py`) it opens a session with `POST /v1/sessions`, whose token is a Bearer in the `Authorization`
header of everything marked *session*. Every answer concerns the agent of that session and nobody else.

A refusal is `{"error": {"code", "message", "retryable"}}` with the codes of [errors](errors.md). A parameter or field
that is not known is refused with those that are; a body needs `Content-Type: application/json`. No answer is waited for
longer than a minute (`wait`, in seconds).
"""


def page() -> str:
    """The whole document."""
    routes = [line for route in api_routes() for line in _route(route)]
    passed = ", ".join(f"`{each.service}/{each.do}`" for each in OPERATIONS.values() if each.host)
    statuses = ", ".join(f"{number} {kind.code}" for kind, number in STATUS)
    return "\n".join(
        [
            HEAD,
            f"Status by error, the first that fits: {statuses}; any other is 500.",
            "",
            *routes,
            f"Passed on by `/v1/control`, with the arguments that [control](control.md) lists: {passed}.",
            "",
        ]
    )


def _route(route: ApiRoute) -> list[str]:
    marks = ["session"] if route.session else []
    said = inspect.cleandoc(route.handler.__doc__ or "").replace("\n", " ")
    lines = [f"### {route.method} {route.path}", "", f"{said}{f' *{marks[0]}*' if marks else ''}", ""]
    if route.query:
        lines += [f"- parameters: {', '.join(f'`{each}`' for each in route.query)}"]
    if fields := _fields(route.body):
        lines += [f"- body: {', '.join(fields)}"]
    return [*lines, ""] if lines[-1] else lines


def _fields(body: Any) -> list[str]:
    """Names and types; what has no default must be there."""
    if body is dict:
        return ["the arguments of the operation, and its `op`"]
    if body is None:
        return []
    required = set(body.__struct_fields__[: len(body.__struct_fields__) - len(body.__struct_defaults__)])
    kinds = inspect.get_annotations(body)
    return [f"`{name}` {kinds[name]}{' (required)' if name in required else ''}" for name in body.__struct_fields__]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
