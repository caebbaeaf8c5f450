"""Two linked spaces that reach each other over networks that fail on demand, and what must hold once they do not.

    async with failing_links(tmp_path) as links, links.carried() as (main, acme):
        await links.talk.say(links.main, "ada", "hello")
        links.to_main.cut()
        await links.converged(main, acme)

The oracle reads both logs, both ledgers and both readers: what was said in a shared channel of one space is in the
other one once, in the order of its sender; `link verify` finds the same; each record has one disposition; nobody who
reads along sees anything twice.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

import tidings
from carried_links import agree, worker
from linked_spaces import LINK, text_of
from tidings.admin.home import SpaceHome
from tidings.admin.link_peers import PeerAccess
from tidings.client.connect import connect_directly
from tidings.contract.core import Request
from tidings.contract.link_worker import VerifyLinkRequest
from tidings.links import replicator, running_link
from tidings.links.link_store import last_row
from tidings.links.ports import Prepare
from tidings.links.running_link import NatsSpaces, SharedLog
from tidings.links.source import PATIENCE, PeerSource
from tidings.links.worker import LinkWorker
from tidings.rpc.local_socket import call
from tidings.util.backoff import Backoff
from tidings.wire import message as wire_message
from tidings.wire.subjects import Chat, Via
from tidings_testing.proxy import FaultProxy, fault_proxy
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

A = TypeVar("A")

#: who talks in each space
SPEAKERS = {"main": ("ada", "eve"), "acme": ("bob", "bea")}
#: messages of one sender that are on their way at a time
AT_ONCE = 50


def look_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this process look again after parts of a second, where others take their time."""
    monkeypatch.setattr(replicator, "LADDER", (0.05, 0.1, 0.2))
    monkeypatch.setattr(replicator, "POLL", (0.2, 0.4))
    monkeypatch.setattr(replicator, "LINK_DELAYS", Backoff(0.2, 0.5))
    monkeypatch.setattr(running_link, "EVERY", 0.1)
    monkeypatch.setattr(running_link, "AFTER_FAILURES", Backoff(0.1, 0.3))


class CountedSpaces(NatsSpaces):
    """Real ones; `asked` has how often the other space was asked for what."""

    def __init__(self, home: SpaceHome, patience: float = PATIENCE) -> None:
        super().__init__(home)
        self.patience = patience
        self.asked: Counter[str] = Counter()

    def source(self, access: PeerAccess, creds: Path, on_wake: Callable[[], None], prepare: Prepare) -> SharedLog:
        found = PeerSource(access.url, creds, access.space, on_wake=on_wake, prepare=prepare, patience=self.patience)
        real = found.ask

        async def counted(request: Request[A]) -> A:
            self.asked[request.operation.verb] += 1
            return await real(request)

        found.ask = counted  # type: ignore[method-assign]
        return found


# --- what was said, and what is where ---


class LoggedText(NamedTuple):
    """A message in a log: said there, or brought there over a link."""

    seq: int
    sender: str
    id: str
    text: str
    via: bool


async def texts_in(space: RealSpace) -> list[LoggedText]:
    """Every message of its log that agents said or links brought, in its order."""
    found = []
    async with space.core() as js:
        state = (await js.info(space.subjects.log_stream))["state"]
        async for records in js.read(space.subjects.log_stream, f"{space.subjects.root}.>", 1, state["last_seq"]):
            for record in records:
                subject = space.subjects.parse(record.subject)
                if isinstance(subject, Chat | Via):
                    said = wire_message.decode(record.payload)
                    found.append(LoggedText(record.seq, subject.sender, said.id, said.text, isinstance(subject, Via)))
    return found


Words = dict[str, list[str]]


def by_sender(found: Iterable[LoggedText]) -> Words:
    words: Words = {}
    for each in found:
        words.setdefault(each.sender, []).append(each.text)
    return words


