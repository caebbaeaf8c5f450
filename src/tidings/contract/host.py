"""Operations of the host: sessions of programs, an agent's outbox and inbox, and what it asks its space.

The host also forwards operations of the steward that declare `host`, and streams events, which are no operation
(`GET /v1/events`, see `host/mail_handlers.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, field

from tidings.contract.core import MAX_INTEGER, Answer, EmptyAnswer, Request, operation
from tidings.contract.mail import ReaderStage, TraceAnswer
from tidings.wire.message import MAX_MENTIONS, Priority
from tidings.wire.roster import AgentEntry, Count, Status

#: version of these operations
API = 1
#: seconds for which a request may wait; the host shortens a longer `wait`
LONGEST_WAIT = 60.0
#: seconds for which a message may wait to leave (30 days)
LONGEST_AGE = 2_592_000.0
#: rows in one page of the outbox or the inbox, messages in one page of a channel's history
MAX_ROWS, MAX_HISTORY = 500, 200
#: rows in one request that marks or deletes messages
MAX_MARKED = 10_000
#: bytes of a request that carries content. JSON may spell a character in six bytes
MAX_CONTENT, MAX_SEND = 512 * 1024, 2 * 1024 * 1024

OutboxState = Literal["pending", "inflight", "confirmed", "done", "dead", "cancelled"]
InboxKind = Literal["direct", "channel", "notice"]
Wait = Annotated[float, Meta(ge=0, le=86_400)]
RowNumber = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
RowNumbers = Annotated[tuple[RowNumber, ...], Meta(max_length=MAX_MARKED)]
PageSize = Annotated[int, Meta(ge=0, le=MAX_ROWS)]


# --- the host itself ---


class UnkeptMail(Answer):
    """Why mail cannot be written to the inbox, and since when (Unix time in seconds)."""

    cause: str
    since: float


class ConnectionHealth(Answer, kw_only=True):
    """The state of an agent's connection. `age`: seconds since the last round trip to its broker; null if there was
    none. `reason`: why it is not open. `stuck`: it does not open although the space can be reached."""

    state: str
    age: float | UnsetType | None = UNSET
    receiving: bool
    superseded: bool
    reason: str | None
    stuck: bool
    unkept: UnkeptMail | None


class HostedAgent(ConnectionHealth, kw_only=True):
    """`unread` counts messages and notices."""

    name: str
    agent: str
    unread: int
    notices: int


class HostedSpace(Answer):
    """`paused`: the reason if its messages are held back. `outbox`: messages by state."""

    space: str
    space_id: str
    outbox: dict[str, int]
    paused: str | None
    agents: list[HostedAgent]


class HostFacts(Answer, kw_only=True):
    """`started`: Unix time in seconds. `outbox`: messages by state."""

    version: str
    api: int
    pid: int
    started: float
    outbox: dict[str, int]


class HostHealthAnswer(HostFacts, kw_only=True):
    """`spaces`: seconds since the last round trip of any agent of the space."""

    spaces: dict[str, float | None]


@operation("host health", server="host", caller="user", changes=False)
class HostHealthRequest(Request[HostHealthAnswer]):
    """Show the host's version and process, its number of messages by state, and the age of its connections."""


class HostStatusAnswer(HostFacts, kw_only=True):
    """`streams`: followed inboxes. `store`, `mail`: why nothing can be stored or no mail can be kept."""

    sessions: int
    streams: int
    home: str
    store: str | None
    mail: str | None
    spaces: tuple[HostedSpace, ...]


@operation("host status", server="host", caller="user", changes=False)
class HostStatusRequest(Request[HostStatusAnswer]):
    """Show every space and agent of this host with its state and counts, and try whether its files can be written."""


class StopHostAnswer(Answer):
    """The process that stops."""

    pid: int


@operation("host stop", server="host", caller="user")
class StopHostRequest(Request[StopHostAnswer]):
    """Stop the host. It answers before it stops."""


