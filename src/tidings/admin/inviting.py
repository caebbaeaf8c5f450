"""What an administrator does with invitations: make one, revoke one, give an agent's place to whoever accepted.

    open -> taken by a key (written first) -> that key is an agent

A key that has taken an invitation gets the same answer however often it asks; another key gets none. Only here is the
key of the account INVITE used.
"""

from __future__ import annotations

import base64
import os
import time
from dataclasses import dataclass

from tidings.admin.administration import Administrator
from tidings.admin.agents import CUT, Issued
from tidings.admin.invitations import Invitation
from tidings.admin.listening import address_for
from tidings.errors import AuthRevoked, DeniedError, NameTaken, UsageError
from tidings.nats.address import Address, parse_addresses
from tidings.server.certificates import compressed_key
from tidings.server.grants import invitation_text
from tidings.util import failpoints
from tidings.wire.invitations import LONGEST, InvitationLine, Trust, parse_invitation
from tidings.wire.signing import key_of_seed

SHORTEST, LONGEST_TIME, MOST_USES = 60, 30 * 86_400, 1_000


@dataclass(frozen=True, slots=True)
class Reach:
    """How whoever accepts finds the space, and whom to trust there."""

    host: str
    port: int
    trust: Trust
    authority: bytes = b""
    websocket: bool = False
    greets_first: bool = False


class Inviter:
    """Invitations under the admin lock."""

    def __init__(self, admin: Administrator) -> None:
        self.admin = admin
        self.known = admin.invitations

    def invite(self, promised: Invitation, seconds: int, reach: Reach) -> tuple[Invitation, InvitationLine]:
        """Promise what `promised` says to the holder of a new line."""
        self._check(promised)
        line = self.new_line(seconds, reach)
        return self.promise(promised, line), line

    def new_line(self, seconds: int, reach: Reach, *, for_link: bool = False) -> InvitationLine:
        """A line that opens nothing until something is promised to whoever has it."""
        if not SHORTEST <= seconds <= LONGEST_TIME:
            raise UsageError("an invitation holds for a minute to 30 days: `--expires 1h`")
        key, issued = key_of_seed(os.urandom(32)), int(time.time())
        account, when = self.admin.keyring.invite, (issued, issued + seconds)
        text = invitation_text(self.admin.subjects, account.id, key.id, *when, for_link=for_link)
        line = InvitationLine(
            self.admin.info.name,
            reach.host,
            reach.port,
            key,
            account.id,
            issued,
            seconds,
            account.sign(text.encode()),
            reach.trust,
            reach.authority,
            reach.websocket,
            reach.greets_first,
            for_link,
        )
        parse_invitation(str(line))  # what nobody could accept is not promised
        if len(str(line)) > LONGEST:
            raise UsageError(
                f"the line would have {len(str(line))} characters, and {LONGEST} can be pasted anywhere: name a "
                "shorter address with --url"
            )
        return line

    def promise(self, promised: Invitation, line: InvitationLine) -> Invitation:
        self.known.forget_old()
        return self.known.put(promised, id=line.key.id, issued=line.issued, expires=line.expires)

    def _check(self, promised: Invitation) -> None:
        if not 1 <= promised.uses <= MOST_USES:
            raise UsageError(f"an invitation can be used 1 to {MOST_USES} times")
        if promised.uses > 1 and promised.name:
            raise UsageError("an invitation for several leaves the name to each of them: leave it out")
        if promised.name and not promised.replaces:
            self.admin.check_free_name(promised.name)
            self._check_unpromised(promised.name, "")
        promised.agent(promised.name or "someone")  # rights that could not be granted are refused now

    async def revoke(self, invitation: Invitation, why: str = "") -> Invitation:
        """Void, and whoever is connected with it is cut. An agent it already made stays."""
        invitation = self.known.put(invitation, revoked=True, why=why)
        failpoints.reach("uninvite.after_put")
        await self.admin.push_invitations()
        return invitation

    async def redeem(self, invitation_id: str, agent_id: str, name: str) -> Issued:
        """Make the key an agent. The same key again finds it made."""
        await self.admin.finish()
        invitation = self.known.promised(invitation_id, agent_id, for_link=False)
        row = self.admin.ledger.get(agent_id)
        if row is not None and row.state in CUT:
            raise AuthRevoked(f"agent {row.name} was revoked: ask for another invitation")
        if row is not None:
            if not (self.admin.home.agents / f"{row.name}.md").exists():  # interrupted before it was written
                self.admin.write_file(invitation.agent(row.name))
            return row
        agent = invitation.agent(invitation.name_for(name))
        before = self._replaced(invitation)
        if before is None:
            self._check_free(agent.name, invitation.id)
        if agent_id not in invitation.taken:
            invitation = self.known.put(invitation, taken=(*invitation.taken, agent_id))
        failpoints.reach("redeem.after_taken")
        row = await self.admin.issue(
            agent,
            agent_id,
            succeeds=before.id if before else "",
            withheld=before.withheld if before else "",
            invited=invitation.id,
            lifetime=invitation.lifetime,
        )
        self.admin.write_file(agent)
        if before is not None:
            await self.admin.cut(before)
        return row

    def _check_free(self, name: str, invitation_id: str) -> None:
        """In words for whoever accepts, who can do nothing here."""
        try:
            self.admin.check_free_name(name)
        except NameTaken:
            raise NameTaken(
                f"there is an agent {name} already, or one of nearly that name: choose another name"
            ) from None
        self._check_unpromised(name, invitation_id)

    def _check_unpromised(self, name: str, but: str) -> None:
        """A name that another open invitation promises is not free."""
        for each in self.known.all():
            if each.name == name and each.id != but and each.state(time.time()) == "open":
                raise NameTaken(
                    f"the name {name} is promised to somebody else (invitation {each.id[:12]}): choose another, or let "
                    f"who invites revoke that one"
                )

    def _replaced(self, invitation: Invitation) -> Issued | None:
        """The key that goes, as long as it is the one that was meant."""
        if not invitation.replaces:
            return None
        held = self.admin.ledger.active(invitation.name)
        if held is None or held.id != invitation.replaces:
            raise DeniedError(f"agent {invitation.name} has another key since: ask for another invitation")
        return held

    def replacing(self, name: str, uses: int) -> Invitation:
        """An invitation by which an agent that exists gets a key elsewhere, with the rights it has."""
        held = self.admin.ledger.active(name)
        if held is None:
            raise UsageError(f"there is no agent {name} to replace: `tidings invite {name}` makes one")
        rights = (held.read, held.post, held.manage, held.roles)
        return Invitation("", 0, 0, uses, name, *rights, replaces=held.id, lifetime=held.lifetime)


