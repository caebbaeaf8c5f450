"""Who is in a linked space: told in signed statements, known by name, mentioned; forgotten when it is not agreed."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import tidings
from carried_links import LinkedSpaces, call_worker, directory_status, linked_spaces, worker
from linked_spaces import LINK, peer_of, unlinked
from tidings.admin.link_peers import LinkPeers
from tidings.cli.main import main
from tidings.client.connect import connect_directly
from tidings.contract.admin import RotateKeyRequest
from tidings.contract.link_worker import PauseLinkRequest, ResumeLinkRequest
from tidings.contract.links import LinkRosterRequest
from tidings.errors import DeniedError, UnknownPeer
from tidings.links import running_link
from tidings.steward import linked_people
from tidings.util.private_files import write_private
from tidings.wire.link_exchange import MOST_ROLES, Statement, read_statement
from tidings.wire.signing import KeyPair
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, channels=["general"], **options)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_link, "EVERY", 0.1)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[LinkedSpaces]:
    async with linked_spaces(tmp_path, roster="on") as spaces:
        await spaces.main.add("cleo", read=("general", "private"), post=("general", "private"))
        yield spaces


async def names(agent: tidings.DirectAgent) -> dict[str, str]:
    return {each.name: each.id for each in await agent.who()}


async def knows(agent: tidings.DirectAgent, name: str) -> str:
    async def known() -> str | None:
        return (await names(agent)).get(name)

    return str(await eventually(known, within=20, what=name))


async def forgets(agent: tidings.DirectAgent, name: str) -> None:
    async def forgotten() -> bool:
        return name not in await names(agent)

    await eventually(forgotten, within=20, what=name)


async def test_an_agent_of_a_linked_space_is_in_who_and_a_mention_of_it_reaches_it(both: LinkedSpaces) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        connect(both.main, "ada") as ada,
        connect(both.acme, "bob") as bob,
    ):
        assert await knows(ada, "bob@acme") == bob.id
        assert await knows(bob, "ada@main") == ada.id
        found = await ada.transport.resolve("bob@acme")
        assert (found.elsewhere, found.online) == ("acme", False)

        sent = await ada.send("general", "look at this", mentions=["bob@acme"])
        assert sent.warnings == ()
        heard = await bob.next_message(timeout=20)
        assert (heard.text, heard.mentions_me, heard.sender.name) == ("look at this", True, "ada@main")
        assert heard.wakes

        with pytest.raises(UnknownPeer, match=r"did you mean bob@acme"):
            await ada.send("general", "who?", mentions=["bobb@acme"])
        with pytest.raises(UnknownPeer, match=r"acme is linked and tells who is there, west does not"):
            await ada.send("general", "who?", mentions=["bob@west"])


async def test_a_mention_in_a_channel_that_is_not_shared_is_told_to_reach_nobody(both: LinkedSpaces) -> None:
    async with worker(both.main), connect(both.main, "cleo") as cleo:
        await knows(cleo, "bob@acme")
        sent = await cleo.send("private", "psst", mentions=["bob@acme"])
        assert any("is in another space, with which private is not shared" in each for each in sent.warnings)


async def test_who_comes_goes_and_changes_its_key_there_does_so_here(both: LinkedSpaces) -> None:
    async with worker(both.main), connect(both.main, "ada") as ada:
        before = await knows(ada, "bob@acme")
        await both.acme.add("eve")
        await knows(ada, "eve@acme")
        async with both.acme.administer() as admin:
            await admin.revoke("eve")
        await forgets(ada, "eve@acme")
        async with both.acme.administer() as admin:
            await admin.rotate("bob")

        async def changed() -> bool:
            return (await names(ada)).get("bob@acme") not in (None, before)

        await eventually(changed, within=20)
        assert (await directory_status(both.main)).changed == ()


async def test_a_name_that_gets_another_key_without_a_word_is_refused_until_the_operator_trusts_it(
    both: LinkedSpaces, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(both.main), connect(both.main, "ada") as ada:
        before = await knows(ada, "bob@acme")
        async with both.acme.administer() as admin:
            await admin.revoke("bob")
        await forgets(ada, "bob@acme")
        await both.acme.add("bob")

        async def told() -> Any:
            return (await directory_status(both.main)).changed

        [[name, key]] = await eventually(told, within=20)
        assert name == "bob"
        assert "bob@acme" not in await names(ada)
        where = ["--home", str(both.main.home.home), "--space", "main"]
        assert await asyncio.to_thread(main, ["link", "show", "acme", *where]) == 0
        assert "bob is U" in " ".join(capsys.readouterr().out.split())
        monkeypatch.setattr("typer.confirm", lambda *_words, **_options: False)
        assert await asyncio.to_thread(main, ["link", "people", "acme", *where, "--trust", "bob"]) == 1
        shown = capsys.readouterr()
        assert before in shown.out + shown.err
        assert key in shown.out + shown.err
        assert "bob@acme" not in await names(ada)
        assert await asyncio.to_thread(main, ["link", "people", "acme", *where, "--trust", "bob", "--yes"]) == 0
        assert await knows(ada, "bob@acme") == key
        assert await asyncio.to_thread(main, ["link", "people", "acme", *where, "--json"]) == 0
        assert [each["name"] for each in json.loads(capsys.readouterr().out)["people"]] == ["bob"]
        assert await asyncio.to_thread(main, ["link", "people", "acme", *where, "--trust", "nobody", "--yes"]) != 0


async def test_a_new_key_of_the_peers_steward_is_followed_and_the_link_goes_on(both: LinkedSpaces) -> None:
    async with worker(both.main), connect(both.main, "ada") as ada:
        await knows(ada, "bob@acme")
        following = KeyPair.generate()
        write_private(both.acme.home.creds / "steward.key.next", following.seed + "\n")
        async with both.acme.administer() as admin:
            await admin.call(RotateKeyRequest())
        await both.acme.add("eve")
        await knows(ada, "eve@acme")
        assert (await directory_status(both.main)).words == ""


async def test_who_is_there_is_known_again_after_either_side_started_anew_while_the_other_space_is_away(
    both: LinkedSpaces,
) -> None:
    async with connect(both.main, "ada") as ada:
        async with worker(both.main):
            await knows(ada, "bob@acme")
        await both.acme.stop_steward()
        await both.main.stop_steward()
        await both.main.start_steward()
        await forgets(ada, "bob@acme")
        async with worker(both.main):
            await knows(ada, "bob@acme")


async def test_who_is_there_is_forgotten_when_the_link_is_paused_ended_or_shares_it_no_more(
    both: LinkedSpaces,
) -> None:
    async with worker(both.main), connect(both.main, "ada") as ada:
        await knows(ada, "bob@acme")
        await call_worker(both.main, PauseLinkRequest(link=LINK))
        await forgets(ada, "bob@acme")
        await call_worker(both.main, ResumeLinkRequest(link=LINK))
        await knows(ada, "bob@acme")
        await both.agree(roster="off")
        await forgets(ada, "bob@acme")
        await both.agree(roster="on")
        await knows(ada, "bob@acme")
        await unlinked(both.main)
        await forgets(ada, "bob@acme")


async def test_agents_with_more_roles_than_are_told_do_not_keep_the_others_from_being_known(
    both: LinkedSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked_people, "STATED_CHARACTERS", 100)
    await both.acme.add("many", roles=[f"role{number:03d}" for number in range(MOST_ROLES + 1)])
    await both.acme.add("zoe")
    async with worker(both.main), connect(both.main, "ada") as ada:
        await knows(ada, "zoe@acme")
        assert len((await ada.transport.resolve("many@acme")).roles) == MOST_ROLES
        assert "bob@acme" in await names(ada)


async def test_a_statement_says_nothing_but_who_somebody_is_and_only_for_one_link(both: LinkedSpaces) -> None:
    creds = LinkPeers.below(both.main.home).creds(LINK).read_text()
    async with peer_of(both.acme, creds) as peer:
        page = await peer.control.call(LinkRosterRequest())
        stated = [read_statement(each, both.acme.info.id, page.key, LINK) for each in page.people]
        assert "bob" in {each.name for each in stated}
        words = " ".join(each.text for each in page.people)
        assert not any(each in words for each in ("jwt", "read", "post", "manage", "general"))
        for changed in (
            Statement(page.people[0].text.replace(stated[0].name, "mallory"), page.people[0].sig),
            Statement(page.people[0].text, page.people[-1].sig if len(page.people) > 1 else "x"),
        ):
            with pytest.raises(tidings.errors.MalformedRecord):
                read_statement(changed, both.acme.info.id, page.key, LINK)
        with pytest.raises(tidings.errors.MalformedRecord):
            read_statement(page.people[0], both.acme.info.id, page.key, "anotherlink1")
    await both.agree(roster="off")
    creds = LinkPeers.below(both.main.home).creds(LINK).read_text()
    async with peer_of(both.acme, creds) as peer:
        with pytest.raises(DeniedError, match="does not share who is in"):
            await peer.control.call(LinkRosterRequest())
