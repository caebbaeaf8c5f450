"""A blocking connection to a space's broker, for workers that read and write in bulk. It loads no event loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from tidings.broker.credentials import signed
from tidings.broker.jwt import split_credentials
from tidings.errors import AuthRevoked, BrokerUnreachable, ConnectionLost, UnreachableError
from tidings.nats.blocking import BlockingConnection

#: seconds after which a connection has to show that it is still there
IDLE = 5.0


class WorkerConnection(BlockingConnection):
    """Open it with `open`."""

    @classmethod
    def open(cls, url: str, creds: Path | None = None, *, name: str = "tidings", timeout: float = 5.0) -> Self:
        """Answers come in the inbox of the user in `creds`; without, in everybody's."""
        who: dict[str, Any] = {}
        if creds is not None:
            token, key = split_credentials(creds.read_text())
            who = {"auth": signed(token, key), "inbox": f"_INBOX_{key.id}"}
        try:
            return cls.connect(url, name=name, timeout=timeout, **who)
        except AuthRevoked as error:
            raise AuthRevoked(f"the broker does not accept this credential: {error}") from error
        except UnreachableError as error:
            raise BrokerUnreachable(f"no broker answers at {url}: {error}") from error

    def api(self, operation: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A `$JS.API` request; the answer may hold an `error`."""
        reply = self.request(f"$JS.API.{operation}", b"" if body is None else json.dumps(body).encode())
        if reply.status is not None:
            raise BrokerUnreachable(f"JetStream does not answer {operation} ({reply.status})")
        return dict(json.loads(reply.payload))


class KeptConnection:
    """A connection that is looked at before it is used again: the broker gives up on one that answered no PING."""

    def __init__(self, connect: Callable[[], WorkerConnection]) -> None:
        self._connect = connect
        self._held: WorkerConnection | None = None

    def live(self) -> WorkerConnection:
        if self._held is not None and time.monotonic() - self._held.used > IDLE:
            try:
                self._held.ping()
            except ConnectionLost:
                self.close()
        if self._held is None:
            self._held = self._connect()
        return self._held

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
