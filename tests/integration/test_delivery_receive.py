"""Frames at the endpoint: pulled when there is room, surfaced once, acknowledged when settled, losses told.

A stub stands for the pipeline, so nothing here needs Spark.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tidings
from tidings.client import frame_mailbox, mailbox
from tidings.client.connect import connect_directly
from tidings.client.mailbox import pull
from tidings.client.notices import FrameGap
from tidings.contract.agents import HealthRequest
from tidings.errors import DeliveryLost, MalformedFrame, Superseded
from tidings.nats.acks import NAK, DeliveryInfo
from tidings.steward import backstop
from tidings.util.task_ends import end_tasks
from tidings.wire.frames import Lost, encode_frame
from tidings_testing.processes import child
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually
from tools.frames import StubPipeline, blocks_of, stub_pipeline

CHILD = Path(__file__).parent / "delivery_child.py"


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backstop, "LOOK_EVERY", 0.03)
    monkeypatch.setattr(frame_mailbox, "EXPIRES_SOON", 0.05)


@pytest.fixture
async def pipeline(pair: RealSpace) -> AsyncIterator[StubPipeline]:
    """A backstop that runs and is level, beside ada and bob."""
    async with stub_pipeline(pair) as running:
        await running.level()
        steward = pair.steward
        assert steward is not None
        await eventually(lambda: steward.roster.backstop.running, what="the steward sees it run")
        yield running


async def away(space: RealSpace, channel: str = "general", **options: object) -> str:
    """Bob joins and goes: what is said from now on is owed to him, and he hears nothing live. Answers his id."""
    async with connect(space, "bob", **options) as bob:
        await bob.join(channel, backfill=0)
        return bob.id


async def say(space: RealSpace, *texts: str, channel: str = "general", by: str = "ada") -> list[int]:
    async with connect(space, by) as sender:
        return [(await sender.send(channel, text)).seq for text in texts]


async def received(endpoint: tidings.DirectAgent, count: int) -> list[tidings.Incoming]:
    found = []
    for _ in range(count):
        found.append(await endpoint.next_message(10))
        await found[-1].ack()
    return found


async def emptied(pipeline: StubPipeline, owner: str) -> None:
    await eventually(lambda: pipeline.acknowledged(owner), what="every frame is acknowledged")


async def quick_redelivery(pipeline: StubPipeline, owner: str, seconds: float) -> None:
    s = pipeline.subjects
    name = f"dlv_{owner}"
    config = (await pipeline.js.api(f"CONSUMER.INFO.{s.delivery_stream}.{name}"))["config"]
    body = {"stream_name": s.delivery_stream, "config": config | {"ack_wait": int(seconds * 1e9)}}
    await pipeline.js.api(f"CONSUMER.CREATE.{s.delivery_stream}.{name}.{s.delivery(owner)}", body)


def errors(endpoint: tidings.DirectAgent) -> list[Exception]:
    found: list[Exception] = []
    endpoint.on("error", found.append)
    return found


def hold_live(endpoint: tidings.DirectAgent) -> Callable[[], None]:
    """Keep live copies from an endpoint until the answer is called."""
    connection, kept = endpoint.transport.connection.current, []

    def holding(handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def hold(message: Any) -> None:
            if ".live.chat." in message.subject:
                kept.append((handler, message))
            else:
                handler(message)

        return hold

    for subscription in connection.subscriptions:
        subscription.handler = holding(subscription.handler)

    def release() -> None:
        while kept:
            handler, message = kept.pop(0)
            handler(message)

    return release


# --- once, and not before it is settled ---


async def test_f28_a_resumed_join_replays_nothing_and_gets_what_was_not_settled_as_frames(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two", "three")
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"]) as bob:
        await pipeline.deliver(bob_id, seqs[:2])
        found = await received(bob, 2)
        assert [(m.text, m.seq, m.redelivered, m.late) for m in found] == [
            ("one", seqs[0], True, False),
            ("two", seqs[1], True, False),
        ], "this process cannot know whether the one before had surfaced them, and says so"
        await emptied(pipeline, bob_id)
    async with connect(pair, "bob", channels=["general"]) as bob:
        await pipeline.deliver(bob_id, seqs[2:])
        assert [m.text for m in await received(bob, 1)] == ["three"]
        assert len(bob.transport.queue) == 0


async def test_f8_a_frame_that_was_pulled_and_not_settled_comes_again_after_kill_9(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    await quick_redelivery(pipeline, bob_id, 1.0)
    seqs = await say(pair, "hello")
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs)
    async with child(CHILD, str(pair.home.home), pair.home.name, "bob") as victim:
        assert (await victim.line())["text"] == "hello"
        victim.signal(signal.SIGKILL)
        await victim.ended()
    assert not await pipeline.acknowledged(bob_id)
    async with connect(pair, "bob", channels=["general"]) as bob:
        message = await bob.next_message(10)
        assert (message.text, message.redelivered) == ("hello", True)
        await message.ack()
        await emptied(pipeline, bob_id)


async def test_f28_what_was_settled_does_not_surface_after_a_restart_whatever_brings_it_again(
    pair: RealSpace, pipeline: StubPipeline, tmp_path: Path
) -> None:
    state = tmp_path / "bob.state"
    bob_id = await away(pair, state=state)
    seqs = await say(pair, "one", "two", "three")
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs[:2])
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        assert [(m.text, m.redelivered) for m in await received(bob, 2)] == [("one", False), ("two", False)]
        await emptied(pipeline, bob_id)
    await pipeline.deliver(bob_id, seqs, number=1)
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        assert [m.text for m in await received(bob, 1)] == ["three"]
        await emptied(pipeline, bob_id)
        assert (len(bob.transport.queue), bob.transport.opener.refused["repeated"]) == (0, 0)


async def test_f28_of_a_frame_settled_in_part_only_the_rest_comes_again_and_says_so(
    pair: RealSpace, pipeline: StubPipeline, tmp_path: Path
) -> None:
    state = tmp_path / "bob.state"
    bob_id = await away(pair, state=state)
    seqs = await say(pair, "one", "two", "three")
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs)
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        found = [await bob.next_message(10) for _ in range(3)]
        for message in (found[0], found[2]):
            await message.ack()
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        assert [(m.text, m.redelivered) for m in await received(bob, 1)] == [("two", True)]
        await emptied(pipeline, bob_id)
        assert (len(bob.transport.queue), bob.transport.read_state.numbers) == (0, {"first": 1})


async def test_f8_a_pull_that_is_cancelled_as_soon_as_it_was_asked_takes_no_frame_with_it(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    """Which of the two the broker comes to first is a race inside it: the order is what `test_mailbox.py` proves."""
    bob_id = await away(pair)
    seqs = await say(pair, "one")
    mailbox = pipeline.subjects.delivery_stream, f"dlv_{bob_id}"
    taken: list[DeliveryInfo] = []

    async def take(_message: Any, came: DeliveryInfo) -> None:
        taken.append(came)

    async with connect(pair, "bob", receive=False) as bob:
        connection = bob.transport.connection.current
        await pipeline.deliver(bob_id, seqs)
        for count in range(1, 31):
            assert await pull(connection, *mailbox, 1, 5.0, take) == "full", "nobody else was handed it"
            assert taken[-1].count == count
            pulling = asyncio.create_task(pull(connection, *mailbox, 1, 10.0, take))
            await asyncio.sleep(0)  # it has asked, and what it asked was not sent yet
            await end_tasks([pulling])
            await connection.publish(taken[-1].reply, NAK)


async def test_f8_a_live_copy_in_hand_keeps_its_frame_until_it_is_settled(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    async with connect(pair, "bob", channels=["general"]) as bob:
        seqs = await say(pair, "one", "two")
        first, second = await bob.next_message(10), await bob.next_message(10)
        await first.ack()
        await pipeline.deliver(bob.id, seqs)
        await eventually(lambda: any(b.offered for b in bob.transport._frames._batches), what="the frame was offered")
        assert (await pipeline.waiting(bob.id))["num_ack_pending"] == 1
        assert len(bob.transport.queue) == 0, "one surfacing for both copies"
        await second.ack()
        await emptied(pipeline, bob.id)


async def test_a_durable_copy_that_came_first_is_the_only_one(pair: RealSpace, pipeline: StubPipeline) -> None:
    async with connect(pair, "bob", channels=["general"]) as bob:
        release = hold_live(bob)
        seqs = await say(pair, "one", "two")
        await pipeline.deliver(bob.id, seqs)
        assert [(m.text, m.redelivered) for m in await received(bob, 2)] == [("one", False), ("two", False)]
        release()
        assert (len(bob.transport.queue), bob.transport.opener.refused["repeated"]) == (0, 0), (
            "it is known by its sequence"
        )
        await emptied(pipeline, bob.id)


async def test_a_live_copy_that_was_lost_unnoticed_arrives_as_a_durable_one(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    """What came live after it says nothing of it: another sender's message moves the mark past it."""
    await pair.add("eve")
    async with connect(pair, "bob", channels=["general"]) as bob:
        drop = bob.transport.opener.live
        bob.transport.opener.live = lambda message: None if b"lost" in message.data else drop(message)  # type: ignore[method-assign]
        lost = await say(pair, "lost")
        seen = await say(pair, "seen", by="eve")
        assert [m.text for m in await received(bob, 1)] == ["seen"]
        await pipeline.deliver(bob.id, [*lost, *seen])
        assert [(m.text, m.late) for m in await received(bob, 1)] == [("lost", True)]
        await emptied(pipeline, bob.id)


