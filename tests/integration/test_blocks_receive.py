"""Blocks by reference at the endpoint: fetched when something in them is new, read from the log when they are gone.

A stub stands for the pipeline, so nothing here needs Spark.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tidings
from daemons import daemon_in
from tidings.admin.agents import AgentFile
from tidings.client import frame_mailbox, mailbox
from tidings.client.connect import connect_directly
from tidings.contract.channels import LeaveRequest
from tidings.errors import DeliveryLost, MalformedFrame
from tidings.nats import jwt
from tidings.nats.jetstream import JetStream
from tidings.nats.jetstream_api import NO_END
from tidings.server import grants
from tidings.steward import backstop
from tidings.steward.history import HistoryHandlers
from tidings.wire.frames import Ref, encode_frame, encode_seqs
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually
from tools.frames import StubPipeline, blocks_of, stub_pipeline


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backstop, "LOOK_EVERY", 0.03)
    monkeypatch.setattr(frame_mailbox, "EXPIRES_SOON", 0.05)


@pytest.fixture
async def pipeline(pair: RealSpace) -> AsyncIterator[StubPipeline]:
    async with stub_pipeline(pair) as running:
        await running.level()
        steward = pair.steward
        assert steward is not None
        await eventually(lambda: steward.roster.backstop.running, what="the steward sees it run")
        yield running


async def away(space: RealSpace, *channels: str, **options: object) -> str:
    """Bob joins and goes: what is said from now on is owed to him, and he hears nothing live. Answers his id."""
    async with connect(space, "bob", **options) as bob:
        for channel in channels or ("general",):
            await bob.join(channel, backfill=0)
        return bob.id


async def say(space: RealSpace, *texts: str, channel: str = "general") -> list[int]:
    async with connect(space, "ada") as ada:
        return [(await ada.send(channel, text)).seq for text in texts]


async def received(endpoint: tidings.DirectAgent, count: int) -> list[tidings.Incoming]:
    found = []
    for _ in range(count):
        found.append(await endpoint.next_message(10))
        await found[-1].ack()
    return found


async def emptied(pipeline: StubPipeline, owner: str) -> None:
    await eventually(lambda: pipeline.acknowledged(owner), what="every frame is acknowledged")


def errors(endpoint: tidings.DirectAgent) -> list[Exception]:
    found: list[Exception] = []
    endpoint.on("error", found.append)
    return found


def asked(endpoint: tidings.DirectAgent) -> int:
    return endpoint.transport._frames.blocks.asked


async def wipe(js: JetStream) -> None:
    await js.purge("BLK_main", subject_filter="td.main.blk.>", below=NO_END)


async def test_what_was_said_to_an_absent_member_comes_from_a_block_once_and_in_order(
    pair: RealSpace, pipeline: StubPipeline, tmp_path: Path
) -> None:
    bob_id = await away(pair, state=tmp_path / "bob.state")
    texts = [f"message {n}" for n in range(12)]
    seqs = await say(pair, *texts)
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs[:5], by_reference=True)
    await pipeline.deliver(bob_id, seqs[5:7])
    await pipeline.deliver(bob_id, seqs[7:], by_reference=True)
    async with connect(pair, "bob", channels=["general"], state=tmp_path / "bob.state") as bob:
        found = await received(bob, 12)
        assert [each.text for each in found] == texts
        assert [(each.redelivered, each.late, each.ahead) for each in found] == [(False, False, False)] * 12
        await emptied(pipeline, bob_id)
        assert asked(bob) == 2
        assert len(bob.transport.queue) == 0
        assert not bob.transport.opener.refused


async def test_a_reader_that_heard_everything_live_fetches_nothing(pair: RealSpace, pipeline: StubPipeline) -> None:
    """Its own messages are in the block too."""
    async with connect(pair, "bob", channels=["general"]) as bob:
        seqs = await say(pair, "one", "two")
        seqs += [(await bob.send("general", "mine")).seq]
        seqs += await say(pair, "three")
        first = await bob.next_message(10)
        assert [each.text for each in await received(bob, 2)] == ["two", "three"]
        await pipeline.deliver(bob.id, seqs, by_reference=True, stored=False)
        await eventually(lambda: _is_out(pipeline, bob.id), what="it has the frame")
        await asyncio.sleep(0.2)
        assert not await pipeline.acknowledged(bob.id), "the program has not settled the first yet"
        await first.ack()
        await emptied(pipeline, bob.id)
        assert asked(bob) == 0
        assert len(bob.transport.queue) == 0


async def _is_out(pipeline: StubPipeline, owner: str) -> bool:
    return (await pipeline.waiting(owner))["num_ack_pending"] == 1


async def test_a_block_of_which_one_message_was_not_heard_is_fetched_and_that_one_surfaced(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "missed")
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"]) as bob:
        seqs += await say(pair, "heard")
        assert [each.text for each in await received(bob, 1)] == ["heard"]
        await pipeline.deliver(bob_id, seqs, by_reference=True)
        (late,) = await received(bob, 1)
        assert (late.text, late.late) == ("missed", True)
        await emptied(pipeline, bob_id)
        assert asked(bob) == 1


async def test_blocks_are_fetched_side_by_side_and_surfaced_one_after_the_other(
    pair: RealSpace, pipeline: StubPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, *(f"message {n}" for n in range(20)))
    await pipeline.level()
    records = await pipeline.records(seqs)
    sealed = [pipeline.seal(blocks_of([record])[0]) for record in records]
    for each in sealed:
        await pipeline.store(each)
    await pipeline.publish(bob_id, encode_frame(bob_id, "epoch", "first", 1, [each.ref for each in sealed]))
    under_way, most = 0, 0
    request = frame_mailbox.BlockReader._get

    async def slower(self: Any, name: str) -> bytes | None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.05 if int(name, 16) % 2 else 0.0)
        try:
            return await request(self, name)
        finally:
            under_way -= 1

    monkeypatch.setattr(frame_mailbox.BlockReader, "_get", slower)
    async with connect(pair, "bob", channels=["general"]) as bob:
        assert [each.seq for each in await received(bob, 20)] == seqs
        await emptied(pipeline, bob_id)
    assert 1 < most <= frame_mailbox.AT_ONCE


async def test_a_block_that_was_known_and_was_forgotten_meanwhile_is_fetched(
    pair: RealSpace, pipeline: StubPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the log turns out to be another one while blocks after it are fetched already."""
    bob_id = await away(pair)
    seqs = await say(pair, *(f"message {n}" for n in range(12)))
    await pipeline.level()
    sealed = [pipeline.seal(blocks_of([record])[0]) for record in await pipeline.records(seqs)]
    for each in sealed:
        await pipeline.store(each)
    await pipeline.publish(bob_id, encode_frame(bob_id, "epoch", "first", 1, [each.ref for each in sealed]))
    truly, looks = frame_mailbox.FrameMailbox._is_known, 0

    def once(self: Any, ref: Ref) -> bool:
        nonlocal looks
        looks += ref.first == seqs[1]
        return truly(self, ref) or (ref.first == seqs[1] and looks == 1)

    monkeypatch.setattr(frame_mailbox.FrameMailbox, "_is_known", once)
    async with connect(pair, "bob", channels=["general"]) as bob:
        assert [each.seq for each in await received(bob, 12)] == seqs
        await emptied(pipeline, bob_id)


