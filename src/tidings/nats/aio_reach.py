"""From an address to a server that has greeted, on an event loop. No server hears of a credential here.

Addresses are tried in their order, each with a head start over the next one: a server that is silent costs a moment and
no timeout, and while the first of a list answers no other is asked.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from tidings.nats.address import Address
from tidings.nats.aio_socket import AioSocket
from tidings.nats.errors import ConnectionGone, NatsError, ProtocolError, ServerFailed, failure

#: seconds before the next address is tried as well
HEAD_START = 0.5

Reach = Callable[[Address], Awaitable[AioSocket]]


async def greeted(
    addresses: Sequence[Address], reach: Reach, failed: list[ServerFailed]
) -> AsyncGenerator[tuple[Address, AioSocket], None]:
    """Servers that greet, in the order in which they do; why others do not goes to `failed`.

    Whoever has enough closes the generator: those that are under way are given up then.
    """
    waiting, trying = list(addresses), dict[asyncio.Future[AioSocket], Address]()
    try:
        while waiting or trying:
            if waiting:
                address = waiting.pop(0)
                trying[asyncio.ensure_future(reach(address))] = address
            done, _ = await asyncio.wait(
                trying, timeout=HEAD_START if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                address = trying[task]
                try:
                    socket = await task
                except (NatsError, OSError) as error:  # a TimeoutError is an OSError
                    del trying[task]
                    failed.append(failure(address, error))
                    continue
                del trying[task]
                yield address, socket
    finally:
        await _give_up(trying)


async def _give_up(trying: Mapping[asyncio.Future[AioSocket], Address]) -> None:
    for task in trying:
        task.cancel()
    for found in await asyncio.gather(*trying, return_exceptions=True):
        if isinstance(found, AioSocket):
            found.abandon(ConnectionGone("another server was quicker"))


async def reach(address: Address, socket: AioSocket, context: ssl.SSLContext | None, *, tls_first: bool) -> None:
    """Until it has greeted, inside of TLS if there is a context or if it asks for that."""
    loop, name = asyncio.get_running_loop(), address.server_name
    first = context if tls_first else None
    try:
        if address.websocket:
            from tidings.nats.aio_websocket import open_websocket  # a library that few need

            await open_websocket(address, socket, context)
            await socket.greeting
            return
        await loop.create_connection(
            lambda: socket, address.host, address.port, ssl=first, server_hostname=name if first else None
        )
        info = await socket.greeting
        if not tls_first and (context is not None or info.get("tls_required")):
            await _wrap(socket, name, context, info)
    except BaseException:
        socket.abandon(ConnectionGone("it was not opened"))
        raise


async def _wrap(socket: AioSocket, name: str, context: ssl.SSLContext | None, info: Mapping[str, Any]) -> None:
    if not (info.get("tls_required") or info.get("tls_available")):
        raise ProtocolError(f"{name} offers no TLS")
    if not socket.core.is_between:
        raise ProtocolError("the server speaks before TLS has begun")
    assert socket.transport is not None
    context = context or ssl.create_default_context()
    inner = await socket.loop.start_tls(socket.transport, socket, context, server_hostname=name)
    assert inner is not None
    socket.connection_made(inner)
