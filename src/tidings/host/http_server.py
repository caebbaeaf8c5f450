"""The HTTP server of the host on a socket of our own: uvicorn, with the kernel asked who is at the other end.

uvicorn shows the transport to its protocol and not to the application, so the protocol decides: a connection whose
peer is not this user, or of which the kernel does not say, is answered 403 and closed before a request is read. uvicorn
never binds (`--uds` would make the socket 0666) and never sees a signal: `daemon.py` says when to stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidings.errors import DeniedError
from tidings.util.private_sockets import peer_uid

#: seconds for requests that are being answered when the host stops
GRACE = 3
MOST_CONNECTIONS = 512
KEEP_ALIVE = 30
#: seconds in which a request is there, whole: connections are few, and half a request holds one
REQUEST_WITHIN = 20.0
#: where a connection finds in the server's state whether that stops
STOPPING = "stopping"


def is_ours(connection: socket.socket | None) -> bool:
    """Is the other end this user? Whoever cannot be named is not."""
    return connection is not None and peer_uid(connection) == os.geteuid()


class PeerChecked(H11Protocol):
    """One connection. `admits` is asked once, when it is made."""

    admits: Callable[[socket.socket | None], bool] = staticmethod(is_ours)
    refused = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.app_state[STOPPING].is_set():
            self.refused = True
            transport.abort()
            return
        if not self.admits(transport.get_extra_info("socket")):
            self.refused = True
            transport.write(_REFUSAL)
            transport.close()
            return
        # each request gets a copy of this state: who cuts a reader off needs the transport
        self.app_state = {**self.app_state, "transport": transport}
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if not self.refused:
            super().data_received(data)
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        if not self.refused:
            super().connection_lost(exc)

    def _watch(self) -> None:
        """uvicorn waits for ever for the rest of a request. What trickles in does not put the end off."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_WITHIN, self._too_slow)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.abort()


def _refusal() -> bytes:
    words = "this host belongs to another user: every user runs their own"
    body = json.dumps({"error": {"code": DeniedError.code, "message": words, "retryable": False}}).encode()
    head = f"HTTP/1.1 403 Forbidden\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


_REFUSAL = _refusal()


class HostServer(uvicorn.Server):
    """Serves until `stopping` is set, then ends in bounded time whatever its clients do."""

    def __init__(self, app: Any, stopping: asyncio.Event, protocol: type[PeerChecked] = PeerChecked) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                proxy_headers=False,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=GRACE,
                limit_concurrency=MOST_CONNECTIONS,
            )
        )
        self._stopping = stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.state[STOPPING] = self._stopping
        await super().startup(sockets)

    async def main_loop(self) -> None:
        # uvicorn looks ten times a second whether it should stop; an idle host sleeps
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # A connection that the loop has accepted and not yet set up when its server closes is never closed by asyncio
        # (its transport fails to attach, without a word). So accepting ends first, and what was accepted is set up.
        for listener in sockets or []:
            asyncio.get_running_loop().remove_reader(listener)
        await asyncio.sleep(0)
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
