"""Every declared operation, by name. Importing this module loads all declarations.

A program that calls a few operations imports only the modules that declare them.
"""

from __future__ import annotations

from tidings.contract import admin, agents, channels, host, link_worker, links, mail, tasks
from tidings.contract.core import DECLARED, SERVED, CallerKind

MODULES = (channels, agents, admin, links, mail, tasks, host, link_worker)
#: the operations of the steward, in the order of `MODULES`, independent of import order
OPERATIONS = {
    name: each
    for module in MODULES
    for name, each in DECLARED["steward"].items()
    if each.request.__module__ == module.__name__
}
__all__ = ["MODULES", "OPERATIONS", "SERVED", "services_of"]


def services_of(*callers: CallerKind) -> tuple[str, ...]:
    """Returns the services of the steward that these kinds of callers may reach, sorted for each kind.

    The broker's permissions keep this order; a test compares their digest.
    """
    reached = ({each.service for each in OPERATIONS.values() if each.caller == caller} for caller in callers)
    return tuple(name for names in reached for name in sorted(names))
