"""Publishing in bulk: pipelined, bounded, fenced, and in order per destination.

`publish_in_order`: many destinations at a time; the messages of one go one after the other, each after the broker
acknowledged the one before, and a destination that refuses gets no more. Every message states the lease it is written
under, so the broker refuses a holder that was replaced (`LeaseLost`). A connection that goes leaves outcomes nobody
knows: `ConnectionGone`, and whoever called repeats the batch. A message that the broker was too busy for was not
stored, and goes again. To a stream with replicas fenced messages go in atomic batches instead (`BatchPublisher`).

`store_blocks`: sealed blocks go the same way without a fence, an id or an order: what they are decides their name, and
nothing depends on their being there. So one that is refused, or not answered for a while, is told and does not end
anything.

`publish_rows`: as fast as the broker takes them, whatever their subjects. The broker stores what one connection sends
to a stream in the order it was sent, so rows keep their order as long as none is refused. When one is, those sent after
it may have been stored already.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar

from tidings.errors import LeaseLost, TidingsError, UnhealthyError
from tidings.nats.errors import ApiError, ConnectionGone, Refusal
from tidings.nats.jetstream_api import EXPECT_SEQUENCE, read_ack
from tidings.nats.jetstream_blocking import Message, Window, WorkerConnection
from tidings.util.failpoints import reach
from tidings.wire.message import new_id
from tidings.wire.records import encode_headers

#: a broker that stores half a megabyte per message on a busy disk may take a while
ANSWER_TIMEOUT = 30.0
#: a block may travel in frames instead
BLOCK_TIMEOUT = 10.0
#: the broker refuses what is more than it buffers for a stream: 10,000 messages of all its writers together, if nobody
#: changed `max_buffered_msgs`. Half of this many is a quarter slower
ROWS_IN_FLIGHT = 4_096
#: of one batch, in messages and in bytes; the broker takes 1,000
BATCH = 500
BATCH_BYTES = 4 * 1024 * 1024
#: seconds of silence after which nobody knows whether a batch was stored
BATCH_TIMEOUT = 10.0
#: seconds for which a stream without a leader is asked again, and how often
PATIENCE = 30.0
PAUSE = 0.1
Name = TypeVar("Name", str, int)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish. `id` is its `Nats-Msg-Id`, if it is known by one."""

    subject: str
    id: str | None
    payload: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Published:
    """What became of one destination: the sequences of what was stored, and why it ended early if it did."""

    sequences: list[int]
    refused: str | None = None


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
    results = {name: Published([]) for name in destinations}
    _publish_lanes(Window(connection, ANSWER_TIMEOUT), destinations, fence, results, "deliver.frame")
    return results


def store_blocks(connection: WorkerConnection, blocks: Mapping[int, Iterable[Outgoing]]) -> tuple[dict[int, str], bool]:
    """Publish each block. Answers why which were not stored, and whether the connection still serves.

    A connection that went is `ConnectionGone` here too: silence alone says nothing of it, but leaves answers to come.
    """
    results = {index: Published([]) for index in blocks}
    serves = True
    try:
        _publish_lanes(Window(connection, BLOCK_TIMEOUT), blocks, {}, results, "deliver.block")
    except ConnectionGone as error:
        if not isinstance(error.__cause__, TimeoutError):
            raise
        serves = False
    return {index: sent.refused or "no answer" for index, sent in results.items() if not sent.sequences}, serves


def publish_rows(connection: WorkerConnection, rows: Iterable[Message], in_flight: int = ROWS_IN_FLIGHT) -> int:
    """Publish all rows; returns how many, once all of them are acknowledged. An error is the end of it."""
    window: Window[None] = Window(connection, ANSWER_TIMEOUT, in_flight)
    waiting = zip(repeat(None), rows, strict=False)
    stored = 0
    window.send(waiting)
    while window.under_way:
        _, row, ack = window.answer()
        if isinstance(ack, ApiError):
            raise _row_refused(row[0], stored, ack) from ack
        stored += 1
        window.send(waiting)
    return stored


def _row_refused(subject: str, stored: int, error: ApiError) -> TidingsError:
    if error.refusal is Refusal.STALE:
        return LeaseLost(f"the lease has a newer holder: {subject} was refused ({error.description})")
    if error.refusal is Refusal.BUSY:
        return UnhealthyError(
            f"{subject} has another write of this id or lease under way, and refused a row: nothing of it was stored, "
            "and the task may be tried again"
        )
    if error.status == 429:
        return UnhealthyError(
            f"the broker has more to store than it buffers, and refused a row of {subject}: less maxInFlight, or fewer "
            "tasks at a time"
        )
    return UnhealthyError(f"{subject} took {stored} rows and no more: {_reason(error)}")


