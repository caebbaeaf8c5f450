"""Invitations on disk: what was promised to whoever has a line, who took it, and which are void.

`agents/invited/<id>.json`, written by the administrator alone; the steward reads it before it asks for anything. As
with the rows of agents, each is written a second time outside of what a backup copies, and of the two the later holds:
a folder that is put back opens no invitation that was used or revoked since.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from tidings.admin.agents import AgentFile
from tidings.admin.home import SpaceHome
from tidings.errors import DeniedError, UsageError
from tidings.util.private_files import private_dir, read_plain, write_private
from tidings.wire.invitations import wrong_kind
from tidings.wire.names import check_agent_name, is_agent_id

#: seconds after its end for which one is still listed
KEPT = 30 * 86_400
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkPromise:
    """What the holder of a line for a link may agree on (`wire/link_terms.py`)."""

    link: str
    #: the text of the offer, and this space's signature of it
    offer: str
    signature: str
    #: what is wanted of the other space -> what it will be called here
    takes: dict[str, str]
    #: what the other space will be called; empty: by its own name
    called: str = ""
    #: is it accepted on this machine?
    local: bool = False
    #: the text of the acceptance, once there is one
    agreed: str = ""
    #: why the other space could not be reached when it was made; empty: it could, or need not be
    unreached: str = ""
    #: it is for the space of that link alone, and gives it new keys
    renews: bool = False


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the holder of one line may become."""

    id: str
    issued: int
    expires: int
    uses: int = 1
    #: what it will be called; empty: whoever accepts says
    name: str = ""
    read: tuple[str, ...] = ()
    post: tuple[str, ...] = ()
    manage: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    description: str = ""
    #: the key that it takes the place of, if it is for an agent that exists
    replaces: str = ""
    #: seconds for which a credential of the agent holds; 0: for ever
    lifetime: int = 0
    #: the keys that accepted it, in order
    taken: tuple[str, ...] = ()
    revoked: bool = False
    #: why, if nobody asked for that
    why: str = ""
    version: int = 0
    #: it is for a link, and nobody becomes an agent by it
    link: LinkPromise | None = None

    def agent(self, name: str) -> AgentFile:
        """The agent it promises."""
        rights = (self.read, self.post, self.manage)
        return AgentFile(self.name or name, self.roles, self.description, *rights).checked()

    def name_for(self, wanted: str) -> str:
        """What the agent is called whose owner wants this name; UsageError if that is not for it to say."""
        if not self.name and not wanted:
            raise UsageError("this invitation leaves the name to you: `tidings accept LINE --name NAME`")
        if self.name and wanted not in ("", self.name):
            raise UsageError(f"this invitation is for {self.name}: leave --name out")
        return check_agent_name(self.name or wanted)

    def refuses(self, key: str, now: float) -> str | None:
        """Why this key cannot have what it promises; None if it can, or has it."""
        if key == self.id:
            return "the key of an invitation is known to whoever has its line: make another one"
        if self.revoked:
            return "this invitation was revoked: ask for another"
        if now >= self.expires:
            return "this invitation has expired: ask for another"
        if key not in self.taken and len(self.taken) >= self.uses:
            return "this invitation was used already, by another key: ask for another, and tell who invited you"
        return None

    def is_tried_by_stranger(self, key: str, now: float) -> bool:
        """Does somebody have the line who comes too late, and is not who took it?"""
        return self.state(now) in ("used", "expired") and key not in (self.id, *self.taken)

    def state(self, now: float) -> str:
        if self.revoked:
            return "revoked"
        if len(self.taken) >= self.uses:
            return "used"
        return "expired" if now >= self.expires else "open"


class Invitations:
    """Those of one space. `outside`: where they are written a second time."""

    def __init__(self, folder: Path, outside: Path) -> None:
        self.folder, self.outside = folder, outside

    @classmethod
    def below(cls, home: SpaceHome, space_id: str) -> Invitations:
        return cls(home.invited, home.remembered / space_id / "invited")

    def get(self, invitation_id: str) -> Invitation | None:
        """The later of what is here and what is remembered. A revocation is for good."""
        if not is_agent_id(invitation_id):
            return None
        found = [each for each in (self._read(at, invitation_id) for at in (self.folder, self.outside)) if each]
        if not found:
            return None
        later = max(found, key=lambda each: each.version)
        whole = [each for each in found if each.version >= 0] or [later]
        return replace(later, revoked=any(each.revoked for each in whole))

    def promised(self, invitation_id: str, key: str, *, for_link: bool) -> Invitation:
        """What this key may have by a line; DeniedError says why it may have nothing."""
        found = self.get(invitation_id)
        if found is None:
            raise DeniedError("this invitation is not known here: ask for another")
        if why := found.refuses(key, time.time()) or wrong_kind(is_link=found.link is not None, for_link=for_link):
            raise DeniedError(why)
        return found

    def all(self) -> list[Invitation]:
        """Every one that is known, by when it was made."""
        names = {path.stem for at in (self.folder, self.outside) for path in at.glob("U*.json")}
        found = [each for each in map(self.get, names) if each is not None]
        return sorted(found, key=lambda each: (each.issued, each.id))

    def put(self, invitation: Invitation, **changes: Any) -> Invitation:
        written = replace(invitation, **changes, version=invitation.version + 1)
        text = json.dumps(asdict(written), indent=1) + "\n"
        for folder in (self.outside, self.folder):  # outside first: an older copy put back never hides it
            private_dir(folder.parent)
            private_dir(folder)
            write_private(folder / f"{written.id}.json", text)
        return written

    def forget_old(self) -> None:
        """Remove what ended so long ago that nobody looks for it."""
        for each in self.all():
            if each.expires + KEPT < time.time():
                for folder in (self.folder, self.outside):
                    (folder / f"{each.id}.json").unlink(missing_ok=True)

    def revocations(self) -> dict[str, int]:
        """For the token of their account: id -> second up to which its tokens are void. What expired needs none."""
        return {each.id: each.issued for each in self.all() if each.revoked and each.expires > time.time()}

    @staticmethod
    def _read(folder: Path, invitation_id: str) -> Invitation | None:
        """As it was written; one that is damaged promises nothing any more."""
        path = folder / f"{invitation_id}.json"
        try:
            text = read_plain(path)
            found = msgspec.json.decode(text, type=Invitation)
            if json.loads(text).keys() == asdict(found).keys() and found.id == invitation_id:
                return found
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.error("%s is damaged: %s", path, error)
        now = int(time.time())
        return Invitation(invitation_id, now, now + KEPT, revoked=True, why=f"{path} is damaged", version=-1)
