"""A space on three nodes, of which the third has a disk of 64 megabytes, mounted by this process in a mount namespace
of its own; others fill it while agents send and read.

    unshare --mount --map-root-user python small_node_child.py DIRECTORY

Says in one line of JSON what was met. What was acknowledged and read is judged by the history, which ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster_load import BETWEEN, Load, leader_of, populate, up_again, whole_again
from tidings.nats.errors import ApiError
from tidings.server.nats_server import Broker
from tidings_testing.real_space import real_space
from tidings_testing.waiting import eventually

SIZE = 64 * 1024 * 1024
SMALL = 2


def fill(ballast: Path) -> None:
    """Everything there is."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(65_536)):
            pass
        while file.write(b"x"):
            pass


async def leads(load: Load, node: Broker) -> bool:
    """It is the worst one to lose its disk."""
    if await leader_of(load.space, "LOG_main") is node:
        return True
    async with load.space.core() as core:
        with suppress(ApiError):
            preferred = {"placement": {"preferred": node.config.server_name}}
            await core.api("STREAM.LEADER.STEPDOWN.LOG_main", preferred)
    return False


class Strike:
    """The disk fills up, agents go on, the node is started again with room: room alone is not enough for it."""

    def __init__(self, disk: Path) -> None:
        self.ballast, self.met = disk / "ballast", dict[str, Any]()

    async def __call__(self, load: Load) -> None:
        node = load.cluster.nodes[SMALL]
        await eventually(lambda: leads(load, node), within=30, every=0.5, what="it leads the log")
        fill(self.ballast)
        before = load.acknowledged
        await eventually(lambda: load.acknowledged > before + BETWEEN * 5, within=90, what="the others go on")
        self.met["said"] = "no space left on device" in node.config.log_file.read_text(errors="replace").lower()
        self.met["confirmed while full"] = load.acknowledged - before
        self.ballast.unlink()
        node.stop()
        await up_again(node)
        await whole_again(load.space)
        self.met["whole again"] = True


async def life(root: Path, disk: Path) -> dict[str, Any]:
    strike = Strike(disk)
    async with real_space(root, nodes=3) as space:
        await populate(space)
        await Load(space).around(strike)
    return strike.met


if __name__ == "__main__":
    root = Path(sys.argv[1]) / "home"
    disk = root / "cluster" / f"n{SMALL + 1}"
    os.umask(0o077)
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "tidings", str(disk)], check=True)
    print(json.dumps(asyncio.run(life(root, disk))))