class Talk:
    """What agents said in the shared channel of their spaces, and the broker confirmed."""

    def __init__(self) -> None:
        #: name of the space -> id of the agent -> texts
        self.said: dict[str, Words] = {}

    async def say(self, space: RealSpace, name: str, *texts: str) -> None:
        words = self.said.setdefault(space.info.name, {})
        async with space.agent(name) as agent:
            for start in range(0, len(texts), AT_ONCE):
                part = texts[start : start + AT_ONCE]
                acks = await asyncio.gather(*(agent.post("general", text_of(agent, each)) for each in part))
                assert [each["seq"] for each in acks] == sorted(each["seq"] for each in acks)
                words.setdefault(agent.id, []).extend(part)

    def heard_in(self, space: RealSpace, gone: Collection[str] = (), *, own: bool = False) -> Words:
        """What other spaces said, but for what is `gone`; `own`: and what was said there."""
        words = [each for name, each in self.said.items() if own or name != space.info.name]
        found = {who: [each for each in texts if each not in gone] for one in words for who, texts in one.items()}
        return {who: texts for who, texts in found.items() if texts}


class Reader:
    """An agent that reads along, and settles what it read."""

    def __init__(self, endpoint: tidings.DirectAgent) -> None:
        self.endpoint = endpoint
        self.read: Words = {}

    async def run(self) -> None:
        async for message in self.endpoint.messages():
            self.read.setdefault(message.sender.id, []).append(message.text)
            await message.ack()

    async def has_read(self, wanted: Words) -> None:
        """All of it, once, in the order of each sender."""
        count = sum(map(len, wanted.values()))
        await eventually(lambda: sum(map(len, self.read.values())) >= count, within=20, what="it has read everything")
        assert self.read == wanted


@asynccontextmanager
async def reading(space: RealSpace, name: str) -> AsyncIterator[Reader]:
    endpoint = connect_directly(space.home.name, name=name, home=space.home.home, channels=["general"])
    async with endpoint:
        reader = Reader(endpoint)
        task = asyncio.create_task(reader.run())
        try:
            yield reader
        finally:
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()


# --- the oracle ---


async def holds(space: RealSpace, talk: Talk, *, gone: Collection[str] = (), within: float = 40.0) -> None:
    """What the others said is in its log: all of it, once, in the order of each sender."""
    wanted = talk.heard_in(space, gone)
    count = sum(map(len, wanted.values()))

    async def so_many() -> bool:
        return sum(each.via for each in await texts_in(space)) >= count

    await eventually(so_many, within=within, every=0.1, what=f"{count} messages in {space.info.name}")
    found = [each for each in await texts_in(space) if each.via]
    assert by_sender(found) == wanted, f"what came into {space.info.name}"
    assert len({(each.sender, each.id) for each in found}) == len(found)


class BookedRow(NamedTuple):
    seq: int
    kind: str
    origin: str
    id: str
    local_seq: int | None


async def booked(running: LinkWorker, link: str = LINK) -> list[BookedRow]:
    """What became of the records of the peer's log as it is now."""
    assert running._database is not None
    space = running.home.read_info().id

    def look(connection: sqlite3.Connection) -> list[BookedRow]:
        row = last_row(connection, space, link)
        assert row is not None
        query = "SELECT seq, kind, origin, id, local_seq FROM disposition WHERE link = ? AND life = 0"
        return [BookedRow(*each) for each in connection.execute(query, (row.row,))]

    return await running._database.read(look)


def is_settled(running: LinkWorker, link: str = LINK) -> bool:
    carried = running._carried.get(link)
    if carried is None:
        return False
    status = carried.direction.status()
    return status.status == "live" and not (status.lag_records or status.owed or status.quarantined)


