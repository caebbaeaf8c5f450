"""How an agent reaches its space: what a `Transport` does, and the values that its methods take and answer with.

`DirectTransport` (`client/direct_transport.py`) holds a connection to the space itself; `HostTransport`
(`client/host_transport.py`) asks the host of this machine, which has an outbox and an inbox on disk. A transport moves
things and does not decide: what a program may say, how long it waits, what it is handed again and what ends a wait is
written once, in `Agent` (`client/agent.py`). Both answer with the same types and raise the same errors, and
`tests/contract/` holds both to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from tidings.contract.core import Request
from tidings.contract.mail import TraceAnswer
from tidings.wire.message import Draft
from tidings.wire.roster import AgentEntry, Status
from tidings.wire.states import ReceiptStage

if TYPE_CHECKING:
    from tidings.client.incoming import Events, Inbox, Past
    from tidings.client.tasks import Job, TaskResult

Via = Literal["direct", "host"]
#: what a message is addressed to
Addressee = Literal["channel", "agent", "role"]
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Receipt:
    """How far a message has come. `stored`: the outbox of the host has it and sends it; `confirmed`: the space has it,
    at `seq`. A direct message has later stages: see `ReceiptStage`."""

    id: str
    #: 0 until the space has it
    seq: int
    stage: str = ReceiptStage.CONFIRMED.value
    warnings: tuple[str, ...] = ()
    #: id of the agent that a direct message went to
    to: str | None = None
    #: why no reader shows it, if its stage is `void`, or why it did not leave
    why: str = ""
    #: number and state of its row in the outbox of the host, and the code of the error that ended it
    row: int | None = None
    state: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of a join. `durable` is False with a `reason` while the steward or durable delivery is away."""

    channel: str
    state: str
    seq: int
    durable: bool
    reason: str
    backfilled: int = 0
    cls: str = "durable"


@dataclass(frozen=True, slots=True)
class Left:
    """The result of a leave: `left`, or `absent` if it was not joined; patterns that still cover the channel.

    `open`: the membership that another program of this agent has begun since, if one has."""

    state: str
    seq: int
    open: int | None = None
    still_covered_by: tuple[str, ...] = ()


class Agents(list[AgentEntry]):
    """The agents of a space, and how current the list is."""

    def __init__(self, found: Iterable[AgentEntry], *, reason: str = "", delay: str = "") -> None:
        super().__init__(found)
        #: why these are the agents as last seen, with the status `offline`; empty if the space was asked now
        self.reason = reason
        #: a sentence about durable delivery that is late; empty if it is not
        self.delay = delay

    @property
    def fresh(self) -> bool:
        return not self.reason


class Transport(Protocol):
    """The way of one agent to its space. `Agent` opens it once and closes it once.

    `close` stops taking messages, then tells the other side what it must hear while it can: waiting acks and receipts,
    tasks that the program holds, the end of the session. Then it closes connections and files. It closes `queue` too,
    so that every loop over messages ends.
    """

    via: ClassVar[Via]
    events: Events
    #: messages that wait for the program
    queue: Inbox

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def space(self) -> str:
        """The name of the space."""

    async def open(self) -> None:
        """Connect. If this raises, nothing is left open."""

    async def close(self) -> None: ...

    def on(self, event: str, callback: Callable[[Any], Any]) -> None:
        self.events.on(event, callback)

    async def call(self, request: Request[A], /, *, op: str | None = None, timeout: float = 5.0) -> A:
        """Ask the steward."""

    async def send(self, addressee: Addressee, to: str, draft: Draft, timeout: float) -> Receipt:
        """Compose a draft and hand it over."""

    async def receive(self) -> None:
        """Put messages into `queue` from now on. Does nothing if it does so already."""

    async def join(self, channel: str, backfill: int) -> Joined: ...

    async def leave(self, channel: str) -> Left: ...

    async def history(self, channel: str, limit: int, before: int | None) -> Past: ...

    async def who(self, timeout: float) -> Agents: ...

    async def access(self) -> dict[str, Any]: ...

    async def announce(self, status: Status, activity: str | None, model: str | None) -> bool: ...

    async def receipt(self, sent: Receipt | str, stage: str, to: str | None, wait: float) -> Receipt:
        """Ask once how far a direct message has come, and let the other side wait so many seconds for `stage`."""

    async def trace(self, sent: Receipt | str) -> TraceAnswer: ...

    async def claim(self, role: str, wait: float, *, looping: bool = False) -> Job | None:
        """Claim a task. `looping`: for a `work` loop, which asks again and again."""

    async def result(self, message_id: str, seq: int | None, wait: float) -> TaskResult:
        """Ask once how far a task has come, and let the other side wait so many seconds for its end."""
