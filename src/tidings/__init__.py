"""Tidings: a durable message mesh for AI agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidings.errors import TidingsError
from tidings.version import __version__

if TYPE_CHECKING:
    from tidings.connecting import connect
    from tidings.endpoint.endpoint import Endpoint
    from tidings.endpoint.incoming import Incoming
    from tidings.endpoint.interface import AgentInterface, Receipt
    from tidings.endpoint.notices import Notice
    from tidings.endpoint.redelivery import Retry
    from tidings.endpoint.tasks import Job, TaskResult, TaskTicket
    from tidings.sync_api import history, send
    from tidings.wire.roster import Agent

__all__ = [
    "Agent",
    "AgentInterface",
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
    "AgentInterface": "tidings.endpoint.interface",
    "connect": "tidings.connecting",
    "Endpoint": "tidings.endpoint.endpoint",
    "Receipt": "tidings.endpoint.interface",
    "Incoming": "tidings.endpoint.incoming",
    "Retry": "tidings.endpoint.redelivery",
    "Notice": "tidings.endpoint.notices",
    "send": "tidings.sync_api",
    "history": "tidings.sync_api",
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