async def agrees(running: LinkWorker, here: RealSpace, there: RealSpace, link: str = LINK) -> None:
    """One direction of a link, once it came to rest: digests, ledger and both logs say the same."""
    await eventually(lambda: is_settled(running, link), within=40, what=f"{link} of {here.info.name} is at rest")
    answer = await call(running.home.link_socket, VerifyLinkRequest(link))
    assert (answer.equal, answer.lost, answer.lacking, answer.extra) == (True, 0, 0, 0), answer
    rows = await booked(running, link)
    assert {each.kind for each in rows} <= {"admitted", "duplicate", "omitted"}
    shared = {each.seq for each in await texts_in(there) if not each.via}
    known = [each.seq for each in rows if each.origin == there.info.id]
    assert len(known) == len(set(known))
    assert shared <= set(known), "every record has its disposition"
    assert all(seq < answer.floor for seq in set(known) - shared), "and nothing else has one, but what was removed"
    ours = {each.seq: each.id for each in await texts_in(here)}
    told = {each.local_seq: each.id for each in rows if each.local_seq is not None and each.local_seq >= min(ours)}
    assert told.items() <= ours.items(), "what the ledger has as let in is in the log, where it says"


# --- two spaces ---


@dataclass
class FailingLinks:
    """Each worker reaches the other space through a network of its own."""

    main: RealSpace
    acme: RealSpace
    to_main: FaultProxy
    to_acme: FaultProxy
    talk: Talk = field(default_factory=Talk)
    readers: dict[str, Reader] = field(default_factory=dict)

    @property
    def networks(self) -> tuple[FaultProxy, FaultProxy]:
        return self.to_main, self.to_acme

    async def agree(self, **terms: Any) -> None:
        await agree(self.main, self.acme, url=self.to_main.url, **terms)
        await agree(self.acme, self.main, url=self.to_acme.url, **terms)

    @asynccontextmanager
    async def carried(self, patience: float = PATIENCE) -> AsyncIterator[tuple[LinkWorker, LinkWorker]]:
        """Workers of both, in this process."""
        async with (
            worker(self.main, spaces=CountedSpaces(self.main.home, patience)) as main,
            worker(self.acme, spaces=CountedSpaces(self.acme.home, patience)) as acme,
        ):
            yield main, acme

    @asynccontextmanager
    async def read_along(self) -> AsyncIterator[None]:
        """Somebody in each space reads everything."""
        async with AsyncExitStack() as stack:
            for space in (self.main, self.acme):
                await space.add("rex", post=())
                self.readers[space.info.name] = await stack.enter_async_context(reading(space, "rex"))
            yield

    async def both_say(self, what: str, count: int = 3) -> None:
        """Everybody says so many things, all at once."""
        await asyncio.gather(
            *(
                self.talk.say(space, name, *(f"{name} {what} {number}" for number in range(count)))
                for space in (self.main, self.acme)
                for name in SPEAKERS[space.info.name]
            )
        )

    def gone(self) -> None:
        """Neither reaches the other."""
        for network in self.networks:
            network.refuse = True
            network.cut()

    def back(self) -> None:
        for network in self.networks:
            network.refuse = network.black_hole = network.stalled = False
            network.delay = network.loss = 0.0

    async def converged(self, main: LinkWorker, acme: LinkWorker, *, gone: Collection[str] = ()) -> None:
        """Both spaces hold the same, by every account of it."""
        await holds(self.main, self.talk, gone=gone)
        await holds(self.acme, self.talk, gone=gone)
        await agrees(main, self.main, self.acme)
        await agrees(acme, self.acme, self.main)
        wanted = self.talk.heard_in(self.main, gone, own=True)
        for reader in self.readers.values():
            await reader.has_read(wanted)


@asynccontextmanager
async def failing_links(root: Path, **terms: Any) -> AsyncIterator[FailingLinks]:
    async with (
        real_space(root / "a") as main,
        real_space(root / "b", name="acme") as acme,
        fault_proxy(main.info.port) as to_main,
        fault_proxy(acme.info.port) as to_acme,
    ):
        links = FailingLinks(main, acme, to_main, to_acme)
        for space in (main, acme):
            for name in SPEAKERS[space.info.name]:
                await space.add(name)
        await links.agree(**terms)
        yield links


def has_failed(running: LinkWorker, link: str = LINK) -> bool:
    """Does it say that something is wrong?"""
    return bool(running._carried[link].direction.status().words)
