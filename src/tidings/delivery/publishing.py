"""Publishing in bulk: pipelined, bounded, fenced, and in order per destination.

Many messages are in flight at once, never more than the bounds; the messages of one destination go one after the other,
each after the broker acknowledged the one before, and a destination that refuses gets no more. Every message states the
lease it is written under, so the broker refuses a holder that was replaced (`LeaseLost`). A connection that goes leaves
outcomes nobody knows: `ConnectionGone`, and whoever called repeats the batch. A message that the broker was too busy
for was not stored, and goes again. To a stream with replicas fenced messages go in batches instead (`batches.py`).

Sealed blocks (`store_blocks`) go the same way without a fence, an id or an order: what they are decides their name, and
nothing depends on their being there. So one that is refused, or not answered for a while, is told and does not end
anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Generic, TypeVar

from tidings.delivery.batches import BatchPublisher
from tidings.delivery.outgoing import Outgoing, Published, fenced, lease_lost
from tidings.errors import LeaseLost
from tidings.nats.blocking import Reply
from tidings.nats.errors import ConnectionGone
from tidings.nats.jetstream_api import ApiError, stored_seq
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.util.failpoints import reach
from tidings.wire.records import encode_headers

#: what one connection may have on its way
MAX_IN_FLIGHT = 512
MAX_BYTES_IN_FLIGHT = 16 * 1024 * 1024
#: a broker that stores half a megabyte per message on a busy disk may take a while
ANSWER_TIMEOUT = 30.0
#: a block may travel in frames instead
BLOCK_TIMEOUT = 10.0
Name = TypeVar("Name", str, int)


def publish_in_order(
    connection: WorkerConnection,
    destinations: Mapping[str, Iterable[Outgoing]],
    fence: Mapping[str, str],
    *,
    batch: int | None = None,
) -> dict[str, Published]:
    """Publish to every destination in its order, to all of them together; with `batch` so many at a time."""
    if batch is not None:
        return BatchPublisher(connection, fence, size=batch).run(destinations)
    window = _Window(connection, fence, destinations)
    window.run(ANSWER_TIMEOUT, "deliver.frame")
    return window.results


def store_blocks(connection: WorkerConnection, blocks: Mapping[int, Iterable[Outgoing]]) -> tuple[dict[int, str], bool]:
    """Publish each block. Answers why which were not stored, and whether the connection still serves.

    A connection that went is `ConnectionGone` here too: silence alone says nothing of it, but leaves answers to come.
    """
    window = _Window(connection, {}, blocks)
    serves = True
    try:
        window.run(BLOCK_TIMEOUT, "deliver.block")
    except ConnectionGone as error:
        if not isinstance(error.__cause__, TimeoutError):
            raise
        serves = False
    results = window.results.items()
    return {block: sent.refused or "no answer" for block, sent in results if not sent.sequences}, serves


class _Window(Generic[Name]):
    """Destinations have names of the caller's."""

    def __init__(
        self,
        connection: WorkerConnection,
        fence: Mapping[str, str],
        destinations: Mapping[Name, Iterable[Outgoing]],
    ) -> None:
        self._connection = connection
        self._fence = fence
        self._rest: dict[Name, Iterator[Outgoing]] = {name: iter(each) for name, each in destinations.items()}
        self.results: dict[Name, Published] = {name: Published([]) for name in destinations}
        #: token -> destination and message
        self._flying: dict[int, tuple[Name, Outgoing]] = {}
        self._bytes = 0

    def run(self, patience: float, failpoint: str) -> None:
        """Publish everything; `patience` is for one answer while others come."""
        ready = deque(self._rest)
        answers = self._connection.replies(patience)
        while ready or self._flying:
            self._send_ready(ready)
            if not self._flying:
                continue
            reply = next(answers)
            flew = self._flying.pop(reply.token, None)
            if flew is None:
                continue
            destination, message = flew
            self._bytes -= len(message.payload)
            try:
                self.results[destination].sequences.append(_stored(reply, message.subject))
                reach(failpoint)
                ready.append(destination)
            except ApiError as error:
                if error.is_busy:
                    self._rest[destination] = chain((message,), self._rest[destination])
                    ready.append(destination)
                    continue
                self.results[destination].refused = f"{error.description} ({error.err_code})"

    def _send_ready(self, ready: deque[Name]) -> None:
        batch: list[tuple[str, bytes, bytes]] = []
        names: list[tuple[Name, Outgoing]] = []
        while ready and len(self._flying) + len(batch) < MAX_IN_FLIGHT and self._bytes < MAX_BYTES_IN_FLIGHT:
            destination = ready.popleft()
            message = next(self._rest[destination], None)
            if message is None:
                continue
            batch.append((message.subject, self._block(message), message.payload))
            names.append((destination, message))
            self._bytes += len(message.payload)
        if batch:
            self._flying.update(zip(self._connection.publish_all(batch), names, strict=True))

    def _block(self, message: Outgoing) -> bytes:
        fields = fenced(message, self._fence)
        return encode_headers(fields) if fields else b""


def _stored(reply: Reply, destination: str) -> int:
    """The sequence in an acknowledgement. `ApiError` ends its destination, `LeaseLost` everything that follows."""
    if reply.status is not None:
        raise ApiError(destination, {"err_code": reply.status, "description": f"no stream takes {destination}"})
    try:
        return stored_seq(destination, reply.payload)
    except ApiError as error:
        if lost := lease_lost(error, 0):
            raise LeaseLost(lost) from error
        raise
