"""Two real spaces that are linked both ways, with workers in this process or as processes of their own.

    async with linked_spaces(tmp_path) as both, worker(both.main), worker(both.acme):
        ...

Each shares its channel `general` and takes that of the other into its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from linked_spaces import LINK, linked, say
from tidings.admin.link_peers import LinkPeers, PeerAccess
from tidings.contract.core import Request
from tidings.contract.link_worker import DirectoryStatus, LinkReport, LinkStatus, ListLinksRequest, StoredLink
from tidings.links.worker import LinkWorker
from tidings.rpc.local_socket import call
from tidings.server.nats_server import die_with_parent
from tidings.wire import message as wire_message
from tidings.wire.subjects import Via
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

A = TypeVar("A")


@dataclass
class LinkedSpaces:
    main: RealSpace
    acme: RealSpace

    async def agree(self, **terms: Any) -> None:
        """Both operators agree, and each has the other's credential."""
        for here, other in ((self.main, self.acme), (self.acme, self.main)):
            await agree(here, other, **terms)


async def agree(here: RealSpace, other: RealSpace, link: str = LINK, *, url: str = "", **terms: Any) -> None:
    """The record of one side; the worker of the other one gets its credential. `url`: where it finds us, if not at our
    broker itself."""
    fields: dict[str, Any] = {"channels": {"general": "general"}, "shares": ["general"], **terms}
    made = await linked(
        here,
        link,
        origin=other.info.id,
        space=other.info.name,
        steward=other.info.steward_key,
        **fields,
    )
    info = here.info
    told = PeerAccess(link=link, space=info.name, id=info.id, steward=info.steward_key, url=url or info.url)
    LinkPeers.below(other.home).put(told, made.creds)


@asynccontextmanager
async def linked_spaces(root: Path, *, agreed: bool = True, **terms: Any) -> AsyncIterator[LinkedSpaces]:
    async with real_space(root / "a") as main, real_space(root / "b", name="acme") as acme:
        both = LinkedSpaces(main, acme)
        await main.add("ada")
        await acme.add("bob")
        if agreed:
            await both.agree(**terms)
        yield both


@asynccontextmanager
async def three_spaces(root: Path, *pairs: str, passing: bool = False) -> AsyncIterator[dict[str, RealSpace]]:
    """Spaces a, b and c. A pair is linked: what one says in its `general` is `NAME.general` in the other. `passing`:
    what the third one says too."""
    async with AsyncExitStack() as stack:
        spaces = {}
        for name in "abc":
            spaces[name] = await stack.enter_async_context(real_space(root / name, name=name))
            await spaces[name].add("ada", read=[">"], post=["general"])
        for pair in pairs:
            one, other = pair[0], pair[1]
            link = f"linkbetween{one}{other}"
            for here, there in ((one, other), (other, one)):
                named: dict[str, Any] = {"channels": {"general": f"{there}.general"}, "shares": [">"]}
                if passing:
                    (third,) = set("abc") - {here, there}
                    named |= {"hops": 2, "beyond": {spaces[third].info.id: {"general": f"{third}.general"}}}
                await agree(spaces[here], spaces[there], link, **named)
        yield spaces


@asynccontextmanager
async def worker(space: RealSpace, **options: Any) -> AsyncIterator[LinkWorker]:
    """In this process."""
    running = LinkWorker(space.home, look_every=0.1, **options)
    task = asyncio.create_task(running.run())
    ready = asyncio.create_task(running.ready.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    try:
        if task.done():
            task.result()
        yield running
    finally:
        running.stop()
        await asyncio.wait_for(task, 30)


class WorkerProcess:
    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child

    @classmethod
    async def start(cls, space: RealSpace, **environ: str) -> WorkerProcess:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tidings.links",
            "--home",
            str(space.home.home),
            "--space",
            space.home.name,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | environ,
            preexec_fn=die_with_parent,
        )
        return cls(child)

    async def said(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        return dict(json.loads(await asyncio.wait_for(self.child.stdout.readline(), 30)))

    async def kill(self) -> None:
        if self.child.returncode is None:
            self.child.send_signal(signal.SIGKILL)
        await self.child.wait()

    async def end(self) -> int:
        if self.child.returncode is None:
            self.child.terminate()
        return await asyncio.wait_for(self.child.wait(), 30)


@asynccontextmanager
async def worker_process(space: RealSpace, **environ: str) -> AsyncIterator[WorkerProcess]:
    running = await WorkerProcess.start(space, **environ)
    try:
        yield running
    finally:
        await running.kill()


async def came(space: RealSpace) -> list[str]:
    """The texts that links brought into the log of a space, in its order."""
    found = []
    async with space.core() as js:
        state = (await js.info(space.subjects.log_stream))["state"]
        pages = js.read(space.subjects.log_stream, f"{space.subjects.root}.via.>", 1, state["last_seq"])
        async for records in pages:
            for record in records:
                assert isinstance(space.subjects.parse(record.subject), Via)
                found.append(wire_message.decode(record.payload).text)
    return found


async def until_came(space: RealSpace, texts: list[str], within: float = 30.0) -> None:
    """Exactly these came, in this order."""
    deadline = asyncio.get_running_loop().time() + within
    while (found := await came(space)) != texts and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)
    assert found == texts, f"{found} came"


async def until_recorded(space: RealSpace, counts: dict[str, int], link: str = LINK) -> None:
    """The ledger has exactly these dispositions. The worker commits them after the log has the messages."""

    async def found() -> bool:
        return (await stored(space, link)).counts == counts

    await eventually(found, within=30, what=f"the ledger has {counts}")


async def said(space: RealSpace, name: str, *texts: str) -> None:
    async with space.agent(name) as agent:
        await say(agent, "general", *texts)


async def call_worker(space: RealSpace, request: Request[A]) -> A:
    """Asks the link worker of a space."""
    return await call(space.home.link_socket, request, timeout=30)


async def status(space: RealSpace, link: str = LINK) -> LinkReport:
    (found,) = (await call_worker(space, ListLinksRequest(link=link))).links
    return found


async def running_status(space: RealSpace, link: str = LINK) -> LinkStatus:
    live = (await status(space, link)).live
    assert live is not None, "the link runs"
    return live


async def directory_status(space: RealSpace) -> DirectoryStatus:
    directory = (await status(space)).directory
    assert directory is not None, "the link has a roster"
    return directory


async def stored(space: RealSpace, link: str = LINK) -> StoredLink:
    """Everything that the link store has of a link."""
    (found,) = (await call_worker(space, ListLinksRequest(link=link, complete=True))).links
    assert found.store is not None, "the link store has the link"
    return found.store
