"""An agent in a program's hands: what it says, hears and works on, whichever way it is connected.

    async with tidings.connect("main", name="ada", channels=["general"]) as ada:
        await ada.send("general", "hello", mentions=["bob"])
        async for message in ada.messages():
            print(message.sender.name, message.text)

`Agent` checks arguments, joins its first channels, hands out messages, and decides how long it asks again. Moving
bytes is the work of its `transport` (`client/transport.py`); what only one transport can do is a method there, such as
`agent.transport.recall` of a direct connection or `agent.transport.inbox` through the host.

Closing an agent is not leaving: memberships stay, and what is owed stays owed. `close` ends loops over tasks first,
then the transport, whose docstring has the order of the rest.
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
#: channels that are joined at a time when an agent opens
JOINS_AT_ONCE = 8
#: before a space that is away is asked again
RETRY = Backoff(0.1, 2.0)
#: before a receipt is asked for again that was answered early: too many wait at the steward
EARLY = Backoff(0.05, 1.0)


class DraftOptions(TypedDict, total=False):
    """What `send`, `dm` and `ask` take besides a text."""

    #: any JSON value; None is no data
    data: Any
    parts: Iterable[Part]
    priority: Priority
    reply_to: str | None
    context: str | None
    #: a message sent again under its id is the same message
    id: str | None


class Agent(Generic[T_co]):
    """One agent in a space. Made by `tidings.connect`; use it as an async context manager."""

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
        """Joins its first channels, several at a time. The first refusal ends this and is raised."""
        turns = asyncio.Semaphore(JOINS_AT_ONCE)

        async def join(channel: str) -> None:
            async with turns:
                await self.join(channel, backfill=self._boot_backfill)

        joining = [asyncio.create_task(join(channel)) for channel in self._boot_channels]
        try:
            await asyncio.gather(*joining)
        finally:
            await end_tasks(joining)

    async def close(self) -> None:
        """Stop. This is not leaving: memberships stay, and what is owed stays owed."""
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
        """Call back on an event: one of `Events.NAMES`, such as message, error, notice or connection.

        The first callback of `notice`, `gap` and `error` also hears of losses that were found before it was registered.
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

        Directly the answer is `confirmed`, or an error. Through the host it may be `stored`, if the space did not
        confirm it within `timeout`; UnreachableError and OutcomeUnknown are then the host's, not the space's.
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
        """Write to one agent, sealed so that only it can read it. A message to yourself is a note for later.

        The host seals every direct message: `sealed=False` needs a connection of one's own.
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
        """Queue a task for any one holder of a role. `deadline`: seconds from now after which nobody may finish it."""
        draft = Draft(text, mentions=mentions, deadline=deadline, **options).check()
        return TaskTicket(await self.transport.send("role", role, draft, timeout), role, self)

    async def receipt(
        self, sent: Receipt | str, stage: str = ReceiptStage.DELIVERED, *, timeout: float = 30.0, to: str | None = None
    ) -> Receipt:
        """Wait until a direct message of yours has reached `stage` or a final one; after `timeout` seconds the answer
        is how far it has come."""
        deadline, delays = time.monotonic() + timeout, EARLY.delays()
        while True:
            left = max(0.0, deadline - time.monotonic())
            found = await self.transport.receipt(sent, stage, to, min(LONG_POLL, left))
            if has_reached(found.stage, stage) or time.monotonic() >= deadline:
                return found
            await asyncio.sleep(min(next(delays), left))

    async def trace(self, sent: Receipt | str) -> TraceAnswer:
        """Returns the life of a message you sent or were sent: where it is stored, and its receipts with their times.

        Through the host it is a `HostTrace`, which has its row in the outbox as well.
        """
        return await self.transport.trace(sent)

    # --- receiving ---

    async def messages(self, *, manual_ack: bool = False) -> AsyncIterator[Incoming]:
        """Messages as they come; asking for the next one acks the one before, unless `manual_ack`.

        Through the host it begins with what is unread in the inbox, and an ack marks as read there.
        """
        await self.transport.receive()
        async for incoming in self.transport.queue.iterate(manual_ack=manual_ack):
            yield incoming

    async def next_message(self, timeout: float | None = None) -> Incoming:
        """The next message. It is yours to `ack()`."""
        async with asyncio.timeout(timeout):
            await self.transport.receive()
            incoming = await self.transport.queue.get()
        if incoming is None:
            raise ConnectionLost("this agent is closed")
        return incoming

    async def handle(self, callback: Callable[[Incoming], Any]) -> None:
        """Call back for each message, one at a time, until this agent closes; a return acks the message.

        If it raises, the error is an `error` event, the message is given back (`Incoming.nak`), and the next one comes.
        It is handed out again after a pause. After a few tries it is a dead letter with the error (`tidings dead`);
        through the host it stays unread in the inbox.
        """
        async for incoming in self.messages(manual_ack=True):
            try:
                answer = callback(incoming)
                if inspect.isawaitable(answer):
                    await answer
            except Exception as error:  # noqa: BLE001  boundary: the application's code
                self.events.emit("error", error)
                await incoming.nak(error=error)
            else:
                await incoming.ack()

    # --- channels ---

    async def join(self, channel: str, *, backfill: int = 0) -> Joined:
        """Become a member of a channel or pattern: what is said there from now on is owed to this agent.

        What was said before is not delivered, unless a first join asks for the newest so many (`backfill`): they come
        marked `historical`, as far as the channel replays. The host's inbox takes no backfill: ask for `history`.
        """
        return await self.transport.join(unmarked(channel), backfill)

    async def leave(self, channel: str) -> Left:
        return await self.transport.leave(unmarked(channel))

    async def history(self, channel: str, limit: int = 50, *, before: int | None = None) -> Past:
        """Returns the newest messages of a channel, newest first, as far as it replays."""
        return await self.transport.history(unmarked(channel), limit, before)

    async def channels(self) -> list[ChannelRow]:
        """Returns the channels that this agent may read and that have settings or members."""
        return [row async for page in pages(self.call, ChannelsRequest()) for row in page.channels]

    async def channel_info(self, channel: str) -> ChannelAnswer:
        """Returns the settings, members and activity of a channel."""
        return await self.call(ChannelRequest(unmarked(channel)))

    async def memberships(self) -> list[str]:
        """Returns the channels and patterns this agent is a member of, whichever of its programs joined them."""
        return sorted({each.pattern for each in (await self.call(MembershipsRequest())).memberships})

    async def members(self, channel: str) -> list[MemberRow]:
        """Returns the members of a channel."""
        request = MembersRequest(check_channel(unmarked(channel)))
        return [member async for page in pages(self.call, request) for member in page.members]

    # --- who is here ---

    async def who(self, timeout: float = 5.0) -> Agents:
        """Returns every agent of the space, offline ones included."""
        return await self.transport.who(timeout)

    async def access(self) -> dict[str, Any]:
        """Returns what this agent may do: its roles, and the patterns of channels it may read, post to and manage."""
        return await self.transport.access()

    async def announce(self, status: Status, activity: str | None = None, model: str | None = None) -> bool:
        """Say what this agent does. Answers whether others see it now, or only once a program of it is attached."""
        return await self.transport.announce(status, activity, model)

    async def attention(self) -> AttentionAnswer:
        """Returns what may wake this agent: `standing`, which the steward keeps, and `running`, of a session now."""
        return await self.call(AttentionRequest())

    async def keep_attention(
        self, mode: Mode | None = None, channels: Mapping[str, Level] | None = None
    ) -> AttentionAnswer:
        """Have the steward keep this for every session of the agent that runs now or starts later. Answers with the
        result, as `attention` does."""
        levels = {unmarked(pattern): level for pattern, level in (channels or {}).items()}
        return await self.call(ChangeAttentionRequest(mode, levels))

    # --- tasks ---

    async def work(self, role: str) -> AsyncIterator[Job]:
        """Tasks of a role, one at a time. A job that the loop's body leaves unsettled is given back.

        A space that was never reached raises; one that is away later is waited for.
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
                    with suppress(TidingsError):  # silence says the same to the steward, only later
                        await job.fail("left unfinished")

    async def claim(self, role: str, wait: float = 0.0) -> Job | None:
        """Returns one task of a role, yours to end with `done` or `fail`; None if none came within `wait` seconds."""
        return await self.transport.claim(check_role(role), wait)

    async def task(self, message_id: str, timeout: float | None = 0.0, *, seq: int | None = None) -> TaskResult:
        """Returns how far a task this agent asked has come, by the id of its message, whichever of its programs asked.

        Waits for its end for `timeout` seconds; None: however long that takes.
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
                # answered early with nothing new: it has not left yet, or too many wait at the steward already
                await asyncio.sleep(min(next(delays), until - now))
            seen = found.state

    # --- asking the steward ---

    async def call(self, request: Request[A], /, *, op: str | None = None, timeout: float = 5.0) -> A:
        """Sends a control request (`docs/control.md`) and returns its answer. Raises the error that the steward named.

        Through the host only operations that it forwards (`Operation.host`).
        """
        return await self.transport.call(request, op=op, timeout=timeout)
