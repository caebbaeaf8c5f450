"""The layout of a space: its accounts on the broker and the credentials of its roles.

An account's token says what it exports and imports, a role's what it may do; both are derived from `server/grants.py`
when the space is created, and again when it moves to another broker. A role's token from before is void then, so that
a copy of it opens nothing. A space whose layout is newer than `LAYOUT` is refused.
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
from tidings.wire.keys import KeyPair
from tidings.wire.subjects import Subjects

LAYOUT = 1


def check_layout(info: SpaceInfo) -> None:
    """Refuses to derive tokens for a space of a newer layout: they would not fit what its broker serves."""
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
    """A new user: copies of the credential before may lie on the machines of a cluster."""
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
