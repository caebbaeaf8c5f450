"""Operations of administrators on a space, and of the holders of invitations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tidings.contract.agents import SpaceSettingsAnswer
from tidings.contract.core import Answer, EmptyAnswer, Request, operation
from tidings.wire.links import MOST_HOPS
from tidings.wire.rulings import ChannelClass, Count, Switch

#: seconds for which a request that redeems an invitation may wait
ACCEPT_WAIT = 40.0


# --- agents ---


class AccessChangedAnswer(Answer):
    """`closed`: the patterns whose memberships ended because the agent may no longer read them."""

    seq: int
    closed: tuple[str, ...]


@operation("admin grant", caller="admin", once=True)
class GrantRequest(Request[AccessChangedAnswer], kw_only=True):
    """Write the access record of an agent. The other fields are those of the record."""

    id: str
    name: str
    roles: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    post: tuple[str, ...] = ()
    manage: tuple[str, ...] = ()
    jwt: str | None = None
    succeeds: str | None = None
    iat: Count | None = None
    withheld: Annotated[str, msgspec.Meta(max_length=200)] = ""


@operation("admin revoke", caller="admin")
class RevokeRequest(Request[AccessChangedAnswer]):
    """Revoke an agent's access."""

    id: str


class IssuedRow(Answer):
    op: str
    seq: int
    revoked: bool
    name: str


class IssuedAnswer(Answer):
    """The current access record of each agent that has one, by id."""

    found: dict[str, IssuedRow]


@operation("admin issued", caller="admin", changes=False)
class IssuedRequest(Request[IssuedAnswer]):
    """Find out which access records of these agents the log has."""

    ids: tuple[str, ...] = ()


class UnreadAnswer(Answer):
    """Counts of unread messages. `words`: the counts as an English phrase; empty if all are 0."""

    direct: int
    copies: int
    undelivered: int
    letters: int
    words: str


@operation("admin unread", caller="admin", changes=False)
class UnreadRequest(Request[UnreadAnswer]):
    """Count the messages that an agent has not read."""

    id: str


# --- the space ---


