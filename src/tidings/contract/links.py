"""Operations between linked spaces, and between a space and its own link worker.

The link worker of a linked space calls `link ...`. That space is not trusted: its answers and requests are decoded
strictly, with bounds on everything that is stored. The space's own link worker calls `admission ...`.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from tidings.contract.channels import RawRecord
from tidings.contract.core import MAX_INTEGER, Answer, EmptyAnswer, Integer, Request, operation
from tidings.wire.digests import BUCKETS
from tidings.wire.link_exchange import (
    CLAIMS_AT_ONCE,
    MAIL_PER_PAGE,
    PEOPLE_PER_PAGE,
    RECEIPTS_AT_ONCE,
    TASKS_PER_PAGE,
    LinkedMail,
    LinkedRow,
    Statement,
    ToldReceipt,
    ToldTask,
)
from tidings.wire.links import LinkGap, Seq, ShortText, Token
from tidings.wire.records import Stamp
from tidings.wire.rulings import Link, Switch
from tidings.wire.seal import MOST_READERS
from tidings.wire.states import ReceiptStage, TaskStatus

#: records of one `link page`, of one `link fetch`, and rows of one `admission index`
MAX_PAGE, MAX_FETCH, MAX_INDEX = 1_000, 256, 1_000

Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
#: a token, as in subjects and file names. Python's `$` would match before a line feed at the end
LinkName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")]
#: the number of records, and the sum of their hashes in 64 hex digits
DigestRow = tuple[int, str]


# --- the peer's log ---


class LinkHelloAnswer(Answer, kw_only=True):
    """`space` is the id of this space and `name` its own name. `shares` and `hops`: what the caller may read now.
    `jwt`: the caller's current token; empty if this space does not store it."""

    link: str
    seq: int
    name: str
    space: ShortText
    steward: str
    epoch: ShortText
    head: Seq
    floor: Seq
    shares: tuple[str, ...]
    hops: int
    until: int | None
    direct: str
    roster: str
    tasks: str
    time: str
    jwt: Annotated[str, msgspec.Meta(max_length=20_000)]


@operation("link hello", caller="peer", changes=False)
class LinkHelloRequest(Request[LinkHelloAnswer]):
    """Describe this space and what it shares with the calling space."""


class LinkPageAnswer(Answer, kw_only=True):
    """Every shared record from the token up to `through`. `granted`: the sequence of the link record that shares them;
    if it changes, earlier records may be shared too. It is 0 in an answer with a `gap`."""

    records: tuple[LinkedRow, ...]
    through: Token
    head: Seq
    floor: Seq
    gap: LinkGap | None
    granted: Seq


@operation("link page", caller="peer")
class LinkPageRequest(Request[LinkPageAnswer]):
    """Read the shared records after a token, oldest first. `handled`: the last sequence the caller has handled."""

    space: str = ""
    epoch: str = ""
    after: Seq = 0
    mark: str = ""
    limit: Limit = MAX_PAGE
    handled: Integer | None = None


class LinkFetchAnswer(Answer):
    """`missing`: sequences that do not exist or are not shared. Records in neither list did not fit into the answer."""

    epoch: ShortText
    records: tuple[LinkedRow, ...]
    missing: tuple[int, ...]


@operation("link fetch", caller="peer", changes=False)
class LinkFetchRequest(Request[LinkFetchAnswer]):
    """Read single shared records."""

    seqs: Annotated[tuple[Integer, ...], msgspec.Meta(max_length=MAX_FETCH)] = ()


class LinkDigestAnswer(Answer):
    """Digests of the records from `floor` to `through`, by channel and day. `more`: pass the last pair as `after`."""

    floor: int
    through: int
    channels: dict[str, dict[str, DigestRow]]
    more: bool


@operation("link digest", caller="peer", changes=False)
class LinkDigestRequest(Request[LinkDigestAnswer]):
    """Compute digests of the shared records by channel and day. `after`: the channel and day to continue after."""

    through: Seq
    after: tuple[str, str] = ("", "")


