"""What the broker waits to hear about: deliveries in hand, and the word that ends each.

Shared by direct messages and frames of durable copies, which differ in what they hold and not in how they end it. An
acknowledgement is repeated until the broker says that it heard it, on this connection or the next; if it never does, it
delivers again, and the endpoint's memory knows the message. When to acknowledge is decided by the two of them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from nats.errors import Error as NatsError

from tidings.broker.acks import ACK, Delivery
from tidings.endpoint.supervision import Supervision
from tidings.errors import TidingsError

#: how long the broker's word is waited for before the acknowledgement goes on in the background
ACK_PATIENCE = 2.0
ACK_TRIES = 5


@dataclass(eq=False)
class Unsettled:
    """One delivery the broker waits to hear about."""

    delivery: Delivery
    settled: bool = field(default=False, kw_only=True)
    acking: asyncio.Task[None] | None = field(default=None, repr=False, kw_only=True)


H = TypeVar("H", bound=Unsettled)


class Acknowledging(Generic[H]):
    """The part of a mailbox that ends deliveries. `held` is by their sequence in the mailbox's stream."""

    link: Supervision
    held: dict[int, H]
    _closed: bool

    def _start(self, work: Any) -> asyncio.Task[None]:
        raise NotImplementedError

    def _acknowledge(self, held: H) -> None:
        held.settled = True
        if held.acking is None or held.acking.done():
            held.acking = self._start(self._until_acknowledged(held))

    async def _until_acknowledged(self, held: H) -> None:
        """Acknowledge and hear that it was heard, on this connection or the next."""
        tries = 0
        while tries < ACK_TRIES and not self._closed and self._is_current(held):
            try:
                connection = await self.link.ready(30)
                await connection.ask(held.delivery.reply, ACK, timeout=ACK_PATIENCE)
            except TimeoutError:
                tries += 1
            except (TidingsError, NatsError, OSError):
                await asyncio.sleep(0.1)
            else:
                break
        if self._is_current(held):
            del self.held[held.delivery.seq]

    def _is_current(self, held: H) -> bool:
        """False once the mailbox went backwards and another delivery has its sequence: that one is not ended by it."""
        return self.held.get(held.delivery.seq) is held

    async def _say(self, held: H, word: bytes) -> None:
        with suppress(TidingsError, NatsError, OSError):  # no connection: the broker delivers again, and we know it
            await self.link.connection.publish(held.delivery.reply, word)
