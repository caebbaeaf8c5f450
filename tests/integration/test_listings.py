"""Listings of channels and members, in pages; and attention that outlives the program that set it."""

from datetime import datetime

import pytest

import tidings
from tidings.client.connect import connect_directly
from tidings.contract.agents import AttentionRequest, ChangeAttentionRequest
from tidings.contract.channels import ChangeChannelRequest, ChannelRequest, ChannelsRequest, MembersRequest
from tidings.errors import DeniedError, UsageError
from tidings.steward import agent_handlers
from tidings.wire.roster import Attention
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


async def test_info_tells_settings_with_whose_words_they_are_and_what_goes_on(space: RealSpace) -> None:
    added = await space.add("ada", manage=["general"])
    await space.add("bob")
    async with connect(space, "ada", channels=["general"]) as ada, connect(space, "bob", receive=False) as bob:
        await ada.call(ChangeChannelRequest("general", replay=False, instructions="be brief"))
        await ada.send("general", "one")
        receipt = await bob.send("general", "two")
        facts = await bob.call(ChannelRequest("general"))
        assert (facts.cls, facts.replay, facts.own) == ("durable", False, ("replay",))
        assert (facts.instructions, facts.by, facts.by_name) == ("be brief", added.row.id, "ada")
        assert datetime.fromisoformat(facts.at or "").tzinfo is not None
        assert facts.last is not None
        assert (facts.members, facts.messages, facts.last.seq) == (1, 2, receipt.seq)
        assert facts.per_hour is not None
        assert facts.per_hour > 0


async def test_who_may_only_post_is_not_told_what_goes_on(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("eve", read=[], post=["general"])
    async with connect(space, "ada", channels=["general"]) as ada, connect(space, "eve", receive=False) as eve:
        await ada.send("general", "hello")
        facts = await eve.call(ChannelRequest("general"))
        assert (facts.members, facts.messages, facts.last, facts.per_hour) == (None, None, None, None)
        assert await eve.channels() == []
        with pytest.raises(DeniedError):
            await eve.members("general")


async def test_listings_longer_than_a_page_are_followed_to_their_end(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_handlers, "CHANNELS_PER_PAGE", 3)
    monkeypatch.setattr(agent_handlers, "PAGE_BYTES", 200)
    names = [f"team.c{number}" for number in range(8)]
    for name in ("ada", "bob", "cid", "eve"):
        await space.add(name, read=["team.>", "general"], post=["team.>"], manage=["team.>"])
    async with connect(space, "ada", channels=names) as ada:
        await ada.call(ChangeChannelRequest("team.listed", description="x"))
        await ada.send("team.c3", "hello")
        first = await ada.call(ChannelsRequest())
        assert 1 <= len(first.channels) <= 3
        assert first.next is not None
        found = await ada.channels()
        assert [each.channel for each in found] == [*names, "team.listed"]
        assert [each.channel for each in found if each.last] == ["team.c3"]
        assert [each.members for each in found] == [1] * 8 + [0]
        async with connect(space, "bob", channels=["team.>"]), connect(space, "cid", channels=["team.c1"]):
            assert sorted(str(each.name) for each in await ada.members("team.c1")) == ["ada", "bob", "cid"]
            assert len((await ada.call(MembersRequest("team.c1"))).members) < 3
            await ada.leave("team.c1")
            assert sorted(str(each.name) for each in await ada.members("team.c1")) == ["bob", "cid"]


async def test_attention_set_by_a_program_that_ended_holds_for_the_running_and_the_next_session(
    space: RealSpace,
) -> None:
    await space.add("ada", read=["general", "noise"])
    wanted = Attention("focus", {"noise": "muted"})
    async with connect(space, "ada", channels=["general"]) as ada:
        ada.transport.presence.set_attention("open")
        async with connect(space, "ada", receive=False) as terminal:
            await terminal.keep_attention("focus", {"noise": "muted"})
        await eventually(lambda: ada.transport.presence.attention == wanted, what="the running session took it over")
        ada.transport.presence.set_attention("open")
        assert ada.transport.presence.attention.mode == "open", "a later word of the session itself"
    await space.stop_steward()
    await space.start_steward()
    async with connect(space, "ada", channels=["general"]) as ada:
        assert ada.transport.presence.attention == wanted, "kept through the end of everybody who knew it"
        row = await eventually(lambda: ada.transport.roster.get(ada.id))
        assert row is not None
        assert not hasattr(row, "channels"), "others are told the mode only"
        async with connect(space, "ada", receive=False) as terminal:
            kept = Attention("focus", {"noise": "muted"})

            async def said_by_both() -> bool:
                said = await terminal.call(AttentionRequest(session=terminal.transport.session.session))
                return bool(said.running == said.standing == kept)

            await eventually(said_by_both, what="the running session beats what it took over")
            await terminal.keep_attention(channels={"noise": "normal"})
            with pytest.raises(UsageError):
                await terminal.call(ChangeAttentionRequest(mode="asleep"))  # type: ignore[arg-type]
            with pytest.raises(UsageError):
                await terminal.call(ChangeAttentionRequest())
        await eventually(lambda: ada.transport.presence.attention == Attention("focus"), what="normal is forgotten")


async def test_what_a_session_says_before_it_knows_the_roster_is_not_undone_by_what_was_kept(space: RealSpace) -> None:
    await space.add("ada")
    async with connect(space, "ada", receive=False) as terminal:
        await terminal.keep_attention("dnd")
    ada = connect(space, "ada")
    ada.on(
        "connection",
        lambda _state: ada.transport.presence.set_attention("focus") if not ada.transport.roster.loaded else None,
    )
    async with ada:
        await ada.transport.roster.wait_loaded()
        assert ada.transport.presence.attention.mode == "focus"
