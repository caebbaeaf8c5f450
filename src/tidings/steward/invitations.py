"""Whoever was invited asks here for what its line promises: a place as an agent, or a link with its space.

    offer    (of a link) shown to every key that the invitation is still open for; nothing is taken by asking
    redeem   checked, done by an administrator, answered; asking again with the same key answers the same

The steward holds no key that mints, so it asks the supervisor for an administrator and waits for what that says. Before
a process is started for anybody everything that can be checked is: the new key's signature, what the invitation still
promises, and that nobody else is being given something by it. Who has it already is answered with no process at all.
Answers are sealed for the key that asked, because everybody who has the line hears what comes back.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidings.admin.agents import Ledger
from tidings.admin.invitations import Invitation, Invitations, LinkPromise
from tidings.admin.link_inviting import LinkReview, lost_words
from tidings.contract.admin import (
    ACCEPT_WAIT,
    Grant,
    GrantedAgent,
    LinkGrant,
    OfferedLink,
    OfferRequest,
    PlaceGrant,
    RedeemRequest,
    RedemptionError,
    ReportRedemptionRequest,
    SealedAnswer,
)
from tidings.contract.core import Caller, EmptyAnswer
from tidings.errors import (
    ERRORS_BY_CODE,
    AuthRevoked,
    ConflictError,
    DeniedError,
    NameTaken,
    StewardUnreachable,
    TidingsError,
)
from tidings.rpc.dispatch import handler
from tidings.steward.context import Lifecycle, SpaceContext
from tidings.steward.requests import Idle
from tidings.wire.invitations import acceptance
from tidings.wire.link_terms import SignedAcceptance, asking, signature_bytes
from tidings.wire.names import check_agent_id
from tidings.wire.signing import sealed_for, verify

#: seconds until an administrator has answered; whoever asked asks again
PATIENCE = ACCEPT_WAIT
#: invitations that are being accepted at once: each is a process for a second or two
AT_ONCE = 4
#: seconds before a line that an administrator refused starts another
AGAIN_AFTER = 3.0
log = logging.getLogger(__name__)


@dataclass(slots=True)
class InvitationHandlers:
    space: SpaceContext
    life: Lifecycle
    idle: Idle
    #: invitation -> the key that is being given what it promises, and what will be said of that
    _asked: dict[str, tuple[str, asyncio.Future[None]]] = field(default_factory=dict)
    #: invitation -> before when nobody is asked for it again: what was refused once would be so again
    _later: dict[str, float] = field(default_factory=dict)
    #: invitation -> how often a key asked that it does not know
    _refused: Counter[str] = field(default_factory=Counter)

    @property
    def invitations(self) -> Invitations:
        return Invitations.below(self.space.home, self.space.info.id)

    @property
    def _review(self) -> LinkReview:
        return LinkReview(self.space.home, self.space.info.id, self.space.table.steward_key)

    @handler(OfferRequest)
    async def offer(self, caller: Caller, request: OfferRequest) -> SealedAnswer:
        """Returns the link that an invitation offers."""
        user = check_agent_id(request.id)
        said = asking(self.space.info.name, caller.id, user)
        _check_signature(user, said, request.sig)
        self._check_not_lost(caller, request, said)
        promise = self._promised(caller.id, user, for_link=True).link
        assert promise is not None
        self._review.offered(promise, user)
        return _sealed(user, OfferedLink(promise.offer, promise.signature))

    @handler(RedeemRequest)
    async def redeem(self, caller: Caller, request: RedeemRequest) -> SealedAnswer:
        """Gives the key that signed what its invitation promises: with `text` a link, else a place in the space."""
        key, for_link = check_agent_id(request.id), request.text is not None
        if request.text is not None:
            asked = SignedAcceptance(request.text, request.sig, request.proof)._asdict()
        else:
            asked = {"name": request.name}
            _check_signature(key, acceptance(self.space.info.name, caller.id, key, request.name), request.sig)
        invitation = self._promised(caller.id, key, for_link=for_link)
        answer = self._granted(invitation, key, asked)
        if answer is None:
            await self._have_it_done(caller.id, key, asked)
            answer = self._granted(self.invitations.get(caller.id) or invitation, key, asked)
        if answer is None:
            raise ConflictError("what was given was taken away again: ask for another invitation")
        return _sealed(key, answer)

    def _promised(self, invitation_id: str, key: str, *, for_link: bool) -> Invitation:
        """What this key may ask for; DeniedError says why not."""
        try:
            return self.invitations.promised(invitation_id, key, for_link=for_link)
        except DeniedError:
            found = self.invitations.get(invitation_id)
            if found is not None and found.is_tried_by_stranger(key, time.time()):
                self._refused[invitation_id] += 1
                if self._refused[invitation_id] == 1:
                    log.warning("invitation %s was tried by %s, and was used or has expired before", found.id, key)
            raise

    def _granted(self, invitation: Invitation, key: str, asked: dict[str, str]) -> Grant | None:
        """What a key that has what it asks for is answered; None if an administrator is to give it."""
        if invitation.link is not None:
            return self._granted_link(invitation.link, key, SignedAcceptance(**asked))
        return self._granted_place(invitation, key, asked["name"])

    def _granted_place(self, invitation: Invitation, agent: str, name: str) -> PlaceGrant | None:
        """The same as in a bundle, without the seed."""
        held = self.space.access(agent)
        if held is not None and held.revoked:
            raise AuthRevoked(f"agent {held.name} was revoked: ask for another invitation")
        if held is None or agent not in invitation.taken:
            wanted = invitation.name_for(name)
            if not invitation.replaces and self.space.table.owner_named(wanted) is not None:
                raise NameTaken(f"there is an agent {wanted} already: choose another name")
            return None
        renewed = Ledger(self.space.home.issued).renewed(agent, held.iat or 0)
        info = self.space.home.read_info()
        return PlaceGrant(
            space_id=info.id,
            steward_key=info.steward_key,
            agent=GrantedAgent(held.name, agent),
            succeeds=tuple(self.space.predecessors(agent)),
            jwt=renewed.token if renewed is not None else held.jwt or "",
            **self._where(),
        )

    def _granted_link(self, promise: LinkPromise, user: str, said: SignedAcceptance) -> LinkGrant | None:
        review = self._review
        offer, accepted, row = review.accepted(promise, user, said)
        if row is None or row.state != "on" or not review.peers.has(row.link, offer.user, accepted.url):
            return None
        if row.peer != user:
            raise ConflictError("the link was made and has another user since: ask for another invitation")
        return LinkGrant(
            link=row.link,
            jwt=row.token,
            called=row.terms["space"],
            unreached=promise.unreached,
            **self._where(),
        )

    def _check_not_lost(self, caller: Caller, request: OfferRequest, said: bytes) -> None:
        """A linked space that asks by its own line with another key has lost the one it had: an older copy of it was
        put back. It proves to be that space, and is no stranger who has the line."""
        space, found = request.space, self.invitations.get(caller.id)
        if not space or found is None or found.link is None or not found.taken or request.id in found.taken:
            return
        row = self._review.links.get(found.link.link)
        if row is not None and row.origin == space and verify(space, said, signature_bytes(request.proof)):
            raise DeniedError(lost_words(self.space.info.name, row.link))

    async def _have_it_done(self, invitation: str, key: str, asked: dict[str, str]) -> None:
        """Ask the supervisor for what an administrator does for this key, and wait for that."""
        tell = self.life.tell_supervisor
        if tell is None:
            raise StewardUnreachable("nobody here can accept an invitation: the space is not run by `tidings up`")
        now = time.monotonic()
        if invitation in self._asked or len(self._asked) >= AT_ONCE or now < self._later.get(invitation, 0.0):
            raise ConflictError("somebody is being given a place just now: ask again in a moment")
        said: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked[invitation] = (key, said)
        try:
            tell({"redeem": {"invitation": invitation, "agent": key, "asked": asked}})
            async with self.idle(), asyncio.timeout(PATIENCE):
                await said
        except TimeoutError:
            raise ConflictError(f"it took more than {PATIENCE:.0f} s: ask again with the same key") from None
        except TidingsError:
            kept = {each: until for each, until in self._later.items() if until > now}
            self._later = {**kept, invitation: time.monotonic() + AGAIN_AFTER}
            raise
        finally:
            del self._asked[invitation]

    @handler(ReportRedemptionRequest)
    async def redeemed(self, _caller: Caller, request: ReportRedemptionRequest) -> EmptyAnswer:
        """Passes the outcome to the request that waits for it. If none does, the key asks again."""
        agent, said = self._asked.get(request.invitation, ("", None))
        if said is not None and agent == request.id and not said.done():
            said.set_exception(_error_of(request.error)) if request.error else said.set_result(None)
        return EmptyAnswer()

    def _where(self) -> dict[str, Any]:
        """Returns how the space is reached, and whose certificates to trust: fields of a `Grant`."""
        info = self.space.home.read_info()  # it may have changed since we started
        return {
            "authority": info.trusted,
            "authority_bytes": len(base64.b64decode(info.authority)),
            "servers": info.servers,
            "port": info.port if info.listen else 0,
            "ws_port": info.ws_port if info.ws else 0,
        }

    def problems(self) -> list[str]:
        """Every agent may ask for health, so nothing of what was promised is said here."""
        return [
            f"invitation {invitation[:12]} was used, and keys that it is not for asked by it since ({count} times): "
            f"its line is in other hands; `tidings invitation revoke {invitation[:12]}`, and look at who took it"
            for invitation, count in self._refused.items()
            if not self._is_revoked(invitation)
        ]

    def _is_revoked(self, invitation: str) -> bool:
        found = self.invitations.get(invitation)
        return found is None or found.revoked


def _check_signature(key: str, said: bytes, signature: str) -> None:
    if not verify(key, said, signature_bytes(signature)):
        raise DeniedError("this request is not signed by the key that it names")


def _sealed(key: str, answer: OfferedLink | Grant) -> SealedAnswer:
    return SealedAnswer(sealed_for(key, msgspec.json.encode(answer)))


def _error_of(error: RedemptionError) -> TidingsError:
    return ERRORS_BY_CODE.get(error.code, TidingsError)(error.message)
