"""A link gets new keys by a line for its other space: after an older copy was put back, and when somebody wants to."""

import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carried_links import came, said, until_came, worker
from inviting import attend
from linked_spaces import peer_of
from tidings.admin.inviting import reach_of
from tidings.admin.link_accepting import AcceptedLink, LinkWishes, Proposal, accept_link
from tidings.admin.link_inviting import LinkInviter, LinkTerms
from tidings.admin.link_peers import LinkPeers
from tidings.admin.link_registry import LinkLedger
from tidings.admin.linking import Linker, terms_of
from tidings.cli.context import Context
from tidings.cli.link_words import summarise_links
from tidings.contract.link_worker import ListLinksRequest
from tidings.contract.links import LinkHelloRequest
from tidings.errors import AuthRevoked, DeniedError, TidingsError, UsageError
from tidings.nats import jwt
from tidings.wire.invitations import InvitationLine, parse_invitation
from tidings.wire.rulings import Link
from tidings_testing.real_space import RealSpace, real_space

TERMS = LinkTerms(shares=("general",), takes={"general": "general"}, called="lab")


class Two:
    """Space `main` offers links, space `lab` accepts them; `copy` is `lab` before there was any."""

    def __init__(self, main: RealSpace, lab: RealSpace, copy: Path) -> None:
        self.main, self.lab, self.copy = main, lab, copy

    async def offer(self, **terms: Any) -> InvitationLine:
        async with self.main.administer() as admin:
            _, line = LinkInviter(admin).invite(LinkTerms(**{**_fields(TERMS), **terms}), 3_600, reach_of(admin, None))
        return parse_invitation(str(line))

    async def put_back(self) -> None:
        """The copy from before the link, as docs/operations.md says: while nothing runs."""
        await self.lab.stop_steward()
        self.lab.broker.stop()
        shutil.rmtree(self.lab.home.root)
        shutil.copytree(self.copy, self.lab.home.root)
        self.lab.broker.start()
        await self.lab.start_steward()
        attend(self.lab)
        async with self.lab.administer() as admin:  # as `tidings up` does it
            await Linker(admin).reconcile()


def _fields(terms: LinkTerms) -> dict[str, Any]:
    return {name: getattr(terms, name) for name in terms.__slots__}


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    async with real_space(tmp_path / "a", "main") as main, real_space(tmp_path / "b", "lab") as lab:
        await main.add("ada")
        await lab.add("bob")
        copy = tmp_path / "copy"
        await lab.stop_steward()
        lab.broker.stop()
        shutil.copytree(lab.home.root, copy)
        lab.broker.start()
        await lab.start_steward()
        for each in (main, lab):
            attend(each)
        yield Two(main, lab, copy)


def yes(_proposal: Proposal) -> None:
    pass


async def taken(space: RealSpace, line: InvitationLine, **wishes: Any) -> AcceptedLink:
    return await accept_link(space.home, line, LinkWishes(**wishes), yes)


async def renewed(space: RealSpace, link: str) -> InvitationLine:
    async with space.administer() as admin:
        row = admin.links.get(link)
        assert row is not None
        _, line = LinkInviter(admin).renew(row, 3_600, reach_of(admin, None))
    return parse_invitation(str(line))


def record(space: RealSpace, link: str) -> Link:
    assert space.steward is not None
    found = space.steward.table.link_at(link, space.steward.space.position)
    assert found is not None
    return found


def creds(space: RealSpace, link: str) -> str:
    return LinkPeers.below(space.home).creds(link).read_text()


async def problems(space: RealSpace) -> list[str]:
    where = Context(space=space.home.name, home_dir=str(space.home.home))
    return list((await asyncio.to_thread(summarise_links, where, False))["problems"])


async def each_reaches_the_other(two: Two, link: str) -> None:
    for here, there in ((two.main, two.lab), (two.lab, two.main)):
        async with peer_of(there, creds(here, link)) as client:
            assert (await client.control.call(LinkHelloRequest())).link == link


def alarms(space: RealSpace) -> list[str]:
    assert space.steward is not None
    return space.steward.invited.problems()


