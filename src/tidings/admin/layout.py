"""The layout of a space: its accounts on the broker and the credentials of its roles, by version.

An account's token says what it exports and imports, a role's what it may do; both are derived from `server/grants.py`
and written once per layout: when the space is created, and when `tidings up` finds it was made by an older one. Then
everything is derived afresh with the same keys, before the broker starts: the store belongs to CORE's key and stays,
and what was revoked is taken from the ledger. A role's older token is void from then on, so a credential that was
copied from an older layout, with its wider rights, opens nothing. `space.toml` is written last: whatever interrupts
this, the next start does it again. Agents keep their tokens; if theirs need other rights (`grants.AGENT_RIGHTS`), the
administrator gives them new ones once the steward runs.

Whoever changes a grant raises `LAYOUT`; `tests/unit/admin/test_layout.py` notices.

    1   CORE and AGENTS; the pipeline's user in CORE
    2   the pipeline in an account of its own, PIPE, that imports its calls and nothing else
    3   a watcher in SYS that sees and closes connections of agents
    4   sealed blocks: the pipeline writes them, agents get one by its name
    5   whoever was invited has an account of its own, INVITE, that asks the steward for one thing
    6   the workers of links have an account of their own, LINK: linked spaces ask for pages, our own worker admits
    7   our own worker puts direct messages of linked spaces into mailboxes
    8   and tasks of theirs into queues
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from tidings.admin.agents import Ledger
from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.admin.invitations import Invitations
from tidings.admin.link_registry import LinkLedger
from tidings.errors import ConfigError
from tidings.nats import jwt
from tidings.server.keyring import Keyring
from tidings.server.resolver import write_tokens
from tidings.util.private_files import private_dir, read_private, write_private
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects

LAYOUT = 8


def check_layout(info: SpaceInfo) -> None:
    """Refuse to derive tokens for a space of another layout: they would not fit what its broker serves."""
    if info.layout < LAYOUT:
        raise ConfigError(
            f"space {info.name} was last started by an older Tidings (layout {info.layout}, this one writes {LAYOUT}): "
            f"`tidings down --space {info.name}`, then `tidings up --space {info.name}` brings it here; nothing is lost"
        )
    if info.layout > LAYOUT:
        raise ConfigError(
            f"space {info.name} has layout {info.layout} and this Tidings knows up to {LAYOUT}: "
            "it was started by a newer one, install that again"
        )


def lay_out(home: SpaceHome, keyring: Keyring) -> None:
    """Write the credentials of the roles and the token of every account. The broker must not run."""
    voided = Voided.of(home, keyring.core.id)
    _steward_creds(home, keyring, voided)
    _pipeline_creds(home, keyring, voided)
    _watcher_creds(home, keyring, voided)
    _link_creds(home, keyring, voided)
    revoked, uninvited = Ledger(home.issued).revocations(), Invitations.below(home, keyring.core.id).revocations()
    unlinked = LinkLedger.below(home, keyring.core.id).revocations()
    tokens = keyring.account_tokens(Subjects(home.name), revoked, voided.read(), uninvited, unlinked)
    write_tokens(home.resolver, tokens)


def migrate(home: SpaceHome) -> str | None:
    """Bring a space that is down to this layout. Answers what was done, in words, or None."""
    info = home.read_info()
    if info.layout >= LAYOUT:
        check_layout(info)
        return None
    keyring = Keyring.extend(home.keys)
    lay_out(home, keyring)
    home.update_info(layout=LAYOUT, invite_account=keyring.invite.id, link_account=keyring.link.id)
    return f"brought space {info.name} from layout {info.layout} to {LAYOUT}: its roles have new credentials"


def make_pipeline_creds(home: SpaceHome, keyring: Keyring) -> None:
    """The pipeline's own narrow credential, if there is none."""
    if not home.pipeline_creds.exists():
        user = KeyPair.generate()
        token = keyring.pipeline_token(Subjects(home.name), user.id)
        write_private(home.pipeline_creds, jwt.credentials(token, user))


def make_link_creds(home: SpaceHome, keyring: Keyring) -> None:
    """The credential of the worker of links, if there is none."""
    if not home.link_creds.exists():
        user = KeyPair.generate()
        token = keyring.worker_token(Subjects(home.name), user.id)
        write_private(home.link_creds, jwt.credentials(token, user))


def _steward_creds(home: SpaceHome, keyring: Keyring, voided: Voided) -> None:
    """The same user with the rights of today: it is the id of a process and signs nothing."""
    path = home.creds / "steward.creds"
    user = KeyPair(read_private(home.creds / "steward.user").strip())
    iat = max(int(time.time()), voided.add(path) + 1)
    write_private(path, jwt.credentials(keyring.steward_token(Subjects(home.name), user.id, iat=iat), user))


def _pipeline_creds(home: SpaceHome, keyring: Keyring, voided: Voided) -> None:
    """A new user: copies of the older credential may lie on the machines of a cluster."""
    voided.add(home.pipeline_creds)
    home.pipeline_creds.unlink(missing_ok=True)
    make_pipeline_creds(home, keyring)


def _watcher_creds(home: SpaceHome, keyring: Keyring, voided: Voided) -> None:
    voided.add(home.watcher_creds)
    user = KeyPair.generate()
    write_private(home.watcher_creds, jwt.credentials(keyring.watcher_token(user.id), user))


def _link_creds(home: SpaceHome, keyring: Keyring, voided: Voided) -> None:
    voided.add(home.link_creds)
    home.link_creds.unlink(missing_ok=True)
    make_link_creds(home, keyring)


class Voided:
    """Users of roles whose older tokens are void: id -> the second up to which."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths

    @classmethod
    def of(cls, home: SpaceHome, space_id: str) -> Voided:
        """Written a second time outside of what a backup copies: what is void stays void when a copy is put back."""
        return cls(home.remembered / space_id / "voided.json", home.keys / "voided.json")

    def read(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in self._paths:
            for user, until in (json.loads(read_private(path)) if path.exists() else {}).items():
                found[user] = max(found.get(user, 0), int(until))
        return found

    def covers(self, creds: Path) -> bool:
        """Is the token in a credential void?"""
        claims = _claims(creds)
        return claims is not None and int(claims["iat"]) <= self.read().get(claims["sub"], -1)

    def add(self, creds: Path) -> int:
        """Void the token in a credential, if there is one. Answers the second up to which, or 0."""
        claims = _claims(creds)
        if claims is None:
            return 0
        known = self.read()
        until = max(int(claims["iat"]), known.get(claims["sub"], 0))
        for path in self._paths:
            private_dir(path.parent.parent)
            private_dir(path.parent)
            write_private(path, json.dumps(known | {claims["sub"]: until}) + "\n")
        return until


def _claims(creds: Path) -> jwt.Claims | None:
    return jwt.decode(jwt.split_credentials(read_private(creds))[0]) if creds.exists() else None
