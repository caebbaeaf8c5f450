"""Much at once: a long absence of the pipeline, a very large channel, rules that change under load."""

import asyncio
import base64
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from crowd import AGENTS, Crowd, check, clients, join, post_large, read_all, say, set_class
from tidings.delivery.ledger import LedgerPaths
from tidings.wire import signing
from tidings.wire.frames import Ref, decode_frame, open_block
from tidings.wire.message import Sender, compose
from tidings.wire.rulings import Access, Member
from tidings.wire.signing import KeyPair
from tidings_testing.processes import child
from tidings_testing.real_space import AgentClient, RealSpace, real_space
from tools.delivering import Mailbox, delivering, empty_mailbox, owed
from tools.pouring import Pour, pour

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(800)]
GIB = 1 << 30


def signed(agent: AgentClient, channels: list[str], count: int, noise: int = 0) -> Iterator[Pour]:
    """Messages, each with so many bytes that cannot be made smaller."""
    chance = random.Random(0)
    for n in range(count):
        text = f"message {n} {base64.b85encode(chance.randbytes(noise)).decode()}"
        message = compose(Sender(agent.id, agent.name), text=text)
        channel = channels[n % len(channels)]
        signature = signing.sign(agent.key, agent.space_id, "chat", channel, message.raw)
        yield agent.subjects.chat(agent.id, channel), message.raw, {"Td-Sig": signature, "Nats-Msg-Id": message.id}


async def read_until(agent: AgentClient, box: Mailbox, count: int) -> None:
    async with asyncio.timeout(400):
        while len(box.records) < count:
            await empty_mailbox(agent, box)


