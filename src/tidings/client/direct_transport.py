"""`DirectTransport`: a connection to the space, for `tidings.connect(via="direct")` and for the host.

It reconnects by itself and delivers each message once. A send returns when the log has the message (`confirmed`), and
raises `OutcomeUnknown` if that cannot be known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from msgspec import UNSET

from tidings.admin.identity import Identity
from tidings.client import notices
from tidings.client.agent import Agent
from tidings.client.backfill import LogReader, Reached
from tidings.client.channels import Channels
from tidings.client.connection import AgentConnection, State
from tidings.client.direct_mailbox import DirectMailbox, tell
from tidings.client.directory import NameDirectory, check_takes_mail, speaking_as
from tidings.client.frame_mailbox import FrameMailbox
from tidings.client.incoming import DirectRef, Events, Inbox, Past
from tidings.client.intake import Intake, LiveRecord, RecordOpener
from tidings.client.links import LinkTable
from tidings.client.presence import Presence
from tidings.client.publishing import Prepared, Publisher, Stored, prepare_chat, prepare_direct, task_terms
from tidings.client.read_state import ReadState
from tidings.client.redelivery import Redelivery, Retry
from tidings.client.remote_changes import AccessWatch, MembershipWatch, plain
from tidings.client.roster import Roster
from tidings.client.session_lease import SessionLease
from tidings.client.tasks import Job, TaskResult, Tasks
from tidings.client.transport import Addressee, Agents, Joined, Left, Receipt, Transport
from tidings.contract.agents import DamageRow
from tidings.contract.channels import AudienceRequest
from tidings.contract.core import Request
from tidings.contract.mail import (
    DeadLetterAnswer,
    DeadLetterRequest,
    TraceAnswer,
    TraceRequest,
    WaitForReceiptRequest,
)
from tidings.errors import (
    DeliveryLost,
    DeniedError,
    LogRegressed,
    Superseded,
    TidingsError,
    UsageError,
)
from tidings.util.task_ends import end_tasks
from tidings.wire.message import Draft, Mention, Sender
from tidings.wire.names import check_channel, is_agent_id, unmarked
from tidings.wire.roster import AgentEntry, Status

SAVE_EVERY = 0.5
#: seconds that opening waits for the roster; without a steward it opens without one
ROSTER_PATIENCE = 2.0
A = TypeVar("A")
T = TypeVar("T")


class DirectTransport(Transport):
    """The connection of one agent, and its view of the space."""

    via = "direct"

    def __init__(
        self,
        identity: Callable[[], Any],
        *,
        state: Path | None = None,
        inbox: int = 512,
        ping_interval: float = 5.0,
        role: str | None = None,
        receive: bool = True,
        retry: Retry | None = None,
        presence: bool = True,
        beat: float | None = None,
    ) -> None:
        self._retry = retry or Retry()
        self._attends, self._beat_every = presence, beat
        self._find_identity = identity
        self._state_path = state
        self._ping_interval = ping_interval
        self._role = role
        #: the sender that this agent signs as, with the roster row it was made of
        self._cached_sender: tuple[AgentEntry | None, Sender] | None = None
        self._receives = receive
        #: whether this transport holds the receiving session and pulls its mailboxes; the lock is held to start that
        self._receiving = False
        self._beginning = asyncio.Lock()
        self._saver: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.queue = Inbox(inbox)
        self.events = Events()
        self.events.on_inner("gap", lambda gap: self.events.emit("notice", notices.of_gap(gap)))
        self.events.on_inner("error", self._notice_loss)
        #: ids of damage notices that were emitted: every roster snapshot repeats all of them
        self._emitted_damage: set[str] = set()
        #: replace only the ended session with this number; None: replace any session
        self.receives_after: int | None = None
        #: continue the receiving session with this number, unless there is a newer one
        self.resumes_session: int | None = None
        #: called with the number of the receiving session
        self.on_session_number: Callable[[int], None] | None = None

    # --- life ---

    async def open(self) -> None:
        self.identity: Identity = await self._find_identity()
        self.connection = AgentConnection(self.identity, ping_interval=self._ping_interval, on_state=self._on_state)
        self.roster = Roster(self.connection, self.events.emit)
        self.directory = NameDirectory(self.connection, self.roster.rows, self.roster.left)
        self.session = SessionLease(
            self.connection, self.roster, self._report, after=self.receives_after, resumes=self.resumes_session
        )
        self.session.on_number = self.on_session_number
        self.presence = Presence(
            self.connection, self.roster, self.session.session, attending=self._attends, every=self._beat_every
        )
        self.links = LinkTable(self.connection)
        self.roster.on_links.append(self.links.hear)
        self.opener = RecordOpener(self.identity.subjects, self.identity.space_id, self.links)
        self.read_state = ReadState(self._state_path)
        self.read_state.save()  # even if empty: later messages are then known to be new
        introduce = self.directory.introduce
        self.intake = Intake(self.id, self.opener, self.read_state, self.presence, introduce, self.queue, self.events)
        self._log = LogReader(self.connection, self.opener)
        self._channels = Channels(self.connection, self._log, self.intake)
        self.roster.on_epoch += [
            self.connection.follow_epoch,
            self.links.follow_epoch,
            self._channels.follow_epoch,
        ]
        self.roster.on_damage.append(self._emit_damage)
        self._membership_watch = MembershipWatch(
            self.connection, self.roster, self._channels, lambda: self._frames.begun
        )
        self._access = AccessWatch(self.connection, self.roster, self._channels, self.events.emit)
        self.publisher = Publisher(self.connection, self._access)
        self._direct = DirectMailbox(self.session, self.intake, self.links, self.directory)
        self._frames = FrameMailbox(self.session, self.intake, self._channels)
        self.redelivery = Redelivery(self._direct, self._retry)
        self.session.on_taken = self._frames.expect
        self.tasks = Tasks(self, self._sender)
        try:
            await self.connection.start()
            self._access.begin()
            self.presence.start()
            with suppress(TimeoutError):
                async with asyncio.timeout(ROSTER_PATIENCE):
                    await self.roster.asked.wait()
        except BaseException:
            await self.close()
            raise
        self._saver = asyncio.create_task(self._save_now_and_then())

    async def close(self) -> None:
        await end_tasks([self._saver])
        if self._stopping is not None:
            await asyncio.gather(self._stopping, return_exceptions=True)
        await self.redelivery.close()
        await self._access.close()
        await self._membership_watch.close()
        await self.tasks.close()
        await self._channels.close()
        await self._frames.close()
        await self._direct.close()
        await self._direct.watch.close()
        await self.session.close()
        await self.links.close()
        await self.presence.close()
        await self.roster.close()
        await self.intake.close()
        await self.directory.close()
        await self.connection.stop()
        self.read_state.close()
        self.queue.close(asyncio.CancelledError())

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY)
            self.read_state.save()

    def _on_state(self, state: State, error: BaseException | None) -> None:
        self.events.emit("connection", state)
        if error is not None:
            self.events.emit("error", error)

    def _notice_loss(self, error: BaseException) -> None:
        if isinstance(error, DeliveryLost):
            self.events.emit("notice", notices.of_loss(error))
        elif isinstance(error, LogRegressed):
            self.events.emit("notice", notices.of_regress(error))

    def _emit_damage(self, row: DamageRow) -> None:
        notice = notices.of_damage(row)
        if notice.id not in self._emitted_damage:
            self._emitted_damage.add(notice.id)
            self.events.emit("notice", notice)

    def _report(self, event: str, value: Any) -> None:
        if event == "superseded":
            self.queue.close(Superseded(f"a newer session of {self.name} receives now; this one can still send"))
            self._stopping = asyncio.create_task(self._stop_receiving())
        self.events.emit(event, value)

    async def _stop_receiving(self) -> None:
        await self.redelivery.close()
        await self._channels.stop()
        await self._frames.close()
        await self._direct.close()

    async def resolve(self, name: str) -> AgentEntry:
        """Returns the agent with this id or name."""
        return await self.roster.find(name)

    async def _agent_id(self, to: str) -> str:
        return to if is_agent_id(to) else (await self.resolve(to)).id

    async def _reader_id(self, to: str) -> str:
        """Returns the recipient's id of a direct message. Raises DeniedError if the agent takes none."""
        row = self.roster.get(to) if is_agent_id(to) else await self.resolve(to)
        return check_takes_mail(row).id if row is not None else to

    @property
    def id(self) -> str:
        return self.identity.id

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def space(self) -> str:
        return self.identity.subjects.space

    @property
    def state(self) -> State:
        return self.connection.state

    @property
    def incarnation(self) -> str | None:
        """The broker run that this transport is connected to; None while disconnected."""
        connection = self.connection
        return connection.incarnation_of(connection.current) if connection.state == "ready" else None

    def on(self, event: str, callback: Callable[[Any], Any]) -> None:
        self.events.on(event, callback)
        if event == "receipt" and hasattr(self, "_direct"):
            self._direct.watch.listen()
        if event == "notice" and hasattr(self, "_direct") and self._frames.begun:
            self._direct.watch.listen_for_voids()

    async def call(self, request: Request[A], /, *, op: str | None = None, timeout: float = 5.0) -> A:
        return await self.connection.call(request, op=op, timeout=timeout)

    async def access(self) -> dict[str, Any]:
        return plain(await self._access.record())

    async def _with_new_access(self, act: Callable[[], Awaitable[T]]) -> T:
        """Calls `act`. If it is denied and access was widened since we connected, calls it again with the new one."""
        used = self.connection.token_used
        try:
            return await act()
        except DeniedError:
            if not await self._access.renewed_since(used):
                raise
        return await act()

    # --- channels ---

    async def join(self, channel: str, backfill: int) -> Joined:
        await self.receive()
        self.session.check()
        return await self._with_new_access(lambda: self._channels.join(channel, backfill=backfill))

    async def leave(self, channel: str) -> Left:
        found = await self._channels.leave(channel)
        return Left(found.state, found.seq, found.open, found.still_covered_by)

    async def watch(self, pattern: str) -> None:
        """Receive the live copies of a channel or pattern without joining it."""
        await self._channels.watch(unmarked(pattern))

    @property
    def joined(self) -> list[str]:
        return sorted(name for name, each in self._channels.memberships.items() if not each.watching)

    async def history(self, channel: str, limit: int, before: int | None) -> Past:
        records, reached = await self._log.newest(check_channel(channel), limit, before=before)
        return await self._past(records, reached)

    async def recall(self, channel: str, since: int, limit: int = 200) -> Past:
        """Returns messages after a sequence, oldest first, limited by the channel's replay, with what the log lost."""
        records, reached, _head = await self._log.since(check_channel(unmarked(channel)), since, limit)
        return await self._past(records, reached)

    async def _past(self, records: list[LiveRecord], reached: Reached) -> Past:
        await self.directory.learn(record.message for record in records if not record.origin)
        found = (self.intake.incoming(record, historical=True) for record in records)
        return Past(found, more=reached.more, gone=reached.gone, hidden=reached.hidden)

    # --- who is here ---

    async def who(self, timeout: float) -> Agents:
        await self.roster.wait_loaded(timeout)
        return Agents(self.roster.agents(), delay=self.roster.backstop.delay)

    async def announce(self, status: Status, activity: str | None, model: str | None) -> bool:
        self.presence.set_status(status, activity)
        if model is not None:
            self.presence.set_model(model)
        return self.presence.attending

    # --- sending ---

    async def send(self, addressee: Addressee, to: str, draft: Draft, timeout: float) -> Receipt:
        if addressee == "agent":
            return await self._send_direct(to, draft, timeout)
        if addressee == "role":
            mentions: Iterable[Any] = draft.mentions
            composed = draft.compose(self._sender(), mentions, task_terms(draft.deadline, elsewhere="@" in to))
            return await self.tasks.ask(to, composed, timeout)
        mentioned = await self.roster.mentions(draft.mentions, timeout) if draft.mentions else []
        composed = draft.compose(self._sender(), mentioned)
        stored = await self.publisher.publish(prepare_chat(self.identity, to, composed), timeout)
        warnings = (*self._warnings(to), *await self.unheard(to, mentioned)) if mentioned else ()
        return Receipt(composed.id, stored.seq, warnings=warnings)

    async def _send_direct(self, to: str, draft: Draft, timeout: float) -> Receipt:
        target = await self._reader_id(to)
        composed = draft.compose(self._sender())
        prepared = prepare_direct(self.identity, target, composed, sealed=draft.sealed)
        stored = await self.publish(prepared, timeout=timeout)
        return Receipt(composed.id, stored.seq, to=target)

    async def unheard(self, channel: str, mentioned: Iterable[Mention], timeout: float = 2.0) -> tuple[str, ...]:
        """Returns a warning for each mentioned agent that does not receive the channel."""
        names = {each.id: self._shown_name(each) for each in mentioned if each.id != self.id}
        if not names:
            return ()
        try:
            answer = await self.connection.call(AudienceRequest(channel, tuple(names)), timeout=timeout)
        except TidingsError as error:
            return (f"could not check whether the mentioned agents are members of {channel}: {error}",)
        why = {
            "read": f"may not read {channel}",
            "member": f"is not in {channel}",
            "space": f"is in another space, with which {channel} is not shared",
        }
        return tuple(f"{names[each]} {why[reason]}, so it does not get this" for each, reason in answer.deaf.items())

    def _shown_name(self, mention: Mention) -> str:
        row = self.roster.get(mention.id)
        return row.name if row is not None else mention.name

    def _warnings(self, channel: str) -> tuple[str, ...]:
        """Returns a warning about mentions if the channel is known to be a live one."""
        if self._channels.class_of(channel) != "live" or self.roster.backstop.running:
            return ()
        return (f"{channel} is a live channel: mentioned agents that are offline do not get this",)

    async def receipt(self, sent: Receipt | str, stage: str, to: str | None, wait: float) -> Receipt:
        mid, sent_to, seq = (sent, None, 0) if isinstance(sent, str) else (sent.id, sent.to, sent.seq)
        known_to, known_seq = self._direct.sent.get(mid, (sent_to, seq))
        target = await self._agent_id(to) if to else known_to
        if target is None:
            raise UsageError(f"this process did not send a direct message {mid}: pass its recipient as `to`")
        # the steward refuses a stage that does not exist
        request = WaitForReceiptRequest(mid, target, seq=known_seq, stage=stage, wait=wait)  # type: ignore[arg-type]
        answer = await self.connection.call(request, timeout=wait + 5)
        return Receipt(mid, known_seq, answer.stage, to=target, why=answer.why)

    async def tell_read(self, *kept: DirectRef, timeout: float = 5.0) -> list[DirectRef]:
        """Report direct messages that any process has kept (`Incoming.keep`) as read.

        Returns, once that is recorded, those that no longer exist. Reporting again does no harm.
        """
        return await tell(self.connection, kept, "read", timeout)

    async def tell_delivered(self, *kept: DirectRef, timeout: float = 5.0) -> list[DirectRef]:
        """Report them as `delivered`. `keep` reports this too, but only while its process lives."""
        return await tell(self.connection, kept, "delivered", timeout)

    async def trace(self, sent: Receipt | str) -> TraceAnswer:
        mid, seq = (sent, 0) if isinstance(sent, str) else (sent.id, sent.seq if sent.to else 0)
        return await self.connection.call(TraceRequest(mid, seq or self._direct.sent.get(mid, ("", 0))[1]))

    def _sender(self) -> Sender:
        """Returns the sender that this agent signs as. If the roster is known, its access record grants the role."""
        row = self.roster.rows.get(self.identity.id)
        if self._cached_sender is None or self._cached_sender[0] is not row:
            roles = row.roles if row is not None else (self._role,)
            self._cached_sender = row, speaking_as(self.identity, roles, self._role)
        return self._cached_sender[1]

    async def publish(self, prepared: Prepared, *, timeout: float = 5.0, only: str | None = None) -> Stored:
        """Publish a prepared message (`client/publishing`), perhaps prepared long ago by another process of this agent.

        `only`: the broker run that may store it; raises UnreachableError at once if another one or none is connected.
        """
        stored = await self.publisher.publish(prepared, timeout, only)
        if prepared.kind == "dm":
            self._direct.note_sent(prepared.id, prepared.destination, stored.seq)
        return stored

    # --- tasks ---

    async def claim(self, role: str, wait: float, *, looping: bool = False) -> Job | None:
        return await self.tasks.claim(role, wait, looping=looping)

    async def result(self, message_id: str, seq: int | None, wait: float) -> TaskResult:
        return await self.tasks.result(message_id, seq, wait)

    async def dead_letter(
        self, *, seq: int | None = None, letter: str | None = None
    ) -> tuple[DeadLetterAnswer, str | None]:
        """Returns a dead letter, and its text if it is a message or a sealed task that this agent can open."""
        found = await self.connection.call(DeadLetterRequest(seq=seq, letter=letter))
        if found.kind is UNSET:
            return found, self.tasks.sealed_text(found.record)
        message = await self.redelivery.open_letter(found.kind, found.record)
        return found, message.text if message else None

    # --- receiving ---

    async def receive(self) -> None:
        """Takes the session and pulls the mailboxes. Does nothing if it does so already, or with `receive=False`."""
        if self._receives and not self._receiving:
            async with self._beginning:
                await self._begin_receiving()

    async def _begin_receiving(self) -> None:
        if self._receiving:
            return
        with suppress(Superseded):  # the queue says so, after the messages that are still in it
            await self.session.ensure()
            self.session.check()
            self._direct.begin()
            self._frames.begin()
            self.redelivery.begin()
            self._receiving = True


DirectAgent = Agent[DirectTransport]
