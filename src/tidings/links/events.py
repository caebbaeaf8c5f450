"""What a direction of a link says of itself: a status derived from facts, and events for whoever listens.

Nothing is decided by a status. Connectivity is another fact than the status, and is unknown after every start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import msgspec

from tidings.wire.links import GapKind, Token

log = logging.getLogger(__name__)

Status = Literal["initializing", "live", "repairing", "degraded_poll", "paused"]
Connectivity = Literal["unknown", "online", "offline"]


class LinkStatus(msgspec.Struct, frozen=True):
    """`words` say why it is paused or failing; `ended_there`: because the other space ended the link. Lag: sequences of
    the peer's log that are not handled, and how long ago the last handled record was said if there are any."""

    status: Status
    connectivity: Connectivity
    words: str
    handled: Token | None
    received: Token | None
    head: int
    lag_records: int
    lag_seconds: float
    last_activity: float | None
    owed: int
    quarantined: int
    ended_there: bool = False
    #: records that differed from the peer's when they were last compared, and are not fetched: one side has them
    differing: int = 0
    #: bytes that it may put into the log here in a day, 0 if nobody says so; and what of them it has
    share: int = 0
    spent: int = 0


def _tag(name: str) -> str:
    """`PullAdvanced` is `pull_advanced`."""
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name).lstrip("_")


class LinkEvent(msgspec.Struct, frozen=True, tag_field="event", tag=_tag):
    """As JSON `{"event": "pull_advanced", "link": ..., "at": ...}`, and what else it says."""

    link: str
    at: float


class StatusChanged(LinkEvent, frozen=True):
    before: Status
    now: Status
    words: str = ""


class ConnectivityChanged(LinkEvent, frozen=True):
    before: Connectivity
    now: Connectivity


class PullAdvanced(LinkEvent, frozen=True):
    """Said after it is on disk."""

    handled: Token
    head: int
    admitted: int = 0
    duplicates: int = 0
    omitted: int = 0
    quarantined: int = 0


class PushAdvanced(LinkEvent, frozen=True):
    """The other space has handled our log up to `handled`; `lag_records` is what it has before it."""

    handled: int
    lag_records: int
    lag_seconds: float


class GapDetected(LinkEvent, frozen=True):
    """From `before` the peer's log cannot go on; it goes on at `now`. `reread` records are read again, `vanished`
    cannot be any more. Of a range that was removed, nobody knows how many records it had."""

    kind: GapKind
    before: Token
    now: Token
    reread: int = 0
    vanished: int = 0
    #: the peer did not notice; it was found by comparing, and what was read since may be out of order
    by_comparing: bool = False


class LocalLogSetBack(LinkEvent, frozen=True):
    """The log here is an older one than before: so many messages are fetched again."""

    lost: int


class RepairStarted(LinkEvent, frozen=True):
    through: Token


class RepairCompleted(LinkEvent, frozen=True):
    """`lacking` and `extra` differ from the peer; `fetching` of them are asked for. What differs and is not fetched is
    only reported: it has its disposition. `unchanged`: it is the difference that was found before, and stands."""

    through: Token
    lacking: int = 0
    extra: int = 0
    fetching: int = 0
    unchanged: bool = False


class RepairFailed(LinkEvent, frozen=True):
    words: str


class DegradedPollEntered(LinkEvent, frozen=True):
    words: str


def line_of(event: LinkEvent) -> str:
    """For a log: `link abc: pull advanced, handled 5, head 5, admitted 1`; what is nothing is left out."""
    told = ((name, getattr(event, name)) for name in event.__struct_fields__ if name not in ("link", "at"))
    named = ((what, value.seq if isinstance(value, Token) else value) for what, value in told)
    shown = [f"{what.replace('_', ' ')} {value}" for what, value in named if value not in (0, "", False)]
    return f"link {event.link}: " + ", ".join([_tag(type(event).__name__).replace("_", " "), *shown])


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
