"""Direct messages: sealed and sent to one agent, taken from one's own mailbox, acknowledged when settled.

    pulled -> opened -> surfaced (delivered) -> settled (read, unless it is only kept) -> acknowledged

What the application had not settled when its process died comes again, marked `redelivered`. As much is pulled as the
inbox has room for. What cannot be opened is terminated at once, counted and reported, so that it blocks nobody. A
message to oneself is allowed: a note to a later session. What came from a linked space is opened if the link record
that it names let it in, and shows where it was said.

Receipts are told to the steward by the reader, and asked of it by the sender. `delivered` means surfaced to the
application, `read` means settled. A reader's receipts are sent together, at most four times a second, and kept while
the steward is away; beyond a bound the oldest are dropped and counted, because a receipt is a courtesy and the message
itself is not at stake. Whoever keeps mail durably tells its receipts with `tell`, which answers once they are recorded.
A sender waits by long polls that the steward always answers; whoever listens for `receipt` events has one such poll,
however many messages are out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from tidings.client.connection import AgentConnection
from tidings.client.directory import NameDirectory
from tidings.client.incoming import DirectRef, Incoming
from tidings.client.intake import Intake
from tidings.client.links import Judge, LinkTable
from tidings.client.mailbox import ACK_PATIENCE, AgentMailbox, PendingAck
from tidings.client.notices import of_void
from tidings.client.session_lease import SessionLease
from tidings.client.transport import Receipt
from tidings.contract.mail import (
    ReaderReceipt,
    ReaderStage,
    ReceiptRow,
    ReportReceiptsRequest,
    WatchReceiptsRequest,
)
from tidings.errors import OutcomeUnknown, TidingsError, UnreachableError, WireError
from tidings.nats.acks import DeliveryInfo
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks
from tidings.wire.envelope import Received, open_record
from tidings.wire.message import Message
from tidings.wire.records import Headers
from tidings.wire.seal import is_sealed, open_sealed
from tidings.wire.states import FINAL_STAGES, ReceiptStage
from tidings.wire.subjects import Direct

#: messages per pull; the broker has no more than this many unsettled ones out
BATCH = 64
EXPIRES = 10.0
SENT_KEPT = 1_024
log = logging.getLogger(__name__)


EVERY = 0.25
KEPT = 4_096
AT_ONCE = 256
RETRY_PAUSE = 1.0
LONGEST_POLL = 20.0
#: messages watched at once; the oldest is forgotten first
WATCHED = 1_024


class ReceiptSender:
    """Receipts on their way to the steward."""

    def __init__(self, connection: AgentConnection) -> None:
        self.connection = connection
        self.dropped = 0
        self._waiting: OrderedDict[tuple[int, ReaderStage], None] = OrderedDict()
        self._some = asyncio.Event()

    def note(self, seq: int, stage: ReaderStage) -> None:
        self._waiting[seq, stage] = None
        if len(self._waiting) > KEPT:
            self._waiting.popitem(last=False)
            self.dropped += 1
        self._some.set()

    async def run(self) -> None:
        """Send what is noted, until cancelled."""
        while True:
            await self._some.wait()
            sent = await self.flush()
            await asyncio.sleep(EVERY if sent else RETRY_PAUSE)

    async def flush(self, timeout: float = 5.0) -> bool:
        """Send one batch. False if nobody took it: it is kept."""
        batch = list(self._waiting)[:AT_ONCE]
        if batch:
            receipts = tuple(ReaderReceipt(seq, stage) for seq, stage in batch)
            try:
                answer = await self.connection.call(ReportReceiptsRequest(receipts=receipts), timeout=timeout)
                self.dropped += len(answer.refused)
            except (UnreachableError, OutcomeUnknown):
                return False
            except TidingsError:
                self.dropped += len(batch)  # boundary: the steward will not take these, now or later
        for each in batch:
            self._waiting.pop(each, None)
        if not self._waiting:
            self._some.clear()
        return True


async def tell(
    connection: AgentConnection, kept: Sequence[DirectRef], stage: ReaderStage, timeout: float = 5.0
) -> list[DirectRef]:
    """Have the steward record a stage of these; the answer is those it knows nothing of, now or later."""
    unknown: list[DirectRef] = []
    for start in range(0, len(kept), AT_ONCE):
        part = kept[start : start + AT_ONCE]
        receipts = tuple(ReaderReceipt(each.seq, stage, each.sender, each.id) for each in part)
        answer = await connection.call(ReportReceiptsRequest(receipts=receipts), timeout=timeout)
        refused = set(answer.refused)
        unknown += [each for each in part if each.seq in refused]
    return unknown


class ReceiptWatch:
    """What becomes of the messages this process sent, told as it happens: one long poll while any is open.

    Whoever wants notices hears besides of messages of this agent that no reader shows, whichever program sent them.
    """

    def __init__(
        self,
        connection: AgentConnection,
        tell: Callable[[str, str, int, str], None],
        tell_void: Callable[[ReceiptRow], None],
    ) -> None:
        self.connection = connection
        self.polls = 0
        self._tell = tell
        self._tell_void = tell_void
        self._wants_voids = False
        self._voids: OrderedDict[tuple[str, int], None] = OrderedDict()
        #: id -> target, sequence, and the stages told
        self._open: OrderedDict[str, tuple[str, int, set[str]]] = OrderedDict()
        self._cursor = 0
        self._listening = False
        self._task: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Somebody wants to hear."""
        self._listening = True
        self._run_if_needed()

    def listen_for_voids(self) -> None:
        self._wants_voids = True
        self._run_if_needed()

    def add(self, message_id: str, to: str, seq: int) -> None:
        self._open.setdefault(message_id, (to, seq, set()))
        if len(self._open) > WATCHED:
            self._open.popitem(last=False)
        self._run_if_needed()

    def _run_if_needed(self) -> None:
        needed = self._wants_voids or (self._listening and bool(self._open))
        if needed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        polling = Backoff(0.05, LONGEST_POLL)
        delays = polling.delays()
        while self._open or self._wants_voids:
            try:
                await self.connection.ready(LONGEST_POLL)
                self.polls += 1
                request = WatchReceiptsRequest(since=self._cursor, wait=LONGEST_POLL)
                answer = await self.connection.call(request, timeout=LONGEST_POLL + 5)
            except (UnreachableError, OutcomeUnknown):
                waited = False
            except TidingsError:
                return  # boundary: a steward that does not know this, or an agent that is none any more
            else:
                waited = answer.waited
                self._cursor = answer.cursor
                for each in answer.news:
                    self._heard(each)
            if waited:
                delays = polling.delays()
            else:
                await asyncio.sleep(next(delays))

    def _heard(self, row: ReceiptRow) -> None:
        mid, stage = row.id, row.stage
        if stage == ReceiptStage.VOID:
            self._heard_void(row)
        to, seq, told = self._open.get(mid, ("", 0, set()))
        if to != row.to or stage in told:
            return
        told.add(stage)
        if stage in FINAL_STAGES:
            del self._open[mid]
        self._tell(mid, to, seq, stage)

    def _heard_void(self, row: ReceiptRow) -> None:
        key = (row.id, row.seq)
        if key not in self._voids:
            self._voids[key] = None
            if len(self._voids) > WATCHED:
                self._voids.popitem(last=False)
            self._tell_void(row)

    async def close(self) -> None:
        await end_tasks([self._task])


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

    def _tell_void(self, row: ReceiptRow) -> None:
        self.intake.events.emit("notice", of_void(row))

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
            self.receipts.note(held.delivery.seq, "read")
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
            self.receipts.note(held.delivery.seq, "delivered")

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