class SpacePausedAnswer(Answer):
    space: str
    paused: bool


@operation("space pause", server="host", caller="user")
class PauseSpaceRequest(Request[SpacePausedAnswer]):
    """Hold back every message to a space, named by its name or id."""

    space: str
    reason: str = "paused by its user"


@operation("space resume", server="host", caller="user")
class ResumeSpaceRequest(Request[SpacePausedAnswer]):
    """Send what is held back for a space."""

    space: str


# --- sessions ---


class ChallengeAnswer(Answer):
    nonce: str


@operation("session challenge", server="host", caller="user", changes=False)
class ChallengeRequest(Request[ChallengeAnswer]):
    """Return a nonce to sign. It is valid for one proof within 30 seconds."""


class SessionFacts(Answer, kw_only=True):
    session: str
    space: str
    space_id: str
    agent: str
    name: str


class OpenSessionAnswer(SessionFacts, kw_only=True):
    token: str


@operation("session open", server="host", caller="user")
class OpenSessionRequest(Request[OpenSessionAnswer]):
    """Open a session of an agent, proven with its key. `agent`: its id (default: that of the agent in `source`).
    `receive`: the host receives its mail from now on. The other requests carry the token of the answer."""

    source: tuple[str, ...]
    nonce: str
    signature: str
    agent: str | None = None
    receive: bool = False
    program: str = ""


class ShowSessionAnswer(SessionFacts, kw_only=True):
    receive: bool
    program: str
    health: ConnectionHealth


@operation("session show", server="host", changes=False)
class ShowSessionRequest(Request[ShowSessionAnswer]):
    """Show this session and the state of its agent's connection."""


class EndSessionAnswer(Answer):
    """`written`: whether the end is on disk. If not, the host tries again."""

    session: str
    written: bool


@operation("session end", server="host")
class EndSessionRequest(Request[EndSessionAnswer]):
    """End this session. Its token becomes invalid, and a task that it holds goes back."""


# --- the outbox ---


class SendAnswer(Answer, kw_only=True):
    """`stage` is `stored` or `confirmed`. `seq`: its sequence in the space, null until that has it. `to`: the id of
    the agent a direct message goes to. `why`, `code`: why it was not sent."""

    id: str
    seq: int | None
    stage: str
    warnings: tuple[str, ...]
    to: str | None
    why: str
    row: int
    state: OutboxState
    code: str | None


@operation("message send", server="host", waits=LONGEST_WAIT, limit=MAX_SEND)
class SendRequest(Request[SendAnswer], kw_only=True):
    """Send a message to exactly one of `channel`, `agent` (id or name) or `role`. The host answers once it is on disk;
    `wait`: seconds to wait for the space to confirm it. Repeating an `id` sends once. `data`: any JSON value; null is
    no data. `mentions`: agents by id or name. `max_age`: seconds after which a message that has not left is given up.
    `deadline`: seconds, of a task, from when the space has it."""

    channel: str | None = None
    agent: str | None = None
    role: str | None = None
    text: str | None = None
    data: Any = None
    parts: tuple[dict[str, Any], ...] = ()
    mentions: Annotated[tuple[str, ...], Meta(max_length=MAX_MENTIONS)] = ()
    priority: Priority = "next"
    reply_to: str | None = None
    context: str | None = None
    id: str | None = None
    max_age: Annotated[float, Meta(gt=0, le=LONGEST_AGE)] | None = None
    deadline: Annotated[float, Meta(gt=0, le=LONGEST_AGE)] | None = None
    wait: Wait = 0.0


class OutboxEntry(Answer, kw_only=True):
    """A message that was handed to the host. `to_name`: the name of the agent, or of the role in a linked space, that
    `to` is the id of; empty if it is not known. `code`, `words`: the error that ended it or delays it."""

    row: int
    id: str
    kind: str
    to: str
    state: str
    stage: str
    seq: int | None
    attempts: int
    accepted: str | None
    gives_up: str | None
    ended: str | None
    code: str | None
    words: str | None
    cancel_asked: bool
    late_seq: int | None
    supersedes: int | None
    superseded_by: int | None
    to_name: str | None = None


