"""What a program holds to be an agent, whichever way it is connected.

    async with tidings.connect("main", name="ada", via="host") as ada:       # or via="direct", or "auto"
        await ada.send("general", "hello")

`Endpoint` goes to the space itself; `HostEndpoint` (`client/host_endpoint.py`) through the host of this machine, which
has an outbox and an inbox on disk. Both answer with the same types and raise the same errors, and `tests/contract/`
holds both to it. Where they differ by nature, the docstring of the method says so. What is only a question to the
steward is written here once, over `call`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

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
from tidings.contract.mail import TraceAnswer, TraceRequest
from tidings.errors import TidingsError, UsageError
from tidings.rpc.control import pages
from tidings.wire.message import Mention, Message, Part, Priority, Sender, check_said, compose
from tidings.wire.names import check_channel, unmarked
from tidings.wire.roster import Agent, Level, Mode, Status
from tidings.wire.states import ReceiptStage

if TYPE_CHECKING:
    from tidings.client.incoming import Events, Incoming, Past
    from tidings.client.tasks import Job, TaskResult, TaskTicket

Via = Literal["direct", "host"]
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Draft:
    """What a program wants to say, whichever way it goes: the arguments of `send`, `dm` and `ask`."""

    text: str | None = None
    #: any JSON value; None is no data
    data: Any = None
    parts: Iterable[Part] = ()
    mentions: Iterable[Mention | str] = ()
    priority: Priority = "next"
    reply_to: str | None = None
    context: str | None = None
    id: str | None = None
    sealed: bool = True
    deadline: float | None = None

    def check(self) -> Self:
        """Returns itself; UsageError if it says nothing, or holds what a program hands over by mistake."""
        check_said(self.text, self.parts, self.mentions, more=self.data is not None)
        return self

    def compose(self, sender: Sender, mentions: Iterable[Mention] = (), terms: Iterable[Part] = ()) -> Message:
        """The message of this sender, with its mentions resolved. `terms`: what the steward has to know of a task."""
        extra = {} if self.data is None else {"data": self.data}
        try:
            return compose(
                sender,
                text=self.text,
                parts=(*self.parts, *terms),
                mentions=mentions,
                priority=self.priority,
                reply_to=self.reply_to,
                context=self.context,
                id=self.id,
                **extra,
            )
        except TidingsError:
            raise
        except (TypeError, ValueError) as error:
            raise UsageError(f"this cannot be sent: {error}") from error


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of something sent. `stored`: the outbox of the host has it, and it leaves by itself; `confirmed`: the
    space has it, at `seq`; of a direct message `delivered`, `read` or `void` too."""

    id: str
    #: 0 until the space has it
    seq: int
    stage: str = ReceiptStage.CONFIRMED.value
    warnings: tuple[str, ...] = ()
    #: id of the agent a direct message went to
    to: str | None = None
    #: why no reader shows it, if its stage is `void`, or why it did not leave
    why: str = ""
    #: number and state of its row in the outbox of the host, and the code of the error that ended it
    row: int | None = None
    state: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """What a join came to. `durable` is False with a `reason` while the steward or durable delivery is away."""

    channel: str
    state: str
    seq: int
    durable: bool
    reason: str
    backfilled: int = 0
    cls: str = "durable"


@dataclass(frozen=True, slots=True)
class Left:
    """What leaving came to: `left`, or `absent` if it was not joined; patterns that still cover the channel.

    `open`: the membership that another program of this agent has begun since, if one has."""

    state: str
    seq: int
    open: int | None = None
    still_covered_by: tuple[str, ...] = ()


class Agents(list[Agent]):
    """The agents of a space, and how much that is worth."""

    def __init__(self, found: Iterable[Agent], *, reason: str = "", delay: str = "") -> None:
        super().__init__(found)
        #: why these are the agents as last seen, with the status `offline`; empty if the space was asked now
        self.reason = reason
        #: what to say of durable copies that are late; empty if they are not
        self.delay = delay

    @property
    def fresh(self) -> bool:
        return not self.reason


