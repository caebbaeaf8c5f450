"""The JetStream calls we make, each as the request it is.

Thin on purpose: typed errors with the server's own code, records with their raw header block, and paged reads that
are never shorter than the server says. No caching and no retry here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tidings.broker.answers import NO_MESSAGE, ApiError
from tidings.broker.client import Connection, status_of
from tidings.errors import BrokerUnreachable, LogFull, LogGap, OutcomeUnknown, WireError
from tidings.nats.errors import NatsError, NoResponders, NotConnected, PublishDenied, Unwritable
from tidings.wire.headers import DIRECT_GET_HEADERS, Fields, Headers, split_block
from tidings.wire.times import parse_time

PAGE = 1_000
#: of one answer; several may be under way on a connection, which the broker cuts when 8 MB wait for it
PAGE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record of a stream, with the header block its sender wrote (it may be garbage)."""

    seq: int
    time_ns: int
    subject: str
    own_block: bytes
    payload: bytes

    def own_fields(self) -> Fields | None:
        """The sender's header fields, or None if they do not parse."""
        if not self.own_block:
            return ()
        try:
            return Headers.parse(self.own_block).fields
        except WireError:
            return None


class JetStream:
    """JetStream over one connection."""

    def __init__(self, connection: Connection, timeout: float = 5.0) -> None:
        self.connection = connection
        self.timeout = timeout

    async def api(self, operation: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> Any:
        """One `$JS.API` request; raises ApiError for the server's errors, OutcomeUnknown if nothing came back."""
        payload = b"" if body is None else json.dumps(body).encode()
        answer = json.loads(await self._request(f"$JS.API.{operation}", payload, None, timeout))
        if answer.get("error"):
            raise ApiError(operation, answer["error"])
        return answer

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, timeout: float | None = None
    ) -> int:
        """Publish and wait for the acknowledgement; the answer is the sequence."""
        try:
            answer = json.loads(await self._request(subject, payload, headers, timeout))
        except NoResponders as error:
            raise LogFull(f"no stream takes {subject}: the log is full or the broker is starting") from error
        if answer.get("error"):
            raise ApiError(f"publish to {subject}", answer["error"])
        return int(answer["seq"])

    async def _request(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, timeout: float | None
    ) -> bytes:
        try:
            message = await self.connection.request(
                subject, payload, timeout=timeout or self.timeout, headers=dict(headers) if headers else None
            )
        except NoResponders:
            if subject.startswith("$JS."):
                raise BrokerUnreachable(f"JetStream does not answer {subject}") from None
            raise
        except (PublishDenied, Unwritable):
            raise
        except NotConnected as error:
            raise BrokerUnreachable(f"there is no connection to ask {subject} on: {error}") from error
        except (TimeoutError, NatsError, OSError) as error:
            raise OutcomeUnknown(f"no answer to {subject} ({type(error).__name__}): it may have happened") from error
        return bytes(message.data)

    async def last(self, stream: str, subject: str) -> StoredRecord | None:
        """The newest record of one subject, read from the leader."""
        return await self._get(stream, {"last_by_subj": subject})

    async def at(self, stream: str, seq: int) -> StoredRecord | None:
        """The record at a sequence, read from the leader."""
        return await self._get(stream, {"seq": seq})

    async def following(self, stream: str, subject_filter: str, seq: int) -> StoredRecord | None:
        """The first record of a filter at or after a sequence, read from the leader."""
        return await self._get(stream, {"seq": seq, "next_by_subj": subject_filter})

    async def _get(self, stream: str, body: Mapping[str, Any]) -> StoredRecord | None:
        try:
            answer = await self.api(f"STREAM.MSG.GET.{stream}", body)
        except ApiError as error:
            if error.err_code == NO_MESSAGE:
                return None
            raise
        found = answer["message"]
        return StoredRecord(
            seq=found["seq"],
            time_ns=parse_time(found["time"]),
            subject=found["subject"],
            own_block=base64.b64decode(found.get("hdrs", "")),
            payload=base64.b64decode(found.get("data", "")),
        )

    async def info(self, stream: str) -> dict[str, Any]:
        return dict(await self.api(f"STREAM.INFO.{stream}"))

    async def subjects_of(self, stream: str, subject_filter: str) -> list[str]:
        """The subjects of a filter that have records now."""
        return list(await self.counts_of(stream, subject_filter))

    async def counts_of(self, stream: str, subject_filter: str) -> dict[str, int]:
        """The subjects of a filter that have records now, and how many each has."""
        found: dict[str, int] = {}
        while True:
            body = {"subjects_filter": subject_filter, "offset": len(found)}
            answer = await self.api(f"STREAM.INFO.{stream}", body)
            page = answer["state"].get("subjects") or {}
            found |= page
            if not page or len(found) >= int(answer.get("total", 0)):
                return found

    async def first_after(self, stream: str, subject_filter: str, when: datetime) -> int | None:
        """The sequence of the first record of `subject_filter` at or after `when`."""
        body = {"start_time": when.astimezone(UTC).isoformat(), "next_by_subj": subject_filter, "batch": 1}
        records = await self._page(stream, body)
        return records[0].seq if records else None

    async def read(
        self, stream: str, subject_filter: str, start: int, end: int, *, page: int = PAGE, max_bytes: int = PAGE_BYTES
    ) -> AsyncIterator[list[StoredRecord]]:
        """Pages of the records of `subject_filter` with start <= seq <= end, in order.

        A page is asked for with the sequence after the last one read, so an early end on byte limits costs a round
        trip and nothing else. The read ends only when the server has no more up to `end`.
        """
        position = start
        while position <= end:
            size = min(max_bytes, PAGE_BYTES)
            body = {"seq": position, "next_by_subj": subject_filter, "batch": page, "max_bytes": size}
            records = await self._page(stream, body)
            if not records:
                return
            self._check_order(stream, records, position)
            wanted = [record for record in records if record.seq <= end]
            if wanted:
                yield wanted
            if len(wanted) < len(records):
                return
            position = records[-1].seq + 1

    @staticmethod
    def _check_order(stream: str, records: list[StoredRecord], position: int) -> None:
        previous = position - 1
        for record in records:
            if record.seq <= previous:
                raise LogGap(f"{stream} answered {record.seq} after {previous}: the page is not in order")
            previous = record.seq

    async def _page(self, stream: str, body: Mapping[str, Any]) -> list[StoredRecord]:
        try:
            return await self._answers(stream, body)
        except (TimeoutError, NatsError, OSError) as error:
            raise BrokerUnreachable(f"{stream} stopped answering in the middle of a page") from error

    async def _answers(self, stream: str, body: Mapping[str, Any]) -> list[StoredRecord]:
        inbox = self.connection.new_inbox()
        subscription = await self.connection.subscribe(inbox)
        records: list[StoredRecord] = []
        try:
            await self.connection.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(body).encode(), reply=inbox)
            while True:
                first = await subscription.next(self.timeout)
                for message in (first, *subscription.waiting()):
                    if (status := status_of(message)) is not None:
                        _check_status(stream, status)
                        return records
                    records.append(_direct_record(stream, message.block, message.data))
        finally:
            await subscription.unsubscribe()

    async def purge(
        self, stream: str, *, subject_filter: str, below: int | None = None, keep: int | None = None
    ) -> int:
        """Remove records of a filter below a sequence, or all but the newest `keep`. Answers how many went."""
        body: dict[str, Any] = {"filter": subject_filter}
        if below is not None:
            body["seq"] = below
        if keep is not None:
            body["keep"] = keep
        answer = await self.api(f"STREAM.PURGE.{stream}", body, timeout=max(self.timeout, 30))
        return int(answer["purged"])


def _check_status(stream: str, headers: Headers) -> None:
    """204 ends a page, 404 means there is nothing; anything else is a fault of ours or the broker's."""
    if headers.status in (204, 404):
        return
    if headers.status == 503:
        raise BrokerUnreachable(f"{stream} is not there: direct get has no responder")
    raise ApiError(f"read {stream}", {"err_code": headers.status, "description": headers.description})


def _direct_record(stream: str, block: bytes, payload: bytes) -> StoredRecord:
    own, broker = split_block(block, DIRECT_GET_HEADERS)
    try:
        seq, subject, when = (broker[name] for name in ("Nats-Sequence", "Nats-Subject", "Nats-Time-Stamp"))
    except KeyError as error:
        raise LogGap(f"{stream} sent a record without its {error}") from None
    return StoredRecord(int(seq), parse_time(when), subject, own, payload)
