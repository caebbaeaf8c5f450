"""What each control operation answers with, besides `ok`: a type for each row of the table in `operations.py`.

They are plain dictionaries on the wire; a field that is `NotRequired` may be missing. From these come the answers in
`control.schema.json` and docs/control.md, and tests hold every answer of a steward against them. Records that have
a type of their own (access, attention, rows of the roster) are given as that type's fields.
"""

# No postponed annotations here: a TypedDict of Python 3.11 would not see which of its fields are not required.

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from tidings.wire.states import ReceiptStage, TaskStatus

# --- parts of answers ---


class RecordRow(TypedDict):
    """A record as it was stored: nothing is re-encoded, so that the reader can verify it. Both last are base64."""

    seq: int
    time: str
    subject: str
    headers: str
    payload: str


class BackstopRow(TypedDict):
    """How far durable delivery is."""

    running: bool
    behind: int | None
    floor: int
    late_s: float
    starting: bool


class LastMessage(TypedDict):
    seq: int
    time: str


ChannelFacts = TypedDict(
    "ChannelFacts",
    {
        "channel": str,
        "class": str,
        "replay": bool,
        "own": list[str],
        "replay_window": int | None,
        "description": NotRequired[str | None],
        "instructions": NotRequired[str | None],
        "by": NotRequired[str | None],
        "by_name": NotRequired[str | None],
        "at": NotRequired[str],
    },
)


class ChannelRow(ChannelFacts):
    members: int
    joined: bool
    last: LastMessage | None


class MembershipRow(TypedDict):
    pattern: str
    joined: int


class MemberRow(TypedDict):
    id: str
    name: str | None


class LetterRow(TypedDict):
    """A dead letter of a message."""

    letter: str
    kind: str
    seq: int
    id: str
    sender: str
    sender_name: str | None
    channel: str | None
    error: str
    attempts: int
    state: str
    at: str


class WantedLetter(LetterRow):
    record: RecordRow | None


class DeadTaskRow(TypedDict):
    """A dead letter of a task."""

    seq: int
    id: str
    role: str
    asker: str
    asker_name: str | None
    cause: str | None
    attempts: int
    reasons: list[str]
    workers: list[str]
    at: str


class ReceiptRow(TypedDict):
    id: str
    to: str
    seq: int
    stage: ReceiptStage
    at: str
    why: NotRequired[str]
    channel: NotRequired[str | None]


class NamedAgent(TypedDict):
    name: str
    roles: list[str]


# --- answers ---


class NothingAnswer(TypedDict):
    pass


class AccessAnswer(TypedDict):
    access: dict[str, Any]
    seq: int


class AttentionAnswer(TypedDict):
    standing: dict[str, Any] | None
    number: int
    running: dict[str, Any] | None


class ChannelListAnswer(TypedDict):
    channels: list[ChannelRow]
    next: str | None
    seq: int


class ChannelInfoAnswer(ChannelFacts):
    seq: int
    backstop: BackstopRow
    members: NotRequired[int]
    last: NotRequired[LastMessage | None]
    messages: NotRequired[int]
    per_hour: NotRequired[float]


class ChannelSetAnswer(ChannelFacts):
    seq: int


class ConfirmAnswer(TypedDict):
    yours: bool
    subject: NotRequired[str]
    payload: NotRequired[str]


class DeadChangeAnswer(TypedDict):
    """`letter` of a message, `seq` of a task."""

    state: str
    letter: NotRequired[str]
    seq: NotRequired[int]


class DeadWantedAnswer(TypedDict):
    letters: list[WantedLetter]
    more: bool


class DeadListAnswer(TypedDict):
    dead: list[DeadTaskRow]
    more: bool
    mail: list[LetterRow]


