"""The log of a linked space is purged, forgets, is made anew or put back under a worker that runs: it says what
happened, what is missing is named, and nothing comes twice."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from carried_links import stored
from failing_links import FailingLinks, agrees, failing_links, has_failed, holds, look_soon, reading, texts_in
from tidings.admin.linking import Linker
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.contract.link_worker import GapDetected, LinkEvent
from tidings.links.worker import LinkWorker
from tidings.wire.links import GapKind
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

PATIENCE = 1.0
#: said while the worker could not ask, and before anything happened to the log
LATE = tuple(f"late {number}" for number in range(6))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    look_soon(monkeypatch)


@pytest.fixture
async def links(tmp_path: Path) -> AsyncIterator[FailingLinks]:
    async with failing_links(tmp_path) as found:
        yield found


async def stopped(space: RealSpace, act: Callable[[], object]) -> None:
    """Do something to its files while it does not run."""
    with suppress(Exception):  # perhaps its log went away under it
        await space.stop_steward()
    space.broker.stop()
    await asyncio.to_thread(act)
    space.broker.start()
    await space.start_steward()


async def marked(space: RealSpace) -> None:
    """Its steward has written down how far the log is."""
    async with space.core() as js:
        head = int((await js.info(space.subjects.log_stream))["state"]["last_seq"])
    assert space.steward is not None
    marks = space.steward.marks
    await eventually(lambda: bool(marks.file.marks) and marks.file.marks[-1].seq >= head, what=f"a mark at {head}")


Deed = Callable[[FailingLinks, Path], Awaitable[None]]


@dataclass(frozen=True)
class Misfortune:
    """What is done to the log of main while acme cannot reach it, and the gap that makes. `before`: what is done before
    anything is said late; `heard`: does acme hear that before it is lost? `after`: things that are said afterwards."""

    kind: GapKind
    strike: Deed
    before: Deed | None = None
    heard: bool = False
    after: int = 20

    @property
    def gone(self) -> tuple[str, ...]:
        return () if self.heard else LATE


async def purge(links: FailingLinks, _folder: Path) -> None:
    """All but the steward's lease, so that it goes on."""
    await links.main.stop_steward()
    lease = (await links.main.start_steward()).lease.seq
    assert lease > max(each.seq for each in await texts_in(links.main))
    async with links.main.core() as js:
        await js.purge(links.main.subjects.log_stream, subject_filter=">", below=lease)


async def purge_all(links: FailingLinks, _folder: Path) -> None:
    """The lease too: the steward ends, and whoever starts it writes again what the log lost of agreements."""
    await marked(links.main)
    stream = links.main.subjects.log_stream
    async with links.main.core() as js:
        head = int((await js.info(stream))["state"]["last_seq"])
        await js.purge(stream, subject_filter=">", below=head + 1)
    await start_again(links.main)


async def start_again(space: RealSpace) -> None:
    """As a supervisor does for a steward whose log went away under it."""
    with suppress(Exception):
        await space.stop_steward()
    async with space.administer() as admin:
        await admin.provision()
    await space.start_steward()
    async with space.administer() as admin:
        await admin.reconcile()
        await Linker(admin).reconcile()


async def let_age(links: FailingLinks, _folder: Path) -> None:
    """Retention removes it: the link has not asked for longer than it is waited for."""
    steward = links.main.steward
    assert steward is not None
    last = max(each.seq for each in await texts_in(links.main) if each.text == LATE[-1])
    steward.retention.link_age = 0
    async with links.main.administer() as admin:
        await admin.call(ChangeSpaceRequest(parts=PartsChange(deliver="off", archive="off"), keep_age=0))
    await eventually(lambda: steward.table.floor > last, within=20, what="it is removed")
    async with links.main.administer() as admin:
        await admin.call(ChangeSpaceRequest(keep_age=86_400))


async def make_anew(links: FailingLinks, _folder: Path) -> None:
    await marked(links.main)
    async with links.main.core() as js:
        await js.api(f"STREAM.DELETE.{links.main.subjects.log_stream}")
    await start_again(links.main)


