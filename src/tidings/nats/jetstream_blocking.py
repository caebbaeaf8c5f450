"""A blocking connection to a space's broker and JetStream over it, for workers that read and write in bulk.

It loads no event loop. A connection that went is made again: a question that may be repeated is put once more, anything
else ends with what nobody knows (`OutcomeUnknown`). `Window` publishes in bulk over one connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Self, TypeAlias, TypeVar

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
from tidings.nats.errors import ApiError, ConnectionGone, NatsError, NoResponders
from tidings.nats.jetstream_api import Ack, Answer, Ask, AskPage, Request, Steps, read_ack
from tidings.nats.jwt import signed, split_credentials

#: seconds after which a connection has to show that it is still there
IDLE = 5.0
T = TypeVar("T")
Name = TypeVar("Name")
#: what a window may have on its way over one connection
MAX_IN_FLIGHT = 512
MAX_BYTES_IN_FLIGHT = 16 * 1024 * 1024
#: subject, header block, payload
Message: TypeAlias = tuple[str, bytes, bytes]


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


class Window(Generic[Name]):
    """Messages on their way to JetStream over one connection, in the order they were sent, and what became of each.

    Messages have names of the caller's. Nothing is sent again. `ConnectionGone`, also after `patience` seconds without
    an answer, leaves open whether what is under way was stored.
    """

    def __init__(self, connection: WorkerConnection, patience: float, most: int = MAX_IN_FLIGHT) -> None:
        self._connection = connection
        self._replies = connection.replies(patience)
        #: how many go in one write, and how many may be under way when they do: they wait for room for all of them
        self._chunk = max(most // 8, 1)
        self._full = most - self._chunk
        #: token -> name and message
        self._flying: dict[int, tuple[Name, Message]] = {}
        self._bytes = 0

    @property
    def under_way(self) -> int:
        return len(self._flying)

    def send(self, messages: Iterator[tuple[Name, Message]]) -> None:
        """Send as many of these as there is room for; the others are left where they are."""
        while len(self._flying) <= self._full and self._bytes < MAX_BYTES_IN_FLIGHT:
            chunk: list[tuple[Name, Message]] = []
            size = 0
            for named in islice(messages, self._chunk):
                chunk.append(named)
                size += len(named[1][1]) + len(named[1][2])
                if size > MAX_BYTES_IN_FLIGHT // 4:
                    break
            if not chunk:
                return
            tokens = self._connection.publish_all([message for _, message in chunk])
            self._flying.update(zip(tokens, chunk, strict=True))
            self._bytes += size

    def answer(self) -> tuple[Name, Message, Ack | ApiError]:
        """The next answer: the message it is for, and where it is stored or why it is not."""
        while (found := self._flying.pop((reply := next(self._replies)).token, None)) is None:
            pass  # to a request before this window
        name, message = found
        subject, block, payload = message
        self._bytes -= len(block) + len(payload)
        try:
            return name, message, read_ack(subject, reply.block, reply.payload)
        except ApiError as error:
            return name, message, error
