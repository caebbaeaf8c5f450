"""A space with its deliver job, people in channels, and a log to fill: what the benches of durable fan-out share.

    async with fanout(spark, root) as bench:
        people = await bench.people(channels=20, members=50)
        delivery = await bench.deliver(people, texts.prose(), 50_000)

Signed messages are put into the log while the job is held back; then it delivers them, and the time until the last was
delivered is taken, payments of what one batch could not take included. How many deliveries that must be is known before
from who sent what where: another number is an error, not a figure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from measuring import note
from reading import UNDER_WAY, read_all
from tidings.nats import jwt
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.server.keyring import Keyring
from tidings.server.streams import MINUTE_NS
from tidings.wire import signing
from tidings.wire.message import Message, Sender, compose
from tidings.wire.records import encode_headers
from tidings.wire.rulings import Access, Member
from tidings.wire.signing import KeyPair
from tidings_testing.real_space import RealSpace, real_space
from tools.delivering import RunningJob, delivering

#: messages under way when the log is filled, and copies of the baseline
WINDOW = 4_000
COPIES = 100_000
BUDGET = 16 * 1024**3


@dataclass(frozen=True)
class People:
    """Agents, each in about three channels of so many members."""

    agents: list[KeyPair]
    channels: list[str]
    #: ids of the members of each channel
    members: list[frozenset[str]]

    def turn(self, n: int) -> tuple[KeyPair, int]:
        """Who says message `n`, in which channel."""
        return self.agents[n % len(self.agents)], n % len(self.channels)

    def deliveries(self, messages: int) -> int:
        """What is owed for so many messages: a copy to each member but the sender."""
        turns = (self.turn(n) for n in range(messages))
        return sum(len(self.members[where]) - (agent.id in self.members[where]) for agent, where in turns)


@dataclass(frozen=True)
class Delivery:
    deliveries: int
    seconds: float

    @property
    def per_s(self) -> float:
        return self.deliveries / self.seconds


class Fanout:
    """Credentials of an operator end after minutes, so each step has its own."""

    def __init__(self, space: RealSpace, running: RunningJob, root: Path) -> None:
        self.space, self.running = space, running
        self._root = root
        self._populations = self._runs = 0

    # --- who is there ---

    async def people(self, channels: int, members: int, *, mailboxes: bool = False) -> People:
        """Agents and memberships, written as the steward would: signed rulings under its lease.

        With `mailboxes` they can read what they are handed (`read`).
        """
        self._populations += 1
        steward, subjects = self.space.steward, self.space.subjects
        assert steward is not None
        agents = [KeyPair.generate() for _ in range(max(members, members * channels * 3 // 10))]
        names = [f"team{self._populations}.c{n}" for n in range(channels)]
        owners = [[agents[(c * members + m) % len(agents)] for m in range(members)] for c in range(channels)]
        async with steward.writer.lock:
            for index, agent in enumerate(agents):
                access = Access(op=f"a{index}", name=f"agent{index}-{agent.id[-8:]}", read=(">",), post=(">",))
                await steward.writer.write(subjects.access(agent.id), access)
            for c, channel in enumerate(names):
                for m, owner in enumerate(owners[c]):
                    subject = subjects.member(owner.id, steward.space.tag(channel))
                    await steward.writer.write(subject, Member(op=f"m{c}.{m}", state="in", pattern=channel))
        if mailboxes:
            await self._make_mailboxes(agents)
        return People(agents, names, [frozenset(owner.id for owner in each) for each in owners])

    async def _make_mailboxes(self, agents: list[KeyPair]) -> None:
        stream = self.space.subjects.delivery_stream
        fixed = {"ack_policy": "explicit", "ack_wait": MINUTE_NS, "max_ack_pending": UNDER_WAY, "deliver_policy": "all"}
        async with self.space.core() as js:
            for agent in agents:
                name, filtered = f"dlv_{agent.id}", self.space.subjects.delivery(agent.id)
                config = {"name": name, "durable_name": name, "filter_subject": filtered, **fixed}
                await js.api(f"CONSUMER.CREATE.{stream}.{name}.{filtered}", {"stream_name": stream, "config": config})

    # --- what is said, delivered and read ---

    async def deliver(self, people: People, text: Iterator[str], messages: int, within: float = 400.0) -> Delivery:
        """Empty the mailboxes, fill the log, and take the time until everything is delivered."""
        await self.running.caught_up(within)
        job = self.running.job
        await asyncio.to_thread(job._lock.acquire)  # a batch waits for it
        try:
            await self._empty_mailboxes()
            await asyncio.to_thread(self._fill, people, text, messages)
        finally:
            before, started = job.tally.deliveries, time.perf_counter()
            job._lock.release()
        await self.running.caught_up(within)
        seconds = time.perf_counter() - started
        owed, delivered = people.deliveries(messages), job.tally.deliveries - before
        if delivered != owed:
            raise RuntimeError(f"{owed:,} deliveries were owed and {delivered:,} were made: {job.tally}")
        note(f"  {messages:,} messages, {delivered:,} deliveries in {seconds:.1f} s")
        return Delivery(delivered, seconds)

    async def _empty_mailboxes(self) -> None:
        stream, root = self.space.subjects.delivery_stream, self.space.subjects.root
        async with self.space.core() as js:
            end = int((await js.info(stream))["state"]["last_seq"])
            await js.purge(stream, subject_filter=f"{root}.dlv.*.*", below=end + 1)

    def _fill(self, people: People, text: Iterator[str], messages: int) -> None:
        subjects, space_id = self.space.subjects, self.space.info.id

        def records() -> Iterator[tuple[str, bytes, bytes]]:
            for n, message in enumerate(self._said(people, text, messages)):
                agent, where = people.turn(n)
                channel = people.channels[where]
                signature = signing.sign(agent, space_id, "chat", channel, message.raw)
                headers = encode_headers((("Nats-Msg-Id", message.id), ("Td-Sig", signature)))
                yield subjects.chat(agent.id, channel), headers, message.raw

        self._publish(records())

    def _said(self, people: People, text: Iterator[str], messages: int) -> Iterator[Message]:
        for n, words in enumerate(islice(text, messages)):
            yield compose(Sender(people.turn(n)[0].id, "somebody"), text=words)

    def _publish(self, records: Iterator[tuple[str, bytes, bytes]]) -> int:
        """One acknowledgement for each, at most two windows under way. Answers how many there were."""
        connection = WorkerConnection.open(self.space.info.url, self._credentials(), timeout=30)
        answers, under_way, published = connection.replies(30), 0, 0
        try:
            while True:
                sent = len(connection.publish_all(islice(records, WINDOW)))
                published += sent
                while under_way:
                    if b'"error"' in (reply := next(answers)).payload or reply.status is not None:
                        raise RuntimeError(f"the broker refused a message: {reply}")
                    under_way -= 1
                under_way = sent
                if not sent:
                    return published
        finally:
            connection.close()

    def _credentials(self) -> Path:
        keyring, path = Keyring.load(self.space.home.keys), self._root / "core.creds"
        path.touch(mode=0o600)
        path.write_text(jwt.credentials(*keyring.short_lived(keyring.core, "bench")))
        return path

    async def one_per_copy(self, people: People, text: Iterator[str], copies: int = COPIES) -> float:
        """The baseline, copies a second: the same messages as single copies on a thousand subjects of this broker.

        A plain socket, one acknowledgement each, thousands under way, no signature.
        """
        async with self.space.core() as js:
            end = int((await js.info("BENCH"))["state"]["last_seq"])
            await js.purge("BENCH", subject_filter=">", below=end + 1)
        self._runs += 1
        bodies = [message.raw for message in self._said(people, text, 1_000)]

        def records() -> Iterator[tuple[str, bytes, bytes]]:
            for n in range(copies):
                # an id of an earlier run would be a repeat, which the broker does not store
                block = f"NATS/1.0\r\nNats-Msg-Id: c{self._runs}.{n}\r\n\r\n".encode()
                yield f"bench.copy.{n % 1000}", block, bodies[n % 1000]

        started = time.perf_counter()
        await asyncio.to_thread(self._publish, records())
        return copies / (time.perf_counter() - started)

    async def read(self, people: People) -> tuple[int, float]:
        """Everybody empties its mailbox: how many messages they had, and the seconds it took."""
        stream, root = self.space.subjects.delivery_stream, self.space.subjects.root
        async with self.space.core() as js:
            counts = await js.counts_of(stream, f"{root}.dlv.*.*")
        held = {subject.rpartition(".")[2]: count for subject, count in counts.items()}
        keyring, subjects = Keyring.load(self.space.home.keys), self.space.subjects
        readers = []
        for agent in people.agents:
            token = keyring.agent_token(subjects, agent.id, f"reader-{agent.id[-8:]}", [">"], [">"])
            readers.append((agent, jwt.credentials(token, agent)))
        started = time.perf_counter()
        messages = await read_all(self.space, readers, held)
        return messages, time.perf_counter() - started


@asynccontextmanager
async def fanout(spark: Any, root: Path) -> AsyncIterator[Fanout]:
    """A new space below `root`, with a job that delivers in this process on `spark`."""
    async with real_space(root / "home", budget=BUDGET) as space:
        async with space.core() as js:
            stream = {"name": "BENCH", "subjects": ["bench.>"], "storage": "file", "duplicate_window": 2 * MINUTE_NS}
            await js.api("STREAM.CREATE.BENCH", stream)
        async with delivering(spark, space, root, wait_ms=200) as running:
            yield Fanout(space, running, root)
