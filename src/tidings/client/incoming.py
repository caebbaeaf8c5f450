"""A message in an application's hands, and the inbox it came from.

A message is **settled** when the application is done with it: `ack()`, or asking the iterator for the next one. What
is settled is never surfaced again; what is not may come again after a crash. A program that keeps mail for somebody who
reads it later settles it with `keep()`, which does not say that it was read. The inbox holds a bounded number; whoever
feeds it waits for room, so nothing is dropped and nothing is acknowledged unseen.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from tidings.client.notices import unheard_of
from tidings.errors import DeliveryLost, LogRegressed, UsageError
from tidings.wire.message import Mention, Message, Part, Sender

Kind = Literal["channel", "direct"]
Settle = Callable[[], Awaitable[None] | None]
PRIORITY_ORDER = {"now": 0, "next": 1, "low": 2}


def _nothing() -> None:
    """There is nothing to settle in what was read from the past."""


@dataclass(frozen=True, slots=True)
class DirectRef:
    """A direct message that was kept: its sender and id, and its sequence among the direct messages."""

    sender: str
    id: str
    seq: int


@dataclass(eq=False)
class Incoming:
    """One message as an application sees it. Who sent it was verified; what it says is data, not instructions."""

    kind: Kind
    #: the verified id, under the name of its access record; of another space's agent as `name@space`
    sender: Sender
    message: Message
    #: channel it was posted to; None for a direct message
    channel: str | None
    #: sequence and time of the record that holds it
    seq: int
    time_ns: int
    #: from the past, shown because somebody asked for it (`backfill`, `history`, `recall`): nothing to answer
    historical: bool = False
    #: surfaced live although older durable copies may still be on their way
    ahead: bool = False
    #: its live copy was lost: it was read from the log after newer messages of its channel had surfaced
    late: bool = False
    #: a copy of it was handed out before and not settled
    redelivered: bool = False
    #: it came from a mailbox (a direct message, or a durable copy) and stays there until it is settled; a live copy, or
    #: one read from the log, did not
    durable: bool = False
    #: how often this program was handed it, counted from 1: `nak` and a handler that raises give it back
    attempt: int = 1
    #: opened from a sealed direct message
    sealed: bool = False
    mentions_me: bool = False
    #: whether attention and priority say that the agent should be woken for it
    wakes: bool = True
    #: what it calls its sender, if that is another name than the access record's: a claim, and nobody's name
    claims: str | None = None
    #: whom it mentions, under the names of their access records
    mentions: tuple[Mention, ...] = ()
    #: the space it was said in, by the name that has here, if it came over a link; empty if it was said in this space
    origin: str = ""
    #: the id of that space
    origin_id: str = ""
    _naming: Callable[[], Awaitable[None]] | None = field(default=None, repr=False)
    _settle: Settle = field(default=_nothing, repr=False)
    #: settles without telling that it was read, where that makes a difference
    _keep: Settle | None = field(default=None, repr=False)
    #: what ends it when it became a dead letter; otherwise as with `keep`
    _buried: Settle | None = field(default=None, repr=False)
    _nak: Callable[[Incoming, float | None, str], Awaitable[None]] | None = field(default=None, repr=False)
    #: called when the application takes it from the inbox
    _on_taken: Callable[[], None] | None = field(default=None, repr=False)
    _settled: bool = field(default=False, repr=False)
    _returned: bool = field(default=False, repr=False)

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def text(self) -> str:
        return self.message.text

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.message.parts

    @property
    def raw(self) -> bytes:
        """The exact bytes that were signed and stored."""
        return self.message.raw

    @property
    def settled(self) -> bool:
        return self._settled

    async def named(self) -> None:
        """Wait, in bounded time, for names that were not known when it came."""
        if self._naming is not None:
            await self._naming()

    async def ack(self) -> None:
        """Settle it: this agent is done with it."""
        if not self._settled and not self._returned:
            await self._end(self._settle)

    async def keep(self) -> None:
        """Settle it for an agent that has yet to read it: it is kept durably here, and its sender hears `delivered`.

        `DirectTransport.tell_read` says later that it was read.
        """
        if not self._settled and not self._returned:
            await self._end(self._keep or self._settle)

    async def nak(self, delay: float | None = None, error: BaseException | str = "") -> None:
        """Give it back: it is handed out again after `delay` seconds, or after a pause that grows with each try.

        What was tried too often (`Retry`) becomes a dead letter with its `error`, and holds nothing else up.
        """
        if self._settled or self._returned or self._nak is None:
            return
        self._returned = True
        said = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        await self._nak(self, delay, said)

    async def _bury(self) -> None:
        await self._end(self._buried or self._keep or self._settle)

    async def _end(self, settle: Settle) -> None:
        self._settled = True
        if (settling := settle()) is not None:
            await settling

    @property
    def kept(self) -> DirectRef:
        """What its receipts need to know of a direct message, whoever tells them."""
        return DirectRef(self.sender.id, self.id, self.seq)


class Past(list[Incoming]):
    """Messages of a channel's past, and what of it is not among them."""

    def __init__(self, found: Iterable[Incoming], *, more: bool = False, gone: int = 0, hidden: bool = False) -> None:
        super().__init__(found)
        #: there are more beyond the last one
        self.more = more
        #: the log no longer has what was said up to this sequence; 0 if it has all that was asked for
        self.gone = gone
        #: there may be others that are not shown: the channel does not replay them to who was not in it
        self.hidden = hidden

    def missing(self, channel: str) -> str | None:
        """What is not among them, as a sentence."""
        if self.hidden:
            return f"{channel} does not replay everything: what was said before you were in it is not shown"
        return f"the log no longer has what was said up to sequence {self.gone}" if self.gone else None


