"""`Agent`: what a program sends, receives and works on, over a direct connection or through the host.

    async with tidings.connect("main", name="ada", channels=["general"]) as ada:
        await ada.send("general", "hello", mentions=["bob"])
        async for message in ada.messages():
            print(message.sender.name, message.text)

`Agent` checks arguments, joins its first channels, hands out messages, and decides how long to retry. Its `transport`
(`client/transport.py`) moves the bytes. What only one transport can do is a method there, such as
`agent.transport.recall` of a direct connection or `agent.transport.inbox` through the host.

Closing an agent does not leave channels: memberships stay, and owed messages stay owed. `close` ends loops over tasks
first, then the transport, whose docstring has the order of the rest.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeVar, Unpack

from tidings.client.tasks import LONG_POLL, Job, TaskResult, TaskTicket
from tidings.client.transport import Agents, Joined, Left, Receipt, Transport, Via
from tidings.contract.agents import AttentionAnswer, AttentionRequest, ChangeAttentionRequest
from tidings.contract.channels import (
    ChannelAnswer,
    ChannelRequest,
    ChannelRow,
    ChannelsRequest,
    MemberRow,
    MembershipsRequest,
    MembersRequest,
)
from tidings.contract.core import Request
from tidings.contract.mail import TraceAnswer
from tidings.errors import ConnectionLost, HostUnreachable, OutcomeUnknown, TidingsError, UnreachableError
from tidings.rpc.control import pages
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks
from tidings.wire.message import Draft, Mention, Part, Priority, check_list
from tidings.wire.names import check_channel, check_role, unmarked
from tidings.wire.roster import Level, Mode, Status
from tidings.wire.states import ReceiptStage, has_reached

if TYPE_CHECKING:
    from tidings.client.incoming import Events, Incoming, Past

A = TypeVar("A")
T = TypeVar("T")
T_co = TypeVar("T_co", bound=Transport, covariant=True)
#: channels that are joined concurrently when an agent opens
JOINS_AT_ONCE = 8
#: delays before retrying a space that could not be reached
RETRY = Backoff(0.1, 2.0)
#: delays before asking again for a receipt that was answered early because too many requests wait at the steward
EARLY = Backoff(0.05, 1.0)


class DraftOptions(TypedDict, total=False):
    """The optional arguments of `send`, `dm` and `ask`."""

    #: any JSON value; None is no data
    data: Any
    parts: Iterable[Part]
    priority: Priority
    reply_to: str | None
    context: str | None
    #: a message sent again with the same id is stored once
    id: str | None


class Agent(Generic[T_co]):
    """One agent in a space. `tidings.connect` makes it; use it as an async context manager."""

    def __init__(self, transport: T_co, *, channels: Sequence[str] = (), backfill: int = 0) -> None:
        check_list(channels, "channels", "'general'")
        self.transport = transport
        self._boot_channels = tuple(dict.fromkeys(channels))
        self._boot_backfill = backfill
        self._closed = False

    @property
    def id(self) -> str:
        return self.transport.id

    @property
    def name(self) -> str:
        return self.transport.name

    @property
    def space(self) -> str:
        """The name of the space."""
        return self.transport.space

    @property
    def via(self) -> Via:
        return self.transport.via

    @property
    def events(self) -> Events:
        return self.transport.events

    # --- life ---

    async def open(self) -> None:
        await self.transport.open()
        try:
            await self._join_all()
        except BaseException:
            await self.close()
            raise

    async def _join_all(self) -> None:
        """Joins its first channels, several at a time. Stops at the first refusal and raises it."""
        slots = asyncio.Semaphore(JOINS_AT_ONCE)

        async def join(channel: str) -> None:
            async with slots:
                await self.join(channel, backfill=self._boot_backfill)

        joining = [asyncio.create_task(join(channel)) for channel in self._boot_channels]
        try:
            await asyncio.gather(*joining)
        finally:
            await end_tasks(joining)

    async def close(self) -> None:
        """Disconnect. Memberships stay, and owed messages stay owed."""
        self._closed = True
        await self.transport.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def on(self, event: str, callback: Callable[[Any], Any]) -> None:
        """Register a callback for an event: one of `Events.NAMES`, such as message, error, notice or connection.

        The first callback for `notice`, `gap` or `error` also gets losses that were found before it was registered.
        """
        self.transport.on(event, callback)

    # --- sending ---

    async def send(
        self,
        channel: str,
        text: str | None = None,
        *,
        mentions: Iterable[Mention | str] = (),
        timeout: float = 5.0,
        **options: Unpack[DraftOptions],
    ) -> Receipt:
        """Post to a channel. A mention of an unknown agent raises before anything is sent.

        A direct connection returns a `confirmed` receipt or raises. Through the host the receipt is `stored` if the
        space did not confirm within `timeout`; UnreachableError and OutcomeUnknown then mean the host, not the space.
        """
        draft = Draft(text, mentions=mentions, **options).check()
        return await self.transport.send("channel", unmarked(channel), draft, timeout)

    async def dm(
        self,
        to: str,
        text: str | None = None,
        *,
        sealed: bool = True,
        timeout: float = 5.0,
        **options: Unpack[DraftOptions],
    ) -> Receipt:
        """Send to one agent, sealed so that only it can read the message. A message to yourself is a note for later.

        The host seals every direct message: `sealed=False` needs a direct connection.
        """
        draft = Draft(text, mentions=(), sealed=sealed, **options).check()
        return await self.transport.send("agent", to, draft, timeout)

    async def ask(
        self,
        role: str,
        text: str | None = None,
        *,
        deadline: float | None = None,
        mentions: Iterable[Mention] = (),
        timeout: float = 5.0,
        **options: Unpack[DraftOptions],
    ) -> TaskTicket:
        """Queue a task for any one holder of a role. `deadline`: seconds from now after which it cannot be finished."""
        draft = Draft(text, mentions=mentions, deadline=deadline, **options).check()
        return TaskTicket(await self.transport.send("role", role, draft, timeout), role, self)

    async def receipt(
        self, sent: Receipt | str, stage: str = ReceiptStage.DELIVERED, *, timeout: float = 30.0, to: str | None = None
    ) -> Receipt:
        """Wait until a direct message of yours has reached `stage` or a final stage. After `timeout` seconds return the
        stage it has reached."""
        deadline, delays = time.monotonic() + timeout, EARLY.delays()
        while True:
            left = max(0.0, deadline - time.monotonic())
            receipt = await self.transport.receipt(sent, stage, to, min(LONG_POLL, left))
            if has_reached(receipt.stage, stage) or time.monotonic() >= deadline:
                return receipt
            await asyncio.sleep(min(next(delays), left))

    async def trace(self, sent: Receipt | str) -> TraceAnswer:
        """Returns where a message that you sent or received is stored, and its receipts with their times.

        Through the host it is a `HostTrace`, which also has its row in the outbox.
        """
        return await self.transport.trace(sent)

    # --- receiving ---

    async def messages(self, *, manual_ack: bool = False) -> AsyncIterator[Incoming]:
        """Yields messages as they arrive. Asking for the next one acks the previous one, unless `manual_ack`.

        Through the host it starts with the unread messages of the inbox, and an ack marks a message as read there.
        """
        await self.transport.receive()
        async for incoming in self.transport.queue.iterate(manual_ack=manual_ack):
            yield incoming

    async def next_message(self, timeout: float | None = None) -> Incoming:
        """Returns the next message. The caller acks it with `ack()`."""
        async with asyncio.timeout(timeout):
            await self.transport.receive()
            incoming = await self.transport.queue.get()
        if incoming is None:
            raise ConnectionLost("this agent is closed")
        return incoming

    async def handle(self, callback: Callable[[Incoming], Any]) -> None:
        """Calls back for each message, one at a time, until this agent closes; a return acks the message.

        If the callback raises, the error is an `error` event, the message is given back (`Incoming.nak`), and the next
        one follows. The message is delivered again after a pause. After several attempts it becomes a dead letter with
        the error (`tidings dead`); through the host it stays unread in the inbox.
        """
        async for incoming in self.messages(manual_ack=True):
            try:
                result = callback(incoming)
                if inspect.isawaitable(result):
                    await result
            except Exception as error:  # noqa: BLE001  boundary: the application's code
                self.events.emit("error", error)
                await incoming.nak(error=error)
            else:
                await incoming.ack()

    # --- channels ---

    async def join(self, channel: str, *, backfill: int = 0) -> Joined:
        """Become a member of a channel or pattern: messages from now on are owed to this agent.

        Earlier messages are not delivered, except that a first join may ask for the newest `backfill` of them: they are
        marked `historical`, and limited by the channel's replay. Through the host there is no backfill: use `history`.
        """
        return await self.transport.join(unmarked(channel), backfill)

    async def leave(self, channel: str) -> Left:
        return await self.transport.leave(unmarked(channel))

    async def history(self, channel: str, limit: int = 50, *, before: int | None = None) -> Past:
        """Returns the newest messages of a channel, newest first, limited by the channel's replay."""
        return await self.transport.history(unmarked(channel), limit, before)

    async def channels(self) -> list[ChannelRow]:
        """Returns the channels that this agent may read and that have settings or members."""
        return [row async for page in pages(self.call, ChannelsRequest()) for row in page.channels]

    async def channel_info(self, channel: str) -> ChannelAnswer:
        """Returns the settings, members and activity of a channel."""
        return await self.call(ChannelRequest(unmarked(channel)))

    async def memberships(self) -> list[str]:
        """Returns the channels and patterns that any program of this agent has joined."""
        return sorted({each.pattern for each in (await self.call(MembershipsRequest())).memberships})

    async def members(self, channel: str) -> list[MemberRow]:
        """Returns the members of a channel."""
        request = MembersRequest(check_channel(unmarked(channel)))
        return [member async for page in pages(self.call, request) for member in page.members]

    # --- who is here ---

    async def who(self, timeout: float = 5.0) -> Agents:
        """Returns every agent of the space, including offline ones."""
        return await self.transport.who(timeout)

    async def access(self) -> dict[str, Any]:
        """Returns the agent's roles, and the patterns of channels that it may read, post to and manage."""
        return await self.transport.access()

    async def announce(self, status: Status, activity: str | None = None, model: str | None = None) -> bool:
        """Report what this agent does. Returns whether others see it now, or only once a program of it is attached."""
        return await self.transport.announce(status, activity, model)

    async def attention(self) -> AttentionAnswer:
        """Returns what may wake this agent: `standing` as stored by the steward, and `running` of a running session."""
        return await self.call(AttentionRequest())

    async def keep_attention(
        self, mode: Mode | None = None, channels: Mapping[str, Level] | None = None
    ) -> AttentionAnswer:
        """Store this at the steward, for all current and later sessions of the agent. Returns the result, as
        `attention` does."""
        levels = {unmarked(pattern): level for pattern, level in (channels or {}).items()}
        return await self.call(ChangeAttentionRequest(mode, levels))

    # --- tasks ---

    async def work(self, role: str) -> AsyncIterator[Job]:
        """Yields tasks of a role, one at a time. A job that the loop's body leaves unfinished is given back.

        Raises if the space cannot be reached at first; later it waits for the space.
        """
        check_role(role)
        reached, delays = self.via == "direct", RETRY.delays()  # a direct transport opens once it has reached the space
        while not self._closed:
            try:
                job = await self.transport.claim(role, LONG_POLL, looping=True)
            except HostUnreachable:
                raise
            except (UnreachableError, OutcomeUnknown):
                if not reached:
                    raise
                await asyncio.sleep(next(delays))
                continue
            reached, delays = True, RETRY.delays()
            if job is None:
                continue
            try:
                yield job
            finally:
                if not job.settled:
                    with suppress(TidingsError):  # else the steward takes it back later, when the beats stop
                        await job.fail("left unfinished")

    async def claim(self, role: str, wait: float = 0.0) -> Job | None:
        """Returns one task of a role, to be ended with `done` or `fail`; None if none came within `wait` seconds."""
        return await self.transport.claim(check_role(role), wait)

    async def task(self, message_id: str, timeout: float | None = 0.0, *, seq: int | None = None) -> TaskResult:
        """Returns the state and result of a task that any program of this agent asked, by the id of its message.

        Waits up to `timeout` seconds for the task to end (None: without limit).
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        delays, seen = RETRY.delays(), ""
        while True:
            asked = time.monotonic()
            left = max(0.0, min(LONG_POLL, until - asked))
            try:
                found = await self.transport.result(message_id, seq, left)
            except HostUnreachable:
                raise
            except (UnreachableError, OutcomeUnknown):
                if self._closed or time.monotonic() >= until:
                    raise
                await asyncio.sleep(next(delays))
                continue
            now = time.monotonic()
            if found.is_final or now >= until:
                return found
            if now - asked < left / 2 and found.state == seen:
                # answered early without news: it is not sent yet, or too many requests wait at the steward
                await asyncio.sleep(min(next(delays), until - now))
            seen = found.state

    # --- control requests ---

    async def call(self, request: Request[A], /, *, op: str | None = None, timeout: float = 5.0) -> A:
        """Sends a control request (`docs/control.md`) and returns its answer. Raises the error that the steward named.

        Through the host this works only for operations that it forwards (`Operation.host`).
        """
        return await self.transport.call(request, op=op, timeout=timeout)
