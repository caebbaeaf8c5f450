"""What an administrator does to agree on a link with another space by one line: offer it, and take what was accepted.

    key of our user over there -> signed offer -> line
    acceptance -> taken by its key (written first) -> link record -> how the other space is reached

A line may also renew a link: its own space alone, which signs with its id, gets new keys by it, on the terms there are.

A key that has taken an offer gets the same answer however often it asks, for the same terms; another key gets none.
Nothing here is wider than the offer that the owner made: an acceptance only says how much of it is taken.
"""

from __future__ import annotations

import base64
import os
import time
from dataclasses import dataclass, field, replace

import msgspec

from tidings.admin.administration import Administrator
from tidings.admin.home import SpaceHome
from tidings.admin.invitations import Invitation, LinkPromise
from tidings.admin.inviting import Inviter, Reach
from tidings.admin.link_peers import LinkPeers, PeerAccess
from tidings.admin.link_registry import AgreedLink, LinkLedger
from tidings.admin.linking import Linker, check_until, link_record, terms_of
from tidings.errors import AuthRevoked, DeniedError, TidingsError, UsageError, WireError
from tidings.nats import jwt
from tidings.nats.address import parse_addresses
from tidings.nats.client import close_quietly, connect
from tidings.nats.errors import Unwritable
from tidings.util import failpoints
from tidings.util.private_files import read_private
from tidings.wire.invitations import InvitationLine, is_loopback
from tidings.wire.link_terms import (
    LinkAcceptance,
    LinkOffer,
    SignedAcceptance,
    check_patterns,
    check_within,
    common,
    limited,
    limits_of,
    minimal,
    read_acceptance,
    read_offer,
    restricted,
    signed_offer,
)
from tidings.wire.links import channel_map
from tidings.wire.names import MAX_TOKEN, check_space
from tidings.wire.rulings import Link, Switch
from tidings.wire.signing import KeyPair

