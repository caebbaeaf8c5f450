"""What a direction of a link needs from outside: the log it takes from, the log it puts into, time.

The engine is written against these alone. The worker implements them over NATS, the simulator in memory, and both keep
what is said here. Errors are of `tidings.errors`, by class: `UnreachableError` and `OutcomeUnknown` say that the other
end was not heard, `DeniedError` and `LogFull` that it does not take anything now, `WireError` and `UsageError` that it
will never take this record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple, Protocol

import msgspec

from tidings.errors import TidingsError
from tidings.links.compare import Difference
from tidings.wire.links import LinkedRecord, LinkPage, Token
from tidings.wire.names import covers_any


class OriginIdentity(NamedTuple):
    """What a message is known by in every space it comes to."""

    origin: str
    sender: str
    id: str


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How the peer introduces itself. `space` is its id; `shares` and `hops` are what it lets us read now; `time` is
    what its clock says; `jwt` is a newer token of our user, if there is one."""

    space: str
    epoch: str
    head: int
    floor: int
    shares: tuple[str, ...]
    hops: int
    time: str = ""
    jwt: str = ""

    @property
    def clock(self) -> float | None:
        """What its clock says, in seconds, if that is told."""
        with suppress(ValueError, OverflowError):
            return datetime.fromisoformat(self.time).timestamp()
        return None

    def shows(self, origin: str, channel: str) -> bool:
        """May a record be in its digests? What it passes on of other spaces has another name in its own log, so that
        it may be known for what it said itself only."""
        return covers_any(self.shares, channel) if origin == self.space else self.hops > 1


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """Records by their sequences. What is neither here nor missing did not fit: ask for it again."""

    epoch: str
    records: tuple[LinkedRecord, ...]
    missing: tuple[int, ...] = ()


class Source(Protocol):
    """The peer's log, as far as it is shared with us."""

    async def hello(self) -> PeerFacts: ...

    async def page(self, token: Token, limit: int) -> LinkPage:
        """What follows the token, at most `limit` records. It also tells the peer how far we have handled its log."""
        ...

    async def fetch(self, seqs: Sequence[int]) -> Fetched: ...


class Comparing(Protocol):
    """The peer's log against the ledger, up to a sequence of that log. A difference that stays is not given again until
    it changes."""

    #: names the difference that was given last; empty to have it given again
    reported: str
    #: the last comparison gave nothing, because it found what was given before
    standing: bool

    def differences(self, through: int) -> AsyncIterator[Difference]: ...


class LocalFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The log here. Messages below `floor` were removed, and are not lost for that.

    `agreed`: the sequence of the record under which this link lets something in now, 0 if it does not; None if that is
    not told. `authority` is the name of that agreement. `listing`: 0 if every channel may be used here; else a number
    that changes whenever other channels are listed. `share`: bytes that a link may bring in a day; 0 if nobody says
    it."""

    space: str
    epoch: str
    head: int
    floor: int = 0
    agreed: int | None = None
    authority: str = ""
    listing: int = 0
    share: int = 0


class IndexRow(NamedTuple):
    """A message that came into the log here over a link: `channel` is where it was said, `seq` where it is here."""

    seq: int
    link: str
    origin: str
    channel: str
    sender: str
    id: str
    hash: str

    @property
    def identity(self) -> OriginIdentity:
        return OriginIdentity(self.origin, self.sender, self.id)


class IndexPage(msgspec.Struct, frozen=True, kw_only=True):
    """All of them after a sequence, up to `through`."""

    epoch: str
    rows: tuple[IndexRow, ...]
    through: int


class LinkAdmission(NamedTuple):
    """A record to be put into our channel `ours`, under this `Nats-Msg-Id`."""

    record: LinkedRecord
    ours: str
    message_id: str


class AdmittedAt(NamedTuple):
    """`duplicate`: the log has something under that message id, at `seq`; it need not be this record."""

    seq: int
    duplicate: bool = False


class Destination(Protocol):
    """The log of the space this worker belongs to."""

    async def facts(self) -> LocalFacts:
        """Not behind: what was acknowledged to anybody before this was asked is at or before `head`."""
        ...

    async def index(self, after: int) -> IndexPage: ...

    async def unlisted(self, channels: Collection[str]) -> Collection[str]:
        """Those of our channels that are not listed now, and have to be: nothing counts in them."""
        ...

    async def admit(self, batch: Sequence[LinkAdmission], epoch: str) -> Sequence[AdmittedAt | TidingsError]:
        """Put them into the log in this order, and say of each where it is or why it is not. Records after one that
        was not taken may have been taken.

        They were looked for in the log of this epoch. If it may be another one by now, because the connection is not
        the one that `facts` was asked over, nothing is sent: a log that was put back knows no message ids, and would
        take a second time what it holds."""
        ...


#: whether each was signed by its sender over the space and channel it was said in
Verify = Callable[[Sequence[LinkedRecord]], Awaitable[Sequence[bool]]]
#: does with records of a page what can be done before its turn
Prepare = Callable[[Sequence[LinkedRecord]], Awaitable[None]]


class Clock(Protocol):
    def now(self) -> float:
        """Unix seconds, as this machine has them: they may jump."""
        ...

    def tick(self) -> float:
        """Seconds that never jump."""
        ...

    async def wait(self, seconds: float) -> None:
        """That long, or until `wake`. A wake that comes while nobody waits ends the next wait."""
        ...

    def wake(self) -> None: ...
