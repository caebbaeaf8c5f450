"""Publishing under a lease to a stream with replicas: in atomic batches, one under way at a time.

Such a stream looks at one write of a lease at a time and refuses all others that are under way, so a window of single
messages (`publishing.py`) stores one of many. A batch states the lease once, with its first message, and is stored as
a whole or not at all: within it the order is kept, and a batch that was staged before a takeover is refused.

A batch is refused as a whole for one full destination or one id that the stream has. It is cut in two then, as often as
needed: whatever else is in it is stored, and a single message is answered for itself. A destination that refused one
gets no more. While the stream has no leader, or is busy, nothing was stored and it is asked again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tidings.delivery.outgoing import Outgoing, Published, fenced, lease_lost
from tidings.errors import LeaseLost
from tidings.nats.jetstream_api import EXPECT_SEQUENCE, ApiError, stored_seq
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.util.failpoints import reach
from tidings.wire.message import new_id
from tidings.wire.records import encode_headers

#: of one batch, in messages and in bytes; the broker takes 1,000
BATCH = 500
BATCH_BYTES = 4 * 1024 * 1024
#: seconds of silence after which nobody knows whether a batch was stored
ANSWER_TIMEOUT = 10.0
#: seconds for which a stream without a leader is asked again, and how often
PATIENCE = 30.0
PAUSE = 0.1
#: the leader changed while a batch was on its way
INCOMPLETE = 10176
NO_RESPONDERS = 503


def batch_of(config: Mapping[str, Any]) -> int | None:
    """How many messages under a lease a stream of these settings takes at a time; None: any number, each alone."""
    if int(config.get("num_replicas", 1)) == 1:
        return None
    return BATCH if config.get("allow_atomic") else 1


class _Item(NamedTuple):
    destination: str
    message: Outgoing


class BatchPublisher:
    """Publishes to every destination in its order. `size` of 1: one message at a time, for a stream without batches."""

    def __init__(self, connection: WorkerConnection, fence: Mapping[str, str], *, size: int = BATCH) -> None:
        self._connection, self._fence, self._size = connection, fence, size
        self._lease = int(fence[EXPECT_SEQUENCE])
        self.results: dict[str, Published] = {}

    def run(self, destinations: Mapping[str, Iterable[Outgoing]]) -> dict[str, Published]:
        self.results = {name: Published([]) for name in destinations}
        for batch in self._batches(self._items(destinations)):
            self._store(batch)
        return self.results

    def _items(self, destinations: Mapping[str, Iterable[Outgoing]]) -> Iterator[_Item]:
        """What is to be published; nothing more of a destination that refused something."""
        for name, messages in destinations.items():
            for message in messages:
                if self.results[name].refused is not None:
                    break
                yield _Item(name, message)

    def _batches(self, items: Iterator[_Item]) -> Iterator[list[_Item]]:
        batch: list[_Item] = []
        size = 0
        for item in items:
            if batch and (len(batch) == self._size or size + len(item.message.payload) > BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += len(item.message.payload)
        if batch:
            yield batch

    def _store(self, batch: Sequence[_Item]) -> None:
        batch = [item for item in batch if self.results[item.destination].refused is None]
        if not batch:
            return
        try:
            last = self._asked_until_answered(batch)
        except ApiError as error:
            if len(batch) == 1:
                self.results[batch[0].destination].refused = f"{error.description} ({error.err_code})"
                return
            middle = len(batch) // 2
            self._store(batch[:middle])
            self._store(batch[middle:])
            return
        for seq, item in enumerate(batch, last - len(batch) + 1):
            self.results[item.destination].sequences.append(seq)
            reach("deliver.frame")

    def _asked_until_answered(self, batch: Sequence[_Item]) -> int:
        """The sequence of the last one. `LeaseLost` once somebody else has the lease."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self._asked(batch)
            except ApiError as error:
                is_early = error.err_code in (INCOMPLETE, NO_RESPONDERS) or error.proves_nothing(self._lease)
                if not is_early or time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE)

    def _asked(self, batch: Sequence[_Item]) -> int:
        subject = batch[-1].message.subject
        token = self._connection.publish_together(self._blocks(batch))
        reply = self._connection.answer(token, ANSWER_TIMEOUT)
        if reply.status is not None:
            raise ApiError(subject, {"err_code": reply.status, "description": f"no stream takes {subject}"})
        try:
            return stored_seq(subject, reply.payload)
        except ApiError as error:
            if lost := lease_lost(error, self._lease):
                raise LeaseLost(lost) from error
            raise

    def _blocks(self, batch: Sequence[_Item]) -> list[tuple[str, bytes, bytes]]:
        name = new_id()
        found: list[tuple[str, bytes, bytes]] = []
        for number, (_, message) in enumerate(batch, 1):
            fields = fenced(message, self._fence if number == 1 else {})
            if len(batch) > 1:
                fields += [("Nats-Batch-Id", name), ("Nats-Batch-Sequence", str(number))]
                fields += [("Nats-Batch-Commit", "1")] if number == len(batch) else []
            found.append((message.subject, encode_headers(fields) if fields else b"", message.payload))
        return found
