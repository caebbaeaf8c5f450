"""Streams of linked spaces that were set back under the same epoch, by an older copy of their folder: sequences are
used again before anybody looks, and every direct message comes once all the same, and its receipts."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import tidings
from carried_links import LinkedSpaces, directory_status, linked_spaces, worker
from tidings.client.connect import connect_directly
from tidings.links import mail_sync, running_link
from tidings.nats.aio import Connection
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_link, "EVERY", 0.1)
    monkeypatch.setattr(mail_sync, "LOOK_AGAIN", 0.2)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[LinkedSpaces]:
    async with linked_spaces(tmp_path, roster="on", direct="on") as spaces:
        yield spaces


def connect(space: RealSpace, name: str) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home)


class StreamFolder:
    """The folder of one stream, copied and put back while its broker is stopped."""

    def __init__(self, space: RealSpace, stream: str, copy: Path) -> None:
        self.space, self.stream, self.copy = space, stream, copy

    @property
    def folder(self) -> Path:
        (found,) = self.space.home.store.glob(f"jetstream/*/streams/{self.stream}")
        return found

    async def take(self) -> None:
        await self._stopped(lambda: shutil.copytree(self.folder, self.copy))

    async def put_back(self) -> None:
        def strike() -> None:
            shutil.rmtree(folder := self.folder)
            shutil.copytree(self.copy, folder)

        await self._stopped(strike)

    async def _stopped(self, act: Callable[[], object]) -> None:
        await self.space.stop_steward()
        self.space.broker.stop()
        act()
        self.space.broker.start()
        await self.space.start_steward()


async def knows(agent: tidings.DirectAgent, name: str) -> str:
    async def known() -> bool:
        return any(each.name == name for each in await agent.who())

    await eventually(known, within=20, what=name)
    return (await agent.transport.resolve(name)).id


async def came(space: RealSpace, number: int) -> None:
    async def so() -> bool:
        mail = (await directory_status(space)).mail
        return bool(mail and mail.came == number)

    await eventually(so, within=20, what=f"{number} messages came")


async def empty(space: RealSpace) -> None:
    async def so() -> bool:
        async with space.core() as js:
            return not (await js.info(space.subjects.direct_stream))["state"]["messages"]

    await eventually(so, within=20, what="what was read there is removed")


async def head(space: RealSpace, stream: str) -> int:
    async with space.core() as js:
        return int((await js.info(stream))["state"]["last_seq"])


async def read_all(agent: tidings.DirectAgent, count: int) -> list[str]:
    """The next messages, and that no others come."""
    found = []
    for _ in range(count):
        got = await agent.next_message(timeout=20)
        found.append(got.text)
        await got.ack()
    with pytest.raises(TimeoutError):
        await agent.next_message(timeout=1)
    return found


@pytest.mark.parametrize("by", ["its marks alone", "its broker too"])
@pytest.mark.parametrize("read", [True, False])
async def test_mail_of_a_space_that_was_set_back_comes_once_although_new_mail_passed_the_token(
    both: LinkedSpaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: bool, by: str
) -> None:
    if by == "its marks alone":
        monkeypatch.setattr(Connection, "incarnation", property(lambda _self: "the same"))
    mail = StreamFolder(both.main, both.main.subjects.direct_stream, tmp_path / "copy")
    async with connect(both.main, "ada") as ada:
        async with worker(both.main), worker(both.acme):
            bob_id = await knows(ada, "bob@acme")
            await ada.dm(bob_id, "before the copy")
            await came(both.acme, 1)
        await mail.take()
        async with worker(both.main), worker(both.acme):
            for n in range(3):
                await ada.dm(bob_id, f"lost {n}")
            await came(both.acme, 4)
            before = ["before the copy", "lost 0", "lost 1", "lost 2"]
            if read:
                async with connect(both.acme, "bob") as bob:
                    assert await read_all(bob, 4) == before
                await empty(both.main)
        reached = await head(both.main, mail.stream)
        await mail.put_back()
        for n in range(5):
            await ada.dm(bob_id, f"new {n}")
        assert await head(both.main, mail.stream) > reached
        async with worker(both.main), worker(both.acme), connect(both.acme, "bob") as bob:
            new = [f"new {n}" for n in range(5)]
            assert await read_all(bob, 5 if read else 9) == (new if read else before + new)
            await empty(both.main)
        assert await head(both.acme, both.acme.subjects.direct_stream) == 9


async def test_mail_that_came_and_that_our_own_space_lost_is_fetched_again_and_what_was_read_is_not(
    both: LinkedSpaces, tmp_path: Path
) -> None:
    mail = StreamFolder(both.acme, both.acme.subjects.direct_stream, tmp_path / "copy")
    async with connect(both.main, "ada") as ada:
        async with worker(both.main), worker(both.acme):
            bob_id = await knows(ada, "bob@acme")
            await ada.dm(bob_id, "read before")
            async with connect(both.acme, "bob") as bob:
                assert await read_all(bob, 1) == ["read before"]
            await empty(both.main)
        await mail.take()
        async with worker(both.main), worker(both.acme):
            for n in range(3):
                await ada.dm(bob_id, f"lost {n}")
            await came(both.acme, 4)
        await mail.put_back()
        async with connect(both.acme, "bob") as bob:
            await bob.dm(bob.id, "one of our own takes a sequence")
            assert await read_all(bob, 1) == ["one of our own takes a sequence"]
        async with worker(both.main), worker(both.acme), connect(both.acme, "bob") as bob:
            assert await read_all(bob, 3) == [f"lost {n}" for n in range(3)]
            await empty(both.main)


async def test_receipts_of_a_space_that_was_set_back_are_told_although_new_ones_passed_the_token(
    both: LinkedSpaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "incarnation", property(lambda _self: "the same"))
    receipts = StreamFolder(both.acme, both.acme.subjects.audit_stream, tmp_path / "copy")
    await receipts.take()
    async with connect(both.main, "ada") as ada, worker(both.main):
        async with worker(both.acme):
            bob_id = await knows(ada, "bob@acme")
            first = [await ada.dm(bob_id, f"first {n}") for n in range(2)]
            async with connect(both.acme, "bob") as bob:
                await read_all(bob, 2)
            for each in first:
                assert (await ada.receipt(each, "read", timeout=20)).stage == "read"
            then = [await ada.dm(bob_id, f"then {n}") for n in range(3)]
            await came(both.acme, 5)
        reached = await head(both.acme, receipts.stream)
        await receipts.put_back()
        async with connect(both.acme, "bob") as bob:
            await read_all(bob, 3)
        assert await head(both.acme, receipts.stream) > reached
        async with worker(both.acme):
            found = await asyncio.gather(*(ada.receipt(each, "read", timeout=20) for each in then))
            assert [each.stage for each in found] == ["read"] * 3
