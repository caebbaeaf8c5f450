"""Operations of the link worker, and the events of a link.

Any program of the same operating system user may call them over the link worker's socket. While no link worker runs, a
command performs them itself on the link store.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Annotated, Literal, NamedTuple

import msgspec

from tidings.contract.core import MAX_INTEGER, Answer, EmptyAnswer, Request, operation
from tidings.contract.links import DirectoryRow, LinkAgreement, LinkName, PeerProgress
from tidings.wire.links import GapKind, Seq, Token

#: records in one `quarantine list` or `quarantine retry`: the capacity of a link's quarantine
MAX_RECORDS = 10_000
#: the pause reason if the operator gives none
PAUSED = "paused by the operator"

RecordSeq = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Status = Literal["initializing", "live", "repairing", "degraded_poll", "paused"]
Connectivity = Literal["unknown", "online", "offline"]


# --- what a link reports ---


class LinkStatus(msgspec.Struct, frozen=True):
    """`words`: why the link is paused or failing. `lag_records`: sequences of the peer's log that are not handled.
    `lag_seconds`: age of the last handled record, 0 without a lag. `ended_there`: the other space ended the link."""

    status: Status
    connectivity: Connectivity
    words: str
    handled: Token | None
    received: Token | None
    head: int
    lag_records: int
    lag_seconds: float
    last_activity: float | None
    owed: int
    quarantined: int
    ended_there: bool = False
    #: records that only one side had at the last comparison and that are not fetched
    differing: int = 0
    #: bytes that the link may import per day, 0 if unknown, and bytes that it has imported
    share: int = 0
    spent: int = 0


class OmittedRange(NamedTuple):
    """Sequences of the peer's log that were not imported, and why."""

    first: int
    last: int
    reason: str


class ChannelCount(NamedTuple):
    """The number of records of a channel of the space `origin`."""

    origin: str
    channel: str
    records: int


class StoredLink(Answer, kw_only=True):
    """A link in the link store. `handled` and `received` are sequences of the peer's log. `handled_at`, `record_time`:
    when the last record was handled, and when the peer stored it. `owed`: records to fetch again. `unlisted`: channels
    that must be listed before their records are imported. Only a complete answer has the other fields."""

    handled: int | None
    epoch: str | None
    received: int | None
    handled_at: float | None
    record_time: float | None
    paused: str | None
    owed: int
    quarantined: int
    unlisted: tuple[str, ...]
    counts: dict[str, int] = {}  # noqa: RUF012  msgspec copies it
    omitted: tuple[OmittedRange, ...] = ()
    not_taken: tuple[ChannelCount, ...] = ()


class LinkedMailCounts(msgspec.Struct, kw_only=True):
    """`came`: imported. `forged`: without a valid signature. `waits`: why mail waits; empty if it does not."""

    came: int
    refused: int
    forged: int
    waits: str


class LinkedTaskCounts(msgspec.Struct, kw_only=True):
    open: int
    ended: int
    refused: int
    forged: int
    waits: str


class DirectoryStatus(msgspec.Struct, kw_only=True):
    """`known`: number of agents of the linked space. `changed`: names and new keys that need `directory trust`.
    `taken`: keys that belong to agents of another space. `words`: why the last synchronization failed."""

    known: int = 0
    changed: tuple[tuple[str, str], ...] = ()
    taken: tuple[str, ...] = ()
    words: str = ""
    mail: LinkedMailCounts | None = None
    tasks: LinkedTaskCounts | None = None


class LinkReport(LinkAgreement, kw_only=True, omit_defaults=False):
    """The agreement and the state of a link. `peer`: the user of the linked space here. `address`: that of the linked
    space; null if unknown. `credential`: whether our credential for it is stored. `beyond_names`: local names of spaces
    behind it. `imports`: whether the link imports anything. `peer_shares`: what the linked space shares now. `words`:
    why the link worker does not run the link. `live`, `push` and `peer_shares` are null without a link worker."""

    state: str
    peer: str | None
    why: str
    address: str | None
    credential: bool
    beyond_names: dict[str, str]
    imports: bool
    store: StoredLink | None = None
    live: LinkStatus | None = None
    directory: DirectoryStatus | None = None
    peer_shares: tuple[str, ...] | None = None
    push: PeerProgress | None = None
    words: str = ""


class ListLinksAnswer(Answer):
    """`steward`: why the link worker cannot read the current link records; empty if it can."""

    links: tuple[LinkReport, ...]
    steward: str = ""


@operation("link list", server="link worker", caller="user", changes=False)
class ListLinksRequest(Request[ListLinksAnswer]):
    """Describe every link, or one. `complete`: count its records too; the time grows with their number."""

    link: LinkName | None = None
    complete: bool = False


