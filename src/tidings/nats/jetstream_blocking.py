"""A blocking connection to a space's broker and JetStream over it, for workers that read and write in bulk.

It loads no event loop. A connection that went is made again: a question that may be repeated is put once more, anything
else ends with what nobody knows (`OutcomeUnknown`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from tidings.errors import (
    AuthRevoked,
    BrokerUnreachable,
    ConnectionLost,
    TidingsError,
    UnreachableError,
    UntrustedServer,
)
from tidings.nats.address import shown
from tidings.nats.blocking import BlockingConnection
from tidings.nats.core import header_block
from tidings.nats.errors import ConnectionGone, NatsError, NoResponders
from tidings.nats.jetstream_api import Answer, Ask, AskPage, Request, Steps
from tidings.nats.jwt import signed, split_credentials

#: seconds after which a connection has to show that it is still there
IDLE = 5.0
T = TypeVar("T")


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
        except UntrustedServer as error:
            raise UntrustedServer(f"{shown(url)} is not trusted, and was told nothing: {error}") from error
        except UnreachableError as error:
            raise BrokerUnreachable(f"no broker answers at {error}") from error


class BlockingJetStream:
    """JetStream over a connection that is made when it is needed, and looked at before it is used after a pause."""

    def __init__(self, connect: Callable[[], WorkerConnection]) -> None:
        self._connect = connect
        self._held: WorkerConnection | None = None
        #: how often the connection was made: a caller who sees it change must check what it knew again
        self.generation = 0
        self._turn = threading.RLock()
        self._closed = threading.Event()

    @property
    def connection(self) -> WorkerConnection:
        """The broker gives up on a connection that answered no PING: one that was idle shows that it is there."""
        if self._held is not None and time.monotonic() - self._held.used > IDLE:
            try:
                self._held.ping()
            except ConnectionLost:
                self._hang_up()
        if self._held is None:
            self._held = self._connect()
            self.generation += 1
        return self._held

    @property
    def replicated(self) -> bool:
        """May what is read come from a replica that lags? Not of a server that is alone."""
        return self.connection.is_clustered

    def close(self) -> None:
        """For good, if it is the last call; a question opens it again."""
        self._closed.set()
        with self._turn:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def keep_alive(self, every: float) -> None:
        """Answer the broker's PING while nobody asks anything: it cuts whoever is silent for long."""
        threading.Thread(target=self._ping_until_closed, args=(every,), name="nats keep alive", daemon=True).start()

    def _ping_until_closed(self, every: float) -> None:
        while not self._closed.wait(every):
            with self._turn, suppress(TidingsError):  # the next question makes a new connection
                if self._held is not None:
                    self._held.ping()

    def run(self, steps: Steps[T]) -> T:
        """Do what the steps ask for, one after the other, until they have their result."""
        try:
            request = next(steps)
            while True:
                try:
                    answer = self._perform(request)
                except (NatsError, TidingsError) as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _perform(self, request: Request) -> Answer | None:
        if not isinstance(request, Ask | AskPage):
            time.sleep(request.seconds)
            return None
        with self._turn:
            try:
                return self._exchange(request)
            except ConnectionGone:
                self._hang_up()
                if isinstance(request, Ask) and not request.repeatable:
                    raise
            return self._exchange(request)

    def _exchange(self, request: Ask | AskPage) -> Answer | None:
        connection = self.connection
        if isinstance(request, AskPage):
            request.page.clear()
            token = connection.send_request(request.subject, request.payload)
            for block, payload in connection.parts(token):
                if not request.page.take(block, payload):
                    break
            return None
        block = header_block(request.headers.items()) if request.headers else b""
        (token,) = connection.publish_all([(request.subject, block, request.payload)])
        reply = connection.answer(token, request.timeout)
        if reply.status == 503:
            raise NoResponders(f"nobody listens on {request.subject}")
        return reply.block, reply.payload
