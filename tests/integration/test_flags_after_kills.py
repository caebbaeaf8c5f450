"""What a message says of itself is true after kill -9, across restarts, and while nobody answers."""

import signal
from pathlib import Path
from typing import Any

import pytest

import tidings
from tidings.client import frame_mailbox
from tidings.client.connect import connect_directly
from tidings.steward import backstop
from tidings_testing.processes import child
from tidings_testing.real_space import TEST_INTERVALS, RealSpace
from tidings_testing.waiting import eventually
from tools.frames import stub_pipeline

CHILD = Path(__file__).parent / "flags_child.py"


def connect(space: RealSpace, name: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)


async def flags(endpoint: tidings.DirectAgent, count: int) -> list[tuple[str, str]]:
    """The next messages with what they say, each settled."""
    found = []
    for _ in range(count):
        message = await endpoint.next_message(15)
        words = [name for name in ("redelivered", "late", "ahead") if getattr(message, name)]
        found.append((message.text, " ".join(words)))
        await message.ack()
    return found


async def test_after_kill_9_what_was_in_hand_says_so_what_was_settled_does_not_come_and_what_is_new_is_new(
    pair: RealSpace, tmp_path: Path
) -> None:
    """Without any frame: live copies, and the log after the kill."""
    state = tmp_path / "bob.state"
    place = (str(pair.home.home), pair.home.name, "bob", str(state), "2")
    async with connect(pair, "ada") as ada:
        async with child(CHILD, *place) as victim:
            assert (await victim.line())["text"] == "ready"
            for text in ("settled one", "settled two", "in hand", "not yet taken"):
                await ada.send("general", text)
            heard = [await victim.line() for _ in range(3)]
            assert [each["text"] for each in heard] == ["settled one", "settled two", "in hand"]
            victim.signal(signal.SIGKILL)
            await victim.ended()
        await ada.send("general", "said meanwhile")
        async with connect(pair, "bob", channels=["general"], state=state) as bob:
            assert await flags(bob, 3) == [("in hand", "redelivered"), ("not yet taken", ""), ("said meanwhile", "")]
            assert len(bob.transport.queue) == 0


async def test_what_comes_before_older_ones_is_ahead_and_those_are_late_though_the_steward_hangs_and_it_starts_again(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.client.channels.RETRY_PAUSE", 0.05)
    state = tmp_path / "bob.state"
    async with connect(pair, "bob", channels=["general"], state=state):
        pass
    async with connect(pair, "ada") as ada:
        for number in (1, 2):
            await ada.send("general", f"old {number}")
        await pair.stop_steward()
        async with connect(pair, "bob", channels=["general"], state=state) as bob:
            await ada.send("general", "new 1")
            assert await flags(bob, 1) == [("new 1", "ahead")]
        await pair.start_steward(TEST_INTERVALS)
        async with connect(pair, "bob", channels=["general"], state=state) as bob:
            assert await flags(bob, 2) == [("old 1", "late"), ("old 2", "late")], "also in the next process"
        await ada.send("general", "old 3")
        await pair.stop_steward()
        async with connect(pair, "bob", channels=["general"], state=state) as bob:
            await ada.send("general", "new 2")
            assert await flags(bob, 1) == [("new 2", "ahead")]
            await pair.start_steward(TEST_INTERVALS)
            assert await flags(bob, 1) == [("old 3", "late")], "and in the same one"
            membership = bob.transport._channels.memberships["general"]
            await eventually(lambda: membership.is_whole, what="it has caught up")
            await ada.send("general", "new 3")
            assert await flags(bob, 1) == [("new 3", "")]


async def test_while_frames_of_a_killed_session_are_out_newer_copies_are_ahead_and_they_come_late(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backstop, "LOOK_EVERY", 0.03)
    monkeypatch.setattr(frame_mailbox, "EXPIRES_SOON", 0.05)
    state = tmp_path / "bob.state"
    async with connect(pair, "bob", channels=["general"], state=state) as bob:
        owner = bob.id
    async with stub_pipeline(pair) as pipeline, connect(pair, "ada") as ada:
        s = pipeline.subjects
        name = f"dlv_{owner}"
        config = (await pipeline.js.api(f"CONSUMER.INFO.{s.delivery_stream}.{name}"))["config"]
        body = {"stream_name": s.delivery_stream, "config": config | {"ack_wait": 5_000_000_000}}
        await pipeline.js.api(f"CONSUMER.CREATE.{s.delivery_stream}.{name}.{s.delivery(owner)}", body)
        await pipeline.level()
        steward = pair.steward
        assert steward is not None
        await eventually(lambda: steward.roster.backstop.running, what="the steward sees it run")
        sent = [(await ada.send("general", text)).seq for text in ("first of a frame", "second of it")]
        await pipeline.level()
        await pipeline.deliver(owner, sent)
        async with child(CHILD, str(pair.home.home), pair.home.name, "bob", str(state), "0") as victim:
            assert [(await victim.line())["text"] for _ in range(2)] == ["ready", "first of a frame"]
            victim.signal(signal.SIGKILL)
            await victim.ended()
        async with connect(pair, "bob", channels=["general"], state=state) as bob:
            await ada.send("general", "live")
            assert await flags(bob, 1) == [("live", "ahead")]
            assert await flags(bob, 2) == [
                ("first of a frame", "redelivered late"),
                ("second of it", "redelivered late"),
            ]
            await ada.send("general", "live again")
            assert await flags(bob, 1) == [("live again", "")]
