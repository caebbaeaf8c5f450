"""Publishing in bulk: pipelined, bounded, fenced, and in order per destination.

Many messages are in flight at once, never more than the bounds; the messages of one destination go one after the other,
each after the broker acknowledged the one before, and a destination that refuses gets no more. Every message states the
lease it is written under, so the broker refuses a holder that was replaced (`LeaseLost`). A connection that goes leaves
outcomes nobody knows: `ConnectionGone`, and whoever called repeats the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidings.broker.blocking import WorkerConnection
from tidings.broker.jetstream_api import WRONG_LAST_SEQUENCE, ApiError, stored_seq
from tidings.errors import LeaseLost
from tidings.failpoints import reach
from tidings.nats.blocking import Reply
from tidings.wire.headers import encode_headers

#: what one connection may have on its way
MAX_IN_FLIGHT = 512
MAX_BYTES_IN_FLIGHT = 16 * 1024 * 1024
#: a broker that stores half a megabyte per message on a busy disk may take a while
ANSWER_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish. `id` is its `Nats-Msg-Id`."""

    subject: str
    id: str
    payload: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Published:
    """What became of one destination: the sequences of what was stored, and why it ended early if it did."""

    sequences: list[int]
    refused: str | None = None


def publish_in_order(
    connection: WorkerConnection, destinations: Mapping[str, Iterable[Outgoing]], fence: Mapping[str, str]
) -> dict[str, Published]:
    """Publish to every destination in its order, to all of them together."""
    return _Window(connection, fence).run(destinations)


class _Window:
    def __init__(self, connection: WorkerConnection, fence: Mapping[str, str]) -> None:
        self._connection = connection
        self._fence = fence
        self._flying: dict[int, tuple[str, int]] = {}
        self._bytes = 0

    def run(self, destinations: Mapping[str, Iterable[Outgoing]]) -> dict[str, Published]:
        rest: dict[str, Iterator[Outgoing]] = {name: iter(destination) for name, destination in destinations.items()}
        results = {name: Published([]) for name in destinations}
        ready = deque(rest)
        answers = self._connection.replies(ANSWER_TIMEOUT)
        while ready or self._flying:
            self._send_ready(ready, rest)
            if not self._flying:
                continue
            reply = next(answers)
            destination = self._landed(reply)
            if destination is None:
                continue
            try:
                results[destination].sequences.append(_stored(reply, destination))
                reach("deliver.frame")
                ready.append(destination)
            except ApiError as error:
                results[destination].refused = f"{error.description} ({error.err_code})"
        return results

    def _send_ready(self, ready: deque[str], rest: Mapping[str, Iterator[Outgoing]]) -> None:
        batch: list[tuple[str, bytes, bytes]] = []
        names: list[tuple[str, int]] = []
        while ready and len(self._flying) + len(batch) < MAX_IN_FLIGHT and self._bytes < MAX_BYTES_IN_FLIGHT:
            destination = ready.popleft()
            message = next(rest[destination], None)
            if message is None:
                continue
            batch.append((message.subject, self._block(message), message.payload))
            names.append((destination, len(message.payload)))
            self._bytes += len(message.payload)
        if batch:
            self._flying.update(zip(self._connection.publish_all(batch), names, strict=True))

    def _block(self, message: Outgoing) -> bytes:
        return encode_headers((("Nats-Msg-Id", message.id), *self._fence.items(), *message.headers))

    def _landed(self, reply: Reply) -> str | None:
        destination, size = self._flying.pop(reply.token, (None, 0))
        self._bytes -= size
        return destination


def _stored(reply: Reply, destination: str) -> int:
    """The sequence in an acknowledgement. `ApiError` ends its destination, `LeaseLost` everything that follows."""
    if reply.status is not None:
        raise ApiError(destination, {"err_code": reply.status, "description": f"no stream takes {destination}"})
    try:
        return stored_seq(destination, reply.payload)
    except ApiError as error:
        if error.err_code == WRONG_LAST_SEQUENCE:
            words = f"somebody else delivers now: the broker refused a write ({error.description})"
            raise LeaseLost(words) from error
        raise


def acknowledged(results: Mapping[str, Published]) -> dict[str, Sequence[int]]:
    return {destination: sent.sequences for destination, sent in results.items()}