async def test_f8_a_frame_larger_than_the_inbox_is_surfaced_as_it_is_emptied(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    texts = [str(number) for number in range(12)]
    seqs = await say(pair, *texts)
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs)
    async with connect(pair, "bob", channels=["general"], inbox=4) as bob:
        await eventually(lambda: len(bob.transport.queue) == 4, what="as many as there is room for")
        found = []
        for _ in texts:
            message = await bob.next_message(10)
            assert len(bob.transport.queue) <= 4
            assert not await pipeline.acknowledged(bob_id)
            found.append(message.text)
            await message.ack()
        assert found == texts
        await emptied(pipeline, bob_id)


async def test_f8_a_frame_is_not_pulled_before_there_is_room_for_a_whole_one(
    pair: RealSpace, pipeline: StubPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_mailbox, "FRAME_ROOM", 3)
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two", "three", "four")
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs[:2])
    await pipeline.deliver(bob_id, seqs[2:])
    async with connect(pair, "bob", channels=["general"], inbox=4) as bob:
        await eventually(lambda: len(bob.transport.queue) == 2, what="the first frame")
        assert await pipeline.waiting(bob_id) == {"num_pending": 1, "num_ack_pending": 1, "num_redelivered": 0}
        assert [m.text for m in await received(bob, 4)] == ["one", "two", "three", "four"]
        await emptied(pipeline, bob_id)


