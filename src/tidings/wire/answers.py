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


class LinkedRow(TypedDict):
    """A record that goes over a link: `origin` and `channel` are where it was said, and `sig` is its sender's over
    both. The payload is base64."""

    seq: int
    time: str
    origin: str
    channel: str
    sender: str
    sig: str
    payload: str
    hops: int
    mark: str


class TokenRow(TypedDict):
    space: str
    epoch: str
    seq: int
    mark: str


class GapRow(TypedDict):
    """Why nothing follows a token: too_old, too_new, epoch, stream or record."""

    kind: str
    oldest: int
    head: int
    epoch: str
    agreed: int


# --- answers ---


class NothingAnswer(TypedDict):
    pass


class AccessAnswer(TypedDict):
    """`authority`: certificates (base64 of DER, one after the other) that the address of a bundle is to trust; empty if
    the space is no authority of its own."""

    access: dict[str, Any]
    seq: int
    authority: str


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
    #: the sequence of the newest link record
    links: int
    #: how many that were looked at are left out because no link lets them in
    void: int
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
    links: int
    unheard: dict[str, str]


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


class LinkVersion(TypedDict):
    """What a link lets in from a sequence on, until the next row of the same link."""

    link: str
    seq: int
    state: str
    #: the id of the space at its other end, and the name that one is shown under
    origin: str
    space: str
    channels: dict[str, str]
    beyond: dict[str, dict[str, str]]
    hops: int
    until: int | None
    #: whether direct messages of that space come in, and tasks
    mail: bool
    tasks: bool


class LinksAnswer(TypedDict):
    """Rows in order of links, then of sequences; `through`: nothing changed at or below it but what rows say."""

    links: list[LinkVersion]
    next: str | None
    #: the sequence of the newest link record
    newest: int
    through: int
    floor: int


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
    #: the id of the space of its role; empty if that is this one
    space: NotRequired[str]
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


class LinkRulingAnswer(TypedDict):
    seq: int


class LinkRecordsAnswer(TypedDict):
    """By link: the operation that wrote the record in force, its sequence, and whether it is on or off."""

    links: dict[str, dict[str, Any]]


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


class AcceptAnswer(TypedDict):
    """JSON, sealed for the key that asked (libsodium's sealed box, base64): what a bundle has besides its seed; or of a
    link the `offer` with its `signature`, and then the token of the user that accepted. With a token comes how this
    space is reached."""

    sealed: str


class LinkHelloAnswer(TypedDict):
    """`space` is the id of this space, `name` what it calls itself, `jwt` the token in force of whoever asks."""

    link: str
    seq: int
    name: str
    space: str
    steward: str
    epoch: str
    head: int
    floor: int
    shares: list[str]
    hops: int
    until: int | None
    direct: str
    roster: str
    tasks: str
    time: str
    jwt: str


class LinkPageAnswer(TypedDict):
    """Everything shared up to `through` is in it, and in those before. `granted`: the sequence of the record by which
    it is shared; under another one more may be, also of what was passed."""

    records: list[LinkedRow]
    through: TokenRow
    head: int
    floor: int
    gap: GapRow | None
    granted: int


class LinkFetchAnswer(TypedDict):
    """`missing`: not there, or not shared. What is in neither did not fit."""

    epoch: str
    records: list[LinkedRow]
    missing: list[int]


class LinkDigestAnswer(TypedDict):
    """Channel -> day -> [count, sum in 64 hex digits], of records from `floor` to `through`. `more`: ask again, after
    the last channel and day of these."""

    floor: int
    through: int
    channels: dict[str, dict[str, list[Any]]]
    more: bool


class LinkBucketsAnswer(TypedDict):
    floor: int
    through: int
    buckets: list[list[Any]]


class LinkIdsAnswer(TypedDict):
    """Rows of [sequence, sender, id, SHA-256 of the payload]."""

    floor: int
    through: int
    ids: list[list[Any]]
    more: bool


class AdmissionFactsAnswer(TypedDict):
    """`open`: does the log take messages? `agreed`, `authority`: the record under which a link lets something in.
    `listing`: 0 if every channel may be used; else a number that changes whenever other channels are listed. `share`:
    bytes that one link may bring into the log in a day; 0 if the budget of the log is not known yet."""

    space: str
    epoch: str
    head: int
    floor: int
    open: bool
    listing: int
    share: int
    agreed: NotRequired[int]
    authority: NotRequired[str]


class AdmissionLinksAnswer(AdmissionFactsAnswer):
    """Each link is the fields of its record, and `seq`, where that is. `push` of one that shares something: up to where
    the other space has `handled` this log, when it last asked, and what waits for it."""

    name: str
    links: list[dict[str, Any]]


class AdmissionListedAnswer(TypedDict):
    """Of the channels that were named: nothing counts in these."""

    unlisted: list[str]


