"""Self-provisioning in an open space: a program that may read the space's keys makes itself an agent.

`--open` is no second security model. The agent gets a key, an access record and a credential like any other; what
is open is only who may ask for them, namely every program of the same user on this machine.
"""

from __future__ import annotations

from tidings.errors import DeniedError
from tidings.space.administration import administer
from tidings.space.agents import AgentFile
from tidings.space.home import SpaceHome

OPEN_ACCESS = (">",)


async def ensure_agent(home: SpaceHome, name: str) -> bool:
    """Make sure `name` has a credential here. Answers whether one was made."""
    info = home.read_info()
    if home.agent_creds(name).exists():
        return False
    if not info.open:
        raise DeniedError(
            f"there is no agent {name} in space {info.name}, and the space is not open: "
            f"`tidings agent add {name} --space {info.name}`"
        )
    async with administer(home, f"provisioning {name}") as admin:
        agent = AgentFile(name, read=OPEN_ACCESS, post=OPEN_ACCESS, description="provisioned on first use")
        return (await admin.add(agent, existing_ok=True)).created
