"""The host on a real broker: what is stored leaves when it can, in order, once; what arrives is kept before it is
acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tidings.host.composing import SendRequest
from tidings.host.host import Host, Scope
from tidings.host.inbox import InboxRow, Wanted
from tidings.testing.real_space import RealSpace
from tidings.testing.waiting import eventually


@asynccontextmanager
async def host_in(home: Path, **options: object) -> AsyncIterator[Host]:
    host = Host(home, **options)  # type: ignore[arg-type]
    await host.open()
    try:
        yield host
    finally:
        async with asyncio.timeout(20):
            await host.close()


async def adopt(host: Host, space: RealSpace, name: str, *, receive: bool = False) -> Scope:
    return await host.adopt(("home", str(space.home.home), space.home.name, name), receive)


async def inbox_of(host: Host, scope: Scope) -> list[InboxRow]:
    return await host.inbox.listed(scope.space_id, scope.agent, Wanted(limit=100_000))


def known(host: Host, scope: Scope, count: int) -> bool:
    return len(list(host.directories.of(scope.space_id).agents())) >= count


async def test_a_message_is_stored_confirmed_and_kept_by_its_reader(pair: RealSpace, tmp_path: Path) -> None:
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada")
        bob = await adopt(host, pair, "bob", receive=True)
        await eventually(lambda: known(host, ada, 2))
        changed = host.changes(bob)
        sent = await host.send(ada, SendRequest(agent="bob", text="hello"), wait=10)
        assert (sent.state, sent.stage, sent.warnings) == ("confirmed", "confirmed", ())
        (row,) = await eventually(lambda: inbox_of(host, bob))
        assert (row.id, row.text, row.sender, row.sealed) == (sent.id, "hello", ada.agent, 1)
        assert await changed.wait(5)
        assert await inbox_of(host, ada) == []
        await eventually(lambda: done(host, sent.row))


async def done(host: Host, row: int) -> bool:
    return (await host.outbox.show(row)).state == "done"
