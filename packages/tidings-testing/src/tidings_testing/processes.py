"""The programs of a space as real processes, for tests that kill, pause or starve them.

    async with steward_child(home, failpoint="steward.after_write:kill") as steward:
        ...
        await steward.ended()

A child is waited for and, if it still runs, killed when the block ends; only processes started here are signalled.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tidings
from tidings.admin.home import SpaceHome
from tidings.server.nats_server import die_with_parent
from tidings_testing.waiting import eventually

START_SECONDS = 30.0
END_SECONDS = 20.0


async def pause(pid: int) -> None:
    """Stop a process and return when it is: the signal alone leaves its other threads a moment to answer."""
    os.kill(pid, signal.SIGSTOP)
    await paused(pid)


async def paused(pid: int, within: float = 10.0) -> None:
    """Wait until every thread of a process is stopped, whoever stopped it."""
    tasks = Path(f"/proc/{pid}/task")
    await eventually(lambda: all(map(_is_stopped, tasks.iterdir())), within=within, what="it is paused")


def _is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


@dataclass
class Child:
    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def line(self, within: float = START_SECONDS) -> dict[str, Any]:
        """The next line it says."""
        assert self.process.stdout is not None
        said = await asyncio.wait_for(self.process.stdout.readline(), within)
        assert said, f"the child said nothing and ended with {self.process.returncode}"
        return dict(json.loads(said))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self, within: float = END_SECONDS) -> int:
        """Wait for its end; negative for a signal."""
        return await asyncio.wait_for(self.process.wait(), within)

    async def last_line(self) -> dict[str, Any]:
        """The last line of a child that ended."""
        assert self.process.stdout is not None
        lines = (await self.process.stdout.read()).splitlines()
        return dict(json.loads(lines[-1])) if lines else {}


@dataclass
class StewardChild(Child):
    holder: str = ""
    lease: int = 0


@asynccontextmanager
async def child(
    *command: str | Path, failpoint: str = "", more: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """Run `python <command>`; `failpoint` is where it strikes itself, `more` is added to its environment."""
    sources = str(Path(tidings.__file__).parents[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": sources, "TIDINGS_FAILPOINT": failpoint, **(more or {})},
        preexec_fn=die_with_parent,
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def steward_child(
    home: SpaceHome, *, ttl: float = 1.0, after: str = "", failpoint: str = ""
) -> AsyncIterator[StewardChild]:
    """A steward that serves."""
    place = ("--home", home.home, "--space", home.name, "--lease-ttl", str(ttl))
    known = ("--after", after) if after else ()
    async with child("-m", "tidings.supervisor.children", "steward", *place, *known, failpoint=failpoint) as running:
        said = await running.line()
        assert said.get("ready"), said
        yield StewardChild(running.process, holder=said["holder"], lease=said["lease"])