#: seconds for which the other space is tried when a link is made
REACHED_WITHIN = 4.0


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What the owner of a space would agree on."""

    shares: tuple[str, ...] = ()
    #: channels of the other space -> what they will be called here
    takes: dict[str, str] = field(default_factory=dict)
    #: what the other space will be called; empty: by its own name
    called: str = ""
    until: int | None = None
    hops: int = 1
    direct: Switch = "off"
    roster: Switch = "off"
    tasks: Switch = "off"


class LinkInviter:
    """Links that are offered and accepted, under the admin lock."""

    def __init__(self, admin: Administrator) -> None:
        self.admin = admin
        self.inviter = Inviter(admin)
        self.peers = LinkPeers.below(admin.home)

    def invite(self, terms: LinkTerms, seconds: int, reach: Reach) -> tuple[Invitation, InvitationLine]:
        """Offer a link to the holder of a new line."""
        self._check(terms)
        return self._offer(new_link_id(), terms, seconds, reach)

    def renew(self, row: AgreedLink, seconds: int, reach: Reach) -> tuple[Invitation, InvitationLine]:
        """Offer the space of a link new keys for it, on the terms that it has; another line for that is void now."""
        if row.state not in ("setting", "on"):
            raise UsageError(f"link {row.link} was removed: `tidings link invite` makes another one")
        record = terms_of(row)
        terms = LinkTerms(record.shares, record.channels, record.space, **limits_of(record))
        self._check_passing(terms)
        return self._offer(row.link, terms, seconds, reach, renews=True)

    def _offer(
        self, link: str, terms: LinkTerms, seconds: int, reach: Reach, *, renews: bool = False
    ) -> tuple[Invitation, InvitationLine]:
        line = self.inviter.new_line(seconds, reach, for_link=True)
        offer = LinkOffer(
            invitation=line.key.id,
            link=link,
            space=self.admin.info.name,
            space_id=self.admin.info.id,
            steward=steward_key_of(self.admin.home),
            user=self.peers.make_key(link).id,
            shares=minimal(terms.shares),
            wants=minimal(terms.takes),
            renews=renews,
            **limits_of(terms),
        )
        text, signature = signed_offer(self.admin.keyring.core, offer)
        local = is_loopback(reach.host)
        promise = LinkPromise(link, text, signature, terms.takes, terms.called, local, renews=renews)
        made = self.inviter.promise(Invitation("", 0, 0, link=promise), line)
        self._forget_keys()
        return made, line

    def _check(self, terms: LinkTerms) -> None:
        if not terms.shares and not terms.takes:
            raise UsageError(
                "say what is to pass: `--share PATTERN` for what they may read, `--take THEIRS` for what you read of "
                "theirs, `--both CHANNEL` for one that you have in common"
            )
        self._check_passing(terms)
        if terms.called:
            self._check_name(terms.called)

    @staticmethod
    def _check_passing(terms: LinkTerms) -> None:
        check_patterns(terms.shares)
        channel_map(terms.takes)
        check_until(terms.until)

    def _check_name(self, name: str) -> None:
        check_space(name)
        if name in taken_names(self.admin.info.name, self.admin.links):
            raise UsageError(
                f"{name} is what this space or one that it is linked with is called here: choose another name for a "
                f"new link; `tidings link set {name}` changes one that there is"
            )
        for each in self.admin.invitations.all():
            if each.link is not None and each.link.called == name and each.state(time.time()) == "open":
                raise UsageError(
                    f"{name} is what invitation {each.id[:12]} calls the other space: choose another name, or "
                    f"`tidings invitation revoke {each.id[:12]}`"
                )

    def _forget_keys(self) -> None:
        """Of offers that nobody can accept any more."""
        offers = [
            (each.link, each.state(time.time())) for each in self.admin.invitations.all() if each.link is not None
        ]
        open_ones = {offer.link for offer, state in offers if state == "open"}
        for offer, state in offers:
            if not offer.agreed and state != "open" and offer.link not in open_ones:
                self.peers.forget_key(offer.link)

    async def redeem(self, invitation_id: str, user: str, said: SignedAcceptance) -> AgreedLink:
        """Make the link that was accepted. The same key again, with the same terms, finds it made."""
        linker = Linker(self.admin)
        await linker.finish()
        invitation = self.admin.invitations.promised(invitation_id, user, for_link=True)
        promise = invitation.link
        assert promise is not None
        review = LinkReview(self.admin.home, self.admin.info.id, steward_key_of(self.admin.home))
        offer, acceptance, row = review.accepted(promise, user, said)
        if row is None:
            channels = restricted(promise.takes, acceptance.shares)
            name = promise.called or self._free_name(acceptance)
            record = link_record(acceptance, name, channels, minimal(acceptance.takes))
            if (before := review.renewed(promise)) is not None:
                record = _renewed(record, terms_of(before), offer, acceptance)
            invitation = self.admin.invitations.put(invitation, taken=(user,), link=replace(promise, agreed=said.text))
            failpoints.reach("link_redeem.after_taken")
            row = (await linker.set(record)).row
            failpoints.reach("link_redeem.after_record")
        await self._keep_peer(invitation, acceptance, offer.user)
        return row

    def _free_name(self, acceptance: LinkAcceptance) -> str:
        """What it calls itself; if that is somebody's already, with the beginning of its id."""
        if acceptance.space not in taken_names(self.admin.info.name, self.admin.links):
            return acceptance.space
        behind = f"-{acceptance.space_id[1:7].lower()}"
        return acceptance.space[: MAX_TOKEN - len(behind)] + behind

    async def _keep_peer(self, invitation: Invitation, acceptance: LinkAcceptance, user: str) -> None:
        """How our worker reaches the other space, if it can. The key goes where it is used."""
        link = acceptance.link
        if not self.peers.has(link, user, acceptance.url):
            creds = jwt.credentials(acceptance.token, self.peers.key(link))
            if acceptance.url and acceptance.shares and invitation.link is not None:
                why = await _unreached(acceptance.url, creds, acceptance.space)
                self.admin.invitations.put(invitation, link=replace(invitation.link, unreached=why))
            if acceptance.url:
                self.peers.put(_peer_of(acceptance), creds)
            else:
                self.peers.put_creds(link, creds)
            failpoints.reach("link_redeem.after_peer")
        self.peers.forget_key(link)


async def _unreached(url: str, creds: str, space: str) -> str:
    """Why our worker will not get there, as far as one attempt tells."""
    user = jwt.split_credentials(creds)[1].id
    try:
        connection = await connect(url, creds, user, name=f"link with {space}", reconnect=False, timeout=REACHED_WITHIN)
    except TidingsError as error:
        return str(error)[:300]
    await close_quietly(connection)
    return ""


def new_link_id() -> str:
    return base64.b32encode(os.urandom(8)).decode()[:12].lower()


def steward_key_of(home: SpaceHome) -> str:
    """By which our records are known now; `space.toml` has the first one, from which rotations lead here."""
    return KeyPair(read_private(home.creds / "steward.key").strip()).id


