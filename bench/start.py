"""How long the pipeline takes from its start to its first delivery, and what it costs while nobody says anything.

    python bench/start.py --json [--starts 3] [--idle 30] [--java BIN_FOLDER_OR_HOME] [--conf KEY=VALUE]...

A real space and the pipeline as the child process that `tidings up` starts. A message is in the log before each start;
`start_s` ends when its durable copy is there to be read, `ready_s` when the query runs, `phases` say what came between.
`cpu_s` is the CPU time of the whole process tree until then: on a busy machine it is the steadier figure. The first
start has no archive of classes yet and is told apart (`first_start_s`); the others come after it was made. Then
nothing happens: `idle_gb` is the resident memory of the tree (`idle_pss_gb` counts what is shared once), `jvm_gb` and
`python_gb` its parts, `idle_cpu_pct` percent of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tidings
from latency import archive_made, cpu_seconds, idle_share, memory_gb, tree
from measuring import report
from tidings.client.mailbox import pull
from tidings.contract.channels import JoinRequest
from tidings.errors import TidingsError
from tidings.nats.acks import ACK
from tidings_testing.processes import Child, child
from tidings_testing.real_space import AgentClient, real_space

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Start:
    """One start, in seconds since the process was started."""

    phases: dict[str, float] = field(default_factory=dict)
    ready: float = 0.0
    delivered: float = 0.0
    cpu: float = 0.0


@dataclass
class Idle:
    rss: float = 0.0
    pss: float = 0.0
    jvm: float = 0.0
    python: float = 0.0
    share: float = 0.0


def resident(pids: list[int]) -> dict[int, float]:
    """Resident GB of each process."""
    found: dict[int, float] = {}
    for pid in pids:
        with suppress(OSError):
            found[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024**3
    return found


def is_jvm(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "java"
    return False


def with_children_that_ended(pids: list[int]) -> float:
    """CPU seconds of processes and of those they waited for."""
    total = sum(cpu_seconds(pids).values())
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[13]) + int(fields[14])) / TICKS
    return total


async def next_frame(bob: AgentClient, within: float) -> None:
    got = asyncio.Event()

    async def take(message: Any, _delivery: Any) -> None:
        await bob.connection.request(message.reply, ACK, timeout=5)
        got.set()

    async with asyncio.timeout(within):
        while not got.is_set():
            try:
                await pull(bob.connection, bob.subjects.delivery_stream, f"dlv_{bob.id}", 1, 5, take)
            except TidingsError:  # busy machines are late; the bound above is the limit
                await asyncio.sleep(0.05)


async def start_once(pipeline: Child, bob: AgentClient, began: float) -> Start:
    found = Start()
    taking = asyncio.create_task(next_frame(bob, 180))
    while not found.ready:
        said = await pipeline.line(180)
        now = time.perf_counter() - began
        if "phase" in said:
            found.phases[said["phase"]] = round(now, 2)
        elif said.get("ready"):
            found.ready = now
        elif "error" in said:
            raise RuntimeError(said["error"])
    await taking
    found.delivered = time.perf_counter() - began
    found.cpu = with_children_that_ended(tree(pipeline.pid))
    return found


async def be_idle(pipeline: Child, seconds: float) -> Idle:
    await asyncio.sleep(min(10.0, seconds))  # what the start left to do is not idling
    share = await idle_share(pipeline.pid, seconds)
    pids = tree(pipeline.pid)
    each = resident(pids)
    jvm = sum(size for pid, size in each.items() if is_jvm(pid))
    return Idle(sum(each.values()), memory_gb(pids), jvm, sum(each.values()) - jvm, share)


async def measure(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    starts: list[Start] = []
    idle = Idle()
    async with real_space(root / "home") as space:
        for name in ("ada", "bob"):
            await space.add(name, read=["general"], post=["general"])
        home = space.home.home
        command = ["-m", "tidings.delivery.process", "--home", str(home), "--space", "main"]
        for each in options.conf:
            command += ["--conf", each]
        async with space.agent("bob") as bob, tidings.connect("main", name="ada", home=home) as ada:
            await bob.control.call(JoinRequest("general"))
            for turn in range(options.starts):
                await ada.send("general", "is anybody there?")
                began = time.perf_counter()
                async with child(*command, more={"JAVA_HOME": options.java} if options.java else None) as pipeline:
                    starts.append(await start_once(pipeline, bob, began))
                    if turn == 0 and options.archive and not await archive_made(space, 300):
                        raise TimeoutError("no archive of classes was made")
                    if turn == options.starts - 1:
                        idle = await be_idle(pipeline, options.idle)
                    pipeline.process.terminate()
                    await pipeline.ended(60)
    later = starts[1:] or starts
    middle = sorted(later, key=lambda start: start.delivered)[len(later) // 2]
    return {
        "start_s": round(statistics.median(start.delivered for start in later), 2),
        "ready_s": round(statistics.median(start.ready for start in later), 2),
        "cpu_s": round(statistics.median(start.cpu for start in later), 2),
        "first_start_s": round(starts[0].delivered, 2),
        "first_cpu_s": round(starts[0].cpu, 2),
        "phases": middle.phases | {"ready": round(middle.ready, 2), "delivered": round(middle.delivered, 2)},
        "idle_gb": round(idle.rss, 2),
        "idle_pss_gb": round(idle.pss, 2),
        "jvm_gb": round(idle.jvm, 2),
        "python_gb": round(idle.python, 2),
        "idle_cpu_pct": round(idle.share, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--starts", type=int, default=4, help="the first one is told apart")
    parser.add_argument("--idle", type=float, default=30.0)
    parser.add_argument("--java", help="a JAVA_HOME for the pipeline")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--no-archive", dest="archive", action="store_false", help="do not wait for one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), options))
    report("Starting", [(name, str(value)) for name, value in figures.items()], figures, as_json=options.json)


if __name__ == "__main__":
    main()