# --- changing a link ---


class PauseAnswer(Answer, omit_defaults=False):
    """`paused_before`: the earlier pause reason; null if the link was not paused."""

    paused_before: str | None


@operation("link pause", server="link worker", caller="user")
class PauseLinkRequest(Request[PauseAnswer]):
    """Stop imports over a link until it is resumed."""

    link: LinkName
    reason: str = PAUSED


@operation("link resume", server="link worker", caller="user")
class ResumeLinkRequest(Request[PauseAnswer]):
    """Continue a paused link where it stopped."""

    link: LinkName


class RebuildAnswer(Answer):
    """`handled`: the sequence of the peer's log that the link had reached. `quarantined`: records to retry."""

    handled: int
    quarantined: int


@operation("link rebuild", server="link worker", caller="user", waits=math.inf)
class RebuildLinkRequest(Request[RebuildAnswer]):
    """Read the peer's log again from its beginning. Imported messages are not imported twice; the quarantine stays."""

    link: LinkName


class CountAnswer(Answer):
    count: int


@operation("link forget", server="link worker", caller="user")
class ForgetLinkRequest(Request[CountAnswer]):
    """Delete a link from the link store. Messages that it imported stay in the log."""

    link: LinkName


class DifferentRecord(NamedTuple):
    """A record of the peer's log that one side has and the other does not."""

    seq: int
    sender: str
    id: str


class ChannelDifference(Answer):
    """Records of a channel and a day: `lacking` are missing here, `extra` are missing in the linked space. Both lists
    may be cut; the counts are complete."""

    channel: str
    day: str
    lacking: tuple[DifferentRecord, ...]
    extra: tuple[DifferentRecord, ...]
    lacking_count: int
    extra_count: int


class LostRecord(NamedTuple):
    """An imported message that the log of this space has lost. `seq` is its sequence here."""

    seq: int
    channel: str
    sender: str
    id: str


class VerifyAnswer(Answer, kw_only=True, omit_defaults=False):
    """Compares the records from `floor` to `through`; the peer's log ends at `head`. `more`: there may be more
    differences. `lost`: imported messages that the log of this space has lost. Not compared are `not_shared` records,
    `not_passed_on` records of other spaces, and `not_taken` records, which are shared and not imported."""

    space: str
    equal: bool
    floor: int
    through: int
    head: int
    counts: dict[str, int]
    differences: tuple[ChannelDifference, ...]
    lacking: int
    extra: int
    more: bool
    not_shared: tuple[ChannelCount, ...]
    not_passed_on: int
    not_taken: tuple[ChannelCount, ...]
    lost: int
    lost_records: tuple[LostRecord, ...]


@operation("link verify", server="link worker", caller="user", waits=math.inf)
class VerifyLinkRequest(Request[VerifyAnswer]):
    """Compare the records that the linked space shares with those imported, by digests. The link worker fetches missing
    records."""

    link: LinkName


# --- agents of a linked space ---


class DirectoryAnswer(Answer, omit_defaults=False):
    """`changed`: agents whose name stands for another key here."""

    people: tuple[DirectoryRow, ...]
    changed: tuple[DirectoryRow, ...]


@operation("directory list", server="link worker", caller="user", changes=False)
class ListDirectoryRequest(Request[DirectoryAnswer]):
    """List the agents of a linked space, by name."""

    link: LinkName


class KeyChangeAnswer(Answer):
    """The key that a name stood for, and the key that the linked space states now."""

    before: str
    now: str


@operation("directory compare", server="link worker", caller="user", changes=False)
class CompareKeysRequest(Request[KeyChangeAnswer]):
    """Return the known and the new key of an agent whose key changed."""

    link: LinkName
    name: str


@operation("directory trust", server="link worker", caller="user")
class TrustKeyRequest(Request[KeyChangeAnswer]):
    """Let a name stand for `key`, if the linked space still states that key."""

    link: LinkName
    name: str
    key: str


# --- quarantine ---


class QuarantinedRecord(Answer, kw_only=True):
    """A record that was received and not imported. `life` distinguishes records with the same sequence. `size` is the
    size of its payload in bytes. Only `quarantine show` answers with `signature`, `hops`, `sent_at` and `payload`."""

    seq: int
    life: int
    reason: str
    words: str
    origin: str
    channel: str
    sender: str
    size: int
    attempts: int
    since: float
    signature: str | None = None
    hops: int | None = None
    sent_at: float | None = None
    payload: bytes | None = None


class QuarantineAnswer(Answer):
    """`count`: how many records are in quarantine."""

    records: tuple[QuarantinedRecord, ...]
    count: int