async def test_a_block_is_not_fetched_before_there_is_room_for_it(pair: RealSpace, pipeline: StubPipeline) -> None:
    bob_id = await away(pair)
    texts = [f"message {n}" for n in range(9)]
    seqs = await say(pair, *texts)
    await pipeline.level()
    records = await pipeline.records(seqs)
    sealed = [pipeline.seal(blocks_of(part)[0]) for part in (records[:3], records[3:6], records[6:])]
    for each in sealed:
        await pipeline.store(each)
    await pipeline.publish(bob_id, encode_frame(bob_id, "epoch", "first", 1, [each.ref for each in sealed]))
    async with connect(pair, "bob", channels=["general"], inbox=4) as bob:
        await eventually(lambda: len(bob.transport.queue) == 3, what="the first block")
        await asyncio.sleep(0.2)
        assert (asked(bob), len(bob.transport.queue)) == (1, 3), "there is room for one more message, not for three"
        assert [each.text for each in await received(bob, 9)] == texts
        await emptied(pipeline, bob_id)
        assert asked(bob) == 3


async def test_an_inbox_smaller_than_a_block_is_filled_as_it_is_emptied(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    texts = [f"message {n}" for n in range(9)]
    await pipeline.deliver(bob_id, await say(pair, *texts), by_reference=True)
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"], inbox=4) as bob:
        found = []
        for _ in texts:
            message = await bob.next_message(10)
            assert len(bob.transport.queue) <= 4
            found.append(message.text)
            await message.ack()
        assert found == texts
        await emptied(pipeline, bob_id)


# --- a block that is gone, or is another ---


async def test_blocks_that_are_gone_are_read_from_the_log(pair: RealSpace, pipeline: StubPipeline) -> None:
    bob_id = await away(pair)
    texts = [f"message {n}" for n in range(250)]  # more than a page
    seqs = await say(pair, *texts)
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs[:200], by_reference=True)
    await pipeline.deliver(bob_id, seqs[200:], by_reference=True)
    await wipe(pipeline.js)
    async with connect(pair, "bob", channels=["general"]) as bob:
        told = errors(bob)
        assert [each.text for each in await received(bob, 250)] == texts
        await emptied(pipeline, bob_id)
        assert asked(bob) == 2, "what is not there is not asked for again where there is one server"
        assert told == []