async def test_a_space_put_back_from_before_the_link_is_told_what_helps_and_one_line_mends_it(two: Two) -> None:
    line = await two.offer()
    link = (await taken(two.lab, line, called="head")).record.link
    await said(two.main, "ada", "before")
    await two.put_back()
    (problem,) = await problems(two.lab)
    assert "nothing comes from head: how it is reached is not known here" in problem
    assert "an older copy of this space was put back" in problem
    assert "tidings link renew head" in problem
    with pytest.raises(UsageError, match=f"tidings link renew {link}"):
        await taken(two.lab, line)
    assert alarms(two.main) == [], "the line is in nobody else's hands"
    found = await taken(two.lab, await renewed(two.main, link))
    assert (found.record.link, found.record.space, found.known_as) == (link, "head", "lab")
    assert await problems(two.lab) == []
    await each_reaches_the_other(two, link)
    async with worker(two.main), worker(two.lab):
        await said(two.lab, "bob", "and back")
        await until_came(two.lab, ["before"])
        await until_came(two.main, ["and back"])


async def test_on_another_machine_nothing_is_remembered_and_a_used_line_is_no_alarm_if_its_space_proves_itself(
    two: Two,
) -> None:
    line = await two.offer()
    link = (await taken(two.lab, line)).record.link
    shutil.rmtree(two.lab.home.remembered)
    await two.put_back()
    assert LinkLedger.below(two.lab.home, two.lab.info.id).rows() == []
    with pytest.raises(DeniedError, match=f"tidings link renew {link}"):
        await taken(two.lab, line)
    assert alarms(two.main) == []
    await taken(two.lab, await renewed(two.main, link), called="head")
    assert record(two.lab, link).space == "head"
    await each_reaches_the_other(two, link)


async def test_the_space_that_was_put_back_may_make_the_line_too_and_the_other_keeps_its_names(two: Two) -> None:
    line = await two.offer(takes={"general": "from.lab"})
    link = (await taken(two.lab, line, names={"general": "from.main"})).record.link
    await two.put_back()
    await taken(two.main, await renewed(two.lab, link))
    ours, theirs = record(two.main, link), record(two.lab, link)
    assert (ours.channels, theirs.channels) == ({"general": "from.lab"}, {"general": "from.main"})
    assert (ours.shares, theirs.shares, ours.space) == (("general",), ("general",), "lab")
    await each_reaches_the_other(two, link)


async def test_old_keys_are_void_what_was_handled_stays_and_nothing_comes_twice(two: Two) -> None:
    link = (await taken(two.lab, await two.offer())).record.link
    async with worker(two.lab):
        await said(two.main, "ada", "one")
        await until_came(two.lab, ["one"])
        before = {space: creds(space, link) for space in (two.main, two.lab)}
        await taken(two.lab, await renewed(two.main, link))
        await said(two.main, "ada", "two")
        await until_came(two.lab, ["one", "two"])
    for here, there in ((two.main, two.lab), (two.lab, two.main)):
        assert jwt.split_credentials(creds(here, link))[1].id != jwt.split_credentials(before[here])[1].id
        with pytest.raises(TidingsError) as refused:
            async with peer_of(there, before[here]) as client:
                await client.control.call(LinkHelloRequest())
        assert isinstance(refused.value, AuthRevoked | DeniedError)
    from tidings.links.operations import alone

    async with alone(two.lab.home) as operations:
        (found,) = (await operations.call(ListLinksRequest(link=link, complete=True))).links
    assert found.store is not None
    assert found.store.counts == {"admitted": 2}, "it went on where it was, and read nothing again"
    assert await came(two.lab) == ["one", "two"]


