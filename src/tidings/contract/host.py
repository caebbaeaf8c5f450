"""Operations of the host: sessions of programs, an agent's outbox and inbox, and requests to its space.

The host also forwards operations of the steward that declare `host`. The stream of events is not an operation
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
#: seconds for which a request may wait; the host reduces a longer `wait` to this
LONGEST_WAIT = 60.0
#: seconds for which a message may wait in the outbox (30 days)
LONGEST_AGE = 2_592_000.0
#: rows in one page of the outbox or the inbox, messages in one page of a channel's history
MAX_ROWS, MAX_HISTORY = 500, 200
#: rows in one request that marks or deletes messages
MAX_MARKED = 10_000
#: bytes of a request with content, and of one that sends a message. JSON may encode a character as six bytes
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
    """`paused`: the reason if the host holds back messages to it. `outbox`: number of messages by state."""

    space: str
    space_id: str
    outbox: dict[str, int]
    paused: str | None
    agents: list[HostedAgent]


class HostFacts(Answer, kw_only=True):
    """`started`: Unix time in seconds. `outbox`: number of messages by state."""

    version: str
    api: int
    pid: int
    started: float
    outbox: dict[str, int]


class HostHealthAnswer(HostFacts, kw_only=True):
    """`spaces`: by name, seconds since the last round trip of any of its agents."""

    spaces: dict[str, float | None]


@operation("host health", server="host", caller="user", changes=False)
class HostHealthRequest(Request[HostHealthAnswer]):
    """Show the host's version and process, its number of messages by state, and the age of its connections."""


class HostStatusAnswer(HostFacts, kw_only=True):
    """`streams`: number of open event streams. `store`, `mail`: why no message or no mail can be stored; else null."""

    sessions: int
    streams: int
    home: str
    store: str | None
    mail: str | None
    spaces: tuple[HostedSpace, ...]


@operation("host status", server="host", caller="user", changes=False)
class HostStatusRequest(Request[HostStatusAnswer]):
    """Show every space and agent of this host with its state and counts, and test whether messages can be stored."""


class StopHostAnswer(Answer):
    """`pid`: the process that stops."""

    pid: int


@operation("host stop", server="host", caller="user")
class StopHostRequest(Request[StopHostAnswer]):
    """Stop the host. It answers before it stops."""


class SpacePausedAnswer(Answer):
    space: str
    paused: bool


@operation("space pause", server="host", caller="user")
class PauseSpaceRequest(Request[SpacePausedAnswer]):
    """Hold back every message to a space. `space`: its name or id."""

    space: str
    reason: str = "paused by its user"


@operation("space resume", server="host", caller="user")
class ResumeSpaceRequest(Request[SpacePausedAnswer]):
    """Send the messages that are held back for a space."""

    space: str


# --- sessions ---


class ChallengeAnswer(Answer):
    nonce: str


@operation("session challenge", server="host", caller="user", changes=False)
class ChallengeRequest(Request[ChallengeAnswer]):
    """Return a nonce to sign. It is valid once, for 30 seconds."""


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
    `receive`: the host receives its mail from now on. Other requests carry the answer's token."""

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
    """`written`: whether the end is stored on disk. If not, the host retries."""

    session: str
    written: bool


@operation("session end", server="host")
class EndSessionRequest(Request[EndSessionAnswer]):
    """End this session. Its token becomes invalid, and a task that it holds is given back."""


# --- the outbox ---


class SendAnswer(Answer, kw_only=True):
    """`stage` is `stored` or `confirmed`. `seq`: the message's sequence in the space; null until it is confirmed. `to`:
    the recipient's id of a direct message. `row`, `state`: its outbox row. `why`, `code`: why it was not sent."""

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
    `wait`: seconds to wait for the space to confirm it. A repeated `id` is sent once. `data`: any JSON value; null is
    no data. `mentions`: agents by id or name. `max_age`: seconds after which the host gives up an unsent message.
    `deadline`: seconds for a task, counted from when the space has it."""

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
    """A message in the outbox. `to_name`: the name of the agent, or of the role in a linked space, with the id `to`;
    empty if unknown. `gives_up`: when the host gives it up. `code`, `words`: the error that ended or delays it."""

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
    """List the messages in this agent's outbox, newest first. `before`: rows below this one."""

    states: tuple[OutboxState, ...] = ()
    limit: PageSize = 50
    before: Count | None = None


class OutboxDetails(OutboxEntry, kw_only=True):
    """`chain`: the messages that this one replaced or was replaced by, oldest first, including itself. `waits`: why it
    is not sent yet."""

    chain: list[OutboxEntry]
    waits: list[str]


@operation("outbox show", server="host", changes=False)
class ShowOutboxRequest(Request[OutboxDetails]):
    """Show a message in the outbox, and why it waits."""

    id: str


@operation("outbox requeue", server="host")
class RequeueRequest(Request[OutboxEntry]):
    """Send a dead or cancelled message again, under a new id."""

    id: str


@operation("outbox cancel", server="host")
class CancelRequest(Request[OutboxEntry]):
    """Cancel a message that is not sent yet."""

    id: str


# --- messages ---


class MessageReceiptAnswer(Answer):
    """`stage` is `stored` until the space has the message. `why`: the reason if readers reject it."""

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
    """`name` is verified. `claims`: the name in the message, if it differs."""

    id: str
    name: str
    claims: str | None = None


class VerifiedMessage(Answer, kw_only=True):
    """A verified message. `parts`: empty if it is sealed for a key that the host does not have. `mentions`: names, in
    the order of `mention_ids`. `ts`: when its sender wrote it. `time`: when the space stored it. `origin`,
    `origin_id`: the linked space in which it was written."""

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
    """`received`, `read`: when the host received it and when it was marked as read. `notice`: a notice's own fields."""

    row: int
    notice: dict[str, Any] | UnsetType = UNSET
    received: str | None
    read: str | None


