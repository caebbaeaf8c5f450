"""A space on a disk of 64 megabytes that is full for a moment, in which one stream is written to.

    unshare --mount --map-root-user python stuck_stream_child.py DIRECTORY

No supervisor looks at the disk, and the steward is away meanwhile. Says in one line of JSON what was met.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidings.steward.service import Steward
from tidings_testing.real_space import TEST_INTERVALS, RealSpace, real_space
from tidings_testing.waiting import eventually

SIZE = 64 * 1024 * 1024


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for step in (65_536, 512):
            with suppress(OSError):
                while file.write(bytes(step)):
                    pass


async def new_steward(space: RealSpace, asked: list[dict[str, Any]]) -> Steward:
    steward = await space.start_steward(replace(TEST_INTERVALS, stuck=0.2))
    steward.life.tell_supervisor = asked.append
    return steward


async def life(disk: Path) -> dict[str, Any]:
    met: dict[str, Any] = {}
    async with real_space(disk / "home", budget=8 * 1024 * 1024) as space:
        for name in ("ada", "bob"):
            await space.add(name)
        async with space.agent("ada") as ada, space.agent("bob") as bob:
            subject = space.subjects.direct(bob.id, ada.id)

            async def send(size: int) -> bool:
                with suppress(TimeoutError):
                    return b'"seq"' in (await ada.connection.request(subject, bytes(size), timeout=1)).data
                return False

            met["before"] = await send(10)
            await space.stop_steward()
            fill(disk / "ballast")
            met["while full"] = await send(200_000)
            (disk / "ballast").unlink()
            met["after"] = await send(10)
        asked: list[dict[str, Any]] = []
        steward = await new_steward(space, asked)
        met["problems"] = (await steward.health.facts()).problems
        with suppress(AssertionError):
            await eventually(lambda: bool(asked), what="it asks for a restart")
        met["asked"] = asked[:1]
        await space.stop_steward()
        await space.restart_broker()
        steward = await new_steward(space, asked)
        met["problems after a restart"] = (await steward.health.facts()).problems
    return met


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "tidings", str(directory)], check=True)
    print(json.dumps(asyncio.run(life(directory))))
