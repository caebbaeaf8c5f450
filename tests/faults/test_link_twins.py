"""Two workers for one link: one has the ledger, and two ledgers bring nothing twice."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from carried_links import came, worker, worker_process
from failing_links import FailingLinks, agrees, failing_links, look_soon
from tidings.admin.home import SpaceHome
from tidings.errors import StoreBusy
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    look_soon(monkeypatch)


@pytest.fixture
async def links(tmp_path: Path) -> AsyncIterator[FailingLinks]:
    async with failing_links(tmp_path) as found:
        yield found


async def test_of_two_worker_processes_one_carries_the_links_and_the_other_takes_over_when_it_is_killed(
    links: FailingLinks,
) -> None:
    async with worker_process(links.acme) as first:
        assert (await first.said())["ready"]
        for _ in range(2):
            async with worker_process(links.acme) as second:
                assert (await second.said())["error"]["code"] == StoreBusy.code
                assert await asyncio.wait_for(second.child.wait(), 30) == StoreBusy.exit_code
        await links.talk.say(links.main, "ada", "one", "two")
        await eventually(lambda: has_come(links.acme, 2), within=30)
        await first.kill()
    async with links.carried() as (main, acme):
        await links.talk.say(links.main, "ada", "three")
        await links.converged(main, acme)


async def has_come(space: RealSpace, count: int) -> bool:
    return len(await came(space)) == count


def copied(home: SpaceHome, root: Path) -> SpaceHome:
    """What somebody brings to another machine: everything but what the broker has, and what runs."""
    shutil.copytree(home.home, root, ignore=shutil.ignore_patterns("js", "run", "logs"))
    return SpaceHome(root, home.name)


@pytest.mark.parametrize("ledger", ["copied too", "begun anew"])
async def test_two_workers_with_two_ledgers_for_one_link_bring_nothing_twice(
    links: FailingLinks, tmp_path: Path, ledger: str
) -> None:
    await links.talk.say(links.main, "ada", "one", "two")
    if ledger == "copied too":
        async with links.carried() as (main, acme):
            await links.converged(main, acme)
    home = copied(links.acme.home, tmp_path / "copy")
    assert home.link_store.exists() == (ledger == "copied too")
    twin = RealSpace(home, links.acme.info, links.acme.broker)
    async with links.carried() as (main, acme), worker(twin) as other:
        for number in range(20):
            await links.both_say(f"round {number}", 2)
        await links.converged(main, acme)
        await agrees(other, links.acme, links.main)
