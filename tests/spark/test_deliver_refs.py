"""Blocks by reference through the real pipeline: stored once, named in frames, and no loss when they are gone."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tidings
from crowd import AGENTS, Crowd, check, clients, join, leave, narrow, post_large, read_all, say
from tidings.client.connect import connect_directly
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.delivery import deliverer as rules
from tidings.delivery import job as job_module
from tidings.delivery.job import FULL_LOG_WORDS
from tidings.errors import TidingsError
from tidings.nats.jetstream_api import NO_END
from tidings.server.streams import gate_state
from tidings_testing.real_space import AgentClient, RealSpace, real_space
from tidings_testing.waiting import eventually
from tools.delivering import Mailbox, delivering

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
#: mailboxes are looked after at every turn
OFTEN = {"look_every": 0.0}
MIB = 1 << 20


async def state_of(space: RealSpace, stream: str) -> dict[str, Any]:
    async with space.core() as js:
        return dict((await js.info(stream))["state"])


async def remove_blocks(space: RealSpace, *, below: int = NO_END) -> None:
    async with space.core() as js:
        stream = space.subjects.block_stream
        await js.purge(stream, subject_filter=f"{space.subjects.root}.blk.>", below=below)


async def heard(space: RealSpace, agent: AgentClient, count: int, **options: Any) -> tuple[list[int], int]:
    """What a real endpoint surfaces until its mailbox is empty, and how many blocks it asked for."""
    errors: list[Exception] = []
    stream = space.subjects.delivery_stream
    async with connect_directly(space.home.name, name=agent.name, home=space.home.home, **options) as endpoint:
        endpoint.on("error", errors.append)
        seqs = []
        for _ in range(count):
            message = await endpoint.next_message(30)
            seqs.append(message.seq)
            await message.ack()

        async def is_empty() -> bool:
            async with space.core() as js:
                info = await js.api(f"CONSUMER.INFO.{stream}.dlv_{agent.id}")
            return not (info["num_pending"] or info["num_ack_pending"] or len(endpoint.transport.queue))

        await eventually(is_empty, within=30, what="every frame is settled")
        assert errors == []
        return seqs, endpoint.transport._frames.blocks.asked


async def test_a_repeated_batch_makes_the_same_bytes_and_mailboxes_that_were_emptied_are_filled_again(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    for channel in ("team.0", "team.1"):
        await post_large(ada, channel, 3_000, 4)
    small = await say(ada, "team.2", "a block of one small message")
    struck: list[int] = []

    def strike(name: str) -> None:
        if name == "deliver.published" and not struck:
            struck.append(1)
            raise TidingsError("struck")

    monkeypatch.setattr(rules, "reach", strike)
    subjects, steward = space.subjects, space.steward
    assert steward is not None
    async with delivering(spark, space, tmp_path, **OFTEN) as job:
        await job.caught_up()
        blocks = await state_of(space, subjects.block_stream)
        assert (struck, blocks["messages"], blocks["last_seq"]) == ([1], 2, 4), "two, each stored at both attempts"
        assert [await frames_of(space, agent) for agent in (bob, cal)] == [1, 1], "the broker knew the second attempt"
        job.job._lock.acquire()
        try:
            await remove_blocks(space)
            for agent in (bob, cal):
                await steward.admin.empty_mailbox(agent.id)
        finally:
            job.job._lock.release()

        async def is_made_good() -> bool:
            return [await frames_of(space, agent) for agent in (bob, cal)] == [1, 1]

        await eventually(is_made_good, within=60, what="frames of a new series")
        await job.caught_up()
    some = {"bob": bob, "cal": cal}
    boxes = await read_all(some)
    await check(space, some, boxes)
    for box in boxes.values():
        assert {ref.channel for ref in box.refs} == {"team.0", "team.1"}
        assert small in box.records
        assert (box.repeats, box.gone) == (0, [])
        assert all(frame.series.startswith("emptied@") for frame in box.frames)


async def frames_of(space: RealSpace, agent: AgentClient) -> int:
    async with space.core() as js:
        body = {"subjects_filter": space.subjects.delivery(agent.id)}
        held = (await js.api(f"STREAM.INFO.{space.subjects.delivery_stream}", body))["state"].get("subjects") or {}
    return sum(held.values())


async def test_blocks_that_are_gone_cost_nobody_a_message_also_after_a_leave_and_a_narrowing(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """And who hears everything live fetches nothing."""
    ada, bob, cal, dan = crowd.values()
    for agent in (bob, cal, dan):
        await join(agent, "team.0")
        await join(agent, "team.1")
    async with connect_directly(space.home.name, name="cal", home=space.home.home, channels=["team.0"]) as listening:
        live = asyncio.create_task(take(listening, 4))
        zero = await post_large(ada, "team.0", 3_000, 4)
        await asyncio.wait_for(live, 30)
        async with delivering(spark, space, tmp_path) as job:
            await job.caught_up()
            await eventually(
                lambda: listening.transport._frames.numbers.settled_through() != {}, within=30, what="a frame came"
            )
            assert listening.transport._frames.blocks.asked == 0
    assert (await state_of(space, space.subjects.block_stream))["messages"] == 1
    async with delivering(spark, space, tmp_path) as job:
        one = await post_large(ada, "team.1", 3_000, 4)
        await job.caught_up()
        await leave(bob, "team.0")
        await narrow(space, "cal", "team.0")
        await say(ada, "team.0", "so that the job looks")
        await job.caught_up()
    await remove_blocks(space, below=(await state_of(space, space.subjects.block_stream))["last_seq"])
    seqs, asked = await heard(space, dan, 9)
    assert (set(seqs), asked) == ({*zero, *one, max(seqs)}, 2), "one block was there, one was not"
    await remove_blocks(space)
    seqs, asked = await heard(space, bob, 8)
    assert (seqs, asked) == ([*zero, *one], 2), "what was owed before he left, from the log"
    async with clients(space, ["cal"]) as again:
        box = (await read_all(again))["cal"]
    assert not set(one) & set(box.records), "he may not read it any more, and no frame names it"
    assert not [ref for ref in box.refs if ref.channel == "team.1"]


async def take(endpoint: tidings.DirectAgent, count: int) -> None:
    for _ in range(count):
        await (await endpoint.next_message(30)).ack()


async def test_where_no_block_can_be_stored_they_travel_in_the_frames(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """A frame that could name them all has no room for them: there are more frames then."""
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    async with space.core() as js:
        await js.api(f"STREAM.DELETE.{space.subjects.block_stream}")
    await post_large(ada, "team.0", 150_000, 12)
    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()
        boxes = await read_all({"bob": bob, "cal": cal})
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert all(len(box.frames) > 1 and not box.refs for box in boxes.values())


async def test_an_absent_agent_never_closes_the_gate_and_is_told_what_it_lost(
    spark: "SparkSession", tmp_path: Path
) -> None:
    async with real_space(tmp_path / "home", budget=4 * MIB) as space:
        for name in AGENTS[:3]:
            await space.add(name, read=[">"], post=[">"], manage=[">"])
        async with space.administer() as admin:
            await admin.call(ChangeSpaceRequest(keep_age=0, parts=PartsChange(deliver="on", archive="off")))
        async with clients(space, AGENTS[:3]) as crowd, space.core() as js:
            ada, *absent = crowd.values()
            for agent in absent:
                await join(agent, "team.0")
            seqs: list[int] = []
            async with delivering(spark, space, tmp_path, **OFTEN) as job:
                for _ in range(16):  # more than the log holds
                    seqs += await post_large(ada, "team.0", 100_000, 3)
                    await job.caught_up(debts=False)

                    async def has_room() -> bool:
                        state = await gate_state(js, space.subjects)
                        assert state.open, "the gate was closed"
                        return state.share < job_module.FULL_LOG + 0.08

                    await eventually(has_room, within=30, what="what nobody reads leaves the log")
                await eventually(lambda: not job.job.deliverer.debts.untold, within=30, what="both are told")
                for agent in absent:
                    box = Mailbox()
                    async with asyncio.timeout(60):
                        while not set(seqs) <= covered(box):
                            await read_all({agent.name: agent}, {agent.name: box})
                    assert FULL_LOG_WORDS in {lost.cause for frame in box.frames for lost in frame.lost}


def covered(box: Mailbox) -> set[int]:
    """What an owner got, would get from the log, or was told it will not get."""
    told = [lost for frame in box.frames for lost in frame.lost]
    named = {seq for _, seqs in box.gone for seq in seqs}
    return {*box.records, *named, *(seq for lost in told for seq in range(lost.first, lost.last + 1))}
