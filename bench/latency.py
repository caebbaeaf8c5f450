"""How long after publishing a durable copy is settled, and what waiting costs.

    python bench/latency.py --json [--messages 60] [--idle 60]

A real space with the pipeline as the child process `tidings up` would start. One agent sends now and then, as people
and agents do; another, who hears nothing live, takes its frames and acknowledges them. `live_p50_ms` is the live copy
of the same messages. Then nobody says anything: `idle_cpu_pct` and `idle_gb` (proportional set size) are those of the
whole process tree of the pipeline, Spark and its workers included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import tidings
from measuring import report
from tidings.broker.acks import ACK
from tidings.endpoint.mailbox import pull
from tidings.testing.processes import child
from tidings.testing.real_space import AgentClient, RealSpace, real_space
from tidings.wire.frames import Block, decode_frame, open_block

TICKS = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """The process and everything below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [root]
    for pid in found:
        found += [each for each, parent in parents.items() if parent == pid]
    return found


def cpu_seconds(pids: list[int]) -> dict[int, float]:
    """CPU time of each process, as far as it is there."""
    found: dict[int, float] = {}
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        found[pid] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


async def idle_share(root: int, seconds: float) -> float:
    """Percent of a core that a process tree used. Idle workers end and others begin: each counts while it is there."""
    first, last = cpu_seconds(tree(root)), dict[int, float]()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        await asyncio.sleep(0.5)
        last |= cpu_seconds(tree(root))
    used = sum(now - first.get(pid, 0.0) for pid, now in last.items())
    return used / (time.perf_counter() - started) * 100


def memory_gb(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024**2


async def settle_frames(bob: AgentClient, settled: dict[int, float]) -> None:
    """Take frames as they come, acknowledge, and note when each message was settled."""

    async def take(message: Any, _delivery: Any) -> None:
        await bob.connection.request(message.reply, ACK, timeout=5)
        now = time.perf_counter()
        for block in decode_frame(message.data).blocks:
            assert isinstance(block, Block), "one reader: no reference"
            for kept in open_block(block):
                settled.setdefault(kept.seq, now)

    while True:
        await pull(bob.connection, bob.subjects.delivery_stream, f"dlv_{bob.id}", 1, 5, take)


async def talk(space: RealSpace, count: int) -> tuple[list[float], list[float]]:
    settled: dict[int, float] = {}
    live: dict[int, float] = {}
    sent: dict[int, float] = {}
    home = space.home.home
    async with space.agent("bob") as bob, tidings.connect("main", name="ada", home=home) as ada:
        await bob.control.call("member", "join", pattern="general")
        async with tidings.connect("main", name="cal", channels=["general"], home=home) as cal:
            cal.on("message", lambda message: live.setdefault(message.seq, time.perf_counter()))
            taking = asyncio.create_task(settle_frames(bob, settled))
            for warm in range(2):
                for _ in range(5 if not warm else count):
                    started = time.perf_counter()
                    seq = (await ada.send("general", "is anybody there?")).seq
                    if warm:
                        sent[seq] = started
                    await asyncio.sleep(random.uniform(0.1, 0.9))
                deadline = time.perf_counter() + 60
                while not set(sent) <= set(settled) or (not warm and len(settled) < 5):
                    if time.perf_counter() > deadline:
                        raise TimeoutError("durable copies did not come")
                    await asyncio.sleep(0.05)
            taking.cancel()
    durable = [(settled[seq] - at) * 1_000 for seq, at in sent.items()]
    return durable, [(live[seq] - at) * 1_000 for seq, at in sent.items() if seq in live]


async def measure(root: Path, count: int, idle: float) -> dict[str, float]:
    async with real_space(root / "home") as space:
        for name in ("ada", "bob", "cal"):
            await space.add(name)
        arguments = ("-m", "tidings.pipeline.process", "--home", str(space.home.home), "--space", "main")
        async with child(*arguments) as pipeline:
            while not (await pipeline.line(120)).get("ready"):
                continue
            durable, live = await talk(space, count)
            share = await idle_share(pipeline.pid, idle)
            memory = memory_gb(tree(pipeline.pid))
    ordered = sorted(durable)
    return {
        "durable_p50_ms": round(statistics.median(ordered), 1),
        "durable_p95_ms": round(ordered[int(len(ordered) * 0.95)], 1),
        "live_p50_ms": round(statistics.median(live), 2),
        "idle_cpu_pct": round(share, 1),
        "idle_gb": round(memory, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--messages", type=int, default=60)
    parser.add_argument("--idle", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), options.messages, options.idle))
    report("Durable copies", [(name, str(value)) for name, value in figures.items()], figures, as_json=options.json)


if __name__ == "__main__":
    main()