class OutboxAnswer(Answer):
    rows: list[OutboxEntry]


@operation("outbox list", server="host", changes=False)
class ListOutboxRequest(Request[OutboxAnswer]):
    """List what this agent handed to the host, newest first. `before`: rows below that one."""

    states: tuple[OutboxState, ...] = ()
    limit: PageSize = 50
    before: Count | None = None


class OutboxDetails(OutboxEntry, kw_only=True):
    """`chain`: the messages that this one replaced or was replaced by, oldest first, itself included. `waits`: why it
    has not left."""

    chain: list[OutboxEntry]
    waits: list[str]


@operation("outbox show", server="host", changes=False)
class ShowOutboxRequest(Request[OutboxDetails]):
    """Show a message of the outbox, and why it waits."""

    id: str


@operation("outbox requeue", server="host")
class RequeueRequest(Request[OutboxEntry]):
    """Send a dead or cancelled message again, under a new id."""

    id: str


@operation("outbox cancel", server="host")
class CancelRequest(Request[OutboxEntry]):
    """Cancel a message that has not left."""

    id: str


# --- messages ---


class MessageReceiptAnswer(Answer):
    """`stage` is `stored` until the space has the message. `why`: the reason if no reader shows it."""

    id: str
    stage: str
    seq: int | None
    to: str
    why: str


@operation("message receipt", server="host", waits=LONGEST_WAIT, changes=False)
class MessageReceiptRequest(Request[MessageReceiptAnswer]):
    """Show the stage of a direct message that this agent sent, or wait until it reaches `stage`."""

    id: str
    stage: ReaderStage = "delivered"
    wait: Wait = 0.0


class HostTrace(TraceAnswer):
    """`outbox`: its row in the outbox."""

    outbox: OutboxEntry | None


@operation("message trace", server="host", changes=False)
class MessageTraceRequest(Request[HostTrace]):
    """Trace a message that this agent sent or received."""

    id: str


class MessageIdsAnswer(Answer):
    ids: tuple[str, ...]


@operation("message ids", server="host", changes=False)
class MessageIdsRequest(Request[MessageIdsAnswer]):
    """Find the ids of messages in this agent's inbox and outbox by their last 4 to 36 characters."""

    ending: Annotated[str, Meta(pattern=r"\A[0-9a-f-]{4,36}\Z")]


class MessageSender(Answer):
    """`claims`: the name that the message states, if it is another one."""

    id: str
    name: str
    claims: str | None = None


class VerifiedMessage(Answer, kw_only=True):
    """A verified message. `parts`: none if it is sealed for a key that the host does not have. `mentions`: names, in
    the order of `mention_ids`. `ts`: when its sender wrote it. `time`: when the space stored it. `origin`,
    `origin_id`: the linked space it was written in."""

    id: str
    kind: str
    channel: str | None
    sender: MessageSender = field(name="from")
    text: str
    parts: list[dict[str, Any]]
    mentions: list[str]
    mention_ids: list[str]
    ts: str | None
    role: str | None
    priority: str
    reply_to: str | None
    context: str | None
    mentions_me: bool
    wakes: bool
    historical: bool
    sealed: bool
    origin: str | None
    origin_id: str | None
    seq: int
    time: str | None


class InboxMessage(VerifiedMessage, kw_only=True):
    """`received`, `read`: when the host got it, and when it was marked as read. `notice`: the facts of a notice."""

    row: int
    notice: dict[str, Any] | UnsetType = UNSET
    received: str | None
    read: str | None


# --- the inbox ---


class InboxAnswer(Answer):
    messages: list[InboxMessage]


