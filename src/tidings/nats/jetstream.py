"""JetStream on an event loop: the steps of `jetstream_api.py` over one connection, and `publish` for agents and links.

It adds no caching, and repeats nothing but a message that the broker says it did not store for now. Reads end only
where the stream's leader says that there is no more, or, of a stream with replicas, where one of them proves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from tidings.errors import TidingsError
from tidings.nats import jetstream_api as api
from tidings.nats.client import Connection
from tidings.nats.core import Msg
from tidings.nats.errors import ApiError, NatsError, NoResponders
from tidings.nats.jetstream_api import Ack, Answer, Ask, AskPage, RangeReader, Request, Steps, read_ack
from tidings.wire.records import Page, StoredRecord

__all__ = ["PAGE", "PAGE_BYTES", "JetStream", "StoredRecord", "publish", "publish_all"]

PAGE = 1_000
#: of one answer; several may be under way on a connection, which the broker cuts when 8 MB wait for it
PAGE_BYTES = 1024 * 1024
#: seconds between two tries of a message that the broker cannot store for now
BUSY_PAUSE = 0.05
T = TypeVar("T")


async def publish(
    connection: Connection,
    subject: str,
    payload: bytes,
    headers: Mapping[str, str],
    *,
    timeout: float,
    only: str | None = None,
) -> Ack:
    """Publish on this connection and wait until it is stored. Several may be under way: they leave in order.

    Nothing was stored: `ApiError` (its `refusal` says why; a temporary one was tried again in time), `NoResponders`,
    `NotConnected`, `PublishDenied`, `Unwritable`. It may be stored: `TimeoutError`, `ConnectionGone`, `OutcomeUnknown`.
    `only`: as of `Connection.request`.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    while True:
        reply = await connection.request(subject, payload, headers=headers, timeout=deadline - clock(), only=only)
        try:
            return read_ack(subject, reply.block, reply.data)
        except ApiError as error:
            if not error.is_temporary or clock() + BUSY_PAUSE > deadline:
                raise
        await asyncio.sleep(BUSY_PAUSE)


async def publish_all(
    connection: Connection, messages: Sequence[tuple[str, bytes, bytes]], *, timeout: float, only: str | None = None
) -> list[Ack | Exception]:
    """`publish` for (subject, header block, payload) of many at once: what became of each, or what it would raise."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    found: list[Ack | Exception] = [TimeoutError()] * len(messages)
    due: Sequence[int] = range(len(messages))
    while due:
        batch = [messages[number] for number in due]
        replies: Sequence[Msg | Exception]
        try:
            replies = await connection.request_all(batch, timeout=deadline - clock(), only=only)
        except (NatsError, OSError) as error:
            replies = [error] * len(batch)
        for number, (subject, _, _), reply in zip(due, batch, replies, strict=True):
            found[number] = _became(subject, reply)
        if clock() + BUSY_PAUSE > deadline:
            break
        due = [number for number in due if isinstance(each := found[number], ApiError) and each.is_temporary]
        if due:
            await asyncio.sleep(BUSY_PAUSE)
    return found


def _became(subject: str, reply: Msg | Exception) -> Ack | Exception:
    if isinstance(reply, Exception):
        return reply
    if reply.block and reply.status == 503:
        return NoResponders(f"nobody listens on {subject}")
    try:
        return read_ack(subject, reply.block, reply.data)
    except TidingsError as error:
        return error


class JetStream:
    """JetStream over one connection."""

    def __init__(self, connection: Connection, timeout: float = 5.0) -> None:
        self.connection = connection
        self.timeout = timeout

    @property
    def replicated(self) -> bool:
        """May what is read come from a replica that lags? Not of a server that is alone."""
        return self.connection.is_clustered

    async def run(self, steps: Steps[T]) -> T:
        """Do what the steps ask for, one after the other, until they have their result."""
        try:
            request = next(steps)
            while True:
                try:
                    answer = await self._perform(request)
                except (NatsError, TidingsError, OSError) as error:  # a timeout is an OSError
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def _perform(self, request: Request) -> Answer | None:
        if isinstance(request, Ask):
            timeout = self.timeout if request.timeout is None else request.timeout
            message = await self.connection.request(
                request.subject, request.payload, timeout=timeout, headers=request.headers
            )
            return message.block, message.data
        if isinstance(request, AskPage):
            await self._fill(request)
        else:
            await asyncio.sleep(request.seconds)
        return None

    async def _fill(self, request: AskPage) -> None:
        inbox = self.connection.new_inbox()
        subscription = await self.connection.subscribe(inbox)
        try:
            await self.connection.publish(request.subject, request.payload, reply=inbox)
            while True:
                first = await subscription.next(self.timeout)
                for message in (first, *subscription.waiting()):
                    if not request.page.take(message.block, message.data):
                        return
        finally:
            await subscription.unsubscribe()

    # --- the calls of `jetstream_api` by name ---

    async def api(self, operation: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> Any:
        return await self.run(api.api(operation, body, timeout=timeout))

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, timeout: float | None = None
    ) -> int:
        return await self.run(api.publish(subject, payload, headers, timeout=timeout))

    async def last(self, stream: str, subject: str) -> StoredRecord | None:
        return await self.run(api.last(stream, subject))

    async def at(self, stream: str, seq: int, *, patient: bool = True) -> StoredRecord | None:
        return await self.run(api.at(stream, seq, replicated=self.replicated, patient=patient))

    async def following(self, stream: str, subject_filter: str, seq: int) -> StoredRecord | None:
        return await self.run(api.following(stream, subject_filter, seq, replicated=self.replicated))

    async def info(self, stream: str) -> dict[str, Any]:
        return await self.run(api.info(stream))

    async def subjects_of(self, stream: str, subject_filter: str) -> list[str]:
        """The subjects of a filter that have records now."""
        return list(await self.counts_of(stream, subject_filter))

    async def counts_of(self, stream: str, subject_filter: str) -> dict[str, int]:
        return await self.run(api.counts_of(stream, subject_filter))

    async def first_after(self, stream: str, subject_filter: str, when: datetime) -> int | None:
        return await self.run(api.first_after(stream, subject_filter, when, replicated=self.replicated))

    async def purge(
        self, stream: str, *, subject_filter: str, below: int | None = None, keep: int | None = None
    ) -> int:
        return await self.run(api.purge(stream, subject_filter=subject_filter, below=below, keep=keep))

    async def read(
        self, stream: str, subject_filter: str, start: int, end: int, *, page: int = PAGE, max_bytes: int = PAGE_BYTES
    ) -> AsyncIterator[list[StoredRecord]]:
        """Pages of the records of `subject_filter` with start <= seq <= end, in order."""
        size = min(max_bytes, PAGE_BYTES)
        reader = RangeReader(
            *(stream, subject_filter, start, end), page=page, max_bytes=size, replicated=self.replicated
        )
        while not reader.done:
            for part in await self.run(reader.next_parts()):
                assert isinstance(part, Page)
                yield list(part.records())