class DeadShowAnswer(TypedDict):
    """The fields of a `LetterRow` or of a `DeadTaskRow`, and the record if it is still there."""

    seq: int
    id: str
    attempts: int
    at: str
    record: RecordRow | None
    letter: NotRequired[str]
    kind: NotRequired[str]
    sender: NotRequired[str]
    sender_name: NotRequired[str | None]
    channel: NotRequired[str | None]
    error: NotRequired[str]
    state: NotRequired[str]
    role: NotRequired[str]
    asker: NotRequired[str]
    asker_name: NotRequired[str | None]
    cause: NotRequired[str | None]
    reasons: NotRequired[list[str]]
    workers: NotRequired[list[str]]


class HealthAnswer(TypedDict):
    healthy: bool
    problems: list[str]
    steward: dict[str, Any]
    broker_rtt_ms: float
    log_head: int
    floor: int
    backstop: dict[str, Any]
    floor_held_by: str | None
    epoch: str
    gate: dict[str, Any] | None
    streams: dict[str, dict[str, int]]
    free_disk: int
    agents: int
    void_records: int
    void_messages: dict[str, int]
    counts: dict[str, int]
    mail: dict[str, int]
    tasks: dict[str, Any]
    removed: dict[str, int]
    withheld: list[str]
    doubts: list[int]
    regressions: list[dict[str, Any]]
    at: str


class DescribeAnswer(TypedDict):
    operations: list[dict[str, Any]]


class HistoryAnswer(TypedDict):
    records: list[RecordRow]
    more: bool
    next: int
    head: int
    stamp: list[Any] | None
    floor: int
    hidden: bool


class JoinAnswer(ChannelFacts):
    state: str
    seq: int
    left: int | None
    head: int
    backstop: BackstopRow
    epoch: str
    agreed: int | None
    stamp: list[Any] | None


class LeaveAnswer(TypedDict):
    state: str
    seq: int
    open: int | None
    still_covered_by: list[str]


class MembershipsAnswer(TypedDict):
    memberships: list[MembershipRow]
    seq: int


class MembersAnswer(TypedDict):
    members: list[MemberRow]
    next: str | None
    seq: int


class DeafAnswer(TypedDict):
    deaf: dict[str, str]
    seq: int


class BeatAnswer(TypedDict):
    boot: str


class ReceiptPutAnswer(TypedDict):
    new: int
    refused: list[int]


class ReceiptWaitAnswer(TypedDict):
    stage: ReceiptStage
    reached: bool
    stages: dict[ReceiptStage, str]
    why: str


class ReceiptWatchAnswer(TypedDict):
    news: list[ReceiptRow]
    cursor: int
    waited: bool


class RoomAnswer(TypedDict):
    made: int


class RosterAnswer(TypedDict):
    boot: str
    n: int
    rows: list[dict[str, Any]]
    next: str | None
    ttl: float
    epoch: str
    damage: list[dict[str, Any]]
    told: int
    rotations: list[RecordRow]
    attention: dict[str, Any] | None
    head: int
    floor: int
    backstop: BackstopRow


class NamesAnswer(TypedDict):
    names: dict[str, NamedAgent]


class SessionAnswer(TypedDict):
    number: int
    superseded: bool
    boot: str
    unsettled: int


class SessionEndedAnswer(TypedDict):
    ended: int | None


class SpaceAnswer(TypedDict):
    space: dict[str, Any]
    seq: int


class ClaimAnswer(TypedDict):
    task: RecordRow | None
    role: NotRequired[str]
    attempt: NotRequired[int]
    deadline: NotRequired[str]
    claimed_at: NotRequired[str]
    beat_every: NotRequired[float]


class TaskBeatAnswer(TypedDict):
    state: TaskStatus
    attempt: int
    deadline: str


class TaskDoneAnswer(TypedDict):
    state: TaskStatus
    record: int


class TaskFailAnswer(TypedDict):
    state: TaskStatus
    cause: NotRequired[str | None]


class TaskCheckAnswer(TypedDict):
    holders: int
    online: int | None
    last_seen: str | None


