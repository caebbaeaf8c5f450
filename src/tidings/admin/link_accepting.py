"""Accepting a link: another space's offer is read and agreed to, and both spaces write it down.

    line -> offer, signed by the other space -> shown to our operator -> our link record, with a user for its worker
         -> acceptance, signed by our space -> the other space's record, and a token for our worker -> how it is reached

Each step is on disk before the next one (`links/accepting/<invitation>.json`): whoever is interrupted accepts the same
line again, and it goes on from there with what was agreed. If the other space refuses, our record is ended again. The
key of our worker's user is made here and never travels.

A line may also renew a link that there is: both sides get new users, and keep what they agreed on and how they call it.
What was interrupted or refused then ends nothing.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidings.admin.accepting import Handshake, Progress, Tell, one_at_a_time, read_progress
from tidings.admin.administration import Administrator, administer
from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.admin.link_inviting import check_unlinked, lost_words, steward_key_of, taken_names
from tidings.admin.link_peers import LinkPeers, PeerAccess
from tidings.admin.link_registry import LinkLedger
from tidings.admin.linking import Linker, check_until, link_record, terms_of
from tidings.admin.listening import address_for
from tidings.contract.admin import LinkGrant, OfferedLink, OfferRequest, RedeemRequest
from tidings.errors import AuthRevoked, ConflictError, DeniedError, UsageError, WireError
from tidings.nats.address import parse_addresses
from tidings.util import failpoints
from tidings.wire.invitations import InvitationLine, check_kind, is_loopback
from tidings.wire.link_terms import (
    SWITCHES,
    LinkAcceptance,
    LinkOffer,
    SignedAcceptance,
    asking,
    check_within,
    common,
    earliest,
    hash_of,
    limited,
    limits_of,
    minimal,
    read_offer,
    renamed,
    restricted,
    signed_acceptance,
)
from tidings.wire.names import check_space, covers_pattern
from tidings.wire.rulings import Link


@dataclass(frozen=True, slots=True)
class LinkWishes:
    """What the operator who accepts wants otherwise than it is offered; never more."""

    #: what the other space is called here; empty: by its own name
    called: str = ""
    #: channels of theirs -> what they are called here
    names: dict[str, str] = field(default_factory=dict)
    #: take only this of what they share, share only this of what they want; None: all of it
    only: tuple[str, ...] | None = None
    share: tuple[str, ...] | None = None
    until: int | None = None
    direct: bool = True
    roster: bool = True
    tasks: bool = True
    #: where the other space reaches ours, if our space does not know
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is about to be agreed, for the operator to look at."""

    offer: LinkOffer
    #: our link record as it would be
    record: Link
    #: where the other space will find ours; empty: nowhere
    url: str


@dataclass(frozen=True, slots=True)
class AcceptedLink:
    record: Link
    #: what the other space calls ours
    known_as: str
    peer: PeerAccess
    #: where the other space will find ours; empty: nowhere
    url: str
    #: why it could not be reached there when the other space tried; empty: it could, or need not be
    unreached: str = ""
    #: was it there before?
    already: bool = False


class _Progress(Progress, frozen=True, kw_only=True):
    """Of a link. The seed is of our worker's user at the other broker."""

    #: the link that we are making, once the operator agreed to it
    link: str = ""
    #: it was there before, and is renewed: whatever is refused or interrupted does not end it
    had: bool = False
    offer: str = ""
    signature: str = ""
    #: what we said, or are about to say
    said: SignedAcceptance | None = None
    #: what the other space calls ours, once it is done
    known_as: str = ""
    unreached: str = ""
    done: bool = False


#: shown what is about to be agreed; raises if that is not wanted
Agree = Callable[[Proposal], None]


async def accept_link(
    home: SpaceHome, line: InvitationLine, wishes: LinkWishes, agree: Agree, tell: Tell = lambda _text: None
) -> AcceptedLink:
    """Link this space with the one that made the line."""
    check_kind(line, for_link=True)
    home.read_info()
    with one_at_a_time(home.link_accepting):
        return await _Acceptor(home, line, tell).run(wishes, agree)


