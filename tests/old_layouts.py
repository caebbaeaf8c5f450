"""Spaces as older versions left them: accounts and credentials of each layout, as those versions wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidings.admin.agents import Ledger
from tidings.admin.home import SpaceHome
from tidings.nats import jwt
from tidings.server.keyring import Keyring
from tidings.server.resolver import write_tokens
from tidings.util.private_files import read_private, write_private
from tidings.wire.signing import KeyPair

FIRST = Path(__file__).parent / "fixtures" / "layout-v1.json"


class _Rights:
    """The rights of a role as they were."""

    def __init__(self, claims: Any, user: str) -> None:
        self._claims = json.loads(json.dumps(claims).replace("USER", user))

    def claims(self) -> Any:
        return self._claims


def make_first(home: SpaceHome) -> None:
    """Make a space that is down what the first layout was: no PIPE, and the pipeline's user in CORE."""
    keyring, was = Keyring.load(home.keys), json.loads(FIRST.read_text())
    imports = [each | {"account": keyring.core.id} for each in was["agents"]["imports"]]
    specs = {
        keyring.system.id: jwt.AccountSpec("SYS"),
        keyring.core.id: jwt.AccountSpec(
            f"CORE_{home.name}", jwt.AccountLimits(jetstream=True), exports=was["core"]["exports"]
        ),
        keyring.agents.id: jwt.AccountSpec(
            f"AGENTS_{home.name}",
            jwt.AccountLimits(connections=was["agents"]["connections"]),
            imports=imports,
            revocations=Ledger(home.issued).revocations(),
        ),
    }
    for path in home.resolver.glob("*.jwt"):
        path.unlink()
    write_tokens(home.resolver, {key: jwt.account_jwt(keyring.operator, key, spec) for key, spec in specs.items()})
    users = {"steward": KeyPair(read_private(home.creds / "steward.user").strip()), "pipeline": KeyPair.generate()}
    for role, user in users.items():
        rights: Any = _Rights(was["users"][role], user.id)
        token = jwt.user_jwt(keyring.core, user.id, role, rights)
        write_private(home.creds / f"{role}.creds", jwt.credentials(token, user))
    for name in ("pipe", "invite", "link"):
        (home.keys / f"{name}.seed").unlink()
    home.link_creds.unlink()
    (home.keys / "voided.json").unlink(missing_ok=True)
    said = home.info_path.read_text().splitlines()
    write_private(home.info_path, "\n".join(line for line in said if not line.startswith("layout")) + "\n")
