"""A client with an agent's credential that writes protocol lines itself, because a library would not send them.

A denied publish or subscription is answered by `-ERR` before the `PONG` of the next `PING`, so `flush` is all the
waiting a refusal needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidings.nats import jwt
from tidings.nats.client import Connection, connect
from tidings.nats.errors import NatsError
from tidings.rpc.control import ControlClient
from tidings.wire.records import Field, encode_headers
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects

PATIENCE = 5.0


def line(
    subject: str | bytes, payload: bytes = b"", *, reply: str = "", headers: Iterable[Field] | bytes | None = None
) -> bytes:
    """A PUB or HPUB as it travels; nothing is checked. `headers` are fields, or a block of your own."""
    name = subject if isinstance(subject, bytes) else subject.encode()
    to = f"{reply} ".encode() if reply else b""
    if headers is None:
        return b"PUB %b %b%d\r\n%b\r\n" % (name, to, len(payload), payload)
    block = headers if isinstance(headers, bytes) else encode_headers(headers)
    return b"HPUB %b %b%d %d\r\n%b%b\r\n" % (name, to, len(block), len(block) + len(payload), block, payload)


@dataclass
class Actor:
    id: str
    key: KeyPair
    connection: Connection
    control: ControlClient
    complaints: list[str] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, *lines: bytes) -> None:
        """Write protocol lines; returns when the broker has read them all."""
        for each in lines:
            await self.connection.write_raw(each)
        await self.connection.flush(timeout=int(PATIENCE))

    async def throw(self, data: bytes) -> None:
        """Write and do not wait: the broker may cut the connection instead of answering."""
        await self.connection.write_raw(data)

    async def not_refused(self, attempts: Mapping[str, bytes]) -> list[str]:
        """Send each line; answers the subjects the broker did not complain about."""
        before = len(self.complaints)
        await self.send(*attempts.values())
        said = "\n".join(self.complaints[before:])
        return [subject for subject in attempts if f'"{subject.lower()}"' not in said]

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Iterable[Field] | bytes | None = None,
        timeout: float = PATIENCE,
    ) -> Any:
        return await self.ask(lambda inbox: line(subject, payload, reply=inbox, headers=headers), timeout=timeout)

    async def pull(self, mailbox: tuple[str, str], *, wait: bool = False) -> Any:
        """The next message of a mailbox, or the broker's answer that it is empty. `wait`: a message was stored; on a
        cluster the consumer may learn of it later than its publisher."""
        stream, consumer = mailbox
        asked = b'{"batch":1,"expires":4000000000}' if wait else b'{"batch":1,"no_wait":true}'
        return await self.request(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", asked)

    async def ask(self, make: Callable[[str], bytes], *, timeout: float = PATIENCE) -> Any:
        """Send the line `make(reply)` with a fresh inbox and return the first answer."""
        inbox = self.connection.new_inbox()
        subscription = await self.connection.subscribe(inbox)
        try:
            await self.throw(make(inbox))
            return await subscription.next(timeout)
        finally:
            await subscription.unsubscribe()


@asynccontextmanager
async def acting(url: str, subjects: Subjects, creds: Path) -> AsyncIterator[Actor]:
    """A connection with the credential in `creds`; it never reconnects, so being cut is seen."""
    _, key = jwt.split_credentials(creds.read_text())
    complaints: list[str] = []
    closed = asyncio.Event()

    def on_error(error: Exception) -> None:
        complaints.append(str(error).lower())

    connection = await connect(
        url, creds, key.id, name=creds.stem, reconnect=False, on_error=on_error, on_closed=closed.set
    )
    try:
        yield Actor(key.id, key, connection, ControlClient(connection, subjects, key.id), complaints, closed)
    finally:
        with suppress(NatsError, OSError, TimeoutError):
            await asyncio.wait_for(connection.close(), 3)