@operation("inbox list", server="host", waits=LONGEST_WAIT, changes=False)
class ListInboxRequest(Request[InboxAnswer]):
    """List what this agent received, oldest first, or wait until there is some. `newest`: the last messages instead of
    the first. `sender`: name or id. `search`: words of the text. A page ends where the answer would be too large."""

    unread: bool = False
    sender: str | None = None
    channel: str | None = None
    kind: InboxKind | None = None
    after: Count = 0
    before: Count | None = None
    limit: PageSize = 50
    direct_first: bool = False
    newest: bool = False
    search: str | None = None
    wait: Wait = 0.0


@operation("inbox thread", server="host", changes=False)
class ThreadRequest(Request[InboxAnswer]):
    """List the messages of a conversation that the inbox has, oldest first."""

    id: str


class UnreadCountsAnswer(Answer):
    """By kind: `direct`, `channel`, `notice`."""

    unread: dict[str, int]


@operation("inbox unread", server="host", changes=False)
class UnreadCountsRequest(Request[UnreadCountsAnswer]):
    """Count the unread messages of this agent."""


class MarkReadAnswer(Answer):
    """The number of messages that became read."""

    read: int


@operation("inbox read", server="host", limit=MAX_CONTENT)
class MarkReadRequest(Request[MarkReadAnswer]):
    """Mark messages as read. The senders of direct messages learn that."""

    rows: RowNumbers


class DeleteMailAnswer(Answer):
    """The number of messages whose content was deleted."""

    deleted: int


@operation("inbox delete", server="host", limit=MAX_CONTENT)
class DeleteMailRequest(Request[DeleteMailAnswer]):
    """Delete the content of messages. The host remembers that they arrived, so that none arrives again."""

    rows: RowNumbers


@operation("inbox receive", server="host")
class ReceiveHereRequest(Request[EmptyAnswer]):
    """Receive this agent's mail here again, in place of a newer session elsewhere. `session show` says whether that
    worked."""


class QuarantinedMail(Answer):
    """A record that could not be opened. `bytes`: its size. `begins`: its first bytes, in ASCII."""

    row: int
    reason: str
    bytes: int
    begins: str
    received: str | None


class QuarantinedMailAnswer(Answer):
    quarantine: list[QuarantinedMail]


@operation("inbox quarantine", server="host", changes=False)
class QuarantinedMailRequest(Request[QuarantinedMailAnswer]):
    """List what arrived for this agent and could not be opened, by row."""

    after: Count = 0


# --- the space ---


class ListAgentsAnswer(Answer):
    """If `fresh` is false, the space did not answer: these are the agents last seen, with the status `unknown`, and
    `reason` says why. `backstop`: a sentence if delivery is late."""

    agents: list[AgentEntry]
    fresh: bool
    backstop: str
    reason: str = ""


@operation("agent list", server="host", changes=False)
class ListAgentsRequest(Request[ListAgentsAnswer]):
    """List the agents of the space."""


class AgentAccessAnswer(Answer):
    """Its roles, and the patterns of channels that it may read, post to and manage."""

    roles: list[str]
    read: list[str]
    post: list[str]
    manage: list[str]


@operation("agent access", server="host", changes=False)
class AgentAccessRequest(Request[AgentAccessAnswer]):
    """Show what this agent may do."""


class AnnounceAnswer(Answer):
    """`attached`: whether others see it now."""

    status: Status
    activity: str | None
    attached: bool


@operation("agent announce", server="host")
class AnnounceRequest(Request[AnnounceAnswer]):
    """State what this agent does."""

    status: Status
    activity: str | None = None
    model: str | None = None


class ChannelHistoryAnswer(Answer):
    """`gone`: the sequence up to which the log no longer has messages. `hidden`: earlier messages are not shown to this
    agent. `more`: there are older messages."""

    messages: list[VerifiedMessage]
    gone: int
    hidden: bool
    more: bool