async def test_f8_a_frame_that_is_held_for_long_is_not_delivered_again(
    pair: RealSpace, pipeline: StubPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "IN_PROGRESS_EVERY", 0.1)
    bob_id = await away(pair)
    await quick_redelivery(pipeline, bob_id, 0.5)
    seqs = await say(pair, "think about this")
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"]) as bob:
        said: list[bytes] = []
        say_it = bob.transport._frames.pending._say

        async def counted(held: Any, word: bytes) -> None:
            said.append(word)
            await say_it(held, word)

        monkeypatch.setattr(bob.transport._frames.pending, "_say", counted)
        await pipeline.deliver(bob_id, seqs)
        message = await bob.next_message(10)
        await eventually(lambda: len(said) >= 15, what="three times the broker's patience")
        assert await pipeline.waiting(bob_id) == {"num_pending": 0, "num_ack_pending": 1, "num_redelivered": 0}
        await message.ack()
        await emptied(pipeline, bob_id)


# --- what is wrong with it ---


async def test_a_frame_that_does_not_open_is_reported_kept_aside_and_blocks_nobody(
    pair: RealSpace, pipeline: StubPipeline, tmp_path: Path
) -> None:
    state = tmp_path / "bob.state"
    bob_id = await away(pair, state=state)
    (seq,) = await say(pair, "fine")
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        told = errors(bob)
        await pipeline.publish(bob_id, b"garbage")
        await pipeline.publish(bob_id, encode_frame(pipeline.subjects.space, "e", "first", 1, []))
        await pipeline.deliver(bob_id, [seq])
        assert [m.text for m in await received(bob, 1)] == ["fine"]
        await emptied(pipeline, bob_id)
        assert bob.transport._frames.aside[0] == b"garbage"
        assert [type(error) for error in told] == [MalformedFrame, MalformedFrame]
        assert "does not open" in str(told[0])
        assert len(list(tmp_path.glob("bob.state.frame-*"))) == 2


