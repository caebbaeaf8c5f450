"""Credentials of links that end: a worker lives past its first one, and one that was away for too long gets another."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from carried_links import said, status, until_came, worker
from failing_links import failing_links, look_soon
from inviting import attend
from linked_spaces import LINK
from tidings.admin import linking
from tidings.admin.inviting import reach_of
from tidings.admin.link_accepting import LinkWishes, accept_link
from tidings.admin.link_inviting import LinkInviter, LinkTerms
from tidings.admin.link_peers import LinkPeers
from tidings.admin.linking import Linker
from tidings.cli import link_words
from tidings.links import running_link
from tidings.nats import jwt
from tidings.wire.invitations import InvitationLine, parse_invitation
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    look_soon(monkeypatch)
    monkeypatch.setattr(running_link, "LOOK_AT_CREDENTIAL", 0.1)


def lasting(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Credentials of links that are made from now on; 0: for ever."""
    monkeypatch.setattr(linking, "longest_lifetime", lambda _info, _wanted: seconds)


def end_of(space: RealSpace, link: str = LINK) -> int:
    """When the credential ends that its worker has for the other space."""
    token, _ = jwt.split_credentials(LinkPeers.below(space.home).creds(link).read_text())
    return int(jwt.decode(token)["exp"])


async def is_over(moment: int) -> None:
    await eventually(lambda: time.time() > moment + 1, within=60, what="the credential ended")


@asynccontextmanager
async def renewing(space: RealSpace) -> AsyncIterator[list[str]]:
    """Its tokens for others are made anew when half of their time is over, as a supervisor does."""
    done: list[str] = []

    async def renew() -> None:
        async with space.administer() as admin:
            while True:
                await eventually(lambda: [row for row in admin.links.rows() if row.is_due(time.time())], within=60)
                done.extend(Linker(admin).renew())

    task = asyncio.create_task(renew())
    try:
        yield done
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_worker_lives_past_the_end_of_its_first_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(monkeypatch, 8)
    async with failing_links(tmp_path) as links:
        first = {space.info.name: end_of(space) for space in (links.main, links.acme)}
        async with (
            links.carried() as (main, acme),
            renewing(links.main) as made,
            renewing(links.acme),
        ):
            await links.both_say("with the first one")
            await links.converged(main, acme)
            await is_over(max(first.values()))
            await links.both_say("with a later one")
            await links.converged(main, acme)
            assert made
            for space in (links.main, links.acme):
                assert end_of(space) > first[space.info.name]
            for network in links.networks:
                assert network.connections >= 2, "the broker cut who came with the first one"


def yes(_proposal: object) -> None:
    pass


async def invited(space: RealSpace) -> InvitationLine:
    terms = LinkTerms(shares=("general",), takes={"general": "general"}, called="lab")
    async with space.administer() as admin:
        _, line = LinkInviter(admin).invite(terms, 3_600, reach_of(admin, None))
    return parse_invitation(str(line))


async def renewed(space: RealSpace, link: str) -> InvitationLine:
    async with space.administer() as admin:
        row = admin.links.get(link)
        assert row is not None
        _, line = LinkInviter(admin).renew(row, 3_600, reach_of(admin, None))
    return parse_invitation(str(line))


async def test_a_worker_whose_credential_ended_while_it_was_away_says_what_helps_and_a_renewed_link_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(monkeypatch, 4)
    async with real_space(tmp_path / "a", "main") as main, real_space(tmp_path / "b", "lab") as lab:
        await main.add("ada")
        for each in (main, lab):
            attend(each)
        link = (await accept_link(lab.home, await invited(main), LinkWishes(), yes)).record.link
        await said(main, "ada", "while it was away")
        await is_over(end_of(lab, link))
        lasting(monkeypatch, 0)
        async with worker(lab):

            async def told() -> bool:
                live = (await status(lab, link)).live
                return bool(live and live.status == "paused" and live.words)

            await eventually(told, within=20, what="it says that it is not let in")
            facts = await status(lab, link)
            shown = dict(link_words.rows(facts, time.time()))
            assert "held until" in str(shown["why"])
            assert "was not renewed in time" in str(shown["why"])
            assert "tidings link renew" in str(shown["why"])
            assert facts.live is not None
            assert facts.live.ended_there is False, "nobody ended it"
            await accept_link(lab.home, await renewed(main, link), LinkWishes(), yes)
            await said(main, "ada", "since it is back")
            await until_came(lab, ["while it was away", "since it is back"])
