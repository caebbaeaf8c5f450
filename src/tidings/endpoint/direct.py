"""Direct messages: sealed and sent to one agent, pulled from one's own mailbox, acknowledged when settled.

    pulled -> opened -> surfaced (delivered) -> settled (read, unless it is only kept) -> acknowledged

Nothing is acknowledged before the application has settled it: what it holds is kept in progress however long it
takes, and what it had not settled when its process died comes again, marked `redelivered`. As much is pulled as the
inbox has room for. What cannot be opened is terminated at once, counted and reported, so that it blocks nobody. A
message to oneself is allowed: a note to a later session. Who may be told of delivery is in `receipts.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidings.broker.acks import TERM, Delivery
from tidings.broker.aio import end_tasks
from tidings.broker.client import Connection
from tidings.endpoint.incoming import Incoming
from tidings.endpoint.notices import of_void
from tidings.endpoint.pull import pull
from tidings.endpoint.receipts import ReceiptSender, ReceiptWatch
from tidings.endpoint.unsettled import ACK_PATIENCE, InHand, Unsettled
from tidings.errors import UnknownPeer, WireError
from tidings.nats.errors import NatsError
from tidings.wire.envelope import Received, open_record
from tidings.wire.headers import Headers
from tidings.wire.message import Message
from tidings.wire.names import is_agent_id
from tidings.wire.seal import is_sealed, open_sealed

if TYPE_CHECKING:
    from tidings.endpoint.endpoint import Endpoint

#: messages per pull; the broker has no more than this many unsettled ones out
BATCH = 64
EXPIRES = 10.0
REFUSED_PAUSE = 0.5
SENT_KEPT = 1_024
log = logging.getLogger(__name__)


async def peer_id(endpoint: Endpoint, to: str) -> str:
    """The id of an agent given by id, or by name if this endpoint can resolve names."""
    if is_agent_id(to):
        return to
    resolve = getattr(endpoint, "resolve", None)
    if resolve is None:
        raise UnknownPeer(f"{to!r} is not an agent's id, and this endpoint knows no names")
    found = resolve(to)
    if inspect.isawaitable(found):
        found = await found
    return str(getattr(found, "id", found))


@dataclass(eq=False)
class Held(Unsettled):
    """A message the broker waits to hear about."""

    identity: tuple[str, str]


class Direct:
    """The direct messages of one endpoint, both ways."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.link = endpoint.link
        self.identity = endpoint.identity
        self.receipts = ReceiptSender(self.link)
        self.watch = ReceiptWatch(self.link, self._tell_receipt, self._tell_void)
        if endpoint.events.is_heard("receipt"):
            self.watch.listen()
        self.held: InHand[Held] = InHand(self.link, self._start)
        #: id -> (to, seq) of what this process sent
        self.sent: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._arrived: asyncio.Queue[tuple[Held, Incoming]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulling: asyncio.Task[None] | None = None
        self._closed = False
        self._begun = False

    def begin(self) -> None:
        """Pull from now on, on this session and every later one."""
        if self._begun or self._closed:
            return
        self._begun = True
        if self.endpoint.events.is_heard("notice"):
            self.watch.listen_for_voids()
        self._start(self._surface_arrived())
        self._start(self.held.keep_in_progress())
        self._start(self.receipts.run())
        self.link.on_session(self._on_session)
        if self.link.state == "ready":
            self._pulling = self._start(self._pull_all(self.link.connection))

    # --- sent ---

    def note_sent(self, message_id: str, target: str, seq: int) -> None:
        """A message was stored in the target's mailbox: its receipts can be asked for, and are watched."""
        self.sent[message_id] = (target, seq)
        if len(self.sent) > SENT_KEPT:
            self.sent.popitem(last=False)
        self.watch.add(message_id, target, seq)

    def _tell_receipt(self, message_id: str, to: str, seq: int, stage: str) -> None:
        from tidings.endpoint.interface import Receipt

        self.endpoint.events.emit("receipt", Receipt(message_id, seq, stage, to=to))

    def _tell_void(self, news: dict[str, Any]) -> None:
        self.endpoint.events.emit("notice", of_void(news))

    # --- receiving ---

    async def _on_session(self, connection: Connection) -> None:
        """A pull does not survive its connection, so every session begins with a new one."""
        if self._pulling is not None:
            self._pulling.cancel()
        self._pulling = self._start(self._pull_all(connection))

    async def _pull_all(self, connection: Connection) -> None:
        stream, consumer = self.identity.subjects.direct_stream, f"dm_{self.identity.id}"
        inbox = self.endpoint.inbox

        async def take(message: Any, delivery: Delivery) -> None:
            await self._take(connection, message, delivery)

        while not self._closed and not connection.is_closed:
            room = min(BATCH, inbox.room - self._arrived.qsize())
            if room < 1:
                await inbox.wait_for_room(min(inbox.size, self._arrived.qsize() + 1))
                await asyncio.sleep(0)
                continue
            try:
                ended = await pull(connection, stream, consumer, room, EXPIRES, take)
            except (NatsError, OSError) as error:
                log.debug("a pull of %s ended with %s", self.identity.name, error)
                ended = "refused"
            if ended == "refused":
                await asyncio.sleep(REFUSED_PAUSE)

    async def _take(self, connection: Connection, message: Any, delivery: Delivery) -> None:
        held = self.held.get(delivery.seq)
        if held is not None and held.delivery.time_ns == delivery.time_ns:
            self.held.come_again(held, delivery)
            return
        try:
            received, inside = self._opened(message.subject, message.block, message.data)
        except WireError as error:
            if self.endpoint.keep_aside is not None:
                await self.endpoint.keep_aside(message.data, str(error))
            await connection.publish(delivery.reply, TERM)
            self.endpoint.opener.refused["direct"] += 1
            self.endpoint.events.emit("error", error)
            return
        held = Held(delivery, received.identity)
        self.held[delivery.seq] = held
        if not self.endpoint.seen.first_time(received.identity):
            # Settled before, or another record of a message that is held under its own sequence.
            self.endpoint.opener.refused["repeated"] += 1
            self.held.acknowledge(held)
            return
        self.endpoint.seen.hold_direct(received.identity)
        self._arrived.put_nowait((held, self._incoming(held, received, inside)))

    def _opened(self, subject: str, block: bytes, payload: bytes) -> tuple[Received, Message]:
        fields = Headers.parse(block).fields if block else ()
        own = self.identity
        opened = open_record(own.subjects, own.space_id, subject, fields, payload)
        if not isinstance(opened, Received):
            raise WireError(f"a direct message was refused ({opened.reason}): {opened.detail}")
        if opened.kind != "dm" or opened.destination != own.id:
            raise WireError(f"a {opened.kind} to {opened.destination} was in the mailbox of {own.id}")
        if not is_sealed(opened.message):
            return opened, opened.message
        return opened, open_sealed(own.key, opened.sender, opened.message)

    def _incoming(self, held: Held, received: Received, inside: Message) -> Incoming:
        async def settle() -> None:
            self.receipts.note(held.delivery.seq, "read")
            await self._settle(held)

        async def keep() -> None:
            await self._settle(held)

        incoming = self._surfaced(received, inside, held.delivery.seq, held.delivery.time_ns)
        incoming.redelivered = held.delivery.count > 1
        incoming._settle, incoming._keep, incoming._nak = settle, keep, self.endpoint.returned.take
        return incoming

    def reopened(self, subject: str, block: bytes, payload: bytes, seq: int, time_ns: int) -> Incoming:
        """A direct message that was kept elsewhere since; how it is settled is for whoever kept it to say."""
        return self._surfaced(*self._opened(subject, block, payload), seq, time_ns)

    def _surfaced(self, received: Received, inside: Message, seq: int, time_ns: int) -> Incoming:
        incoming = Incoming(
            kind="direct",
            sender=inside.sender,  # as it calls itself, until it is introduced
            message=inside,
            channel=None,
            seq=seq,
            time_ns=time_ns,
            durable=True,
            sealed=is_sealed(received.message),
            mentions_me=any(mention.id == self.identity.id for mention in inside.mentions),
        )
        return self.endpoint.introduced(incoming)

    async def _surface_arrived(self) -> None:
        while True:
            held, incoming = await self._arrived.get()
            await incoming.named()
            await self.endpoint.inbox.wait_for_room()
            self.endpoint.inbox.put(incoming)
            if self.endpoint.tells_delivered:
                self.receipts.note(held.delivery.seq, "delivered")
            self.endpoint.events.emit("message", incoming)

    # --- settling ---

    async def _settle(self, held: Held) -> None:
        self.endpoint.seen.settle_direct(held.identity)
        self.held.acknowledge(held)
        assert held.acking is not None
        await asyncio.wait({held.acking}, timeout=ACK_PATIENCE)

    # --- life ---

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Stop pulling, let acknowledgements under way finish, and give back what was not settled."""
        if self._closed:
            return
        if self._pulling is not None:
            await end_tasks([self._pulling])
        await self.held.finish()
        self._closed = True
        await self.held.give_back()
        if self.link.state == "ready":
            await self.receipts.flush(timeout=1)
        await end_tasks(self._tasks)
