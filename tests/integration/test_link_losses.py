"""What a space lost of its own: messages that links brought, and the ledger that says so."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from carried_links import (
    LinkedSpaces,
    agree,
    call_worker,
    came,
    linked_spaces,
    running_status,
    said,
    status,
    stored,
    until_came,
    until_recorded,
    worker,
)
from linked_spaces import LINK
from tidings.admin.home import SpaceHome
from tidings.cli import link_words
from tidings.cli.main import main
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.contract.link_worker import (
    ListLinksAnswer,
    ListLinksRequest,
    RebuildLinkRequest,
    VerifyAnswer,
    VerifyLinkRequest,
)
from tidings.errors import StoreBroken
from tidings.links.store_file import ANEW, open_store
from tidings.rpc.local_socket import LocalServer
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[LinkedSpaces]:
    async with linked_spaces(tmp_path) as spaces:
        yield spaces


async def erase(space: RealSpace, text: str) -> None:
    """Of the log, behind everybody's back."""
    async with space.core() as js:
        stream = space.subjects.log_stream
        last = (await js.info(stream))["state"]["last_seq"]
        async for records in js.read(stream, f"{space.subjects.root}.via.>", 1, last):
            for each in records:
                if f'"{text}"'.encode() in each.payload:
                    await js.api(f"STREAM.MSG.DELETE.{stream}", {"seq": each.seq})


async def test_verify_tells_what_the_own_log_lost_of_what_had_come_and_it_is_fetched_again(both: LinkedSpaces) -> None:
    await said(both.main, "ada", "one", "two", "three")
    async with worker(both.acme):
        await until_came(both.acme, ["one", "two", "three"])

        async def verified() -> VerifyAnswer:
            return await call_worker(both.acme, VerifyLinkRequest(link=LINK))

        found = await verified()
        assert (found.equal, found.lost) == (True, 0)
        await erase(both.acme, "two")
        found = await verified()
        assert (found.equal, found.lost) == (True, 1), "the other space has nothing that the ledger does not know"
        words = list(link_words.verified("main", found))
        assert "lost 1 messages that had come over this link" in words[0]
        await until_came(both.acme, ["one", "three", "two"])
        assert (await verified()).lost == 0


async def test_what_the_own_log_removed_by_age_does_not_come_again_when_all_is_read_again(tmp_path: Path) -> None:
    async with linked_spaces(tmp_path, agreed=False) as both:
        await agree(both.main, both.acme, channels={})
        await agree(both.acme, both.main, shares=[])
        steward = both.acme.steward
        assert steward is not None
        async with worker(both.acme):
            await said(both.main, "ada", "one", "two")
            await until_came(both.acme, ["one", "two"])
            await until_recorded(both.acme, {"admitted": 2})
            async with both.acme.administer() as admin:
                await admin.call(ChangeSpaceRequest(keep_age=0, parts=PartsChange(deliver="off", archive="off")))
            last = steward.space.position
            await eventually(lambda: steward.table.floor >= last, what="retention removes them")
            async with both.acme.administer() as admin:
                await admin.call(ChangeSpaceRequest(keep_age=3600))
            assert await came(both.acme) == []
            await call_worker(both.acme, RebuildLinkRequest(link=LINK))
            await said(both.main, "ada", "three")
            await until_came(both.acme, ["three"])

            async def is_recorded() -> bool:
                counts = (await stored(both.acme)).counts
                return bool(counts.get("admitted", 0) >= 2)

            await eventually(is_recorded, what="the ledger has them")


