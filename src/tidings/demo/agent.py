"""An agent of the demonstration as a process of its own: `python -m tidings.demo.agent HOME SPACE NAME STATE`.

It hears a channel and its mail, and works as a reviewer. Each thing it does is a line of JSON on standard output. What
begins with "hold this" it keeps in hand, unsettled, as if it were thinking, unless it comes again.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import tidings
from tidings.cli import output


def say(what: str, **facts: object) -> None:
    output.line(json.dumps({"what": what, **facts}))
    sys.stdout.flush()


async def run(home: str, space: str, name: str, state: str) -> None:
    came_back = os.path.exists(state)  # noqa: PTH110 - a path given as text
    async with (
        tidings.connect(space, name=name, channels=["general"], home=home, state=state) as me,
        asyncio.TaskGroup() as together,
    ):
        together.create_task(_review(me))
        say("ready", pid=os.getpid())
        async for message in me.messages(manual_ack=True):
            where = f"in #{message.channel}" if message.channel else "directly"
            say("heard", **{"from": message.sender.name}, where=where, text=message.text)
            if came_back or not message.text.startswith("hold this"):
                await message.ack()


async def _review(me: tidings.DirectAgent) -> None:
    async for job in me.work("reviewer"):
        await job.done("looks good")


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