class _Acceptor(Handshake[_Progress]):
    def __init__(self, home: SpaceHome, line: InvitationLine, tell: Tell) -> None:
        super().__init__(home.link_accepting, line, _Progress, tell)
        self.home = home

    async def run(self, wishes: LinkWishes, agree: Agree) -> AcceptedLink:
        if self.progress.done:
            return await self._found()
        if self.progress.said is None:
            await self._agree(wishes, agree)
        else:
            self.tell(f"going on with link {self.progress.link}, with what was agreed before")
            await self._check_ours()
        return await self._have_it_accepted()

    async def _found(self) -> AcceptedLink:
        """The same line again."""
        link = self.progress.link
        async with administer(self.home, "looking at a link") as admin:
            row, peer = admin.links.get(link), LinkPeers.below(self.home).get(link)
        if row is None or row.state != "on" or peer is None:
            raise UsageError(f"this line made link {link}, which was removed since: ask for another invitation")
        return self._accepted(terms_of(row), peer, already=True)

    def _accepted(self, record: Link, peer: PeerAccess, *, already: bool = False) -> AcceptedLink:
        known = self.progress
        return AcceptedLink(record, known.known_as, peer, self._url, known.unreached, already)

    @property
    def _url(self) -> str:
        """Where we said that we are."""
        assert self.progress.said is not None
        return msgspec.json.decode(self.progress.said.text, type=LinkAcceptance).url

    # --- our side ---

    async def _agree(self, wishes: LinkWishes, agree: Agree) -> None:
        self._check_not_lost()
        if self.progress.link and not self.progress.had:  # interrupted before anybody was told
            await _end(self.home, self.progress.link, "its acceptance was interrupted")
        text, signature = await self._ask_offer()
        offer, info = self._checked(read_offer(text, signature)), self.home.read_info()
        await self._give_up_others(offer)
        async with administer(self.home, "looking at links") as admin:
            proposal = self._proposal(admin, offer, info, wishes)
        agree(proposal)
        async with administer(self.home, "accepting a link") as admin:
            self._check_free(admin, offer, proposal.record.space)
            held = admin.links.get(offer.link)
            had = held is not None and held.state in ("setting", "on")
            self.change(link=offer.link, had=had, offer=text, signature=signature)
            failpoints.reach("link_accept.after_kept")
            row = (await Linker(admin).set(proposal.record, line=self.line.key.id)).row
            failpoints.reach("link_accept.after_record")
            acceptance = self._acceptance(offer, hash_of(text), proposal, info, row.token)
            self.change(said=signed_acceptance(admin.keyring.core, self.key, acceptance))
        failpoints.reach("link_accept.after_said")

    def _check_not_lost(self) -> None:
        """A line that was accepted here, of which nothing is left: whoever asked with another key would look like a
        thief of the line."""
        if not self.is_new:
            return
        for row in LinkLedger.below(self.home, self.home.read_info().id).rows():
            if row.line == self.line.key.id and row.state in ("setting", "on"):
                self.path.unlink()
                raise UsageError(lost_words(self.line.space, row.link))

    async def _ask_offer(self) -> tuple[str, str]:
        said = asking(self.line.space, self.line.key.id, self.key.id)
        async with administer(self.home, "asking for what a line offers") as admin:
            proof = admin.keyring.core.sign(said)
        request = OfferRequest(
            id=self.key.id,
            sig=base64.b64encode(self.key.sign(said)).decode(),
            space=self.home.read_info().id,
            proof=base64.b64encode(proof).decode(),
        )
        offered = await self.call(request, OfferedLink)
        return offered.offer, offered.signature

    def _checked(self, offer: LinkOffer) -> LinkOffer:
        if (offer.invitation, offer.space) != (self.line.key.id, self.line.space):
            raise DeniedError("the space answered with an offer that is not this line's: ask for another invitation")
        if offer.space_id == self.home.read_info().id:
            raise UsageError("this line is of this very space: the operator of another one accepts it")
        return offer

    async def _give_up_others(self, offer: LinkOffer) -> None:
        """Lines of the same space whose acceptance was never finished: their links are ended, this one takes over."""
        for path in self.home.link_accepting.glob("U*.json"):
            other = read_progress(path, _Progress)
            if path == self.path or other.done or not other.link:
                continue
            if read_offer(other.offer, other.signature).space_id == offer.space_id:
                path.unlink()
                if other.had:
                    continue
                await _end(self.home, other.link, "another invitation of the same space was accepted")
                self.tell(f"gave up link {other.link}, which was never finished")

    def _proposal(self, admin: Administrator, offer: LinkOffer, info: SpaceInfo, wishes: LinkWishes) -> Proposal:
        row = admin.links.get(offer.link) if offer.renews else None
        before = terms_of(row) if row is not None else None
        called = check_space(wishes.called) if wishes.called else before.space if before else offer.space
        self._check_free(admin, offer, called)
        channels, shares = _chosen(offer, wishes, before)
        check_until(wishes.until)
        switches = {name: getattr(offer, name) if getattr(wishes, name) else "off" for name in SWITCHES}
        until = earliest(offer.until, wishes.until)
        record = link_record(offer, called, channels, shares, until=until, **switches)
        record = _as_before(record, before) if before else record
        proposal = Proposal(offer, record, self._own_address(info, wishes.urls))
        check_within(offer, self._acceptance(offer, "", proposal, info, ""))  # what would be refused is not asked for
        return proposal

    def _check_free(self, admin: Administrator, offer: LinkOffer, called: str) -> None:
        row = admin.links.get(offer.link)
        if row is not None and offer.renews and (self.progress.had or self.progress.link != offer.link):
            if row.origin != offer.space_id or row.state not in ("setting", "on"):
                raise DeniedError(
                    f"link {offer.link} was removed here: it is to be removed there too (`tidings link remove "
                    f"{offer.link}`), and another one is made by `tidings link invite`"
                )
        elif row is not None and self.progress.link != offer.link:
            raise DeniedError(f"there was a link {offer.link} here before: ask for another invitation")
        if row is None or row.state not in ("setting", "on"):
            check_unlinked(admin.links, offer.space_id)
        own = row.terms.get("space") if row is not None else None
        if called in taken_names(admin.info.name, admin.links) and called != own:
            raise UsageError(
                f"{called} is what this space or one that it is linked with is called here: choose what to call the "
                "other space, `tidings link accept LINE --as NAME`"
            )

    def _own_address(self, info: SpaceInfo, urls: tuple[str, ...]) -> str:
        """Where the other space may look for ours: with TLS, or both on one machine."""
        if urls:
            return address_for(info, urls)
        local = is_loopback(self.line.host)
        known = address_for(info, ()) if info.listen or info.ws or info.servers else info.url
        found = [each for each in parse_addresses(known) if (local if is_loopback(each.host) else each.tls)]
        return ",".join(each.full_url for each in found)

    def _acceptance(
        self, offer: LinkOffer, offered: str, proposal: Proposal, info: SpaceInfo, token: str
    ) -> LinkAcceptance:
        record = proposal.record
        return LinkAcceptance(
            invitation=offer.invitation,
            link=offer.link,
            space=info.name,
            space_id=info.id,
            steward=steward_key_of(self.home),
            user=self.key.id,
            shares=record.shares,
            offer=offered,
            takes=minimal(record.channels),
            url=proposal.url,
            token=token,
            **limits_of(record),
        )

    async def _check_ours(self) -> None:
        """Our record is as it was when we said so."""
        async with administer(self.home, "accepting a link") as admin:
            await Linker(admin).finish()
            row = admin.links.get(self.progress.link)
        if row is None or row.state != "on":
            raise UsageError(f"link {self.progress.link} was removed here since: ask for another invitation")

    # --- the other side ---

    async def _have_it_accepted(self) -> AcceptedLink:
        said = self.progress.said
        assert said is not None
        try:
            grant = await self.call(RedeemRequest(id=self.key.id, **said._asdict()), LinkGrant)
        except (DeniedError, UsageError) as error:
            await self._take_back(error)
            raise
        failpoints.reach("link_accept.after_answer")
        return await self._keep(grant)

    async def _take_back(self, error: Exception) -> None:
        """It will not come to it: what we wrote is ended. The key stays, for the same line with other terms."""
        link, had = self.progress.link, self.progress.had
        if not had:
            await _end(self.home, link, f"the other space refused: {error}")
        self.put(_Progress(seed=self.progress.seed))
        if had:
            self.tell(
                f"link {link} stays as it is agreed, and what it takes waits: ask for another line that renews it"
            )
        elif isinstance(error, AuthRevoked):
            self.tell(
                f"if the other space lists a link {link}, it is to be removed there: `tidings link remove {link}`"
            )

    async def _keep(self, grant: LinkGrant) -> AcceptedLink:
        offer = read_offer(self.progress.offer, self.progress.signature)
        called = check_space(grant.called)
        creds, url = self.granted(grant)
        if grant.link != offer.link:
            raise WireError("the space linked something else than was agreed")
        peer = PeerAccess(link=offer.link, space=offer.space, id=offer.space_id, steward=offer.steward, url=url)
        async with administer(self.home, "accepting a link") as admin:
            row = admin.links.get(offer.link)
            if row is None or row.state != "on":
                raise ConflictError(f"link {offer.link} was removed here meanwhile: it is to be removed there too")
            LinkPeers.below(self.home).put(peer, creds)
            failpoints.reach("link_accept.after_peer")
            self.change(done=True, seed="", known_as=called, unreached=grant.unreached[:300])
        return self._accepted(terms_of(row), peer)