class LinkBucketsAnswer(Answer):
    floor: int
    through: int
    buckets: Annotated[tuple[DigestRow, ...], msgspec.Meta(min_length=BUCKETS, max_length=BUCKETS)]


@operation("link buckets", caller="peer", changes=False)
class LinkBucketsRequest(Request[LinkBucketsAnswer]):
    """Compute the 256 digests of a channel and a day."""

    channel: str
    day: str
    through: Seq


class LinkIdsAnswer(Answer):
    """Rows of sequence, sender, id and SHA-256 of the payload in hex digits."""

    floor: int
    through: int
    ids: tuple[tuple[int, str, str, str], ...]
    more: bool


@operation("link ids", caller="peer", changes=False)
class LinkIdsRequest(Request[LinkIdsAnswer]):
    """List the records in some buckets of a channel and a day, above the sequence `after`."""

    channel: str
    day: str
    buckets: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)], ...], msgspec.Meta(min_length=1)]
    through: Seq
    after: Integer = 0


# --- the peer's agents, mail and tasks ---


class LinkRosterAnswer(Answer, kw_only=True):
    """Agents by their access records up to `through`. `rotations`: the records that lead from the caller's `key` to the
    current one, if they differ. `direct`, `tasks`: whether this space passes direct messages and tasks."""

    people: Annotated[tuple[Statement, ...], msgspec.Meta(max_length=PEOPLE_PER_PAGE)]
    through: Seq
    more: bool
    epoch: ShortText
    key: Annotated[str, msgspec.Meta(max_length=100)]
    rotations: Annotated[tuple[RawRecord, ...], msgspec.Meta(max_length=1_000)]
    direct: bool
    tasks: bool


@operation("link roster", caller="peer", changes=False)
class LinkRosterRequest(Request[LinkRosterAnswer]):
    """List the agents of this space as signed statements, in pages. `key`: the steward key that the caller knows."""

    after: Integer = 0
    key: str | None = None


class LinkMailAnswer(Answer, kw_only=True):
    """All mail from `after` up to `through`. The next request passes `epoch`, `people`, `through` and `mark` (the
    fingerprint of the record at `through`). `set_back`: a record that the caller named has been replaced. `broker`
    identifies the broker run; after a change, the receipts reported last may be lost."""

    mail: Annotated[tuple[LinkedMail, ...], msgspec.Meta(max_length=MAIL_PER_PAGE)]
    epoch: ShortText
    people: ShortText
    through: Seq
    more: bool
    after: Seq
    mark: ShortText
    set_back: bool
    broker: ShortText


@operation("link mail", caller="peer")
class LinkMailRequest(Request[LinkMailAnswer]):
    """Read the direct messages for agents of the calling space, in pages. `marks`: fingerprints of handled records; the
    answer begins after the newest that still exists."""

    epoch: str | None = None
    people: str | None = None
    after: Integer = 0
    marks: Annotated[tuple[Stamp, ...], msgspec.Meta(max_length=CLAIMS_AT_ONCE)] = ()


class LinkReceiptsAnswer(Answer):
    """`refused`: positions in `receipts` of messages that were not sent to an agent of the calling space."""

    new: int
    refused: tuple[int, ...]


@operation("link told", caller="peer")
class LinkReceiptsRequest(Request[LinkReceiptsAnswer]):
    """Report receipts for direct messages that the calling space fetched."""

    receipts: Annotated[tuple[ToldReceipt, ...], msgspec.Meta(max_length=RECEIPTS_AT_ONCE)] = ()


class LinkTasksAnswer(Answer):
    """`tasks` are `LinkedTask` rows. They are decoded one by one, so that an invalid row does not block the others."""

    tasks: Annotated[tuple[Any, ...], msgspec.Meta(max_length=TASKS_PER_PAGE)]
    more: bool


@operation("link tasks", caller="peer")
class LinkTasksRequest(Request[LinkTasksAnswer]):
    """Read up to `room` tasks for roles of the calling space, except from askers in `without` and for `busy` roles."""

    room: Integer = 0
    without: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()


class LinkProgressAnswer(Answer):
    """Positions in `tasks`: rows that were refused, and rows that the caller must report again later."""

    refused: tuple[int, ...]
    later: tuple[int, ...]


