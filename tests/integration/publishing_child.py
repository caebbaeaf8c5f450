"""A program that publishes to a channel as fast as it can COUNT times, and records every message.

python publishing_child.py HOME SPACE NAME CHANNEL COUNT LINES
"""

import asyncio
import json
import sys
from pathlib import Path

import tidings
from tidings_testing.history import History

UNDER_WAY = 64


async def main(home: str, space: str, name: str, channel: str, count: str, lines: str) -> None:
    history, left = History(Path(lines)), int(count)

    async with tidings.connect(space, name=name, home=home, receive=False) as me:

        async def publish() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                confirmed = history.sending(name, channel)
                confirmed((await me.send(channel, "x", id=confirmed.id, timeout=20)).seq)

        async def say() -> None:
            while len(history.events) < 8 * UNDER_WAY:
                await asyncio.sleep(0.01)
            print(json.dumps({"running": True}), flush=True)

        await asyncio.gather(say(), *(publish() for _ in range(UNDER_WAY)))


asyncio.run(main(*sys.argv[1:]))
