"""The page loop of a link over real brokers: what was said in one space is in the other, once, and stays so."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from linked_spaces import LINK, linked, say, unlinked
from tidings.contract.link_worker import GapDetected
from tidings.errors import TidingsError
from tidings.links import link_store as books
from tidings.links.definition import LinkDefinition
from tidings.links.destination import LocalDestination, LocalSpace
from tidings.links.link_store import BookedLink
from tidings.links.replicator import Direction
from tidings.links.running_link import LoopClock
from tidings.links.schema import SCHEMA
from tidings.links.source import PeerSource
from tidings.nats.errors import NatsError
from tidings.util.database import Database
from tidings.util.private_files import write_private
from tidings.wire import message as wire_message
from tidings.wire.links import GapKind, authorization_epoch
from tidings.wire.rulings import Link
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually
from tools.links import verify


@asynccontextmanager
async def carried(
    root: Path, main: RealSpace, acme: RealSpace, creds: Path
) -> AsyncIterator[tuple[Direction, list[Any]]]:
    """What main shares comes into acme while this runs."""
    clock, events = LoopClock(), list[Any]()
    source = PeerSource(main.info.url, creds, "main", on_wake=clock.wake)
    local = LocalSpace(acme.info.url, acme.home.link_creds, "acme")
    taken = {"general": "news"}
    record = Link(op="-", link=LINK, state="on", origin=main.info.id, channels=taken, space="main")
    wanted = LinkDefinition(
        link=LINK, space=acme.info.id, peer=main.info.id, authority=authorization_epoch(record), channels=taken
    )
    database = Database(root / "links.db", SCHEMA)
    row = await database.write(lambda c: books.open_link(c, wanted, b"s" * 32, now=1))
    ledger, here = BookedLink(database, row.row), LocalDestination(local, LINK)
    direction = Direction(wanted, ledger, source, here, clock, verify=verify)
    direction.listen(events.append)
    direction.start()
    try:
        yield direction, events
    finally:
        await direction.stop(10)
        await source.close()
        await local.close()
        database.close()


@asynccontextmanager
async def two_spaces(root: Path) -> AsyncIterator[tuple[RealSpace, RealSpace, Path]]:
    async with real_space(root / "main") as main, real_space(root / "acme", name="acme") as acme:
        made = await linked(main, origin=acme.info.id)
        await linked(acme, origin=main.info.id, shares=[], make_peer=False, channels={"general": "news"}, space="main")
        await main.add("ada")
        creds = root / "peer.creds"
        write_private(creds, made.creds)
        yield main, acme, creds


async def came_in(acme: RealSpace) -> list[str]:
    """What is in acme's log of it, in its order."""
    s = acme.subjects
    async with acme.core() as js:
        pages = [page async for page in js.read(s.log_stream, f"{s.root}.via.>", 1, 1_000_000)]
    return [wire_message.decode(record.payload).text for page in pages for record in page]


async def has(acme: RealSpace, texts: list[str]) -> None:
    async def all_there() -> bool:
        return await came_in(acme) == texts

    await eventually(all_there, within=30, what=f"{texts[-3:]} in acme")


async def test_what_is_said_comes_over_at_once_and_after_a_stop_where_it_was(tmp_path: Path) -> None:
    async with two_spaces(tmp_path) as (main, acme, creds), main.agent("ada") as ada:
        await say(ada, "general", "before")
        async with carried(tmp_path, main, acme, creds) as (direction, _):
            await has(acme, ["before"])
            await say(ada, "general", "live")
            await has(acme, ["before", "live"])
            await eventually(lambda: direction.status().status == "live")
            await eventually(lambda: direction.status().lag_records == 0, what="what is in the log here is handled")
        await say(ada, "general", "meanwhile")
        async with carried(tmp_path, main, acme, creds):
            await has(acme, ["before", "live", "meanwhile"])
        (tmp_path / "links.db").unlink()
        for left in tmp_path.glob("links.db-*"):
            left.unlink()
        async with carried(tmp_path, main, acme, creds) as (direction, _):
            await eventually(lambda: direction.status().status == "live")
            await has(acme, ["before", "live", "meanwhile"])


async def test_both_brokers_may_go_and_come_back(tmp_path: Path) -> None:
    async with two_spaces(tmp_path) as (main, acme, creds), carried(tmp_path, main, acme, creds) as (direction, _):
        async with main.agent("ada") as ada:
            await say(ada, "general", "a")
        await has(acme, ["a"])
        await main.restart_broker(kill=True)
        await acme.restart_broker(kill=True)

        async def said() -> bool:
            try:
                async with main.agent("ada") as ada:
                    await say(ada, "general", "b")
            except (TidingsError, NatsError, OSError):  # its broker is not there yet
                return False
            return True

        await eventually(said, within=30)
        direction.ask()

        async def arrived() -> bool:
            direction.ask()
            return (await came_in(acme))[:2] == ["a", "b"]

        await eventually(arrived, within=30, every=0.2)


async def test_a_link_that_was_ended_takes_nothing_more_and_says_so(tmp_path: Path) -> None:
    async with (
        two_spaces(tmp_path) as (main, acme, creds),
        main.agent("ada") as ada,
        carried(tmp_path, main, acme, creds) as (direction, _),
    ):
        await say(ada, "general", "a")
        await has(acme, ["a"])
        await unlinked(main)
        await say(ada, "general", "b")
        direction.ask()
        await eventually(lambda: direction.status().status not in ("live", "initializing"), within=20)
        assert await came_in(acme) == ["a"]


async def test_a_log_that_was_restored_is_read_again_from_where_it_agrees(tmp_path: Path) -> None:
    async with two_spaces(tmp_path) as (main, acme, creds):
        async with main.agent("ada") as ada:
            await say(ada, "general", "a", "b")
        await _restart(main, lambda: shutil.copytree(main.home.store, tmp_path / "copy"))
        async with main.agent("ada") as ada:
            await say(ada, "general", "lost")
        async with carried(tmp_path, main, acme, creds):
            await has(acme, ["a", "b", "lost"])
        async with main.core() as js:
            head = int((await js.info("LOG_main"))["state"]["last_seq"])
        assert main.steward is not None
        marks = main.steward.marks
        await eventually(lambda: marks.file.marks[-1].seq >= head)

        def put_back() -> None:
            shutil.rmtree(main.home.store)
            shutil.copytree(tmp_path / "copy", main.home.store)

        await _restart(main, put_back)
        async with main.agent("ada") as ada:
            await say(ada, "general", "c", "d")
        async with carried(tmp_path, main, acme, creds) as (_, events):
            await has(acme, ["a", "b", "lost", "c", "d"])
            gaps = [each for each in events if isinstance(each, GapDetected)]
            assert [each.kind for each in gaps] == [GapKind.EPOCH]


async def _restart(space: RealSpace, meanwhile: Any) -> None:
    await space.stop_steward()
    space.broker.stop()
    await asyncio.to_thread(meanwhile)
    space.broker.start()
    await space.start_steward()