# --- the inbox ---


class InboxAnswer(Answer):
    messages: list[InboxMessage]


@operation("inbox list", server="host", waits=LONGEST_WAIT, changes=False)
class ListInboxRequest(Request[InboxAnswer]):
    """List the messages in this agent's inbox, oldest first, or wait for one. `newest`: the last page instead of the
    first. `sender`: name or id. `search`: words of the text. A page is shorter if the answer would be too large."""

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
    """List the messages in the inbox that belong to the conversation of message `id`, oldest first."""

    id: str


class UnreadCountsAnswer(Answer):
    """`unread`: counts by kind: `direct`, `channel`, `notice`."""

    unread: dict[str, int]


@operation("inbox unread", server="host", changes=False)
class UnreadCountsRequest(Request[UnreadCountsAnswer]):
    """Count the unread messages of this agent."""


class MarkReadAnswer(Answer):
    """`read`: the number of messages that were unread before."""

    read: int


@operation("inbox read", server="host", limit=MAX_CONTENT)
class MarkReadRequest(Request[MarkReadAnswer]):
    """Mark messages as read. The senders of direct messages get a receipt."""

    rows: RowNumbers


class DeleteMailAnswer(Answer):
    """`deleted`: the number of messages whose content was deleted."""

    deleted: int


@operation("inbox delete", server="host", limit=MAX_CONTENT)
class DeleteMailRequest(Request[DeleteMailAnswer]):
    """Delete the content of messages. The host remembers that they arrived, so that they do not arrive again."""

    rows: RowNumbers


@operation("inbox receive", server="host")
class ReceiveHereRequest(Request[EmptyAnswer]):
    """Receive this agent's mail here again, in place of a newer session elsewhere. `session show` reports whether this
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
    """List records that arrived for this agent and could not be opened, by row."""

    after: Count = 0


# --- the space ---


class ListAgentsAnswer(Answer):
    """If `fresh` is false, the space did not answer: these are the agents last seen, with the status `unknown`;
    `reason` says why. `backstop`: a sentence if durable delivery is late."""

    agents: list[AgentEntry]
    fresh: bool
    backstop: str
    reason: str = ""


@operation("agent list", server="host", changes=False)
class ListAgentsRequest(Request[ListAgentsAnswer]):
    """List the agents of the space."""


class AgentAccessAnswer(Answer):
    """The agent's roles, and the patterns of channels that it may read, post to and manage."""

    roles: list[str]
    read: list[str]
    post: list[str]
    manage: list[str]


@operation("agent access", server="host", changes=False)
class AgentAccessRequest(Request[AgentAccessAnswer]):
    """Show what this agent may do."""


class AnnounceAnswer(Answer):
    """`attached`: whether others see this now; if not, they see it once a program of the agent is attached."""

    status: Status
    activity: str | None
    attached: bool


@operation("agent announce", server="host")
class AnnounceRequest(Request[AnnounceAnswer]):
    """Report what this agent does."""

    status: Status
    activity: str | None = None
    model: str | None = None


class ChannelHistoryAnswer(Answer):
    """`gone`: the sequence up to which messages were removed from the log. `hidden`: this agent may not read earlier
    messages. `more`: there are older messages."""

    messages: list[VerifiedMessage]
    gone: int
    hidden: bool
    more: bool


@operation("channel history", server="host", changes=False)
class ChannelHistoryRequest(Request[ChannelHistoryAnswer]):
    """List the newest messages of a channel, newest first. `before`: messages below this sequence."""

    channel: str
    limit: Annotated[int, Meta(ge=0, le=MAX_HISTORY)] = 50
    before: Count | None = None


class JoinChannelAnswer(Answer):
    """`state` is `opened` or `resumed`, or `live` with a `reason` while delivery is not `durable`."""

    channel: str
    state: str
    seq: int
    durable: bool
    reason: str
    cls: str


@operation("channel join", server="host")
class JoinChannelRequest(Request[JoinChannelAnswer]):
    """Join a channel or pattern. Its messages arrive in the inbox from now on."""

    channel: str


class LeaveChannelAnswer(Answer):
    """`state` is `left` or `absent`. `open`: the join of a membership that another program has opened since."""

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
    """`id`: the id of the task's message. `deadline`: Unix time in seconds. `origin`, `origin_id`: the linked space of
    the asker. `message`: the signed message, opened."""

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
    """`task` is null if no task came in time."""

    task: HeldTask | None


@operation("task claim", server="host", waits=LONGEST_WAIT)
class ClaimTaskRequest(Request[ClaimTaskAnswer]):
    """Claim a task of a role for this session, until the task or the session ends. An agent holds one task: claiming
    again returns it. `take_over`: also if another program of this agent holds it. `silence`: seconds without a request
    of this session after which the task is given back."""

    role: str
    wait: Wait = 0.0
    take_over: bool = False
    silence: Annotated[float, Meta(ge=0, le=MAX_INTEGER)] | None = None


class TaskInHand(Answer):
    """`mine`: whether this session holds it; else `program` does. `silent`: seconds since the holder's last request."""

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
    """Show the task that a program of this agent holds."""


class SettleTaskAnswer(Answer):
    id: str
    state: str


@operation("task done", server="host", limit=MAX_CONTENT)
class FinishTaskRequest(Request[SettleTaskAnswer]):
    """Finish a task that this session holds, with a result signed by the agent. While the space cannot be reached, the
    host retries until the deadline."""

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
    """The state of the task, or of its row in the outbox until it is sent. `message`: the signed result, opened."""

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
    """Show the state and result of a task that this agent asked, or wait until it ends."""

    id: str
    wait: Wait = 0.0
