"""What another space costs in a Spark that delivers for one already.

    python bench/spaces.py --json [--spaces 2] [--messages 2000]

The pipeline as a process (`--also`), once for each number of spaces from one on, every space with its own broker. In
each, so many messages are delivered to one member, then nothing happens until the archive of classes is made and
Spark's idle workers have ended: there are as many of those as cores, whatever the number of spaces. `pss_mb` is the
memory of the process tree with what is shared counted once. The baseline is the same process with one space.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from latency import archive_made, memory_gb, tree
from measuring import note, report
from tidings.delivery.status import look
from tidings_testing.processes import child
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

#: seconds after which Spark has ended workers that nobody uses
SETTLE = 80.0


async def fill(space: RealSpace, messages: int) -> None:
    from crowd import clients, join, say_on

    for name in ("ada", "bob"):
        await space.add(name, read=[">"], post=[">"])
    async with clients(space, ("ada", "bob")) as crowd:
        await join(crowd["bob"], "team.>")
        for start in range(0, messages, 200):
            await say_on(crowd["ada"], ["team.0"] * min(200, messages - start))


def _is_done(space: RealSpace) -> bool:
    return look(space.home).behind == 0


async def measure(count: int, messages: int) -> float:
    """MB of a pipeline that has delivered for so many spaces."""
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            names = [f"space{number}" for number in range(count)]
            spaces = [await stack.enter_async_context(real_space(Path(folder), name)) for name in names]
            for space in spaces:
                await fill(space, messages)
            command = ["--home", folder, "--space", names[0], "--master", "local[2]"]
            for name in names[1:]:
                command += ["--also", name]
            job = await stack.enter_async_context(child("-m", "tidings.delivery.process", *command))
            for _ in spaces:
                while not (said := await job.line(180)).get("ready"):
                    if "error" in said:
                        raise RuntimeError(said["error"])
            for space in spaces:
                await eventually(partial(_is_done, space), within=120, what="it is delivered")
            await archive_made(spaces[0], 180)
            await asyncio.sleep(SETTLE)
            return memory_gb(tree(job.pid)) * 1024


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--spaces", type=int, default=2)
    parser.add_argument("--messages", type=int, default=2_000)
    given = parser.parse_args()
    sizes = []
    for count in range(1, given.spaces + 1):
        sizes.append(await measure(count, given.messages))
        note(f"{count} spaces: {sizes[-1]:.0f} MB")
    figures = {
        "spaces": given.spaces,
        "pss_mb": [round(size) for size in sizes],
        "another_space_mb": round((sizes[-1] - sizes[0]) / (given.spaces - 1)),
    }
    rows = [(f"{count} spaces", f"{size:.0f} MB") for count, size in enumerate(sizes, start=1)]
    rows.append(("another space", f"{figures['another_space_mb']} MB"))
    report("memory of a pipeline that delivers for several spaces", rows, figures, as_json=given.json)


if __name__ == "__main__":
    asyncio.run(main())
