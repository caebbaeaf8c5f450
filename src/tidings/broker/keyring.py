"""The keys of a space on disk: operator, system account, CORE and AGENTS.

Only short-lived admin processes open these files. Long-running ones (supervisor, steward, pipeline) get a creds
file of their own role and nothing more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tidings.broker import grants, jwt
from tidings.broker.private_files import private_dir, read_private, write_private
from tidings.errors import UsageError
from tidings.wire.keys import ACCOUNT, OPERATOR, KeyPair
from tidings.wire.subjects import Subjects

ADMIN_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Keyring:
    operator: KeyPair
    system: KeyPair
    core: KeyPair
    agents: KeyPair

    @classmethod
    def create(cls, folder: Path) -> Keyring:
        """Generate and write what is missing; a creation that was interrupted is completed with the same keys."""
        private_dir(folder)
        kinds = {"operator": OPERATOR, "system": ACCOUNT, "core": ACCOUNT, "agents": ACCOUNT}
        for name, prefix in kinds.items():
            if not (path := folder / f"{name}.seed").exists():
                write_private(path, KeyPair.generate(prefix).seed + "\n")
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Keyring:
        names = ("operator", "system", "core", "agents")
        return cls(*(KeyPair(read_private(folder / f"{name}.seed").strip()) for name in names))

    def operator_token(self, space: str) -> str:
        return jwt.operator_jwt(self.operator, f"tidings-{space}", self.system.id)

    def account_tokens(self, s: Subjects, revocations: dict[str, int]) -> dict[str, str]:
        """Every account's token by id, derived afresh."""
        specs = {
            self.system.id: jwt.AccountSpec("SYS"),
            self.core.id: jwt.AccountSpec(
                f"CORE_{s.space}", jwt.AccountLimits(jetstream=True), exports=grants.core_exports(s)
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
            revocations=revocations,
        )
        return jwt.account_jwt(self.operator, self.agents.id, spec)

    def steward_token(self, s: Subjects, steward_id: str) -> str:
        return jwt.user_jwt(self.core, steward_id, "steward", grants.steward_permissions(s, steward_id))

    def pipeline_token(self, s: Subjects, pipeline_id: str) -> str:
        return jwt.user_jwt(self.core, pipeline_id, "pipeline", grants.pipeline_permissions(s, pipeline_id))

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
