"""The stage of the suite: a real space that is linked with a hostile one, its worker, and an agent that reads.

`main` is real in every part: broker, steward, worker of links, agent. `acme` has a real broker, and in place of its
steward the peer that lies. What may be in main's log, and may be read there, is written down when it is said
(`expected`); `strayed` names everything else that is found.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tidings.admin.home import SpaceHome
from tidings.admin.link_peers import LinkPeers, PeerAccess
from tidings.admin.linking import Linker
from tidings.client.connect import connect_directly
from tidings.client.direct_transport import DirectAgent
from tidings.contract.link_worker import LinkEvent, RepairFailed
from tidings.errors import WireError
from tidings.links import link_store as books
from tidings.links.ports import Prepare
from tidings.links.running_link import CarriedLink, NatsSpaces, SharedLog
from tidings.links.source import PeerSource
from tidings.links.worker import LinkWorker
from tidings.nats import jwt
from tidings.server.keyring import Keyring
from tidings.wire import message as wire_message
from tidings.wire.links import LinkedRecord, Token, authorization_epoch
from tidings.wire.rulings import Link
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Via
from tidings_testing.links.peer import LINK, HostilePeer
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.security.report import ProbeOutcome, broken
from tidings_testing.waiting import eventually

CHANNELS = {"general": "general", "team.>": "acme.team.>"}
#: what the reader reads: what is mapped, and what is not
READ = ("general", "acme.team.a", "elsewhere", "secret", "own")
#: seconds for an answer of the peer, and in which something refused is said to be
ANSWERS, SAID = 1.0, 4.0


class Expected(NamedTuple):
    """A message that may be here, and where."""

    channel: str
    payload: bytes


class Arrived(NamedTuple):
    """A `via` record of main's log."""

    seq: int
    sender: str
    channel: str
    payload: bytes


class HurriedSpaces(NatsSpaces):
    """They wait less for an answer than a worker does."""

    def source(self, access: PeerAccess, creds: Path, on_wake: Callable[[], None], prepare: Prepare) -> SharedLog:
        return PeerSource(access.url, creds, access.space, on_wake=on_wake, prepare=prepare, patience=ANSWERS)


class ObservedWorker(LinkWorker):
    """The worker, what it carries, and how often a link was carried no longer as it was."""

    def __init__(self, home: SpaceHome) -> None:
        super().__init__(home, HurriedSpaces(home), look_every=0.05, tell=self._hear)
        self.ended = 0
        #: why comparing failed, each time it did
        self.not_compared: list[str] = []

    def _hear(self, words: str) -> None:
        self.ended += "no longer" in words

    def _heard(self, event: LinkEvent) -> None:
        super()._heard(event)
        if isinstance(event, RepairFailed):
            self.not_compared.append(event.words)

    def carried(self, link: str) -> CarriedLink | None:
        return self._carried.get(link)