async def test_a_linked_space_cannot_fill_the_log_here_and_what_it_said_comes_later(both: LinkedSpaces) -> None:
    texts = [f"{number} {'flood ' * 100}" for number in range(80)]
    async with both.acme.administer() as admin:
        await admin.call(ChangeSpaceRequest(keep_bytes=80_000))
    async with worker(both.acme):

        async def has_spent_its_share() -> bool:
            live = (await status(both.acme)).live
            return bool(live and live.share and live.spent >= live.share)

        # The share is checked once per page, and one page could hold the whole flood.
        await said(both.main, "ada", *texts[:40])
        await eventually(has_spent_its_share, what="its share is spent")
        await said(both.main, "ada", *texts[40:])

        async def is_stopped() -> bool:
            return "its part of this space's log" in (await running_status(both.acme)).words

        await eventually(is_stopped, what="it is stopped")
        facts = await status(both.acme)
        assert facts.live is not None
        assert facts.live.share == 20_000
        assert facts.live.spent >= 19_000
        assert "more comes as time passes" in dict(link_words.rows(facts, 0.0))["let in within a day"]  # type: ignore[operator]
        found = await came(both.acme)
        assert 0 < len(found) < 80
        assert found == texts[: len(found)], "nothing is dropped between"
        async with both.acme.administer() as admin:
            await admin.call(ChangeSpaceRequest(keep_bytes=64 * 1024 * 1024))
        await until_came(both.acme, texts)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    """Bits of every page but the first."""
    whole = bytearray(path.read_bytes())
    for at in range(4096 + 8, len(whole), 512):
        whole[at] ^= 0x55
    path.write_bytes(bytes(whole))


def _overwrite(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 500)


@pytest.mark.parametrize("damage", [_cut, _flip, _overwrite])
async def test_a_ledger_that_is_damaged_is_told_and_a_new_one_is_filled_from_the_logs(
    both: LinkedSpaces, damage: object, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"word {number}" for number in range(40)]
    await said(both.main, "ada", *texts)
    async with worker(both.acme):
        await until_came(both.acme, texts)
    store = both.acme.home.link_store
    assert callable(damage)
    damage(store)
    whole = store.read_bytes()
    at = ("--space", "acme", "--home", str(both.acme.home.home))
    for words in (("list",), ("show", "main")):
        assert await asyncio.to_thread(main, ["link", *words, *at]) != 0
        assert "tidings link rebuild --ledger" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(StoreBroken, match="rebuild --ledger"):
        async with worker(both.acme):
            pass
    assert store.read_bytes() == whole, "it was left as it is"
    assert await asyncio.to_thread(main, ["link", "rebuild", "--ledger", "--yes", *at]) == 0
    assert store.with_name("links.db.aside").read_bytes() == whole
    async with worker(both.acme):
        await eventually(lambda: is_handled(both.acme), within=30)
        answer = await call_worker(both.acme, VerifyLinkRequest(link=LINK))
        assert (answer.equal, answer.lost) == (True, 0)
    assert await came(both.acme) == texts, "nothing came twice"


async def is_handled(space: RealSpace) -> bool:
    live = (await status(space)).live
    return bool(live and live.status == "live")


async def test_a_worker_that_runs_leaves_its_ledger_to_the_command(both: LinkedSpaces) -> None:
    await said(both.main, "ada", "one")
    at = ["--space", "acme", "--home", str(both.acme.home.home)]
    async with worker(both.acme):
        await until_came(both.acme, ["one"])
        assert await asyncio.to_thread(main, ["link", "rebuild", "--ledger", "--yes", *at]) == 0
    async with worker(both.acme):
        await eventually(lambda: is_handled(both.acme), within=30)
    assert await came(both.acme) == ["one"]


def test_whatever_is_wrong_with_the_file_the_sentence_says_what_helps(tmp_path: Path) -> None:
    home = SpaceHome(tmp_path, "main")
    home.root.mkdir(parents=True, mode=0o700)
    home.link_store.with_name("links.db-wal").write_bytes(b"something")
    with pytest.raises(StoreBroken, match=r"is gone but its log is there.*tidings link rebuild --ledger"):
        open_store(home)


def _delete(path: Path) -> None:
    path.unlink()


def _put_back_in_place(path: Path) -> None:
    """As `cp` does: the same file, other bytes."""
    path.write_bytes(_older(path).read_bytes())


