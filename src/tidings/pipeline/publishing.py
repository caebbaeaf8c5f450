"""Publishing in bulk: pipelined, bounded, fenced, and in order per destination.

Many messages are in flight at once, never more than the bounds; the messages of one destination go one after the other,
each after the broker acknowledged the one before, and a destination that refuses gets no more. Every message states the
lease it is written under, so the broker refuses a holder that was replaced (`LeaseLost`). A connection that goes leaves
outcomes nobody knows: `ConnectionGone`, and whoever called repeats the batch.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidings.broker.answers import EXPECT_SEQUENCE, EXPECT_SUBJECT, WRONG_LAST_SEQUENCE
from tidings.broker.blocking import WorkerConnection
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
class Fence:
    """The lease a message is written under."""

    subject: str
    seq: int

    def headers(self) -> tuple[tuple[str, str], ...]:
        return ((EXPECT_SEQUENCE, str(self.seq)), (EXPECT_SUBJECT, self.subject))


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish. `id` is its `Nats-Msg-Id`."""

    subject: str
    id: str
    payload: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Refusal(Exception):
    """The broker did not store a message; the destination gets no more."""

    def __init__(self, code: int, description: str) -> None:
        self.code, self.description = code, description
        super().__init__(f"{description} ({code})")


@dataclass(slots=True)
class Sent:
    """What became of one destination: the sequences of what was stored, and why it ended early if it did."""

    sequences: list[int]
    refused: str | None = None


def publish_in_order(
    connection: WorkerConnection, lanes: Mapping[str, Iterable[Outgoing]], fence: Fence | None
) -> dict[str, Sent]:
    """Publish every lane in its order, all lanes together."""
    return _Window(connection, fence).run(lanes)


class _Window:
    def __init__(self, connection: WorkerConnection, fence: Fence | None) -> None:
        self._connection = connection
        self._fence = fence
        self._flying: dict[int, tuple[str, int]] = {}
        self._bytes = 0

    def run(self, lanes: Mapping[str, Iterable[Outgoing]]) -> dict[str, Sent]:
        rest: dict[str, Iterator[Outgoing]] = {name: iter(lane) for name, lane in lanes.items()}
        results = {name: Sent([]) for name in lanes}
        ready = deque(rest)
        answers = self._connection.replies(ANSWER_TIMEOUT)
        while ready or self._flying:
            self._send_ready(ready, rest)
            if not self._flying:
                continue
            reply = next(answers)
            lane = self._landed(reply)
            if lane is None:
                continue
            try:
                results[lane].sequences.append(_stored(reply, lane))
                reach("deliver.frame")
                ready.append(lane)
            except Refusal as refusal:
                results[lane].refused = str(refusal)
        return results

    def _send_ready(self, ready: deque[str], rest: Mapping[str, Iterator[Outgoing]]) -> None:
        batch: list[tuple[str, bytes, bytes]] = []
        names: list[tuple[str, int]] = []
        while ready and len(self._flying) + len(batch) < MAX_IN_FLIGHT and self._bytes < MAX_BYTES_IN_FLIGHT:
            lane = ready.popleft()
            message = next(rest[lane], None)
            if message is None:
                continue
            batch.append((message.subject, self._block(message), message.payload))
            names.append((lane, len(message.payload)))
            self._bytes += len(message.payload)
        if batch:
            self._flying.update(zip(self._connection.publish_all(batch), names, strict=True))

    def _block(self, message: Outgoing) -> bytes:
        fence = self._fence.headers() if self._fence else ()
        return encode_headers((("Nats-Msg-Id", message.id), *fence, *message.headers))

    def _landed(self, reply: Reply) -> str | None:
        lane, size = self._flying.pop(reply.token, (None, 0))
        self._bytes -= size
        return lane


def _stored(reply: Reply, lane: str) -> int:
    """The sequence in an acknowledgement. Raises `Refusal`, or `LeaseLost` for everything that follows."""
    if reply.status is not None:
        raise Refusal(reply.status, f"no stream takes {lane}")
    answer = json.loads(reply.payload)
    error = answer.get("error")
    if not error:
        return int(answer["seq"])
    if error.get("err_code") == WRONG_LAST_SEQUENCE:
        raise LeaseLost(f"somebody else delivers now: the broker refused a write ({error.get('description')})")
    raise Refusal(int(error.get("err_code", 0)), str(error.get("description", "")))


def acknowledged(results: Mapping[str, Sent]) -> dict[str, Sequence[int]]:
    return {lane: sent.sequences for lane, sent in results.items()}