class TaskResultAnswer(TypedDict):
    state: TaskStatus
    asker: str
    seq: NotRequired[int]
    attempt: NotRequired[int]
    reasons: NotRequired[list[str]]
    worker: NotRequired[str | None]
    worker_name: NotRequired[str | None]
    cause: NotRequired[str | None]
    result: NotRequired[str]
    sig: NotRequired[str]


class TraceAnswer(TypedDict):
    id: str
    stored: list[dict[str, Any]]
    receipts: list[dict[str, Any]]
    names: dict[str, str]


class TraceFindAnswer(TypedDict):
    seq: int | None
    state: str
    next: int | None


class TraceWhichAnswer(TypedDict):
    found: list[str]
    next: int | None


class RulingAnswer(TypedDict):
    seq: int
    closed: list[str]


class RotateKeyAnswer(TypedDict):
    seq: int
    steward_key: str


class TableAnswer(TypedDict):
    table: dict[str, Any]
    next: int | None
    owners: int


class IssuedAnswer(TypedDict):
    found: dict[str, Any]


class UnreadAnswer(TypedDict):
    direct: int
    copies: int
    undelivered: int
    letters: int
    words: str


class AcknowledgeAnswer(TypedDict):
    acknowledged: int


#: every operation has its answer here: without it the table cannot be loaded
ANSWERS: Mapping[tuple[str, str], Any] = {
    ("access", "get"): AccessAnswer,
    ("attention", "get"): AttentionAnswer,
    ("attention", "set"): AttentionAnswer,
    ("channel", "list"): ChannelListAnswer,
    ("channel", "info"): ChannelInfoAnswer,
    ("channel", "set"): ChannelSetAnswer,
    ("confirm", "record"): ConfirmAnswer,
    ("dead", "put"): DeadChangeAnswer,
    ("dead", "wanted"): DeadWantedAnswer,
    ("dead", "list"): DeadListAnswer,
    ("dead", "show"): DeadShowAnswer,
    ("dead", "retry"): DeadChangeAnswer,
    ("dead", "drop"): DeadChangeAnswer,
    ("health", "ping"): HealthAnswer,
    ("health", "describe"): DescribeAnswer,
    ("history", "page"): HistoryAnswer,
    ("member", "join"): JoinAnswer,
    ("member", "leave"): LeaveAnswer,
    ("member", "list"): MembershipsAnswer,
    ("member", "members"): MembersAnswer,
    ("member", "deaf"): DeafAnswer,
    ("presence", "beat"): BeatAnswer,
    ("receipt", "put"): ReceiptPutAnswer,
    ("receipt", "wait"): ReceiptWaitAnswer,
    ("receipt", "watch"): ReceiptWatchAnswer,
    ("receipt", "room"): RoomAnswer,
    ("roster", "snapshot"): RosterAnswer,
    ("roster", "names"): NamesAnswer,
    ("session", "take"): SessionAnswer,
    ("session", "release"): NothingAnswer,
    ("session", "ended"): SessionEndedAnswer,
    ("space", "info"): SpaceAnswer,
    ("task", "claim"): ClaimAnswer,
    ("task", "beat"): TaskBeatAnswer,
    ("task", "done"): TaskDoneAnswer,
    ("task", "fail"): TaskFailAnswer,
    ("task", "check"): TaskCheckAnswer,
    ("task", "room"): RoomAnswer,
    ("task", "result"): TaskResultAnswer,
    ("trace", "get"): TraceAnswer,
    ("trace", "find"): TraceFindAnswer,
    ("trace", "which"): TraceWhichAnswer,
    ("admin", "grant"): RulingAnswer,
    ("admin", "revoke"): RulingAnswer,
    ("admin", "space_set"): SpaceAnswer,
    ("admin", "rotate_key"): RotateKeyAnswer,
    ("admin", "table"): TableAnswer,
    ("admin", "issued"): IssuedAnswer,
    ("admin", "unread"): UnreadAnswer,
    ("admin", "acknowledge"): AcknowledgeAnswer,
}
