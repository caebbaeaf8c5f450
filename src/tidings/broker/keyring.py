"""The keys of a space on disk: operator, system account, CORE, AGENTS and PIPE.

Only short-lived admin processes open these files. Long-running ones (supervisor, steward, pipeline) get a creds
file of their own role and nothing more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tidings.broker import grants, jwt
from tidings.broker.private_files import check_private, private_dir, read_private, write_private
from tidings.errors import UsageError
from tidings.wire.keys import ACCOUNT, OPERATOR, KeyPair
from tidings.wire.subjects import Subjects

ADMIN_SECONDS = 300
_KINDS = {"operator": OPERATOR, "system": ACCOUNT, "core": ACCOUNT, "agents": ACCOUNT, "pipe": ACCOUNT}


@dataclass(frozen=True, slots=True)
class Keyring:
    operator: KeyPair
    system: KeyPair
    core: KeyPair
    agents: KeyPair
    pipe: KeyPair

    @classmethod
    def create(cls, folder: Path) -> Keyring:
        """Generate and write what is missing; a creation that was interrupted is completed with the same keys."""
        private_dir(folder)
        for name, prefix in _KINDS.items():
            if not (path := folder / f"{name}.seed").exists():
                write_private(path, KeyPair.generate(prefix).seed + "\n")
        return cls.load(folder)

    @classmethod
    def extend(cls, folder: Path) -> Keyring:
        """Generate the accounts that a newer layout added; the keys a space began with must be there."""
        for name in ("operator", "system", "core", "agents"):
            check_private(folder / f"{name}.seed")
        return cls.create(folder)

    @classmethod
    def load(cls, folder: Path) -> Keyring:
        return cls(*(KeyPair(read_private(folder / f"{name}.seed").strip()) for name in _KINDS))

    def operator_token(self, space: str) -> str:
        return jwt.operator_jwt(self.operator, f"tidings-{space}", self.system.id)

    def account_tokens(
        self, s: Subjects, revocations: dict[str, int], voided: dict[str, int] | None = None
    ) -> dict[str, str]:
        """Every account's token by id, derived afresh. `voided`: users of roles, with the second up to which."""
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
        return tokens

    def agents_token(self, s: Subjects, revocations: dict[str, int]) -> str:
        spec = jwt.AccountSpec(
            f"AGENTS_{s.space}",
            jwt.AccountLimits(connections=grants.MAX_AGENT_CONNECTIONS),
            imports=grants.agents_imports(s, self.core.id),
            mappings=grants.agents_mappings(s),
            revocations=revocations,
        )
        return jwt.account_jwt(self.operator, self.agents.id, spec)

    def steward_token(self, s: Subjects, steward_id: str, *, iat: int | None = None) -> str:
        return jwt.user_jwt(self.core, steward_id, "steward", grants.steward_permissions(s, steward_id), iat=iat)

    def pipeline_token(self, s: Subjects, pipeline_id: str) -> str:
        return jwt.user_jwt(self.pipe, pipeline_id, "pipeline", grants.pipeline_permissions(s, pipeline_id))

    def watcher_token(self, watcher_id: str) -> str:
        permissions = grants.watcher_permissions(watcher_id, self.agents.id)
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
    ) -> str:
        permissions = grants.agent_permissions(s, agent_id, read, post, withheld=withheld)
        token = jwt.user_jwt(self.agents, agent_id, name, permissions, grants.agent_limits(), iat=iat)
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