@operation("quarantine list", server="link worker", caller="user", changes=False)
class ListQuarantineRequest(Request[QuarantineAnswer]):
    """List records of a link that were received and not imported, after a sequence."""

    link: LinkName
    after: Seq = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_RECORDS)] = 100


@operation("quarantine show", server="link worker", caller="user", changes=False)
class ShowQuarantinedRequest(Request[QuarantinedRecord]):
    """Read one record in quarantine with its payload."""

    link: LinkName
    seq: RecordSeq
    life: Seq | None = None


@operation("quarantine retry", server="link worker", caller="user")
class RetryQuarantinedRequest(Request[CountAnswer]):
    """Retry records in quarantine now (default: all of them)."""

    link: LinkName
    seqs: Annotated[tuple[RecordSeq, ...], msgspec.Meta(max_length=MAX_RECORDS)] | None = None


class DropAnswer(Answer):
    """`left`: records that are still in quarantine."""

    left: int


@operation("quarantine drop", server="link worker", caller="user")
class DropQuarantinedRequest(Request[DropAnswer]):
    """Give up a record in quarantine. It stays listed as not imported, with the reason."""

    link: LinkName
    seq: RecordSeq
    reason: str
    life: Seq | None = None


# --- the link worker ---


@operation("worker refresh", server="link worker", caller="user", changes=False)
class RefreshRequest(Request[EmptyAnswer]):
    """Read the link records again now."""


@operation("worker stop", server="link worker", caller="user")
class StopWorkerRequest(Request[EmptyAnswer]):
    """Stop the link worker. `tidings up` starts it again."""


# --- following a link ---


def _tag(name: str) -> str:
    """`PullAdvanced` is `pull_advanced`."""
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name).lstrip("_")


class LinkEvent(msgspec.Struct, frozen=True, tag_field="event", tag=_tag):
    """As JSON `{"event": "pull_advanced", "link": ..., "at": ...}` and its other fields."""

    link: str
    at: float

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)


class LinkReported(LinkEvent, frozen=True):
    """The state of the link: the first event, and again after a change."""

    live: LinkStatus | None
    push: PeerProgress | None


class LinkNotRunning(LinkEvent, frozen=True):
    """The link worker does not run the link: the last event."""

    words: str


class StatusChanged(LinkEvent, frozen=True):
    before: Status
    now: Status
    words: str = ""


class ConnectivityChanged(LinkEvent, frozen=True):
    before: Connectivity
    now: Connectivity


class PullAdvanced(LinkEvent, frozen=True):
    """Records were handled. Published after the link store has committed it."""

    handled: Token
    head: int
    admitted: int = 0
    duplicates: int = 0
    omitted: int = 0
    quarantined: int = 0


class PushAdvanced(LinkEvent, frozen=True):
    """The other space has handled our log up to `handled`; `lag_records` more are waiting for it."""

    handled: int
    lag_records: int
    lag_seconds: float


class GapDetected(LinkEvent, frozen=True):
    """The peer's log cannot be read from `before`; reading continues at `now`. `reread` records are read again,
    `vanished` ones are gone. The number of records in a removed range is not known."""

    kind: GapKind
    before: Token
    now: Token
    reread: int = 0
    vanished: int = 0
    #: found by comparing, not reported by the peer: records read since may be out of order
    by_comparing: bool = False


class LocalLogSetBack(LinkEvent, frozen=True):
    """The local log went back to an older state; `lost` messages are fetched again."""

    lost: int


class RepairStarted(LinkEvent, frozen=True):
    through: Token


class RepairCompleted(LinkEvent, frozen=True):
    """`lacking` records are missing here, `extra` ones are missing in the linked space; `fetching` of them are fetched.
    The others are only reported. `unchanged`: the difference is the one found before."""

    through: Token
    lacking: int = 0
    extra: int = 0
    fetching: int = 0
    unchanged: bool = False


class RepairFailed(LinkEvent, frozen=True):
    words: str


class DegradedPollEntered(LinkEvent, frozen=True):
    words: str


FollowedEvent = (
    LinkReported
    | LinkNotRunning
    | StatusChanged
    | ConnectivityChanged
    | PullAdvanced
    | PushAdvanced
    | GapDetected
    | LocalLogSetBack
    | RepairStarted
    | RepairCompleted
    | RepairFailed
    | DegradedPollEntered
)


@operation("link follow", server="link worker", caller="user", changes=False)
class FollowLinkRequest(Request[AsyncGenerator[FollowedEvent]]):
    """Report how a link is and every event of it, until the caller closes the connection."""

    link: LinkName
