"""A program that settles as many as it is told to, says what each message says of itself, and never saves."""

import asyncio
import json
import sys

import tidings
from tidings.client import direct_transport


async def main(home: str, space: str, name: str, state: str, settled: str) -> None:
    direct_transport.SAVE_EVERY = 3600.0
    async with tidings.connect(space, name=name, home=home, state=state, channels=["general"]) as me:
        print(json.dumps({"text": "ready"}), flush=True)
        for number in range(100):
            message = await me.next_message(30)
            if number < int(settled):
                await message.ack()
            print(json.dumps({"text": message.text, "redelivered": message.redelivered}), flush=True)
            if number >= int(settled):
                await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))
