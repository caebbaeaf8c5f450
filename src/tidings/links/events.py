"""Listeners that receive the events of links, and an event as a line of a log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tidings.contract.link_worker import LinkEvent
from tidings.wire.links import Token

log = logging.getLogger(__name__)


def line_of(event: LinkEvent) -> str:
    """For a log: `link abc: pull advanced, handled 5, head 5, admitted 1`; what is nothing is left out."""
    told = ((name, getattr(event, name)) for name in event.__struct_fields__ if name not in ("link", "at"))
    named = ((what, value.seq if isinstance(value, Token) else value) for what, value in told)
    shown = [f"{what.replace('_', ' ')} {value}" for what, value in named if value not in (0, "", False)]
    return f"link {event.link}: " + ", ".join([event.name.replace("_", " "), *shown])


Listener = Callable[[LinkEvent], None]


class Listeners:
    """They are told in the order in which they came. One that raises is logged, and harms nobody."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> Callable[[], None]:
        """What is returned removes it again."""
        entry: Listener = lambda event: listener(event)  # noqa: E731  the same one may listen twice
        self._listeners.append(entry)

        def remove() -> None:
            if entry in self._listeners:
                self._listeners.remove(entry)

        return remove

    def tell(self, event: LinkEvent) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:  # Boundary: a listener is somebody else's code.
                log.exception("a listener of link %s failed on %s", event.link, type(event).__name__)