async def test_a_forged_message_in_a_frame_is_dropped_and_the_rest_surfaces(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two", "three")
    await pipeline.level()
    one, two, three = await pipeline.records(seqs)
    forged = msgspec.structs.replace(two, payload=two.payload.replace(b"two", b"TWO"))
    async with connect(pair, "bob", channels=["general"]) as bob:
        await pipeline.deliver(bob_id, records=[one, forged, three])
        assert [m.text for m in await received(bob, 2)] == ["one", "three"]
        await emptied(pipeline, bob_id)
        assert bob.transport.opener.refused["signature"] == 1


async def test_a_part_of_a_frame_that_does_not_open_is_read_from_the_log(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    seqs = [*await say(pair, "one", "two"), *await say(pair, "by bob", by="bob")]
    await pipeline.level()
    (block,) = blocks_of(await pipeline.records(seqs))
    broken = msgspec.msgpack.decode(block)
    broken[5] = b"x" * len(broken[5])
    async with connect(pair, "bob", channels=["general"]) as bob:
        told = errors(bob)
        await pipeline.publish(bob_id, encode_frame(bob_id, "e", "first", 1, [msgspec.msgpack.encode(broken)]))
        assert [m.text for m in await received(bob, 2)] == ["one", "two"]
        await emptied(pipeline, bob_id)
        assert [type(error) for error in told] == [MalformedFrame]


async def test_a_message_of_ones_own_in_a_frame_is_dropped_silently(pair: RealSpace, pipeline: StubPipeline) -> None:
    bob_id = await away(pair)
    seqs = [*await say(pair, "mine", by="bob"), *await say(pair, "hers")]
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"]) as bob:
        told = errors(bob)
        await pipeline.deliver(bob_id, seqs)
        assert [m.text for m in await received(bob, 1)] == ["hers"]
        await emptied(pipeline, bob_id)
        assert told == []


# --- numbers ---


async def test_a_skipped_number_is_told_and_what_it_held_is_read_from_the_log(
    pair: RealSpace, pipeline: StubPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_mailbox, "GAP_PATIENCE", 0.05)
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two", "three", "four")
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"]) as bob:
        told: list[FrameGap] = []
        notices: list[tidings.Notice] = []
        bob.on("gap", told.append)
        bob.on("notice", notices.append)
        await pipeline.deliver(bob_id, seqs[:1])
        await pipeline.deliver(bob_id, seqs[1:3], published=False)
        await pipeline.deliver(bob_id, seqs[3:])
        found = await received(bob, 4)
        assert sorted(m.text for m in found) == sorted(["one", "two", "three", "four"])
        assert {m.text for m in found if m.late} == {"two", "three"}, "they surfaced after a newer one, and say so"
        (gap,) = await eventually(lambda: told)
        assert gap == FrameGap("first", 2, 2, seqs[1] - 1, seqs[2], 2, 2)
        assert [(n.kind, n.first, n.last, n.count) for n in notices] == [("gap", seqs[1], seqs[2], 2)]
        await emptied(pipeline, bob_id)


async def test_what_is_missing_and_not_in_the_log_any_more_is_told_exactly(
    pair: RealSpace, pipeline: StubPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_mailbox, "GAP_PATIENCE", 0.05)
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two", "three", "four")
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"]) as bob:
        told = errors(bob)
        await pipeline.deliver(bob_id, seqs[:1])
        await pipeline.deliver(bob_id, seqs[1:3], published=False)
        await pipeline.deliver(bob_id, seqs[3:])
        await pipeline.js.api(f"STREAM.MSG.DELETE.{pipeline.subjects.log_stream}", {"seq": seqs[1], "no_erase": True})
        assert sorted(m.text for m in await received(bob, 3)) == ["four", "one", "three"]
        (error,) = await eventually(lambda: told)
    assert isinstance(error, DeliveryLost)
    assert (error.first, error.last, error.count) == (seqs[1], seqs[2], 1)


async def test_a_frame_that_another_session_held_and_comes_late_is_no_gap(
    pair: RealSpace, pipeline: StubPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frame 2 comes after 3, as one does that a killed session had pulled: nothing is dropped, nothing called lost."""
    monkeypatch.setattr(frame_mailbox, "GAP_PATIENCE", 0.3)
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two", "three")
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"]) as bob:
        told: list[FrameGap] = []
        bob.on("gap", told.append)
        await pipeline.deliver(bob_id, seqs[:1])
        await pipeline.deliver(bob_id, seqs[2:], number=3)
        await pipeline.deliver(bob_id, seqs[1:2], number=2)
        assert [(m.text, m.late) for m in await received(bob, 3)] == [("one", False), ("three", False), ("two", True)]
        await emptied(pipeline, bob_id)
        judging = [task for task in bob.transport._frames._tasks if "_judge_gap" in repr(task)]
        assert len(judging) == 1
        await asyncio.wait(judging)
        assert told == []


async def test_n28_a_repeated_number_with_other_content_is_processed(pair: RealSpace, pipeline: StubPipeline) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "one", "two", "three")
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"]) as bob:
        gaps: list[FrameGap] = []
        bob.on("gap", gaps.append)
        await pipeline.deliver(bob_id, seqs[:1], number=1)
        await pipeline.deliver(bob_id, seqs[:2], number=1)
        await pipeline.deliver(bob_id, seqs[2:], number=2)
        assert [m.text for m in await received(bob, 3)] == ["one", "two", "three"]
        await emptied(pipeline, bob_id)
        assert (gaps, len(bob.transport.queue)) == ([], 0)


@pytest.mark.requirement("X12")
async def test_what_will_not_be_delivered_is_told_once_with_its_range_count_and_cause(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    async with connect(pair, "bob", channels=["general"]) as bob:
        told, notices, kept = errors(bob), list[tidings.Notice](), asyncio.Event()

        async def keep(notice: tidings.Notice) -> None:
            await kept.wait()
            notices.append(notice)

        bob.on("notice", keep)
        lost = Lost("general", 10, 20, 7, "cancelled by the operator")
        await pipeline.deliver(bob_id, lost=[lost])
        await eventually(lambda: told)
        assert not await pipeline.acknowledged(bob_id), "the broker forgets it once its notice was kept"
        kept.set()
        await pipeline.deliver(bob_id, lost=[lost], number=1, series="again")
        await emptied(pipeline, bob_id)
        await eventually(lambda: told)
    (error,) = told
    assert isinstance(error, DeliveryLost)
    assert (error.channel, error.first, error.last, error.count) == ("general", 10, 20, 7)
    assert "7 messages of general between 10 and 20" in str(error)
    assert error.cause == "cancelled by the operator"
    assert [(n.kind, n.channel, n.first, n.last, n.count) for n in notices] == [("lost", "general", 10, 20, 7)]


async def test_a_new_series_starts_again_without_a_gap_also_after_a_restart(
    pair: RealSpace, pipeline: StubPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_mailbox, "GAP_PATIENCE", 0.05)
    state = tmp_path / "bob.state"
    bob_id = await away(pair, state=state)
    seqs = await say(pair, "one", "two", "three", "four")
    await pipeline.level()
    gaps: list[FrameGap] = []
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        bob.on("gap", gaps.append)
        await pipeline.deliver(bob_id, seqs[:1])
        await pipeline.deliver(bob_id, seqs[1:2])
        await received(bob, 2)
        await emptied(pipeline, bob_id)
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        bob.on("gap", gaps.append)
        assert bob.transport.read_state.numbers == {"first": 2}
        await pipeline.deliver(bob_id, seqs[2:3], series="access:188@4")
        assert [m.text for m in await received(bob, 1)] == ["three"]
        await pipeline.deliver(bob_id, seqs[3:], series="access:188@4", number=3)
        assert [m.text for m in await received(bob, 1)] == ["four"]
        await eventually(lambda: gaps, what="within the new series a skipped number is one")
    assert [(gap.series, gap.first, gap.last) for gap in gaps] == [("access:188@4", 2, 2)]


async def test_a_number_skipped_between_two_runs_is_noticed_with_a_state_file(
    pair: RealSpace, pipeline: StubPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_mailbox, "GAP_PATIENCE", 0.05)
    state = tmp_path / "bob.state"
    bob_id = await away(pair, state=state)
    seqs = await say(pair, "one", "two", "three")
    await pipeline.level()
    await pipeline.deliver(bob_id, seqs[:1])
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        await received(bob, 1)
        await emptied(pipeline, bob_id)
    await pipeline.deliver(bob_id, seqs[1:2], published=False)
    await pipeline.deliver(bob_id, seqs[2:])
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        assert sorted(m.text for m in await received(bob, 2)) == ["three", "two"]
        await eventually(
            lambda: bob.transport.read_state.numbers == {"first": 3}, what="the gap is settled with what it held"
        )


# --- who gets what, and when ---


async def test_only_the_newer_of_two_sessions_pulls(pair: RealSpace, pipeline: StubPipeline) -> None:
    async with connect(pair, "bob", channels=["general"]) as old, connect(pair, "bob", channels=["general"]) as new:
        await eventually(lambda: old.transport._frames._closed, what="the older one has stopped")
        seqs = await say(pair, "one")
        await pipeline.deliver(new.id, seqs)
        assert [m.text for m in await received(new, 1)] == ["one"]
        await emptied(pipeline, new.id)
        with pytest.raises(Superseded):
            await old.next_message(5)
        assert old.transport._frames.pending == {}


async def test_a_member_of_a_pattern_gets_channels_this_process_never_saw(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await space.add("ada", post=["team.>"], read=["team.>"])
    await space.add("bob", read=["team.>"])
    async with stub_pipeline(space) as pipeline:
        await pipeline.level()
        assert space.steward is not None
        await eventually(lambda: space.steward and space.steward.roster.backstop.running)
        bob_id = await away(space, "team.>")
        seqs = [*await say(space, "one", channel="team.new"), *await say(space, "two", channel="team.other")]
        await pipeline.level()
        await pipeline.deliver(bob_id, seqs)
        async with connect(space, "bob", channels=["team.>"]) as bob:
            assert sorted((m.text, m.channel) for m in await received(bob, 2)) == [
                ("one", "team.new"),
                ("two", "team.other"),
            ]
        await emptied(pipeline, bob_id)


@pytest.mark.requirement("X4")
async def test_what_was_owed_before_a_leave_arrives_after_it_and_after_joining_again(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    owed = await say(pair, "owed")
    async with connect(pair, "bob", receive=False) as bob:
        await bob.leave("general")
        await say(pair, "not owed")
        await bob.join("general", backfill=0)
    await pipeline.level()
    async with connect(pair, "bob", channels=["general"]) as bob:
        again = await say(pair, "again")
        assert [m.text for m in await received(bob, 1)] == ["again"]
        await pipeline.deliver(bob_id, [*owed, *again])
        assert [(m.text, m.late) for m in await received(bob, 1)] == [("owed", True)]
        await emptied(pipeline, bob_id)
        assert len(bob.transport.queue) == 0


async def test_f27_live_copies_before_older_durable_ones_are_ahead_and_those_are_late(
    pair: RealSpace, pipeline: StubPipeline
) -> None:
    bob_id = await away(pair)
    seqs = await say(pair, "old")
    async with connect(pair, "bob", channels=["general"]) as bob:
        newer = await say(pair, "new")
        message = await bob.next_message(10)
        assert (message.text, message.ahead, message.late) == ("new", True, False)
        await message.ack()
        await pipeline.deliver(bob_id, seqs)
        message = await bob.next_message(10)
        assert (message.text, message.ahead, message.late) == ("old", False, True)
        await message.ack()
        await pipeline.deliver(bob_id, newer)
        head = await pipeline.level()
        await emptied(pipeline, bob_id)
        await eventually(
            lambda: bob.transport._frames.caught_up >= head, what="everything the floor speaks of has arrived"
        )
        await say(pair, "newest")
        message = await bob.next_message(10)
        assert (message.text, message.ahead) == ("newest", False)


async def test_with_the_backstop_away_a_resumed_join_reads_the_log_and_later_frames_bring_nothing_twice(
    pair: RealSpace,
) -> None:
    async with stub_pipeline(pair, running=False) as pipeline:
        bob_id = await away(pair)
        seqs = await say(pair, "one", "two")
        await pipeline.level()
        async with connect(pair, "bob") as bob:
            joined = await bob.join("general")
            assert (joined.state, joined.durable) == ("resumed", False)
            assert "durable delivery is not running: durable copies delayed" in joined.reason
            first = await bob.next_message(10)
            assert (first.text, first.redelivered) == ("one", True), "nobody knows whether it was surfaced before"
            await pipeline.deliver(bob_id, seqs)
            second = await bob.next_message(10)
            assert (second.text, second.redelivered) == ("two", True)
            await second.ack()
            await eventually(
                lambda: any(b.offered for b in bob.transport._frames._batches), what="the frame was offered"
            )
            assert not await pipeline.acknowledged(bob_id), "the first is still in hand"
            await first.ack()
            await emptied(pipeline, bob_id)
            assert len(bob.transport.queue) == 0


async def test_a_backstop_far_behind_is_not_waited_for(pair: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidings.client.channels.NEARLY_LEVEL", 1)
    monkeypatch.setattr("tidings.wire.roster.TOLERATED_S", 0.0)
    async with stub_pipeline(pair) as pipeline:
        await pipeline.level()
        await eventually(lambda: pair.steward and pair.steward.roster.backstop.running)
        await away(pair)
        await say(pair, "one", "two")
        async with connect(pair, "bob") as bob:
            joined = await bob.join("general")
            assert joined.durable
            assert joined.reason.startswith("durable copies delayed, "), joined.reason
            assert [m.text for m in await received(bob, 2)] == ["one", "two"]


async def test_n20_everybody_is_told_whether_the_backstop_runs_and_how_far_it_is(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backstop, "SILENT_AFTER", 2.0)
    async with connect(pair, "ada") as ada:
        async with stub_pipeline(pair) as pipeline:
            await pipeline._put("figures.deliver", {"debts": 3})
            head = await pipeline.level()
            await eventually(lambda: ada.transport.roster.backstop.running, what="the roster says it runs")
            await eventually(lambda: ada.transport.roster.backstop.floor == head)
            joined = await ada.join("general")
            assert joined.durable
            await say(pair, "one", "two", by="bob")
            health = await ada.call(HealthRequest())
            assert (health.backstop["running"], health.backstop["debts"]) == (True, 3)
            assert health.backstop["behind"] == health.log_head - head >= 3
        await eventually(lambda: not ada.transport.roster.backstop.running, what="its silence is noticed")
        assert ada.transport.roster.backstop.delay == (
            f"durable delivery is not running: durable copies delayed, {ada.transport.roster.backstop.behind} behind"
        )