class AdmissionPeopleAnswer(TypedDict):
    """`version` is what is known now; `refused` are keys of ours, or of another linked space."""

    version: str
    refused: list[str]


class StatementRow(TypedDict):
    """What the steward says of one agent, in JSON, and its signature."""

    text: str
    sig: str


class LinkRosterAnswer(TypedDict):
    """Agents whose access records lie up to `through`. `rotations` name `key`, if the asker knew another one. `direct`,
    `tasks`: whether this space lets direct messages and tasks pass the link."""

    people: list[StatementRow]
    through: int
    more: bool
    epoch: str
    key: str
    rotations: list[dict[str, Any]]
    direct: bool
    tasks: bool


class MailRow(TypedDict):
    """A direct message that goes over a link: `sig` is its sender's, over its space and `to`. The payload is base64."""

    seq: int
    sender: str
    to: str
    sig: str
    payload: str
    mark: str


class LinkMailAnswer(TypedDict):
    """Everything from `after` up to `through`. `epoch`, `people` and `through` are what to go on from, with `mark`, of
    the record there. `after`: the newest of the `marks` that is still the record there; `set_back`: another one is.
    `broker`: which process it is; another one may have forgotten what was told last."""

    mail: list[MailRow]
    epoch: str
    people: str
    after: int
    through: int
    mark: str
    set_back: bool
    broker: str
    more: bool


class LinkToldAnswer(TypedDict):
    """`refused`: numbers of those that speak of no message to an agent of the asking space."""

    new: int
    refused: list[int]


class AdmissionMailAnswer(TypedDict):
    """One verdict for each: `take`, `have`, `wait: ...` or `no: ...`."""

    agreed: int
    verdicts: list[str]


class LinkTasksAnswer(TypedDict):
    """Rows of `wire/link_exchange.py`; `more`: others wait."""

    tasks: list[dict[str, Any]]
    more: bool


class LinkProgressAnswer(TypedDict):
    """By number: what is not believed, and what is to be told again later."""

    refused: list[int]
    later: list[int]


class AdmissionProgressAnswer(TypedDict):
    """One row for each, in order; fewer if more would not fit."""

    tasks: list[dict[str, Any]]


class ForeignReceipt(TypedDict):
    sender: str
    id: str
    to: str
    stage: str
    why: str
    #: where it is among all that was told
    n: int
    mark: str


class AdmissionReceiptsAnswer(TypedDict):
    """From `after`, which is 0 if what was asked for is not known to be there, up to `through`, with the mark of the
    record there. `broker`: which process it is; another one may have lost what was acknowledged last."""

    receipts: list[ForeignReceipt]
    epoch: str
    after: int
    through: int
    mark: str
    broker: str
    more: bool


class AdmissionIndexAnswer(TypedDict):
    """Rows of [sequence, link, origin, channel there, sender, id, SHA-256 of the payload], all up to `through`."""

    epoch: str
    rows: list[list[Any]]
    through: int
    head: int


#: every operation has its answer here: without it the table cannot be loaded
ANSWERS: Mapping[tuple[str, str], Any] = {
    ("accept", "redeem"): AcceptAnswer,
    ("accept", "offer"): AcceptAnswer,
    ("access", "get"): AccessAnswer,
    ("admission", "links"): AdmissionLinksAnswer,
    ("admission", "facts"): AdmissionFactsAnswer,
    ("admission", "index"): AdmissionIndexAnswer,
    ("admission", "listed"): AdmissionListedAnswer,
    ("admission", "people"): AdmissionPeopleAnswer,
    ("admission", "mail"): AdmissionMailAnswer,
    ("admission", "took"): NothingAnswer,
    ("admission", "receipts"): AdmissionReceiptsAnswer,
    ("admission", "tasks"): AdmissionMailAnswer,
    ("admission", "progress"): AdmissionProgressAnswer,
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
    ("link", "hello"): LinkHelloAnswer,
    ("link", "page"): LinkPageAnswer,
    ("link", "fetch"): LinkFetchAnswer,
    ("link", "digest"): LinkDigestAnswer,
    ("link", "buckets"): LinkBucketsAnswer,
    ("link", "ids"): LinkIdsAnswer,
    ("link", "roster"): LinkRosterAnswer,
    ("link", "mail"): LinkMailAnswer,
    ("link", "told"): LinkToldAnswer,
    ("link", "tasks"): LinkTasksAnswer,
    ("link", "progress"): LinkProgressAnswer,
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
    ("space", "links"): LinksAnswer,
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
    ("admin", "link_set"): LinkRulingAnswer,
    ("admin", "link_end"): LinkRulingAnswer,
    ("admin", "links"): LinkRecordsAnswer,
    ("admin", "acknowledge"): AcknowledgeAnswer,
    ("admin", "redeemed"): NothingAnswer,
}
