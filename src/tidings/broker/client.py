"""A NATS connection that tells the truth about headers, and how we open one.

nats-py keeps one value per header name and takes any `Status:` header for a word of the server. Senders can set
both, so this client parses the raw block itself: status only from the protocol's first line, fields in wire order.
It adds no retry policy; who holds a connection decides what to do when it is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from nats.aio.client import Client, RawCredentials
from nats.errors import Error as NatsError

from tidings.broker.private_files import check_private
from tidings.errors import AuthRevoked, BrokerUnreachable, WireError
from tidings.wire.headers import Headers

ErrorCallback = Callable[[Exception], Awaitable[None]]
Callback = Callable[[], Awaitable[None]]


class HeaderDict(dict[str, str]):
    """What nats-py expects (a dict), with the block as it came in `.raw` and parsed in `.block`.

    A sender can store a block that does not parse; then `.block` is None and `.raw` still has the broker's tail.
    """

    raw: bytes
    block: Headers | None


class Connection(Client):
    """nats-py's client with our header parsing."""

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        if not headers:
            return None
        found = HeaderDict()
        found.raw = bytes(headers)
        try:
            found.block = Headers.parse(found.raw)
        except WireError:
            found.block = None  # the reader decides: quarantine, or no status at all
            return found
        # last occurrence wins: the broker appends its own after the sender's
        found.update({name: value for name, value in found.block.fields if name != "Status"})
        if found.block.status is not None:
            found["Status"] = str(found.block.status)
            found["Description"] = found.block.description
        return found


def raw_headers(message: Any) -> bytes:
    """The header block of a received message, byte for byte; empty if it had none."""
    return message.headers.raw if isinstance(message.headers, HeaderDict) else b""


def status_of(message: Any) -> Headers | None:
    """The block of a word from the server itself (it has a status), or None for a message."""
    found = message.headers
    if isinstance(found, HeaderDict) and found.block is not None and found.block.status is not None:
        return found.block
    return None


async def _ignore_error(_error: Exception) -> None:
    """Boundary: nats-py prints errors nobody asked for; callers that care pass their own callback."""


async def connect(
    url: str,
    creds: Path | str,
    user_id: str,
    *,
    name: str,
    reconnect: bool = True,
    on_error: ErrorCallback = _ignore_error,
    on_closed: Callback | None = None,
    on_disconnected: Callback | None = None,
    on_reconnected: Callback | None = None,
    timeout: float = 5.0,
) -> Connection:
    """Open a connection whose replies arrive in this user's own inbox.

    `creds` is a creds file (0600, checked), or its text for a user that lives only in this process. nats-py sleeps
    two seconds after a refused first try, so the port is probed first.
    """
    if isinstance(creds, Path):
        check_private(creds)
    await _probe(url, timeout)
    connection = Connection()
    refused: list[Exception] = []

    async def remember(error: Exception) -> None:
        refused.append(error)
        await on_error(error)

    try:
        await asyncio.wait_for(
            connection.connect(
                url,
                name=name,
                user_credentials=str(creds) if isinstance(creds, Path) else RawCredentials(creds),
                inbox_prefix=f"_INBOX_{user_id}",
                allow_reconnect=reconnect,
                max_reconnect_attempts=-1 if reconnect else 0,
                reconnect_time_wait=0.1,  # type: ignore[arg-type]  # any number of seconds works
                ping_interval=10,
                max_outstanding_pings=2,
                connect_timeout=2,
                error_cb=remember,
                closed_cb=on_closed,
                disconnected_cb=on_disconnected,
                reconnected_cb=on_reconnected,
            ),
            timeout,
        )
    except (TimeoutError, NatsError, OSError) as error:
        await _abandon(connection)
        text = " ".join(str(each) for each in (*refused, error)).lower()
        if "authorization" in text or "authentication" in text:
            raise AuthRevoked(f"the broker at {url} refuses {name}: revoked, expired or not of this space") from error
        raise BrokerUnreachable(f"no broker answers at {url} ({error or type(error).__name__})") from error
    return connection


async def _abandon(connection: Connection) -> None:
    try:
        await asyncio.wait_for(connection.close(), 1)
    except (TimeoutError, NatsError, OSError):
        return  # it never opened; there is nothing to lose


async def _probe(url: str, timeout: float) -> None:
    host, _, port = url.removeprefix("nats://").removeprefix("tls://").rpartition(":")
    try:
        async with asyncio.timeout(timeout):
            _reader, writer = await asyncio.open_connection(host.rpartition("@")[2], int(port))
    except (OSError, TimeoutError, ValueError, socket.gaierror) as error:
        raise BrokerUnreachable(f"no broker answers at {url}: is the space running? (`tidings up`)") from error
    writer.close()
