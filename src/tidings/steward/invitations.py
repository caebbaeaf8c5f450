"""Whoever was invited asks here for its place: checked, given by the administrator, answered for its key alone.

The steward holds no key that mints, so it asks the supervisor for an administrator and waits for what that says. Before
a process is started for anybody everything that can be checked is: the new key's signature, what the invitation still
promises, and that nobody else is being given a place by it. Who has its place already is answered from its access
record, with no process at all. The answer is sealed, because everybody who has the line hears what comes back.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tidings.admin.agents import Ledger
from tidings.admin.invitations import Invitation, Invitations
from tidings.errors import (
    ERRORS_BY_CODE,
    AuthRevoked,
    ConflictError,
    DeniedError,
    NameTaken,
    StewardUnreachable,
    TidingsError,
    UsageError,
)
from tidings.steward.context import Lifecycle, SpaceContext
from tidings.steward.requests import Answer, ControlRequest, Idle, handles
from tidings.wire.invitations import acceptance
from tidings.wire.names import check_agent_id, check_agent_name
from tidings.wire.operations import ACCEPT_WAIT
from tidings.wire.rulings import Access
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
    #: invitation -> the key that is being given its place, and what will be said of that
    _asked: dict[str, tuple[str, asyncio.Future[None]]] = field(default_factory=dict)
    #: invitation -> before when nobody is asked for it again: what was refused once would be so again
    _later: dict[str, float] = field(default_factory=dict)
    #: invitation -> how often a key asked that it does not know
    _refused: Counter[str] = field(default_factory=Counter)

    @property
    def invitations(self) -> Invitations:
        return Invitations.below(self.space.home, self.space.info.id)

    @handles("accept", "redeem")
    async def redeem(self, request: ControlRequest) -> Answer:
        """Give the key that signed a place in the space. Asking again answers the same."""
        agent, name = check_agent_id(request.text("id")), request.optional("name", str) or ""
        if agent == request.sender:
            raise DeniedError("the key of an invitation is known to whoever has its line: make another one")
        self._check_signature(request, agent, name)
        invitation = self.promised(request.sender, agent)
        if invitation.link is not None:
            raise DeniedError("this line links two spaces, and makes nobody an agent: `tidings link accept LINE`")
        held = self.space.access(agent)
        if held is not None and held.revoked:
            raise AuthRevoked(f"agent {held.name} was revoked: ask for another invitation")
        if held is None or agent not in invitation.taken:
            self._check_name(invitation, name)
            asked = {"invitation": request.sender, "agent": agent, "name": name}
            await self.have_it_done(request.sender, agent, {"redeem": asked})
            held = self.space.active_access(agent)
            if held is None:
                raise ConflictError("the place was given and taken away again: ask for another invitation")
        return {"sealed": base64.b64encode(sealed_for(agent, self._answer(agent, held))).decode()}

    def promised(self, invitation_id: str, key: str) -> Invitation:
        """What this key may ask for; DeniedError says why not."""
        invitation = self.invitations.get(invitation_id)
        if invitation is None:
            raise DeniedError("this invitation is not known here: ask for another")
        if why := invitation.refuses(key, time.time()):
            if not invitation.revoked and key not in invitation.taken:
                self._note_refused(invitation_id, key)
            raise DeniedError(why)
        return invitation

    def _check_signature(self, request: ControlRequest, agent: str, name: str) -> None:
        try:
            signature = base64.b64decode(request.text("sig"), validate=True)
        except ValueError:
            signature = b""
        if not verify(agent, acceptance(self.space.info.name, request.sender, agent, name), signature):
            raise DeniedError("this request is not signed by the key that it names")

    def _check_name(self, invitation: Invitation, name: str) -> None:
        """Before a process is started for it; the administrator looks at more."""
        wanted = check_agent_name(invitation.name or name) if invitation.name or name else ""
        if not wanted:
            raise UsageError("this invitation leaves the name to you: `tidings accept LINE --name NAME`")
        if invitation.name and name not in ("", invitation.name):
            raise UsageError(f"this invitation is for {invitation.name}: leave --name out")
        if not invitation.replaces and self.space.table.owner_named(wanted) is not None:
            raise NameTaken(f"there is an agent {wanted} already: choose another name")

    def _note_refused(self, invitation: str, agent: str) -> None:
        self._refused[invitation] += 1
        if self._refused[invitation] == 1:
            log.warning("invitation %s was tried by %s, and was used or has expired before", invitation, agent)

    async def have_it_done(self, invitation: str, key: str, asked: dict[str, Any]) -> None:
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
            tell(asked)
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

    @handles("admin", "redeemed")
    async def redeemed(self, request: ControlRequest) -> Answer:
        """What came of it; whoever waits is told. Nobody may: it asks again then."""
        agent, said = self._asked.get(request.text("invitation"), ("", None))
        if said is not None and agent == request.text("id") and not said.done():
            error = request.optional("error", dict)
            said.set_exception(_error_of(error)) if error else said.set_result(None)
        return {}

    def _answer(self, agent: str, held: Access) -> bytes:
        """What whoever accepted needs beside the line: the same as in a bundle, without the seed."""
        renewed = Ledger(self.space.home.issued).renewed(agent, held.iat or 0)
        info = self.space.home.read_info()
        return json.dumps(
            {
                "space_id": info.id,
                "steward_key": info.steward_key,
                "agent": {"name": held.name, "id": agent},
                # the keys in whose place it is, newest first
                "succeeds": self.space.predecessors(agent),
                "jwt": renewed.token if renewed is not None else held.jwt,
                **self.where(),
            }
        ).encode()

    def where(self) -> dict[str, Any]:
        """How the space is reached by whoever reached it once, and whom to trust there."""
        info = self.space.home.read_info()  # it may have changed since we started
        return {
            # the one that the line names, and its successor if there is one
            "authority": base64.b64encode(info.trusted).decode(),
            "authority_bytes": len(base64.b64decode(info.authority)),
            "servers": info.servers,
            # where else it is reached, at the same host
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


def _error_of(said: dict[str, Any]) -> TidingsError:
    return ERRORS_BY_CODE.get(str(said.get("code")), TidingsError)(str(said.get("message")))
