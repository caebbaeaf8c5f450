"""A space that links bring something into is put back from an older copy, with its ledger or without: everything that
had come is there again, once, in its order."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from carried_links import call_worker
from failing_links import FailingLinks, failing_links, look_soon, texts_in
from linked_spaces import LINK
from tidings.contract.link_worker import LinkEvent, LocalLogSetBack, VerifyLinkRequest
from tidings.links.worker import LinkWorker
from tidings_testing.waiting import eventually


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    look_soon(monkeypatch)


@pytest.fixture
async def links(tmp_path: Path) -> AsyncIterator[FailingLinks]:
    async with failing_links(tmp_path) as found:
        yield found


async def copy(links: FailingLinks, folder: Path) -> None:
    """Of everything that a backup of acme has, and of what its steward remembers beside that."""
    home = links.acme.home
    await marked(links)
    await links.acme.stop_steward()
    links.acme.broker.stop()
    await asyncio.to_thread(shutil.copytree, home.store, folder / "store")
    for path in (home.link_store, home.marks):
        shutil.copy(path, folder / path.name)
    links.acme.broker.start()
    await links.acme.start_steward()


async def put_back(links: FailingLinks, folder: Path, *others: Path) -> None:
    home = links.acme.home
    await links.acme.stop_steward()
    links.acme.broker.stop()
    shutil.rmtree(home.store)
    await asyncio.to_thread(shutil.copytree, folder / "store", home.store)
    for path in others:
        for left in path.parent.glob(f"{path.name}-*"):
            left.unlink()
        shutil.copy(folder / path.name, path)
    links.acme.broker.start()
    await links.acme.start_steward()


async def marked(links: FailingLinks) -> None:
    """Its steward has written down how far the log of acme is."""
    async with links.acme.core() as js:
        head = int((await js.info(links.acme.subjects.log_stream))["state"]["last_seq"])
    assert links.acme.steward is not None
    marks = links.acme.steward.marks
    await eventually(lambda: bool(marks.file.marks) and marks.file.marks[-1].seq >= head, what=f"a mark at {head}")


@pytest.mark.parametrize("ledger", ["kept by a worker that runs", "kept", "put back too"])
async def test_everything_is_there_once_in_a_space_that_was_put_back_whatever_its_ledger_says(
    links: FailingLinks, tmp_path: Path, ledger: str
) -> None:
    (folder := tmp_path / "copy").mkdir()
    heard: list[LinkEvent] = []
    async with links.carried() as (main, acme):
        await links.both_say("before the copy")
        await links.converged(main, acme)
    await copy(links, folder)
    async with AsyncExitStack() as running:
        main, acme = await running.enter_async_context(links.carried())
        await links.both_say("after the copy", 10)
        await links.converged(main, acme)
        await marked(links)
        if ledger != "kept by a worker that runs":
            await running.aclose()
        home = links.acme.home
        acme.listen(heard.append)
        await put_back(links, folder, *([home.link_store] if ledger == "put back too" else []))
        # what is said there now has the sequences of what it lost
        await links.talk.say(links.acme, "bea", *(f"instead {number}" for number in range(30)))
        if ledger == "kept by a worker that runs":
            await converged(links, main, acme)
            lost = [each.lost for each in heard if isinstance(each, LocalLogSetBack)]
            assert lost == [20], "what both senders of main said after the copy"
            return
    async with links.carried() as (main, acme):
        await converged(links, main, acme)


async def converged(links: FailingLinks, main: LinkWorker, acme: LinkWorker) -> None:
    await links.both_say("at last")
    await links.converged(main, acme)


async def test_a_space_put_back_unnoticed_lacks_what_it_lost_until_it_is_verified_and_then_has_it_once(
    links: FailingLinks, tmp_path: Path
) -> None:
    """What its steward remembers was put back too, and new messages passed the place where it was."""
    (folder := tmp_path / "copy").mkdir()
    async with links.carried() as (main, acme):
        await links.both_say("before the copy")
        await links.converged(main, acme)
    await copy(links, folder)
    async with links.carried() as (main, acme):
        await links.talk.say(links.main, "ada", "lost 1", "lost 2")
        await links.converged(main, acme)
    await put_back(links, folder, links.acme.home.marks)
    await links.talk.say(links.acme, "bea", *(f"instead {number}" for number in range(30)))
    async with links.carried() as (main, acme):
        found = await call_worker(links.acme, VerifyLinkRequest(link=LINK))
        assert found.lost == 2
        await links.converged(main, acme)
    assert [each.text for each in await texts_in(links.acme)].count("lost 1") == 1
