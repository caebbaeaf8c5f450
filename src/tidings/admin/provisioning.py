"""Self-provisioning in an open space: a program that may read the space's keys makes itself an agent.

`--open` is no second security model. The agent gets a key, an access record and a credential like any other; what
is open is only who may ask for them, namely every program of the same user on this machine.
"""

from __future__ import annotations

from tidings.admin.administration import administer
from tidings.admin.agents import AgentFile, Ledger
from tidings.admin.home import SpaceHome
from tidings.errors import AuthRevoked, DeniedError

OPEN_ACCESS = (">",)


async def ensure_agent(home: SpaceHome, name: str) -> bool:
    """Make sure `name` has a credential here. Answers whether one was made."""
    info = home.read_info()
    newest = Ledger(home.issued).newest(name)
    if newest is not None and newest.state == "active" and home.agent_creds(name).exists():
        return False
    if newest is not None and newest.state in ("revoking", "revoked"):
        raise AuthRevoked(f"agent {name} was revoked; only `tidings agent add {name}` brings the name back")
    if newest is not None and newest.invited and not home.agent_creds(name).exists():
        raise DeniedError(newest.elsewhere)
    if not info.open and not home.agent_creds(name).exists():
        raise DeniedError(
            f"there is no agent {name} in space {info.name}, and the space is not open: "
            f"`tidings agent add {name} --space {info.name}`"
        )
    async with administer(home, f"provisioning {name}") as admin:
        if not info.open:
            await admin.finish()  # its add was interrupted; the credential is here already
            return False
        agent = AgentFile(name, read=OPEN_ACCESS, post=OPEN_ACCESS, description="provisioned on first use")
        return (await admin.add(agent, existing_ok=True)).created
