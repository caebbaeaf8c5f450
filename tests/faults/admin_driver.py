"""One admin operation in a process of its own, to be killed.

python admin_driver.py HOME SPACE add|narrow|rotate|revoke NAME
"""

import asyncio
import sys
from pathlib import Path

from tidings.admin.administration import administer
from tidings.admin.agents import AgentFile
from tidings.admin.home import SpaceHome


async def main(home: str, space: str, operation: str, name: str) -> None:
    async with administer(SpaceHome(Path(home), space), operation) as admin:
        if operation == "add":
            await admin.add(AgentFile(name, read=("general",), post=("general",)))
        elif operation == "narrow":
            await admin.set_access(name, AgentFile(name, read=("general",), post=("general",)))
        elif operation == "rotate":
            await admin.rotate(name)
        else:
            await admin.revoke(name)


asyncio.run(main(*sys.argv[1:]))