def _publish_lanes(
    window: Window[Name],
    destinations: Mapping[Name, Iterable[Outgoing]],
    fence: Mapping[str, str],
    results: Mapping[Name, Published],
    failpoint: str,
) -> None:
    """Publish everything, one message of each destination at a time. What became of it is in `results`."""
    lanes: dict[Name, Iterator[Message]] = {name: _encode(each, fence) for name, each in destinations.items()}
    ready = deque(lanes)

    def next_of_each() -> Iterator[tuple[Name, Message]]:
        while ready:
            name = ready.popleft()
            message = next(lanes[name], None)
            if message is not None:
                yield name, message

    window.send(next_of_each())
    while window.under_way:
        name, message, ack = window.answer()
        if not isinstance(ack, ApiError):
            results[name].sequences.append(ack.seq)
            reach(failpoint)
            ready.append(name)
        elif ack.refusal is Refusal.BUSY:
            lanes[name] = chain((message,), lanes[name])
            ready.append(name)
        else:
            _check_lease(ack, 0)
            results[name].refused = _reason(ack)
        window.send(next_of_each())


def _encode(messages: Iterable[Outgoing], fence: Mapping[str, str]) -> Iterator[Message]:
    for message in messages:
        fields = _fields(message, fence)
        yield message.subject, encode_headers(fields) if fields else b"", message.payload


def _fields(message: Outgoing, fence: Mapping[str, str]) -> list[tuple[str, str]]:
    """The headers of a message that is written under a lease."""
    named = [("Nats-Msg-Id", message.id)] if message.id is not None else []
    return [*named, *fence.items(), *message.headers]


def _reason(error: ApiError) -> str:
    return f"{error.description} ({error.err_code})"


def _check_lease(refused: ApiError, seq: int) -> None:
    """LeaseLost if a refusal says that the lease at `seq` has another holder."""
    if refused.refusal is Refusal.STALE and not refused.proves_nothing(seq):
        raise LeaseLost(f"somebody else delivers now: the broker refused a write ({refused.description})") from refused


# --- to a stream with replicas ---


def batch_of(config: Mapping[str, Any]) -> int | None:
    """How many messages under a lease a stream of these settings takes at a time; None: any number, each alone."""
    if int(config.get("num_replicas", 1)) == 1:
        return None
    return BATCH if config.get("allow_atomic") else 1


class _Item(NamedTuple):
    destination: str
    message: Outgoing


class BatchPublisher:
    """Publishes under a lease to a stream with replicas, to every destination in its order.

    Such a stream looks at one write of a lease at a time and refuses all others that are under way, so a window of
    single messages stores one of many. An atomic batch states the lease once, with its first message, and is stored as
    a whole or not at all: within it the order is kept, and a batch that was staged before a takeover is refused. One is
    under way at a time. `size` of 1: one message at a time, for a stream without batches.

    A batch is refused as a whole for one full destination or one id that the stream has. It is cut in two then, as
    often as needed: whatever else is in it is stored, and a single message is answered for itself. A destination that
    refused one gets no more. While the stream has no leader, or is busy, nothing was stored and it is asked again.
    """

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
                self.results[batch[0].destination].refused = _reason(error)
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
                is_early = error.is_temporary or error.proves_nothing(self._lease)
                if not is_early or time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE)

    def _asked(self, batch: Sequence[_Item]) -> int:
        subject = batch[-1].message.subject
        token = self._connection.publish_together(self._blocks(batch))
        reply = self._connection.answer(token, BATCH_TIMEOUT)
        try:
            return read_ack(subject, reply.block, reply.payload).seq
        except ApiError as error:
            _check_lease(error, self._lease)
            raise

    def _blocks(self, batch: Sequence[_Item]) -> list[Message]:
        name = new_id()
        found: list[Message] = []
        for number, (_, message) in enumerate(batch, 1):
            fields = _fields(message, self._fence if number == 1 else {})
            if len(batch) > 1:
                fields += [("Nats-Batch-Id", name), ("Nats-Batch-Sequence", str(number))]
                fields += [("Nats-Batch-Commit", "1")] if number == len(batch) else []
            found.append((message.subject, encode_headers(fields) if fields else b"", message.payload))
        return found
