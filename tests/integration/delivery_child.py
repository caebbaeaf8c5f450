"""A program that receives one channel message, says so, and never settles it."""

import asyncio
import json
import sys

import tidings


async def main(home: str, space: str, name: str) -> None:
    async with tidings.connect(space, name=name, home=home, channels=["general"]) as me:
        message = await me.next_message(30)
        print(json.dumps({"text": message.text, "redelivered": message.redelivered}), flush=True)
        await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))
