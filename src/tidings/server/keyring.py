"""The keys of a space on disk: operator, system account, CORE, AGENTS, PIPE, INVITE and LINK.

Only short-lived admin processes open these files. Long-running ones (supervisor, steward, pipeline) get a creds
file of their own role and nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidings.errors import UsageError
from tidings.nats import jwt
from tidings.server import grants
from tidings.util.private_files import private_dir, read_private, write_private
from tidings.wire.keys import ACCOUNT, OPERATOR, KeyPair
from tidings.wire.subjects import Subjects

ADMIN_SECONDS = 300
_KINDS = {
    "operator": OPERATOR,
    "system": ACCOUNT,
    "core": ACCOUNT,
    "agents": ACCOUNT,
    "pipe": ACCOUNT,
    "invite": ACCOUNT,
    "link": ACCOUNT,
}


@dataclass(frozen=True, slots=True)
class Keyring:
    operator: KeyPair
    system: KeyPair
    core: KeyPair
    agents: KeyPair
    pipe: KeyPair
    invite: KeyPair
    link: KeyPair

    @classmethod
    def create(cls, folder: Path) -> Keyring:
        """Generate and write what is missing; a creation that was interrupted is completed with the same keys."""
        private_dir(folder)
        for name, prefix in _KINDS.items():
            if not (path := folder / f"{name}.seed").exists():
                write_private(path, KeyPair.generate(prefix).seed + "\n")
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Keyring:
        return cls(*(KeyPair(read_private(folder / f"{name}.seed").strip()) for name in _KINDS))

    def operator_token(self, space: str) -> str:
        return jwt.operator_jwt(self.operator, f"tidings-{space}", self.system.id)

    def account_tokens(
        self,
        s: Subjects,
        revocations: dict[str, int],
        voided: dict[str, int] | None = None,
        uninvited: dict[str, int] | None = None,
        unlinked: dict[str, int] | None = None,
    ) -> dict[str, str]:
        """Every account's token by id, derived afresh. `voided`: users of roles, with the second up to which;
        `uninvited`: the same of invitations, `unlinked` of links."""
        specs = {
            self.system.id: jwt.AccountSpec("SYS", revocations=voided or {}),
            self.core.id: jwt.AccountSpec(
                f"CORE_{s.space}",
                jwt.AccountLimits(jetstream=True),
                exports=grants.core_exports(s),
                revocations=voided or {},
            ),
            self.pipe.id: jwt.AccountSpec(
                f"PIPE_{s.space}",
                jwt.AccountLimits(connections=grants.MAX_PIPELINE_CONNECTIONS),
                imports=grants.pipeline_imports(s, self.core.id),
                revocations=voided or {},
            ),
        }
        tokens = {key: jwt.account_jwt(self.operator, key, spec) for key, spec in specs.items()}
        tokens[self.agents.id] = self.agents_token(s, revocations)
        tokens[self.invite.id] = self.invite_token(s, uninvited or {})
        tokens[self.link.id] = self.link_token(s, (voided or {}) | (unlinked or {}))
        return tokens

    def link_token(self, s: Subjects, revocations: dict[str, int]) -> str:
        """`revocations`: of linked spaces' users, and of our own worker's older ones."""
        return jwt.account_jwt(self.operator, self.link.id, self._link_spec(s, revocations))

    def _link_spec(self, s: Subjects, revocations: dict[str, int]) -> jwt.AccountSpec:
        return jwt.AccountSpec(
            f"LINK_{s.space}",
            jwt.AccountLimits(connections=grants.MAX_LINK_CONNECTIONS),
            imports=grants.link_imports(s, self.core.id),
            revocations=revocations,
        )

    def invite_token(self, s: Subjects, revocations: dict[str, int]) -> str:
        return jwt.account_jwt(self.operator, self.invite.id, self._invite_spec(s, revocations))

    def _invite_spec(self, s: Subjects, revocations: dict[str, int]) -> jwt.AccountSpec:
        return jwt.AccountSpec(
            f"INVITE_{s.space}",
            jwt.AccountLimits(connections=grants.MAX_INVITED_CONNECTIONS),
            imports=grants.invitation_imports(s, self.core.id),
            revocations=revocations,
        )

    def agents_token(self, s: Subjects, revocations: dict[str, int]) -> str:
        return jwt.account_jwt(self.operator, self.agents.id, self._agents_spec(s, revocations))

    def _agents_spec(self, s: Subjects, revocations: dict[str, int]) -> jwt.AccountSpec:
        return jwt.AccountSpec(
            f"AGENTS_{s.space}",
            jwt.AccountLimits(connections=grants.MAX_AGENT_CONNECTIONS),
            imports=grants.agents_imports(s, self.core.id),
            mappings=grants.agents_mappings(s),
            revocations=revocations,
        )

    def shared_specs(
        self,
        s: Subjects,
        revocations: dict[str, int],
        uninvited: dict[str, int],
        unlinked: dict[str, int],
        *,
        disk: int,
        replicas: int,
    ) -> dict[str, jwt.AccountSpec]:
        """The accounts of a space on servers that others use too: an import from CORE needs a token of CORE's."""
        limits = jwt.AccountLimits(jetstream=True, disk=disk, replicas=replicas)
        exports = [{**each, "token_req": True} for each in grants.core_exports(s)]
        agents, invite = self._agents_spec(s, revocations), self._invite_spec(s, uninvited)
        link = self._link_spec(s, unlinked)
        return {
            self.core.id: jwt.AccountSpec(f"CORE_{s.space}", limits, exports=exports),
            self.agents.id: replace(agents, imports=self._activated(agents.imports, self.agents.id)),
            self.invite.id: replace(invite, imports=self._activated(invite.imports, self.invite.id)),
            self.link.id: replace(link, imports=self._activated(link.imports, self.link.id)),
            self.pipe.id: jwt.AccountSpec(
                f"PIPE_{s.space}",
                jwt.AccountLimits(connections=grants.MAX_PIPELINE_CONNECTIONS),
                imports=self._activated(grants.pipeline_imports(s, self.core.id), self.pipe.id),
            ),
        }

    def _activated(self, imports: Sequence[jwt.Claims], importer: str) -> list[jwt.Claims]:
        return [
            {**each, "token": jwt.activation_jwt(self.core, importer, each["subject"], each["type"])}
            for each in imports
        ]

    def steward_token(self, s: Subjects, steward_id: str, *, iat: int | None = None) -> str:
        return jwt.user_jwt(self.core, steward_id, "steward", grants.steward_permissions(s, steward_id), iat=iat)

    def pipeline_token(self, s: Subjects, pipeline_id: str) -> str:
        return jwt.user_jwt(self.pipe, pipeline_id, "pipeline", grants.pipeline_permissions(s, pipeline_id))

    def worker_token(self, s: Subjects, worker_id: str) -> str:
        """Of this space's own worker of links."""
        permissions, limits = grants.link_permissions(s, worker_id), grants.link_limits()
        return jwt.user_jwt(self.link, worker_id, "link", permissions, limits)

    def peer_token(self, s: Subjects, peer_id: str, link: str, *, iat: int, expires: int | None = None) -> str:
        """Of the worker of a linked space."""
        permissions, limits = grants.peer_permissions(s, peer_id), grants.peer_limits(expires)
        return jwt.user_jwt(self.link, peer_id, f"link-{link}", permissions, limits, iat=iat)

    def watcher_token(self, watcher_id: str) -> str:
        permissions = grants.watcher_permissions(watcher_id, self.agents.id, self.invite.id, self.link.id)
        return jwt.user_jwt(self.system, watcher_id, "watcher", permissions)

    def agent_token(
        self,
        s: Subjects,
        agent_id: str,
        name: str,
        read: list[str],
        post: list[str],
        *,
        iat: int | None = None,
        withheld: bool = False,
        lifetime: int = 0,
    ) -> str:
        permissions = grants.agent_permissions(s, agent_id, read, post, withheld=withheld)
        iat = int(time.time()) if iat is None else iat
        limits = grants.agent_limits(iat + lifetime if lifetime else None)
        token = jwt.user_jwt(self.agents, agent_id, name, permissions, limits, iat=iat)
        if len(token) > grants.MAX_TOKEN_BYTES:
            raise UsageError(
                f"{name}: {len(read)} read and {len(post)} post patterns make a credential of {len(token)} bytes, more "
                f"than the {grants.MAX_TOKEN_BYTES} a broker takes; use fewer, wider patterns such as `team.>`"
            )
        return token

    def short_lived(self, account: KeyPair, name: str, permissions_for: Subjects | None = None) -> tuple[str, KeyPair]:
        """A user for one admin process: everything in `account`, or only `ctl.admin` when subjects are given."""
        key = KeyPair.generate()
        permissions = grants.owner_permissions(permissions_for, key.id) if permissions_for else None
        limits = jwt.UserLimits(expires=int(time.time()) + ADMIN_SECONDS)
        return jwt.user_jwt(account, key.id, name, permissions, limits), key