@dataclass
class LinkStage:
    main: RealSpace
    peer: HostilePeer
    worker: ObservedWorker
    reader: DirectAgent
    #: the worker's user at acme's broker
    user: str
    #: acme's user at main's broker, as it would be on acme's machine
    creds: Path
    #: by sender and id
    expected: dict[tuple[str, str], Expected] = field(default_factory=dict)
    #: sequences of main's log that hold what counts for nobody
    void: set[int] = field(default_factory=set)
    seen: list[Any] = field(default_factory=list)
    running: asyncio.Task[None] | None = None
    _names: Iterator[int] = field(default_factory=lambda: iter(range(1, 1_000_000)))

    @property
    def carried(self) -> CarriedLink:
        found = self.worker.carried(LINK)
        assert found is not None, "the link is not carried"
        return found

    @property
    def words(self) -> str:
        """Why the link does not go on; empty if it does."""
        return self.carried.direction.status().words

    def refusal(self) -> str:
        """The same, and why comparing failed: that is told once, and the link goes on."""
        return self.words or "".join(self.worker.not_compared[:1])

    def look(self, *, repair: bool = False) -> None:
        self.carried.direction.ask(repair=repair)

    # --- what is said honestly ---

    def text(self) -> str:
        return f"word {next(self._names)}"

    def honest(self, channel: str = "general", ours: str | None = None, **fields: Any) -> LinkedRecord:
        """A message that is to arrive; put into the peer's log."""
        (placed,) = self.peer.put(self.peer.say(self.text(), channel, **fields))
        return self.expect(placed, ours or channel)

    def expect(self, record: LinkedRecord, ours: str = "general") -> LinkedRecord:
        self.expected[record.sender, wire_message.decode(record.payload).id] = Expected(ours, record.payload)
        return record

    async def arrives(self, *records: LinkedRecord) -> None:
        """The reader reads them, live."""
        wanted = {wire_message.decode(each.payload).id for each in records}

        def all_seen() -> bool:
            if not (done := wanted <= {each.message.id for each in self.seen}):
                self.look()
            return done

        await eventually(all_seen, within=15, every=0.05, what=f"an honest message arrives ({self._state()})")

    async def recovers(self) -> None:
        """The peer is honest again: what it says arrives, and nothing is wrong any more."""
        self.peer.lies.clear()
        await self.arrives(said := self.honest())
        await self.handled(said.seq)
        await eventually(lambda: not self.words, what=f"the link goes on ({self._state()})")

    def _state(self) -> str:
        found = self.worker.carried(LINK)
        return str(found.direction.status()) if found is not None else "the link is not carried"

    # --- how it is here ---

    async def token(self) -> Token | None:
        return (await self.carried.ledger.link()).handled

    async def handled(self, seq: int) -> None:
        """Everything up to a sequence of the peer's log has its disposition."""

        async def is_handled() -> bool:
            self.look()
            token = await self.token()
            return token is not None and token.seq >= seq

        await eventually(is_handled, within=10, every=0.03, what=f"record {seq} is handled ({self._state()})")

    async def fates(self, seq: int) -> list[tuple[str, str]]:
        """What became of a record of the peer's log: (kind, reason), one of them."""
        query = "SELECT kind, reason FROM disposition WHERE link = ? AND life = 0 AND seq = ?"
        row = self.carried.ledger.row
        return await self.carried.ledger.read(lambda c: c.execute(query, (row, seq)).fetchall())

    async def quarantined(self) -> tuple[int, int]:
        """Records and bytes."""
        row = self.carried.ledger.row
        return await self.carried.ledger.read(lambda c: books.quarantined(c, row))

    async def arrived(self) -> list[Arrived]:
        """What links brought into main's log, whether or not it counts."""
        s = self.main.subjects
        found = []
        async with self.main.core() as js:
            head = (await js.info(s.log_stream))["state"]["last_seq"]
            async for records in js.read(s.log_stream, f"{s.root}.via.>", 1, head):
                for each in records:
                    parsed = s.parse(each.subject)
                    if isinstance(parsed, Via):
                        found.append(Arrived(each.seq, parsed.sender, parsed.channel, each.payload))
        return found

    async def strayed(self) -> str | None:
        """What is in main's log, or was read, and should not be; in words."""
        there, problems = Counter[tuple[str, str]](), []
        for each in await self.arrived():
            if each.seq in self.void:
                continue
            name = each.sender, _id_of(each.payload)
            there[name] += 1
            if self.expected.get(name) != Expected(each.channel, each.payload):
                problems.append(f"record {each.seq} of the log, in {each.channel}: {each.payload[:80]!r}")
            elif there[name] > 1:
                problems.append(f"record {each.seq} of the log is there twice")
        heard = [each for each in self.seen if each.origin and each.kind == "channel"]
        read = Counter((each.sender.id, each.message.id) for each in heard)
        problems += [f"{name[1]} was read {count} times" for name, count in read.items() if count > 1]
        problems += [f"{name[1]} was read, and should not have been" for name in read if name not in self.expected]
        return "; ".join(problems[:3]) + (f" and {len(problems) - 3} more" * (len(problems) > 3)) if problems else None

    async def make_void(self, payload: bytes) -> list[int]:
        """Where the log has these bytes: they may be there as long as nobody counts them."""
        found = [each.seq for each in await self.arrived() if each.payload == payload]
        self.void |= set(found)
        return found

    async def start_over(self) -> None:
        """After something that was not as it should be: another life of the peer's log, under another agreement, so
        that the next probe finds nothing of it."""
        self.peer.begin_anew()
        self.void |= {each.seq for each in await self.arrived()}
        self.expected.clear()
        await self.agree_anew()
        self.seen.clear()
        await self.recovers()

    # --- the agreement ---

    async def agree(self, *, wait: bool = True, **terms: Any) -> None:
        """Another link record, and the worker carries the link under it."""
        record = _record(self.peer.id, **terms)
        async with self.main.administer() as admin:
            row = (await Linker(admin).set(record)).row
        record = _record(self.peer.id, peer=row.peer or None, **terms)

        def is_carried() -> bool:
            found = self.worker.carried(LINK)
            return found is not None and found.definition.authority == authorization_epoch(record)

        if wait:
            await eventually(is_carried, what="the link is carried as it was agreed")

    async def agree_anew(self) -> None:
        """On the same for another time: nothing was handled under it."""
        await self.agree(until=int(time.time()) + 10**6 + next(self._names))

    async def end_link(self) -> None:
        async with self.main.administer() as admin:
            await Linker(admin).end(LINK)