@operation("link progress", caller="peer")
class LinkProgressRequest(Request[LinkProgressAnswer]):
    """Report the progress of tasks that the calling space fetched."""

    tasks: Annotated[tuple[ToldTask, ...], msgspec.Meta(max_length=TASKS_PER_PAGE)] = ()


# --- importing, for the space's own link worker ---


class ImportFacts(Answer, kw_only=True):
    """`open`: whether the log accepts messages. `listing`: 0 if every channel may be used; else the version of the list
    of channels. `share`: bytes that one link may import per day; 0 if not known yet."""

    space: str
    epoch: str
    head: int
    floor: int
    open: bool
    listing: int
    share: int


class PeerProgress(Answer):
    """How far the linked space has handled our log. `asked_at`: Unix time of its last request; `waiting_since`: that of
    the oldest shared record it has not handled. `lag_records` is 0 if no shared record waits."""

    handled: int
    asked_at: float | None
    lag_records: int
    waiting_since: float | None

    def lag_seconds(self, now: float) -> float:
        return round(max(0.0, now - self.waiting_since), 1) if self.waiting_since is not None else 0.0


class LinkAgreement(Answer, kw_only=True):
    """What passes over a link, as its record says."""

    link: str
    origin: str
    space: str
    channels: dict[str, str]
    shares: tuple[str, ...]
    beyond: dict[str, dict[str, str]]
    hops: int
    until: int | None
    direct: Switch
    roster: Switch
    tasks: Switch


class LinkStateRow(LinkAgreement, kw_only=True):
    """A link record at `seq`. `push` is null if the link shares nothing."""

    state: Switch
    steward: str | None
    peer: str | None
    seq: int
    push: PeerProgress | None

    @classmethod
    def of(cls, record: Link, seq: int, push: PeerProgress | None) -> LinkStateRow:
        return cls(**{name: getattr(record, name) for name in _LINK_FIELDS}, seq=seq, push=push)

    @property
    def record(self) -> Link:
        return Link(op="-", **{name: getattr(self, name) for name in _LINK_FIELDS})


_LINK_FIELDS = [name for name in LinkStateRow.__struct_fields__ if name not in ("seq", "push")]


class ImportLinksAnswer(ImportFacts, kw_only=True):
    name: str
    links: tuple[LinkStateRow, ...]


@operation("admission links", caller="link worker", changes=False)
class ImportLinksRequest(Request[ImportLinksAnswer]):
    """List the current link records, and describe the log."""


class ImportFactsAnswer(ImportFacts, kw_only=True):
    """`agreed`, `authority`: the sequence and the name of the link record that allows imports; 0 and empty if there is
    none. Both are missing if the request names no link."""

    agreed: int | None = None
    authority: str | None = None


@operation("admission facts", caller="link worker", changes=False)
class ImportFactsRequest(Request[ImportFactsAnswer]):
    """Describe the log and what a link may import. `after`: a sequence that the broker acknowledged to the caller."""

    after: Integer = 0
    link: str | None = None


class IndexedRecord(NamedTuple):
    """An imported record: `channel` is the channel in its origin, `hash` the SHA-256 of its payload in hex digits."""

    seq: int
    link: str
    origin: str
    channel: str
    sender: str
    id: str
    hash: str


class ImportIndexAnswer(Answer):
    """Every imported record up to `through`."""

    epoch: str
    rows: tuple[IndexedRecord, ...]
    through: int
    head: int


@operation("admission index", caller="link worker", changes=False)
class ImportIndexRequest(Request[ImportIndexAnswer]):
    """List imported records, in pages."""

    after: Seq = 0
    limit: Limit = MAX_INDEX


class ImportChannelsAnswer(Answer):
    unlisted: tuple[str, ...]


@operation("admission listed", caller="link worker", changes=False)
class ImportChannelsRequest(Request[ImportChannelsAnswer]):
    """Find out which of these channels must be listed before records can be imported into them."""

    channels: tuple[str, ...] = ()