async def _end(home: SpaceHome, link: str, why: str) -> None:
    async with administer(home, "giving up a link") as admin:
        if admin.links.get(link) is not None:
            await Linker(admin).end(link, why)
        LinkPeers.below(home).forget(link)


def _chosen(offer: LinkOffer, wishes: LinkWishes, before: Link | None) -> tuple[dict[str, str], tuple[str, ...]]:
    """What we take under which names, and what we share: of what is offered and wanted, as much as we like. `before`:
    the link that is renewed, of which as much stays as is offered."""
    offered = restricted(before.channels, offer.shares) if before else {each: each for each in offer.shares}
    channels = renamed(offered, wishes.names)
    if wishes.only is not None:
        taken = restricted(channels, wishes.only)
        _check_chosen("--only", wishes.only, taken, offer.shares)
        channels = taken
    shares = common(before.shares, offer.wants) if before else offer.wants
    if wishes.share is not None:
        shares = common(wishes.share, offer.wants)
        _check_chosen("--share", wishes.share, shares, offer.wants)
    if not channels and not shares:
        raise UsageError("nothing would pass: take or share something of what is offered, or do not accept it")
    return channels, shares


def _as_before(record: Link, before: Link) -> Link:
    """A link that is renewed is no wider than its own operator has it."""
    if before.has_ended(time.time_ns()):
        raise UsageError(
            f"link {record.link} has ended here: `tidings link set {before.space or record.link} --until TIME` says "
            "until when it is to be, and the same line can be accepted then"
        )
    return limited(record, before)


def _check_chosen(option: str, wanted: tuple[str, ...], found: Any, offered: tuple[str, ...]) -> None:
    """Each of what was named must stand for something."""
    for each in wanted:
        if not any(covers_pattern(each, one) or covers_pattern(one, each) for one in found):
            raise UsageError(f"{option} {each}: that is not offered; it is {', '.join(offered) or 'nothing'}")
