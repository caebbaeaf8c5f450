"""Durable fan-out on Spark against a publisher that stores one message per copy.

    python bench/deliver.py --json [--messages 50000] [--channels 20] [--members 50]

Signed messages are put into the log of a real space while the job waits; then it delivers them, warm, and the time
until the deliver floor has passed them all is taken. The baseline writes the same payloads as single messages to
subjects of the same broker through a plain socket, with one acknowledgement each and thousands in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import report
from tidings.broker import jwt
from tidings.broker.blocking import WorkerConnection
from tidings.broker.jetstream import JetStream
from tidings.broker.keyring import Keyring
from tidings.pipeline.session import SessionSettings, start_session
from tidings.testing.real_space import RealSpace, real_space
from tidings.wire import signing
from tidings.wire.keys import KeyPair
from tidings.wire.message import Sender, compose
from tidings.wire.rulings import Access, Member
from tools.delivering import RunningJob, delivering
from tools.pouring import pour

COPIES = 150_000
WINDOW = 8_000
WARM = 25_000


async def populate(space: RealSpace, channels: list[str], members: int) -> list[KeyPair]:
    """Agents and memberships, written as the steward would: signed rulings under its lease."""
    steward = space.steward
    assert steward is not None
    agents = [KeyPair.generate() for _ in range(members * 6)]
    async with steward.writer.lock:
        for index, agent in enumerate(agents):
            access = Access(op=f"a{index}", name=f"agent{index}-{agent.id[-8:]}", read=(">",), post=(">",))
            await steward.writer.write(space.subjects.access(agent.id), access)
        for number, channel in enumerate(channels):
            for index in range(members):
                owner = agents[(number * members + index) % len(agents)]
                subject = space.subjects.member(owner.id, steward.space.tag(channel))
                await steward.writer.write(subject, Member(op=f"m{number}.{index}", state="in", pattern=channel))
    return agents


async def fill(space: RealSpace, js: JetStream, agents: list[KeyPair], channels: list[str], count: int) -> None:
    def records() -> Any:
        for n in range(count):
            agent, channel = agents[n % len(agents)], channels[n % len(channels)]
            message = compose(Sender(agent.id, "somebody"), text=f"message {n}: " + "what is to be said about it " * 4)
            signature = signing.sign(agent, space.info.id, "chat", channel, message.raw)
            headers = {"Td-Sig": signature, "Nats-Msg-Id": message.id}
            yield space.subjects.chat(agent.id, channel), message.raw, headers

    await pour(js, records(), timeout=600)


def one_per_copy(space: RealSpace, creds: Path) -> float:
    """Copies per second of a plain socket, one acknowledgement each."""
    connection = WorkerConnection.open(space.info.url, creds, timeout=30)
    payload = b"x" * 420
    sent = answered = 0
    started = time.perf_counter()
    replies = connection.replies(30)
    while answered < COPIES:
        wave = min(WINDOW // 2, COPIES - sent)
        if wave and sent - answered <= WINDOW // 2:
            connection.publish_all(
                (f"bench.copy.{(sent + k) % 1000}", f"NATS/1.0\r\nNats-Msg-Id: c{sent + k}\r\n\r\n".encode(), payload)
                for k in range(wave)
            )
            sent += wave
        next(replies)
        answered += 1
    rate = COPIES / (time.perf_counter() - started)
    connection.close()
    return rate


class Bench:
    """A space with its job, delivering what is put into the log while the job is held back."""

    def __init__(self, space: RealSpace, js: JetStream, running: RunningJob) -> None:
        self.space, self.js, self.running = space, js, running
        self.populations = 0

    async def people(self, channel_count: int, members: int) -> tuple[list[KeyPair], list[str]]:
        self.populations += 1
        channels = [f"team{self.populations}.c{n}" for n in range(channel_count)]
        return await populate(self.space, channels, members), channels

    async def deliver(self, agents: list[KeyPair], channels: list[str], messages: int) -> tuple[int, float]:
        """Deliveries, and the seconds until the floor has passed them all; mailboxes are emptied before."""
        job, subjects = self.running.job, self.space.subjects
        await self.running.caught_up(120)
        await asyncio.to_thread(job._lock.acquire)
        try:
            await self.js.purge(subjects.delivery_stream, subject_filter=f"{subjects.root}.dlv.*.*")
            await fill(self.space, self.js, agents, channels, messages)
        finally:
            before, started = job.tally.deliveries, time.perf_counter()
            job._lock.release()
        await self.running.caught_up(300, debts=False)
        seconds = time.perf_counter() - started
        if job.deliverer.debts.open:
            raise RuntimeError(f"mailboxes were full: the figure would be that of debts ({job.tally})")
        return job.tally.deliveries - before, seconds


async def measure(spark: Any, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    async with real_space(root / "home", budget=16 * 1024**3) as space, space.core() as js:
        await js.api(
            "STREAM.CREATE.BENCH",
            {"name": "BENCH", "subjects": ["bench.>"], "storage": "file", "duplicate_window": 120_000_000_000},
        )
        creds = root / "core.creds"
        keyring = Keyring.load(space.home.keys)
        token, key = keyring.short_lived(keyring.core, "bench")
        creds.write_text(jwt.credentials(token, key))
        async with delivering(spark, space, root, wait_ms=200) as running:
            bench = Bench(space, js, running)
            agents, channels = await bench.people(options.channels, options.members)
            for _ in range(2):  # both workers of both kinds, warm
                await bench.deliver(agents, channels, WARM)
            before = await asyncio.to_thread(one_per_copy, space, creds)
            delivered, seconds = await bench.deliver(agents, channels, options.messages)
            after = await asyncio.to_thread(one_per_copy, space, creds)
            print(f"{delivered:,} in {seconds:.1f} s beside {before:,.0f} and {after:,.0f} a second", file=sys.stderr)
            growth = {}
            for members in options.growth:
                agents, channels = await bench.people(options.channels, members)
                for messages in (options.messages // 16, options.messages // 8):
                    copies, took = await bench.deliver(agents, channels, messages)
                    growth[f"{messages:,} x {members}"] = round(copies / took)
                    print(f"{messages:,} x {members}: {copies:,} in {took:.1f} s", file=sys.stderr)
    figures = {"deliveries": delivered, "per_s": delivered / seconds, "copies_per_s": (before + after) / 2}
    return figures | {"growth": growth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--channels", type=int, default=20)
    parser.add_argument("--members", type=int, default=50)
    parser.add_argument("--growth", type=int, nargs="*", default=[10, 50, 200], help="members a channel")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        spark = start_session(SessionSettings(root / "spark", master="local[2]"))
        figures = asyncio.run(measure(spark, root, options))
        spark.stop()
    ratio = figures["per_s"] / figures["copies_per_s"]
    rows = [
        ("messages x members", f"{options.messages:,} x {options.members}"),
        ("deliveries per second", f"{figures['per_s']:,.0f}"),
        ("one message per copy", f"{figures['copies_per_s']:,.0f} per second"),
        ("ratio", f"{ratio:.2f}"),
        *((f"deliveries per second, {what}", f"{rate:,}") for what, rate in figures["growth"].items()),
    ]
    said = {
        "ratio_to_one_per_copy": round(ratio, 2),
        "deliveries_per_s": round(figures["per_s"]),
        "growth": figures["growth"],
    }
    report("Durable fan-out", rows, said, as_json=options.json)


if __name__ == "__main__":
    main()
