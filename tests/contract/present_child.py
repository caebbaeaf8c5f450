"""A program that is there, and nothing else."""

import asyncio
import json
import sys

import tidings


async def main(home: str, space: str, name: str) -> None:
    async with tidings.connect(space, name=name, home=home) as me:
        me.transport.presence.set_status("working", "being there")
        me.transport.presence.set_attention("dnd")
        print(json.dumps({"present": me.id}), flush=True)
        await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))
