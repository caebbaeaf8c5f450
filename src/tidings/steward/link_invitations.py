"""Another space accepts a link here: it is told what is offered, and what it accepts is checked and made.

As with agents (`invitations.py`) everything that can be checked is before a process is started for anybody, and what is
answered is sealed for the key that asked. What was offered is shown to every key that the invitation is still open for;
the first whose acceptance is whole takes it.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from tidings.admin.invitations import LinkPromise
from tidings.admin.link_inviting import (
    LinkKeys,
    check_acceptor,
    check_newest,
    check_renewable,
    check_unchanged,
    is_kept,
    is_made,
    judged,
    lost_words,
)
from tidings.admin.link_peers import LinkPeers
from tidings.admin.link_registry import AgreedLink, LinkLedger
from tidings.errors import ConflictError, DeniedError
from tidings.steward.context import SpaceContext
from tidings.steward.invitations import InvitationHandlers
from tidings.steward.requests import Answer, ControlRequest, handles
from tidings.wire.link_terms import SignedAcceptance, asking, read_offer, signature_bytes
from tidings.wire.names import check_agent_id
from tidings.wire.signing import sealed_for, verify


@dataclass(frozen=True, slots=True)
class LinkInvitationHandlers:
    space: SpaceContext
    invited: InvitationHandlers

    @property
    def ledger(self) -> LinkLedger:
        return LinkLedger.below(self.space.home, self.space.info.id)

    @handles("accept", "offer")
    async def offer(self, request: ControlRequest) -> Answer:
        """What the line offers. Nothing is taken by asking."""
        user, said = (
            check_agent_id(request.text("id")),
            asking(self.space.info.name, request.sender, request.text("id")),
        )
        if not verify(user, said, signature_bytes(request.text("sig"))):
            raise DeniedError("this request is not signed by the key that it names")
        self._check_not_lost(request, user, said)
        promise = self._promise(request.sender, user)
        offer = read_offer(promise.offer, promise.signature)
        if offer.steward != self.space.table.steward_key:
            raise DeniedError(
                "the space has another key of its steward since it invited you: ask for another invitation"
            )
        if promise.renews and not is_made(self.ledger.get(promise.link), promise, user):
            # whoever accepts cuts the user it had first: what would be refused then is refused before
            check_renewable(self.ledger, promise)
            check_newest(LinkKeys(self.space.home), offer)
        return _sealed(user, {"offer": promise.offer, "signature": promise.signature})

    @handles("accept", "link")
    async def link(self, request: ControlRequest) -> Answer:
        """Have the link made that is accepted. Asking again, for the same, answers the same."""
        user = check_agent_id(request.text("id"))
        said = SignedAcceptance(request.text("text"), request.text("sig"), request.text("proof"))
        promise = self._promise(request.sender, user)
        offer, acceptance, _ = judged(promise, user, said, self.space.table.steward_key)
        row = self.ledger.get(promise.link)
        if is_made(row, promise, user):
            check_unchanged(row, promise, said)
        else:
            check_acceptor(self.ledger, promise, acceptance)
            row = None
        if row is None or row.state != "on" or not is_kept(LinkPeers.below(self.space.home), acceptance, offer.user):
            asked = {"invitation": request.sender, "agent": user, **said._asdict()}
            await self.invited.have_it_done(request.sender, user, {"redeem_link": asked})
            row = self.ledger.get(promise.link)
        if row is None or row.state != "on" or row.peer != user:
            raise ConflictError("the link was made and removed again: ask for another invitation")
        return _sealed(user, self._answer(row, self._promise(request.sender, user)))

    def _check_not_lost(self, request: ControlRequest, user: str, said: bytes) -> None:
        """A linked space that asks by its own line with another key has lost the one it had: an older copy of it was
        put back. It proves to be that space, and is no stranger who has the line."""
        space, proof = request.optional("space", str) or "", request.optional("proof", str) or ""
        found = self.invited.invitations.get(request.sender)
        if not space or found is None or found.link is None or not found.taken or user in found.taken:
            return
        row = self.ledger.get(found.link.link)
        if row is not None and row.origin == space and verify(space, said, signature_bytes(proof)):
            raise DeniedError(lost_words(self.space.info.name, row.link))

    def _promise(self, invitation: str, user: str) -> LinkPromise:
        if user == invitation:
            raise DeniedError("the key of an invitation is known to whoever has its line: make another one")
        found = self.invited.promised(invitation, user)
        if found.link is None:
            raise DeniedError("this line invites an agent, and links no spaces: `tidings accept LINE`")
        return found.link

    def _answer(self, row: AgreedLink, promise: LinkPromise) -> dict[str, Any]:
        made = {"link": row.link, "jwt": row.token, "called": row.terms["space"], "unreached": promise.unreached}
        return made | self.invited.where()


def _sealed(user: str, said: dict[str, Any]) -> Answer:
    return {"sealed": base64.b64encode(sealed_for(user, json.dumps(said).encode())).decode()}
