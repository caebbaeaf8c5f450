"""Direct messages: sealed and sent to one agent, taken from one's own mailbox, acknowledged when settled.

    pulled -> opened -> surfaced (delivered) -> settled (read, unless it is only kept) -> acknowledged

What the application had not settled when its process died comes again, marked `redelivered`. As much is pulled as the
inbox has room for. What cannot be opened is terminated at once, counted and reported, so that it blocks nobody. A
message to oneself is allowed: a note to a later session. Who may be told of delivery is in `receipts.py`. What came
from a linked space is opened if the link record that it names let it in, and shows where it was said.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any

from tidings.client.directory import NameDirectory
from tidings.client.incoming import Incoming
from tidings.client.intake import Intake
from tidings.client.interface import Receipt
from tidings.client.links import Judge, LinkTable
from tidings.client.mailbox import ACK_PATIENCE, AgentMailbox, PendingAck
from tidings.client.notices import of_void
from tidings.client.receipts import ReceiptSender, ReceiptWatch
from tidings.client.session_lease import SessionLease
from tidings.errors import OutcomeUnknown, UnreachableError, WireError
from tidings.nats.acks import DeliveryInfo
from tidings.wire.envelope import Received, open_record
from tidings.wire.message import Message
from tidings.wire.records import Headers
from tidings.wire.seal import is_sealed, open_sealed
from tidings.wire.states import ReceiptStage
from tidings.wire.subjects import Direct

#: messages per pull; the broker has no more than this many unsettled ones out
BATCH = 64
EXPIRES = 10.0
SENT_KEPT = 1_024
log = logging.getLogger(__name__)


class DirectMailbox(AgentMailbox[tuple[PendingAck, Incoming]]):
    """The direct messages of one endpoint, both ways."""

    def __init__(self, session: SessionLease, intake: Intake, links: LinkTable, directory: NameDirectory) -> None:
        identity = session.connection.identity
        super().__init__(session, intake, identity.subjects.direct_stream, f"dm_{identity.id}")
        self.links, self.directory = links, directory
        self.receipts = ReceiptSender(self.connection)
        self.watch = ReceiptWatch(self.connection, self._tell_receipt, self._tell_void)
        if intake.events.is_heard("receipt"):
            self.watch.listen()
        #: id -> (to, seq) of what this process sent
        self.sent: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def begin(self) -> None:
        if not self.begun and not self._closed:
            if self.intake.events.is_heard("notice"):
                self.watch.listen_for_voids()
            self._start(self.receipts.run())
        super().begin()

    # --- sent ---

    def note_sent(self, message_id: str, target: str, seq: int) -> None:
        """A message was stored in the target's mailbox: its receipts can be asked for, and are watched."""
        self.sent[message_id] = (target, seq)
        if len(self.sent) > SENT_KEPT:
            self.sent.popitem(last=False)
        self.watch.add(message_id, target, seq)

    def _tell_receipt(self, message_id: str, to: str, seq: int, stage: str) -> None:
        self.intake.events.emit("receipt", Receipt(message_id, seq, stage, to=to))

    def _tell_void(self, news: dict[str, Any]) -> None:
        self.intake.events.emit("notice", of_void(news))

    # --- receiving ---

    async def _wait_for_room(self) -> tuple[int, float]:
        inbox = self.intake.inbox
        while (room := min(BATCH, inbox.room - self._arrived.qsize())) < 1 and not self._is_over:
            await inbox.wait_for_room(min(inbox.size, self._arrived.qsize() + 1))
            await asyncio.sleep(0)
        return room, EXPIRES

    async def _open(self, message: Any, delivery: DeliveryInfo) -> None:
        try:
            await self._know_origin(message.subject, message.block)
            received, inside = self._opened(message.subject, message.block, message.data, delivery.time_ns)
        except (UnreachableError, OutcomeUnknown) as error:
            # whether its link let it in is not known now: the broker brings it again
            log.info("a direct message of another space is looked at later: %s", error)
            return
        except WireError as error:
            if self.intake.keep_aside is not None:
                await self.intake.keep_aside(message.data, str(error))
            await self.pending.terminate(delivery)
            self.intake.opener.refused["direct"] += 1
            self._report(error)
            return
        held = self.pending[delivery.seq] = PendingAck(delivery, received.identity)
        if not self.intake.read_state.first_time(received.identity):
            # Settled before, or another record of a message that is held under its own sequence.
            self.intake.opener.refused["repeated"] += 1
            self.pending.acknowledge(held)
            return
        self.intake.read_state.hold_direct(received.identity)
        self._arrived.put_nowait((held, self._incoming(held, received, inside)))

    async def _know_origin(self, subject: str, block: bytes) -> None:
        """Of what came over a link, the link record has to be known."""
        parsed = self.identity.subjects.parse(subject) if block else None
        if isinstance(parsed, Direct):
            fields, is_ours = Headers.parse(block).fields, self.directory.is_of_this_space
            await self.links.learn_origin(parsed.sender, fields, is_ours)

    def _opened(self, subject: str, block: bytes, payload: bytes, time_ns: int) -> tuple[Received, Message]:
        fields = Headers.parse(block).fields if block else ()
        own = self.identity
        admits = Judge(self.links, 0, time_ns)
        opened = open_record(own.subjects, own.space_id, subject, fields, payload, admits)
        if not isinstance(opened, Received):
            raise WireError(f"a direct message was refused ({opened.reason}): {opened.detail}")
        if opened.kind != "dm" or opened.destination != own.id:
            raise WireError(f"a {opened.kind} to {opened.destination} was in the mailbox of {own.id}")
        if not is_sealed(opened.message):
            return opened, opened.message
        return opened, open_sealed(own.key, opened.sender, opened.message)

    def _incoming(self, held: PendingAck, received: Received, inside: Message) -> Incoming:
        async def settle() -> None:
            self.receipts.note(held.delivery.seq, ReceiptStage.READ)
            await self._settle(held)

        async def keep() -> None:
            await self._settle(held)

        incoming = self._surfaced(received, inside, held.delivery.seq, held.delivery.time_ns)
        incoming.redelivered = held.delivery.count > 1
        incoming._settle, incoming._keep, incoming._nak = settle, keep, self.intake.nak
        return incoming

    async def reopened(self, subject: str, block: bytes, payload: bytes, seq: int, time_ns: int) -> Incoming:
        """A direct message that was kept elsewhere since; how it is settled is for whoever kept it to say."""
        await self._know_origin(subject, block)
        return self._surfaced(*self._opened(subject, block, payload, time_ns), seq, time_ns)

    def _surfaced(self, received: Received, inside: Message, seq: int, time_ns: int) -> Incoming:
        came = received.admission
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
            origin=self.links.space_name(came.link, came.origin, came.agreed) if came else "",
            origin_id=received.origin,
        )
        return self.directory.introduce(incoming)

    async def _hand_over(self, arrived: tuple[PendingAck, Incoming]) -> None:
        held, incoming = arrived
        await self.intake.put(incoming)
        if self.intake.tells_delivered:
            self.receipts.note(held.delivery.seq, ReceiptStage.DELIVERED)

    def _forget(self, arrived: tuple[PendingAck, Incoming]) -> None:
        self.intake.read_state.forget_direct(arrived[0].identity)

    # --- settling ---

    async def _settle(self, held: PendingAck) -> None:
        self.intake.read_state.settle_direct(held.identity)
        self.pending.acknowledge(held)
        assert held.acking is not None
        await asyncio.wait({held.acking}, timeout=ACK_PATIENCE)

    async def _close(self) -> None:
        if self.connection.state == "ready":
            await self.receipts.flush(timeout=1)