async def test_a_line_that_renews_is_for_the_space_of_the_link_alone_and_a_newer_one_takes_its_place(
    two: Two, tmp_path: Path
) -> None:
    link = (await taken(two.lab, await two.offer())).record.link
    first = await renewed(two.main, link)
    async with real_space(tmp_path / "c", "thief") as thief:
        attend(thief)
        with pytest.raises(DeniedError, match="another space than yours"):
            await taken(thief, first)
        assert [row.state for row in LinkLedger.below(thief.home, thief.info.id).rows()] == ["off"]
    await each_reaches_the_other(two, link)
    second, before = await renewed(two.main, link), record(two.lab, link)
    with pytest.raises(DeniedError, match="a newer line was made"):
        await taken(two.lab, first)
    assert record(two.lab, link) == before
    await each_reaches_the_other(two, link)  # nobody was cut for a line that is void
    found = await taken(two.lab, second)
    assert (await taken(two.lab, second)).already
    assert found.record.state == "on"
    await each_reaches_the_other(two, link)


async def changed(space: RealSpace, link: str, **terms: Any) -> Link:
    """As `link set` does it."""
    async with space.administer() as admin:
        row = admin.links.get(link)
        assert row is not None
        return terms_of((await Linker(admin).set(msgspec.structs.replace(terms_of(row), **terms))).row)


def passing(found: Link) -> tuple[Any, ...]:
    return found.channels, found.shares, found.hops, found.until, found.direct, found.roster


async def test_what_either_operator_narrowed_since_the_line_was_made_stays_narrow_when_it_is_accepted(two: Two) -> None:
    wide = {"shares": ("general", "news"), "takes": {"general": "general", "news": "news"}, "hops": 2}
    link = (await taken(two.lab, await two.offer(**wide, direct="on", roster="on"))).record.link
    line, until = await renewed(two.main, link), int(time.time()) + 5_000
    ours = await changed(
        two.main, link, shares=("news",), channels={"general": "far"}, hops=1, until=until, direct="off", roster="off"
    )
    await taken(two.lab, line)
    assert passing(record(two.main, link)) == passing(ours)
    await each_reaches_the_other(two, link)

    await changed(two.main, link, shares=("general", "news"), hops=2, until=None, direct="on", roster="on")
    theirs = await changed(
        two.lab, link, channels={"news": "far"}, shares=("general",), hops=1, until=until, direct="off", roster="on"
    )
    await taken(two.lab, await renewed(two.main, link))
    assert passing(record(two.lab, link)) == passing(theirs)
    await each_reaches_the_other(two, link)


async def test_a_line_after_whose_making_the_link_was_changed_to_pass_nothing_else_changes_nothing(two: Two) -> None:
    link = (await taken(two.lab, await two.offer(takes={}))).record.link
    line = await renewed(two.main, link)
    await changed(two.main, link, shares=("news",))
    before = record(two.main, link)
    with pytest.raises(DeniedError, match="nothing would pass"):
        await taken(two.lab, line)
    assert record(two.main, link) == before


async def test_a_link_that_was_removed_is_not_renewed(two: Two) -> None:
    link = (await taken(two.lab, await two.offer())).record.link
    line = await renewed(two.main, link)
    async with two.main.administer() as admin:
        await Linker(admin).end(link)
    with pytest.raises(UsageError, match="was removed"):
        await renewed(two.main, link)
    before = record(two.lab, link)
    with pytest.raises(DeniedError, match="was removed since"):
        await taken(two.lab, line)
    assert record(two.lab, link) == before, "what the other refused changes nothing here"


@pytest.mark.parametrize("point", ["after_kept", "after_record", "after_said", "after_answer", "after_peer"])
async def test_whoever_accepts_new_keys_and_is_killed_finishes_by_the_same_line_and_the_link_is_never_ended(
    two: Two, point: str
) -> None:
    link = (await taken(two.lab, await two.offer())).record.link
    line = await renewed(two.main, link)
    words = ["link", "accept", str(line), "--yes", "--space", "lab", "--home", str(two.lab.home.home)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidings", *words),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "TIDINGS_FAILPOINT": f"link_accept.{point}:kill"},
    )
    assert await asyncio.wait_for(process.wait(), 60) == -9
    assert (record(two.main, link).state, record(two.lab, link).state) == ("on", "on")
    await taken(two.lab, line)
    await each_reaches_the_other(two, link)
