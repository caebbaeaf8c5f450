"""A websocket between a transport and an `AioSocket`: to the one it is a protocol, to the other a transport.

The socket above knows nothing of it: it writes bytes and hears bytes. TLS is below, a proxy below that.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from tidings.nats.address import Address
from tidings.nats.aio_socket import AioSocket, fail, resolve
from tidings.nats.errors import ConnectionGone, ProtocolError
from tidings.nats.proxy import END, MAX_ANSWER, Proxy, check_tunnel, proxy_for, tunnel_request
from tidings.nats.websocket import WebSocketStream


async def open_websocket(address: Address, socket: AioSocket, context: ssl.SSLContext | None) -> None:
    """Begin one; `socket` hears the greeting once the server has agreed to it."""
    loop, layer = asyncio.get_running_loop(), WebSocketLayer(socket, WebSocketStream(address))
    if (proxy := proxy_for(address)) is not None and context is not None:
        transport = await _tunnel(proxy, address)
        try:
            inner = await loop.start_tls(transport, layer, context, server_hostname=address.server_name)
        except BaseException:
            transport.abort()
            raise
        layer.connection_made(inner)
        return
    name = address.server_name if context else None
    await loop.create_connection(lambda: layer, address.host, address.port, ssl=context, server_hostname=name)


class WebSocketLayer(asyncio.Protocol, asyncio.Transport):
    """One websocket."""

    def __init__(self, socket: AioSocket, stream: WebSocketStream) -> None:
        super().__init__()
        self._socket, self._stream = socket, stream
        self._below: Any = None

    # --- what the transport below says ---

    def connection_made(self, transport: Any) -> None:
        self._below = transport
        self._socket.connection_made(self)
        self._answer()

    def data_received(self, data: bytes) -> None:
        try:
            payloads = self._stream.receive(data)
        except ProtocolError as error:
            self._socket.abandon(error)
            return
        self._answer()
        if payloads:
            self._socket.data_received(b"".join(payloads))
        if self._stream.ended:
            self._socket.error = self._socket.error or ConnectionGone(self._stream.ended)
            self._below.close()

    def _answer(self) -> None:
        if out := self._stream.to_send():
            self._below.write(out)

    def pause_writing(self) -> None:
        self._socket.pause_writing()

    def resume_writing(self) -> None:
        self._socket.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        try:
            self._stream.at_end()
        except ProtocolError as broken:
            self._socket.error = self._socket.error or broken
        self._socket.connection_lost(error)

    # --- what the socket above says ---

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._below.write(self._stream.wrap(bytes(data)))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high, low)

    def close(self) -> None:
        if goodbye := self._stream.goodbye():
            self._below.write(goodbye)
        self._below.close()

    def abort(self) -> None:
        self._below.abort()


class _TunnelAnswer(asyncio.Protocol):
    """What a proxy says to CONNECT."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._heard = b""

    def data_received(self, data: bytes) -> None:
        self._heard += data
        if END in self._heard or len(self._heard) > MAX_ANSWER:
            resolve(self.whole, self._heard)

    def connection_lost(self, error: Exception | None) -> None:
        fail(self.whole, ConnectionGone(f"the proxy hung up{f': {error}' if error else ''}"))
        if not self.whole.cancelled():
            self.whole.exception()  # nobody may be waiting for it any more


async def _tunnel(proxy: Proxy, address: Address) -> asyncio.Transport:
    loop = asyncio.get_running_loop()
    try:
        transport, answer = await loop.create_connection(_TunnelAnswer, proxy.host, proxy.port)
    except OSError as error:
        raise ConnectionGone(f"the proxy {proxy} cannot be reached: {error.strerror or error}") from error
    try:
        transport.write(tunnel_request(proxy, address))
        check_tunnel(proxy, await answer.whole)
    except BaseException:
        transport.abort()
        raise
    return transport
