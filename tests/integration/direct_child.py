"""A program that receives one direct message, says and records so, and never settles it."""

import asyncio
import json
import sys
from pathlib import Path

import tidings
from tidings_testing.history import History


async def main(home: str, space: str, name: str, lines: str) -> None:
    history = History(Path(lines))
    async with tidings.connect(space, name=name, home=home) as me:
        message = await me.next_message(30)
        history.took(name, message)
        print(json.dumps({"text": message.text, "redelivered": message.redelivered}), flush=True)
        await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))
