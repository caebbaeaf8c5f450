"""What a reader is shown of the past: only when it asks, marked, as far as the channel replays, and what is gone."""

from typing import Any

import pytest

import tidings
from tidings.client.connect import connect_directly
from tidings.client.incoming import Incoming
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.contract.channels import ChangeChannelRequest
from tidings.contract.mail import KeepLetterRequest
from tidings.errors import UsageError
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)


async def talkers(space: RealSpace) -> None:
    for name in ("ada", "bob", "cal"):
        await space.add(name, read=["general", "team.>"], post=["general", "team.>"], manage=[">"])


def said(messages: list[Incoming]) -> list[tuple[str, bool]]:
    return [(each.text, each.historical) for each in messages]


async def take(endpoint: tidings.DirectAgent, count: int) -> list[Incoming]:
    return [await endpoint.next_message(10) for _ in range(count)]


async def test_a_first_join_brings_nothing_of_the_past_and_a_bot_answers_nothing_old(space: RealSpace) -> None:
    await talkers(space)
    async with connect(space, "ada") as ada:
        for number in range(3):
            await ada.send("general", f"old {number}")
        async with connect(space, "bob", channels=["general"]) as bob:
            await ada.send("general", "new")
            assert said(await take(bob, 1)) == [("new", False)]
            assert len(bob.transport.queue) == 0
        await ada.send("general", "owed")
        async with connect(space, "bob", channels=["general"]) as bob:
            found = await take(bob, 2)
            assert said(found) == [("new", False), ("owed", False)], "a resumed membership gets what it is owed"
        async with connect(space, "cal", channels=["general"], backfill=2) as cal:
            past = await take(cal, 2)
            assert said(past) == [("new", True), ("owed", True)], "asked for, so it came, marked as past"
            assert not any(each.wakes for each in past)


async def test_a_pattern_backfills_like_a_channel_and_more_than_there_is_room_for_comes_as_there_is(
    space: RealSpace,
) -> None:
    await talkers(space)
    async with connect(space, "ada") as ada, connect(space, "bob", inbox=4) as bob:
        for number in range(4):
            await ada.send("team.a", f"a{number}")
            await ada.send("team.b.c", f"b{number}")
        joined = await bob.join("team.>", backfill=7)
        assert (joined.state, joined.backfilled) == ("opened", 4)
        assert "3 older messages wait until the inbox has room" in joined.reason
        found = await take(bob, 7)
        assert said(found) == [(text, True) for text in ("b0", "a1", "b1", "a2", "b2", "a3", "b3")]
        await ada.send("team.b.c", "now")
        assert said(await take(bob, 1)) == [("now", False)]


async def test_history_and_recall_show_what_the_channel_replays_and_what_one_was_in_for(space: RealSpace) -> None:
    await talkers(space)
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, connect(space, "cal") as cal:
        first = await ada.send("general", "before anybody")
        await bob.join("general")
        await ada.send("general", "while bob is in")
        await bob.leave("general")
        await ada.send("general", "after bob left")
        assert said(await bob.history("general")) == [
            (text, True) for text in ("after bob left", "while bob is in", "before anybody")
        ], "unless it is said otherwise, a channel replays"
        await ada.call(ChangeChannelRequest("general", replay=False))
        for found in (await bob.history("general"), await bob.transport.recall("general", first.seq - 1)):
            assert said(found) == [("while bob is in", True)]
            assert found.hidden
        assert said(await cal.history("general")) == []
        with pytest.raises(UsageError, match="no channel message"):  # and not as a dead letter either
            await cal.call(KeepLetterRequest("channel", seq=first.seq, error="", attempts=1))
        assert (await cal.join("general", backfill=10)).backfilled == 0
        await ada.send("general", "now cal is in")
        assert said(await take(cal, 1)) == [("now cal is in", False)]
        assert said(await cal.history("general")) == [("now cal is in", True)]
        await ada.call(ChangeChannelRequest("general", replay=True, replay_window=3600))
        everything = await cal.history("general")
        assert (len(everything), everything.hidden) == (4, False)
        await ada.call(ChangeChannelRequest("general", replay_window=0))
        assert said(await bob.history("general")) == [("while bob is in", True)], "further back than the window"
        await ada.call(ChangeChannelRequest("team.quiet", replay=False))
        await ada.send("team.quiet", "a secret past")
        await ada.send("team.open", "an open past")
        joined = await bob.join("team.>", backfill=10)
        assert joined.backfilled == 1
        assert said(await take(bob, 2)) == [("while bob is in", False), ("an open past", True)]


async def test_recall_says_what_is_no_longer_there(space: RealSpace) -> None:
    await talkers(space)
    async with connect(space, "ada") as ada:
        seqs = [(await ada.send("general", f"m{number}")).seq for number in range(4)]
        whole = await ada.transport.recall("general", seqs[0] - 1)
        assert (len(whole), whole.gone, whole.more) == (4, 0, False)
        first = await ada.transport.recall("general", seqs[0] - 1, 3)
        assert (len(first), first.more) == (3, True)
        async with space.administer() as admin:
            await admin.call(ChangeSpaceRequest(keep_age=0, parts=PartsChange(deliver="off", archive="off")))
        steward = space.steward
        assert steward is not None
        await eventually(lambda: steward.table.floor > seqs[2], what="retention removes them")
        assert (await ada.transport.recall("general", seqs[0] - 1)).gone >= seqs[2]
        assert (await ada.history("general")).gone >= seqs[2]
        later = await ada.transport.recall("general", steward.space.position)
        assert later.gone == 0, "nothing that was asked for"