async def test_what_was_owed_on_a_channel_that_was_left_since_comes_although_its_block_is_gone(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two")
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs, by_reference=True, stored=False)
    async with pair.agent("bob") as leaving:
        await leaving.control.call(LeaveRequest("general"))
    async with connect(pair, "bob") as bob:
        assert [each.text for each in await received(bob, 2)] == ["one", "two"]
        await emptied(pipeline, bob_id)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: data[:-1], id="truncated"),
        pytest.param(lambda data: bytes([data[0] ^ 1]) + data[1:], id="changed"),
        pytest.param(lambda _data: b"", id="emptied"),
    ],
)
async def test_a_block_that_is_not_what_it_was_is_counted_and_read_from_the_log(
    pair: RealSpace, pipeline: StubPipeline, spoil: Callable[[bytes], bytes]
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two")
    await pipeline.level()
    (block,) = blocks_of(await pipeline.records(seqs))
    sealed = pipeline.seal(block)
    await pipeline.js.publish(pipeline.subjects.block(sealed.name), spoil(sealed.data))
    await pipeline.deliver(bob_id, seqs, by_reference=True, stored=False)
    async with connect(pair, "bob", channels=["general"]) as bob:
        assert [each.text for each in await received(bob, 2)] == ["one", "two"]
        await emptied(pipeline, bob_id)
        assert (asked(bob), bob.transport.opener.refused["block"]) == (1, 1)


async def test_a_reference_that_names_other_records_than_the_block_holds_surfaces_what_it_names(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two", "three", "four")
    await pipeline.level()
    (block,) = blocks_of(await pipeline.records([seqs[0], seqs[1], seqs[3]]))
    sealed = pipeline.seal(block)
    await pipeline.store(sealed)
    fields = msgspec.msgpack.decode(sealed.ref)
    fields[9] = encode_seqs([seqs[0], seqs[2], seqs[3]])
    frame = encode_frame(bob_id, "epoch", "first", 1, [msgspec.msgpack.encode(fields)])
    await pipeline.publish(bob_id, frame)
    async with connect(pair, "bob", channels=["general"]) as bob:
        assert [each.text for each in await received(bob, 3)] == ["one", "three", "four"]
        await emptied(pipeline, bob_id)
        assert bob.transport.opener.refused["block"] == 1


async def test_what_neither_the_blocks_nor_the_log_have_is_told_lost_with_its_range(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two", "three")
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs, by_reference=True, stored=False)
    for seq in seqs[:2]:
        await pipeline.js.api("STREAM.MSG.DELETE.LOG_main", {"seq": seq})
    async with connect(pair, "bob", channels=["general"]) as bob:
        told = errors(bob)
        assert [each.text for each in await received(bob, 1)] == ["three"]
        await emptied(pipeline, bob_id)
        (lost,) = [each for each in told if isinstance(each, DeliveryLost)]
        assert (lost.channel, lost.first, lost.last, lost.count) == ("general", seqs[0], seqs[1], 2)


async def test_what_may_no_longer_be_read_is_owed_no_more_once_its_block_is_gone(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    wide = ("general", "team.core")
    async with pair.administer() as admin:
        for name in ("ada", "bob"):
            await admin.set_access(name, AgentFile(name, read=wide, post=wide))
    bob_id = await away(pair, *wide)
    secret = await say(pair, "not for bob any more", channel="team.core")
    open_to_all = await say(pair, "for bob")
    await pipeline.level()
    async with pair.administer() as admin:
        await admin.set_access("bob", AgentFile("bob", read=("general",), post=("general",)))
    await pipeline.deliver(bob_id, [*secret, *open_to_all], by_reference=True, stored=False)
    async with connect(pair, "bob", channels=["general"]) as bob:
        told = errors(bob)
        assert [each.text for each in await received(bob, 1)] == ["for bob"]
        await emptied(pipeline, bob_id)
        assert len(bob.transport.queue) == 0
        assert told == []


async def test_an_agent_with_a_token_from_before_there_were_blocks_reads_the_log(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    with pytest.MonkeyPatch.context() as before:
        rights = grants.agent_permissions

        def older(s: Subjects, *given: Any, **how: Any) -> jwt.Permissions:
            made = rights(s, *given, **how)
            return jwt.Permissions([each for each in made.publish if each != grants.block_get(s)], made.subscribe)

        before.setattr(grants, "agent_permissions", older)
        carl_id = (await pair.add("carl")).row.id
    async with connect(pair, "carl") as carl:
        await carl.join("general", backfill=0)
    await pipeline.deliver(carl_id, await say(pair, "one", "two"), by_reference=True)
    await pipeline.level()
    async with connect(pair, "carl", channels=["general"]) as carl:
        assert [each.text for each in await received(carl, 2)] == ["one", "two"]
        await emptied(pipeline, carl_id)
        assert asked(carl) == 1


async def test_where_the_store_of_blocks_is_gone_the_log_is_read(pair: RealSpace, pipeline: StubPipeline) -> None:
    bob_id = await away(pair)
    await pipeline.deliver(bob_id, await say(pair, "one", "two"), by_reference=True)
    await pipeline.level()
    await pipeline.js.api("STREAM.DELETE.BLK_main")
    async with connect(pair, "bob", channels=["general"]) as bob:
        assert [each.text for each in await received(bob, 2)] == ["one", "two"]
        await emptied(pipeline, bob_id)
        assert asked(bob) == 1, "nobody listens: that is said at once"
    async with pair.administer() as admin:
        assert await admin.provision() == ["BLK_main created"]


async def test_while_the_steward_is_away_a_block_that_is_gone_waits_and_comes_when_it_is_back(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two")
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"]) as bob:
        told = errors(bob)
        await pair.stop_steward()
        await pipeline.deliver(bob_id, seqs[:1], by_reference=True, stored=False)
        await pipeline.deliver(bob_id, seqs[1:], by_reference=True)
        await eventually(lambda: asked(bob) == 1, what="it asked for the first block")
        await asyncio.sleep(0.3)
        assert len(bob.transport.queue) == 0, "the second is not shown before the first"
        await pair.start_steward()
        assert [each.text for each in await received(bob, 2)] == ["one", "two"]
        await emptied(pipeline, bob_id)
        assert [each for each in told if isinstance(each, DeliveryLost)] == []


async def test_a_frame_that_a_killed_program_had_comes_again_and_what_it_settled_is_not_shown_twice(
    pair: RealSpace, pipeline: StubPipeline, tmp_path: Path
) -> None:
    state = tmp_path / "bob.state"
    bob_id = await away(pair, state=state)
    seqs = await say(pair, "one", "two", "three")
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs, by_reference=True)
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        assert [each.text for each in await received(bob, 1)] == ["one"]
        assert (await bob.next_message(10)).text == "two"  # handed out, and not settled
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        found = await received(bob, 2)
        assert [(each.text, each.redelivered) for each in found] == [("two", True), ("three", True)]
        await emptied(pipeline, bob_id)


async def test_a_frame_that_is_put_aside_has_no_keys_in_it(
    pair: RealSpace, pipeline: StubPipeline, tmp_path: Path
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "one")
    (block,) = blocks_of(await pipeline.records(seqs))
    sealed = pipeline.seal(block)
    key = msgspec.msgpack.decode(sealed.ref)[8]
    async with connect(pair, "bob", channels=["general"], state=tmp_path / "bob.state") as bob:
        told = errors(bob)
        await pipeline.publish(bob_id, encode_frame(KeyPair.generate().id, "epoch", "first", 1, [sealed.ref]))
        await eventually(lambda: [each for each in told if isinstance(each, MalformedFrame)], what="it is told")
        (kept,) = bob.transport._frames.aside
        (on_disk,) = tmp_path.glob("bob.state.frame-*")
        for data in (kept, bytes.fromhex(on_disk.read_text())):
            assert bytes.fromhex(sealed.name) in data
            assert key not in data


async def test_a_page_of_the_log_that_could_not_be_read_once_holds_up_nothing_but_itself(
    pair: RealSpace, pipeline: StubPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frame was kept for the whole session, neither handed over nor given back, and newer mail overtook it."""
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two")
    await pipeline.level()
    read, failures = HistoryHandlers._read_page, [OSError("the disk hiccups")]

    async def once_in_vain(self: HistoryHandlers, *asked: Any) -> Any:
        if failures:
            raise failures.pop()
        return await read(self, *asked)

    monkeypatch.setattr(HistoryHandlers, "_read_page", once_in_vain)
    await pipeline.deliver(bob_id, seqs[:1], by_reference=True, stored=False)
    await pipeline.deliver(bob_id, seqs[1:], by_reference=True)
    async with connect(pair, "bob", channels=["general"]) as bob:
        assert [message.text for message in await received(bob, 2)] == ["one", "two"]
        await emptied(pipeline, bob_id)
    assert not failures


async def test_what_could_not_be_handed_over_comes_again_and_keeps_nothing_else(
    pair: RealSpace, pipeline: StubPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two")
    await pipeline.level()
    offer, failures = frame_mailbox.FrameMailbox._offer_frame, [RuntimeError("a mistake of ours")]

    async def once_in_vain(self: frame_mailbox.FrameMailbox, *arrived: Any) -> None:
        if failures:
            raise failures.pop()
        await offer(self, *arrived)

    monkeypatch.setattr(frame_mailbox.FrameMailbox, "_offer_frame", once_in_vain)
    monkeypatch.setattr(mailbox, "DECLINED", 0.2)
    for seq in seqs:
        await pipeline.deliver(bob_id, [seq])
    async with connect(pair, "bob", channels=["general"]) as bob:
        assert sorted(message.text for message in await received(bob, 2)) == ["one", "two"]
        await emptied(pipeline, bob_id)
    assert not failures


async def test_a_program_at_the_host_gets_what_lies_in_blocks_and_is_told_what_is_lost(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "in a block", "in the log", "nowhere", "in a block too")
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs[:1], by_reference=True)
    await pipeline.deliver(bob_id, seqs[1:3], by_reference=True, stored=False)
    await pipeline.deliver(bob_id, seqs[3:], by_reference=True)
    await pipeline.js.api("STREAM.MSG.DELETE.LOG_main", {"seq": seqs[2]})
    async with (
        daemon_in(pair.home.home),
        tidings.connect(pair.home.name, name="bob", home=pair.home.home, via="host") as bob,
    ):
        told: list[Any] = []
        bob.on("notice", told.append)
        found = []
        for _ in range(3):
            message = await bob.next_message(20)
            found.append(message.text)
            await message.ack()
        assert found == ["in a block", "in the log", "in a block too"]
        await emptied(pipeline, bob_id)
        await eventually(lambda: told, what="the loss is told")
        (lost,) = told
        assert (lost.kind, lost.channel, lost.first, lost.last, lost.count) == (
            "lost",
            "general",
            seqs[2],
            seqs[2],
            1,
        )