class LinkReview:
    """What the line of a link is still good for: checked by the steward before a process is started for anybody, and by
    the administrator before anything is written."""

    def __init__(self, home: SpaceHome, space_id: str, steward_key: str) -> None:
        self.links, self.peers, self.steward_key = LinkLedger.below(home, space_id), LinkPeers.below(home), steward_key

    def offered(self, promise: LinkPromise, user: str) -> LinkOffer:
        """What the line offers to this user; DeniedError if nothing can come of that."""
        offer = read_offer(promise.offer, promise.signature)
        if offer.steward != self.steward_key:
            raise DeniedError(
                "the space has another key of its steward since it invited you: ask for another invitation"
            )
        if self._made(promise, user) is None:
            # whoever accepts a renewal cuts the user it had first: what would be refused then is refused before
            self.renewed(promise)
            if self.peers.key(offer.link).id != offer.user:
                raise DeniedError(f"a newer line was made for link {offer.link}, and takes the place of this one")
        return offer

    def accepted(
        self, promise: LinkPromise, user: str, said: SignedAcceptance
    ) -> tuple[LinkOffer, LinkAcceptance, AgreedLink | None]:
        """What was offered, what came back, and the link if it was made of both before. DeniedError if it cannot be: a
        link is renewed by its own space, and a new one is for a space without."""
        offer = self.offered(promise, user)
        acceptance = read_acceptance(promise.offer, user, said)
        check_within(offer, acceptance)
        if acceptance.until is not None and acceptance.until <= time.time():
            raise DeniedError("the link would have ended already: ask for another invitation")
        _check_address(acceptance.url, local=promise.local)
        try:
            named = jwt.decode(acceptance.token)["sub"]
        except (WireError, KeyError):
            named = None
        if named != offer.user:
            raise DeniedError("the token is not one of the user that the offer names")
        if (row := self._made(promise, user)) is None:
            before = self.renewed(promise)
            if before is None:
                check_unlinked(self.links, acceptance.space_id)
            elif before.origin != acceptance.space_id:
                raise DeniedError(f"this line renews link {promise.link}, which is with another space than yours")
        elif row.state in ("ending", "off"):
            raise AuthRevoked(f"link {row.link} was removed since: ask for another invitation")
        elif promise.agreed != said.text:
            raise DeniedError(
                "this invitation was accepted with other terms, by the same key: repeat those, or ask again"
            )
        return offer, acceptance, row

    def _made(self, promise: LinkPromise, user: str) -> AgreedLink | None:
        """The link that a line promised. One that it renews is there before, with another user."""
        row = self.links.get(promise.link)
        return row if row is not None and (row.peer == user or not promise.renews) else None

    def renewed(self, promise: LinkPromise) -> AgreedLink | None:
        """The link that a line renews, which there must still be; None of a line for a new one."""
        row = self.links.get(promise.link) if promise.renews else None
        if promise.renews and (row is None or row.state in ("ending", "off")):
            raise DeniedError(f"link {promise.link} was removed since: ask for another invitation")
        return row


def _check_address(url: str, *, local: bool) -> None:
    """Where we will connect to because somebody else said so: never in plain, and never to ourselves by accident."""
    try:
        addresses = parse_addresses(url) if url else []
    except Unwritable as error:
        raise DeniedError(f"this is no address that the space could be reached at: {error}") from error
    for each in addresses:
        if is_loopback(each.host) and not local:
            raise DeniedError(f"{each.url} leads to your own machine from there: name another address with --url")
        if not each.tls and not is_loopback(each.host):
            raise DeniedError(f"{each.url} would be spoken to in plain: let your space listen with TLS (`--listen`)")


def check_unlinked(ledger: LinkLedger, space_id: str) -> None:
    for row in ledger.rows():
        if row.origin == space_id and row.state not in ("ending", "off"):
            raise DeniedError(
                f"there is a link between these two spaces already ({row.link}): `tidings link set {row.link}` changes "
                f"what passes, `tidings link renew {row.link}` gives it new keys, and `tidings link remove {row.link}` "
                "on both sides makes room for another"
            )


def lost_words(space: str, link: str) -> str:
    """What helps a space that has lost its key of a link."""
    return (
        f"this line made link {link}, and the key that your space had of it is gone, perhaps because an older copy of "
        f"the space was put back: let the operator of {space} say `tidings link renew {link}`, and accept the line "
        "that it prints"
    )


def taken_names(own: str, ledger: LinkLedger) -> set[str]:
    """What no other space can be called here."""
    live = (row for row in ledger.rows() if row.state not in ("ending", "off"))
    return {own, *(str(row.terms.get("space", "")) for row in live)}


def _peer_of(other: LinkAcceptance) -> PeerAccess:
    return PeerAccess(link=other.link, space=other.space, id=other.space_id, steward=other.steward, url=other.url)


def _renewed(record: Link, current: Link, offer: LinkOffer, acceptance: LinkAcceptance) -> Link:
    """The record of a link that is renewed, never wider than the link is now: its operator may have changed it since
    the line was made. How many links a message may come over is each side's own, and what is beyond depends on it."""
    found = msgspec.structs.replace(
        limited(msgspec.structs.replace(record, hops=offer.hops), current),
        channels=restricted(current.channels, acceptance.shares),
        shares=common(record.shares, current.shares),
    )
    if not (found.channels or found.beyond or found.shares):
        raise DeniedError(f"link {record.link} was changed since, and nothing would pass: ask for another line")
    if found.has_ended(time.time_ns()):
        raise DeniedError(f"link {record.link} was changed since, and has ended: ask for another line")
    return found
