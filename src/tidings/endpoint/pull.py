"""One pull from a mailbox: a request, a fresh inbox, and whatever comes until it is over.

A message with a `$JS.ACK` reply is a message, whatever its headers say; anything else is a word of the server, read
only from the protocol's first line. Nothing is retried and nothing acknowledged here. The inbox is unsubscribed when
the pull ends, which is also how the broker learns that nobody waits any more; what was on its way to a pull that is
cancelled is given back.

A pull goes through an import (`broker/grants.py`). If its inbox is gone before the broker has looked at the request, it
takes the import itself for somebody who waits, and hands it a message that nobody gets before its patience is over. So
whoever cancels a pull first hears that the broker knows of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal

from tidings.broker.acks import NAK, Delivery, parse_delivery
from tidings.broker.aio import undisturbed
from tidings.broker.client import Connection, status_of
from tidings.errors import TidingsError
from tidings.nats.errors import NatsError

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
Take = Callable[[Any, Delivery], Awaitable[None]]


async def pull(connection: Connection, stream: str, consumer: str, batch: int, expires: float, take: Take) -> Ended:
    """Ask for up to `batch` messages within `expires` seconds and hand over each as it comes."""
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
    deadline, taken = clock() + patience, 0
    while taken < batch:
        try:
            message = await subscription.next(max(0.001, deadline - clock()))
        except TimeoutError:
            return "over"
        delivery = parse_delivery(message.reply)
        if delivery is not None:
            taken += 1
            await take(message, delivery)
        elif (status := status_of(message)) is not None and status.status != 100:
            if taken and "maxbytes" in status.description.lower().replace(" ", ""):
                return "full"
            return "over" if status.status in (404, 408) else "refused"
    return "full"