@operation("channel history", server="host", changes=False)
class ChannelHistoryRequest(Request[ChannelHistoryAnswer]):
    """List the newest messages of a channel, newest first. `before`: messages below that sequence."""

    channel: str
    limit: Annotated[int, Meta(ge=0, le=MAX_HISTORY)] = 50
    before: Count | None = None


class JoinChannelAnswer(Answer):
    """`state` is `opened` or `resumed`, or `live` with a `reason` while messages are not `durable`."""

    channel: str
    state: str
    seq: int
    durable: bool
    reason: str
    cls: str


@operation("channel join", server="host")
class JoinChannelRequest(Request[JoinChannelAnswer]):
    """Join a channel or pattern. Its messages come into the inbox from now on."""

    channel: str


class LeaveChannelAnswer(Answer):
    """`state` is `left` or `absent`. `open`: the membership that another program of this agent has begun since."""

    state: str
    seq: int
    open: int | None
    still_covered_by: tuple[str, ...]


@operation("channel leave", server="host")
class LeaveChannelRequest(Request[LeaveChannelAnswer]):
    """Leave a channel or pattern."""

    channel: str


# --- tasks ---


class HeldTask(Answer, kw_only=True):
    """`id`: that of the message that asked for it. `deadline`: Unix time in seconds. `origin`, `origin_id`: the linked
    space of the asker. `message`: the message as it was signed, opened."""

    id: str
    seq: int
    role: str
    attempt: int
    deadline: float
    asker: MessageSender
    origin: str
    origin_id: str
    text: str
    parts: list[dict[str, Any]]
    message: dict[str, Any]


class ClaimTaskAnswer(Answer):
    """`task` is null if none came in time."""

    task: HeldTask | None


@operation("task claim", server="host", waits=LONGEST_WAIT)
class ClaimTaskRequest(Request[ClaimTaskAnswer]):
    """Take a task of a role, held for this session until it is settled or the session ends. An agent holds one task:
    claiming again returns it. `take_over`: also if another program of this agent holds it. `silence`: seconds without
    a request of this session after which it goes back."""

    role: str
    wait: Wait = 0.0
    take_over: bool = False
    silence: Annotated[float, Meta(ge=0, le=MAX_INTEGER)] | None = None


class TaskInHand(Answer):
    """`mine`: whether this session holds it, else `program` does. `silent`: seconds since that made a request."""

    id: str
    role: str
    attempt: int
    mine: bool
    program: str
    silent: float


class HeldTaskAnswer(Answer):
    held: TaskInHand | None


@operation("task held", server="host", changes=False)
class HeldTaskRequest(Request[HeldTaskAnswer]):
    """Show the task that the programs of this agent hold."""


class SettleTaskAnswer(Answer):
    id: str
    state: str


@operation("task done", server="host", limit=MAX_CONTENT)
class FinishTaskRequest(Request[SettleTaskAnswer]):
    """Finish a task that this session holds, with a result signed by the agent. The host keeps trying until the
    deadline while the space cannot be reached."""

    id: str
    text: str | None = None
    data: Any = None


@operation("task fail", server="host", limit=MAX_CONTENT)
class GiveUpTaskRequest(Request[SettleTaskAnswer]):
    """Give a task back. `retry` false makes it a dead letter; `untouched`: the attempt does not count."""

    id: str
    reason: str
    retry: bool = True
    untouched: bool = False


class TaskStateAnswer(Answer, kw_only=True):
    """The state of the task, or of its row in the outbox until it has left. `message`: the signed result, opened."""

    id: str
    state: str
    text: str | None
    worker: str | None
    worker_id: str | None
    attempt: int
    cause: str | None
    reasons: tuple[str, ...]
    message: dict[str, Any] | None


@operation("task state", server="host", waits=LONGEST_WAIT, changes=False)
class TaskStateRequest(Request[TaskStateAnswer]):
    """Show what became of a task that this agent asked, or wait until it ends."""

    id: str
    wait: Wait = 0.0
