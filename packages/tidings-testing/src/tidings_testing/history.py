"""A history of who sent, was confirmed, read and did what, and a check that it keeps every promise.

    history = History()
    history.attempted("ada", "general", mid)             # before sending
    history.acknowledged("ada", "general", mid, seq)     # after the answer
    history.read("bob", "ada", "general", mid, seq)      # as it was surfaced
    history.owed("bob", "general")                       # you say who was owed what
    history.check()                                      # HistoryError with a readable account

Lost, invented, twice, out of order, in two places, done twice: each has its sentence. Names are yours; `where` is a
channel, `direct` or a role. Recording is safe from any thread; with a file every event is a line that survives kill -9,
and `merge` reads it back: times are of the machine's monotonic clock, so processes of one machine fall into order. It
knows nothing of brokers; `sending` and `took` spare the words where an endpoint is at hand.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from tidings.wire.message import new_id

Act = Literal["attempted", "acknowledged", "read", "settled", "effect"]
#: (sender, where, id): what makes a message one message
Name = tuple[str, str, str]
SHOWN = 10


class HistoryError(AssertionError):
    """The history breaks a promise; the message says which, and how."""


@dataclass(frozen=True, slots=True)
class Event:
    act: Act
    sender: str
    where: str
    id: str
    #: sequence in the log (or mailbox, or queue) of `where`; 0 if it is not known
    seq: int = 0
    #: who read, settled or did it
    by: str = ""
    #: surfaced before older ones that were still on their way: takes no part in the order
    ahead: bool = False
    #: handed out again and said to be: allowed until it was settled
    again: bool = False
    at: int = field(default_factory=time.monotonic_ns)

    @property
    def name(self) -> Name:
        return (self.sender, self.where, self.id)

    def __str__(self) -> str:
        place = f" ({self.where} {self.seq})" if self.seq else f" ({self.where})"
        return f"{self.id} of {self.sender}{place}"


@dataclass(frozen=True, slots=True)
class Owed:
    """`reader` is owed what was acknowledged at `where` strictly between two sequences."""

    reader: str
    where: str
    after: int = 0
    before: int | None = None
    #: its own messages too, as for a note to oneself
    own: bool = False

    def covers(self, event: Event) -> bool:
        if event.where != self.where or (event.sender == self.reader and not self.own):
            return False
        return event.seq > self.after and (self.before is None or event.seq < self.before)


class History:
    """Records events, in memory and (with `path`) as lines of a file."""

    def __init__(self, path: Path | None = None) -> None:
        self.events: list[Event] = []
        self._owed: list[Owed] = []
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else None

    # --- recording ---

    def attempted(self, sender: str, where: str, id: str) -> None:  # noqa: A002
        """Say it before you send: what nobody attempted must never be read."""
        self._add(Event("attempted", sender, where, id))

    def acknowledged(self, sender: str, where: str, id: str, seq: int) -> None:  # noqa: A002
        self._add(Event("acknowledged", sender, where, id, seq))

    def read(
        self,
        reader: str,
        sender: str,
        where: str,
        id: str,  # noqa: A002
        seq: int,
        *,
        ahead: bool = False,
        again: bool = False,
    ) -> None:
        self._add(Event("read", sender, where, id, seq, reader, ahead, again))

    def settled(self, reader: str, sender: str, where: str, id: str) -> None:  # noqa: A002
        """From here on it must not come again, whatever it says of itself."""
        self._add(Event("settled", sender, where, id, by=reader))

    def effect(self, task: str, worker: str, *, where: str = "", sender: str = "") -> None:
        """Somebody did what a task asks for. Once is once, whoever did it."""
        self._add(Event("effect", sender, where, task, by=worker))

    def owed(self, reader: str, where: str, *, after: int = 0, before: int | None = None, own: bool = False) -> None:
        """This reader must have read everything acknowledged there; several calls are several intervals."""
        self._owed.append(Owed(reader, where, after, before, own))

    def _add(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)
            if self._file is not None:  # one write of one line: a process that is killed leaves no half of one
                os.write(self._file, (json.dumps(asdict(event)) + "\n").encode())

    def sending(self, sender: str, where: str, id: str | None = None) -> Sending:  # noqa: A002
        """Attempt under an id made here; call what you get with the sequence once it was confirmed."""
        name = id or new_id()
        self.attempted(sender, where, name)
        return Sending(self, sender, where, name)

    def took(self, reader: str, incoming: Any) -> None:
        """A message as an endpoint surfaced it."""
        self.read(
            reader,
            incoming.sender.name,
            incoming.channel or "direct",
            incoming.id,
            incoming.seq,
            ahead=incoming.ahead,
            again=incoming.redelivered,
        )

    # --- other processes ---

    def merge(self, path: Path) -> Self:
        """Take over what another process wrote."""
        lines = [Event(**json.loads(line)) for line in path.read_text().splitlines()]
        with self._lock:
            self.events = sorted([*self.events, *lines], key=lambda event: event.at)
        return self

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # --- judging ---

    def of(self, act: Act) -> list[Event]:
        with self._lock:
            return [event for event in self.events if event.act == act]

    def check(self, *, stored_once: bool = True) -> None:
        """Raise HistoryError unless every promise was kept. `stored_once=False`: a store may have lost its tail."""
        broken = self.violations(stored_once=stored_once)
        if broken:
            kinds = {words.split(":", 1)[0] for words in broken}
            shown = [f"  {words}" for words in broken[:SHOWN]]
            rest = [f"  and {len(broken) - SHOWN} more"] if len(broken) > SHOWN else []
            heading = f"the history breaks {len(broken)} promises ({', '.join(sorted(kinds))}):"
            raise HistoryError("\n".join([heading, *shown, *rest]))

    def violations(self, *, stored_once: bool = True) -> list[str]:
        places = self._two_places() if stored_once else []
        return [*self._invented(), *self._lost(), *self._twice(), *self._disorder(), *places, *self._effects()]

    def _invented(self) -> list[str]:
        """Read and acknowledged are subsets of attempted."""
        attempted = {event.name for event in self.of("attempted")}
        tasks = {event.id for event in self.of("attempted")}
        read = [f"invented: {e.by} read {e}, which nobody sent" for e in self.of("read") if e.name not in attempted]
        said = [
            f"invented: {e} was confirmed and never sent" for e in self.of("acknowledged") if e.name not in attempted
        ]
        done = [f"invented: {e.by} did {e.id}, which nobody asked" for e in self.of("effect") if e.id not in tasks]
        return [*read, *said, *done]

    def _lost(self) -> list[str]:
        """Acknowledged is a subset of read, for each reader who was owed it."""
        read: dict[str, set[Name]] = defaultdict(set)
        for event in self.of("read"):
            read[event.by].add(event.name)
        acknowledged = list({event.name: event for event in self.of("acknowledged")}.values())
        lost = {
            (owed.reader, event.name): f"lost: {owed.reader} never read {event}"
            for owed in self._owed
            for event in acknowledged
            if owed.covers(event) and event.name not in read[owed.reader]
        }
        return list(lost.values())

    def _twice(self) -> list[str]:
        """Nothing is read twice, unless it says so and was not settled."""
        found: list[str] = []
        known: set[tuple[str, Name]] = set()
        settled: set[tuple[str, Name]] = set()
        with self._lock:
            events = list(self.events)
        for event in events:
            key = (event.by, event.name)
            if event.act == "settled":
                settled.add(key)
            elif event.act == "read" and key in settled:
                found.append(f"twice: {event.by} read {event} again after it was settled")
            elif event.act == "read" and key in known and not event.again:
                found.append(f"twice: {event.by} read {event} again, and nothing said so")
            elif event.act == "read":
                known.add(key)
        return found

    def _disorder(self) -> list[str]:
        """To one reader the messages of one sender at one place come in the order of the log."""
        found: list[str] = []
        newest: dict[tuple[str, str, str], Event] = {}
        for event in self.of("read"):
            if event.ahead or event.again or not event.seq:
                continue
            lane = (event.by, event.sender, event.where)
            before = newest.get(lane)
            if before is not None and event.seq < before.seq:
                found.append(f"disorder: {event.by} read {event} after {before}")
            else:
                newest[lane] = event
        return found

    def _two_places(self) -> list[str]:
        """One message has one sequence, and one sequence one message, to everybody."""
        found: list[str] = []
        place: dict[Name, Event] = {}
        holder: dict[tuple[str, int], Event] = {}
        for event in (*self.of("acknowledged"), *self.of("read")):
            if not event.seq:
                continue
            first = place.setdefault(event.name, event)
            if first.seq != event.seq:
                found.append(f"two places: {first} is also at {event.seq}")
                continue
            other = holder.setdefault((event.where, event.seq), event)
            if other.name != event.name:
                found.append(f"two places: {other} and {event} share a sequence")
        return found

    def _effects(self) -> list[str]:
        """What a task asks for is done once."""
        first: dict[str, Event] = {}
        found = []
        for event in self.of("effect"):
            before = first.setdefault(event.id, event)
            if before is not event:
                found.append(f"done twice: task {event.id} by {before.by}, then by {event.by}")
        return found


@dataclass(frozen=True, slots=True)
class Sending:
    """One message under way. Call it with the sequence when it was confirmed."""

    history: History
    sender: str
    where: str
    id: str

    def __call__(self, seq: int) -> None:
        self.history.acknowledged(self.sender, self.where, self.id, seq)
