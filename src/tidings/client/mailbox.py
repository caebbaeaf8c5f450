"""A mailbox: what the broker keeps for one agent is pulled, held until it is settled, and acknowledged.

    pull -> opened -> handed to the inbox -> settled by the application -> acknowledged

`AgentMailbox` is the loop that direct messages and frames of durable copies share; `direct_mailbox.py` and
`frame_mailbox.py` say what is opened and when it is settled. Nothing is acknowledged before it is settled: what the
application holds is kept in progress, what it did not settle is given back. A pull does not survive its connection, so
every session begins with a new one.

A pull goes through an import (`server/grants.py`). If its inbox is gone before the broker has looked at the request, it
takes the import itself for somebody who waits, and hands it a message that nobody gets before its patience is over. So
whoever cancels a pull first hears that the broker knows of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from tidings.client.connection import AgentConnection
from tidings.client.intake import Intake
from tidings.client.session_lease import SessionLease
from tidings.errors import TidingsError
from tidings.nats.acks import ACK, ACK_WAIT, IN_PROGRESS, NAK, TERM, DeliveryInfo, handed_out, parse_delivery
from tidings.nats.client import Connection, status_of
from tidings.nats.errors import NatsError
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks, undisturbed
from tidings.wire.records import Headers

T = TypeVar("T", bound=tuple[Any, ...])
#: bytes of one pull: what the broker keeps for a connection that is slow to read is twice this
PULL_BYTES = 4 * 1024 * 1024
#: seconds beyond its own end after which a pull is taken to have been lost
GRACE = 2.0
#: Seconds for each of the two words with the broker at the end of a pull that is cancelled.
GIVING_BACK = 1.0
#: The broker looks at the requests of a mailbox in their order. It refuses this one, and hands out nothing for it.
NO_PULL = b"{"
#: full: as many came as were asked for, or as many bytes; over: it expired; refused: the consumer is busy or gone
Ended = Literal["full", "over", "refused"]
Take = Callable[[Any, DeliveryInfo], Awaitable[None]]
#: before a mailbox that is busy or gone, or whose replicas have no leader, is asked again
REFUSED_PAUSE = 0.5
REFUSED = Backoff(REFUSED_PAUSE, 2.0)
#: how long the broker's word is waited for before the acknowledgement goes on in the background
ACK_PATIENCE = 2.0
ACK_TRIES = 5
IN_PROGRESS_EVERY = ACK_WAIT / 3
#: seconds after which what could not be handed over comes again
DECLINED = 5.0
log = logging.getLogger(__name__)

# --- one pull ---


async def pull(connection: Connection, stream: str, consumer: str, batch: int, expires: float, take: Take) -> Ended:
    """Ask for up to `batch` messages within `expires` seconds and hand over each as it comes.

    A message with a `$JS.ACK` reply is a message, whatever its headers say; anything else is a word of the server, read
    only from the protocol's first line. Nothing is retried and nothing acknowledged here. What was on its way to a pull
    that is cancelled is given back.
    """
    inbox, asked = connection.new_inbox(), f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
    subscription = await connection.subscribe(inbox)
    try:
        wanted = {"batch": batch, "max_bytes": PULL_BYTES, "expires": int(expires * 1_000_000_000)}
        await connection.publish(asked, json.dumps(wanted).encode(), reply=inbox)
        return await _receive(subscription, batch, expires + GRACE, take)
    except asyncio.CancelledError:
        await undisturbed(_give_back(connection, subscription, asked))
        raise
    finally:
        await subscription.unsubscribe()


async def _give_back(connection: Connection, subscription: Any, asked: str) -> None:
    """Nobody looks any more: the broker is told, and what it had handed to this pull goes to the next one at once."""
    if connection.is_closed:
        return
    with suppress(TidingsError, NatsError, OSError, TimeoutError):
        await connection.request(asked, NO_PULL, timeout=GIVING_BACK)
    with suppress(NatsError, OSError, TimeoutError):
        await subscription.drain(GIVING_BACK)
    with suppress(NatsError, OSError):
        for message in subscription.waiting():
            if parse_delivery(message.reply) is not None:
                await connection.publish(message.reply, NAK)


async def _receive(subscription: Any, batch: int, patience: float, take: Take) -> Ended:
    clock = asyncio.get_running_loop().time
    deadline, taken, over = clock() + patience, 0, None
    while taken < batch:
        try:
            message = await subscription.next(max(0.001, deadline - clock()))
        except TimeoutError:
            return _ended(over, taken) if over is not None else "over"
        delivery = parse_delivery(message.reply)
        if delivery is not None:
            taken += 1
            await take(message, delivery)
        elif over is None and (status := status_of(message)) is not None and status.status != 100:
            over, batch = status, min(batch, handed_out(status, batch))
            deadline = min(deadline, clock() + GRACE)
    return _ended(over, taken) if over is not None else "full"


def _ended(status: Headers, taken: int) -> Ended:
    words = status.description.lower().replace(" ", "")
    if taken and ("maxbytes" in words or "batchcompleted" in words):
        return "full"
    return "over" if status.status in (404, 408) else "refused"


# --- what the broker waits to hear about ---


@dataclass(eq=False)
class PendingAck:
    """One delivery the broker waits to hear about."""

    delivery: DeliveryInfo
    #: (sender, id) of what was delivered, if it is one message
    identity: tuple[str, str] = ("", "")
    settled: bool = False
    acking: asyncio.Task[None] | None = field(default=None, repr=False)


class PendingAcks(dict[int, PendingAck]):
    """The unsettled deliveries of one mailbox, by their sequence in its stream. `start` begins a task of its owner.

    An acknowledgement is repeated until the broker says that it heard it, on this connection or the next; if it never
    does, it delivers again, and the endpoint's memory knows the message.
    """

    def __init__(
        self, connection: AgentConnection, start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        super().__init__()
        self.connection = connection
        self._start = start
        self._given_back = False

    def delivered_again(self, held: PendingAck, delivery: DeliveryInfo) -> None:
        """It was delivered again while we have it: it is answered by its newest name."""
        held.delivery = delivery
        if held.settled:
            self.acknowledge(held)

    def acknowledge(self, held: PendingAck) -> None:
        held.settled = True
        if held.acking is None or held.acking.done():
            held.acking = self._start(self._until_acknowledged(held))

    async def _until_acknowledged(self, held: PendingAck) -> None:
        """Acknowledge and hear that it was heard, on this connection or the next."""
        tries = 0
        while tries < ACK_TRIES and not self._given_back and self._is_current(held):
            try:
                connection = await self.connection.ready(30)
                await connection.request(held.delivery.reply, ACK, timeout=ACK_PATIENCE)
            except TimeoutError:
                tries += 1
            except (TidingsError, NatsError, OSError):
                await asyncio.sleep(0.1)
            else:
                break
        if self._is_current(held):
            del self[held.delivery.seq]

    def _is_current(self, held: PendingAck) -> bool:
        """False once the mailbox went backwards and another delivery has its sequence: that one is not ended by it."""
        return self.get(held.delivery.seq) is held

    async def keep_in_progress(self) -> None:
        """An application may think for minutes: say so well before the broker would deliver again."""
        while True:
            await asyncio.sleep(IN_PROGRESS_EVERY)
            await self._say_of_unsettled(IN_PROGRESS)

    async def finish(self) -> None:
        """Let acknowledgements under way finish."""
        acking = {held.acking for held in self.values() if held.acking is not None}
        if acking and self.connection.state == "ready":
            await asyncio.wait(acking, timeout=ACK_PATIENCE)

    async def give_back(self) -> None:
        """Acknowledge nothing more, and have the broker deliver again what was not settled."""
        self._given_back = True
        await self._say_of_unsettled(NAK)

    async def decline(self, held: PendingAck) -> None:
        """It could not be handed over: the broker delivers it again after a while."""
        if self._is_current(held):
            del self[held.delivery.seq]
        await self._say(held, NAK + b' {"delay": %d}' % int(DECLINED * 1e9))

    async def terminate(self, delivery: DeliveryInfo) -> None:
        """Nobody can do anything with it: it is not delivered again."""
        await self._say(PendingAck(delivery), TERM)

    async def _say_of_unsettled(self, word: bytes) -> None:
        for held in list(self.values()):
            if not held.settled:
                await self._say(held, word)

    async def _say(self, held: PendingAck, word: bytes) -> None:
        with suppress(TidingsError, NatsError, OSError):  # no connection: the broker delivers again, and we know it
            await self.connection.current.publish(held.delivery.reply, word)


# --- the loop ---


class AgentMailbox(Generic[T]):
    """One mailbox of an endpoint. `T` is what was opened and waits to be handed over: its `PendingAck` first."""

    #: does what a known error kept from being handed over come again in this session? Else with the next one
    _declines = False

    def __init__(self, session: SessionLease, intake: Intake, stream: str, consumer: str) -> None:
        self.session = session
        self.intake = intake
        self.connection = session.connection
        self.identity = self.connection.identity
        self.pending = PendingAcks(self.connection, self._start)
        self._stream, self._consumer = stream, consumer
        self._arrived: asyncio.Queue[T] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulling: asyncio.Task[None] | None = None
        self.begun = self._closed = False

    def begin(self) -> None:
        """Pull from now on, on this session and every later one."""
        if self.begun or self._closed:
            return
        self.begun = True
        self._start(self._hand_over_arrived())
        self._start(self.pending.keep_in_progress())
        self.connection.on_session(self._on_session)
        if self.connection.state == "ready":
            self._pulling = self._start(self._pull_all(self.connection.current))

    async def _on_session(self, connection: Connection) -> None:
        if self._closed:
            return
        if self._pulling is not None:
            self._pulling.cancel()
        self._pulling = self._start(self._pull_all(connection))

    async def _pull_all(self, connection: Connection) -> None:
        taken = 0

        async def take(message: Any, delivery: DeliveryInfo) -> None:
            nonlocal taken
            taken += 1
            held = self.pending.get(delivery.seq)
            if held is not None and held.delivery.time_ns == delivery.time_ns:
                self.pending.delivered_again(held, delivery)
            else:
                await self._open(message, delivery)

        pauses = REFUSED.delays()
        while not connection.is_closed:
            room, expires = await self._wait_for_room()
            if self._is_over:
                return
            taken = 0
            try:
                ended = await pull(connection, self._stream, self._consumer, room, expires, take)
            except (NatsError, OSError) as error:
                log.debug("a pull of %s ended with %s", self.identity.name, error)
                ended = "refused"
            if ended == "refused":
                await asyncio.sleep(next(pauses))
                continue
            pauses = REFUSED.delays()
            if ended == "over" and not taken:
                self._found_empty()

    async def _hand_over_arrived(self) -> None:
        while True:
            arrived = await self._arrived.get()
            try:
                await self._hand_over(arrived)
            except Exception as error:  # noqa: BLE001  # boundary: whatever it was, what comes after it is handed over
                self._report(error)
                if self._declines or not isinstance(error, TidingsError):  # else it is given back at the end
                    self._forget(arrived)
                    await self.pending.decline(arrived[0])
            finally:
                self._arrived.task_done()

    # --- what the two of them say ---

    @abstractmethod
    async def _wait_for_room(self) -> tuple[int, float]:
        """Wait until the inbox has room; for how many to ask, and for how long."""

    @abstractmethod
    async def _open(self, message: Any, delivery: DeliveryInfo) -> None:
        """Open what came and put it among what arrived; what does not open is kept aside and ended."""

    @abstractmethod
    async def _hand_over(self, arrived: T) -> None:
        """Give it to the application."""

    def _forget(self, arrived: T) -> None:
        """It could not be handed over and comes again: nothing may take it for a repetition then."""

    def _found_empty(self) -> None:
        """A pull ended and nothing had come."""

    async def _close(self) -> None:
        """Nothing is pulled or acknowledged any more."""

    # --- life ---

    @property
    def _is_over(self) -> bool:
        """Is it closed, or another session's?"""
        return self._closed or self.session.superseded.is_set()

    def _report(self, error: BaseException) -> None:
        self.intake.events.emit("error", error)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(error)

    async def close(self) -> None:
        """Stop pulling, let acknowledgements under way finish, and give back what was not settled."""
        if self._closed:
            return
        if self._pulling is not None:
            await end_tasks([self._pulling])
            # once the broker has heard that the pull ended, it hands nothing to it that would be out of reach
            with suppress(TidingsError, NatsError, OSError, TimeoutError):
                await self.connection.current.flush(timeout=2)
        await self.pending.finish()
        self._closed = True
        await self.pending.give_back()
        await self._close()
        await end_tasks(self._tasks)
