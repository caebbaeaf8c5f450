"""The deliver job on a broker of three servers: frames in batches, and exactly what is owed although leaders die."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster_load import leader_of, rolling_restart, up_again
from crowd import Crowd, check, clients, gathered, join, read_all, say
from foreign import connect
from tidings.delivery import deliverer, publishing
from tidings.errors import TidingsError
from tidings.nats.errors import NatsError
from tidings.server.nats_server import Broker
from tidings.wire.message import new_id
from tidings_testing.real_space import AgentClient, RealSpace, real_space
from tidings_testing.waiting import eventually, insist
from tools.delivering import Mailbox, delivering

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
LISTENERS = ("bob", "cal")


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "home", nodes=3) as running:
        yield running


@pytest.fixture
async def crowd(space: RealSpace) -> AsyncIterator[Crowd]:
    async with gathered(space) as people:
        yield people


@pytest.mark.slow
async def test_members_get_exactly_what_they_are_owed_although_the_leader_of_the_mailboxes_dies(
    spark: "SparkSession", space: RealSpace, crowd: dict[str, AgentClient], tmp_path: Path
) -> None:
    assert space.cluster is not None
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    async with delivering(spark, space, tmp_path) as job:
        for n in range(30):
            await say(ada, f"team.{n % 3}", f"before {n}")
        await job.caught_up()
        async with space.core() as core:
            leader = (await core.info("DLV_main"))["cluster"]["leader"]
        keeps = str(ada.connection.info["server_name"])  # raw clients do not connect again
        node = next(each for each in space.cluster.nodes[::-1] if each.config.server_name != keeps)
        if leader != keeps:
            node = space.cluster.node(leader)
        node.kill()
        for n in range(30):
            await _insistently(ada, f"team.{n % 3}", f"meanwhile {n}")
        node.spawn()
        await eventually(node.is_ready, within=30)
        await job.caught_up(within=120)
    boxes = {name: Mailbox() for name in crowd}

    async def all_there() -> bool:
        """A mailbox whose leader is being chosen hands out nothing yet."""
        await read_all(crowd, boxes)
        return len(boxes["bob"].records) >= 60 and len(boxes["cal"].records) >= 60

    await eventually(all_there, within=60)
    await check(space, crowd, boxes)
    assert not any(box.repeats for box in boxes.values())


async def _insistently(sender: AgentClient, channel: str, text: str) -> None:
    """Until the log takes it: a leader is being chosen. What was not answered may be stored, and is then owed too."""
    for _ in range(200):
        try:
            await say(sender, channel, text)
            return
        except (TidingsError, NatsError, OSError):
            await asyncio.sleep(0.1)
    raise AssertionError("nobody took it")


async def members(space: RealSpace) -> None:
    """Four agents, of whom two listen; nobody is connected any more."""
    async with gathered(space) as crowd:
        for name in LISTENERS:
            await join(crowd[name], "team.>")


async def talk(space: RealSpace, text: str, count: int) -> None:
    """Through an endpoint, which finds another node; one that was not answered is sent again under its id."""
    async with connect(space, "ada", receive=False) as ada:
        for n in range(count):
            said, channel = new_id(), f"team.{n % 3}"
            await insist(lambda: ada.send(channel, f"{text} {n}", id=said), within=60)  # noqa: B023


async def exactly_what_is_owed(space: RealSpace, count: int) -> None:
    async with clients(space, LISTENERS) as crowd:
        boxes = {name: Mailbox() for name in crowd}

        async def all_there() -> bool:
            await read_all(crowd, boxes)
            return min(len(box.records) for box in boxes.values()) >= count

        await eventually(all_there, within=60)
        await check(space, crowd, boxes)
    assert [(len(box.records), box.repeats) for box in boxes.values()] == [(count, 0)] * len(LISTENERS)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["deliver.frame", "deliver.published", "deliver.recorded"])
async def test_the_leader_of_the_mailboxes_killed_during_a_batch_costs_nobody_anything(
    spark: "SparkSession", space: RealSpace, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first frame, after all of them, and after they were written down and Spark knows nothing of it."""
    await members(space)
    await talk(space, "before", 30)
    killed: list[Broker] = []
    loop = asyncio.get_running_loop()

    def strike(name: str) -> None:
        if name == point and not killed:
            found = asyncio.run_coroutine_threadsafe(leader_of(space, "DLV_main"), loop).result(40)
            found.kill()
            killed.append(found)

    monkeypatch.setattr(publishing, "BATCH", 1)
    for place in (publishing, deliverer):
        monkeypatch.setattr(place, "reach", strike)
    async with delivering(spark, space, tmp_path) as job:
        await eventually(lambda: killed, within=60, what=f"{point} is reached")
        await talk(space, "meanwhile", 30)
        await up_again(killed[0])
        await job.caught_up(within=120)
    await exactly_what_is_owed(space, 60)


@pytest.mark.slow
async def test_a_rolling_restart_while_the_pipeline_delivers_costs_nobody_anything(
    spark: "SparkSession", space: RealSpace, tmp_path: Path
) -> None:
    await members(space)
    said, over = 0, asyncio.Event()

    async def talk_on() -> None:
        nonlocal said
        while not over.is_set():
            await talk(space, "meanwhile", 10)
            said += 10

    async with delivering(spark, space, tmp_path) as job:
        talking = asyncio.create_task(talk_on())
        await eventually(lambda: job.job.tally.deliveries > 0, within=60, what="it delivers")
        await rolling_restart(space)
        before = job.job.tally.deliveries
        await eventually(lambda: job.job.tally.deliveries > before, within=60, what="it delivers still")
        over.set()
        await talking
        await job.caught_up(within=120)
    await exactly_what_is_owed(space, said)