def reach_of(admin: Administrator, url: str | None) -> Reach:
    """From where it can be accepted: the address others use, or the one that was named."""
    info = admin.info
    address = parse_addresses(address_for(info, [url] if url else []))[0]
    if url and (address.path.strip("/") or "?" in url):
        raise UsageError(
            f"a line has room for a host and a port, not for the rest of {url}: `tidings agent export` writes a bundle"
        )
    if info.servers:
        return _reach_elsewhere(address)
    if not address.tls:
        return Reach(address.host, address.port, Trust.PLAIN, websocket=address.websocket)
    if not info.certificate and not info.authority:
        raise UsageError(
            f"this space does not listen with TLS, so nobody could trust what answers at {url}: `tidings up --listen "
            "ADDR` first"
        )
    if not info.certificate:
        key = compressed_key(base64.b64decode(info.authority))
        return Reach(address.host, address.port, Trust.AUTHORITY, key, address.websocket)
    if address.host != info.certificate_name:
        raise UsageError(
            f"the broker shows a certificate for {info.certificate_name}: only by that name it can be trusted, so "
            f"`--url tls://{info.certificate_name}:{address.port}`"
        )
    return Reach(address.host, address.port, Trust.SYSTEM, websocket=address.websocket)


def _reach_elsewhere(address: Address) -> Reach:
    """At servers that others run, whose authority is not ours to name in a line."""
    if not address.tls:
        return Reach(address.host, address.port, Trust.PLAIN, websocket=address.websocket)
    if address.authority or address.server_name != address.host:
        raise UsageError(
            f"{address.url} is trusted by an authority or a name that a line has no room for: `tidings agent export` "
            "writes a bundle that has it"
        )
    greets = not address.tls_first
    return Reach(address.host, address.port, Trust.SYSTEM, websocket=address.websocket, greets_first=greets)