class DirectoryRow(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """An agent of a linked space."""

    id: str
    name: str
    roles: tuple[str, ...] = ()


class ImportDirectoryAnswer(Answer):
    """`version`: the version of the stored directory. `refused`: keys that belong to another space."""

    version: str
    refused: tuple[str, ...]


@operation("admission people", caller="link worker")
class ImportDirectoryRequest(Request[ImportDirectoryAnswer]):
    """Replace the directory of a linked space, in pages. Without `people`, return the stored version. `gone`: keys of
    former agents. `hidden`: do not show the agents. `direct`, `tasks`: what the linked space passes."""

    link: LinkName
    version: Annotated[str, msgspec.Meta(min_length=1)]
    people: Annotated[tuple[DirectoryRow, ...], msgspec.Meta(max_length=PEOPLE_PER_PAGE)] | None = None
    after: Integer = 0
    more: bool = False
    gone: tuple[str, ...] = ()
    hidden: bool = False
    direct: bool = True
    tasks: bool = False


class MailOffer(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A direct message of a linked space. `size` is the size of its payload in bytes."""

    sender: str
    id: str
    to: str
    size: Seq = 0


MailOffers = Annotated[tuple[MailOffer, ...], msgspec.Meta(max_length=MAIL_PER_PAGE)]


class ImportVerdictsAnswer(Answer):
    """One verdict per row: `take`, `have`, `wait: ...` or `no: ...`. `agreed`: the link record imports must name."""

    agreed: int
    verdicts: tuple[str, ...]


@operation("admission mail", caller="link worker")
class ImportMailRequest(Request[ImportVerdictsAnswer]):
    """Ask which direct messages may be imported. `anew`: read again which of them are stored."""

    link: LinkName
    mail: MailOffers
    anew: bool = False


@operation("admission took", caller="link worker")
class ImportedMailRequest(Request[EmptyAnswer]):
    """Report direct messages that were imported."""

    mail: MailOffers


class ImportedReceipt(Answer, kw_only=True):
    """A receipt for a direct message of another space. `n`, `mark`: the receipt record's sequence and fingerprint."""

    sender: str
    id: str
    to: str
    stage: ReceiptStage
    why: str
    n: int
    mark: str


class ImportReceiptsAnswer(Answer, kw_only=True):
    """Receipts after `after` up to `through`; `after` is 0 if the record that the request names does not exist.
    `broker` identifies the broker run; after a change, acknowledged mail may be lost."""

    receipts: tuple[ImportedReceipt, ...]
    epoch: str
    broker: str
    after: int
    through: int
    mark: str
    more: bool


@operation("admission receipts", caller="link worker", changes=False)
class ImportReceiptsRequest(Request[ImportReceiptsAnswer]):
    """List the receipts for direct messages of other spaces, in pages."""

    epoch: str | None = None
    after: Integer = 0
    mark: str = ""


class TaskOffer(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A task of a linked space. `readers`: agents that can open it. `seq`: its sequence in the queue here, if known."""

    sender: str
    id: str
    role: str = ""
    readers: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_READERS)] = ()
    seq: Seq = 0


TaskOffers = Annotated[tuple[TaskOffer, ...], msgspec.Meta(max_length=TASKS_PER_PAGE)]


@operation("admission tasks", caller="link worker")
class ImportTasksRequest(Request[ImportVerdictsAnswer]):
    """Ask which tasks may be imported."""

    link: LinkName
    tasks: TaskOffers


class TaskProgress(Answer, kw_only=True):
    """The progress of a task here. Fields that do not apply to its state are missing."""

    state: TaskStatus
    worker: str | None = None
    attempt: int | None = None
    result: bytes | None = None
    sig: str | None = None
    cause: str | None = None
    why: str | None = None


class ImportProgressAnswer(Answer):
    """One row for each task, in order; fewer if more would not fit."""

    tasks: tuple[TaskProgress, ...]


@operation("admission progress", caller="link worker")
class ImportProgressRequest(Request[ImportProgressAnswer]):
    """Return the progress of tasks that were imported from other spaces."""

    tasks: TaskOffers