class DefaultsChange(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Changes to the channel defaults of a space. `null` resets one."""

    cls: ChannelClass | UnsetType | None = msgspec.field(name="class", default=UNSET)
    replay: bool | UnsetType | None = UNSET
    replay_window: Count | UnsetType | None = UNSET


class PartsChange(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Changes to the optional parts of a space."""

    deliver: Switch | UnsetType = UNSET
    archive: Switch | UnsetType = UNSET


@operation("admin space_set", caller="admin", once=True)
class ChangeSpaceRequest(Request[SpaceSettingsAnswer], kw_only=True):
    """Change the space's settings. Missing settings stay; `null` resets one to its default."""

    defaults: DefaultsChange | UnsetType = UNSET
    channels: Literal["open", "listed"] | UnsetType = UNSET
    parts: PartsChange | UnsetType = UNSET
    keep_age: Count | UnsetType | None = UNSET
    keep_bytes: Count | UnsetType | None = UNSET
    keep_unread: Count | UnsetType | None = UNSET
    keep_receipts: Count | UnsetType | None = UNSET
    quota_records: Count | UnsetType | None = UNSET
    quota_bytes: Count | UnsetType | None = UNSET


class RotateKeyAnswer(Answer):
    seq: int
    steward_key: str


@operation("admin rotate_key", caller="admin")
class RotateKeyRequest(Request[RotateKeyAnswer]):
    """Replace the steward's signing key. The old key signs the record that names the new one."""


class TableView(msgspec.Struct, frozen=True, kw_only=True):
    """The table of a space after the record at `seq`: control records as plain fields, without tokens (`jwt`)."""

    seq: int
    steward_key: str
    space: dict[str, Any]
    lease: dict[str, Any] | None
    #: owner -> pattern -> sequence of the join
    members: dict[str, dict[str, int]]
    access: dict[str, dict[str, Any]]
    channels: dict[str, dict[str, Any]]
    links: dict[str, dict[str, Any]]


class TableAnswer(Answer):
    """A page of the table. `members` and `access` have the agents of this page only; `next`: the offset of the
    following page; `owners`: the number of agents on all pages."""

    table: TableView
    next: int | None
    owners: int


@operation("admin table", caller="admin", changes=False)
class TableRequest(Request[TableAnswer]):
    """Read the table of the space after the record at `seq`, in pages (default: the newest)."""

    seq: Count | None = None
    offset: Count = 0


class AcknowledgeAnswer(Answer):
    acknowledged: int


@operation("admin acknowledge", caller="admin")
class AcknowledgeRequest(Request[AcknowledgeAnswer]):
    """Acknowledge the reported losses, so that health stops reporting them."""


# --- links ---


class LinkChangedAnswer(Answer):
    """`seq` is 0 if there was no such link to end."""

    seq: int


@operation("admin link_set", caller="admin", once=True)
class SetLinkRequest(Request[LinkChangedAnswer], kw_only=True):
    """Write a link record: what passes between this space and another. Missing fields get their default."""

    link: str
    origin: str
    channels: dict[str, str]
    space: str = ""
    steward: str | None = None
    shares: tuple[str, ...] = ()
    beyond: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    hops: Annotated[int, msgspec.Meta(ge=1, le=MOST_HOPS)] = 1
    until: Count | None = None
    peer: str | None = None
    direct: Switch = "off"
    roster: Switch = "off"
    tasks: Switch = "off"


@operation("admin link_end", caller="admin", once=True)
class EndLinkRequest(Request[LinkChangedAnswer]):
    """End a link."""

    link: str


class LinkRecordRow(Answer):
    op: str
    seq: int
    state: Switch


class LinkRecordsAnswer(Answer):
    """The current record of each link, by link."""

    links: dict[str, LinkRecordRow]


@operation("admin links", caller="admin", changes=False)
class LinkRecordsRequest(Request[LinkRecordsAnswer]):
    """Find out which record of each link the log has."""


# --- invitations ---


class SealedAnswer(Answer):
    """JSON in a sealed box (libsodium) for the caller's key, because everyone with the invitation receives the answer:
    to `offer` an `OfferedLink`, to `redeem` a `PlaceGrant` or a `LinkGrant`."""

    sealed: bytes


class OfferedLink(Answer):
    """The text of an offer and the space's signature."""

    offer: str
    signature: str


class Grant(Answer, kw_only=True):
    """A token, and the addresses at which the space accepts it."""

    jwt: str
    #: the certificate of the authority that the invitation names, followed by that of its successor if there is one
    authority: bytes
    #: the length of the first certificate
    authority_bytes: int
    #: the addresses of an external NATS; empty if the space has its own server
    servers: str
    #: ports at the address of the invitation; 0 if there is none
    port: int
    ws_port: int


class GrantedAgent(Answer):
    name: str
    id: str


class PlaceGrant(Grant, kw_only=True):
    """The fields of an agent's bundle except the seed. `succeeds`: the keys that this one replaces, newest first."""

    space_id: str
    steward_key: str
    agent: GrantedAgent
    succeeds: tuple[str, ...]


class LinkGrant(Grant, kw_only=True):
    """`called`: the accepting space's name in the inviting one. `unreached`: why the inviting space cannot reach it."""

    link: str
    called: str
    unreached: str


@operation("accept redeem", caller="invited", waits=ACCEPT_WAIT)
class RedeemRequest(Request[SealedAnswer], kw_only=True):
    """Accept an invitation: become an agent, or with `text` accept the offered link on these terms. In base64: `sig`, a
    signature by the new key, and `proof`, one by the space that accepts a link."""

    id: str
    sig: str
    name: str = ""
    text: str | None = None
    proof: str = ""


@operation("accept offer", caller="invited")
class OfferRequest(Request[SealedAnswer], kw_only=True):
    """Read the link that an invitation offers. Signatures in base64: `sig` by a new key and `proof` by `space`."""

    id: str
    sig: str
    space: str = ""
    proof: str = ""


class RedemptionError(msgspec.Struct, forbid_unknown_fields=True):
    code: str
    message: str


@operation("admin redeemed", caller="admin")
class ReportRedemptionRequest(Request[EmptyAnswer]):
    """Report the outcome of an invitation that a key accepted. No `error` means success."""

    invitation: str
    id: str
    error: RedemptionError | None = None