def _put_back_by_renaming(path: Path) -> None:
    """As `mv`, `tar` and most programs that put copies back: another file under its name."""
    _older(path).rename(path)


def _damage_its_log(path: Path) -> None:
    _overwrite(path.with_name("links.db-wal"))


def _older(path: Path) -> Path:
    return path.with_name("older.db")


@pytest.mark.parametrize(
    "damage", [_cut, _flip, _overwrite, _delete, _put_back_in_place, _put_back_by_renaming, _damage_its_log]
)
async def test_a_ledger_that_is_changed_under_a_worker_is_used_no_more_and_nothing_is_lost_or_doubled(
    both: LinkedSpaces, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    early, late = ["one", "two"], ["three", "four"]
    await said(both.main, "ada", *early)
    async with worker(both.acme):
        await until_came(both.acme, early)
    store = both.acme.home.link_store
    shutil.copy(store, _older(store))
    at = ("--space", "acme", "--home", str(both.acme.home.home))

    async def carry() -> None:
        async with worker(both.acme):
            await said(both.main, "ada", *late)
            await until_came(both.acme, [*early, *late])
            damage(store)
            await said(both.main, "ada", "said to a damaged ledger")
            await eventually(lambda: not both.acme.home.link_socket.exists(), within=20, what="the worker ends")

    with pytest.raises(StoreBroken, match="rebuild --ledger"):
        await carry()
    for _ in range(2):  # it stays so, however often it is started
        with pytest.raises(StoreBroken, match="rebuild --ledger"):
            async with worker(both.acme):
                pass
    assert await asyncio.to_thread(main, ["link", "list", *at]) == 3
    assert "tidings link rebuild --ledger" in " ".join(capsys.readouterr().err.split())
    assert await asyncio.to_thread(main, ["link", "rebuild", "--ledger", "--yes", *at]) == 0
    async with worker(both.acme):
        await eventually(lambda: is_handled(both.acme), within=30)
        await until_came(both.acme, [*early, *late, "said to a damaged ledger"])
        answer = await call_worker(both.acme, VerifyLinkRequest(link=LINK))
        assert (answer.equal, answer.lost) == (True, 0)


async def test_an_older_copy_of_the_ledger_that_is_put_back_while_nobody_carries_costs_nothing(
    both: LinkedSpaces,
) -> None:
    await said(both.main, "ada", "one", "two")
    async with worker(both.acme):
        await until_came(both.acme, ["one", "two"])
    store = both.acme.home.link_store
    shutil.copy(store, _older(store))
    async with worker(both.acme):
        await said(both.main, "ada", "three", "four")
        await until_came(both.acme, ["one", "two", "three", "four"])
    _put_back_in_place(store)
    async with worker(both.acme):
        await said(both.main, "ada", "five")
        await until_came(both.acme, ["one", "two", "three", "four", "five"])
        await until_recorded(both.acme, {"admitted": 5})
        answer = await call_worker(both.acme, VerifyLinkRequest(link=LINK))
        assert (answer.equal, answer.lost) == (True, 0)


async def test_status_shows_the_rest_of_a_space_whose_ledger_of_links_is_damaged(
    both: LinkedSpaces, capsys: pytest.CaptureFixture[str]
) -> None:
    await said(both.main, "ada", "one")
    at = ("--space", "acme", "--home", str(both.acme.home.home))

    async def refuse(_request: ListLinksRequest) -> ListLinksAnswer:
        raise StoreBroken(f"links.db is damaged: it was left as it is. {ANEW}")

    server = LocalServer(both.acme.home.link_socket, "link worker", {"link list": refuse})
    await server.start()
    try:
        code = await asyncio.to_thread(main, ["status", "--json", *at])
    finally:
        await server.close()
    facts = json.loads(capsys.readouterr().out)
    assert (code, facts["healthy"], facts["links"]["runs"]) == (3, False, True)
    (problem,) = [each for each in facts["problems"] if "links.db" in each]
    assert "what 1 linked space shares is not carried" in problem
    assert "`tidings link rebuild --ledger" in problem
