"""What the broker waits to hear about: deliveries in hand, and the word that ends each.

Shared by direct messages and frames of durable copies, which differ in what they hold and not in how they end it. An
acknowledgement is repeated until the broker says that it heard it, on this connection or the next; if it never does, it
delivers again, and the endpoint's memory knows the message. When to acknowledge is decided by the two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tidings.broker.acks import ACK, ACK_WAIT, IN_PROGRESS, NAK, Delivery
from tidings.endpoint.connection import AgentConnection
from tidings.errors import TidingsError
from tidings.nats.errors import NatsError

#: how long the broker's word is waited for before the acknowledgement goes on in the background
ACK_PATIENCE = 2.0
ACK_TRIES = 5
IN_PROGRESS_EVERY = ACK_WAIT / 3


@dataclass(eq=False)
class PendingAck:
    """One delivery the broker waits to hear about."""

    delivery: Delivery
    settled: bool = field(default=False, kw_only=True)
    acking: asyncio.Task[None] | None = field(default=None, repr=False, kw_only=True)


H = TypeVar("H", bound=PendingAck)
Start = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class PendingAcks(dict[int, H]):
    """The unsettled deliveries of one mailbox, by their sequence in its stream. `start` begins a task of its owner."""

    def __init__(self, connection: AgentConnection, start: Start) -> None:
        super().__init__()
        self.connection = connection
        self._start = start
        self._given_back = False

    def come_again(self, held: H, delivery: Delivery) -> None:
        """It was delivered again while we have it: it is answered by its newest name."""
        held.delivery = delivery
        if held.settled:
            self.acknowledge(held)

    def acknowledge(self, held: H) -> None:
        held.settled = True
        if held.acking is None or held.acking.done():
            held.acking = self._start(self._until_acknowledged(held))

    async def _until_acknowledged(self, held: H) -> None:
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

    def _is_current(self, held: H) -> bool:
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

    async def _say_of_unsettled(self, word: bytes) -> None:
        for held in list(self.values()):
            if not held.settled:
                await self._say(held, word)

    async def _say(self, held: H, word: bytes) -> None:
        with suppress(TidingsError, NatsError, OSError):  # no connection: the broker delivers again, and we know it
            await self.connection.current.publish(held.delivery.reply, word)
