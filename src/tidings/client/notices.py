"""Notices: what an agent must be told that is no message, in one shape for every surface.

    endpoint.on("notice", callback)        a row of kind `notice` in the host's inbox, `tidings inbox`, `tail`, MCP

Whoever finds something missing, void or damaged makes a `Notice` and emits it as the event `notice`; gaps and
`DeliveryLost` become notices by themselves. A notice has an id made of what it says, so telling it again is no news. A
frame that tells of a loss is acknowledged after every callback of its notice has returned. What is told before there
is a callback, as while connecting, the first one that is registered hears.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any, Literal

from msgspec import UNSET

from tidings.contract.agents import DamageRow
from tidings.contract.mail import ReceiptRow
from tidings.errors import DeliveryLost, DeniedError, LogRegressed
from tidings.wire.envelope import RULED_OUT

#: lost: owed to this agent, and it will not come, or sent by it, and it will not be read. gap: missed on the way, and
#: read from the log since. void: a message of this agent's own that no reader shows. damage: the store lost or cannot
#: read something that concerns this agent. set_back: the log went backwards, or the inbox. flood: more than the inbox
#: keeps of one sender. membership: a narrowing of this agent's access closed it, or following it is denied
NoticeKind = Literal["lost", "gap", "void", "damage", "set_back", "flood", "membership"]
#: what a gap in what came live is due to
Cause = Literal["live", "connection"]


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages of a channel that did not arrive live and were read from the log instead.

    `cause` is `live` if single copies were lost on the way, `connection` if the connection was. `gone` says that they
    left the log before they could be read: then `recovered` is not all of them.
    """

    channel: str
    #: None when the hole is not of one sender
    sender: str | None
    #: what was missed lies above `after`, up to and including `through`
    after: int
    through: int
    recovered: int
    cause: Cause
    gone: bool = False


@dataclass(frozen=True, slots=True)
class FrameGap:
    """Frames that were numbered and never came. What they held was looked for in the log, as far as it is known where.

    `count` is how many messages the frames held, None if more than one is missing: a frame names only the one before.
    """

    series: str
    #: numbers of the frames that are missing
    first: int
    last: int
    #: what they held lies above `after`, up to and including `through`
    after: int
    through: int
    count: int | None
    recovered: int


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing an agent is told. `first` to `last` is the range of sequences it lies in, as far as that is known."""

    kind: NoticeKind
    #: a sentence: what happened, to what, and what to do next
    text: str
    channel: str | None = None
    first: int | None = None
    last: int | None = None
    #: how many messages; None if nobody knows
    count: int | None = None
    cause: str = "unknown"

    @property
    def id(self) -> str:
        """The same for the same thing, in whichever process it was found."""
        facts = (self.kind, self.channel, self.first, self.last, self.count, self.cause)
        return f"notice-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"

    @property
    def is_loss(self) -> bool:
        """Is something missing? A gap that was filled is worth knowing, and nobody has to act on it."""
        return self.kind != "gap"

    def facts(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def unheard_of(event: str, count: int) -> Notice | DeliveryLost | None:
    """More was told than is kept for whoever listens first. Of gaps the notices say it: each of them is one as well."""
    were = "1 older one was" if count == 1 else f"{count} older ones were"
    text = f"{were} told before anybody listened, and not kept: `tidings status` says what the space lost"
    if event == "notice":
        return Notice("lost", text, count=count, cause="nobody listened")
    return DeliveryLost(text, count=count, cause="nobody listened") if event == "error" else None


def of_void(row: ReceiptRow) -> Notice:
    """A message of this agent's own that was stored and does not count, as its receipt says."""
    channel, seq, why = None if row.channel is UNSET else row.channel, row.seq, row.why or "unknown"
    where = f"to #{channel}" if channel else f"to {row.to}"
    what = f"your message {row.id} {where} is void"
    if why.startswith(RULED_OUT):
        text = f"{what} and owed to nobody, though who was listening may have seen it: {why}. Nothing sends it again"
    else:
        text = f"{what} and shown to nobody: {why}. Send it again without that"
    return Notice("void", text, channel, seq, seq, 1, why)


def of_loss(error: DeliveryLost) -> Notice:
    return Notice("lost", str(error), error.channel, error.first, error.last, error.count, error.cause)


def of_regress(error: LogRegressed) -> Notice:
    return Notice("set_back", str(error), cause=str(error))


def of_inbox_set_back(name: str, cause: str) -> Notice:
    """The file of an inbox is older than what was received into it, or another one."""
    text = (
        f"the inbox of {name} lost what it had received: an older host.db was put back, or it was made anew. What was "
        "said in its channels is read again from the log, as far as the log has it; direct messages that came since do "
        "not come again: ask their senders"
    )
    return Notice("set_back", text, cause=cause)


def of_refused_channel(pattern: str, error: DeniedError) -> Notice:
    """This agent is a member there, and hearing what is said is denied."""
    text = (
        f"you are in #{pattern}, and what is said there does not come: {error}. Once that is mended (`tidings agent "
        f"access` of the space's owner), `tidings join {pattern}`; `tidings leave {pattern}` if you want no more of it"
    )
    return Notice("membership", text, pattern, cause=f"following it is denied: {error}")


def of_damage(row: DamageRow) -> Notice:
    """What the steward tells of records the store lost, of mail it removed or dropped with a key, of memberships a
    narrowing closed."""
    kind: NoticeKind = "membership" if row.kind == "membership" else "lost" if row.kind == "lost" else "damage"
    return Notice(kind, row.text, row.channel, row.first, row.last, row.count, row.cause)


def of_watching(pattern: str) -> Notice:
    """Whoever only watches is owed nothing, and nothing is read again for it."""
    text = (
        f"the connection was lost: what was said in #{pattern} meanwhile was not shown here; `tidings history` has it"
    )
    return Notice("gap", text, pattern, cause="connection")


def of_gap(gap: Gap | FrameGap) -> Notice:
    """What was missed and read from the log is a gap; if some of it had left the log, it is a loss."""
    first, last = gap.after + 1, gap.through
    recovered = f"{gap.recovered} message{'' if gap.recovered == 1 else 's'}"
    if isinstance(gap, FrameGap):
        text = (
            f"durable copies {gap.first} to {gap.last} did not come: {recovered} between {first} and {last} were read"
        )
        return Notice("gap", f"{text} from the log instead", None, first, last, gap.recovered, "frames")
    where = f"#{gap.channel} between {first} and {last}"
    how = "the connection was lost" if gap.cause == "connection" else "live copies were lost on the way"
    if gap.gone:
        text = f"some messages of {where} are lost: {how}, and the log does not have them any more ({recovered} it had)"
        return Notice("lost", text, gap.channel, first, last, None, "not in the log")
    text = f"{recovered} of {where} came late: {how}, and they were read from the log"
    return Notice("gap", text, gap.channel, first, last, gap.recovered, gap.cause)
