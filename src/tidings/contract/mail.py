"""Operations on sent messages: receipts, dead letters, traces."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tidings.contract.channels import RawRecord
from tidings.contract.core import MAX_INTEGER, Answer, Integer, Moment, Request, operation
from tidings.wire.states import ReceiptStage

#: seconds for which a request may wait for receipts
RECEIPT_WAIT = 25.0
#: receipts in one request
MAX_RECEIPTS = 512
#: message ids in one request
MAX_IDS = 1_000

SequenceNumber = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_INTEGER)]
LetterName = Annotated[str, msgspec.Meta(min_length=1)]
LetterKind = Literal["direct", "channel"]
LetterState = Literal["dead", "wanted"]
ReaderStage = Literal["delivered", "read"]
MessageKind = Literal["chat", "dm", "task"]


# --- receipts ---


class ReaderReceipt(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The stage that the direct message at `seq` reached. `sender` and `id` identify the message, in case another one
    has got the same sequence since."""

    seq: SequenceNumber
    stage: ReaderStage
    sender: str | None = None
    id: str | None = None


class ReportReceiptsAnswer(Answer):
    """`refused`: sequences of messages that are not addressed to the caller, or are gone."""

    new: int
    refused: tuple[int, ...]


@operation("receipt put")
class ReportReceiptsRequest(Request[ReportReceiptsAnswer]):
    """Report which direct messages were delivered to this agent or read by it: `receipts`, or a single one by its
    fields."""

    stream: Literal["dm"] = "dm"
    receipts: Annotated[tuple[ReaderReceipt, ...], msgspec.Meta(min_length=1, max_length=MAX_RECEIPTS)] = ()
    seq: SequenceNumber | None = None
    stage: ReaderStage | None = None
    sender: str | None = None
    id: str | None = None


class WaitForReceiptAnswer(Answer):
    """`stages`: when the message reached each stage. `why`: the reason if readers reject it."""

    stage: ReceiptStage
    reached: bool
    stages: dict[ReceiptStage, str]
    why: str


@operation("receipt wait", waits=RECEIPT_WAIT, changes=False)
class WaitForReceiptRequest(Request[WaitForReceiptAnswer]):
    """Wait until a direct message of this agent reaches a stage. `timeout` takes precedence over `wait`."""

    id: str
    to: str
    seq: Integer | None = None
    stage: Literal["confirmed", "delivered", "read", "expired", "undeliverable", "void"] = "delivered"
    wait: Seconds = RECEIPT_WAIT
    timeout: Seconds | None = None


class ReceiptRow(Answer):
    """`why` and `channel` describe a message that readers reject."""

    id: str
    to: str
    seq: int
    stage: ReceiptStage
    at: str
    why: str = ""
    channel: str | UnsetType | None = UNSET


class WatchReceiptsAnswer(Answer):
    """`cursor` is the next `since`. `waited` is false if too many requests wait already: retry later."""

    news: tuple[ReceiptRow, ...]
    cursor: int
    waited: bool


@operation("receipt watch", waits=RECEIPT_WAIT, changes=False)
class WatchReceiptsRequest(Request[WatchReceiptsAnswer]):
    """Wait for receipts of any message that this agent sent. `timeout` takes precedence over `wait`."""

    since: Integer = 0
    wait: Seconds = RECEIPT_WAIT
    timeout: Seconds | None = None


class MailboxRoomAnswer(Answer):
    """The number of messages that were removed."""

    made: int


@operation("receipt room", host=True)
class MailboxRoomRequest(Request[MailboxRoomAnswer]):
    """Make room in a full mailbox: remove messages of this agent that were read."""

    to: str


# --- dead letters ---


class LetterRow(Answer, kw_only=True):
    """The dead letter of a message."""

    letter: str
    kind: LetterKind
    seq: int
    id: str
    sender: str
    sender_name: str | None
    channel: str | None
    error: str
    attempts: int
    state: LetterState
    at: str


class WantedLetterRow(LetterRow, kw_only=True):
    """`record` is null if the message is gone, or was too large to keep."""

    record: RawRecord | None


class DeadTaskRow(Answer, kw_only=True):
    """The dead letter of a task."""

    seq: int
    id: str
    role: str
    asker: str
    asker_name: str | None
    cause: str | None
    attempts: int
    reasons: tuple[str, ...]
    workers: tuple[str, ...]
    at: str


class LetterChangedAnswer(Answer, kw_only=True):
    """The new state of a dead letter: `seq` of a task, `letter` of a message."""

    seq: int | None = None
    letter: str | None = None
    state: Literal["dead", "wanted", "dropped", "queued"]


@operation("dead put")
class KeepLetterRequest(Request[LetterChangedAnswer]):
    """Keep a message that a handler failed on as a dead letter."""

    kind: LetterKind
    seq: SequenceNumber
    error: str = ""
    attempts: Integer = 1


