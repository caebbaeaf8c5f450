"""`Transport`, the way of an agent to its space, and the types of its arguments and results.

`DirectTransport` (`client/direct_transport.py`) holds a connection to the space; `HostTransport`
(`client/host_transport.py`) talks to the host of this machine, which has an outbox and an inbox on disk. A transport
moves data and decides nothing: `Agent` (`client/agent.py`) checks arguments, and decides how long to wait and retry.
Both transports return the same types and raise the same errors; `tests/contract/` tests that.
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
#: the kind of destination of a message
Addressee = Literal["channel", "agent", "role"]
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Receipt:
    """The stage that a message has reached. `stored`: it is in the host's outbox; `confirmed`: the space has it, at
    `seq`. A direct message has later stages: see `ReceiptStage`."""

    id: str
    #: 0 until the space has it
    seq: int
    stage: str = ReceiptStage.CONFIRMED.value
    warnings: tuple[str, ...] = ()
    #: id of the recipient of a direct message
    to: str | None = None
    #: why readers reject it, if its stage is `void`, or why it was not sent
    why: str = ""
    #: number and state of its row in the host's outbox, and the code of the error that ended it
    row: int | None = None
    state: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of a join. `durable` is False with a `reason` while the steward or durable delivery is down."""

    channel: str
    state: str
    seq: int
    durable: bool
    reason: str
    backfilled: int = 0
    cls: str = "durable"


@dataclass(frozen=True, slots=True)
class Left:
    """The result of a leave: `left`, or `absent` without a membership; joined patterns that still cover the channel.

    `open`: the join of a membership that another program of this agent has opened since."""

    state: str
    seq: int
    open: int | None = None
    still_covered_by: tuple[str, ...] = ()


class Agents(list[AgentEntry]):
    """The agents of a space, and how current the list is."""

    def __init__(self, found: Iterable[AgentEntry], *, reason: str = "", delay: str = "") -> None:
        super().__init__(found)
        #: why these are the agents last seen, with the status `unknown`; empty if the space answered
        self.reason = reason
        #: a sentence if durable delivery is late, else empty
        self.delay = delay

    @property
    def fresh(self) -> bool:
        return not self.reason


class Transport(Protocol):
    """The way of one agent to its space. `Agent` opens it once and closes it once.

    `close` stops receiving, then sends what is pending while it can: acks and receipts, tasks to give back, the end of
    the session. Then it closes connections and files. It also closes `queue`, so that every loop over messages ends.
    """

    via: ClassVar[Via]
    events: Events
    #: received messages that wait for the program
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
        """Send a control request to the steward."""

    async def send(self, addressee: Addressee, to: str, draft: Draft, timeout: float) -> Receipt:
        """Compose and send a draft."""

    async def receive(self) -> None:
        """Start to put messages into `queue`. Does nothing if already started."""

    async def join(self, channel: str, backfill: int) -> Joined: ...

    async def leave(self, channel: str) -> Left: ...

    async def history(self, channel: str, limit: int, before: int | None) -> Past: ...

    async def who(self, timeout: float) -> Agents: ...

    async def access(self) -> dict[str, Any]: ...

    async def announce(self, status: Status, activity: str | None, model: str | None) -> bool: ...

    async def receipt(self, sent: Receipt | str, stage: str, to: str | None, wait: float) -> Receipt:
        """Ask once for the stage of a direct message. The other side waits up to `wait` seconds for `stage`."""

    async def trace(self, sent: Receipt | str) -> TraceAnswer: ...

    async def claim(self, role: str, wait: float, *, looping: bool = False) -> Job | None:
        """Claim a task. `looping`: for a `work` loop, which claims repeatedly."""

    async def result(self, message_id: str, seq: int | None, wait: float) -> TaskResult:
        """Ask once for the state of a task. The other side waits up to `wait` seconds for its end."""
