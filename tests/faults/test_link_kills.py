"""Workers of links that are killed around their commits, or whose own log is full: nothing is lost, nothing is there
twice."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from carried_links import came, running_status, stored, worker_process
from failing_links import FailingLinks, failing_links, look_soon
from linked_spaces import LINK
from tidings.cli.main import main as tidings_command
from tidings.contract.link_worker import ListLinksRequest, StoredLink
from tidings.links import replicator
from tidings.links.operations import alone
from tidings.links.validation import PAGE_RECORDS
from tidings.server.disk import DiskReserve, Room
from tidings.util.backoff import Backoff
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    look_soon(monkeypatch)


@pytest.fixture
async def links(tmp_path: Path) -> AsyncIterator[FailingLinks]:
    async with failing_links(tmp_path) as found:
        yield found


async def booked_of(space: RealSpace) -> StoredLink:
    """What its ledger has, while no worker runs."""
    async with alone(space.home) as operations:
        (facts,) = (await operations.call(ListLinksRequest(link=LINK, complete=True))).links
    assert facts.store is not None
    return facts.store


@pytest.mark.parametrize(
    ("place", "in_the_log", "in_the_ledger"),
    [
        ("link.page.before_admit", PAGE_RECORDS, PAGE_RECORDS),
        ("link.page.admitted", PAGE_RECORDS + 40, PAGE_RECORDS),
        ("link.page.committed", PAGE_RECORDS + 40, PAGE_RECORDS + 40),
    ],
)
async def test_a_worker_killed_at_its_second_page_has_that_page_whole_or_not_at_all_and_the_next_one_goes_on(
    links: FailingLinks, place: str, in_the_log: int, in_the_ledger: int
) -> None:
    texts = [f"word {number}" for number in range(PAGE_RECORDS + 40)]
    await links.talk.say(links.main, "ada", *texts)
    async with worker_process(links.acme, TIDINGS_FAILPOINT=f"{place}:kill:1") as doomed:
        assert await asyncio.wait_for(doomed.child.wait(), 40) == -9
    assert await came(links.acme) == texts[:in_the_log]
    ledger = await booked_of(links.acme)
    assert ledger.counts == {"admitted": in_the_ledger}
    assert (ledger.owed, ledger.quarantined, ledger.omitted) == (0, 0, ())
    async with links.carried() as (main, acme):
        await links.talk.say(links.main, "eve", "after")
        await links.converged(main, acme)
    assert (await booked_of(links.acme)).counts == {"admitted": len(texts) + 1}


# --- a destination that is full ---


class FilledDisk(DiskReserve):
    """A disk that other programs filled: the gate closes, and stays closed whoever looks at it meanwhile."""

    def look(self) -> Room:
        return replace(super().look(), free=0)


async def words_of(space: RealSpace, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    await asyncio.to_thread(tidings_command, [*words, "--space", space.home.name, "--home", str(space.home.home)])
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


async def test_a_destination_that_is_full_says_so_drops_nothing_and_has_everything_in_order_once_there_is_room(
    links: FailingLinks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert links.acme.steward is not None
    await links.acme.add("root")  # who asks the steward how it is
    gate, disk = links.acme.steward.gate, links.acme.steward.gate.disk
    async with links.carried() as (main, acme):
        await links.both_say("before")
        await links.converged(main, acme)
        before, direction = (await stored(links.acme)), acme._carried[LINK].direction
        gate.disk = FilledDisk(disk.folder)
        await gate.tend()
        for name in ("ada", "eve"):
            await links.talk.say(links.main, name, *(f"{name} said into the full log {number}" for number in range(20)))
        await eventually(lambda: direction.status().status == "degraded_poll", within=20, what="it does not get on")
        live, after = await running_status(links.acme), await stored(links.acme)
        assert "the log of space acme is full" in live.words
        assert live.lag_records > 0
        assert (after.handled, after.counts, after.omitted) == (before.handled, before.counts, ())
        assert "the log of space acme is full" in await words_of(links.acme, capsys, "link", "show", "main")
        told = json.loads(await words_of(links.acme, capsys, "status", "--json"))
        assert told["links"]["links"] == [{"space": "main", "state": "degraded_poll"}]
        assert any("is full" in each and "new messages are refused" in each for each in told["problems"])

        monkeypatch.setattr(
            replicator, "LINK_DELAYS", Backoff(600.0, 600.0)
        )  # nothing is on its way when there is room
        tried = direction._failures
        await eventually(lambda: direction._failures > tried, within=20)
        gate.disk = disk
        await gate.tend()
        acme._carried[LINK].ask()
        await links.converged(main, acme)
        assert (await stored(links.acme)).counts == {"admitted": 6 + 40}