class WantedLettersAnswer(Answer):
    letters: tuple[WantedLetterRow, ...]
    more: bool


@operation("dead wanted", changes=False)
class WantedLettersRequest(Request[WantedLettersAnswer]):
    """List this agent's dead letters that wait to be delivered again, oldest first, with their messages."""


class DeadLettersAnswer(Answer):
    """`dead` are tasks, `mail` are messages. `more`: there are more dead tasks."""

    dead: tuple[DeadTaskRow, ...]
    more: bool
    mail: tuple[LetterRow, ...]


@operation("dead list", host=True, changes=False)
class DeadLettersRequest(Request[DeadLettersAnswer]):
    """List this agent's dead letters."""


class DeadLetterAnswer(Answer, kw_only=True):
    """The fields of a `LetterRow` or of a `DeadTaskRow`, and the record if it still exists."""

    letter: str | UnsetType = UNSET
    kind: LetterKind | UnsetType = UNSET
    seq: int
    id: str
    sender: str | UnsetType = UNSET
    sender_name: str | UnsetType | None = UNSET
    channel: str | UnsetType | None = UNSET
    error: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    asker: str | UnsetType = UNSET
    asker_name: str | UnsetType | None = UNSET
    cause: str | UnsetType | None = UNSET
    attempts: int
    reasons: tuple[str, ...] | UnsetType = UNSET
    workers: tuple[str, ...] | UnsetType = UNSET
    state: LetterState | UnsetType = UNSET
    at: str
    record: RawRecord | None


@operation("dead show", changes=False)
class DeadLetterRequest(Request[DeadLetterAnswer]):
    """Show a dead letter with its record, by the `seq` of a task or the `letter` of a message."""

    seq: SequenceNumber | None = None
    letter: LetterName | None = None


@operation("dead retry", host=True)
class RetryLetterRequest(Request[LetterChangedAnswer]):
    """Deliver a dead letter again, by the `seq` of a task or the `letter` of a message."""

    seq: SequenceNumber | None = None
    letter: LetterName | None = None


@operation("dead drop", host=True)
class DropLetterRequest(Request[LetterChangedAnswer]):
    """Delete a dead letter, by the `seq` of a task or the `letter` of a message."""

    seq: SequenceNumber | None = None
    letter: LetterName | None = None


# --- traces ---


class TracedRecord(Answer, kw_only=True):
    """A record of the message. `origin` and `link`: the space it came from. `void`: why readers reject it."""

    stream: str
    seq: int
    time: str
    kind: MessageKind
    sender: str
    to: str
    origin: str = ""
    link: str = ""
    void: str = ""


class TracedReceipt(Answer, kw_only=True):
    """The progress of the message. A task has `state`, and `cause`, `worker`, `attempt` and `reasons` if known."""

    kind: MessageKind
    sender: str
    to: str | UnsetType = UNSET
    seq: int | UnsetType = UNSET
    stage: ReceiptStage
    stages: dict[ReceiptStage, str]
    why: str = ""
    state: str | UnsetType = UNSET
    cause: str | UnsetType | None = UNSET
    worker: str | UnsetType | None = UNSET
    attempt: int | UnsetType = UNSET
    reasons: tuple[str, ...] | UnsetType = UNSET


class TraceAnswer(Answer):
    """`names`: the names of the agents in this answer, by id."""

    id: str
    stored: tuple[TracedRecord, ...]
    receipts: tuple[TracedReceipt, ...]
    names: dict[str, str]


@operation("trace get", changes=False)
class TraceRequest(Request[TraceAnswer]):
    """Trace a message that this agent sent or received. `seq`: its sequence, if it is a direct message."""

    id: str
    seq: Integer | None = None


class FindMessageAnswer(Answer):
    """`next` continues the search as `after`; null if the search is complete."""

    seq: int | None
    state: Literal["stored", "gone", "unknown"]
    next: int | None


@operation("trace find", host=True, changes=False)
class FindMessageRequest(Request[FindMessageAnswer]):
    """Find the sequence of a message of this agent. `since`: when it was first sent (default: the time in its id)."""

    id: str
    kind: MessageKind
    to: str
    since: Moment | None = None
    after: Integer = 0


class FindMessagesAnswer(Answer):
    """`found`: ids that may be stored. The others are not stored up to `next`."""

    found: tuple[str, ...]
    next: int | None


@operation("trace which", host=True, changes=False)
class FindMessagesRequest(Request[FindMessagesAnswer]):
    """Find out which messages of this agent may be stored. `since`: when the first of them was first sent."""

    ids: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_IDS)]
    kind: MessageKind
    to: str
    since: Moment | None = None
    after: Integer = 0
