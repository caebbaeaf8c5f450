"""How long after publishing a durable copy is settled, on a ledger that is no longer new, and what waiting costs.

    python bench/latency.py --json [--messages 60] [--idle 30] [--batches 2000]

A real space with the pipeline as the child process `tidings up` would start. Before it starts, its ledger gets the rows
and commits of 2,000 batches for fifty members who are gone, with the upkeep the job would have done. One agent sends
now and then, as people and agents do; another, who hears nothing live, takes its frames and acknowledges them.

durable_p50_ms, durable_p95_ms   published to durable copy settled
live_p50_ms      the live copy of the same messages
start_s          from starting the process until its query runs; `first_copy_s` until a message that waited is settled
idle_cpu_pct, idle_gb   when nobody says anything: of the whole process tree of the pipeline, Spark and its workers
                 included; memory is the proportional set size
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import tidings
from measuring import note, report
from reading import records_of
from tidings.client.mailbox import pull
from tidings.contract.channels import JoinRequest
from tidings.delivery.deliverer import DeliverBatch
from tidings.delivery.folders import LocalFolder
from tidings.delivery.ledger import DeltaLedger, LedgerPaths
from tidings.delivery.stream_job import Checkpoint
from tidings.model.planning import Delivered
from tidings.nats.acks import ACK
from tidings.nats.jetstream_api import EPOCH_KEY
from tidings.util.private_files import private_dir
from tidings.wire.frames import decode_frame
from tidings.wire.signing import KeyPair
from tidings_testing.processes import child
from tidings_testing.real_space import AgentClient, RealSpace, real_space

TICKS = os.sysconf("SC_CLK_TCK")
CHANNEL = "general"
FORMER = 50
#: seconds that a start may take on a machine that is busy
START = 300.0


# --- a process tree ---


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


async def archive_made(space: RealSpace, within: float) -> bool:
    """Wait for the archive of classes, which is made in the background after the first start."""
    deadline = time.perf_counter() + within
    while time.perf_counter() < deadline:
        if list((space.home.run / "spark").glob("*.jsa")):
            return True
        await asyncio.sleep(0.5)
    return False


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


# --- a ledger that is not new ---


async def age(space: RealSpace, batches: int) -> float:
    """Give the ledger so many batches of one message for each of fifty members. Answers the seconds it took.

    Everything in it is true: the log has the messages, the mailbox stream is past the frames, and nobody has a mailbox
    who was handed one. So the job finds nothing to make good when it starts.
    """
    delivery, log = space.subjects.delivery_stream, space.subjects.log_stream
    async with tidings.connect("main", name="ada", home=space.home.home) as ada, space.core() as js:
        sending = asyncio.Semaphore(64)

        async def say(n: int) -> None:
            async with sending:
                await ada.send(CHANNEL, f"said before, number {n}")

        await asyncio.gather(*(say(n) for n in range(batches)))
        end = int((await js.info(log))["state"]["last_seq"])
        epoch = str((await js.info(log))["config"]["metadata"][EPOCH_KEY])
        # a purge up to a sequence that was not reached yet moves the stream there
        await js.purge(delivery, subject_filter=">", below=batches * FORMER + 1)
        reached = int((await js.info(delivery))["state"]["last_seq"])
        if reached < batches * FORMER:
            raise RuntimeError(f"{delivery} is at {reached}, and should be at {batches * FORMER}")
    started = time.perf_counter()
    await asyncio.to_thread(_write_batches, space, epoch, end, batches)
    return time.perf_counter() - started


def _write_batches(space: RealSpace, epoch: str, end: int, batches: int) -> None:
    checkpoint, lake = private_dir(space.home.checkpoint), private_dir(space.home.lake)
    app = f"deliver:{Checkpoint(LocalFolder(checkpoint / 'spark')).identity()}"
    ledger = DeltaLedger(LedgerPaths.below(checkpoint, lake), app=app, epoch=epoch)
    debts, former = ledger.load_debts(), [KeyPair.generate().id for _ in range(FORMER)]
    for batch in range(batches):
        seq, place = end - batches + batch + 1, batch * FORMER + 1
        rows = [
            Delivered(owner, "first", batch + 1, CHANNEL, seq, seq, 1, place + index)
            for index, owner in enumerate(former)
        ]
        ledger.write_deliveries(DeliverBatch(batch, seq - 1, seq, seq), rows)
        debts = ledger.tend(debts)


# --- what is measured ---


class Settled(dict[int, float]):
    """Log sequence -> when its durable copy was settled."""

    async def wait_for(self, seqs: set[int], within: float) -> None:
        deadline = time.perf_counter() + within
        while not seqs <= self.keys():
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{len(seqs - self.keys())} durable copies did not come in {within} s")
            await asyncio.sleep(0.05)


@asynccontextmanager
async def settling(bob: AgentClient) -> AsyncIterator[Settled]:
    """Take frames as they come, acknowledge, and note when each message was settled."""
    settled = Settled()

    async def take(message: Any, _delivery: Any) -> None:
        records = await records_of(bob, decode_frame(message.data))
        await bob.connection.request(message.reply, ACK, timeout=5)
        now = time.perf_counter()
        for kept in records:
            settled.setdefault(kept.seq, now)

    async def forever() -> None:
        while True:
            await pull(bob.connection, bob.subjects.delivery_stream, f"dlv_{bob.id}", 1, 5, take)

    taking = asyncio.create_task(forever())
    try:
        yield settled
    finally:
        taking.cancel()
        await asyncio.wait({taking}, timeout=5)


async def talk(space: RealSpace, ada: tidings.DirectAgent, settled: Settled, count: int) -> dict[str, float]:
    live: dict[int, float] = {}
    sent: dict[int, float] = {}
    async with tidings.connect("main", name="cal", channels=[CHANNEL], home=space.home.home) as cal:
        cal.on("message", lambda message: live.setdefault(message.seq, time.perf_counter()))
        for counts in (False, True):
            for _ in range(count if counts else 5):
                started = time.perf_counter()
                seq = (await ada.send(CHANNEL, "is anybody there?")).seq
                sent[seq] = started
                await asyncio.sleep(random.uniform(0.1, 0.9))
            await settled.wait_for(set(sent), 60)
            if not counts:
                sent.clear()
    durable = sorted((settled[seq] - at) * 1_000 for seq, at in sent.items())
    return {
        "durable_p50_ms": round(statistics.median(durable), 1),
        "durable_p95_ms": round(durable[int(len(durable) * 0.95)], 1),
        "live_p50_ms": round(statistics.median((live[seq] - at) * 1_000 for seq, at in sent.items() if seq in live), 2),
    }


async def measure(root: Path, chosen: argparse.Namespace) -> dict[str, float]:
    async with real_space(root / "home") as space:
        home = space.home.home
        for name in ("ada", "bob", "cal"):
            await space.add(name)
        note(f"the ledger has {chosen.batches:,} batches after {await age(space, chosen.batches):.0f} s")
        arguments = ("-m", "tidings.delivery.process", "--home", str(home), "--space", "main")
        async with (
            space.agent("bob") as bob,
            tidings.connect("main", name="ada", home=home) as ada,
            settling(bob) as settled,
        ):
            await bob.control.call(JoinRequest(CHANNEL))
            first = (await ada.send(CHANNEL, "is anybody there yet?")).seq
            started = time.perf_counter()
            async with child(*arguments) as pipeline:
                while not (said := await pipeline.line(START)).get("ready"):
                    if "error" in said or "halted" in said:
                        raise RuntimeError(f"the pipeline did not start: {said}")
                ready = time.perf_counter()
                await settled.wait_for({first}, START)
                note(f"it runs after {ready - started:.1f} s")
                for line in (space.home.logs / "pipeline.log").read_text().splitlines():
                    if " WARNING " in line:  # it made something good, and the figures are not those of a usual start
                        note(line)
                figures = await talk(space, ada, settled, chosen.messages)
                if not await archive_made(space, 300):  # it is made in the background, once, after a first start
                    note("no archive of classes was made: the idle figures may have its making in them")
                share = await idle_share(pipeline.pid, chosen.idle)
                memory = memory_gb(tree(pipeline.pid))
    return figures | {
        "start_s": round(ready - started, 2),
        "first_copy_s": round(settled[first] - started, 2),
        "idle_cpu_pct": round(share, 1),
        "idle_gb": round(memory, 2),
        "batches": chosen.batches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--messages", type=int, default=60)
    parser.add_argument("--idle", type=float, default=30.0, help="seconds in which nobody says anything")
    parser.add_argument("--batches", type=int, default=2_000, help="in the ledger before it starts")
    chosen = parser.parse_args()
    os.umask(0o077)  # as the pipeline: what others could read it would close first
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), chosen))
    report("Durable copies", [(name, str(value)) for name, value in figures.items()], figures, as_json=chosen.json)


if __name__ == "__main__":
    main()