async def lies_refused(
    stage: LinkStage, do: str, lies: dict[str, Any], *, repair: bool = False, expect: str = ""
) -> ProbeOutcome | list[str]:
    """Tell each lie; the token must not move, and words must say why. Answers them, or what was not refused."""
    said = []
    for name, lie in lies.items():
        await stage.recovers()
        before = await stage.token()
        stage.peer.lies[do] = lie
        stage.worker.not_compared.clear()
        stage.look(repair=repair)
        try:
            words = await eventually(stage.refusal, within=SAID, what="it is refused")
        except AssertionError:
            return broken(f"{name}: was taken for an answer ({await stage.strayed() or 'and nothing came of it'})")
        if (after := await stage.token()) != before:
            return broken(f"{name}: moved the token from {before} to {after}")
        if expect and expect not in words:
            return broken(f"{name}: refused in other words: {words}")
        said.append(words)
    await stage.recovers()
    if strayed := await stage.strayed():
        return broken(strayed)
    return said


def _id_of(payload: bytes) -> str:
    try:
        return wire_message.decode(payload).id
    except WireError:
        return ""


def _record(origin: str, **terms: Any) -> Link:
    given: dict[str, Any] = {"channels": CHANNELS, "shares": ("general",), "space": "acme", **terms}
    return Link(op="-", link=LINK, state="on", origin=origin, **given)


@asynccontextmanager
async def set_link_stage(root: Path) -> AsyncIterator[LinkStage]:
    """Two spaces below `root`; they are stopped at the end."""
    async with AsyncExitStack() as stack:
        acme = await stack.enter_async_context(real_space(root / "acme", name="acme", steward=False))
        main = await stack.enter_async_context(real_space(root / "main", name="main"))
        js = await stack.enter_async_context(acme.core())
        peer = HostilePeer(js.connection, acme.subjects, acme.info.id)
        await stack.enter_async_context(peer.answering())
        async with main.administer() as admin:
            made = await Linker(admin).set(_record(peer.id), make_peer=True)
        creds = root / "peer.creds"
        creds.touch(0o600)
        creds.write_text(made.creds)
        user = _let_in(acme, main)
        await main.add("reader", read=READ, post=READ)
        worker = ObservedWorker(main.home)
        running = await stack.enter_async_context(_running(worker))
        reader = connect_directly("main", name="reader", home=main.home.home, channels=READ, presence=False)
        await stack.enter_async_context(reader)
        stage = LinkStage(main, peer, worker, reader, user, creds, running=running)
        await stack.enter_async_context(_reading(stage))
        await eventually(lambda: worker.carried(LINK), what="the link is carried")
        await stage.recovers()
        yield stage


def _let_in(acme: RealSpace, main: RealSpace) -> str:
    """A user for main's worker at acme's broker, as acme's operator would make it."""
    keyring, key = Keyring.load(acme.home.keys), KeyPair.generate()
    token = keyring.peer_token(acme.subjects, key.id, LINK, iat=int(time.time()))
    told = PeerAccess(
        link=LINK, space=acme.info.name, id=acme.info.id, steward=acme.info.steward_key, url=acme.info.url
    )
    LinkPeers.below(main.home).put(told, jwt.credentials(token, key))
    return key.id


@asynccontextmanager
async def _running(worker: ObservedWorker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(worker.run())
    try:
        await eventually(lambda: worker.ready.is_set() or task.done(), what="the worker is ready")
        yield task
    finally:
        worker.stop()
        await asyncio.wait_for(task, 30)


@asynccontextmanager
async def _reading(stage: LinkStage) -> AsyncIterator[None]:
    async def read() -> None:
        async for each in stage.reader.messages():
            stage.seen.append(each)

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
