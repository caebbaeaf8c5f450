"""Tidings: a durable message mesh for AI agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidings.errors import TidingsError

if TYPE_CHECKING:
    from tidings.endpoint.connecting import connect
    from tidings.endpoint.endpoint import Endpoint, Receipt
    from tidings.endpoint.incoming import Incoming
    from tidings.endpoint.notices import Notice
    from tidings.endpoint.redelivery import Retry
    from tidings.endpoint.sync_api import history, send
    from tidings.endpoint.tasks import Job, TaskResult, TaskTicket
    from tidings.wire.roster import Agent

__version__ = "0.1.0"
__all__ = [
    "Agent",
    "Endpoint",
    "Incoming",
    "Job",
    "Notice",
    "Receipt",
    "Retry",
    "TaskResult",
    "TaskTicket",
    "TidingsError",
    "__version__",
    "connect",
    "history",
    "send",
]

_LAZY = {
    "Agent": "tidings.wire.roster",
    "connect": "tidings.endpoint.connecting",
    "Endpoint": "tidings.endpoint.endpoint",
    "Receipt": "tidings.endpoint.endpoint",
    "Incoming": "tidings.endpoint.incoming",
    "Retry": "tidings.endpoint.redelivery",
    "Notice": "tidings.endpoint.notices",
    "send": "tidings.endpoint.sync_api",
    "history": "tidings.endpoint.sync_api",
    "Job": "tidings.endpoint.tasks",
    "TaskResult": "tidings.endpoint.tasks",
    "TaskTicket": "tidings.endpoint.tasks",
}


def __getattr__(name: str) -> Any:
    """`import tidings` stays fast: the client is loaded when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'tidings' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