class AgentInterface(ABC):
    """One agent's session with a space. Use it as an async context manager."""

    via: Via
    events: Events

    @property
    @abstractmethod
    def id(self) -> str: ...

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def space(self) -> str:
        """Name of the space."""

    # --- life ---

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """Stop. This is not leaving: memberships stay, and what is owed keeps being owed."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    def on(self, event: str, callback: Callable[[Any], Any]) -> None:
        """Call back on an event: one of `Events.NAMES`, such as message, error, notice or connection."""

    # --- sending ---

    async def send(
        self,
        channel: str,
        text: str | None = None,
        *,
        data: Any = None,
        parts: Iterable[Part] = (),
        mentions: Iterable[Mention | str] = (),
        priority: Priority = "next",
        reply_to: str | None = None,
        context: str | None = None,
        id: str | None = None,  # noqa: A002
        timeout: float = 5.0,
    ) -> Receipt:
        """Post to a channel. A mention of nobody is refused before sending.

        Directly the answer is `confirmed`, or an error. Through the host it may be `stored`, if the space did not
        confirm it within `timeout`; UnreachableError and OutcomeUnknown are then the host's, not the space's.
        """
        draft = Draft(text, data, parts, mentions, priority, reply_to, context, id).check()
        return await self._send(unmarked(channel), draft, timeout)

    async def dm(
        self,
        to: str,
        text: str | None = None,
        *,
        sealed: bool = True,
        data: Any = None,
        parts: Iterable[Part] = (),
        priority: Priority = "next",
        reply_to: str | None = None,
        context: str | None = None,
        id: str | None = None,  # noqa: A002
        timeout: float = 5.0,
    ) -> Receipt:
        """Write to one agent, sealed so that only it can read it. A message to yourself is a note for later.

        The host seals every direct message: `sealed=False` needs a connection of one's own.
        """
        draft = Draft(text, data, parts, (), priority, reply_to, context, id, sealed=sealed).check()
        return await self._dm(to, draft, timeout)

    async def ask(
        self,
        role: str,
        text: str | None = None,
        *,
        data: Any = None,
        deadline: float | None = None,
        parts: Iterable[Part] = (),
        mentions: Iterable[Mention] = (),
        priority: Priority = "next",
        reply_to: str | None = None,
        context: str | None = None,
        id: str | None = None,  # noqa: A002
        timeout: float = 5.0,
    ) -> TaskTicket:
        """Queue a task for any one holder of a role. `deadline`: seconds from now after which nobody may finish it."""
        draft = Draft(text, data, parts, mentions, priority, reply_to, context, id, deadline=deadline).check()
        return await self._ask(role, draft, timeout)

    @abstractmethod
    async def _send(self, channel: str, draft: Draft, timeout: float) -> Receipt: ...

    @abstractmethod
    async def _dm(self, to: str, draft: Draft, timeout: float) -> Receipt: ...

    @abstractmethod
    async def _ask(self, role: str, draft: Draft, timeout: float) -> TaskTicket: ...

    @abstractmethod
    async def receipt(
        self, sent: Receipt | str, stage: str = ReceiptStage.DELIVERED, *, timeout: float = 30.0, to: str | None = None
    ) -> Receipt:
        """How far a direct message of yours has come: waits until `stage`, or says how far it is when time is over."""

    # --- receiving ---

    @abstractmethod
    def messages(self, *, manual_ack: bool = False) -> AsyncIterator[Incoming]:
        """Messages as they come; asking for the next one settles the one before, unless `manual_ack`.

        Through the host it begins with what is unread in the inbox, and settling marks as read there.
        """

    @abstractmethod
    async def next_message(self, timeout: float | None = None) -> Incoming:
        """The next message. It is yours to `ack()`."""

    async def handle(self, callback: Callable[[Incoming], Any]) -> None:
        """Call back for each message, one at a time, until this endpoint closes; its return settles the message.

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

    @abstractmethod
    async def join(self, channel: str, *, backfill: int = 0) -> Joined:
        """Be in a channel or pattern: from now on what is said there is owed to this agent.

        What was said before is not brought, unless a first join asks for the newest so many (`backfill`): they come
        marked `historical`, as far as the channel replays. The host's inbox takes no backfill: ask for `history`.
        """

    @abstractmethod
    async def leave(self, channel: str) -> Left: ...

    @abstractmethod
    async def history(self, channel: str, limit: int = 50, *, before: int | None = None) -> Past:
        """The newest messages of a channel, newest first, as far as it replays."""

    async def channels(self) -> list[ChannelRow]:
        """Returns the channels that this agent may read and that have settings or members."""
        return [row async for page in pages(self.call, ChannelsRequest()) for row in page.channels]

    async def channel_info(self, channel: str) -> ChannelAnswer:
        """Returns the settings, members and activity of a channel."""
        return await self.call(ChannelRequest(unmarked(channel)))

    async def memberships(self) -> list[str]:
        """The channels and patterns this agent is a member of, whichever of its programs joined them."""
        return sorted({each.pattern for each in (await self.call(MembershipsRequest())).memberships})

    async def members(self, channel: str) -> list[MemberRow]:
        """Returns the members of a channel."""
        request = MembersRequest(check_channel(unmarked(channel)))
        return [member async for page in pages(self.call, request) for member in page.members]

    # --- who is here ---

    @abstractmethod
    async def who(self, timeout: float = 5.0) -> Agents:
        """Every agent of the space, offline ones included."""

    @abstractmethod
    async def access(self) -> dict[str, Any]:
        """What this agent may do: its roles, and the patterns of channels it may read, post to and manage."""

    @abstractmethod
    async def announce(self, status: Status, activity: str | None = None, model: str | None = None) -> bool:
        """Say what this agent does. Answers whether others see it now, or only once a program of it is attached."""

    async def attention(self) -> AttentionAnswer:
        """What may wake this agent: `standing`, which the steward keeps, and `running`, what a session of it says."""
        return await self.call(AttentionRequest())

    async def keep_attention(
        self, mode: Mode | None = None, channels: Mapping[str, Level] | None = None
    ) -> AttentionAnswer:
        """Have the steward keep this for the agent: for every session of it that runs now or starts later. As it is
        then, like `attention`."""
        levels = {unmarked(pattern): level for pattern, level in (channels or {}).items()}
        return await self.call(ChangeAttentionRequest(mode, levels))

    # --- tasks ---

    @abstractmethod
    def work(self, role: str) -> AsyncIterator[Job]:
        """Tasks of a role, one at a time. A job that the loop's body leaves unsettled is given back."""

    @abstractmethod
    async def claim(self, role: str, wait: float = 0.0) -> Job | None:
        """One task of a role, yours to settle with `done` or `fail`; None if none came within `wait` seconds."""

    @abstractmethod
    async def task(self, message_id: str, timeout: float | None = 0.0) -> TaskResult:
        """How far a task this agent asked has come, by the id of its message, whoever of its programs asked."""

    # --- asking the steward ---

    @abstractmethod
    async def call(self, request: Request[A], /, *, op: str | None = None, timeout: float = 5.0) -> A:
        """Sends a control request (`docs/control.md`) and returns its answer. Raises the error that the steward named.

        Through the host only operations that it forwards (`Operation.host`).
        """

    async def trace(self, sent: Receipt | str) -> TraceAnswer:
        """The life of one message you sent or were sent: where it is stored, and its receipts with their times.

        Through the host it is a `HostTrace`, which has its row in the outbox as well.
        """
        mid, seq = (sent, 0) if isinstance(sent, str) else (sent.id, sent.seq if sent.to else 0)
        return await self.call(TraceRequest(mid, seq))
