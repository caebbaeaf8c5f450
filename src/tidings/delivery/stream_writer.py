"""Rows published as fast as the broker takes them: many are under way at a time, whatever their subjects.

The broker stores what one connection sends to a stream in the order it was sent, so rows keep their order as long as
none is refused. When one is, those sent after it may have been stored already: `publishing.publish_in_order` waits for
each acknowledgement of a subject instead, and stores none after one that was refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from tidings.delivery.publishing import ANSWER_TIMEOUT, MAX_BYTES_IN_FLIGHT
from tidings.errors import LeaseLost, UnhealthyError
from tidings.nats.blocking import Reply
from tidings.nats.jetstream_api import WRONG_LAST_SEQUENCE, ApiError, stored_seq
from tidings.nats.jetstream_blocking import WorkerConnection

#: the broker refuses what is more than it buffers for a stream: 10,000 messages of all its writers together, if nobody
#: changed `max_buffered_msgs`. Half of this many is a quarter slower
ROWS_IN_FLIGHT = 4_096

#: subject, header block, payload
Ready = tuple[str, bytes, bytes]


class PipelinedWriter:
    """Give it rows with `write`; `finish` returns once all of them are acknowledged. An error is the end of it."""

    def __init__(self, connection: WorkerConnection, in_flight: int = ROWS_IN_FLIGHT) -> None:
        self._connection = connection
        self._chunk_rows = max(in_flight // 8, 1)
        self._room = in_flight - self._chunk_rows
        self._answers = connection.replies(ANSWER_TIMEOUT)
        #: token -> subject and size
        self._flying: dict[int, tuple[str, int]] = {}
        self._bytes = 0
        self.stored = 0

    def write(self, rows: Iterable[Ready]) -> None:
        rows = iter(rows)
        while chunk := self._chunk(rows):
            tokens = self._connection.publish_all(chunk)
            sizes = [(subject, len(block) + len(payload)) for subject, block, payload in chunk]
            self._flying.update(zip(tokens, sizes, strict=True))
            self._bytes += sum(size for _, size in sizes)
            while len(self._flying) > self._room or self._bytes > MAX_BYTES_IN_FLIGHT:
                self._take()

    def finish(self) -> int:
        """How many rows were stored."""
        while self._flying:
            self._take()
        return self.stored

    def _chunk(self, rows: Iterator[Ready]) -> list[Ready]:
        """What goes out in one write: not many, and not many large ones."""
        chunk: list[Ready] = []
        size = 0
        for row in islice(rows, self._chunk_rows):
            chunk.append(row)
            size += len(row[2])
            if size > MAX_BYTES_IN_FLIGHT // 4:
                break
        return chunk

    def _take(self) -> None:
        reply = next(self._answers)
        found = self._flying.pop(reply.token, None)
        if found is None:
            return
        subject, size = found
        self._bytes -= size
        if not reply.payload.startswith(b'{"stream":') or reply.block:
            self._refused(subject, reply)
        self.stored += 1

    def _refused(self, subject: str, reply: Reply) -> None:
        """Raises, unless the broker has only said it differently."""
        if reply.status == 429:
            raise UnhealthyError(
                f"the broker has more to store than it buffers, and refused a row of {subject}: less maxInFlight, or "
                "fewer tasks at a time"
            )
        if reply.status is not None:
            raise UnhealthyError(f"no stream takes {subject} ({reply.status})")
        try:
            stored_seq(subject, reply.payload)
        except ApiError as error:
            if error.is_busy:
                raise UnhealthyError(
                    f"{subject} has another write of this id or lease under way, and refused a row: nothing of it was "
                    "stored, and the task may be tried again"
                ) from error
            if error.err_code == WRONG_LAST_SEQUENCE:
                raise LeaseLost(f"the lease has a newer holder: {subject} was refused ({error.description})") from error
            raise UnhealthyError(
                f"{subject} took {self.stored} rows and no more: {error.description} ({error.err_code})"
            ) from error
