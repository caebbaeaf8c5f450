"""Keeps one direct message for its agent, says so, and waits to be killed: a keeper that does not live long."""

import asyncio
import json
import sys
from dataclasses import asdict

import tidings


async def main(home: str, name: str) -> None:
    async with tidings.connect("main", name=name, home=home) as keeper:
        message = await keeper.next_message(20)
        await message.keep()
        print(json.dumps(asdict(message.kept)), flush=True)
        await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
