"""Durable fan-out on Spark against a publisher that stores one message per copy.

    python bench/deliver.py --json [--messages 50000] [--channels 20] [--members 50]

Signed messages are put into the log of a real space while the job waits; then it delivers them, warm, and the time
until the deliver floor has passed them all is taken. The baseline writes the same payloads as single messages to
subjects of the same broker through a plain socket, with one acknowledgement each and thousands in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import report
from tidings.broker import jwt
from tidings.broker.jetstream import JetStream
from tidings.broker.keyring import Keyring
from tidings.pipeline.plain import PlainConnection
from tidings.pipeline.session import SessionSettings, start_session
from tidings.testing.delivering import delivering
from tidings.testing.pouring import pour
from tidings.testing.real_space import RealSpace, real_space
from tidings.wire import signing
from tidings.wire.keys import KeyPair
from tidings.wire.message import Sender, compose
from tidings.wire.rulings import Access, Member

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
            access = Access(op=f"a{index}", name=f"agent{index}", read=(">",), post=(">",))
            await steward.writer.write(space.subjects.access(agent.id), access)
        for number, channel in enumerate(channels):
            for index in range(members):
                owner = agents[(number * 7 + index) % len(agents)]
                subject = space.subjects.member(owner.id, steward.tag(channel))
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
    connection = PlainConnection.connect(space.info.url, creds, timeout=30)
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


async def measure(spark: Any, root: Path, messages: int, channel_count: int, members: int) -> dict[str, float]:
    channels = [f"team.c{n}" for n in range(channel_count)]
    async with real_space(root / "home", budget=4 * 1024**3) as space, space.core() as js:
        await js.api(
            "STREAM.CREATE.BENCH",
            {"name": "BENCH", "subjects": ["bench.>"], "storage": "file", "duplicate_window": 120_000_000_000},
        )
        creds = root / "core.creds"
        keyring = Keyring.load(space.home.keys)
        token, key = keyring.short_lived(keyring.core, "bench")
        creds.write_text(jwt.credentials(token, key))
        agents = await populate(space, channels, members)
        async with delivering(spark, space, root, wait_ms=200) as running:
            for _ in range(2):  # both workers of both kinds, warm
                await fill(space, js, agents, channels, WARM)
                await running.caught_up(180, debts=False)
                await js.purge(space.subjects.delivery_stream, subject_filter=f"{space.subjects.root}.dlv.*.*")
            before_copies = await asyncio.to_thread(one_per_copy, space, creds)
            await asyncio.to_thread(running.job._lock.acquire)
            await fill(space, js, agents, channels, messages)
            before, started = running.job.tally.deliveries, time.perf_counter()
            running.job._lock.release()
            await running.caught_up(300, debts=False)
            seconds = time.perf_counter() - started
            delivered = running.job.tally.deliveries - before
            if running.job.deliverer.debts.open:
                raise RuntimeError("mailboxes were full: the figure would be that of debts")
            after_copies = await asyncio.to_thread(one_per_copy, space, creds)
            baseline = (before_copies + after_copies) / 2
    return {"deliveries": delivered, "seconds": seconds, "per_s": delivered / seconds, "copies_per_s": baseline}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--channels", type=int, default=20)
    parser.add_argument("--members", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        spark = start_session(SessionSettings(root / "spark", master="local[2]"))
        figures = asyncio.run(measure(spark, root, options.messages, options.channels, options.members))
        spark.stop()
    ratio = figures["per_s"] / figures["copies_per_s"]
    rows = [
        ("messages x members", f"{options.messages:,} x {options.members}"),
        ("deliveries per second", f"{figures['per_s']:,.0f}"),
        ("one message per copy", f"{figures['copies_per_s']:,.0f} per second"),
        ("ratio", f"{ratio:.2f}"),
    ]
    said = {"ratio_to_one_per_copy": round(ratio, 2), "deliveries_per_s": round(figures["per_s"])}
    report("Durable fan-out", rows, said, as_json=options.json)


if __name__ == "__main__":
    main()
