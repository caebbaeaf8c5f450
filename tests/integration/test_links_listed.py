"""A space whose channels are listed, and what links bring into it: nothing goes where nobody would count it."""

from pathlib import Path
from typing import Literal

import tidings
from carried_links import call_worker, came, linked_spaces, said, stored, until_came, worker
from linked_spaces import LINK
from linking import OtherSpace
from tidings.client.connect import connect_directly
from tidings.contract.admin import ChangeSpaceRequest
from tidings.contract.channels import ChangeChannelRequest
from tidings.contract.link_worker import ListQuarantineRequest, QuarantinedRecord, RebuildLinkRequest
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str, *channels: str) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, channels=list(channels))


async def list_only(space: RealSpace, channels: Literal["open", "listed"] = "listed") -> None:
    async with space.administer() as admin:
        await admin.call(ChangeSpaceRequest(channels=channels))


async def set_channel(space: RealSpace, settings: ChangeChannelRequest) -> None:
    async with space.agent("owner") as owner:
        await owner.control.call(settings)


async def test_what_goes_into_a_channel_that_is_not_listed_is_put_aside_with_words_and_comes_once_it_is(
    tmp_path: Path,
) -> None:
    async with linked_spaces(tmp_path) as both:
        await both.acme.add("owner", read=[">"], post=[">"], manage=[">"])
        await list_only(both.acme)
        async with worker(both.acme), connect(both.acme, "bob", "general") as bob:
            await said(both.main, "ada", "one", "two")

            async def put_aside() -> tuple[QuarantinedRecord, ...]:
                found = (await call_worker(both.acme, ListQuarantineRequest(link=LINK))).records
                return found if len(found) == 2 else ()

            kept = await eventually(put_aside, what="both are put aside")
            assert {each.reason for each in kept} == {"not_listed"}
            assert "channel general is not listed here: `tidings channels set general`" in kept[0].words
            assert await came(both.acme) == []
            (shown,) = (await stored(both.acme)).unlisted
            assert shown == kept[0].words
            await set_channel(both.acme, ChangeChannelRequest("general"))
            await until_came(both.acme, ["one", "two"])
            assert [(await bob.next_message(10)).text for _ in range(2)] == ["one", "two"]
            assert [each.text for each in await bob.history("general", 10)] == ["two", "one"]
            await said(both.main, "ada", "three")
            assert (await bob.next_message(10)).text == "three"

            async def written_down() -> bool:
                ledger = await stored(both.acme)
                return (ledger.quarantined, ledger.unlisted, ledger.counts) == (0, (), {"admitted": 3})

            await eventually(written_down, what="all three are let in")


async def test_a_message_that_is_here_stays_here_when_its_channel_is_listed_no_more(tmp_path: Path) -> None:
    async with linked_spaces(tmp_path) as both:
        await both.acme.add("owner", read=[">"], post=[">"], manage=[">"])
        async with worker(both.acme):
            await said(both.main, "ada", "one")
            await until_came(both.acme, ["one"])
            await list_only(both.acme)
            await call_worker(both.acme, RebuildLinkRequest(link=LINK))

            async def counts() -> object:
                return (await stored(both.acme)).counts

            async def read_again() -> bool:
                return await counts() != {}

            await eventually(read_again, what="all is read again")
            assert await counts() == {"admitted": 1}
            assert await came(both.acme) == ["one"]


async def test_readers_show_of_links_what_is_in_a_listed_channel_and_nothing_else(space: RealSpace) -> None:
    """A worker that does not look, or a channel that is removed while something is under way."""
    await space.add("bob", read=[">"])
    await space.add("owner", read=[">"], post=[">"], manage=[">"])
    west = OtherSpace()
    await west.link(space, channels={"general": "general", "team.>": "west.team.>"})
    await list_only(space)
    async with connect(space, "bob", "general", "west.team.>") as bob:
        await west.admit(space, west.say("not listed yet"))
        await west.admit(space, west.say("neither", "team.a"), "west.team.a")
        await set_channel(space, ChangeChannelRequest("general"))
        await west.admit(space, west.say("listed"))
        await set_channel(space, ChangeChannelRequest("west.team.a"))
        await west.admit(space, west.say("a team", "team.a"), "west.team.a")
        await west.admit(space, west.say("another team", "team.b"), "west.team.b")
        await set_channel(space, ChangeChannelRequest("general", listed=False))
        await west.admit(space, west.say("listed no more"))
        await list_only(space, "open")
        await west.admit(space, west.say("all are open"))
        heard = [await bob.next_message(10) for _ in range(3)]
        assert [each.text for each in heard if each.channel == "general"] == ["listed", "all are open"]
        assert [each.text for each in heard if each.channel != "general"] == ["a team"]
        assert [each.text for each in await bob.history("general", 10)] == ["all are open", "listed"]
        assert [each.text for each in await bob.history("west.team.a", 10)] == ["a team"]