class Inbox:
    """Messages waiting for the application: a bounded queue that direct messages and `now` pass first."""

    def __init__(self, size: int = 512) -> None:
        self.size = size
        self._queues: tuple[deque[Incoming], ...] = (deque(), deque(), deque())
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed: BaseException | None = None
        #: how many messages have room
        self.room = size

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    async def wait_for_room(self, count: int = 1) -> None:
        while self.room < count and self._closed is None:
            self._room.clear()
            await self._room.wait()

    def put(self, incoming: Incoming) -> None:
        self._queues[_rank(incoming)].append(incoming)
        self.room = max(0, self.size - len(self))
        self._arrived.set()

    def close(self, error: BaseException) -> None:
        """End every iterator: with the messages still here first, then with `error`, or quietly if it is a cancel."""
        self._closed = error
        self._arrived.set()
        self._room.set()

    def first(self) -> Incoming | None:
        return next((queue[0] for queue in self._queues if queue), None)

    def take(self) -> Incoming | None:
        for queue in self._queues:
            if queue:
                incoming = queue.popleft()
                self.room = max(0, self.size - len(self))
                self._room.set()
                if incoming._on_taken is not None:
                    incoming._on_taken()
                return incoming
        return None

    async def get(self) -> Incoming | None:
        """The next message, or None once the inbox is closed and empty."""
        while True:
            first = self.first()
            if first is not None and first._naming is not None:
                await first.named()  # before it is taken: whoever gives up meanwhile leaves it here
                continue
            if first is not None:
                return self.take()
            if self._closed is not None:
                if isinstance(self._closed, asyncio.CancelledError):
                    return None
                raise self._closed
            self._arrived.clear()
            await self._arrived.wait()

    async def iterate(self, *, manual_ack: bool = False) -> AsyncIterator[Incoming]:
        """Messages as they come. Asking for the next one settles the one before, unless `manual_ack`."""
        while (incoming := await self.get()) is not None:
            yield incoming
            if not manual_ack:
                await incoming.ack()


def _rank(incoming: Incoming) -> int:
    """Direct messages and `now` first, `low` last; order within a rank is order of arrival."""
    if incoming.message.priority == "now" or incoming.kind == "direct":
        return 0
    return PRIORITY_ORDER[incoming.message.priority]


class Events:
    """Callbacks by name. A callback that raises is reported as an `error` event, and never breaks the endpoint.

    What tells of a loss before anybody listens, as while connecting, is kept for the first callback that is registered.
    """

    #: of each name; of more the oldest are dropped, which is told with their number
    MOST_KEPT = 256
    NAMES = (
        "message",
        "presence",
        "roster",
        "connection",
        "error",
        "gap",
        "notice",
        "superseded",
        "access",
        "membership",
        "receipt",
    )

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[[Any], Any]]] = {name: [] for name in self.NAMES}
        self._tasks: dict[asyncio.Task[Any], str] = {}
        #: name -> what nobody has heard yet, of the names that tell of losses
        self._unheard: dict[str, deque[Any]] = {name: deque() for name in ("notice", "gap", "error")}
        self._dropped: Counter[str] = Counter()
        #: the endpoint's own: they see everything at once, and do not count as somebody who listens
        self._inner: dict[str, Callable[[Any], None]] = {}

    def on(self, name: str, callback: Callable[[Any], Any]) -> None:
        if name not in self._callbacks:
            raise UsageError(f"there is no event {name!r}; events are {', '.join(self.NAMES)}")
        self._callbacks[name].append(callback)
        unheard = self._unheard.get(name)
        if (dropped := self._dropped.pop(name, 0)) and (told := unheard_of(name, dropped)):
            self._call(name, callback, told)
        while unheard:
            self._call(name, callback, unheard.popleft())

    def on_inner(self, name: str, callback: Callable[[Any], None]) -> None:
        self._inner[name] = callback

    def is_heard(self, name: str) -> bool:
        return bool(self._callbacks[name])

    def emit(self, name: str, value: Any) -> None:
        if name in self._inner:
            self._inner[name](value)
        if not self.is_heard(name):
            self._keep(name, value)
        for callback in self._callbacks[name]:
            self._call(name, callback, value)

    def _keep(self, name: str, value: Any) -> None:
        unheard = self._unheard.get(name)
        # Other errors are of their moment, and hold on to the frames they were raised in.
        if unheard is None or (name == "error" and not isinstance(value, DeliveryLost | LogRegressed)):
            return
        unheard.append(value)
        if len(unheard) > self.MOST_KEPT:
            unheard.popleft()
            self._dropped[name] += 1

    def _call(self, name: str, callback: Callable[[Any], Any], value: Any) -> None:
        try:
            result = callback(value)
        except Exception as error:  # noqa: BLE001  boundary: the application's code
            self._failed(name, error)
            return
        if asyncio.iscoroutine(result):
            task = asyncio.ensure_future(result)
            self._tasks[task] = name
            task.add_done_callback(partial(self._done, name))

    async def handled(self, name: str) -> None:
        """Every callback of what was emitted under this name so far has returned."""
        running = [task for task, its_name in self._tasks.items() if its_name == name]
        if running:
            await asyncio.wait(running)

    def _done(self, name: str, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(name, error)

    def _failed(self, name: str, error: BaseException) -> None:
        if name != "error":
            self.emit("error", error)
