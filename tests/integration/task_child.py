"""A worker that takes one task, says so, and either hangs or does it: an effect in a file, then the result."""

import asyncio
import json
import sys
from pathlib import Path

import tidings


def note(effects: Path, text: str) -> None:
    with effects.open("a") as file:
        file.write(f"{text}\n")


async def main(home: str, name: str, role: str, effects: str, how: str) -> None:
    async with tidings.connect("main", name=name, home=home) as me:
        async for job in me.work(role):
            print(json.dumps({"text": job.text, "attempt": job.attempt}), flush=True)
            if how == "hang":
                await asyncio.sleep(600)
            note(Path(effects), job.text)
            await job.done("done")


asyncio.run(main(*sys.argv[1:]))
