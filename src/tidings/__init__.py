"""Tidings: a durable message mesh for AI agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidings.errors import TidingsError
from tidings.version import __version__

if TYPE_CHECKING:
    from tidings.client.agent import Agent
    from tidings.client.connect import connect, history, send
    from tidings.client.direct_transport import DirectAgent
    from tidings.client.host_transport import HostAgent
    from tidings.client.incoming import Incoming
    from tidings.client.notices import Notice
    from tidings.client.redelivery import Retry
    from tidings.client.tasks import Job, TaskResult, TaskTicket
    from tidings.client.transport import Receipt
    from tidings.wire.roster import AgentEntry

__all__ = [
    "Agent",
    "AgentEntry",
    "DirectAgent",
    "HostAgent",
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
    "AgentEntry": "tidings.wire.roster",
    "Agent": "tidings.client.agent",
    "DirectAgent": "tidings.client.direct_transport",
    "HostAgent": "tidings.client.host_transport",
    "connect": "tidings.client.connect",
    "Receipt": "tidings.client.transport",
    "Incoming": "tidings.client.incoming",
    "Retry": "tidings.client.redelivery",
    "Notice": "tidings.client.notices",
    "send": "tidings.client.connect",
    "history": "tidings.client.connect",
    "Job": "tidings.client.tasks",
    "TaskResult": "tidings.client.tasks",
    "TaskTicket": "tidings.client.tasks",
}


def __getattr__(name: str) -> Any:
    """`import tidings` stays fast: the client is loaded when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'tidings' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
