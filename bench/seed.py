"""Durable fan-out of Tidings beside that of the mesh it replaces, in one run on one broker.

    python bench/seed.py --json [--messages 30000] [--members 50] [--seed-messages 200]

The fan-out it replaces is written here after its description, as two loops that work side by side:
  - the writer reads a record of the chat stream, makes a copy for each member and publishes one after the other, each
    acknowledged before the next; then it acknowledges the record;
  - the one trusted reader takes a copy, reads the owner's access and its membership as they are now, publishes the copy
    to the owner's mailbox, acknowledged, and then acknowledges what it took.
It is given more than it had: the writer knows the members of a channel (there it listed every membership of the space
for each record, and read each again), records are pulled a hundred at a time, and both loops use Tidings' own
connection. It gets fewer messages than ours, because it would take many minutes for as many.

ratio_to_seed    deliveries per second of ours / of the other, each until the last is in its mailbox, same text, as many
                 members a channel; the other before and after ours
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import texts
from fanout import Fanout, fanout
from measuring import note, report
from tidings.client.mailbox import pull
from tidings.delivery.session import SessionSettings, start_session, stop_session
from tidings.nats.acks import ACK
from tidings.nats.client import Connection
from tidings.nats.jetstream import JetStream
from tidings.server.streams import MINUTE_NS
from tidings.wire.message import Sender, compose, new_id
from tidings.wire.signing import KeyPair
from tools.pouring import pour

WARM = 10_000
#: seconds after which the other is taken to be stuck
LONGEST = 300.0
PULLED = 100
PATIENCE = 10.0
CHANNELS = 4


class Seed:
    """The fan-out of the mesh before, on streams of its own."""

    def __init__(self, js: JetStream, members: int) -> None:
        self._js = js
        self._connection: Connection = js.connection
        self._owners = [new_id() for _ in range(members)]
        self._delivered = 0
        self._done = asyncio.Event()
        self._due = 0

    async def prepare(self, text: Iterator[str], messages: int) -> None:
        """Streams, consumers, everybody's access and membership, and something to fan out."""
        boxes = {"max_msgs_per_subject": 1_000, "discard": "old", "duplicate_window": 2 * MINUTE_NS}
        for name, more in (("CHAT", {}), ("INBOX", boxes), ("MAIL", boxes), ("STATE", {"max_msgs_per_subject": 1})):
            config = {"name": f"SEED_{name}", "subjects": [f"seed.{name.lower()}.>"], "storage": "file"}
            await self._js.api(f"STREAM.CREATE.SEED_{name}", config | {"allow_direct": True} | more)
        for stream, name in (("SEED_CHAT", "fanout"), ("SEED_INBOX", "reader")):
            consumer = {"durable_name": name, "ack_policy": "explicit", "ack_wait": MINUTE_NS, "max_ack_pending": 1_000}
            await self._js.api(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": consumer})
        state = [f"access.{owner}" for owner in self._owners]
        state += [f"member.{channel}.{owner}" for channel in range(CHANNELS) for owner in self._owners]
        await pour(self._js, ((f"seed.state.{key}", b'{"state": "in"}', {}) for key in state))
        sender = Sender(KeyPair.generate().id, "somebody")
        said = (compose(sender, text=words).raw for words in islice(text, messages))
        await pour(self._js, ((f"seed.chat.{n % CHANNELS}", raw, {}) for n, raw in enumerate(said)))
        self._due = messages * len(self._owners)

    async def run(self) -> float:
        """Copies a second, until the last is in its mailbox."""
        started = time.perf_counter()
        async with asyncio.timeout(LONGEST), asyncio.TaskGroup() as group:
            loops = [
                group.create_task(self._loop("SEED_CHAT", "fanout", self._fan_out)),
                group.create_task(self._loop("SEED_INBOX", "reader", self._transfer)),
            ]
            await self._done.wait()
            seconds = time.perf_counter() - started
            for loop in loops:
                loop.cancel()
        return self._due / seconds

    async def _loop(self, stream: str, consumer: str, take: Any) -> None:
        while True:
            await pull(self._connection, stream, consumer, PULLED, 1.0, take)

    async def _fan_out(self, message: Any, delivery: Any) -> None:
        channel = message.subject.rpartition(".")[2]
        for owner in self._owners:
            await self._store(f"seed.inbox.{owner}.{channel}", message.data, f"{delivery.seq}:{owner}")
        await self._connection.request(message.reply, ACK, timeout=PATIENCE)

    async def _transfer(self, message: Any, _delivery: Any) -> None:
        _, _, owner, channel = message.subject.split(".")
        await self._read(f"access.{owner}")
        await self._read(f"member.{channel}.{owner}")
        await self._store(f"seed.mail.{owner}", message.data, f"{channel}:{new_id()}")
        await self._connection.request(message.reply, ACK, timeout=PATIENCE)
        self._delivered += 1
        if self._delivered == self._due:
            self._done.set()

    async def _read(self, key: str) -> None:
        answer = await self._connection.request(f"$JS.API.DIRECT.GET.SEED_STATE.seed.state.{key}", timeout=PATIENCE)
        if answer.status is not None:
            raise RuntimeError(f"{key} is not there: {answer.status}")

    async def _store(self, subject: str, payload: bytes, message_id: str) -> None:
        headers = {"Nats-Msg-Id": message_id}
        answer = await self._connection.request(subject, payload, timeout=PATIENCE, headers=headers)
        if b'"error"' in answer.data or b'"duplicate"' in answer.data:
            raise RuntimeError(f"the broker did not store a copy: {answer.data!r}")


async def seed_rate(bench: Fanout, members: int, messages: int) -> float:
    """The fan-out before, on fresh streams that go afterwards."""
    async with bench.space.core() as js:
        seed = Seed(js, members)
        await seed.prepare(texts.prose(), messages)
        rate = await seed.run()
        for name in ("CHAT", "INBOX", "MAIL", "STATE"):
            await js.api(f"STREAM.DELETE.SEED_{name}")
    note(f"seed: {rate:,.0f} copies a second")
    return rate


async def measure(spark: Any, root: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    async with fanout(spark, root) as bench:
        people = await bench.people(chosen.channels, chosen.members)
        for _ in range(2):  # both workers of both kinds, warm
            await bench.deliver(people, texts.prose(), min(WARM, chosen.messages))
        before = await seed_rate(bench, chosen.members, chosen.seed_messages)
        ours = await bench.deliver(people, texts.prose(), chosen.messages)
        after = await seed_rate(bench, chosen.members, chosen.seed_messages)
    seed_per_s = statistics.mean((before, after))
    return {
        "ratio_to_seed": round(ours.per_s / seed_per_s, 1),
        "deliveries_per_s": round(ours.per_s),
        "seed_per_s": round(seed_per_s),
        "messages": chosen.messages,
        "seed_messages": chosen.seed_messages,
        "members": chosen.members,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--messages", type=int, default=30_000, help="that ours delivers")
    parser.add_argument("--channels", type=int, default=20)
    parser.add_argument("--members", type=int, default=50, help="of each channel")
    parser.add_argument("--seed-messages", type=int, default=200, help="that the other delivers, before and after ours")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        spark = start_session(SessionSettings(root / "spark", master="local[2]"))
        try:
            figures = asyncio.run(measure(spark, root, chosen))
        finally:
            stop_session(spark)
    rows = [(name, f"{value:,}") for name, value in figures.items()]
    report("Durable fan-out beside that of the mesh before", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    main()