async def test_fifty_thousand_records_that_passed_while_nobody_delivered_arrive_in_order(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """And one of the two owners stays away meanwhile: what it is owed is numbers until it reads."""
    async with real_space(tmp_path / "home", budget=GIB) as space:
        for name in AGENTS[:3]:
            await space.add(name, read=[">"], post=[">"])
        async with clients(space, AGENTS[:3]) as crowd, space.core() as js:
            ada, bob, cal = crowd.values()
            for agent in (bob, cal):
                await join(agent, "team.>")
            async with delivering(spark, space, tmp_path) as job:
                await job.caught_up()
            await pour(js, signed(ada, [f"team.{n}" for n in range(5)], 50_000), timeout=300)
            boxes = {"bob": Mailbox(), "cal": Mailbox()}
            async with delivering(spark, space, tmp_path, max_records=20_000) as job:
                await read_until(cal, boxes["cal"], 50_000)
                await job.caught_up(300, debts=False)
                assert {owner for owner, _ in job.job.deliverer.debts.open} <= {bob.id}
                await read_until(bob, boxes["bob"], 50_000)
                await job.caught_up(300)
            await check(space, {"bob": bob, "cal": cal}, boxes)


async def settle_in(space: RealSpace, channel: str, members: Iterable[KeyPair]) -> None:
    """Agents and memberships, written as the steward would: signed rulings under its lease."""
    steward = space.steward
    assert steward is not None
    tag = steward.space.tag(channel)
    async with steward.writer.lock:
        for index, agent in enumerate(members):
            access = Access(op=f"a{index}", name=f"agent{index}", read=(">",), post=(">",))
            await steward.writer.write(space.subjects.access(agent.id), access)
            joined = Member(op=f"m{index}", state="in", pattern=channel)
            await steward.writer.write(space.subjects.member(agent.id, tag), joined)


async def test_f35_a_channel_of_five_thousand_members_is_delivered_to_all_and_the_small_ones_do_not_wait(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """As it is set up: one batch may write a quarter of what all mailboxes hold, and this one is larger."""
    async with real_space(tmp_path / "home", budget=GIB // 4) as space:
        for name in AGENTS[:2]:
            await space.add(name, read=[">"], post=[">"])
        members = [KeyPair.generate() for _ in range(5_000)]
        await settle_in(space, "crowded", members)
        async with clients(space, AGENTS[:2]) as crowd, space.core() as js:
            ada, bob = crowd.values()
            await join(bob, "small")
            async with delivering(spark, space, tmp_path) as job:
                await job.caught_up(120)
            seqs = await pour(js, signed(ada, ["crowded"], 20, noise=800), timeout=60)
            small = await say(ada, "small", "not late")
            async with delivering(spark, space, tmp_path) as job:
                await job.caught_up(300)
            truth = await owed(space)
            held: dict[str, set[int]] = {}
            written: dict[str, int] = {}
            stream = space.subjects.delivery_stream
            last = int((await js.info(stream))["state"]["last_seq"])
            async for page in js.read(stream, f"{space.subjects.root}.dlv.*.*", 1, last):
                for record in page:
                    owner = record.subject.rpartition(".")[2]
                    written[owner] = record.seq
                    found = held.setdefault(owner, set())
                    for block in decode_frame(record.payload).blocks:
                        found.update(block.seqs if isinstance(block, Ref) else (kept.seq for kept in open_block(block)))
            blocks = (await js.info(space.subjects.block_stream))["state"]
    assert blocks["num_subjects"] == blocks["messages"] < 10, "each is there once, whoever is named it"
    assert all(truth[member.id] == held[member.id] == set(seqs) for member in members)
    assert held[bob.id] == truth[bob.id] == {small}
    late = owed_because(tmp_path, "the batch was too large")
    assert 0 < len(late) < len(members), "some of the crowd, and nobody else"
    assert late < {(member.id, "crowded") for member in members}
    assert all(written[bob.id] < written[owner] for owner, _ in late), "the small one did not wait for them"


async def test_a_backlog_of_large_messages_is_delivered_on_the_heap_that_everybody_has(tmp_path: Path) -> None:
    """H6: 800 MB were one batch, on a heap of 700, for ever. The pipeline is the process that `tidings up` starts."""
    count = 4_000
    async with real_space(tmp_path, budget=4 * GIB) as space:
        for name in AGENTS[:3]:
            await space.add(name, read=[">"], post=[">"])
        async with clients(space, AGENTS[:3]) as crowd:
            ada, bob, cal = crowd.values()
            for agent in (bob, cal):
                await join(agent, "team.>")
            seqs = await post_large(ada, "team.0", 200_000, count)
            box, place = Mailbox(), ("--home", space.home.home, "--space", space.home.name)
            async with child("-m", "tidings.delivery.process", *place) as job:
                while not (said := await job.line(120)).get("ready"):
                    assert "error" not in said, said
                await read_until(bob, box, count)
            assert (sorted(box.records), box.gone) == (seqs, [])
            batches = DeltaTable(LedgerPaths.below(space.home.checkpoint, space.home.lake).deliveries)
            assert len({row["through"] for row in batches.to_pyarrow_table(columns=["through"]).to_pylist()}) > 5


def owed_because(root: Path, cause: str) -> set[tuple[str, str]]:
    """Lanes that were ever in debt for this reason."""
    rows = DeltaTable(LedgerPaths.below(root / "checkpoint", root / "lake").debts).to_pyarrow_table().to_pylist()
    return {(row["owner"], row["channel"]) for row in rows if (row["kind"], row["cause"]) == ("owe", cause)}


async def test_a_class_flipped_again_and_again_under_load_counts_for_each_message_at_its_own_sequence(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """F12."""
    ada, bob, cal, dan = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")

    async def talk(agent: AgentClient) -> None:
        for n in range(300):
            await say(agent, f"team.{n % 2}", str(n), mentions=(dan.id,) if n % 10 == 0 else ())

    async def flip() -> None:
        for n in range(60):
            await set_class(ada, f"team.{n % 2}", ("live", "durable")[n // 2 % 2])

    async with delivering(spark, space, tmp_path, max_records=100) as job:
        await asyncio.gather(talk(ada), talk(bob), flip())
        await job.caught_up(120)
    boxes = await read_all({"bob": bob, "cal": cal, "dan": dan})
    await check(space, {"bob": bob, "cal": cal, "dan": dan}, boxes)
    assert 0 < len(boxes["cal"].records) < 600
    assert not any(box.repeats for box in boxes.values())