async def copy(links: FailingLinks, folder: Path) -> None:
    home = links.main.home
    await marked(links.main)

    def act() -> None:
        shutil.copytree(home.store, folder / "store")
        shutil.copy(home.marks, folder / "marks")

    await stopped(links.main, act)


def put_back_store(links: FailingLinks, folder: Path) -> None:
    shutil.rmtree(links.main.home.store)
    shutil.copytree(folder / "store", links.main.home.store)


async def put_back(links: FailingLinks, folder: Path) -> None:
    await marked(links.main)
    await stopped(links.main, lambda: put_back_store(links, folder))


async def put_back_unnoticed(links: FailingLinks, folder: Path) -> None:
    """And what the steward remembers of the log."""

    def act() -> None:
        put_back_store(links, folder)
        shutil.copy(folder / "marks", links.main.home.marks)

    await stopped(links.main, act)


MISFORTUNES = {
    "purged past the token": Misfortune(GapKind.TOO_OLD, purge),
    "purged with all that was agreed": Misfortune(GapKind.EPOCH, purge_all),
    "removed by age past the token": Misfortune(GapKind.TOO_OLD, let_age),
    "deleted and made anew under its name": Misfortune(GapKind.EPOCH, make_anew, heard=True),
    "deleted before all was heard": Misfortune(GapKind.EPOCH, make_anew),
    "put back, sequences used again": Misfortune(GapKind.EPOCH, put_back, copy, heard=True),
    "put back before all was heard": Misfortune(GapKind.EPOCH, put_back, copy),
    "put back unnoticed, sequences used again": Misfortune(GapKind.RECORD, put_back_unnoticed, copy, heard=True),
    "put back unnoticed, and shorter": Misfortune(GapKind.TOO_NEW, put_back_unnoticed, copy, heard=True, after=2),
}


@pytest.mark.parametrize("happens", MISFORTUNES.values(), ids=MISFORTUNES.keys())
async def test_a_log_that_cannot_go_on_from_the_token_is_told_what_is_missing_is_named_and_nothing_comes_twice(
    links: FailingLinks, tmp_path: Path, happens: Misfortune
) -> None:
    events: list[LinkEvent] = []
    (folder := tmp_path / "copy").mkdir()
    await links.acme.add("rex", post=())
    if happens.before is not None:
        await links.talk.say(links.main, "ada", "at the copy")
        await happens.before(links, folder)
    async with links.carried(PATIENCE) as (_, acme), reading(links.acme, "rex") as reader:
        acme.listen(events.append)
        await links.talk.say(links.main, "ada", *(f"early {number}" for number in range(4)))
        if happens.heard:
            await links.talk.say(links.main, "ada", *LATE)
        await holds(links.acme, links.talk)
        await agrees(acme, links.acme, links.main)
        await cut_off(links, acme)
        if not happens.heard:
            await links.talk.say(links.main, "ada", *LATE)
        lost = [each.seq for each in await texts_in(links.main) if each.text in LATE]
        await happens.strike(links, folder)
        for name in ("ada", "eve"):
            texts = (f"{name} afterwards {number}" for number in range(happens.after))
            await links.talk.say(links.main, name, *texts)
        links.back()
        await holds(links.acme, links.talk, gone=happens.gone)
        await agrees(acme, links.acme, links.main)
        await reader.has_read(links.talk.heard_in(links.acme, happens.gone, own=True))
        omitted = (await stored(links.acme)).omitted
    gaps = [each for each in events if isinstance(each, GapDetected)]
    assert [each.kind for each in gaps] == [happens.kind]
    if happens.kind is GapKind.TOO_OLD:
        (range_,) = omitted
        assert range_.reason == "too_old"
        assert range_.first <= min(lost)
        assert max(lost) <= range_.last
    else:
        assert omitted == ()


async def cut_off(links: FailingLinks, acme: LinkWorker) -> None:
    links.to_main.refuse = True
    links.to_main.cut()
    await eventually(lambda: has_failed(acme), within=20, what="it cannot ask")
